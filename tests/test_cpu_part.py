"""What a model on a GPU does with copies in host memory, run here with slots on the CPU: misses that the CPU computes, whole
or in part; layers that are filled at load; a second level in host memory."""

import numpy as np
import pytest

from hobbit_cpp import Llama
from hobbit_cpp.convert import convert

from makers import make_model
from test_llama import SOURCE as DEFAULT_MODEL

TOKENS = [1, 300, 17, 920, 45, 2000, 33, 512]
ARGS = dict(n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)


@pytest.fixture(scope="module")
def dual(tmp_path_factory):
    out = tmp_path_factory.mktemp("cpu-part") / "model.gguf"
    convert(DEFAULT_MODEL, out)
    return out


def logits(llm, prompt=4):
    """A prompt, then single tokens."""
    llm.reset()
    llm.eval(TOKENS[:prompt])
    for t in TOKENS[prompt:]:
        llm.eval([t])
    return np.array(llm.scores[: len(TOKENS)])


@pytest.mark.parametrize("cache", ["min", "25%", "100%"])
def test_all_high_equals_the_ordinary_file(dual, cache):
    with Llama(DEFAULT_MODEL, **ARGS) as stock, Llama(dual, t1=1.0, cache_bytes=cache, host_copies=True, miss="cpu", **ARGS) as ours:
        assert np.array_equal(logits(stock), logits(ours))
        totals = ours.offload_stats()["totals"]
        assert totals["cpu_high"] == totals["misses_high"] > 0 and totals["cpu_low"] == 0
        assert totals["bytes_cpu"] > 0


def test_the_rule_holds_for_what_the_cpu_computes(dual):
    """Every expert a miss: what the CPU serves is what the same rule fetches. Token by token: of a batch, the fetch
    brings low copies high that find no low slot."""
    args = dict(t1=0.5, t2=0.9, cache_bytes="25%", force_miss=True, **ARGS)
    with Llama(dual, host_copies=True, miss="cpu", **args) as cpu, Llama(dual, host_copies=False, **args) as fetch:
        assert np.array_equal(logits(cpu, 1), logits(fetch, 1))
        a, b = cpu.offload_stats()["totals"], fetch.offload_stats()["totals"]
        assert (a["cpu_high"], a["cpu_low"], a["skips"]) == (b["misses_high"], b["misses_low"], b["skips"])
        assert a["cpu_low"] > 0


def test_the_cache_fills(dual):
    with Llama(dual, t1=1.0, cache_bytes="100%", host_copies=True, miss="cpu", **ARGS) as llm:
        logits(llm)
        llm.reset_offload_stats()
        logits(llm)
        assert llm.offload_stats()["totals"]["hit_rate"] > 0.9


def test_large_batches_are_fetched(dual):
    with Llama(dual, t1=1.0, cache_bytes="50%", host_copies=True, miss="cpu", **ARGS) as llm:
        llm.eval([1] + list(range(300, 340)))
        totals = llm.offload_stats()["totals"]
        assert totals["cpu_high"] == 0 and totals["misses_high"] > 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose experts are wide enough to be divided: (source, dual)."""
    folder = tmp_path_factory.mktemp("wide")
    source = make_model(folder / "wide.gguf", "qwen3moe", n_layer=2, n_expert=12, n_used=3, ff=4096, types="q8_0")
    convert(source, folder / "dual.gguf", high="keep", low="q4_0")
    return source, folder / "dual.gguf"


@pytest.mark.parametrize("speeds", [(1e9, 1e9), (1e9, 3e8), (1e9, 3e9)])
def test_a_divided_expert_is_the_expert(wide, speeds):
    """The order of sums differs where an expert is divided, nothing else."""
    source, dual = wide
    tokens = [1, 30, 17, 92, 45, 20, 33, 51, 77, 12, 64, 5]

    def run(llm):
        for _ in range(2):
            llm.reset()
            llm.eval(tokens[:3])
            for t in tokens[3:]:
                llm.eval([t])
        return np.array(llm.scores[:len(tokens)])

    args = {**ARGS, "n_threads": 2}
    with Llama(source, **args) as stock, Llama(dual, t1=1.0, cache_bytes="45%", host_copies=True, miss="auto", miss_speeds=speeds, **args) as ours:
        a, b = run(stock), run(ours)
        totals = ours.offload_stats()["totals"]
    assert ((a - b) ** 2).sum() / (a ** 2).sum() < 1e-3  # stock may use another kernel
    assert totals["cpu_high"] > 0 and totals["bytes_cpu"] > 0
    whole = totals["bytes_read"] - totals["bytes_prefetch"]
    expert = 3 * 4096 * 256 * 34 // 32  # d 256
    assert totals["misses_high"] > totals["cpu_high"] or whole % expert != 0  # something was loaded, whole or in part


@pytest.mark.parametrize("t1, most", [(1.0, 1e-9), (0.5, 1e-5)])
def test_division_adds_up(wide, t1, most):
    """Against the same engine that fetches all: what differs is rounding in the last bits, and what that does to
    the 8-bit activations that quantized experts are multiplied with."""
    _, dual = wide
    tokens = [1, 30, 17, 92, 45, 20, 33, 51, 77, 12, 64, 5]
    got = []
    for kw in (dict(miss="fetch"), dict(miss="auto", miss_speeds=(1e9, 1e9))):
        with Llama(dual, t1=t1, t2=0.9 if t1 < 1 else 1.0, cache_bytes="60%", low_fraction=0.3, force_miss=True, host_copies=True, **kw, **ARGS) as llm:
            for t in tokens:
                llm.eval([t])
            got.append(np.array(llm.scores[:len(tokens)]))
            totals = llm.offload_stats()["totals"]
    a, b = got
    assert ((a - b) ** 2).sum() / (a ** 2).sum() < most
    assert totals["cpu_high"] > 0 and (totals["cpu_low"] > 0) == (t1 < 1)


def test_layers_that_are_filled_at_load(dual):
    with Llama(DEFAULT_MODEL, **ARGS) as stock, Llama(dual, t1=0.5, cache_bytes="1GiB", preload=True, **ARGS) as ours:
        assert np.array_equal(logits(stock), logits(ours))
        totals = ours.offload_stats()["totals"]
        assert totals["requests"] == totals["hits_high"] == totals["wanted_high"] > 0
        assert totals["bytes_read"] == totals["misses_high"] == 0
        seen = []
        ours.set_hooks(select=lambda layer, experts, weights, wanted: seen.append(layer))  # somebody looks at the routing
        assert np.array_equal(logits(stock), logits(ours))
        assert len(seen) > 0
        totals = ours.offload_stats()["totals"]
        assert totals["wanted_low"] > 0 and totals["misses_high"] == 0


@pytest.mark.parametrize("size", ["2MiB", "1GiB"])
def test_a_second_level_in_host_memory(dual, size):
    with Llama(DEFAULT_MODEL, **ARGS) as stock, Llama(dual, t1=1.0, cache_bytes="min", host_copies=size, **ARGS) as ours:
        for _ in range(3):
            assert np.array_equal(logits(stock), logits(ours))
        s = ours.offload_stats()
        t = s["totals"]
        assert s["budget"]["host_bytes"] <= (2 << 20 if size == "2MiB" else 1 << 30)
        assert 0 < t["bytes_storage"] <= t["bytes_read"]
        if size == "1GiB":  # every expert is read once
            assert t["host_hits"] > 0
            assert t["bytes_storage"] <= s["budget"]["high_bytes"] + s["budget"]["low_bytes"]
            assert t["bytes_storage"] < t["bytes_read"] / 2


def test_a_second_level_too_small(dual):
    with pytest.raises(ValueError, match="host_copies is 1000 bytes, but the buffers for reads take"):
        Llama(dual, host_copies=1000, **ARGS)


def test_settings_are_checked(dual):
    with pytest.raises(ValueError, match="admit must be one of never, free, often"):
        Llama(dual, admit="always", **ARGS)
    with pytest.raises(TypeError, match="miss_speeds must be two numbers"):
        Llama(dual, miss_speeds=1e9, **ARGS)
    with pytest.raises(ValueError, match=r"miss_speeds\[1\] must be"):
        Llama(dual, miss_speeds=(1e9, 0), **ARGS)
    with pytest.raises(TypeError, match="preload must be True, False or 'auto'"):
        Llama(dual, preload=1, **ARGS)
    with pytest.raises(ValueError, match="cpu_batch must be from 1 to 512"):
        Llama(dual, cpu_batch=0, **ARGS)
    with pytest.raises(ValueError, match="needs them all"):
        Llama(dual, miss="cpu", host_copies="1GiB", **ARGS)
    with pytest.raises(ValueError, match="host_copies is 'much'"):
        Llama(dual, host_copies="much", **ARGS)
    with pytest.raises(ValueError, match="miss must be one of fetch, cpu, auto"):
        Llama(dual, miss="gpu", **ARGS)
    with pytest.raises(ValueError, match="host_copies"):
        Llama(dual, miss="cpu", host_copies=False, **ARGS)
    with pytest.raises(TypeError, match="host_copies"):
        Llama(dual, host_copies=1.5, **ARGS)
