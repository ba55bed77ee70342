"""What the engine does with the router's weights is what the rule says, count for count."""

import numpy as np
import pytest

import engine
from makers import make_model
from reference import HIGH, LOW, SKIP, normalise, rule
from tiny_archs import make_deepseek2, make_llama4, put_nan

THRESHOLDS = [(0.6, 0.9), (0.0, 1.0), (0.3, 0.6), (0.45, 0.45), (0.0, 0.0), (1.0, 1.0)]


def check_counts(source, text=None, n_tokens=40):
    """Every request is a miss; the shares of high, low and skipped must be the rule's for the recorded weights."""
    folder = engine.cache_dir()
    with engine.Model(engine.pair(source), force_miss=1, direct_io=0, budget_kind=engine.MIN) as model, \
            engine.Context(model, n_ctx=len(THRESHOLDS) * n_tokens + 8) as c:
        n = len(THRESHOLDS) * n_tokens
        tokens = engine.text_tokens(model, text, n) if text else engine.prompt(n, model.n_vocab)
        pos = 0
        for t1, t2 in THRESHOLDS:
            model.set_thresholds(t1, t2)
            engine.hobbit.hobbit_reset_stats(model.h)
            with model.trace(folder / "selection.npy"):
                for _ in range(n_tokens):
                    c.decode(tokens[pos:pos + 1], pos)
                    pos += 1
            rows, s = np.load(folder / "selection.npy"), model.stats()
            assert len(rows) == n_tokens * model.info().n_layers
            wish = rule(rows["weight"], t1, t2)
            high, low, skip = ((wish == x).sum() for x in (HIGH, LOW, SKIP))
            assert (s.wanted_high, s.wanted_low, s.wanted_skip) == (high, low, skip), (t1, t2)
            assert (s.misses_high, s.misses_low, s.skips) == (high, low, skip), (t1, t2)
            assert (s.hits_high, s.hits_low, s.upgrades) == (0, 0, 0)
            assert s.requests == wish.size and s.loads_high + s.loads_low == high + low


def test_default_model():
    check_counts(engine.DEFAULT_MODEL, engine.SAMPLE_TEXT)


@pytest.mark.parametrize("n_expert, n_used", [(16, 4), (8, 8), (4, 1)])
def test_tiny_models(tmp_path, n_expert, n_used):
    check_counts(make_model(tmp_path / f"sel-{n_expert}-{n_used}.gguf", "qwen3moe", n_expert=n_expert, n_used=n_used, ff=256), n_tokens=15)


@pytest.mark.parametrize("name", ["books-8x2-f16", "books-8x2-small-f16", "books-64x8-f16"])
def test_trained_models(shared_dir, name):
    check_counts(shared_dir / "models" / f"{name}.gguf", shared_dir / "text" / "valid.txt", n_tokens=50)


# --- reference against itself ---


def test_rule_by_hand():
    w = normalise([[4, 2, 1, 1], [1, 4, 1, 2]])
    assert rule(w, 0.5, 0.75).tolist() == [[HIGH, HIGH, LOW, SKIP], [LOW, HIGH, SKIP, HIGH]]
    assert rule(w, 0.0, 0.0).tolist() == [[HIGH, SKIP, SKIP, SKIP], [SKIP, HIGH, SKIP, SKIP]]
    assert (rule(np.float32([[np.nan, 1, 2]]), 0, 0) == HIGH).all()
    assert normalise(np.float32([[3, 1]])).tolist() == [[0.75, 0.25]]


# --- odd gate weights (F28) ---


def test_decisions_do_not_depend_on_the_scale_of_the_weights(tmp_path):
    seen = []
    for scale in (1.0, 2.5, 16.0):
        source = make_deepseek2(tmp_path / f"scale-{scale}.gguf", scale=scale, weights_norm=False)
        with engine.Model(engine.pair(source), t1=0.4, t2=0.8, force_miss=1, direct_io=0) as model:
            with model.trace(tmp_path / "t.npy"):
                engine.run(model, engine.prompt(60, model.n_vocab))
            rows = np.load(tmp_path / "t.npy")
            rows = rows[rows["layer"] == 0]  # the first layer's router sees the same in all three
            s = model.stats(0)
            seen.append((rows["expert"].tolist(), rule(rows["weight"], 0.4, 0.8).tolist(), (s.wanted_high, s.wanted_low, s.wanted_skip)))
            np.testing.assert_allclose(rows["weight"].sum(axis=1), 1.0, rtol=1e-6)
    assert seen[0] == seen[1] == seen[2]
    assert min(seen[0][2]) > 0


def test_one_expert_is_always_high(tmp_path):
    source = make_llama4(tmp_path / "llama4.gguf")
    with engine.Model(source) as stock, engine.Model(engine.pair(source), t1=0.0, t2=0.0, budget_kind=engine.MIN) as model:
        prompt = engine.prompt(50, stock.n_vocab)
        expected, _ = engine.run(stock, prompt, generate=5)
        got, _ = engine.run(model, prompt, generate=5)
        np.testing.assert_array_equal(got, expected)
        s = model.stats()
        assert s.requests == s.wanted_high == 55 * model.info().n_layers


def test_nan_in_the_router(tmp_path):
    source = make_model(tmp_path / "nan.gguf", "qwen3moe", n_expert=8, n_used=2, ff=256)
    put_nan(source, "blk.1.ffn_gate_inp.weight")
    with engine.Model(source) as stock, engine.Model(engine.pair(source), t1=0.3, t2=0.6, budget_kind=engine.MIN) as model:
        prompt = engine.prompt(40, stock.n_vocab)
        expected, _ = engine.run(stock, prompt)
        got, _ = engine.run(model, prompt)
        assert np.isnan(expected).all() and np.isnan(got).all()
        s = model.stats()
        assert s.requests == s.wanted_high + s.wanted_low + s.wanted_skip
        assert s.requests == s.hits_high + s.hits_low + s.misses_high + s.misses_low + s.skips
        nan_layer = model.stats(1)
        assert nan_layer.wanted_high == nan_layer.requests
