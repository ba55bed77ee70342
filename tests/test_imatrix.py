"""hobbit imatrix: the numbers of llama-imatrix, and what it refuses."""

import json

import numpy as np
import pytest

import engine
from gguf_tools.reader import Reader
from hobbit_cpp.convert import convert
from hobbit_cpp.imatrix import imatrix
from makers import make_model


def read(path) -> dict:
    with Reader(str(path)) as r:
        return {n: np.frombuffer(r.read(t), "<f4").reshape(t.shape[::-1]) for n, t in r.tensors.items()}


def test_numbers_of_llama_imatrix(tmp_path, repo):
    golden = json.loads((repo / "tests" / "golden_imatrix.json").read_text(encoding="utf-8"))
    counts = imatrix(engine.DEFAULT_MODEL, engine.SAMPLE_TEXT, tmp_path / "i.gguf", n_ctx=128, flash_attn=True)
    found = read(tmp_path / "i.gguf")
    assert set(counts) == set(golden["counts"]) and len(found) == 2 * len(counts)
    for name in golden["counts"]:
        expected = np.array(golden["counts"][name])
        got = found[name + ".counts"].ravel()
        assert got.sum() == expected.sum() and np.array_equal(got, counts[name])
        assert np.abs(got - expected).sum() <= 0.02 * expected.sum()  # kernels differ, and near ties of the router with them
        per_token = found[name + ".in_sum2"].sum(axis=1) / got
        assert np.allclose(per_token, np.array(golden["sums"][name]) / expected, rtol=0.05)


def test_it_is_used(tmp_path):
    imatrix(engine.DEFAULT_MODEL, engine.SAMPLE_TEXT, tmp_path / "i.gguf", n_ctx=128, chunks=2)
    with_it = convert(engine.DEFAULT_MODEL, tmp_path / "a.gguf", low="iq2_xxs", imatrix=tmp_path / "i.gguf")
    assert with_it.low_bytes < with_it.high_bytes / 3


def test_command(hobbit, tmp_path):
    model = make_model(tmp_path / "m.gguf", "qwen3moe", n_expert=8, n_used=1, types="f16")
    text = tmp_path / "text"
    text.write_text("the " * 200, encoding="utf-8")
    status, out, err = hobbit("imatrix", model, "--text", text, "-o", tmp_path / "i.gguf", "--ctx", "32", "--chunks", "2")
    assert status == 0 and "6 expert tensors" in out, err
    found = read(tmp_path / "i.gguf")
    assert found["blk.0.ffn_up_exps.weight.counts"].sum() == 64
    assert np.array_equal(found["blk.0.ffn_up_exps.weight.in_sum2"], found["blk.0.ffn_gate_exps.weight.in_sum2"])
    status, _, err = hobbit("imatrix", model, "--text", text, "-o", tmp_path / "i.gguf")
    assert status == 1 and "exists already" in err
    status, _, err = hobbit("imatrix", model, "--text", text, "-o", tmp_path / "j.gguf", "--ctx", "4096")
    assert status == 1 and "give a longer text" in err and not (tmp_path / "j.gguf").exists()


def test_wrong_models(tmp_path):
    with pytest.raises(ValueError, match="is a converted model"):
        imatrix(engine.pair(engine.DEFAULT_MODEL), engine.SAMPLE_TEXT, tmp_path / "i.gguf")
    dense = make_model(tmp_path / "d.gguf", n_dense=2)
    with pytest.raises(ValueError, match="no routed experts"):
        imatrix(dense, engine.SAMPLE_TEXT, tmp_path / "i.gguf")
    assert not (tmp_path / "i.gguf").exists()
