"""hobbit_cpp.convert: interruptions, full disks, two at once, memory."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gguf_tools import ggml
from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter
from hobbit_cpp import convert as module
from hobbit_cpp.convert import ConvertError, convert
from makers import make_model, tensor_shapes, tensor_type

pytestmark = pytest.mark.skipif(not ggml.available(), reason="libggml-base is not built (set HOBBIT_LIB_PATH)")

OUTPUTS = ["o.experts.gguf", "o.gguf"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m.gguf", n_layer=2, n_expert=4)


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    """{name: bytes} of a finished conversion of `model` to o.gguf with the default preset."""
    folder = tmp_path_factory.mktemp("good")
    convert(model, folder / "o.gguf", "<=q8_0", "q2_k")
    return contents(folder)


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def start(repo, model, folder, *options):
    """The command as its own process, with Ctrl-C as in a terminal."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(repo), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([sys.executable, "-m", "hobbit_cpp.convert", str(model), "-o", str(folder / "o.gguf"), *options],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))


def wait_for_data(process, folder, rng):
    """Until the sidecar has data, and a random moment longer."""
    while process.poll() is None:
        path = folder / ".o.experts.gguf.tmp"
        if path.exists() and path.stat().st_size > 0:
            time.sleep(rng.random() * 0.2)
            return
        time.sleep(0.005)


@pytest.mark.parametrize("sig, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_killed_at_random_moments(repo, tmp_path, model, good, sig, status):
    rng = random.Random(int(sig))
    hit = 0
    for i in range(4):
        folder = tmp_path / str(i)
        folder.mkdir()
        old = i % 2 == 1  # an old good pair must survive
        if old:
            for name in OUTPUTS:
                (folder / name).write_bytes(b"old " + name.encode())
        p = start(repo, model, folder, "--force", "--threads", "1")
        wait_for_data(p, folder, rng)
        p.send_signal(sig)
        out, err = p.communicate(timeout=60)
        after = contents(folder)
        if p.returncode == 0:
            assert after == good
            continue
        hit += 1
        assert p.returncode == status and "Traceback" not in err
        if sig == signal.SIGINT:
            assert err == "interrupted; nothing was written\n" and out == ""
        if sig == signal.SIGKILL:
            after = {n: d for n, d in after.items() if not n.startswith(".")}
        assert after == ({n: b"old " + n.encode() for n in OUTPUTS} if old else {}) or after == good
        # leftovers do not block the next run
        convert(model, folder / "o.gguf", "<=q8_0", "q2_k", force=True)
        assert contents(folder) == good
    assert hit > 0


def test_two_at_once(repo, tmp_path, model, good):
    running = [start(repo, model, tmp_path) for _ in range(2)]
    results = [(p.communicate(timeout=60)[1], p.returncode) for p in running]
    assert contents(tmp_path) == good
    assert sorted(status for _, status in results) == [0, 1]
    err = next(err for err, status in results if status == 1)
    assert ("is being written by another process" in err or "exists already" in err) and err.count("\n") == 1


def test_failing_writes_leave_the_old_pair(tmp_path, model, monkeypatch):
    for name in OUTPUTS:
        (tmp_path / name).write_bytes(b"old")
    before, real, count = contents(tmp_path), os.pwrite, [0]

    def full(*args):
        count[0] += 1
        if count[0] > 30:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConvertError, match="the disk became full while .*o.gguf was being written"):
        convert(model, tmp_path / "o.gguf", force=True)
    assert contents(tmp_path) == before


@pytest.fixture
def tmpfs(tmp_path):
    """tmpfs(size in bytes): a folder on a file system of that size."""
    mounted = []

    def mount(size):
        folder = tmp_path / "tmpfs"
        folder.mkdir()
        if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
                                                       capture_output=True).returncode:
            pytest.skip("cannot mount a tmpfs here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk(tmpfs, model, good, monkeypatch):
    needed = sum(map(len, good.values()))
    folder = tmpfs(needed // 2)
    with pytest.raises(ConvertError, match="not enough room in .* are needed, .* are free"):
        convert(model, folder / "o.gguf", "<=q8_0")
    (folder / "o.gguf").write_bytes(b"old")
    (folder / "o.experts.gguf").write_bytes(b"old")
    monkeypatch.setattr(module, "_check_space", lambda *args: None)  # the space is taken away meanwhile
    with pytest.raises(ConvertError, match="the disk became full"):
        convert(model, folder / "o.gguf", "<=q8_0", force=True)
    assert contents(folder) == {name: b"old" for name in OUTPUTS}


def test_a_source_that_is_cut_meanwhile(tmp_path, model, monkeypatch):
    source = tmp_path / "m.gguf"
    shutil.copyfile(model, source)
    real = module.write_pair

    def cut(*args, **kwargs):
        os.truncate(source, 1 << 20)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "write_pair", cut)
    with pytest.raises(ConvertError, match="was cut while it was read"):
        convert(source, tmp_path / "o.gguf")
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_memory_does_not_grow_with_the_model(repo, tmp_path):
    """300 MB model, one expert tensor of 48 MiB: the process stays far below that and the libraries' own size."""
    block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float16)
    shapes = tensor_shapes("llama", 2, 1024, 1536, 16, 300)
    source = tmp_path / "m.gguf"
    with StreamWriter(source, "llama") as w:
        w.add("llama.expert_count", 16)
        for name, shape in shapes.items():
            w.add_tensor(name, shape, tensor_type(name, shape, "f16"))
        w.begin_data()
        for name, (_, size, _) in w._tensors.items():
            for at in range(0, size, block.nbytes):
                w.write(name, at, block.view(np.uint8)[:min(block.nbytes, size - at)])
    assert source.stat().st_size > 290e6
    # the process's own peak: what os.wait4 gives counts this one's too, from before its exec
    code = "import sys; from hobbit_cpp import convert, memory; s = convert.main(sys.argv[1:]); print(memory.peak_rss()); sys.exit(s)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(repo), os.environ.get("PYTHONPATH", "")])}
    p = subprocess.run([sys.executable, "-c", code, str(source), "-o", str(tmp_path / "o.gguf"), "--preset", "f16+q4", "--threads", "2"],
                       stdout=subprocess.PIPE, env=env, text=True)
    assert p.returncode == 0
    with Reader(tmp_path / "o.experts.gguf") as r:
        assert len(r.tensors) == 12
    peak = int(p.stdout.split()[-1])
    assert 20 << 20 < peak < 150 << 20, f"{peak / 2**20:.0f} MiB"
