"""hobbit_cpp.convert: what it refuses, in which words, and that it leaves nothing behind."""

import os
import struct
import time

import numpy as np
import pytest

from gguf_tools import ggml
from gguf_tools.writer import StreamWriter
from hobbit_cpp import convert as module
from hobbit_cpp.convert import ConvertError, convert, main
from makers import make_imatrix, make_model, packed

pytestmark = pytest.mark.skipif(not ggml.available(), reason="libggml-base is not built (set HOBBIT_LIB_PATH)")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m.gguf", n_expert=2, ff=256)


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(options...): run the command, check that it fails cleanly; returns its sentence."""
    def run(*options, status=1):
        before = sorted(os.listdir(tmp_path))
        assert main([str(o) for o in options]) == status
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
        assert sorted(os.listdir(tmp_path)) == before
        return err
    return run


@pytest.mark.parametrize("options, words", [
    (["--low", "iq2_xxs"], ["iq1_s, iq2_xxs, iq2_xs need an importance matrix", "--imatrix"]),
    (["--low", "iq2_xs"], ["need an importance matrix"]), (["--low", "iq1_s"], ["need an importance matrix"]),
    (["--high", "iq1_s"], ["--high iq1_s", "need an importance matrix"]),
    (["--low", "nosuch"], ["--low nosuch: no such type; known are", "q2_k"]), (["--high", "nosuch"], ["--high nosuch"]),
    (["--low", "q8_k"], ["ggml cannot quantize to it"]), (["--low", "keep"], ["no such type"]),
    (["--low", "q8_0", "--high", "q4_0"], ["the low type q8_0 (8.5 bits) is not smaller than the high type q4_0 (4.5 bits)"]),
    (["--low", "f16", "--high", "keep"], ["the low type f16 (16 bits) is not smaller than the high type f16"]),
    (["--link", "--high", "q8_0"], ["--link leaves the high copies", "--high keep"]),
    (["--threads", "0"], ["0 threads"]),
])
def test_options(model, refused, tmp_path, options, words):
    start = time.monotonic()
    err = refused(model, "-o", tmp_path / "o.gguf", *options)
    assert time.monotonic() - start < 2
    for word in words:
        assert word in err, err


def test_wrong_types_are_told_before_the_file_is_opened(tmp_path):
    with pytest.raises(ConvertError, match="importance matrix"):
        convert(tmp_path / "none.gguf", tmp_path / "o.gguf", low="iq2_xxs")


def test_usage():
    for argv in ([], ["a", "b"], ["a", "--preset", "int9"], ["a", "--threads", "x"]):
        with pytest.raises(SystemExit) as e:
            main(argv)
        assert e.value.code == 2


def test_outputs(model, refused, tmp_path):
    out, sidecar = tmp_path / "o.gguf", tmp_path / "o.experts.gguf"
    for existing in (out, sidecar):
        existing.write_bytes(b"mine")
        assert f"{existing} exists already" in refused(model, "-o", out)
        assert existing.read_bytes() == b"mine"
        existing.unlink()
    assert "must be called NAME.gguf" in refused(model, "-o", tmp_path / "o.bin")
    assert "must be called NAME.gguf" in refused(model, "-o", f"{tmp_path}/")
    assert "none does not exist" in refused(model, "-o", tmp_path / "none" / "o.gguf")
    (tmp_path / "dir.gguf").mkdir()
    assert "is a folder" in refused(model, "-o", tmp_path / "dir.gguf", "--force")
    for busy in (out, sidecar):
        with StreamWriter(busy, "llama") as w:
            assert f"{busy} is being written by another process" in refused(model, "-o", out)
            w.begin_data()
        busy.unlink()


def test_inputs_are_never_overwritten(refused, tmp_path):
    model = make_model(tmp_path / "m.gguf", n_layer=1, n_expert=2, ff=256)
    data = model.read_bytes()
    assert "is an input of this conversion" in refused(model, "-o", model, "--force")
    (tmp_path / "link.gguf").symlink_to(model)
    assert "is an input of this conversion" in refused(model, "-o", tmp_path / "link.gguf", "--force")
    os.link(model, tmp_path / "x.experts.gguf")
    assert "is an input of this conversion" in refused(model, "-o", tmp_path / "x.gguf", "--force")
    imatrix = make_imatrix(tmp_path / "i.gguf", {"blk.0.ffn_up_exps.weight": (np.ones((2, 256)), np.ones(2))})
    assert "is an input of this conversion" in refused(model, "-o", imatrix, "--force", "--imatrix", imatrix)
    assert model.read_bytes() == data


def test_sources(refused, tmp_path, model):
    out = tmp_path / "o.gguf"

    def made(*args, **kwargs):
        return refused(make_model(tmp_path / "s.gguf", *args, **{"n_layer": 1, "n_expert": 2, "ff": 256, **kwargs}), "-o", out)

    assert "no routed experts: it is a dense model" in made(n_dense=1)
    old = {f"blk.0.ffn_{p}_exps.weight": f"blk.0.ffn_{p}.0.weight" for p in ("gate", "up", "down")}
    err = made(rename=old)
    assert "old layout with one tensor per expert (blk.0.ffn_gate.0.weight)" in err and "convert the original" in err
    assert "not a text model: its general.type is 'mmproj'" in made(extra=[("general.type", "mmproj", "str")])
    assert "general.architecture 'clip'" in made("clip")
    assert "holds 2 experts, but llama.expert_count is 8" in made(extra=[("llama.expert_count", 8, "u32")])
    assert "llama.expert_count is of type string, not int" in made(extra=[("llama.expert_count", "2", "str")])
    assert "layer 0 has routed experts for gate, up only" in made(drop=["blk.0.ffn_down_exps.weight"])
    assert "layer 0 has routed experts for gate, down only" in made(drop=["blk.0.ffn_up_exps.weight"])
    shapes = {"blk.0.ffn_gate_inp.weight": "blk.0.ffn_up_exps.weight"}
    assert "holds 1 experts" in made(drop=["blk.0.ffn_up_exps.weight"], rename=shapes)
    with StreamWriter(tmp_path / "vocab.gguf", "llama") as w:
        w.begin_data()
    assert "holds no tensors" in refused(tmp_path / "vocab.gguf", "-o", out)
    with StreamWriter(tmp_path / "noarch.gguf", None) as w:
        w.begin_data()
    assert "it has no general.architecture" in refused(tmp_path / "noarch.gguf", "-o", out)
    assert "No such file" in refused(tmp_path / "none.gguf", "-o", out)
    assert "is a folder" in refused(tmp_path, "-o", out)
    os.mkfifo(tmp_path / "fifo")
    assert "is a FIFO" in refused(tmp_path / "fifo", "-o", out)
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:-1])
    err = refused(tmp_path / "cut.gguf", "-o", out)
    assert "truncated: tensor blk.1.ffn_down_exps.weight" in err and f"the file has {model.stat().st_size - 1}" in err


def test_converted_files_as_source(refused, tmp_path, model):
    convert(model, tmp_path / "o.gguf")
    assert "is the main file of an already converted model" in refused(tmp_path / "o.gguf", "-o", tmp_path / "p.gguf")
    assert "is the sidecar of an already converted model" in refused(tmp_path / "o.experts.gguf", "-o", tmp_path / "p.gguf")


def test_split_sources(refused, tmp_path):
    first = make_model(tmp_path / "s.gguf", n_layer=1, n_expert=2, ff=256, split=3)
    err = refused(tmp_path / "s-00002-of-00003.gguf", "-o", tmp_path / "o.gguf")
    assert "part 2 of 3" in err and "give s-00001-of-00003.gguf" in err
    (tmp_path / "s-00003-of-00003.gguf").unlink()
    assert "part 3 of 3 is missing: " in refused(first, "-o", tmp_path / "o.gguf")


def test_unknown_type_ids(refused, tmp_path, model):
    data = bytearray(model.read_bytes())
    name = b"blk.0.ffn_up_exps.weight"
    at = data.index(name) + len(name) + 4 + 3 * 8
    assert struct.unpack_from("<I", data, at) == (1,)
    struct.pack_into("<I", data, at, 156)
    (tmp_path / "f.gguf").write_bytes(data)
    err = refused(tmp_path / "f.gguf", "-o", tmp_path / "o.gguf")
    assert "blk.0.ffn_up_exps.weight has type id 156, which this build does not know" in err
    path = make_model(tmp_path / "i.gguf", n_layer=1, n_expert=2, ff=256)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.index(name) + len(name) + 4 + 3 * 8, 25)  # i16: as large as f16
    path.write_bytes(data)
    assert "is i16, which ggml cannot turn into floats" in refused(path, "-o", tmp_path / "o.gguf")


@pytest.mark.parametrize("value, high, words", [
    (np.nan, "keep", "expert 1: the weights hold values that are not finite"),
    (np.inf, "keep", "expert 1: the weights hold values that are not finite"),
    (1e6, "f16", "expert 1: the weights do not fit f16"),
])
def test_weights_that_cannot_be_quantized(refused, tmp_path, value, high, words):
    path = make_model(tmp_path / "m.gguf", n_layer=1, n_expert=2, ff=256, types="f32")
    name, shape = "blk.0.ffn_up_exps.weight", (256, 256, 2)
    data = packed(name, shape, "f32").tobytes()
    content = bytearray(path.read_bytes())
    at = content.index(data) + 4 * (256 * 256 + 99)
    content[at:at + 4] = np.float32(value).tobytes()
    path.write_bytes(content)
    assert f"{name}, {words}" in refused(path, "-o", tmp_path / "o.gguf", "--high", high, "--low", "q4_0")


def test_room_is_checked_first(refused, tmp_path, model, monkeypatch):
    class Full:
        f_blocks, f_bavail, f_frsize = 1000, 10, 4096
    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    monkeypatch.setattr(module, "write_pair", None)
    err = refused(model, "-o", tmp_path / "o.gguf")
    assert "not enough room" in err and "40,960 (0.0 MiB) are free" in err and "are needed" in err


def test_read_only_folder(tmp_path, model, refused):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "ro").mkdir(mode=0o555)
    assert "Permission denied" in refused(model, "-o", tmp_path / "ro" / "o.gguf")


def test_warnings_and_silence(tmp_path, model, capfd):
    entries = {"blk.0.ffn_up_exps.weight": (np.ones((2, 256)), np.zeros(2))}
    imatrix = make_imatrix(tmp_path / "i", entries)
    assert main([str(model), "-o", str(tmp_path / "o.gguf"), "--quiet", "--imatrix", str(imatrix)]) == 0
    out, err = capfd.readouterr()
    assert out == "" and err.splitlines()[0] == (
        "warning: layer 0: the importance matrix has no data for 2 of 2 experts (gate, up, down); they get weight 1")
    assert main([str(model), "-o", str(tmp_path / "p.gguf")]) == 0
    out, err = capfd.readouterr()
    assert err == "" and "2 layers with 2 experts (2 used)" in out and out.splitlines()[-1].startswith("wrote ")
