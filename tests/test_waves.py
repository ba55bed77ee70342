"""Prompts that need more experts than there are slots (F21), and what they cost (F25)."""

import numpy as np
import pytest

import engine
from makers import make_model


@pytest.fixture(scope="module")
def many():
    """64 experts, 8 of them used, as books-64x8; random routing."""
    return make_model(engine.cache_dir() / "many.gguf", "qwen3moe", n_layer=2, n_expert=64, n_used=8, ff=64, types="f16")


def check_budgets(source, tokens_of, generate=4):
    """Ten budgets from the floor up give the logits of the largest, bit for bit."""
    dual = engine.pair(source)
    with engine.Model(dual, budget_kind=engine.AT_LEAST, cache_bytes=1 << 40) as model:
        info = model.info()
        prompts = {(n, ubatch): tokens_of(model, n) for n in (64, 256) for ubatch in (32, 256)}
        expected = {key: engine.run(model, p, n_ubatch=key[1], generate=generate)[0] for key, p in prompts.items()}
        assert model.group().high_slots == info.n_layers * info.n_expert
    for i in range(10):
        size = info.floor_bytes + i * (info.high_bytes - info.floor_bytes) // 10
        with engine.Model(dual, budget_kind=engine.BYTES, cache_bytes=size, direct_io=0, policy=i % 4) as model:
            for key, p in prompts.items():
                got = engine.run(model, p, n_ubatch=key[1], generate=generate)[0]
                assert np.array_equal(got, expected[key]), (i, key)


def test_any_budget_gives_the_same(many):
    check_budgets(many, lambda model, n: engine.prompt(n, model.n_vocab))


def test_any_budget_gives_the_same_trained(shared_dir):
    check_budgets(shared_dir / "models" / "books-64x8-f16.gguf",
                  lambda model, n: engine.text_tokens(model, shared_dir / "text" / "valid.txt", n), generate=2)


def test_below_the_floor_is_refused(many):
    with engine.Model(engine.pair(many), budget_kind=engine.MIN) as model:
        floor = model.info().floor_bytes
    with engine.Model(engine.pair(many), budget_kind=engine.BYTES, cache_bytes=floor) as model:
        assert model.info().budget_bytes == floor
    with pytest.raises(ValueError, match=str(floor)):
        engine.Model(engine.pair(many), budget_kind=engine.BYTES, cache_bytes=floor - 1)


def distinct_experts(path, ubatch):
    """Sum over ubatches and layers of the experts that were chosen at least once."""
    rows = np.load(path)
    n = 0
    for layer in np.unique(rows["layer"]):
        of_layer = rows[rows["layer"] == layer]["expert"]
        n += sum(len(np.unique(of_layer[i:i + ubatch])) for i in range(0, len(of_layer), ubatch))
    return n


@pytest.mark.parametrize("n_ubatch", [32, 128, 600])
def test_a_prompt_reads_each_expert_once(many, n_ubatch, tmp_path):
    for t1, t2 in ((1.0, 1.0), (0.3, 0.8)):
        with engine.Model(engine.pair(many), t1=t1, t2=t2, budget_kind=engine.FRACTION, cache_fraction=0.12) as model:
            with model.trace(tmp_path / "t.npy"):
                engine.run(model, engine.prompt(600, model.n_vocab), n_ubatch=n_ubatch)
            most = distinct_experts(tmp_path / "t.npy", n_ubatch)
            s = model.stats()
            assert s.loads_high + s.loads_low <= most
            assert s.bytes_read <= most * model.group().high_expert_bytes


def hit_rate(before, after):
    hits = sum(getattr(after, k) - getattr(before, k) for k in ("hits_high", "hits_low"))
    return 100 * hits / (after.requests - before.requests)


@pytest.mark.parametrize("policy", engine.POLICIES)
def test_a_prompt_leaves_the_decode_its_slots(shared_dir, tmp_path, policy):
    """Decode, then a prompt in another sequence, then the decode again: nearly as many hits as before."""
    dual = engine.pair(shared_dir / "models" / "books-64x8-f16.gguf")
    with engine.Model(dual, budget_kind=engine.FRACTION, cache_fraction=0.12, policy=engine.POLICIES[policy], direct_io=0) as model, \
            engine.Context(model, n_ctx=2048, n_ubatch=128, n_seq_max=2) as c:
        text = shared_dir / "text" / "valid.txt"
        tokens = engine.text_tokens(model, text, 664)
        with model.trace(tmp_path / "t.npy"):
            c.decode(tokens[:600])
        assert model.stats().bytes_read <= distinct_experts(tmp_path / "t.npy", 128) * model.group().high_expert_bytes
        rates = []
        for repeat in range(2):
            pos = 600 + 32 * repeat
            marks = [model.stats()]
            for i in range(32):
                c.decode(tokens[pos + i:pos + i + 1], pos + i)
                marks.append(model.stats())
            rates.append((hit_rate(marks[0], marks[16]), hit_rate(marks[16], marks[32])))
            if repeat == 0:
                c.decode(engine.text_tokens(model, text, 600, offset=50000), 0, 1)
        before, after = rates[0][1], rates[1][0]
        print(f"{policy}: hit rates {rates}")
        assert after >= before - 5
