"""Memory limits that are really there: control groups, locked memory, the page cache. Each case runs in a process of its own."""

import ctypes
import json
import mmap
import os
import re
import resource
import subprocess
import sys
import textwrap

import pytest

import engine
from gguf_tools import synth
from hobbit_cpp.convert import convert
from hobbit_cpp.memory import MIB

sys.path.insert(0, str(engine.Path(__file__).resolve().parent.parent / "benchmarks"))
from _cgroup import CgroupError, MemoryCgroup  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc, control groups")

LIMIT = 160 * MIB  # Python with its libraries takes 60 of them
BUDGET = 24 * MIB


@pytest.fixture(scope="module")
def dual(tmp_path_factory):
    """115 MiB of high copies and 61 MiB of low ones, in types that the CPU back end would repack."""
    folder = tmp_path_factory.mktemp("limits")
    status = synth.main([str(folder / "src.gguf"), "--arch", "qwen3moe", "--d", "512", "--ff", "1024", "--experts", "24", "--used", "4", "--layers", "3", "--type", "q8_0"])
    assert not status
    convert(folder / "src.gguf", folder / "dual.gguf", "keep", "q4_0")
    os.unlink(folder / "src.gguf")
    yield folder / "dual.gguf"
    for path in folder.iterdir():
        path.unlink()


def sidecar(dual):
    return dual.with_name("dual.experts.gguf")


@pytest.fixture
def group():
    try:
        with MemoryCgroup(f"hobbit-test-{os.getpid()}", LIMIT) as made:
            yield made
    except CgroupError as error:
        pytest.skip(str(error))


def child(code, *arguments, before=None):
    """What the code prints last, as JSON. `before` runs in the new process."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], capture_output=True, text=True, preexec_fn=before, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def join(group):
    def enter():
        with open(group.procs, "w") as f:
            f.write(str(os.getpid()))
    return enter


def forget(path):
    """Out of the page cache, as far as the kernel lets go."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(path):
    """Bytes of a file that are in the page cache."""
    size = os.path.getsize(path)
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), size) as m:
        seen = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        hold = ctypes.c_char.from_buffer(m)
        result = libc.mincore(ctypes.addressof(hold), size, seen)
        del hold
        assert result == 0, os.strerror(ctypes.get_errno())
        return sum(x & 1 for x in seen) * mmap.PAGESIZE


RUN = """
    import json, os, re, sys
    def counts():
        io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
        status = open("/proc/self/status").read()
        return int(io["rchar"]), 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", status)[1])
    import hobbit_cpp
    from hobbit_cpp import Llama, _load
    path, budget = sys.argv[1], sys.argv[2]
    context = {"n_ctx": 128, "n_batch": 64, "n_ubatch": 64}
    need = _load.need_of(_load.read_metadata(path), path, context, 0)
    before = counts()
    llm = Llama(path, cache_bytes=budget, n_threads=1, n_threads_batch=1, verbose=False, **context)
    loaded, fresh = counts(), llm.offload_stats()
    llm.eval(list(range(1, 97)))
    for t in range(1, 9):
        llm.eval([t])
    after, used = counts(), llm.offload_stats()
    print(json.dumps({"read": loaded[0] - before[0], "fresh": fresh, "used": used, "grown": after[1] - before[1], "need": need.total}))
"""


def test_a_file_larger_than_the_control_group(dual, group):
    """Nothing but residents is read at load, and nothing but slots holds experts: no second, repacked copy."""
    assert os.path.getsize(sidecar(dual)) > LIMIT
    said, _ = child(RUN, dual, BUDGET, before=join(group))
    assert group.oom_kills() == 0 and group.max_usage() <= LIMIT
    assert said["read"] < os.path.getsize(dual) * 3 + 4 * MIB  # ours, llama.cpp's and the library's look at the headers
    assert said["fresh"]["totals"]["bytes_read"] == said["fresh"]["totals"]["requests"] == 0
    totals, budget = said["used"]["totals"], said["used"]["budget"]
    assert totals["misses_high"] > 0 and totals["bytes_read"] > BUDGET and budget["budget_bytes"] == BUDGET
    assert budget["slot_bytes"] <= BUDGET and {g["backend"] for g in said["used"]["groups"]} == {"CPU"}
    assert said["grown"] < BUDGET + said["need"]


def test_auto_in_a_control_group_that_the_page_cache_fills(dual, group):
    """Page cache counts as free, and what is free is not all taken."""
    fill = """
        with open(sys.argv[3], "rb") as f:
            while f.read(1 << 20):
                pass
        from hobbit_cpp import memory
        print(memory.read_memory().groups[0])
    """
    code = textwrap.dedent(RUN).replace("before = counts()", textwrap.dedent(fill) + "r = memory.read_memory()\nbefore = counts()", 1)
    code = code.replace('"need": need.total', '"need": need.total, "limit": memory.limit(r), "available": memory.available(r), "cache": r.groups[0].cache, "reserve": memory.reserve(r)')
    forget(sidecar(dual))
    said, _ = child(code, dual, "auto", sidecar(dual), before=join(group))
    assert group.oom_kills() == 0
    assert said["limit"] == LIMIT and said["cache"] > 20 * MIB
    budget = said["used"]["budget"]["budget_bytes"]
    assert said["used"]["budget"]["floor_bytes"] <= budget <= max(said["used"]["budget"]["floor_bytes"], said["available"] - said["reserve"] - said["need"]) + 4 * MIB  # read at slightly different times
    assert said["reserve"] == LIMIT // 4


def test_host_copies_that_the_control_group_has_no_room_for(dual, group):
    """Refused with the numbers, where the machine would have room and the process would be killed."""
    code = """
        import json, sys
        from hobbit_cpp import Llama
        said = []
        for copies in (True, "150MiB"):
            try:
                Llama(sys.argv[1], host_copies=copies, cache_bytes="min", n_ctx=128, n_threads=1, verbose=False)
            except ValueError as error:
                said.append(str(error))
        print(json.dumps(said))
    """
    said, _ = child(code, dual, before=join(group))
    assert group.oom_kills() == 0
    assert len(said) == 2 and all(re.search(r"host copies take .*the limit of the control group .* is 160.0 MiB", s) for s in said), said


def test_what_is_in_slots_is_not_in_the_page_cache_as_well(dual):
    forget(sidecar(dual))
    before = cached(sidecar(dual))
    said, _ = child(RUN, dual, BUDGET)
    if not said["used"]["settings"]["direct_io"]:
        pytest.skip("this file system has no direct reads")
    assert said["used"]["totals"]["bytes_read"] > 64 * MIB
    assert cached(sidecar(dual)) - before < 4 * MIB  # its header
    child(RUN.replace("verbose=False", "verbose=False, direct_io=False"), dual, BUDGET)
    assert cached(sidecar(dual)) - before > 32 * MIB  # as asked for


def test_little_memory_may_be_locked(dual):
    """Host copies are in ordinary memory then, and llama.cpp's own lock of the residents is a warning."""
    few = lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, 64 * 1024))  # noqa: E731
    code = """
        import json, sys
        from hobbit_cpp import Llama
        said = []
        for more in ({}, {"host_copies": True}, {"host_copies": "24MiB"}, {"host_copies": True, "use_mlock": True}):
            with Llama(sys.argv[1], t1=1.0, cache_bytes="min", n_ctx=128, n_threads=1, n_threads_batch=1, verbose=False, logits_all=True, **more) as llm:
                llm.eval(list(range(1, 9)))
                s = llm.offload_stats()
                said.append([llm.scores[:8].tobytes().hex()[:4096], s["settings"]["host_pinned"], s["budget"]["host_bytes"]])
        print(json.dumps(said))
    """
    said, _ = child(code, dual, before=few)
    logits, pinned, held = zip(*said)
    assert len(set(logits)) == 1 and not any(pinned)
    assert held[0] == 0 < held[2] <= 24 * MIB < 150 * MIB < held[1] == held[3]
