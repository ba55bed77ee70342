"""gguf_tools.ggml against the gguf package and NumPy."""

import gguf
import numpy as np
import pytest

from gguf_tools import ggml

pytestmark = pytest.mark.skipif(not ggml.available(), reason="libggml-base is not built (set HOBBIT_LIB_PATH)")


def rows(n, n_in, seed=0):
    return np.random.default_rng(seed).standard_normal((n, n_in), dtype=np.float32)


def test_types_agree_with_the_gguf_package():
    for t, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if t.name == "Q8_1":
            continue  # the package says 40 bytes, ggml has 36; never stored in files
        ours = ggml.type_info(int(t))
        assert (ours.name, ours.block, ours.size) == (t.name.lower(), block, size)
        assert ggml.type_info(t.name) is ggml.type_info(t.name.lower()) is ours
    assert not {4, 5, 31, 32, 33, 36} & set(ggml.types())  # ids that were given up


def test_quantizable_types():
    names = [t.name for t in ggml.quantizable()]
    assert {"f16", "bf16", "f32", "q4_0", "q2_k", "iq4_nl", "mxfp4", "iq1_m"} <= set(names)
    assert not {"q8_1", "q8_k", "i8", "f64"} & set(names)
    assert [n for n in names if ggml.requires_imatrix(n)] == ["iq1_s", "iq2_xxs", "iq2_xs"]


# ggml builds the lookup tables of these for some seconds each
SLOW = ("iq1_s", "iq1_m", "iq2_xs", "iq2_s")
NAMES = [t.name for t in ggml.quantizable() if t.name not in SLOW] if ggml.available() else []


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name):
    x = rows(3, 768)
    packed = ggml.quantize(name, x, np.ones(768, np.float32) if ggml.requires_imatrix(name) else None)
    back = ggml.dequantize(name, packed, 768)
    assert packed.shape == (3, ggml.type_info(name).row_bytes(768)) and back.shape == x.shape
    assert ((back - x) ** 2).sum() < 0.7 * (x ** 2).sum()
    # the gguf package has its own, slow, decoders
    kind = next((t for t in gguf.GGML_QUANT_SIZES if t.name.lower() == name), None)
    if kind is not None:
        try:
            other = gguf.quants.dequantize(packed if name != "f32" else packed.view(np.float32), kind)
        except NotImplementedError:
            return
        assert np.allclose(other.reshape(back.shape), back, rtol=1e-6, atol=1e-7)


def test_blocks_of_rows_equal_the_whole():
    x = rows(40, 512)
    whole = ggml.quantize("q2_k", x)
    assert np.array_equal(whole, np.concatenate([ggml.quantize("q2_k", x[i:i + 7]) for i in range(0, 40, 7)]))


@pytest.mark.parametrize("name, n_in, what", [
    ("q2_k", 128, "row of 128"), ("q4_0", 48, "row of 48"), ("iq2_xxs", 256, "importance matrix"),
    ("q8_k", 256, "cannot quantize"), ("i8", 256, "cannot quantize"), ("nosuch", 256, "unknown type"), (156, 256, "unknown type"),
])
def test_refuses_what_would_abort_or_write_rubbish(name, n_in, what):
    with pytest.raises(ggml.GGMLError, match=what):
        ggml.quantize(name, rows(2, n_in))


def test_refuses_values_that_are_not_finite():
    for bad in (np.nan, np.inf):
        x = rows(2, 256)
        x[1, 7] = bad
        with pytest.raises(ggml.GGMLError, match="not finite"):
            ggml.quantize("q4_0", x)


def test_refuses_sizes_that_do_not_fit():
    with pytest.raises(ggml.GGMLError, match="importance matrix of 128"):
        ggml.quantize("q4_0", rows(2, 256), np.ones(128, np.float32))
    with pytest.raises(ggml.GGMLError, match="no whole number"):
        ggml.dequantize("q4_0", b"\0" * 17, 32)


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOBBIT_LIB_PATH", str(tmp_path))
    ggml._library.cache_clear()
    try:
        with pytest.raises(ggml.GGMLError, match="HOBBIT_LIB_PATH"):
            ggml.init("q4_0")
    finally:
        ggml._library.cache_clear()
