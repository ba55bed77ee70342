"""Checksums: what the converter writes, hobbit verify, and Llama(verify=True)."""

import json
import os
import shutil
import subprocess
import sys
import zlib

import pytest

import engine
from gguf_tools import checksums
from gguf_tools.checksums import CHUNK, HEADER, Checksums, chunks, header_crc
from gguf_tools.errors import GGUFError
from gguf_tools.reader import File, Reader
from hobbit_cpp import HobbitError
from hobbit_cpp.convert import convert
from hobbit_cpp.verify import verify
from makers import make_model
from test_llama import SOURCE, load, text

HIGH = {"t1": 1.0, "cache_bytes": "min"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{kind: main file}: one sidecar, several, linked, without checksums; experts of more than a chunk."""
    folder = tmp_path_factory.mktemp("made")
    source = make_model(folder / "m.gguf", n_layer=2, n_expert=2, ff=2560, d=512)  # f16: 2.5 MiB a slab
    for name, options in (("plain", {}), ("split", {"split_max_bytes": 24 << 20}), ("linked", {"link": True}), ("without", {"checksums": False})):
        convert(source, folder / f"{name}.gguf", "keep", "q4_0", threads=2, **options)
    return {name: folder / f"{name}.gguf" for name in ("plain", "split", "linked", "without")}


@pytest.fixture
def copy(made, tmp_path):
    def copied(kind):
        for path in made[kind].parent.glob(f"{kind}*"):
            shutil.copy(path, tmp_path)
        shutil.copy(made[kind].parent / "m.gguf", tmp_path)
        return tmp_path / made[kind].name
    return copied


def flip(path, at):
    with open(path, "r+b") as f:
        f.seek(at)
        old = f.read(1)[0]
        f.seek(at)
        f.write(bytes([old ^ 0x10]))


def test_crcs_are_zlibs_of_every_chunk(made):
    for path in (made["plain"], made["plain"].with_name("plain.experts.gguf")):
        with Reader(path) as r:
            n = {t.name: 1 if path == made["plain"] else t.shape[2] for t in r.tensors.values()}
            values = checksums.stored(r, {t.name: (t.nbytes // n[t.name], n[t.name]) for t in r.tensors.values()})
            for t in r.tensors.values():
                data = r.read(t)
                assert values[t.name] == [zlib.crc32(data[at:at + size]) for at, size in chunks(t.nbytes // n[t.name], n[t.name])]
            head = r.files[0].head
            assert r.get(HEADER) == zlib.crc32(head.replace(r.get(HEADER).to_bytes(4, "little"), bytes(4), 1))


def test_pieces_in_any_size():
    data = os.urandom(3 * (CHUNK + 1000))
    for step in (1 << 16, CHUNK, 5 << 20):
        sums = Checksums({"x": (CHUNK + 1000, 3)})
        for at in range(0, len(data), step):
            sums.add("x", data[at:at + step])
        assert sums.values["x"] == [zlib.crc32(data[at:at + n]) for at, n in chunks(CHUNK + 1000, 3)] and len(sums.values["x"]) == 6


def test_all_is_well(made, hobbit):
    assert made["split"].with_name("split.experts-00002-of-00002.gguf").exists()
    for kind, files in (("plain", 2), ("split", 3), ("linked", 3)):
        report = verify(made[kind])
        assert report.damaged == [] and len(report.files) == files, kind
        status, out, err = hobbit("verify", made[kind])
        assert status == 0 and err == "" and f"all is well: {files} files" in out
    whole = sum(p.stat().st_size for p in made["plain"].parent.glob("plain*"))
    assert 0.99 * whole < verify(made["plain"]).nbytes <= whole
    assert hobbit("verify", made["plain"].with_name("plain.experts.gguf"))[0] == 0


@pytest.mark.parametrize("kind, which, tensor, expert", [
    ("plain", "plain.experts.gguf", "blk.1.ffn_up_exps.weight.high", 1), ("plain", "plain.experts.gguf", "blk.0.ffn_down_exps.weight.low", 0),
    ("plain", "plain.gguf", "output.weight", None), ("split", "split.experts-00002-of-00002.gguf", "blk.1.ffn_down_exps.weight.low", 1),
    ("linked", "m.gguf", "blk.0.ffn_gate_exps.weight", 1)])
def test_damage_is_named(copy, hobbit, kind, which, tensor, expert):
    main = copy(kind)
    path = main.with_name(which)
    t = File(str(path), 0).tensors[tensor]
    at = t.offset + (0 if expert is None else expert * t.nbytes // 2) + 77
    tensor += ".high" if kind == "linked" else ""
    flip(path, at)
    status, out, err = hobbit("verify", main)
    assert status == 1 and err == "" and out.count("\n") == 1
    named = f"{path}: {tensor}" + ("" if expert is None else f", expert {expert}") + ": bytes "
    assert out.startswith(f"damaged: {named}")
    a, b = map(int, out.split(": bytes ")[1].split(" to "))
    assert a <= at < b <= a + CHUNK


def test_a_changed_header(copy, hobbit):
    main = copy("plain")
    data = main.read_bytes()
    main.write_bytes(data.replace(b"tiny random model", b"tiny rAndom model", 1))
    status, out, _ = hobbit("verify", main)
    assert status == 1 and out == f"damaged: {main}: its header (metadata or table of tensors) was changed after the conversion\n"


def test_without_checksums(made, hobbit, tmp_path):
    status, out, err = hobbit("verify", made["without"])
    assert status == 1 and out == "" and "has no checksums" in err and "convert" in err
    source = make_model(tmp_path / "s.gguf", n_layer=1, n_expert=2, ff=256)
    assert "is an ordinary GGUF, which has no checksums" in hobbit("verify", source)[2]
    with load(made["without"], n_ctx=64) as llm:
        llm.eval([1, 5])
    with pytest.raises(ValueError, match="without.gguf has no checksums"):
        load(made["without"], verify=True)
    assert hobbit("verify", tmp_path / "none.gguf")[0] == 1 and hobbit("verify", made["plain"], "--threads", "0")[0] == 1


def test_damaged_metadata_of_checksums(copy):
    main = copy("plain")
    path = main.with_name("plain.experts.gguf")
    data = path.read_bytes()
    for old, new, why in ((b"hobbit.crc32.values", b"hobbit.crc32.valueS", "has no checksums"),
                          (b"hobbit.crc32.chunk\x04\0\0\0\0\0\x20\0", b"hobbit.crc32.chunk\x04\0\0\0\0\0\x10\0", "pieces of 1048576 bytes"),
                          (b"blk.0.ffn_up_exps.weight.high", b"blk.0.ffn_uP_exps.weight.high", "names 'blk.0.ffn_uP")):
        assert old in data
        path.write_bytes(data.replace(old, new, 1))
        with pytest.raises(GGUFError, match=why):
            verify(main)
        with pytest.raises(ValueError, match=why.replace("'", "")):
            load(main, verify=True)


def test_loading_compares_what_it_reads(copy, made):
    for kind in ("plain", "split", "linked"):  # the same text, with and without
        with load(made[kind], n_ctx=64, verify=True, **HIGH) as llm:
            assert llm.offload_stats()["settings"]["verify"] is True
            llm.eval([1, 5, 9])
            assert llm.offload_stats()["totals"]["loads_high"] > 0
    main = copy("plain")
    path = main.with_name("plain.experts.gguf")
    with Reader(path) as r:
        for t in r.tensors.values():
            if t.name.endswith(".high") and t.name.startswith("blk.1.ffn_down"):
                for expert in range(2):  # whichever is asked for; the second chunk of each
                    flip(path, t.offset + expert * (t.nbytes // 2) + CHUNK + 5)
    with load(main, n_ctx=64, **HIGH) as llm:  # nobody asked
        llm.eval([1, 5, 9])
    with load(main, n_ctx=64, verify=True, **HIGH) as llm:  # only what is read is compared
        for _ in range(2):
            with pytest.raises(HobbitError, match=r"plain.experts.gguf: damaged: blk.1.ffn_down_exps.weight.high, expert \d: \d+ bytes at offset") as e:
                llm.eval([1, 5, 9])
            assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match="damaged: blk.1.ffn_down_exps.weight.high"):  # where all is read at load
        load(main, n_ctx=64, verify=True, host_copies=True, **HIGH)
    flip(main, main.stat().st_size - 100)
    with pytest.raises(ValueError, match="plain.gguf: .*: damaged"):
        load(main, n_ctx=64, verify=True)


def test_the_text_is_the_same(tmp_path):
    dual = engine.pair(SOURCE, "q2_k")
    for options in ({"t1": 1.0, "cache_bytes": "min"}, {"t1": 0.4, "t2": 0.8, "cache_bytes": "40%", "low_fraction": 0.3}, {"t1": 1.0, "host_copies": True}):
        said = []
        for check in (False, True):
            with load(dual, verify=check, **options) as llm:
                said.append(text(llm))
        assert said[0] == said[1]


def test_command_line(made):
    def run(*options):
        return subprocess.run([sys.executable, "-m", "hobbit_cpp", *map(str, options)], capture_output=True, text=True, timeout=120)

    done = run("run", made["plain"], "-p", "x", "-n", "2", "--threads", "1", "--verify", "--json", "--ctx", "64")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["offload"]["settings"]["verify"] is True


def test_header_crc_leaves_itself_out():
    head = bytearray(os.urandom(100))
    before = header_crc(bytes(head), 40)
    head[40:44] = b"1234"
    assert header_crc(bytes(head), 40) == before
    head[44] ^= 1
    assert header_crc(bytes(head), 40) != before
