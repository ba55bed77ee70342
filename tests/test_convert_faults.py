"""hobbit_cpp.convert: a fault at every single step. The source is never touched, nothing partial has a final name, a rerun works.

Interruptions at random moments, two conversions at once and memory are in test_convert_crash.py.
"""

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from gguf_tools import ggml
from gguf_tools.reader import Reader
from hobbit_cpp.convert import ConvertError, convert
from makers import make_imatrix, make_model
from test_llama import load

pytestmark = pytest.mark.skipif(not ggml.available(), reason="libggml-base is not built (set HOBBIT_LIB_PATH)")

SMALL = {"n_layer": 1, "n_expert": 2, "d": 64, "ff": 64}
OUTPUTS = ("o.experts.gguf", "o.gguf")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m.gguf", **SMALL)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("other") / "other.gguf", seed=1, types="f32", **SMALL)


@pytest.fixture(scope="module")
def good(model, other, tmp_path_factory):
    """{"new": , "old": {name: bytes}} of whole conversions of `model` and of `other`."""
    made = {}
    for name, source in (("new", model), ("old", other)):
        folder = tmp_path_factory.mktemp(name)
        convert(source, folder / "o.gguf", "keep", "q4_0", threads=1)
        made[name] = contents(folder)
    return made


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def put(folder, files):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


# --- every call of the operating system fails once ---

CALLS = ("open", "pwrite", "ftruncate", "fsync", "replace", "link", "pread", "fstat", "preadv")


def test_each_call_fails_once(model, good, tmp_path, monkeypatch):
    """With an old pair there and without: after the error it is as before; where there is none, all is new."""
    source, folder = model.read_bytes(), tmp_path / "out"
    failed = succeeded = 0
    for name in CALLS:
        for before in ({}, good["old"]):
            for n in range(400):
                put(folder, before)
                left, real = [n], getattr(os, name)

                def call(*args, **kwargs):
                    left[0] -= 1
                    if left[0] == -1:
                        raise OSError(errno.ENOSPC if name in ("pwrite", "ftruncate") else errno.EIO, "made to fail")
                    return real(*args, **kwargs)

                monkeypatch.setattr(os, name, call)
                try:
                    convert(model, folder / "o.gguf", "keep", "q4_0", threads=1, force=True)
                    after = good["new"]
                    succeeded += left[0] < 0
                except ConvertError as error:
                    assert "\n" not in str(error)
                    after, failed = before, failed + 1
                finally:
                    monkeypatch.undo()
                assert contents(folder) == after, (name, n)
                if left[0] >= 0:
                    break  # it was not called so often
            else:
                pytest.fail(f"{name} is called without end")
    assert failed > 60 and succeeded > 0 and model.read_bytes() == source


def test_the_header_does_not_fit(model, good, tmp_path, monkeypatch):
    """The header is written through a file object of its own."""
    import gguf

    for method in ("write_header_to_file", "write_kv_data_to_file", "write_ti_data_to_file", "close"):
        for nth in (1, 2):
            put(tmp_path / "out", good["old"])
            real, count = getattr(gguf.GGUFWriter, method), [0]

            def full(self, *args, **kwargs):
                count[0] += 1
                if count[0] == nth:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(self, *args, **kwargs)

            monkeypatch.setattr(gguf.GGUFWriter, method, full)
            with pytest.raises(ConvertError, match="the disk became full while"):
                convert(model, tmp_path / "out" / "o.gguf", "keep", "q4_0", threads=1, force=True)
            monkeypatch.undo()
            assert contents(tmp_path / "out") == good["old"]


# --- the process is killed at every step ---

KILLER = """
    import os, signal, sys
    from hobbit_cpp.convert import convert
    source, out, name, n, sig = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    real = getattr(os, name)
    def call(*args, **kwargs):
        global n
        n -= 1
        if n == -1:
            os.kill(os.getpid(), sig)
        return real(*args, **kwargs)
    setattr(os, name, call)
    convert(source, out, "keep", "q4_0", threads=1, force=True)
"""


def kill_at(repo, source, out, name, n, sig):
    p = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLER), str(source), str(out), name, str(n), str(int(sig))], capture_output=True, text=True,
                       env={**os.environ, "PYTHONPATH": os.pathsep.join([str(repo), os.environ.get("PYTHONPATH", "")])}, timeout=60)
    return p.returncode


def final(folder):
    return {n: d for n, d in contents(folder).items() if not n.startswith(".")}


# an old pair is replaced: link (a second name of the old sidecar), replace (the sidecar, the main file), unlink
@pytest.mark.parametrize("name, n", [("link", 0), ("replace", 0), ("replace", 1), ("unlink", 0), ("fsync", 1), ("fsync", 2), ("pwrite", 9)])
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_killed_at_a_step(repo, model, good, tmp_path, name, n, sig):
    folder = tmp_path / "out"
    put(folder, good["old"])
    code = kill_at(repo, model, folder / "o.gguf", name, n, sig)
    after = final(folder)
    published = name in ("link", "replace", "unlink") or (name, n) == ("fsync", 2)  # the folder's
    assert code == (-9 if sig == signal.SIGKILL else 143), code
    if sig == signal.SIGTERM:  # between the renames it waits until both are done
        assert after == (good["new"] if published else good["old"]) and contents(folder) == after
    elif (name, n) == ("replace", 1):  # the one moment at which the two do not belong together
        assert after == {"o.experts.gguf": good["new"]["o.experts.gguf"], "o.gguf": good["old"]["o.gguf"]}
        with pytest.raises(ValueError, match="o.experts.gguf: belongs to another conversion than .*o.gguf.*interrupted.*hobbit convert"):
            load(folder / "o.gguf", n_ctx=32)
        # the next one puts the old sidecar back first, even if it gets no further
        with pytest.raises(ConvertError):
            convert(model, folder / "o.gguf", "keep", "q4_0", imatrix=model, threads=1, force=True)
        assert final(folder) == after  # refused before anything was looked at
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hobbit_cpp.convert.write_pair", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            with pytest.raises(ConvertError, match="full"):
                convert(model, folder / "o.gguf", "keep", "q4_0", threads=1, force=True)
        assert contents(folder) == good["old"]
    else:
        assert after == (good["new"] if (name, n) in (("unlink", 0), ("fsync", 2)) else good["old"])
    convert(model, folder / "o.gguf", "keep", "q4_0", threads=1, force=True)
    assert contents(folder) == good["new"]


def test_killed_while_there_was_nothing(repo, model, good, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    assert kill_at(repo, model, folder / "o.gguf", "replace", 1, signal.SIGKILL) == -9
    assert final(folder) == {"o.experts.gguf": good["new"]["o.experts.gguf"]}  # whole, and nothing names it yet
    convert(model, folder / "o.gguf", "keep", "q4_0", threads=1, force=True)
    assert contents(folder) == good["new"]


# --- power loss ---

class Disk:
    """What of a folder would be there after a power loss: content as it was at its last fsync, names as they may be."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.durable, self.states = folder, {}, []
        self.names = {p.name: os.stat(p).st_ino for p in folder.iterdir()}
        for p in folder.iterdir():
            self.durable[os.stat(p).st_ino] = p.read_bytes()
        for name in ("pwrite", "ftruncate", "fsync", "replace", "link", "unlink"):
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name, real):
        def call(*args, **kwargs):
            if name == "fsync":
                result = real(*args, **kwargs)
                st = os.fstat(args[0])
                if os.path.isfile(f"/proc/self/fd/{args[0]}"):
                    self.durable[st.st_ino] = pathlib.Path(f"/proc/self/fd/{args[0]}").read_bytes()
                self.remember()
                return result
            self.remember()  # cut before it
            result = real(*args, **kwargs)
            self.remember()  # and with its effect on names already on the disk, though no folder was synced
            return result
        return call

    def remember(self):
        names = {p.name: os.stat(p, follow_symlinks=False).st_ino for p in self.folder.iterdir()}
        self.states.append({n: self.durable.get(i, b"torn") for n, i in names.items()})


@pytest.mark.parametrize("old", [False, True], ids=["nothing before", "an old pair"])
def test_power_loss_at_every_step(model, good, tmp_path, old):
    folder = tmp_path / "out"
    put(folder, good["old"] if old else {})
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(folder, patch)
        convert(model, folder / "o.gguf", "keep", "q4_0", threads=1, force=True)
    kinds = set()
    for i, state in enumerate(disk.states):
        visible = {n: d for n, d in state.items() if not n.startswith(".")}
        for name, data in visible.items():
            assert data in (good["new"][name], good["old"][name]), (i, name)
        kinds.add(tuple(sorted((n, "new" if d == good["new"][n] else "old") for n, d in visible.items())))
    assert len(disk.states) > 40 and (("o.experts.gguf", "new"), ("o.gguf", "new")) in kinds and len(kinds) == 3
    assert (("o.experts.gguf", "old"), ("o.gguf", "new")) not in kinds and (("o.gguf", "new"),) not in kinds


# --- folders, links and names ---

def test_links(model, good, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    link = tmp_path / "a" / "link.gguf"
    link.symlink_to(model)
    convert(link, tmp_path / "a" / "o.gguf", "keep", "q4_0", threads=1)
    assert link.is_symlink() and (tmp_path / "a" / "o.experts.gguf").stat().st_size == len(good["new"]["o.experts.gguf"])
    for name in OUTPUTS:  # links in the outputs' place are replaced, what they lead to is not written to
        (tmp_path / "b" / f"kept-{name}").write_bytes(b"kept")
        (tmp_path / "b" / name).symlink_to(tmp_path / "b" / f"kept-{name}")
    with pytest.raises(ConvertError, match="exists already"):
        convert(model, tmp_path / "b" / "o.gguf", "keep", "q4_0", threads=1)
    convert(model, tmp_path / "b" / "o.gguf", "keep", "q4_0", threads=1, force=True)
    for name in OUTPUTS:
        assert not (tmp_path / "b" / name).is_symlink() and (tmp_path / "b" / f"kept-{name}").read_bytes() == b"kept"
        assert (tmp_path / "b" / name).read_bytes() == good["new"][name]
    folder = tmp_path / "folder link"
    folder.symlink_to(tmp_path / "b")
    convert(model, folder / "p.gguf", "keep", "q4_0", threads=1)
    with load(folder / "p.gguf", n_ctx=32) as llm:
        llm.eval([1])
    dangling = tmp_path / "b" / "q.gguf"
    dangling.symlink_to(tmp_path / "nowhere" / "x.gguf")
    convert(model, dangling, "keep", "q4_0", threads=1, force=True)
    assert dangling.is_file() and not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_folder_that_may_not_be_written(model, tmp_path):
    """As somebody who is not root."""
    (tmp_path / "ro").mkdir()
    shutil.copy(model, tmp_path / "m.gguf")
    for path in (tmp_path, *tmp_path.parents):
        if not os.stat(path).st_mode & 0o001 and os.geteuid() == 0 and path != pathlib.Path("/"):
            os.chmod(path, os.stat(path).st_mode | 0o011)
    os.chmod(tmp_path / "ro", 0o555)
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            convert(tmp_path / "m.gguf", tmp_path / "ro" / "o.gguf", "keep", "q4_0", threads=1)
            os.write(w, b"it was written")
        except ConvertError as error:
            os.write(w, str(error).encode())
        except BaseException as error:
            os.write(w, repr(error).encode())
        finally:
            os._exit(0)
    os.close(w)
    os.waitpid(child, 0)
    said = os.read(r, 4096).decode()
    os.close(r)
    assert said == f"cannot write {tmp_path}/ro/o.gguf: Permission denied" and os.listdir(tmp_path / "ro") == []


@pytest.mark.parametrize("name", ["with spaces", "Modell gr\u00f6\u00dfer", "\u6a21\u578b", "\U0001f422 e\u0301", "a'b\"c", "-dash", "%s%n{}", "semi;colon&", "trailing ", "#1?x=y"])
def test_names(model, good, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    source = shutil.copy(model, folder / f"{name} source.gguf")
    report = convert(source, folder / f"{name}.gguf", "keep", "q4_0", threads=1)
    assert report.sidecar == str(folder / f"{name}.experts.gguf")
    with load(folder / f"{name}.gguf", n_ctx=32, verify=True) as llm:
        llm.eval([1])
    convert(source, folder / f"{name}-linked.gguf", "keep", "q4_0", link=True, threads=1)
    with load(folder / f"{name}-linked.gguf", n_ctx=32) as llm:
        llm.eval([1])


def test_names_that_cannot_be(model, tmp_path):
    """What another program could not open afterwards is told before any work."""
    bad = os.fsdecode(b"\xff\xfe")
    for out, why in ((f"{bad}.gguf", "UTF-8"), ("a\\b.gguf", "backslash"), ("x\ny.gguf", "control character"), ("n" * 250 + ".gguf", "too long")):
        with pytest.raises(ConvertError, match=why) as e:
            convert(model, tmp_path / out, "keep", "q4_0", threads=1)
        assert "\n" not in str(e.value)
    source = shutil.copy(model, tmp_path / f"{bad}.gguf")  # a source may be called so
    convert(source, tmp_path / "o.gguf", "keep", "q4_0", threads=1)
    with Reader(tmp_path / "o.experts.gguf") as r:
        assert r.get("hobbit.source.name").endswith(".gguf")
    with pytest.raises(ConvertError, match="--link.*UTF-8"):
        convert(source, tmp_path / "p.gguf", "keep", "q4_0", link=True, threads=1)
    assert sorted(os.listdir(tmp_path)) == sorted(["o.gguf", "o.experts.gguf", f"{bad}.gguf"])


# --- slow and odd reads ---

def test_reads_come_in_drops(model, good, tmp_path, monkeypatch):
    """As from a network: short reads."""
    real_v, real, calls = os.preadv, os.pread, [0]

    def preadv(fd, buffers, offset):
        calls[0] += 1
        return real_v(fd, [memoryview(buffers[0])[:1 + calls[0] * 997 % 4096]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: real(fd, min(n, 1000), offset))
    convert(model, tmp_path / "o.gguf", "keep", "q4_0", threads=2)
    monkeypatch.undo()
    assert contents(tmp_path) == good["new"] and calls[0] > 50


def test_an_imatrix_is_an_input_too(model, tmp_path):
    """It is read to the end before anything has a final name, and left as it is."""
    name = "blk.0.ffn_up_exps.weight"
    imatrix = make_imatrix(tmp_path / "i.gguf", {name: (np.ones((2, 64)), np.ones(2))})
    data = imatrix.read_bytes()
    imatrix.write_bytes(data[:len(data) // 2])
    with pytest.raises(ConvertError, match="i.gguf"):
        convert(model, tmp_path / "o.gguf", "keep", "q4_0", imatrix=imatrix, threads=1)
    assert os.listdir(tmp_path) == ["i.gguf"]
