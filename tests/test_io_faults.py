"""Storage that fails under a loaded model, and memory that runs out: faulty_io.c stands in for reads of the C library and for C++'s operator
new in a process of its own.

Whatever happens, a call raises one sentence or gives the text that it should; the object stays usable, and once the storage is well
the text is stock llama.cpp's again.
"""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

import engine
from test_llama import PROMPT, SOURCE, text

HERE = pathlib.Path(__file__).parent

PRELUDE = """
    import ctypes, errno, json, os, signal, sys, threading, time
    from hobbit_cpp import HobbitError, Llama
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"].split()[-1])
    shim.memory_left.restype = ctypes.c_long
    ERROR, SHORT, INTERRUPT, DELAY, END = range(1, 6)

    def fault(kind, number=0, ms=0, first=0, end=1 << 60, before=0, times=-1, part=".experts.gguf"):
        shim.faults_set(part.encode(), kind, number, ms, ctypes.c_long(first), ctypes.c_long(end), before, times)

    def load(**more):
        return Llama(sys.argv[1], **{"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "cache_bytes": "min", "t1": 1.0, "host_copies": False, **more})

    def text(llm, n=12, prompt="The old man walked along the road"):
        llm.reset()
        return llm(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]

    def data():
        # where the experts begin in the sidecar
        from gguf_tools.reader import Reader
        with Reader(sys.argv[1].replace(".gguf", ".experts.gguf")) as reader:
            return reader.files[0].data_offset

    said = {}
    def note(name, use):
        try:
            said[name] = [use(), shim.faults_hits()]
        except Exception as error:
            said[name] = [type(error).__name__ + ": " + str(error), shim.faults_hits()]
"""


@pytest.fixture(scope="module")
def dual():
    return engine.pair(SOURCE, "q2_k")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Runs Python code in a process whose reads can be made to fail; gives what it put into `said`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform != "linux":
        pytest.skip("needs a C compiler and LD_PRELOAD")
    shim = tmp_path_factory.mktemp("shim") / "faulty_io.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-fexceptions", "-o", shim, HERE / "faulty_io.c", "-ldl", "-l:libstdc++.so.6"], check=True)
    preload = f"{os.environ.get('LD_PRELOAD', '')} {shim}".strip()  # behind a sanitizer's runtime

    def run(code, *args):
        program = textwrap.dedent(PRELUDE) + textwrap.dedent(code) + "\nprint(json.dumps(said))\n"
        done = subprocess.run([sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True, timeout=120, env={**os.environ, "LD_PRELOAD": preload})
        noise = [line for line in done.stderr.splitlines() if not line.startswith("gguf_init_from_")]  # llama.cpp's own word on a file
        assert (done.returncode, noise) == (0, []), done.stdout + done.stderr
        return json.loads(done.stdout)
    return run


@pytest.fixture(scope="module")
def stock():
    import llama_cpp
    llm = llama_cpp.Llama(str(SOURCE), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    yield text(llm, 12, PROMPT)
    llm.close()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_reads_that_fail_while_it_runs(faulty, dual, stock, direct):
    said = faulty("""
        llm = load(direct_io=sys.argv[2] == "True")
        for name, kind in {"EIO": dict(kind=ERROR, number=errno.EIO), "device gone": dict(kind=ERROR, number=errno.ENODEV), "stale": dict(kind=ERROR, number=errno.ESTALE),
                           "interrupted": dict(kind=INTERRUPT), "slow": dict(kind=DELAY, ms=5), "end": dict(kind=END), "short": dict(kind=SHORT),
                           "once, later": dict(kind=ERROR, number=errno.EIO, before=40, times=1)}.items():
            fault(**kind)
            note(name, lambda: text(llm))
            shim.faults_off()
            note(name + ", retry", lambda: text(llm))
        fault(ERROR, errno.EIO, first=data(), end=data() + 4096)  # one page, of the first expert
        note("a bad page", lambda: text(llm, 100))
        shim.faults_off()
        note("a bad page, retry", lambda: text(llm))
    """, dual, direct)
    hits = {name: n for name, (_, n) in said.items() if not name.endswith("retry")}
    assert all(hits.values()), hits
    for name, (got, _) in said.items():
        if name.endswith("retry") or name in ("interrupted", "slow", "short"):
            assert got == stock, name
    side = str(dual).replace(".gguf", ".experts.gguf")
    for name, why in {"EIO": os.strerror(errno.EIO), "device gone": os.strerror(errno.ENODEV), "stale": os.strerror(errno.ESTALE), "once, later": os.strerror(errno.EIO),
                      "a bad page": os.strerror(errno.EIO), "end": "the file ends after"}.items():
        got = said[name][0]
        assert got.startswith(f"HobbitError: {side}: reading ") and f" failed: {why}" in got and "\n" not in got, (name, got)


def test_reads_that_fail_while_it_loads(faulty, dual):
    said = faulty("""
        main, side = os.path.basename(sys.argv[1]), os.path.basename(sys.argv[1]).replace(".gguf", ".experts.gguf")
        for part in (main, side):
            for name, kind in {"EIO": dict(kind=ERROR, number=errno.EIO), "end": dict(kind=END)}.items():
                for before in (0, 1, 4):
                    fault(**kind, before=before, part=part)
                    note(f"{part} {name} {before}", lambda: load().close())
        shim.faults_off()
        fault(ERROR, errno.EIO, first=data() + (1 << 20))  # beyond what is read with the header
        note("copies", lambda: load(host_copies=True).close())
        shim.faults_off()
        note("well", lambda: bool(text(load())))
    """, dual)
    assert said.pop("well")[0] is True
    assert said.pop("copies")[0].startswith("ValueError: ")
    for name, (got, hits) in said.items():
        assert got is None if not hits else got.startswith(("ValueError: ", "GGUFError: ", "RuntimeError: ")) and "gguf" in got and "\n" not in got, (name, got, hits)
    print(*said.items(), sep="\n")
    assert sum(hits > 0 for _, hits in said.values()) >= 6


def test_ctrl_c_and_others_while_the_storage_hangs(faulty, dual):
    """Reads that take five seconds each: whoever wants the call to end need not wait for one."""
    said = faulty("""
        llm, began = load(), time.monotonic()
        expected = text(llm)
        def late(stop):
            fault(DELAY, ms=5000)
            at = []
            timer = threading.Timer(0.5, lambda: (at.append(time.monotonic()), stop()))
            timer.start()
            llm.reset()
            try:
                llm("word " * 300, max_tokens=1)
            except BaseException as error:
                took = time.monotonic() - at[0]
                return [type(error).__name__, took]
            finally:
                shim.faults_off()
        note("signal", lambda: late(lambda: os.kill(os.getpid(), signal.SIGINT)))
        llm.set_hooks(event=lambda *_: None)  # the first Python code to run after the signal
        note("signal with hooks", lambda: late(lambda: os.kill(os.getpid(), signal.SIGINT)))
        llm.set_hooks()
        note("cancel", lambda: late(llm.cancel))
        stop = []
        llm.set_abort(lambda: bool(stop))
        note("abort", lambda: late(lambda: stop.append(1)))
        stop.clear()
        def refuse():
            if stop:
                raise KeyError("mine")
        llm.set_abort(refuse)
        note("raises", lambda: late(lambda: stop.append(1)))
        llm.set_abort(None)
        note("same", lambda: text(llm) == expected)
        note("close", lambda: late(llm.close))
        note("all", lambda: time.monotonic() - began)
    """, dual)
    kinds = {name: got[0] for name, (got, _) in said.items() if isinstance(got, list)}
    assert kinds == {"signal": "KeyboardInterrupt", "signal with hooks": "KeyboardInterrupt", "cancel": "Cancelled", "abort": "Cancelled", "raises": "KeyError", "close": "RuntimeError"}
    assert said["same"][0] is True
    print({name: round(got[1], 3) for name, (got, _) in said.items() if isinstance(got, list)})
    assert max(got[1] for name, (got, _) in said.items() if isinstance(got, list)) < 5  # of a read; alone on a machine it is 0.05 s


def test_no_memory_for_a_plan(faulty, dual, stock):
    """Each allocation of the engine between two hooks in its turn: one sentence, and the next call is as ever."""
    if os.environ.get("LD_PRELOAD"):
        pytest.skip("another library has its operator new before ours, as sanitizers do")
    said = faulty("""
        for more in {"cache_bytes": "40%"}, {"cache_bytes": "40%", "policy": "follow", "prefetch": 2}:
            llm, k, met = load(**more), 0, True
            while met:
                k, armed = k + 1, []
                def select(*_):
                    if not armed:
                        armed.append(1)
                        shim.memory_refuse(ctypes.c_long(k))
                def prefetch(*_):  # the layer is planned, its loads are queued
                    armed.append(shim.memory_left())
                    shim.memory_refuse(ctypes.c_long(0))
                llm.set_hooks(select=select, prefetch=prefetch)
                note(f"{sorted(more)} {k}", lambda: text(llm))
                met = len(armed) == 1 or armed[1] == 0
                llm.set_hooks()
                note(f"{sorted(more)} {k}, retry", lambda: text(llm))
    """, dual)
    failed = 0
    for name, (got, _) in said.items():
        failed += got == "HobbitError: no memory left"
        assert got in (stock, "HobbitError: no memory left") if not name.endswith("retry") else got == stock, (name, got)
    assert failed > 10, said
