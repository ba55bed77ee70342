"""What a Llama says and lets be steered while it runs: statistics, settings, traces, hooks."""

import ctypes
import gc

import numpy as np
import pytest

import engine
from hobbit_cpp import HobbitError, Llama
from hobbit_cpp.convert import convert
from makers import make_model
from test_llama import PROMPT, SOURCE, load, text

COUNTERS = ("wanted_high", "wanted_low", "wanted_skip", "hits_high", "hits_low", "misses_high", "misses_low", "skips")


@pytest.fixture(scope="module")
def dual():
    return engine.pair(SOURCE, "q2_k")


# --- statistics --------------------------------------------------------------------------------------


def check_sums(c):
    assert c["requests"] == c["wanted_high"] + c["wanted_low"] + c["wanted_skip"]
    assert c["requests"] == c["hits_high"] + c["hits_low"] + c["misses_high"] + c["misses_low"] + c["skips"]
    assert c["share_high"] + c["share_low"] + c["share_skip"] == pytest.approx(1)
    assert 0 <= c["hit_rate"] <= 1


@pytest.mark.parametrize("t2", [0.8, 1.0])
def test_statistics_add_up(dual, t2):
    with load(dual, cache_bytes="30%", t2=t2) as llm:
        text(llm, 30)
        s = llm.offload_stats()
        assert [x["block"] for x in s["layers"]] == list(range(6))
        check_sums(s["totals"])
        for layer in s["layers"]:
            check_sums(layer)
        for name in (*COUNTERS, "tokens", "requests", "upgrades", "loads_high", "loads_low", "evictions", "bytes_read"):
            assert s["totals"][name] == sum(x[name] for x in s["layers"]), name
        g = s["groups"][0]
        assert s["totals"]["bytes_read"] == s["totals"]["loads_high"] * g["high_expert_bytes"] + s["totals"]["loads_low"] * g["low_expert_bytes"]
        assert (s["totals"]["skips"] > 0) == (t2 < 1)
        prompt, decode = llm.last_stats["prompt"], llm.last_stats["decode"]
        for name in COUNTERS:
            assert prompt[name] + decode[name] == s["totals"][name]
        assert decode["evaluated"] == decode["graphs"] == 29 and prompt["evaluated"] == len(llm.tokenize(PROMPT.encode()))
        assert decode["tokens"] == 29 * 6 and decode["seconds"] > 0
        assert decode["bytes_per_token"] == pytest.approx(decode["bytes_read"] / 29)
        llm.reset_offload_stats()
        assert llm.offload_stats()["totals"]["requests"] == 0


def test_thresholds_at_run_time(dual):
    with load(dual, cache_bytes="min") as llm:
        served = {}
        for t in ((1.0, 1.0), (0.6, 1.0), (0.0, 0.0), (0.3, 0.6)):
            llm.thresholds = t
            assert llm.thresholds == t
            llm.reset_offload_stats()
            text(llm, 20, prompt=f"{PROMPT} {t[1]}")
            c = llm.offload_stats()["totals"]
            served[t] = [round(c[k], 3) for k in ("share_high", "share_low", "share_skip")]
        assert served[1.0, 1.0] == [1, 0, 0]
        assert served[0.6, 1.0][1] > 0.1 and served[0.6, 1.0][2] == 0
        assert served[0.0, 0.0][2] > 0.3
        assert served[0.3, 0.6][2] > 0.1
        for wrong, error in (((0.9, 0.6), ValueError), (0.5, TypeError), ("12", TypeError), ((0.5, None), TypeError)):
            with pytest.raises(error):
                llm.thresholds = wrong
        llm.policy = "lru"
        assert llm.policy == "lru" and text(llm, 4)
        with pytest.raises(ValueError, match="policy"):
            llm.policy = "best"
        with pytest.raises(ValueError, match="load the model with it"):
            llm.policy = "follow"
        assert llm.policy == "lru"


def test_policy_follow(dual):
    with load(dual, cache_bytes="30%", policy="follow", skip_mass=0.5) as llm:
        first = text(llm, 12)
        assert llm.policy == "follow" and llm.offload_stats()["settings"]["skip_mass"] == 0.5
        llm.policy = "lru"
        llm.policy = "follow"
        assert text(llm, 12) and first
    with load(dual, cache_bytes="30%", t1=1.0) as llm, load(dual, cache_bytes="30%", t1=1.0, policy="follow") as other:
        assert text(llm, 12) == text(other, 12)  # a policy changes no result where all are high


def test_trace(dual, tmp_path):
    with load(dual, cache_bytes="30%") as llm:
        with llm.trace(tmp_path / "é.npy"):
            text(llm, 10)
            with pytest.raises(HobbitError, match="already"):
                llm.start_trace(tmp_path / "b.npy")
        c = llm.offload_stats()["totals"]
        rows = np.load(tmp_path / "é.npy")
        assert len(rows) == c["tokens"]
        assert set(rows["layer"]) == set(range(6)) and rows["expert"].shape == (len(rows), 2)
        assert np.allclose(rows["weight"].sum(axis=1), 1, atol=1e-5)
        with pytest.raises(HobbitError, match="cannot create"):
            llm.start_trace(tmp_path / "none" / "x.npy")
        with pytest.raises(HobbitError, match="no trace"):
            llm.stop_trace()
        llm.start_trace(tmp_path / "c.npy")
        text(llm, 2)
    assert len(np.load(tmp_path / "c.npy")) > 0  # closing finishes it


@pytest.mark.parametrize("cache", ["30%", "8GiB"])  # with experts that come and go, and all in slots
def test_the_last_layer_is_computed_for_the_tokens_that_give_logits(dual, tmp_path, cache):
    """They keep their positions in the trace, and are all that counts there."""
    with load(dual, cache_bytes=cache, t1=1.0) as llm:
        with llm.trace(tmp_path / "t.npy"):
            llm.eval(llm.tokenize(b"Once upon a time there was a king.")[:9])
            llm.eval([5])
        layers = llm.offload_stats()["layers"]
    rows = np.load(tmp_path / "t.npy")
    assert [list(rows["pos"][rows["layer"] == i]) for i in (4, 5)] == [list(range(10)), [8, 9]]
    assert [x["tokens"] for x in layers] == [10] * 5 + [2]


def test_one_layer_that_is_first_and_last(tmp_path):
    source = make_model(tmp_path / "one.gguf", n_layer=1)
    convert(source, tmp_path / "dual.gguf", "keep", "q4_0", threads=1)
    args = {"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with Llama(source, **args) as stock, Llama(tmp_path / "dual.gguf", cache_bytes="min", t1=1.0, **args) as ours:
        for llm in (stock, ours):
            for n in (5, 1, 3):
                llm.eval([1, 5, 7, 9, 11][:n])
        a, b = (np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)) for llm in (stock, ours))
        assert np.array_equal(a, b)
        assert ours.offload_stats()["totals"]["tokens"] == 3


# --- hooks ---------------------------------------------------------------------------------------------


def test_select_hook_decides(dual):
    seen = []

    def select(layer, experts, weights, wanted):
        assert experts.shape == weights.shape == wanted.shape and experts.dtype == np.int32 and weights.dtype == np.float32
        assert np.allclose(weights.sum(axis=1), 1, atol=1e-5) and experts.min() >= 0 and experts.max() < 8
        seen.append((layer, experts))
        wanted[:] = 1

    with load(dual, cache_bytes="min") as llm:
        llm.set_hooks(select=select)
        text(llm, 5)
        c = llm.offload_stats()["totals"]
        assert c["wanted_low"] == c["requests"] and {layer for layer, _ in seen} == set(range(6))
        llm.set_hooks(select=lambda layer, experts, weights, wanted: np.full_like(wanted, 2))
        llm.reset_offload_stats()
        text(llm, 5, prompt="Something else")
        c = llm.offload_stats()["totals"]
        assert c["wanted_high"] == c["requests"] > 0
        n = len(seen)
        llm.set_hooks()
        text(llm, 5)
        assert len(seen) == n
        for wrong in (np.zeros((1, 1)), np.full((1, 2), 7), "x"):
            llm.set_hooks(select=lambda *_: wrong)
            with pytest.raises(ValueError, match="select hook"):
                text(llm, 2, prompt="Another")
        with pytest.raises(TypeError, match="event"):
            llm.set_hooks(event=3)


def test_event_hook_agrees_with_statistics(dual):
    events = []
    with load(dual, cache_bytes="30%", t2=0.8) as llm:
        llm.set_hooks(event=lambda *e: events.append(e))
        text(llm, 20)
        c = llm.offload_stats()["totals"]
    kinds = [e[0] for e in events]
    assert kinds.count("load") == c["loads_high"] + c["loads_low"] and kinds.count("evict") == c["evictions"]
    assert {p for k, _, _, p, _ in events if k == "skip"} == {"skip"} and {p for k, _, _, p, _ in events if k == "load"} == {"high", "low"}


def test_hooks_leave_no_types_behind(dual):
    """ctypes keeps every type that numpy.ctypeslib.as_array() has it make: one for each length of a batch."""
    def types():
        gc.collect()
        return sum(isinstance(x, type(ctypes.c_int * 1)) for x in gc.get_objects())

    with load(dual, cache_bytes="30%") as llm:
        llm.set_hooks(select=lambda *_: None, prefetch=lambda *_: None)
        llm.eval([1, 2, 3])
        before = types()
        for n in range(4, 20):
            llm.reset()
            llm.eval([1] * n)
        assert types() == before


def test_prefetch_from_a_hook(dual):
    with load(dual, cache_bytes="60%") as llm:
        llm.set_hooks(prefetch=lambda layer, experts, weights: layer < 5 and [llm.prefetch(layer + 1, e) for e in range(2)])
        text(llm, 20)
        c = llm.offload_stats()["totals"]
        assert c["prefetches"] > 0 and c["bytes_prefetch"] > 0
        for wrong in ((99, 0), (0, 99), (-1, 0)):
            with pytest.raises(ValueError):
                llm.prefetch(*wrong)
        with pytest.raises(ValueError, match="'low' or 'high'"):
            llm.prefetch(0, 0, "middle")


class Own(BaseException):
    pass


@pytest.mark.parametrize("hook", ["select", "prefetch", "event"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, Own])
def test_exception_in_a_hook_comes_out(dual, capfd, hook, error):
    def fail(*_):
        raise error("from the hook")

    with load(dual, t1=1.0, cache_bytes="min") as llm:
        good = text(llm, 8)
        llm.set_hooks(**{hook: fail})
        with pytest.raises(error, match="from the hook"):
            text(llm, 8, prompt="Something else")
        llm.set_hooks()
        assert text(llm, 8) == good
    assert capfd.readouterr().err == ""


def test_loading_in_an_event_hook_is_refused(dual):
    with load(dual, cache_bytes="30%") as llm:
        llm.set_hooks(event=lambda kind, layer, expert, *_: kind == "evict" and llm.prefetch(layer, expert))
        with pytest.raises(RuntimeError, match="an event hook must not load experts"):
            text(llm, 40)
        llm.set_hooks()
        assert text(llm, 4)


def test_running_the_model_in_a_hook_is_refused(dual):
    with load(dual) as llm:
        llm.set_hooks(prefetch=lambda *_: llm.eval([1]))
        with pytest.raises(RuntimeError, match="must not run the model"):
            text(llm, 2)
