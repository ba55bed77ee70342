"""Offsets beyond 4 GiB. The tensors of the sidecar start 64 MiB apart, in a file with holes: it takes no room on the disk."""

import shutil

import numpy as np
import pytest

import engine
from gguf_tools import info
from gguf_tools.reader import Reader
from hobbit_cpp import convert
from makers import make_model

GAP = 2**26


def test_offsets_beyond_4_gib(tmp_path, monkeypatch, capsys):
    if shutil.disk_usage(tmp_path).free < 6 * 2**30:
        pytest.skip("the converter wants 5 GiB to be free")
    source = make_model(tmp_path / "m.gguf", "qwen3moe", n_layer=12, n_expert=4, n_used=2, ff=256, types="f16")
    monkeypatch.setattr(convert, "SIDECAR_ALIGNMENT", GAP)
    convert.convert(source, tmp_path / "o.gguf", "keep", "q4_0")
    side = tmp_path / "o.experts.gguf"
    with Reader(str(side)) as r:
        assert max(t.offset for t in r.tensors.values()) > 2**32
    if side.stat().st_blocks * 512 > 2**30:
        side.unlink()
        pytest.skip("this file system has no files with holes")
    with engine.Model(source) as stock:
        prompt = engine.prompt(20, stock.n_vocab)
        expected = engine.run(stock, prompt, generate=5)
    for direct_io in (0, 1):
        with engine.Model(tmp_path / "o.gguf", budget_kind=engine.MIN, direct_io=direct_io) as model:
            assert np.array_equal(engine.run(model, prompt, generate=5)[0], expected[0])
    assert info.main([str(tmp_path / "o.gguf")]) == 0
    capsys.readouterr()
