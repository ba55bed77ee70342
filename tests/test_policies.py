"""Real decodes, event for event: the engine evicts, loads and skips exactly what the reference does."""

import re

import numpy as np
import pytest

import engine
from makers import make_model
from reference import Simulator, normalise

SETTINGS = [
    ("lru", (1, 1, 1, 1)), ("lfu", (1, 1, 1, 1)), ("lcu", (1, 1, 1, 1)), ("follow", (1, 1, 1, 1)),
    ("hobbit", (0.25, 0.25, 0.25, 0.25)), ("hobbit", (0.1, 0.2, 0.3, 0.7)), ("hobbit", (1, 0, 0, 0)), ("hobbit", (0, 0, 0, 1)),
]


def replay(rows, n_layers, sim):
    rows = rows.reshape(-1, n_layers)
    assert (rows["layer"] == np.arange(n_layers)).all()
    for token in rows:
        sim.token(int(token["pos"][0]), [(r["expert"], r["weight"]) for r in token])
    return sim.events


def check_events(source, policy, weights, tokens_of, *, t1, t2, fraction, low_fraction, tmp_path, restarts=2, skip_mass=1.0):
    with engine.Model(engine.pair(source), t1=t1, t2=t2, policy=engine.POLICIES[policy], policy_weights=weights, direct_io=0,
                      budget_kind=engine.FRACTION, cache_fraction=fraction, low_fraction=low_fraction, skip_mass=skip_mass) as model:
        got = model.events()
        info, group = model.info(), model.group()
        assert info.n_groups == 1
        tokens = tokens_of(model)
        with model.trace(tmp_path / "t.npy"), engine.Context(model, n_ctx=len(tokens) + 8) as c:
            part = len(tokens) // restarts
            for r in range(restarts):  # each a new sequence: the records start anew, the slots do not
                c.clear()
                for pos in range(part):
                    c.decode(tokens[r * part + pos:r * part + pos + 1], pos)
        stats = model.stats()
        sim = Simulator(policy, t1, t2, group.high_slots, group.low_slots, info.n_layers, weights,
                        group.low_expert_bytes / group.high_expert_bytes, group.n_expert, group.n_expert_used, info.high_bytes, skip_mass)
    expected = replay(np.load(tmp_path / "t.npy"), info.n_layers, sim)
    first = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), None)
    assert first is None, f"event {first}: {got[first - 3:first + 3]}, expected {expected[first - 3:first + 3]}"
    assert len(got) == len(expected)
    kinds = [e[0] for e in got]
    assert kinds.count("evict") == stats.evictions > 0
    assert kinds.count("load") == stats.loads_high + stats.loads_low
    assert kinds.count("skip") == stats.skips


@pytest.mark.parametrize("policy, weights", SETTINGS)
def test_default_model(policy, weights, tmp_path):
    check_events(engine.DEFAULT_MODEL, policy, weights, lambda m: engine.text_tokens(m, engine.SAMPLE_TEXT, 150),
                 t1=0.6, t2=0.9, fraction=0.3, low_fraction=0.2, tmp_path=tmp_path)


@pytest.mark.parametrize("policy, weights", SETTINGS)
def test_many_experts(policy, weights, tmp_path, many_experts):
    check_events(many_experts, policy, weights, lambda m: engine.prompt(60, m.n_vocab),
                 t1=0.3, t2=0.7, fraction=0.35, low_fraction=0.1, tmp_path=tmp_path)


@pytest.fixture(scope="module")
def many_experts():
    return make_model(engine.cache_dir() / "many-experts.gguf", "qwen3moe", n_layer=3, n_expert=24, n_used=6, ff=128)


@pytest.mark.parametrize("skip_mass", [0.0, 0.1, 0.3])
def test_bounded_skips(skip_mass, tmp_path, many_experts):
    check_events(many_experts, "hobbit", (1, 1, 1, 1), lambda m: engine.prompt(60, m.n_vocab),
                 t1=0.3, t2=0.4, fraction=0.35, low_fraction=0.1, tmp_path=tmp_path, skip_mass=skip_mass)


@pytest.mark.parametrize("policy, weights", SETTINGS[:5])
def test_trained_models(policy, weights, tmp_path, shared_dir):
    for name, t1, t2 in (("books-8x2-f16", 0.6, 0.9), ("books-64x8-f16", 0.5, 0.9)):
        check_events(shared_dir / "models" / f"{name}.gguf", policy, weights,
                     lambda m: engine.text_tokens(m, shared_dir / "text" / "valid.txt", 100, offset=5000),
                     t1=t1, t2=t2, fraction=0.25, low_fraction=0.1, tmp_path=tmp_path, restarts=1)


# --- the golden numbers of csrc/tests/test_golden.cpp ---


class Generator:
    """xorshift32, as there."""

    x = 2463534242

    def below(self, n):
        self.x ^= (self.x << 13) & 0xffffffff
        self.x ^= self.x >> 17
        self.x ^= (self.x << 5) & 0xffffffff
        return self.x % n


def golden_trace(n_layers, n_expert, n_used, n_tokens):
    g = Generator()
    experts = [[0] * n_used for _ in range(n_layers)]
    for token in range(n_tokens):
        rows = []
        for layer, chosen in enumerate(experts):
            keep = 2 if token > 0 and g.below(3) == 0 else 0
            for r in range(keep, n_used):
                a, b = g.below(n_expert), g.below(n_expert)
                e = (min(a, b) * 5 + layer * 3 + token // 100) % n_expert
                while e in chosen[:r]:
                    e = (e + 1) % n_expert
                chosen[r] = e
            rows.append((list(chosen), normalise([[(1 + g.below(999)) / 1024 for _ in range(n_used)]])[0]))
        yield rows


def golden_rows(repo):
    text = (repo / "csrc" / "tests" / "test_golden.cpp").read_text()
    for name, weights, numbers in re.findall(r'\{ "(\w+)[^"]*",\s*HOBBIT_POLICY_\w+,\s*\{ ([\d, ]+) \}, ([\d, ]+) \}', text):
        yield pytest.param(name, tuple(map(int, weights.split(","))), tuple(map(int, numbers.split(","))), id=f"{name} {weights}")


def test_golden_numbers(repo):
    found = list(golden_rows(repo))
    assert len(found) == 7
    trace = list(golden_trace(4, 16, 4, 500))
    for policy, weights, numbers in (p.values for p in found):
        sim = Simulator(policy, 0.6, 0.9, 20, 6, 4, weights, 8 / 32, 16, 4, 4 * 16 * 32)
        for pos, rows in enumerate(trace):
            sim.token(pos, rows)
        count = {}
        for kind, _, _, precision in sim.events:
            count[kind, precision] = count.get((kind, precision), 0) + 1
        got = tuple(count[key] for key in (("hit", 2), ("hit", 1), ("load", 2), ("load", 1), ("skip", 0)))
        assert (*got, count["evict", 2] + count["evict", 1]) == numbers, (policy, weights)
