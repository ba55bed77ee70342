"""Boards whose GPU has the CPU's memory: what "auto" does there, and which settings exclude each other. Slots that CPU and GPU
share are tested on a GPU (docs/gpu.md)."""

import pytest

from hobbit_cpp import Llama, _load, bindings, memory
from hobbit_cpp.convert import convert
from hobbit_cpp.memory import GIB, MIB
from hobbit_cpp.settings import Settings

DISCRETE = {"name": "CUDA0", "description": "a card", "gpu": True, "integrated": False, "free": 31 * GIB, "total": 32 * GIB}
ORIN = {"name": "CUDA0", "description": "Orin", "gpu": True, "integrated": True, "free": 3 * GIB, "total": 64 * GIB}
CPU = {"name": "CPU", "description": "CPU", "gpu": False, "integrated": False, "free": 0, "total": 0}
BOARD = memory.Readings(total=64 * GIB, available=55 * GIB, swap_free=8 * GIB, groups=())


@pytest.fixture(scope="module")
def dual(tmp_path_factory, repo):
    path = tmp_path_factory.mktemp("dual") / "small.gguf"
    convert(repo / "hobbit_cpp" / "data" / "books-8x2-small-q8_0.gguf", path, "keep", "q2_k", threads=1)
    return path


@pytest.fixture
def machine(monkeypatch):
    def pretend(devices, readings=BOARD):
        monkeypatch.setattr(_load, "devices", lambda: devices)
        monkeypatch.setattr(_load.llama_cpp, "llama_supports_gpu_offload", lambda: True)
        monkeypatch.setattr(memory, "read_memory", lambda: readings)
    return pretend


def params_for(path, **given):
    metadata = _load.read_metadata(str(path))
    need = _load.need_of(metadata, str(path), {"n_ctx": 512}, 0)
    return _load.make_params(Settings(**given), str(path), need, 0, n_gpu_layers=-1), need


@pytest.mark.parametrize("devices, given, shared", [
    ([ORIN, CPU], {}, True), ([DISCRETE, CPU], {}, False), ([DISCRETE, ORIN, CPU], {}, False), ([CPU], {}, False),
    ([ORIN, CPU], {"unified_memory": False}, False), ([DISCRETE, CPU], {"unified_memory": True}, True),
])
def test_whose_memory(machine, devices, given, shared):
    machine(devices)
    assert _load.shares_memory(Settings(**given)) is shared


def test_auto_budget_of_a_board(machine, dual, monkeypatch):
    """The system's available memory counts, not what the GPU's driver calls free: page cache fills that."""
    machine([ORIN, CPU])
    seen = {}
    monkeypatch.setattr(memory, "auto_budget", lambda r, need, everything: seen.update(r=r, need=need, everything=everything) or 4 * MIB)
    params, need = params_for(dual)
    assert params.budget_kind == bindings.HOBBIT_BUDGET_AT_LEAST and params.cache_bytes == 4 * MIB
    assert seen["r"].available == 55 * GIB and seen["need"] == need.total
    assert params.unified == bindings.HOBBIT_UNIFIED_AUTO


def test_auto_budget_of_a_card(machine, dual):
    machine([DISCRETE, CPU])
    params, need = params_for(dual)
    assert params.budget_kind == bindings.HOBBIT_BUDGET_DEVICE
    assert params.cache_bytes == need.kv_cache + need.compute + _load.DEVICE_MARGIN


def test_a_small_board_keeps_a_reserve():
    nano = memory.Readings(total=int(7.4 * GIB), available=int(5.9 * GIB), swap_free=4 * GIB, groups=())
    budget = memory.auto_budget(nano, 2 * GIB, 40 * GIB)
    assert 0 < budget <= nano.available - 2 * GIB - memory.reserve(nano)
    assert memory.reserve(nano) >= 512 * MIB


@pytest.mark.parametrize("given", [{"miss": "cpu"}, {"host_copies": True}, {"host_copies": "1GiB"}])
def test_no_copies_beside_shared_slots(given):
    with pytest.raises(ValueError, match="no copies beside the slots"):
        Settings(unified_memory=True, **given)


def test_the_library_says_so_too():
    p = bindings.hobbit_params()
    bindings.hobbit_default_params(p)
    p.unified = 1
    assert bindings.hobbit_check_params(p) == 0
    p.miss, p.host_copies = bindings.HOBBIT_MISS_CPU, bindings.HOBBIT_HOST_ON
    assert bindings.hobbit_check_params(p) < 0
    assert b"share their memory" in bindings.hobbit_last_error()
    bindings.hobbit_default_params(p)
    p.unified = 3
    assert bindings.hobbit_check_params(p) < 0


def test_without_a_gpu_it_is_how_things_are(dual):
    """Slots are host memory that the CPU computes with: the same text, and reports say that no device shares it."""
    texts = []
    for unified in (True, "auto", False):
        with Llama(str(dual), unified_memory=unified, cache_bytes="25%", t1=1.0, n_ctx=64, verbose=False, seed=1) as llm:
            texts.append(llm("Once upon a time", max_tokens=8, temperature=0)["choices"][0]["text"])
            assert llm.offload_stats()["settings"]["unified_memory"] is False
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(TypeError, match="unified_memory must be True, False or 'auto'"):
        Llama(str(dual), unified_memory="yes", n_ctx=64, verbose=False)
