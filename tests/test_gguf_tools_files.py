"""gguf_tools.reader, writer and info."""

import os
import random
import signal
import struct
import subprocess
import sys
import textwrap

import gguf
import numpy as np
import pytest

from gguf_tools import ggml, info
from gguf_tools.errors import GGUFError
from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter
from makers import make_model, packed, tensor_shapes

pytestmark = pytest.mark.skipif(not ggml.available(), reason="libggml-base is not built (set HOBBIT_LIB_PATH)")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m.gguf", n_expert=2, ff=256)


# --- both ways ---

@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_the_gguf_package_reads_what_we_write(tmp_path, alignment):
    path = make_model(tmp_path / "m.gguf", alignment=alignment, n_layer=1, types="q2_k", extra=[("a.pad", "x" * 37, "str")])
    theirs = gguf.GGUFReader(path)
    with Reader(path) as ours:
        assert ours.alignment == alignment == theirs.alignment
        assert list(ours.fields) == [k for k in theirs.fields if not k.startswith("GGUF.")]
        for key in ours.fields:
            assert ours.get(key) == theirs.fields[key].contents(), key
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for t in theirs.tensors:
            mine = ours.tensors[t.name]
            assert (mine.offset, mine.nbytes, mine.type.id) == (t.data_offset, t.n_bytes, t.tensor_type)
            assert list(mine.shape) == t.shape.tolist() and mine.offset % alignment == 0
            assert ours.read(mine) == t.data.tobytes()
            assert ours.read(mine, 8, 24) == t.data.tobytes()[8:32]


def test_we_read_what_the_gguf_package_writes(tmp_path):
    path = tmp_path / "m.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_array("a.list", [1, 2, 3])
    w.add_float32("a.float", 0.5)
    w.add_tensor("t.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with Reader(path) as r:
        assert r.get("a.list") == [1, 2, 3] and r.get("a.float") == 0.5 and r.get("none", 7) == 7
        assert r.tensors["t.weight"].shape == (32, 2)
        assert np.frombuffer(r.read(r.tensors["t.weight"]), np.float32).tolist() == list(range(64))


def test_metadata_is_copied_byte_for_byte(tmp_path):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    values = {"u8": 255, "i8": -1, "u16": 65535, "i16": -2, "u32": 1 << 31, "i32": -3, "u64": 1 << 63, "i64": -4,
              "f32": 0.1, "f64": 0.1, "bool": True, "str": "\u00e9\n"}
    with StreamWriter(first, "llama") as w:
        for kind, value in values.items():
            w.add(f"one.{kind}", value, kind)
            w.add(f"many.{kind}", [value] * 3, kind)
            w.add(f"none.{kind}", [], kind)
        w.add("split.no", 0, "u16")
        w.add_tensor("t", (32,), "f32")
        w.begin_data()
        w.write("t", 0, np.zeros(32, np.float32))
    with Reader(first) as r:
        with StreamWriter(second, None) as w:
            w.copy_metadata(r, drop=("split.",))
            w.begin_data()
        with Reader(second) as copy:
            assert {k: f.raw for k, f in copy.fields.items()} == {k: f.raw for k, f in r.fields.items() if k != "split.no"}
            assert copy.get("none.str") == [] and copy.fields["none.u64"].item_kind == gguf.GGUFValueType.UINT64
            assert copy.get("many.f64") == [0.1] * 3 and copy.get("one.bool") is True


def test_pieces_in_any_order_make_the_same_file(tmp_path):
    shape = (256, 8)
    data = packed("x", shape, "q4_0").reshape(-1)
    for name, order in (("a", [0, 1, 2, 3]), ("b", [2, 0, 3, 1])):
        with StreamWriter(tmp_path / name, "llama") as w:
            w.add_tensor("x", shape, "q4_0")
            w.begin_data()
            step = data.size // 4
            for i in order:
                w.write("x", i * step, data[i * step:(i + 1) * step])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# --- the writer's care ---

def test_writer_refuses(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(GGUFError, match="0 of 128 bytes of t"):
        with StreamWriter(path, "llama") as w:
            w.add_tensor("t", (32,), "f32")
            w.begin_data()
    with pytest.raises(GGUFError, match="outside t"):
        with StreamWriter(path, "llama") as w:
            w.add_tensor("t", (32,), "f32")
            w.begin_data()
            w.write("t", 4, bytes(128))
    for call, what in [(lambda w: w.add_tensor("t" * 64, (32,), "f32"), "longer than 63"),
                       (lambda w: w.add("k", 1 << 32, "u32"), "does not fit"),
                       (lambda w: w.add("k", []), "empty array"), (lambda w: w.add("k", 1, "u7"), "unknown value type"),
                       (lambda w: w.write("t", 0, b""), "state"), (lambda w: w.add_tensor("t", (0,), "f32"), "bad shape")]:
        with pytest.raises(GGUFError, match=what):
            with StreamWriter(path, "llama") as w:
                call(w)
    with pytest.raises(GGUFError, match="power of two"):
        StreamWriter(path, "llama", alignment=48)
    assert os.listdir(tmp_path) == []


def test_existing_files_survive(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    with pytest.raises(GGUFError, match="exists already"):
        with StreamWriter(path, "llama"):
            pass
    with pytest.raises(RuntimeError):
        with StreamWriter(path, "llama", overwrite=True) as w:
            w.begin_data()
            raise RuntimeError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["m.gguf"]


def test_one_writer_per_name(tmp_path):
    path = tmp_path / "m.gguf"
    with StreamWriter(path, "llama") as w:
        with pytest.raises(GGUFError, match="being written by another"):
            with StreamWriter(path, "llama"):
                pass
        w.begin_data()
    assert os.listdir(tmp_path) == ["m.gguf"]
    (tmp_path / ".n.gguf.tmp").write_bytes(b"left by a killed process")
    with StreamWriter(tmp_path / "n.gguf", "llama") as w:
        w.begin_data()
    assert (tmp_path / "n.gguf").read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("sig, status", [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_signals_leave_nothing(tmp_path, repo, sig, status):
    code = f"""
        import signal, sys, time
        sys.path.insert(0, {str(repo)!r})
        from gguf_tools.writer import StreamWriter
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with StreamWriter({str(tmp_path / "m.gguf")!r}, "llama") as w:
            w.begin_data()
            try:
                print("ready", flush=True)
                time.sleep(60)
            except KeyboardInterrupt:
                sys.exit(1)
    """
    p = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    assert p.stdout.readline() == b"ready\n"
    assert os.listdir(tmp_path) == [".m.gguf.tmp"]
    p.send_signal(sig)
    assert p.wait(20) == status
    assert os.listdir(tmp_path) == []


# --- the reader's care ---

def header(kv=b"", n_kv=0, infos=b"", n_tensors=0, version=3, data=b""):
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_kv) + kv + infos
    return head + bytes(-len(head) % 32) + data


def text(s):
    return struct.pack("<Q", len(s)) + s


def tensor(name=b"t", shape=(32,), kind=0, offset=0):
    return text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


F32 = bytes(128)
BAD = {
    "empty": (b"", "is empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n", "git-lfs pointer"),
    "html": (b"\n<!DOCTYPE html><html><body>404</body></html>", "web page"),
    "other": (b"PK\x03\x04" + bytes(100), "not a GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version": (header(version=1), "version 1"),
    "cut header": (header()[:14], "truncated or damaged: the tensor count"),
    "no data": (header(infos=tensor(), n_tensors=1), r"truncated: tensor t needs bytes 64 to 192 \(offset \+ size\), the file has 64"),
    "cut data": (header(infos=tensor(), n_tensors=1, data=F32[:-1]), "the file has 191"),
    "type id": (header(infos=tensor(kind=156), n_tensors=1, data=F32), "tensor t has type id 156"),
    "given-up id": (header(infos=tensor(kind=4), n_tensors=1, data=F32), "type id 4"),
    "two tensors": (header(infos=tensor() + tensor(offset=128), n_tensors=2, data=F32 * 2), "tensor t is there twice"),
    "offset": (header(infos=tensor(offset=32), n_tensors=1, data=F32 * 2), "at offset 32, not 0"),
    "wraps to 0": (header(infos=tensor(shape=(4, 2**30 - 1, 2**30 + 1)), n_tensors=1, data=F32), "truncated"),
    "offset overflow": (header(infos=tensor(shape=(2**61,)), n_tensors=1, data=F32), "truncated"),
    "zero dimension": (header(infos=tensor(shape=(32, 0)), n_tensors=1, data=F32), "impossible shape"),
    "five dimensions": (header(infos=tensor(shape=(32, 1, 1, 1, 1)), n_tensors=1, data=F32), "5 dimensions"),
    "row": (header(infos=tensor(shape=(48,), kind=2), n_tensors=1, data=F32), "rows of 48"),
    "many tensors": (header(n_tensors=2**60), "more than any model has"),
    "long array": (header(text(b"k") + struct.pack("<IIQ", 9, 8, 2**62), 1), "truncated or damaged: k"),
    "long scalars": (header(text(b"k") + struct.pack("<IIQ", 9, 0, 2**62), 1), "truncated or damaged: k"),
    "array of arrays": (header(text(b"k") + struct.pack("<IIQ", 9, 9, 1), 1), "unknown type 9"),
    "value type": (header(text(b"k") + struct.pack("<IQ", 77, 1), 1), "unknown value type 77"),
    "two keys": (header((text(b"k") + struct.pack("<IB", 0, 1)) * 2, 2), "key k is there twice"),
    "not utf-8": (header(text(b"\xff") + struct.pack("<IB", 0, 1), 1), "not UTF-8"),
} | {
    f"alignment {n}": (header(text(b"general.alignment") + struct.pack("<II", 4, n), 1), f"alignment is {n}, which")
    for n in (0, 3, 2**32 - 1)
} | {"alignment type": (header(text(b"general.alignment") + struct.pack("<IQ", 10, 32), 1), "of type uint64")}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_files(tmp_path, name):
    data, what = BAD[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=what) as e:
        Reader(path)
    assert "\n" not in str(e.value) and str(path) in str(e.value)


def test_things_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, what in ((tmp_path / "fifo", "FIFO"), (tmp_path, "folder"), (tmp_path / "none", "No such file"),
                       ("/dev/null", "not a regular file")):
        with pytest.raises(GGUFError, match=what):
            Reader(path)


def test_every_cut_is_noticed(tmp_path, model):
    data = model.read_bytes()
    path = tmp_path / "m.gguf"
    with Reader(model) as r:
        last = max(r.tensors.values(), key=lambda t: t.offset)
        needed = last.offset + last.nbytes
    for n in (0, 3, 30, 5000, len(data) // 2, needed - 1):
        path.write_bytes(data[:n])
        with pytest.raises(GGUFError):
            Reader(path)


def test_a_file_cut_while_open_is_an_error(tmp_path, model):
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes())
    with Reader(path) as r:
        os.truncate(path, 20000)
        with pytest.raises(GGUFError, match="was cut while it was read"):
            r.read(list(r.tensors.values())[-1])


def test_mutated_headers(tmp_path, model):
    good = bytearray(model.read_bytes())
    with Reader(model) as r:
        end = r.files[0].header_bytes
    path, rng, refused = tmp_path / "m.gguf", random.Random(1), 0
    for _ in range(400):
        data = bytearray(good[:end + 4096])
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(end)] = rng.choice((0, 1, 0x7f, 0x80, 0xff, rng.randrange(256)))
        with open(path, "wb") as f:
            f.write(data)
            f.truncate(len(good))
        try:
            info.describe(str(path))
        except GGUFError:
            refused += 1
    assert refused > 50


# --- split models ---

def test_split(tmp_path, model):
    first = make_model(tmp_path / "s.gguf", n_expert=2, ff=256, split=3)
    with Reader(first) as split, Reader(model) as whole:
        assert len(split.files) == 3 and list(split.tensors) == list(whole.tensors)
        for name in whole.tensors:
            assert split.read(split.tensors[name]) == whole.read(whole.tensors[name])
    second, third = (tmp_path / f"s-0000{i}-of-00003.gguf" for i in (2, 3))
    with pytest.raises(GGUFError, match="part 2 of 3 of a split model: give s-00001-of-00003.gguf"):
        Reader(second)
    other = tmp_path / "joined.gguf"
    other.write_bytes(b"".join(p.read_bytes() for p in (first, second, third)))
    with pytest.raises(GGUFError, match="not called NAME-00001-of-00003.gguf"):
        Reader(other)
    third.rename(tmp_path / "away")
    with pytest.raises(GGUFError, match="part 3 of 3 is missing: .*s-00003-of-00003.gguf"):
        Reader(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(GGUFError, match="is not part 3 of 3"):
        Reader(first)


# --- info ---

def test_info(model, capsys, tmp_path):
    assert info.main([str(model)]) == 0
    out = capsys.readouterr().out
    assert "architecture   llama" in out and "experts        2" in out and "not converted yet" in out
    assert info.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_roles():
    for name in tensor_shapes("qwen3moe", 1, 256, 256, 4, 300, bias=True):
        assert info.role(name) != "other", name
    assert info.role("blk.0.ffn_up_shexp.weight") == "shared expert"
    assert info.role("blk.0.ffn_up_exps.weight") == "expert" and info.role("blk.0.ffn_up_exps.bias") == "feed-forward"
