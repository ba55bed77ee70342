"""Files, adapters and habits that broke programs of this kind for somebody: an error in one sentence, never a signal.

What concerns one part only is tested with that part; here is what goes through Llama. HOBBIT_FULL=1 tries ten times as many mutations.
"""

import json
import locale
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

import engine
import llama_cpp
from gguf_tools.writer import StreamWriter
from hobbit_cpp import Llama
from makers import make_model
from test_llama import SOURCE, load, python, text

FULL = os.environ.get("HOBBIT_FULL", "") not in ("", "0")


@pytest.fixture(scope="module")
def dual():
    return engine.pair(SOURCE, "q2_k")


@pytest.fixture
def pair(dual, tmp_path):
    """(main file, sidecar) to be damaged."""
    names = dual.name, dual.name.replace(".gguf", ".experts.gguf")
    return tuple(pathlib.Path(shutil.copy(dual.with_name(n), tmp_path)) for n in names)


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["main", "sidecar"])
@pytest.mark.parametrize("size", ["one byte less", "half", "nothing"])
def test_a_download_that_was_cut(pair, which, size):
    path = pair[which]
    whole = path.stat().st_size
    os.truncate(path, {"one byte less": whole - 1, "half": whole // 2, "nothing": 0}[size])
    with pytest.raises(ValueError, match=path.name.replace(".", r"\.")) as info:
        load(pair[0])
    assert "\n" not in str(info.value)


WEB_PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>" * 50
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"


@pytest.mark.parametrize("which", [0, 1], ids=["main", "sidecar"])
@pytest.mark.parametrize("what", ["web page", "pointer", "big endian", "folder", "pipe"])
def test_something_else_under_the_name(pair, which, what):
    path = pair[which]
    data = path.read_bytes()
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)  # nobody writes: it must not be waited for
    else:
        path.write_bytes({"web page": WEB_PAGE, "pointer": POINTER, "big endian": data[:4] + data[4:8][::-1] + data[8:]}[what])
    done = subprocess.run([sys.executable, "-m", "hobbit_cpp", "run", str(pair[0]), "-p", "x", "-n", "1", "--threads", "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and path.name in last and "Traceback" not in done.stderr


MUTATE = """
    import collections, json, os, pathlib, random, sys
    from hobbit_cpp import Llama
    main, target, header, n = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    good = target.read_bytes()
    header, ends = min(header, len(good)), collections.Counter()
    for seed in range(n):
        rng, data = random.Random(seed), bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(header)
            data[at] = rng.choice((0, 255, 128, rng.randrange(256), data[at] ^ 1))
        target.write_bytes(data)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                Llama(main, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, cache_bytes="50%")("Once", max_tokens=1)
            except (ValueError, RuntimeError):
                os._exit(1)
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 2)
        status = os.waitpid(child, 0)[1]
        ends[status] += 1
        if status not in (0, 256):
            print("seed", seed, "ended with", status)
    print(json.dumps(ends))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.parametrize("which, header", [(0, 65536), (1, 12288)], ids=["main", "sidecar"])
def test_mutated_headers_are_loaded_or_refused(pair, which, header):
    ends = python(MUTATE, pair[0], pair[which], header, 600 if FULL else 60).splitlines()
    assert len(ends) == 1 and set(json.loads(ends[0])) == {"0", "256"}, ends


def test_a_token_that_is_there_twice(tmp_path):
    """llama.cpp's own answer is an abort."""
    path = make_model(tmp_path / "m.gguf", extra=[("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>"] + ["a", "b", "a\0c"] + [f"t{i}" for i in range(256)], "str")])
    with pytest.raises(ValueError, match="m.gguf is damaged: the token 'a' is in its vocabulary twice"):
        load(path)


@pytest.mark.parametrize("alignment", [16, 64, 4096])
def test_alignments(tmp_path, alignment):
    from hobbit_cpp.convert import convert
    kinds = {"n_layer": 1, "extra": [("general.description", "x" * 37, "str")]}
    said = []
    for a in (32, alignment):
        source = make_model(tmp_path / f"{a}.gguf", alignment=a, **kinds)
        convert(source, tmp_path / f"{a}-dual.gguf", "keep", "q4_0", threads=1)
        for path, more in ((source, {}), (tmp_path / f"{a}-dual.gguf", {"t1": 1.0})):
            with load(path, logits_all=True, **more) as llm:
                llm.eval([1, 5, 9])
                said.append(llm.scores[:3].copy())
    assert all(np.array_equal(x, said[0]) for x in said)


# --- adapters ------------------------------------------------------------------------------------


def make_lora(path, name, experts=()):
    """Rank 4, of a matrix of 256 x 256, large enough to be seen in the text."""
    shapes = {f"{name}.lora_a": (256, 4, *experts), f"{name}.lora_b": (4, 256, *experts)}
    with StreamWriter(path, "llama") as w:
        for key, value, kind in (("general.type", "adapter", "str"), ("adapter.type", "lora", "str"), ("adapter.lora.alpha", 4.0, "f32")):
            w.add(key, value, kind)
        for n, shape in shapes.items():
            w.add_tensor(n, shape, "f32")
        w.begin_data()
        for n, shape in shapes.items():
            rows = int(np.prod(shape[1:]))
            w.write(n, 0, np.random.default_rng(0).standard_normal((rows, shape[0]), dtype=np.float32) * np.float32(0.3))
    return path


def test_adapters(dual, tmp_path):
    residents = make_lora(tmp_path / "residents.gguf", "blk.0.attn_output.weight")
    stock = llama_cpp.Llama(str(SOURCE), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, lora_path=str(residents))
    expected = text(stock)
    stock.close()
    with load(dual, t1=1.0) as llm:
        assert text(llm) != expected
    with load(dual, t1=1.0, lora_path=residents) as llm:
        assert text(llm) == expected
    for experts in (8, 4):  # right, and wrong in number
        adapter = make_lora(tmp_path / f"{experts}.gguf", "blk.0.ffn_up_exps.weight", (experts,))
        with pytest.raises(RuntimeError, match="'blk.0.ffn_up_exps.weight' changes offloaded experts.*merge the adapter before converting"):
            load(dual, lora_path=adapter)


def test_adapters_and_the_garbage_collector(dual, tmp_path):
    """llama_cpp frees the adapter of a model that the collector may have freed before."""
    code = """
import gc, sys
from hobbit_cpp import Llama
for _ in range(6):
    Llama(sys.argv[1], n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, lora_path=sys.argv[2])
    gc.collect()
"""
    adapter = make_lora(tmp_path / "a.gguf", "blk.0.attn_output.weight")
    assert subprocess.run([sys.executable, "-c", code, str(dual), str(adapter)], stderr=subprocess.DEVNULL, timeout=60).returncode == 0


# --- habits --------------------------------------------------------------------------------------


def test_nothing_is_read_before_the_first_prompt(dual):
    with load(dual, cache_bytes="50%") as llm:
        s = llm.offload_stats()
        assert s["totals"]["bytes_read"] == 0 and s["totals"]["requests"] == 0 and s["groups"][0]["high_resident"] == 0


def test_the_same_pair_twice_and_one_is_closed_meanwhile(dual):
    a, b = load(dual, t1=1.0, cache_bytes="min"), load(dual, t1=1.0, cache_bytes="50%")
    expected, result, begun = text(b, 60), [], threading.Event()
    b.reset()
    b.set_hooks(event=lambda *_: begun.set())
    thread = threading.Thread(target=lambda: result.append(text(b, 60)))
    thread.start()
    assert begun.wait(30)
    a.close()
    thread.join(60)
    assert result == [expected]
    b.close()


def test_draft_and_target_have_a_cache_each(dual):
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Draft(LlamaDraftModel):
        def __init__(self, llm):
            self.llm = llm

        def __call__(self, input_ids, /, **kwargs):
            tokens = []
            for token in self.llm.generate(list(map(int, input_ids)), temp=0.0):
                tokens.append(token)
                if len(tokens) == 3:
                    return np.array(tokens, dtype=np.intc)

    with load(dual, t1=1.0, cache_bytes="50%") as llm:
        expected = text(llm, 30)
    with load(dual, t1=0.0, cache_bytes="min") as small, load(dual, t1=1.0, cache_bytes="50%", draft_model=Draft(small)) as llm:
        assert text(llm, 30) == expected
        mine, its = llm.offload_stats(), small.offload_stats()
        assert mine["mode"] == "high" and its["mode"] == "mixed" and its["totals"]["requests"] > 0 and mine["budget"] != its["budget"]
        assert its["totals"]["wanted_low"] > 0 == mine["totals"]["wanted_low"]


def test_context_of_the_model(dual):
    with load(dual, n_ctx=0) as llm:
        assert llm.n_ctx() == 512 and text(llm, 4)


def test_decimal_commas(dual):
    before = locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "de_DE.utf8"):
        try:
            locale.setlocale(locale.LC_ALL, name)
            break
        except locale.Error:
            continue
    else:
        pytest.skip("no locale with a decimal comma is installed")
    try:
        with Llama(dual, t1=0.25, t2=0.75, cache_bytes="1.5MiB", n_ctx=64, verbose=False) as llm:
            s = llm.offload_stats()
            assert llm.thresholds == (0.25, 0.75) and s["budget"]["budget_bytes"] == 3 * 2**19 and "0.25" in json.dumps(s)
    finally:
        locale.setlocale(locale.LC_ALL, before)
