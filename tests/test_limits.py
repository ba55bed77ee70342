"""Limits of the process: too little memory, too few files, no locked memory, a control group. One sentence, never a signal."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

import engine
from hobbit_cpp import memory
from hobbit_cpp.memory import GIB, MIB, Group, Readings
from test_llama import SOURCE, load, text

resource = pytest.importorskip("resource", reason="limits of a process are POSIX")


@pytest.fixture(scope="module")
def dual():
    return engine.pair(SOURCE, "q2_k")


# --- memory --------------------------------------------------------------------------------------


def test_a_budget_beyond_a_control_group(dual, monkeypatch):
    group = Group("/sys/fs/cgroup/box", 12 * MIB, 2 * MIB, 0)
    monkeypatch.setattr(memory, "read_memory", lambda: Readings(64 * GIB, 32 * GIB, 0, (group,)))
    for more in ({"cache_bytes": "100%"}, {"cache_bytes": "1TiB"}, {"cache_bytes": "min", "host_copies": True}):
        with pytest.raises(ValueError, match="the limit of the control group /sys/fs/cgroup/box is 12.0 MiB: give less, or 'auto'") as info:
            load(dual, **more)
        assert "\n" not in str(info.value)
    monkeypatch.setattr(memory, "read_memory", lambda: Readings(64 * GIB, 4 * MIB, 0, ()))
    with pytest.warns(RuntimeWarning, match="only 4.0 MiB are available now"), load(dual, cache_bytes="50%") as llm:
        assert text(llm, 2)
    monkeypatch.setattr(memory, "read_memory", lambda: Readings(8 * MIB, 8 * MIB, 0, ()))
    with pytest.raises(ValueError, match="this machine has 8.0 MiB"):
        load(dual, cache_bytes="50%")


IN_GROUP = """
    import sys
    with open(sys.argv[2], "w") as f:
        f.write("0")
    from hobbit_cpp import Llama
    def use(**more):
        try:
            with Llama(sys.argv[1], n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, **more) as llm:
                print(len(llm("Once", max_tokens=4)["choices"]))
        except ValueError as error:
            print(error)
    use(cache_bytes="min", host_copies=True, n_batch=64)
    use(cache_bytes="auto", n_batch=64)
"""


def test_a_real_control_group(dual, repo):
    """Tighter than the pair with all copies in memory; "auto" fits into it."""
    spec = importlib.util.spec_from_file_location("_cgroup", repo / "benchmarks" / "_cgroup.py")
    cgroup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cgroup)
    try:
        group = cgroup.MemoryCgroup(f"hobbit-test-{os.getpid()}", 300 * MIB)
    except (cgroup.CgroupError, OSError) as error:
        pytest.skip(str(error))
    with group:
        big = engine.cache_dir() / "in-group.gguf"
        from makers import make_model
        make_model(big, "qwen3moe", n_layer=4, n_expert=64, n_used=4, ff=1024, types="f16")  # 384 MiB of experts
        pair = engine.pair(big, "q4_0")
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(IN_GROUP), str(pair), group.procs], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0 and group.oom_kills() == 0, done.stdout + done.stderr
        first, second = done.stdout.splitlines()
        assert "the limit of the control group" in first and "300.0 MiB: give less, or 'auto'" in first and second == "1"


# --- the process's own limits ---------------------------------------------------------------------

LIMITED = """
    import json, os, resource, sys
    from hobbit_cpp import HobbitError, Llama
    what, values = getattr(resource, sys.argv[2]), json.loads(sys.argv[3])
    more = json.loads(sys.argv[4])
    ends = {}
    for value in values:
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(out)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if what == resource.RLIMIT_AS:
                value += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            if what == resource.RLIMIT_NOFILE:
                value += len(os.listdir("/proc/self/fd"))
            resource.setrlimit(what, (value, value))
            try:
                with Llama(sys.argv[1], n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, cache_bytes="50%", **more) as llm:
                    said = "ok " + llm("Once", max_tokens=2, temperature=0)["choices"][0]["text"]
            except (ValueError, RuntimeError, OSError, MemoryError) as error:
                said = type(error).__name__ + ": " + str(error)
            os.write(into, said.encode())
            os._exit(0)
        os.close(into)
        said = os.read(out, 65536).decode()
        os.close(out)
        ends[values.index(value)] = [os.waitpid(child, 0)[1], said]
    print(json.dumps(ends))
"""


def limited(dual, what, values, **more):
    """[[status, what was said], ...] for each value; memory and files are beyond what is in use."""
    import json
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(LIMITED), str(dual), what, json.dumps(values), json.dumps(more)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = json.loads(done.stdout)
    return [ends[str(i)] for i in range(len(values))]


def sentences(ends):
    assert all(status == 0 and said and "\n" not in said for status, said in ends), ends
    return [said for _, said in ends]


def test_few_files(dual):
    said = sentences(limited(dual, "RLIMIT_NOFILE", [0, 1, 2, 20]))
    assert said[-1].startswith("ok") and not said[0].startswith("ok")
    assert all(s.startswith("ok") or "gguf" in s and ("Too many open files" in s or "failed to load" in s) for s in said), said


def test_little_address_space(dual):
    """llama.cpp alone aborts, or waits for ever for a thread that could not begin."""
    said = sentences(limited(dual, "RLIMIT_AS", [n * MIB for n in (4, 24, 96, 300, 4096)]))
    assert said[-1].startswith("ok") and all("address space leaves" in s and "raise the limit (ulimit -v)" in s for s in said[:-1]), said


def test_no_locked_memory(dual):
    ends = limited(dual, "RLIMIT_MEMLOCK", [0], use_mlock=True)
    assert ends[0][0] == 0 and ends[0][1].startswith("ok"), ends  # it works, without the lock
