"""hobbit_cpp.Llama on the small model that comes along, converted; one computing thread, so that contention does no harm."""

import contextlib
import ctypes
import gc
import io
import json
import math
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from hobbit_cpp import HobbitError, Llama, memory
from hobbit_cpp.convert import convert

import llama_cpp

DATA = pathlib.Path(__file__).resolve().parent.parent / "hobbit_cpp" / "data"
SOURCE = DATA / "books-8x2-small-q8_0.gguf"
PROMPT = "The old man walked along the road"


@pytest.fixture(scope="session")
def dual(tmp_path_factory):
    """The small model with high q8_0 and low q2_k."""
    path = tmp_path_factory.mktemp("dual") / "small.gguf"
    convert(SOURCE, path, "keep", "q2_k", threads=1)
    return path


def load(path, **kwargs):
    return Llama(path, **{"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **kwargs})


def text(llm, n=24, prompt=PROMPT, **kwargs):
    return llm(prompt, max_tokens=n, temperature=0, **kwargs)["choices"][0]["text"]


@pytest.fixture(scope="module")
def stock_text():
    llm = llama_cpp.Llama(str(SOURCE), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    yield text(llm)
    llm.close()


def python(code, *args):
    """Run code in a fresh interpreter; its stdout. It must end well and say nothing on stderr."""
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, args)], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout


# --- the same as llama_cpp.Llama ---------------------------------------------------------------


def test_ordinary_file_behaves_as_stock(stock_text):
    with load(SOURCE) as llm:
        assert isinstance(llm, llama_cpp.Llama) and not llm.is_offloaded
        assert text(llm) == stock_text
        assert llm.offload_stats() == {"mode": "none", "model": str(SOURCE)}
        assert llm.last_stats["decode"]["evaluated"] == 23
        for use in (lambda: llm.thresholds, llm.set_hooks, llm.reset_offload_stats, lambda: llm.prefetch(0, 0)):
            with pytest.raises(HobbitError, match="is an ordinary GGUF"):
                use()


def test_all_high_gives_the_same_text(dual, stock_text):
    for cache in ("min", "25%", "100%"):
        with load(dual, t1=1.0, cache_bytes=cache) as llm:
            assert text(llm) == stock_text


def test_streaming_chat_embedding_and_state(dual):
    with load(dual, t1=1.0, cache_bytes="50%", chat_format="chatml") as llm:
        whole = text(llm)
        pieces = [c["choices"][0]["text"] for c in llm(PROMPT, max_tokens=24, temperature=0, stream=True)]
        assert len(pieces) > 5 and "".join(pieces) == whole
        reply = llm.create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0)
        assert reply["choices"][0]["message"]["role"] == "assistant"
        llm.reset()
        llm.eval(llm.tokenize(PROMPT.encode()))
        state, n = llm.save_state(), llm.n_tokens
        llm.eval([5])
        llm.load_state(state)
        assert llm.n_tokens == n
    with load(dual, embedding=True) as llm:
        assert len(llm.create_embedding("hello")["data"][0]["embedding"]) > 0


def test_draft_model(dual):
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    with load(dual, t1=1.0, cache_bytes="50%") as llm:
        plain = text(llm, 40)
    with load(dual, t1=1.0, cache_bytes="50%", draft_model=LlamaPromptLookupDecoding(num_pred_tokens=3)) as llm:
        assert text(llm, 40) == plain


# --- arguments -----------------------------------------------------------------------------------


def test_unknown_keyword(dual):
    with pytest.raises(TypeError, match="no argument 'cahce_bytes'; is 'cache_bytes' meant"):
        load(dual, cahce_bytes="8GiB")
    with pytest.raises(TypeError, match="'sidecar'"):
        load(dual, sidecar="x.gguf")


@pytest.mark.parametrize("name, value, error", [
    ("t1", "0.6", TypeError), ("t1", math.nan, ValueError), ("t1", -0.1, ValueError), ("t1", True, TypeError), ("t1", math.inf, ValueError),
    ("t1", None.__class__, TypeError), ("t2", "1", TypeError), ("t2", math.nan, ValueError), ("t2", 0.5, ValueError), ("t2", np.bool_(True), TypeError),
    ("cache_bytes", True, TypeError), ("cache_bytes", 1e9, TypeError), ("cache_bytes", -1, ValueError), ("cache_bytes", 2**70, ValueError),
    ("cache_bytes", "2 GBs", ValueError), ("cache_bytes", "0%", ValueError), ("cache_bytes", "101%", ValueError), ("cache_bytes", "nan%", ValueError),
    ("cache_bytes", "", ValueError), ("cache_bytes", b"8GiB", TypeError),
    ("policy", "LRU", ValueError), ("policy", 2, TypeError), ("policy_weights", [1, 1, 1], ValueError), ("policy_weights", [0, 0, 0, 0], ValueError),
    ("policy_weights", [1, 1, 1, -1], ValueError), ("policy_weights", "1111", TypeError), ("policy_weights", [1, 1, 1, "1"], TypeError),
    ("skip_mass", -0.1, ValueError), ("skip_mass", "all", TypeError), ("low_fraction", 1.1, ValueError), ("low_fraction", False, TypeError), ("n_io_threads", 0, ValueError), ("n_io_threads", 65, ValueError),
    ("n_io_threads", 4.0, TypeError), ("direct_io", 1, TypeError), ("force_miss", "no", TypeError),
    ("t1", 10**400, ValueError), ("cache_bytes", "9" * 400 + ".5GiB", ValueError), ("n_threads", 100_000, ValueError), ("n_threads_batch", 2.5, TypeError),
    ("n_batch", -4, ValueError), ("n_ubatch", 0, ValueError), ("type_k", 999, ValueError), ("kv_overrides", {5: 1}, TypeError), ("kv_overrides", ["x"], TypeError),
])
def test_wrong_values(dual, name, value, error):
    with pytest.raises(error, match=name) as info:
        load(dual, **{name: value})
    assert "\n" not in str(info.value)


def test_values_that_belong_together(dual):
    with pytest.raises(ValueError, match="t1 is 0.9 and t2 is 0.6"):
        load(dual, t1=0.9, t2=0.6)
    with pytest.raises(ValueError, match="policy_weights belong to policy 'hobbit'"):
        load(dual, policy="lru", policy_weights=[1, 1, 1, 1])
    with load(dual, t1=1, t2=0.5) as llm:  # t1 >= 1 turns the rule off, whatever t2 says
        assert llm.offload_stats()["mode"] == "high"


def test_thresholds_one_by_one(dual):
    with load(dual) as llm:
        llm.t1, llm.t2 = 0.4, 0.9
        assert llm.thresholds == (llm.t1, llm.t2) == (0.4, 0.9)
        with pytest.raises(ValueError, match="t2 must be at least t1"):
            llm.t2 = 0.1
    with pytest.raises(TypeError, match="give t1 and t2"):
        load(dual, thresholds=(0.4, 0.9))


def test_settings_in_force(dual):
    given = {"t1": np.float32(0.5), "t2": 0.75, "cache_bytes": "3MiB", "policy": "hobbit", "policy_weights": np.array([1, 2, 0, 0.5]), "low_fraction": 0.25,
             "n_io_threads": np.int64(2), "direct_io": False, "force_miss": True, "prefetch": np.int32(2), "prefetch_copy": "high", "prefetch_ranks": 3,
             "prefetch_prompts": False, "lean": np.float32(0.25)}
    with load(dual, **given) as llm:
        s = llm.offload_stats()
        assert s["settings"] == {"t1": 0.5, "t2": 0.75, "skip_mass": 1, "policy": "hobbit", "policy_weights": [1, 2, 0, 0.5], "low_fraction": 0.25, "n_io_threads": 2,
                                 "direct_io": False, "force_miss": True, "verify": False, "cache_bytes": "3MiB", "prefetch": 2, "prefetch_copy": "high",
                                 "prefetch_ranks": 3, "prefetch_prompts": False, "lean": 0.25, "profile": None, "miss": "fetch", "miss_speeds": None,
                                 "host_copies": False, "host_pinned": False, "unified_memory": False}
        assert s["budget"]["budget_bytes"] == 3 * 2**20
        assert s["mode"] == "mixed" and s["sidecar"] == str(dual.with_name("small.experts.gguf"))
        assert s["groups"][0]["low_slots"] > 1 and s["groups"][0]["backend"] == "CPU"
        text(llm)
        assert llm.offload_stats()["totals"]["hit_rate"] == 0
    with load(dual) as llm:
        assert llm.offload_stats()["settings"]["t1"] == 0.6 and llm.thresholds == (0.6, 1.0) and llm.policy == "hobbit"


def test_offload_argument_for_an_ordinary_file():
    for name, value in (("t1", 0.6), ("cache_bytes", "auto"), ("direct_io", True)):
        with pytest.raises(ValueError, match=f"is an ordinary GGUF: convert it first .*, or leave out {name}"):
            load(SOURCE, **{name: value})


@pytest.mark.parametrize("value, error", [(0, ValueError), (9, ValueError), (-1, ValueError), (2.0, TypeError), ("4", TypeError), (True, TypeError)])
@pytest.mark.parametrize("kind", ["dual", "ordinary"])
def test_wrong_number_of_used_experts(dual, kind, value, error):
    with pytest.raises(error, match="llama.expert_used_count.*1 to 8"):
        load(dual if kind == "dual" else SOURCE, kv_overrides={"llama.expert_used_count": value})


def test_number_of_used_experts(dual):
    with pytest.raises(ValueError, match="qwen3moe.expert_used_count has no effect"):
        load(dual, kv_overrides={"qwen3moe.expert_used_count": 2})
    floors = []
    for n in (1, 2, 8):
        with load(dual, kv_overrides={"llama.expert_used_count": n}, cache_bytes="min") as llm:
            text(llm, 4)
            s = llm.offload_stats()
            assert s["groups"][0]["n_expert_used"] == n
            assert s["totals"]["requests"] == n * s["totals"]["tokens"]
            floors.append(s["budget"]["floor_bytes"])
    assert floors == sorted(set(floors))


def test_context_that_cannot_fit(dual):
    for path in (dual, SOURCE):
        with pytest.raises(ValueError, match="n_ctx is 2000000000: its KV cache takes"):
            load(path, n_ctx=2_000_000_000)
        with pytest.raises(ValueError, match="n_ctx"):
            load(path, n_ctx=-1)
        with pytest.raises(ValueError, match="quantized V cache requires flash_attn"):
            load(path, type_v=8)


def test_context_that_llama_cpp_rounds_up(dual):
    """It takes whole blocks of 256; llama_cpp.Llama's arrays do not."""
    for kwargs in ({}, {"logits_all": True}):
        with load(dual, n_ctx=32, **kwargs) as llm:
            assert llm.n_ctx() == 256
            assert text(llm, 8, prompt="word " * 60)
            with pytest.raises(ValueError, match="exceed context window of 256"):
                text(llm, 8, prompt="word " * 300)


# --- the budget ----------------------------------------------------------------------------------


def test_budget_below_the_floor_states_it(dual):
    with load(dual, cache_bytes="min") as llm:
        floor = llm.offload_stats()["budget"]["floor_bytes"]
        assert llm.offload_stats()["budget"]["budget_bytes"] == floor
        text(llm, 4, prompt="word " * 200)  # serves a long prompt
    for cache in (0, 1, floor - 1, "1%"):
        with pytest.raises(ValueError, match=rf"small.gguf: cache_bytes is \d+, .*need {floor} bytes"):
            load(dual, cache_bytes=cache)
    with load(dual, cache_bytes=floor) as llm:
        text(llm, 4)


def test_auto_takes_everything_where_there_is_room(dual):
    with load(dual) as llm:
        g = llm.offload_stats()["groups"][0]
        assert g["high_slots"] == g["n_layers"] * g["n_expert"]


def test_auto_in_a_small_machine(dual, monkeypatch):
    small = memory.Readings(2**30, 2**30, 0, (memory.Group("g", 2**30, 2**30 - 150 * memory.MIB, 0),))
    monkeypatch.setattr(memory, "read_memory", lambda: small)
    with pytest.warns(RuntimeWarning, match="cache_bytes='auto'.* one step can need"):
        llm = load(dual)
    b = llm.offload_stats()["budget"]
    assert b["budget_bytes"] == b["floor_bytes"]
    llm.close()


def test_bytes_read_differ_between_budgets(dual):
    read = []
    for cache in ("min", "25%", "100%"):
        with load(dual, cache_bytes=cache) as llm:
            text(llm, 40)
            s = llm.offload_stats()
            read.append(s["totals"]["bytes_read"])
            b = s["budget"]
            assert b["slot_bytes"] + b["staging_bytes"] + b["record_bytes"] <= b["budget_bytes"]
    assert read[0] > read[1] > read[2]


# --- files -----------------------------------------------------------------------------------------


def test_paths(dual, tmp_path, monkeypatch):
    folder = tmp_path / "a folder é 日"
    folder.mkdir()
    for name in ("small.gguf", "small.experts.gguf"):
        os.link(dual.with_name(name), folder / name)
    monkeypatch.chdir(folder)
    for path in (folder / "small.gguf", str(folder / "small.gguf"), os.fsencode(folder / "small.gguf"), "small.gguf", pathlib.Path("small.gguf")):
        load(path).close()
    with pytest.raises(ValueError, match="not valid UTF-8"):
        load("bad\udcff.gguf")
    for path, error in ((5, TypeError), (None, TypeError), ("nothing.gguf", ValueError), (folder, ValueError), ("a\0b", ValueError)):
        with pytest.raises(error):
            load(path)


def test_damaged_files(dual, tmp_path):
    main, side = tmp_path / "small.gguf", tmp_path / "small.experts.gguf"
    shutil.copy(dual, main)
    with pytest.raises(ValueError, match="its sidecar .*small.experts.gguf is missing"):
        load(main)
    shutil.copy(dual.with_name(side.name), side)
    with pytest.raises(ValueError, match="small.experts.gguf: is a sidecar: name the main file"):
        load(side)
    os.truncate(side, side.stat().st_size - 4096)
    with pytest.raises(ValueError, match="small.experts.gguf is truncated"):
        load(main)
    main.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ValueError, match="small.gguf"):
        load(main)
    (tmp_path / "text.gguf").write_text("Hello")
    with pytest.raises(ValueError, match="text.gguf is not a GGUF file"):
        load(tmp_path / "text.gguf", t1=0.5)


def test_failed_lora(dual):
    with pytest.raises(ValueError, match="/nonexistent does not exist"):
        load(dual, lora_path=pathlib.Path("/nonexistent"))


def test_read_error_while_running(dual, tmp_path):
    for name in ("small.gguf", "small.experts.gguf"):
        shutil.copy(dual.with_name(name), tmp_path)
    side = tmp_path / "small.experts.gguf"
    data = side.read_bytes()
    with load(tmp_path / "small.gguf", t1=1.0, cache_bytes="min") as llm:
        good = text(llm)
        os.truncate(side, 200_000)
        with pytest.raises(HobbitError, match=r"small.experts.gguf: reading \d+ bytes at offset \d+ failed: the file ends after"):
            text(llm, prompt="Quite another beginning of a story")
        with open(side, "r+b") as f:
            f.write(data)
        assert text(llm) == good


# --- more than one, and the end ------------------------------------------------------------------------


def test_two_at_once(dual):
    with load(dual, cache_bytes="25%") as a:
        alone_a = text(a, 30)
    with load(dual, cache_bytes="min", t1=1.0) as b:
        alone_b = text(b, 30)
    a, b = load(dual, cache_bytes="25%"), load(dual, cache_bytes="min", t1=1.0)
    texts = {}
    threads = [threading.Thread(target=lambda n, m: texts.__setitem__(n, text(m, 30)), args=x) for x in (("a", a), ("b", b))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert texts == {"a": alone_a, "b": alone_b}
    assert a.thresholds == (0.6, 1.0) and b.thresholds == (1.0, 1.0)
    assert a.offload_stats()["budget"] != b.offload_stats()["budget"]
    a.close()
    assert text(b, 30) == alone_b
    b.close()


def test_everything_after_close_is_an_error(dual):
    llm = load(dual)
    stream = llm(PROMPT, stream=True, max_tokens=8)
    next(stream)
    llm.close()
    llm.close()
    for use in (lambda: next(stream), lambda: llm("x"), lambda: llm.tokenize(b"x"), lambda: llm.detokenize([1]), lambda: llm.n_ctx(), lambda: llm.ctx,
                lambda: llm.offload_stats(), lambda: llm.thresholds, lambda: llm.embed("x"), lambda: llm.save_state(), lambda: llm.eval([1]),
                lambda: llm.create_chat_completion([{"role": "user", "content": "x"}]), lambda: llm.set_hooks(), lambda: llm.tokenizer().tokenize(b"x")):
        with pytest.raises(RuntimeError, match="was closed"):
            use()


def test_numpy_values_are_settings(dual):
    with load(dual, cache_bytes=np.int64(9_000_000), host_copies=np.bool_(False), t1=np.float32(0.5)) as llm:
        json.dumps(llm.offload_stats())
    with pytest.raises(ValueError, match="miss='cpu' computes from copies"):
        load(dual, host_copies=np.bool_(False), miss="cpu")


def test_where_all_fit_nothing_is_lossy_and_each_is_read_once(dual):
    with load(dual, cache_bytes="100%") as probe:
        everything = probe.offload_stats()["budget"]
    with load(dual, cache_bytes=everything["high_bytes"] + everything["floor_bytes"], t1=0.3, t2=0.6) as llm, load(dual, cache_bytes="min", t1=1.0) as high:
        assert text(llm, 60) == text(high, 60)
        totals = llm.offload_stats()["totals"]
        assert totals["wanted_low"] and totals["wanted_skip"]
        assert totals["skips"] == totals["evictions"] == totals["loads_low"] == totals["hits_low"] == 0 and totals["bytes_read"] <= everything["high_bytes"]


def test_pickle_brings_the_settings_back(dual):
    with load(dual, policy_weights=[1, 2, 3, 4]) as llm:
        llm.set_policy("lru")
        with pickle.loads(pickle.dumps(llm)) as twin:
            assert twin.policy == "lru"
        llm.set_policy("hobbit")
        with pickle.loads(pickle.dumps(llm)) as twin:
            assert twin.offload_stats()["settings"]["policy_weights"] == llm.offload_stats()["settings"]["policy_weights"] == [1, 2, 3, 4]
    with load(dual, t1=0.5, cache_bytes="30%", policy="lcu", n_io_threads=2) as llm:
        llm.thresholds = (0.25, 0.5)
        with pickle.loads(pickle.dumps(llm)) as twin:
            a, b = llm.offload_stats(), twin.offload_stats()
            assert twin.is_offloaded and twin.thresholds == (0.25, 0.5)
            assert {k: a[k] for k in ("settings", "budget", "sidecar")} == {k: b[k] for k in ("settings", "budget", "sidecar")}
            assert text(twin, 8) == text(llm, 8)
    with load(SOURCE) as llm, pickle.loads(pickle.dumps(llm)) as twin:
        assert not twin.is_offloaded


def usage():
    """Resident bytes, open files, threads; without what malloc keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    status = pathlib.Path("/proc/self/status").read_text()
    rss = int(status.split("VmRSS:")[1].split()[0]) * 1024
    return rss, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_nothing_is_left_behind(dual, tmp_path):
    def once():
        with load(dual, cache_bytes="50%") as llm:
            text(llm, 2)
        with contextlib.suppress(ValueError):
            load(dual, cache_bytes=1)
        with contextlib.suppress(ValueError):
            load(dual, type_v=8)

    for _ in range(3):
        once()
    before = usage()
    for _ in range(20):
        once()
    after = usage()
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 20 * memory.MIB


def test_exit_without_close_is_quiet(dual):
    python("""
        import sys
        from hobbit_cpp import Llama
        llm = Llama(sys.argv[1], n_threads=1, n_threads_batch=1, verbose=False)
        llm.set_hooks(event=lambda *_: None)
        stream = llm("Once", stream=True, max_tokens=8)
        next(stream)
    """, dual)


def test_no_stdout_and_no_stderr(dual):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        load(dual, verbose=True).close()
    line = [x for x in err.getvalue().splitlines() if x.startswith("hobbit: ")]
    assert len(line) == 1
    for part in ("mixed precision", "small.experts.gguf", "high (q8_0)", "low (q2_K) slots on CPU", "budget", "T1 0.6, T2 1"):
        assert part in line[0]
    python("""
        import os, sys
        sys.stdout = sys.stderr = None
        from hobbit_cpp import Llama
        Llama(sys.argv[1], n_threads=1, n_threads_batch=1, verbose=True)("Once", max_tokens=2)
    """.replace("verbose=True", "verbose=False"), dual)
