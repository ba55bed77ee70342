"""The prototype of nested copies (benchmarks/, docs/nested.md): its format, and its cache against the engine's."""

import pathlib
import shutil
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))
from gguf_tools import ggml

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the prototype is compiled with g++")


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(3).standard_normal((24, 512), np.float32)


def test_eight_planes_are_q8_0_and_any_prefix_is_a_q8_0_block(rows):
    from _nested_format import Q8
    copy = Q8(rows)
    stock = ggml.quantize("q8_0", rows)
    assert np.array_equal(copy.values(8), ggml.dequantize("q8_0", stock, 512))
    for planes in (3, 4, 5, 6):
        blocks = stock.reshape(-1, 34).copy()
        blocks[:, 2:] = copy.prefix(planes).view(np.uint8)
        assert np.array_equal(copy.values(planes), ggml.dequantize("q8_0", blocks.reshape(len(rows), -1), 512))


@pytest.mark.parametrize("name", ["q8", "k8"])
def test_a_plane_more_is_half_the_step(rows, name):
    from _nested_format import FORMATS
    copy = FORMATS[name](rows)
    errors = [np.square(copy.values(planes) - rows).mean() for planes in (3, 4, 5, 6)]
    for more, less in zip(errors, errors[1:]):
        assert 3 < more / less < 5.5  # 4, but for the ends of the range


def test_products_of_planes(rows):
    import ctypes

    from _nested_format import Q8, native, pointer
    copy, vector = Q8(rows), Q8(np.random.default_rng(4).standard_normal((1, 512), np.float32))
    planes, y = copy.planes(), np.empty(len(rows), np.float32)
    for n in (1, 3, 5, 8):
        which = (ctypes.c_void_p * 8)(*(planes[i].ctypes.data for i in range(8)))
        scale, x, x_scale = copy.scale.ravel(), np.ascontiguousarray(vector.integers), vector.scale.ravel()
        native().nested_product(n, which, pointer(scale), pointer(x), pointer(x_scale), len(rows), 512, pointer(y))
        assert np.allclose(y, copy.values(n).astype(np.float64) @ vector.values(8)[0], rtol=1e-4, atol=1e-3)


def test_with_one_level_the_cache_loads_what_the_engine_does():
    from _forward import Routing
    from _plane import HIGH, play_pair
    from nested import play_nested
    rng = np.random.default_rng(5)
    n_layers, n_tokens, n_expert, n_used = 4, 300, 8, 2
    experts = rng.gumbel(size=(n_layers, n_tokens, n_expert)).argsort(axis=2)[:, :, :n_used].astype(np.int32)
    gate = np.sort(rng.dirichlet(np.ones(n_used), (n_layers, n_tokens)).astype(np.float32), axis=2)[:, :, ::-1].copy()
    routing = Routing(experts, gate)
    for slots in (3, 9, 20):
        engine, served = play_pair(routing, 100, n_expert, [400, 300, 300], [1, 1, 1], 1.0, 1.0, 1000 * slots + 3)
        assert (served == HIGH).all()
        mine, level = play_nested(routing, np.full(experts.shape, 8), n_expert, 100, (8,), {8: 1000}, {8: 1000}, 1000 * slots)
        assert mine == engine and (level == 8).all()


def test_only_what_is_missing_is_loaded_and_the_last_part_goes_first():
    from _forward import Routing
    from nested import play_nested
    experts = np.array([[[0], [0], [1], [0]]], np.int32)
    wanted = np.array([[[4], [8], [8], [4]]], np.int32)
    size = {4: 400, 8: 800}
    play = lambda budget, **how: play_nested(Routing(experts, None), wanted, 2, 4, (4, 8), size, size, budget, **how)  # noqa: E731
    loaded, served = play(1600)
    assert loaded * 4 == 400 + 400 + 800 and served.ravel().tolist() == [4, 8, 8, 8]
    loaded, served = play(1200)  # the upper half of expert 0 makes room
    assert loaded * 4 == 400 + 400 + 800 and served.ravel().tolist() == [4, 8, 8, 4]
    loaded, _ = play(1600, whole=True)  # copies of their own
    assert loaded * 4 == 400 + 800 + 800
