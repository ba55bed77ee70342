"""Misses that the CPU computes from copies in host memory: the path of a model on a GPU, run here with slots on the CPU."""

import numpy as np
import pytest

from hobbit_cpp import Llama
from hobbit_cpp.convert import convert

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


def test_settings_are_checked(dual):
    with pytest.raises(ValueError, match="miss must be one of fetch, cpu, auto"):
        Llama(dual, miss="gpu", **ARGS)
    with pytest.raises(ValueError, match="host_copies"):
        Llama(dual, miss="cpu", host_copies=False, **ARGS)
    with pytest.raises(TypeError, match="host_copies"):
        Llama(dual, host_copies=1, **ARGS)
