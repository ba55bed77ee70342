"""Routing that leans to residents (lean=...)."""

import numpy as np
import pytest

import engine
from hobbit_cpp.evaluate import evaluate
from makers import make_model
from tiny_archs import make_deepseek2, make_gpt_oss

ROUTERS = {
    "softmax": lambda path: make_model(path, "qwen3moe", n_layer=3, n_expert=12, n_used=3, ff=256),
    "softmax of the chosen": make_gpt_oss,
    "sigmoid, groups": lambda path: make_deepseek2(path, v3=True),
}


@pytest.fixture(scope="module")
def dual():
    return engine.pair(engine.DEFAULT_MODEL, "q2_k")


def decode(dual, tokens, trace=None, n_ubatch=1, part=0.3, **params):
    """(statistics, logits, rows of the trace)."""
    with engine.Model(dual, direct_io=0, **engine.fraction(dual, part), **params) as model:
        tokens = tokens(model)
        if trace is None:
            logits, _ = engine.run(model, tokens, n_ubatch=n_ubatch)
            return model.stats(), logits, None
        with model.trace(trace):
            logits, _ = engine.run(model, tokens, n_ubatch=n_ubatch)
        return model.stats(), logits, np.load(trace)


def sample(model):
    return engine.text_tokens(model, engine.SAMPLE_TEXT, 150)


def test_more_hits_and_fewer_bytes(dual):
    plain, logits, _ = decode(dual, sample)
    lean, leaned, _ = decode(dual, sample, lean=0.2)
    assert plain.leaned == 0 < lean.leaned < lean.requests
    assert lean.hits_high > plain.hits_high and lean.bytes_read < 0.95 * plain.bytes_read
    assert not np.array_equal(leaned, logits)
    little, _, _ = decode(dual, sample, lean=0.02)
    assert little.leaned < lean.leaned


@pytest.mark.parametrize("name", ROUTERS)
def test_the_best_expert_and_the_weights_stay(name, tmp_path):
    """Of the first layer, whose router sees the same whatever the experts did."""
    dual = engine.pair(ROUTERS[name](tmp_path / "m.gguf"))

    def tokens(model):
        return engine.prompt(60, model.n_vocab)

    rows = {}
    for lean in (0.0, 1.0):
        s, logits, r = decode(dual, tokens, tmp_path / f"{lean}.npy", part=0.6, lean=lean)
        assert np.isfinite(logits).all() and (s.leaned > 0) == (lean > 0)
        rows[lean] = r[r["layer"] == 0]
    changed = 0
    for a, b in zip(rows[0.0], rows[1.0]):
        assert len(set(b["expert"])) == len(b["expert"])
        plain = dict(zip(a["expert"], a["weight"]))
        lean = dict(zip(b["expert"], b["weight"]))
        best = a["expert"][0]
        assert best == b["expert"][0]
        for e in plain.keys() & lean.keys():  # normalised over other experts: as parts of the best one's
            assert plain[e] / plain[best] == pytest.approx(lean[e] / lean[best], rel=1e-4)
        changed += plain.keys() != lean.keys()
    assert changed > 0


def test_batches_of_a_prompt_do_not_lean(dual):
    plain, logits, _ = decode(dual, sample, n_ubatch=50)
    lean, leaned, _ = decode(dual, sample, n_ubatch=50, lean=0.5)
    assert np.array_equal(leaned, logits) and lean.leaned == 0


def test_a_router_without_numbers(tmp_path):
    from tiny_archs import put_nan
    source = make_model(tmp_path / "nan.gguf", "qwen3moe", n_expert=8, n_used=2, ff=256)
    put_nan(source, "blk.1.ffn_gate_inp.weight")
    stats, logits, _ = decode(engine.pair(source), lambda m: engine.prompt(10, m.n_vocab), lean=0.5, prefetch=1, prefetch_copy=2)
    assert np.isnan(logits).all() and stats.predicted_1 == 0


def test_evaluate_serves_it_token_by_token_and_compares_with_none(dual):
    report = evaluate(dual, text=engine.SAMPLE_TEXT, n_ctx=64, chunks=2, t1=1.0, lean=0.2, cache_bytes="30%", n_threads=1)
    run = report.runs[0]
    assert run.mode == "served" and run.totals["leaned"] > 0 and run.settings["lean"] == pytest.approx(0.2)
    assert run.divergence.kl_mean.value > 1e-4
    assert report.reference.totals["leaned"] == 0
