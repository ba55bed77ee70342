"""Seeded mutations of good files, some thousand of them, through everything that reads: an error in one sentence or a result.

Coverage-guided fuzzing for hours is `make fuzz` (benchmarks/fuzz.py). HOBBIT_FULL=1 tries ten times as many here.
"""

import collections
import importlib.util
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys

import pytest

import engine  # noqa: F401  libraries first
import llama_source
from gguf_tools import ggml, info
from gguf_tools.errors import GGUFError
from gguf_tools.reader import Reader
from hobbit_cpp._convert_plan import ConvertError, check_source, choose_types, describe, find_experts
from hobbit_cpp.convert import convert
from hobbit_cpp.verify import verify
from makers import make_model
from malformed import CATALOGUE, FORMS, LINKED, SIDECAR, Gguf, value
import malformed_pairs  # noqa: F401
from test_core import need_sanitizer

TIMES = 10 if os.environ.get("HOBBIT_FULL", "") not in ("", "0") else 1
SPECIAL = (0, 1, 2, 3, 31, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    source = make_model(folder / "source.gguf", n_layer=1, n_expert=2, d=64, ff=64)
    convert(source, folder / "pair.gguf", "keep", "q4_0", threads=1)
    convert(source, folder / "linked.gguf", "keep", "q4_0", link=True, threads=1)
    return folder


def number(rng):
    return rng.choice(SPECIAL) if rng.random() < 0.8 else rng.randrange(2**rng.choice((8, 16, 32, 64)))


def random_value(rng):
    kind = rng.choice([k for k in FORMS if k != "arr"])

    def one():
        if kind == "str":
            return rng.choice(("", "x", "main", "experts", "llama", "\u00e9" * 40, "a/b", "\0"))
        if kind in ("f32", "f64"):
            return rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf"), 0.5))
        bits = 8 * struct.calcsize(FORMS[kind][1])
        x = number(rng) % 2**bits
        return x - 2**bits if kind[0] == "i" and x >= 2**(bits - 1) else x
    return value(kind, [one() for _ in range(rng.choice((0, 1, 2, 7)))], rng.choice((None, None, 2**40))) if rng.random() < 0.3 else value(kind, one())


def mutate(good: bytes, rng) -> bytes:
    """By structure (a value, a name, a dimension, an order) or by bytes of the header."""
    if rng.random() < 0.4:
        data, end = bytearray(good), min(len(good), 12288)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(end)
            if rng.random() < 0.5:
                data[at] = rng.choice((0, 255, 128, rng.randrange(256), data[at] ^ 1))
            else:
                data[at:at + 8] = struct.pack("<Q", number(rng))[:rng.choice((4, 8))]
        return bytes(data[:rng.randrange(end)] if rng.random() < 0.1 else data)
    g = Gguf.parse(good)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        what = rng.randrange(8)
        key = rng.choice([*g.kv])
        t = rng.choice(g.tensors) if g.tensors else None
        if what == 0:
            g.kv[key] = random_value(rng)
        elif what == 1:
            del g.kv[key]
            g.kv = g.kv or {"general.architecture": value("str", "llama")}
        elif what == 2 and g.kv[key][:4] == struct.pack("<I", 4):  # a number, another one
            g.kv[key] = value("u32", number(rng) % 2**32)
        elif what == 3 and t and t.dims:
            t.dims[rng.randrange(len(t.dims))] = number(rng)
        elif what == 4 and t:
            t.type = rng.randrange(ggml.TYPE_COUNT + 2)
        elif what == 5 and t:
            rng.choice((lambda: g.tensors.remove(t), lambda: rng.shuffle(g.tensors), lambda: setattr(t, "offset", number(rng)), lambda: t.dims.append(1)))()
        elif what == 6 and t:
            t.name = rng.choice((t.name.replace(b".high", b".low"), t.name.replace(b"blk.0", b"blk.%d" % rng.choice((1, 7, 2**31))), rng.choice(g.tensors).name, b"x"))
        else:
            setattr(g, rng.choice(("version", "n_kv", "n_tensors")), number(rng) % 2**32)
    return g.build()


def plan(path):
    with Reader(path) as r:
        check_source(r)
        experts = find_experts(r)
        choose_types(r, experts, "<=q8_0", "q2_k", False, True)
        describe(r, experts)


def test_readers_in_python(made, tmp_path):
    ends = collections.Counter()
    shutil.copy(made / "source.gguf", tmp_path)
    for name in ("source", "pair", "pair.experts", "linked.experts"):
        good, path = (made / f"{name}.gguf").read_bytes(), tmp_path / "x.gguf"
        for seed in range(500 * TIMES):
            path.write_bytes(mutate(good, random.Random(f"{name} {seed}")))
            for call in (info.describe, info.summary, verify, plan):
                try:
                    call(str(path))
                    ends["fine"] += 1
                except (GGUFError, ggml.GGMLError, ConvertError) as error:
                    assert "\n" not in str(error), (name, seed)
                    ends["refused"] += 1
                except Exception as error:
                    pytest.fail(f"{name}, seed {seed}, {call.__name__}: {error!r}")
    assert ends["fine"] > 100 and ends["refused"] > 1000


# --- the library, in children ---

def child(folder, which, times):
    """In the child: mutants of one file through the probe of the C API, and some through Llama."""
    from hobbit_cpp import Llama, bindings
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    main = folder / ("linked.gguf" if which.startswith("linked") else "pair.gguf")
    path = folder / f"{which}.gguf"
    good, ends = path.read_bytes(), collections.Counter()
    for seed in range(1000 * times):
        path.write_bytes(mutate(good, random.Random(f"{which} {seed}")))
        print(json.dumps({"seed": seed}), flush=True)
        ends["probe", bindings.hobbit_probe(str(main).encode(), 0, bindings.hobbit_info()) == 0] += 1
        if seed % 8 == 0:
            try:
                with Llama(main, n_ctx=32, n_threads=1, n_threads_batch=1, verbose=False, cache_bytes="min") as llm:
                    llm.eval([1, 5])
                ends["Llama", True] += 1
            except (ValueError, RuntimeError) as error:
                assert "\n" not in str(error), error
                ends["Llama", False] += 1
    print(json.dumps({"ends": [[*k, n] for k, n in ends.items()]}), flush=True)


@pytest.mark.parametrize("which", ["pair", "pair.experts", "linked.experts"])
def test_the_library(made, tmp_path, which):
    for path in made.glob("*.gguf"):
        shutil.copy(path, tmp_path)
    p = subprocess.run([sys.executable, __file__, str(tmp_path), which, str(TIMES)], capture_output=True, timeout=600 * TIMES,
                       env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    last = [json.loads(line) for line in p.stdout.decode().splitlines()][-1]
    assert p.returncode == 0, f"{last}, ended with {p.returncode}: {p.stderr.decode()[-1500:]}"
    ends = {(a, b): n for a, b, n in last["ends"]}
    assert ends["probe", False] > 100 and ends["Llama", False] > 20 and ends["probe", True] > 20 and ends["Llama", True] > 0, ends


# --- the reader of sidecars under AddressSanitizer ---

def test_sidecar_reader_under_sanitizers(repo, made, tmp_path):
    spec = importlib.util.spec_from_file_location("fuzz", repo / "benchmarks" / "fuzz.py")
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    need_sanitizer("address,undefined", tmp_path)
    try:
        llama = llama_source.root("ggml/include", "ggml/src/gguf.cpp", "ggml/src/ggml-impl.h")
    except llama_source.NoSource as error:
        pytest.skip(str(error))
    program = fuzz.build_sidecar(tmp_path / "fuzz-sidecar", os.environ.get("CXX") or shutil.which("c++") or "g++", False, llama, "-O0")
    shutil.copy(made / "source.gguf", tmp_path)
    (tmp_path / "in").mkdir()
    for name, tables in (("pair.experts", (CATALOGUE, SIDECAR)), ("linked.experts", (LINKED,))):
        good = (made / f"{name}.gguf").read_bytes()
        with Reader(made / f"{name}.gguf") as r:
            head = r.files[0].data_offset
        for i, change in enumerate(c for table in tables for c in table.values()):
            (tmp_path / "in" / f"{name}{i}").write_bytes(change(Gguf.parse(good))[:head + 4096])
        (tmp_path / "in" / name).write_bytes(good[:head])
    inputs = sorted((tmp_path / "in").iterdir()) + sorted((repo / "benchmarks" / "fuzz-corpus" / "sidecar").iterdir())
    assert len(inputs) > 250
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=0:max_allocation_size_mb=1024", "UBSAN_OPTIONS": "print_stacktrace=1"}
    p = subprocess.run([program, "--runs", str(10 * TIMES), *inputs], cwd=tmp_path, capture_output=True, text=True, env=env, timeout=600)
    assert p.returncode == 0 and p.stdout == f"{len(inputs) * (1 + 10 * TIMES)} inputs\n", p.stdout + p.stderr[-4000:]


if __name__ == "__main__":
    child(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
