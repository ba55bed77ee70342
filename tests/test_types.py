"""Every type as high and as low copies (expert_types.py says how); files that mix types; widths that fit no type of 256."""

import pytest

import engine
import expert_types
from gguf_tools import ggml
from hobbit_cpp.convert import convert
from makers import make_model


@pytest.mark.parametrize("name", [n for n in expert_types.TYPES if expert_types.below(n)])
def test_kept_as_high_copies(name, tmp_path):
    expert_types.check_high(name, tmp_path)


@pytest.mark.parametrize("name", [n for n in expert_types.TYPES if n != "f32"])
def test_made_as_low_copies(name, tmp_path):
    expert_types.check_low(name, tmp_path, imatrix=ggml.requires_imatrix(name))


@pytest.mark.parametrize("name", ["q2_k", "q4_0", "iq3_s", "q8_0", "mxfp4"])
def test_made_with_an_importance_matrix(name, tmp_path):
    expert_types.check_low(name, tmp_path, imatrix=True)


MIXES = {  # as llama-quantize's recipes mix them: projections and layers differ
    "q4_k_m": lambda n: "q6_k" if "down" in n and n.startswith(("blk.0", "blk.3")) else "q4_k",
    "q3_k_m": lambda n: "q5_k" if "down" in n and n.startswith("blk.0") else "q4_k" if "down" in n else "q3_k",
    "iq2_m": lambda n: "iq3_s" if "down" in n or n.startswith("blk.1") else "iq2_s",
    "mxfp4": lambda n: "mxfp4" if n.startswith(("blk.0", "blk.1")) else "q8_0",
}


@pytest.mark.parametrize("mix", MIXES)
def test_mixed_files(mix, tmp_path):
    source = make_model(tmp_path / "m.gguf", "qwen3moe", n_layer=4, n_expert=6, n_used=2, ff=256, types=MIXES[mix])
    convert(source, tmp_path / "o.gguf", "keep", "iq1_m" if mix == "iq2_m" else "q2_k")
    expert_types.check_copies(tmp_path / "o.gguf", tmp_path)
    with engine.Model(tmp_path / "o.gguf", budget_kind=engine.MIN) as model:
        assert model.info().n_groups > 1


@pytest.mark.parametrize("ff", [1408, 1536, 2880])
def test_odd_widths(ff, tmp_path):
    source = make_model(tmp_path / "m.gguf", "qwen3moe", n_layer=1, n_expert=4, n_used=2, ff=ff, types="f16")
    report = convert(source, tmp_path / "o.gguf", "<=q8_0", "q2_k")
    assert bool(report.fallbacks) == (ff % 256 != 0)
    expert_types.check_copies(tmp_path / "o.gguf", tmp_path)
