"""Simulations: the events of real decodes, and the commands hobbit trace and hobbit simulate."""

import json
import re

import numpy as np
import pytest

import engine
from hobbit_cpp import simulate as s
from hobbit_cpp.cli import main


@pytest.fixture(scope="module")
def dual():
    return engine.pair(engine.DEFAULT_MODEL)


@pytest.fixture(scope="module")
def recorded(dual, tmp_path_factory):
    """A trace of the sample text, as `hobbit trace` makes it."""
    path = tmp_path_factory.mktemp("trace") / "é.npy"
    assert main(["trace", str(dual), "--text", str(engine.SAMPLE_TEXT), "-o", str(path), "-n", "400", "--window", "200", "--threads", "2"]) == 0
    return path


# --- against the engine -----------------------------------------------------------------------


def decode(source, tokens_of, path, **params):
    """(events, statistics, group) of a real run, token by token in two sequences; its trace goes to path."""
    with engine.Model(engine.pair(source), direct_io=0, **params) as model:
        events = []
        hooks = engine.hobbit.hobbit_hooks()
        hooks.event = engine.hobbit.hobbit_event_fn(lambda _user, *what: events.append(what))
        engine.hobbit.hobbit_set_hooks(model.h, hooks)
        tokens = tokens_of(model)
        with model.trace(path), engine.Context(model, n_ctx=len(tokens) + 8) as c:
            half = len(tokens) // 2
            for part in (tokens[:half], tokens[half:]):
                c.clear()
                for pos, token in enumerate(part):
                    c.decode([token], pos)
        engine.hobbit.hobbit_set_hooks(model.h, None)
        return events, model.stats(), model.group()


def check_events(source, policy, tokens_of, path, *, t1, t2, fraction, low_fraction, weights=(0.25, 0.25, 0.25, 0.25)):
    """Every hit, load, eviction and skip of a real run, with its slot, is that of the simulation, in order."""
    got, stats, group = decode(source, tokens_of, path, t1=t1, t2=t2, policy=engine.POLICIES[policy], policy_weights=weights,
                               budget_kind=engine.FRACTION, cache_fraction=fraction, low_fraction=low_fraction)
    expected = []
    settings = {"policy_weights": weights} if policy == "hobbit" else {}
    with s.Simulation(s.read_trace(path), t1=t1, t2=t2, policy=policy, cache_bytes=f"{100 * fraction:g}%", low_fraction=low_fraction,
                      event=lambda *what: expected.append(what), **settings) as sim:
        sim.run()
        r = sim.result()
    first = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), None)
    assert first is None, f"event {first}: {got[first - 3:first + 3]}, simulated {expected[first - 3:first + 3]}"
    assert len(got) == len(expected) and {e[0] for e in got} >= {engine.HIT, engine.LOAD, engine.EVICT}
    assert (r["high_slots"], r["low_slots"]) == ([group.high_slots], [group.low_slots])
    for name in ("requests", "hits_high", "hits_low", "misses_high", "misses_low", "skips", "upgrades", "evictions", "loads_high", "loads_low", "bytes_read", "graphs"):
        assert r[name] == getattr(stats, name), name
    cost = group.low_expert_bytes / group.high_expert_bytes
    assert r["penalty"] == pytest.approx((stats.misses_high + cost * stats.misses_low) / r["tokens"])
    assert r["bytes_per_token"] == stats.bytes_read / r["tokens"]


@pytest.mark.parametrize("policy", ["lru", "lfu", "lcu", "hobbit", "follow"])
def test_events_of_the_default_model(policy, tmp_path):
    check_events(engine.DEFAULT_MODEL, policy, lambda m: engine.text_tokens(m, engine.SAMPLE_TEXT, 120), tmp_path / "t.npy",
                 t1=0.6, t2=0.9, fraction=0.3, low_fraction=0.2)


@pytest.mark.parametrize("name, t1, t2", [("books-8x2-f16", 0.6, 1.0), ("books-64x8-f16", 0.5, 0.9)])
def test_events_of_trained_models(name, t1, t2, tmp_path, shared_dir):
    check_events(shared_dir / "models" / f"{name}.gguf", "hobbit", lambda m: engine.text_tokens(m, shared_dir / "text" / "valid.txt", 120, offset=5000),
                 tmp_path / "t.npy", t1=t1, t2=t2, fraction=0.25, low_fraction=0.1, weights=(0.1, 0.2, 0.3, 0.7))


# --- traces -----------------------------------------------------------------------------------


def test_batches_are_played_token_by_token(dual, recorded, tmp_path):
    """A trace of batches is brought into the order of the tokens; recorded token by token it is the same."""
    trace = s.read_trace(recorded)
    raw = np.load(recorded)
    assert (raw["layer"][:100] == 0).all()  # a batch, layer after layer
    assert trace.n_tokens == 400 and (trace.rows["layer"].reshape(-1, 6) == np.arange(6)).all()
    assert (trace.rows["pos"][trace.starts] == np.tile(np.arange(200), 2)).all()
    key = ["seq", "pos", "layer"]
    assert np.array_equal(np.sort(raw, order=[*key, "expert"]), np.sort(trace.rows, order=[*key, "expert"]))
    np.save(tmp_path / "t.npy", trace.rows)
    again = s.read_trace(tmp_path / "t.npy")
    assert np.array_equal(again.rows, trace.rows) and np.array_equal(again.starts, trace.starts) and again.layers is None


def test_two_sequences_in_a_batch():
    rows = np.zeros(10, s.row_type(1))
    rows["layer"] = [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]  # of the second batch, seq 0 is not followed further
    rows["seq"] = [0, 0, 1, 0, 0, 1, 1, 0, 1, 0]
    rows["pos"] = [0, 1, 0, 0, 1, 0, 1, 0, 1, 0]
    got, starts = s._by_token(rows)
    assert starts.tolist() == [0, 2, 4, 6, 8]
    assert got[["seq", "pos"]][starts].tolist() == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
    assert got["layer"].tolist() == [0, 1] * 5


def test_a_token_of_a_prompt_may_lack_the_last_layer():
    rows = np.zeros(6, s.row_type(1))
    rows["layer"] = [0, 0, 1, 1, 2, 0]
    rows["pos"] = [0, 1, 0, 1, 1, 2]
    got, starts = s._by_token(rows)
    assert starts.tolist() == [0, 2, 5]
    assert got["layer"].tolist() == [0, 1, 0, 1, 2, 0]


def test_layers_in_the_file(dual, recorded):
    layers = s.read_trace(recorded).layers
    assert np.array_equal(layers, s.read_layers(dual))
    assert layers["block"].tolist() == list(range(6)) and (layers["n_expert"] == 8).all() and (layers["group"] == 0).all()
    assert (layers["high_bytes"] > layers["low_bytes"]).all()


@pytest.mark.parametrize("content, message", [
    (b"", "is not a NumPy file"), (b"GGUF and so on", "is not a NumPy file"), (np.zeros(3), "holds no routing trace"),
    (np.zeros(0, s.row_type(2)), "without rows"), (np.zeros((2, 2), s.row_type(2)), "holds no routing trace"),
])
def test_files_that_are_no_traces(content, message, tmp_path):
    path = tmp_path / "t.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    with pytest.raises(ValueError, match=message):
        s.read_trace(path)


@pytest.mark.parametrize("slots, error", [((2**40, 2), ValueError), ((4.7, 2.2), TypeError), ((4,), ValueError), ([(4, 1), (4, 1)], ValueError)])
def test_slots_are_pairs(recorded, slots, error):
    with pytest.raises(error, match="slots must be"):
        s.Simulation(s.read_trace(recorded), slots=slots)


def test_layers_that_are_damaged(recorded):
    trace = s.read_trace(recorded)
    far = trace.layers.copy()
    far["group"][0] = 2**30
    for layers in far, trace.layers[:0]:
        with pytest.raises(ValueError, match="the trace is damaged"):
            s.Simulation(trace, layers, slots=(4, 1))


def test_truncated_trace(recorded, tmp_path):
    for n in (-200, 3000):
        (tmp_path / "t.npy").write_bytes(recorded.read_bytes()[:n])
        with pytest.raises(ValueError, match="damaged"):
            s.read_trace(tmp_path / "t.npy")


# --- simulations ------------------------------------------------------------------------------


def test_many_at_once_are_each_alone(recorded):
    trace = s.read_trace(recorded)
    configurations = [{"policy": p, "slots": x, "t1": t1} for p in ("lru", "hobbit", "clairvoyant") for x in ((6, 1), (24, 4)) for t1 in (0.6, 1.0)]
    seen = []
    results = s.simulate_all(trace, configurations, threads=3, progress=seen.append)
    assert seen == [1] * 12
    assert results == [s.simulate(trace, **c) for c in configurations]
    assert results != s.simulate_all(trace, configurations[::-1])
    penalty = {(r["policy"], r["high_slots"][0], r["t1"]): r["penalty"] for r in results}
    for slots in (6, 24):
        for t1 in (0.6, 1.0):
            assert penalty["clairvoyant", slots, t1] < penalty["hobbit", slots, t1] < penalty["lru", slots, t1]
    assert all(r["misses_low"] + r["hits_low"] == 0 for r in results if r["t1"] == 1)


def test_everything_resident(recorded):
    """Each expert is loaded once where all have slots."""
    trace = s.read_trace(recorded)
    r = s.simulate(trace, slots=(48, 1), t1=1.0)
    assert r["evictions"] == 0
    assert r["loads_high"] == len(np.unique(trace.rows["layer"].astype(int)[:, None] * 100 + trace.rows["expert"]))


def test_bounded_skips(hobbit, recorded):
    trace = s.read_trace(recorded)
    skips = [s.simulate(trace, slots=(9, 2), t1=0.3, t2=0.3, skip_mass=x)["skips"] for x in (0, 0.2, 0.4, 1)]
    assert skips[0] == 0 and skips[3] > skips[1] > 0 and sorted(skips) == skips
    argv = ("simulate", recorded, "--slots", "9+2", "--policy", "hobbit", "--t1", 0.3, "--t2", 0.3, "--skip-mass", 0.2, "--json")
    assert json.loads(hobbit(*argv)[1])["results"][0]["skips"] == skips[1]


def test_follow_pays_for_its_tables(recorded):
    trace = s.read_trace(recorded)
    hobbit, follow = (s.simulate(trace, cache_bytes="40%", policy=p) for p in ("hobbit", "follow"))
    assert follow["budget_bytes"] == hobbit["budget_bytes"] and follow["slot_bytes"] <= hobbit["slot_bytes"]
    layers = np.repeat(trace.layers[:1], 8)
    layers["n_expert"], layers["n_expert_used"] = 256, 8
    layers["high_bytes"] *= 8
    hobbit, follow = (s.simulate(trace, layers, cache_bytes="40%", policy=p) for p in ("hobbit", "follow"))
    assert 0 < hobbit["slot_bytes"] - follow["slot_bytes"] < 0.02 * 256 * 8 * int(layers["high_bytes"][0].sum())


def test_wrong_settings(recorded):
    trace = s.read_trace(recorded)
    for settings, error, message in (
        ({"polcy": "lru"}, TypeError, "no setting 'polcy'"), ({"policy": "best"}, ValueError, "policy must be"), ({"slots": (1, 1)}, ValueError, "1 high slots"),
        ({"cache_bytes": "auto"}, ValueError, "auto"), ({"cache_bytes": 5}, ValueError, "one step can need"), ({"t1": 0.9, "t2": 0.5}, ValueError, "t2 must be"),
        ({"policy": "clairvoyant", "policy_weights": (1, 1, 1, 1)}, ValueError, "policy_weights"),
    ):
        with pytest.raises(error, match=message):
            s.simulate(trace, **settings)
    with pytest.raises(ValueError, match="of another model"):
        s.simulate(trace, trace.layers[:5])
    with pytest.raises(ValueError, match="name the model"):
        s.simulate(s.Trace(trace.rows, trace.starts, None))
    broken = trace.rows.copy()
    broken["expert"][601] = -7
    with pytest.raises(s.HobbitError, match="row 601 .*expert -7"):
        s.simulate(s.Trace(broken, trace.starts, trace.layers))


def test_a_model_cannot_be_played_with(dual):
    with engine.Model(dual) as model:
        row = np.zeros(1, s.row_type(2))
        assert engine.hobbit.hobbit_simulate_run(model.h, row.ctypes.data, 1, 2) < 0
        assert "serves a model" in engine.hobbit.hobbit_last_error().decode()
        engine.hobbit.hobbit_simulate_free(model.h)  # not one of those: nothing happens
        assert model.info().n_layers == 6


# --- the commands -----------------------------------------------------------------------------


def test_command_trace(hobbit, dual, tmp_path):
    argv = ("trace", dual, "--text", engine.SAMPLE_TEXT, "-o", tmp_path / "t.npy", "-n", 90, "--window", 30, "--threads", 1)
    status, out, err = hobbit(*argv)
    assert (status, err) == (0, "") and re.fullmatch(r".*t\.npy: 90 tokens in 3 sequences, 6 layers, [\d.]+ KiB\n", out)
    trace = s.read_trace(tmp_path / "t.npy")
    assert trace.rows["pos"][trace.starts].tolist() == list(range(30)) * 3
    assert np.allclose(trace.rows["weight"].sum(axis=1), 1, atol=1e-5)
    assert hobbit(*argv)[0] == 1 and hobbit(*argv, "--force")[0] == 0
    for more, message in ((("--window", 1), "--window must be"), (("--tokens", 0), "--tokens must be"), (("--text", tmp_path / "none"), "No such file")):
        status, out, err = hobbit(*argv, "--force", *more)
        assert (status, out) == (1, "") and message in err and err.count("\n") == 1
    (tmp_path / "empty").write_bytes(b"")
    assert "is empty" in hobbit(*argv, "--force", "--text", tmp_path / "empty")[2]
    status, _, err = hobbit("trace", engine.DEFAULT_MODEL, "--text", engine.SAMPLE_TEXT, "-o", tmp_path / "x.npy")
    assert status == 1 and "is an ordinary GGUF" in err and not (tmp_path / "x.npy").exists()


def test_command_simulate(hobbit, dual, recorded):
    status, out, err = hobbit("simulate", recorded, "--cache", "30%", "40%", "--policy", "lru", "lfu", "hobbit", "clairvoyant", "--t2", 0.9, 1)
    lines = out.splitlines()
    assert (status, err) == (0, "") and lines[0].startswith("400 tokens, 6 layers of 8 experts, 2 used") and len(lines) == 4 + 16
    assert re.fullmatch(r" +0\.6 +0\.9 +30% +\d+\+1  lru +[\d.]+ +[\d.]+ +\+0\.0 % +[-+][\d.]+ % +0 % +[\d.]+ MiB", lines[4])
    assert lines[7].split()[-3:-2] == ["%"] and "100 %" in lines[7]
    assert hobbit("simulate", recorded, "--model", dual, "--cache", "30%", "40%", "--policy", "lru", "lfu", "hobbit", "clairvoyant", "--t2", 0.9, 1)[1] == out

    status, out, _ = hobbit("simulate", recorded, "--slots", "9+2", "--policy", "hobbit", "lcu", "--weights", "1,0,0,1", "1,1,1,1", "--json")
    found = json.loads(out)
    assert status == 0 and found["tokens"] == 400
    assert [(r["policy"], r["policy_weights"], r["high_slots"], r["low_slots"], r["cache_bytes"]) for r in found["results"]] == [
        ("hobbit", [1, 0, 0, 1], [9], [2], None), ("hobbit", [1, 1, 1, 1], [9], [2], None), ("lcu", None, [9], [2], None)]
    assert found["results"][0] == json.loads(json.dumps(s.simulate(s.read_trace(recorded), slots=(9, 2), policy_weights=(1, 0, 0, 1))))


@pytest.mark.parametrize("argv, message", [
    (("--cache", "lots"), "--cache is 'lots'"), (("--cache", "5000"), "one step can need"), (("--slots", "9"), "--slots is '9'"),
    (("--slots", "9+1", "--cache", "25%"), "give one of them"), (("--weights", "1,1"), "--weights is '1,1'"), (("--t1", "0.9", "--t2", "0.5"), "t2 must be"),
    (("--policy", "lru", "--weights", "1,1,1,1"), "belong to policy hobbit"), (("--threads", "0"), "threads must be"), (("--io-threads", "0"), "--io-threads must be"),
    (("--model", "none.gguf"), "none.gguf"),
])
def test_command_simulate_errors(hobbit, recorded, argv, message):
    status, out, err = hobbit("simulate", recorded, *argv)
    assert (status, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err
