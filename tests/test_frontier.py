"""hobbit frontier: its marks, its models, its predictions against what is measured, and what it refuses."""

import dataclasses
import json
import os
import sys

import numpy as np
import pytest

import engine
import makers
import reference
from gguf_tools.reader import Reader
from hobbit_cpp import _tuning_plot as plot
from hobbit_cpp import Llama, simulate
from hobbit_cpp._tuning_measure import Bench, Setting, _miss_speed, budget_bytes, spread
from hobbit_cpp._tuning_models import Models
from hobbit_cpp._tuning_pareto import at_equal_loss, pareto
from hobbit_cpp._tuning_predict import Predictor, Shares, served, wanted
from hobbit_cpp._tuning_speed import read_speed
from hobbit_cpp.convert import ConvertError, convert
from hobbit_cpp._evaluate_stats import Value
from hobbit_cpp.frontier import change, frontier, parse_pair

ONE = {"n_threads": 1, "n_threads_batch": 1}
BUDGET = 3 * 2**20


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def models(work):
    with Models(engine.DEFAULT_MODEL, work, threads=1) as m:
        yield m


@pytest.fixture(scope="module")
def bench(models):
    with Bench(models, engine.SAMPLE_TEXT, n_ctx=64, pick=lambda c: spread(c, 6), **ONE) as b:
        yield b


@pytest.fixture(scope="module")
def trace(bench):
    return bench.record()


@pytest.fixture(scope="module")
def report(work):
    return frontier(engine.DEFAULT_MODEL, text=engine.SAMPLE_TEXT, cache=BUDGET, types=["Q5_K", "q3_k"], pairs=[("q5_k", "q3_k")], thresholds=[(0.7, 1.0)],
                    n_ctx=64, chunks=6, speed=1e9, work=work, **ONE)


# --- marks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_pareto_against_brute_force(seed):
    rng = np.random.default_rng(seed)
    points = [tuple(p) for p in rng.integers(0, 6 if seed % 2 else 1000, (40, 2)).tolist()]  # few values: many ties
    better = [any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points) for p in points]
    assert pareto(points) == [not b for b in better]


def test_line_of_the_uniform_types():
    line = [(100.0, 0.01, 0.001), (400.0, 0.0001, None), (200.0, 0.001, 0.0002), (300.0, 0.5, 0.0)]  # the last loses to the second in both
    assert at_equal_loss(line, 0.001)[0] == pytest.approx(200)
    cost, error = at_equal_loss(line, 0.01 ** 0.5 * 0.001 ** 0.5)
    assert cost == pytest.approx(20000 ** 0.5)
    # half way: half of either end's relative error; the cost doubles where the loss falls to a tenth
    assert error == pytest.approx(np.log(2) / np.log(10) * np.hypot(0.05, 0.1))
    # the point's own error, by moving it
    base, (up, _) = at_equal_loss(line, 0.0005, 0.00001), at_equal_loss(line, 0.00051)
    assert base[1] ** 2 - at_equal_loss(line, 0.0005)[1] ** 2 == pytest.approx((up / base[0] - 1) ** 2, rel=0.05)
    assert at_equal_loss(line, 0.02) is None and at_equal_loss(line, 0.00001) is None and at_equal_loss(line, 0) is None


def test_spread():
    chunks = list(range(10))
    assert spread(chunks, 5) == [0, 2, 4, 6, 8] and spread(chunks, 10) == chunks
    fit, unseen = spread(chunks, 3, 0, 2), spread(chunks, 3, 1, 2)
    assert fit == [0, 3, 6] and unseen == [1, 5, 8]
    with pytest.raises(ValueError, match="the text has 10 chunks and 12 are needed"):
        spread(chunks, 6, 0, 2)


# --- models -----------------------------------------------------------------------------------


def test_sizes_of_pairs_that_are_not_made(models, trace):
    for high, low in (("q5_k", "q3_k"), models.reference, models.uniform("q2_k")):
        assert np.array_equal(models.layers(trace.layers, high, low), simulate.read_layers(models.pair(high, low)))
    high = trace.layers["high_bytes"].sum() * 8
    assert models.stored("q8_0", None) == high and models.bits("q8_0") == 8.5


def test_sizes_where_rows_do_not_fit(tmp_path):
    source = makers.make_model(tmp_path / "odd.gguf", "llama", d=256, ff=96, n_layer=3)
    with Models(source, tmp_path / "w", threads=1) as m:
        recorded = simulate.read_layers(m.pair(*m.reference))
        made = simulate.read_layers(m.pair("q5_k", "q3_k"))
        assert np.array_equal(m.layers(recorded, "q5_k", "q3_k"), made)
        assert made["high_bytes"][0, 2] > made["low_bytes"][0, 2]  # down: rows of 96 hold no k-quants


def test_a_source_of_several_types(tmp_path):
    """As in a Q4_K_M: what is narrower already stays as it is, and pairs whose low copy would not be smaller are not made."""
    source = makers.make_model(tmp_path / "m.gguf", "llama", types=lambda name: "q6_k" if "down" in name else "q4_k")
    with Models(source, tmp_path / "w", threads=1) as m:
        assert m.own == "q6_k" and m.ladder() == ["q5_k", "q4_k", "q3_k", "q2_k"]
        recorded = simulate.read_layers(m.pair(*m.reference))
        made = simulate.read_layers(m.pair("q5_k", "q2_k"))
        assert np.array_equal(m.layers(recorded, "q5_k", "q2_k"), made)
        assert (made["high_bytes"][:, :2] == recorded["high_bytes"][:, :2]).all() and (made["high_bytes"][:, 2] < recorded["high_bytes"][:, 2]).all()
        assert m.possible("q5_k", "q3_k") and not m.possible("q5_k", "q4_k")
    with pytest.raises(ConvertError, match="no routed experts"):
        Models(makers.make_model(tmp_path / "dense.gguf", "llama", n_dense=2), tmp_path / "other")
    with pytest.raises(ConvertError, match="none.gguf"):
        Models(tmp_path / "none.gguf", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_models_are_used_again(tmp_path):
    source = makers.make_model(tmp_path / "a.gguf")
    said = []
    with Models(source, tmp_path / "w", threads=1, say=said.append) as m:
        path = m.pair("q6_k", "q4_k")
        stamp = os.stat(path).st_mtime_ns
        assert m.pair("q6_k", "q4_k") == path and os.stat(path).st_mtime_ns == stamp and len(said) == 1
        with open(path.removesuffix(".gguf") + ".experts.gguf", "r+b") as f:
            f.truncate(9000)
        m.pair("q6_k", "q4_k")
        assert len(said) == 2
    makers.make_model(source, seed=1)  # the same shapes, other weights
    os.utime(source, ns=(stamp + 10**11, stamp + 10**11))
    with Models(source, tmp_path / "w", threads=1, say=said.append) as m:
        m.pair("q6_k", "q4_k")
    assert len(said) == 3 and not [f for f in os.listdir(tmp_path / "w") if f.endswith(".tmp")]


@pytest.mark.parametrize("link", [False, True])
def test_a_converted_model(tmp_path, link):
    """Its high copies are what everything is made from."""
    source = makers.make_model(tmp_path / "a.gguf")
    dual = tmp_path / "dual.gguf"
    convert(source, dual, "keep" if link else "q8_0", "q2_k", link=link, threads=1)
    said = []
    for _ in range(2):
        with Models(dual, tmp_path / "w", threads=1, say=said.append) as m, Reader(m.source) as joined:
            assert m.own == ("f16" if link else "q8_0")
            if link:
                assert m.source == str(source)
                continue
            assert joined.get("hobbit.role") is None
            with Reader(dual.with_name("dual.experts.gguf")) as experts, Reader(source) as original:
                assert set(joined.tensors) == set(original.tensors)
                for name, t in joined.tensors.items():
                    there = experts.tensors.get(name + ".high")
                    assert joined.read(t) == (experts.read(there) if there else original.read(original.tensors[name]))
    assert len(said) == (0 if link else 1)
    with pytest.raises(ConvertError, match="is the sidecar of a converted model: name its main file"):
        Models(dual.with_name("dual.experts.gguf"), tmp_path / "w")


def test_types_that_cannot_be_made(models):
    assert models.own == "q8_0" and models.ladder() == ["q6_k", "q5_k", "q4_k", "q3_k", "q2_k"]
    with pytest.raises(ConvertError, match=r"f16 \(16 bits\) cannot be made from .*, whose experts are q8_0"):
        models.ladder(["f16"])
    with pytest.raises(ConvertError, match="the type q9: no such type"):
        models.ladder(["q9"])
    with pytest.raises(ConvertError, match="importance matrix"):
        models.ladder(["iq2_xxs"])


# --- predictions ------------------------------------------------------------------------------


@pytest.mark.parametrize("t1, t2", [(0.6, 0.9), (0.3, 1.0), (0.7, 0.7), (0.0, 0.5), (1.0, 1.0)])
def test_what_the_rule_wants(trace, t1, t2):
    g = trace.rows["weight"]
    wish = reference.rule(g, t1, t2)
    count, square = wanted(g, t1, t2)
    for of, weight in ((count, np.ones_like(g)), (square, g.astype(np.float64) ** 2)):
        for name, kind in (("high", reference.HIGH), ("low", reference.LOW), ("skip", reference.SKIP)):
            assert getattr(of, name) == pytest.approx(weight[wish == kind].sum() / weight.sum(), abs=1e-7), name


def test_served_better_than_wanted():
    count, square = Shares(0.5, 0.4, 0.1), Shares(0.9, 0.08, 0.02)
    as_wanted = served(count, square, 0.5, 0.4, 0.1)
    assert (as_wanted.high, as_wanted.low, as_wanted.skip) == pytest.approx((0.9, 0.08, 0.02))
    s = served(count, square, 0.75, 0.2, 0.05)  # half of both found in memory at high precision
    assert (s.high, s.low, s.skip) == pytest.approx((0.95, 0.04, 0.01))
    assert served(Shares(1, 0, 0), Shares(1, 0, 0), 1, 0, 0) == Shares(1, 0, 0)


def test_all_high_loads_exactly_what_was_predicted(models, bench, trace):
    """The routing is the model's own there, so simulator and engine do the same."""
    setting = Setting(*models.reference, 1.0, 1.0)
    p, = Predictor(models, trace, BUDGET).predict([setting])
    found = bench.measure(setting, BUDGET)
    assert found.passes == trace.n_tokens == bench.n_tokens == 6 * 63 and bench.n_scored == 6 * 31
    assert found.bytes_per_token == p.bytes_per_token > 0 and found.hit_rate == p.hit_rate
    assert found.divergence.kl_mean.value < 1e-3 and p.kl == 0  # one by one and in batches: roundings, which 8-bit activations magnify


def test_what_was_measured_is_not_measured_again(models, bench, work, monkeypatch):
    setting = Setting("q5_k", "q3_k", 0.7, 1.0)
    first = bench.measure(setting, BUDGET)
    calls = []
    real = bench._evaluator.measure
    monkeypatch.setattr(bench._evaluator, "measure", lambda *a, **k: calls.append(a) or real(*a, **k))
    assert bench.measure(setting, BUDGET) == first and not calls
    with open(work / "measured.jsonl", "ab") as f:
        f.write(b'{"key": "cut of')  # a run that was killed
    with Bench(models, engine.SAMPLE_TEXT, n_ctx=64, pick=lambda c: spread(c, 6), **ONE) as again:
        monkeypatch.setattr(again._evaluator, "measure", lambda *a, **k: calls.append(a) or real(*a, **k))
        assert again.measure(setting, BUDGET) == first and not calls
        other = again.measure(setting, BUDGET + 2**20)
        assert len(calls) == 1 and other.bytes_per_token < first.bytes_per_token
        assert again._ledger.__class__(again._ledger.path)._found == again._ledger._found  # readable after the cut line
    with Bench(models, engine.SAMPLE_TEXT, n_ctx=64, pick=lambda c: spread(c, 3), **ONE) as fewer:
        assert fewer.measure(setting, BUDGET).passes == 3 * 63


def test_report(report):
    uniform, mixed = report.points[:3], report.points[3]
    assert [p.setting.name for p in uniform] == ["q8_0", "q5_K", "q3_K"] and str(mixed.setting) == "q5_K+q3_K, T1 0.7, T2 1"
    assert report.cache_bytes == BUDGET and (report.n_tokens, report.n_scored) == (378, 186)
    for p in report.points:  # the routing of a coarser model is a little different
        assert p.bytes_per_token == pytest.approx(p.predicted_bytes, rel=0.1)
        assert p.predicted_tokens_per_second == 1e9 / p.predicted_bytes and p.tokens_per_second > 0
    assert uniform[0].bytes_per_token > uniform[1].bytes_per_token > uniform[2].bytes_per_token
    assert uniform[0].kl.value < uniform[1].kl.value < uniform[2].kl.value
    assert uniform[1].bytes_per_token > mixed.bytes_per_token > uniform[2].bytes_per_token
    assert uniform[1].kl.value < mixed.kl.value < uniform[2].kl.value
    equal, error = at_equal_loss([(p.bytes_per_token, p.kl.value, p.kl.error) for p in uniform[1:]], mixed.kl.value, mixed.kl.error)
    assert mixed.over_uniform.value == pytest.approx(mixed.bytes_per_token / equal) and mixed.over_uniform.error > 0
    assert mixed.over_uniform.error == pytest.approx(error * mixed.over_uniform.value) and uniform[1].over_uniform is None
    assert [p.pareto for p in report.points] == pareto([(p.bytes_per_token, p.kl.value) for p in report.points])
    assert mixed.storage_bytes == report.points[1].storage_bytes + report.points[2].storage_bytes
    assert change(mixed.over_uniform) in report.table() and not report.left_out


def test_verdict(report):
    """The sentence follows the numbers, and error bars count."""
    *uniform, mixed = report.points

    def says(ratio, error):
        point = dataclasses.replace(mixed, over_uniform=None if ratio is None else Value(ratio, error))
        return dataclasses.replace(report, points=[*uniform, point]).verdict()

    assert says(0.9, 0.02) == "q5_K+q3_K, T1 0.7, T2 1 loads least against a uniform type of its divergence: -10 ± 2 %."
    assert says(0.9, 0.06).startswith("No mixed setting here loads less than a uniform type of the same divergence by more than the error bars")
    assert says(1.1, 0.01).endswith("take the smaller file. 1 of 1 mixed settings load more than a uniform type would.")
    assert "nothing to compare" in says(None, None)


def test_command(hobbit, work):
    """What does not fit is left out and named; JSON is what the report says."""
    argv = ("frontier", engine.DEFAULT_MODEL, "--text", engine.SAMPLE_TEXT, "--work", work, "--types", "q3_K", "--ctx", "32", "--chunks", "1", "--threads", "1",
            "--read-speed", "1GB")
    status, out, err = hobbit(*argv, "--cache", "100%", "--pairs", "--json")
    found = json.loads(out)
    assert status == 0 and [p["name"] for p in found["points"]] == ["q8_0", "q3_K"] and found["speed"] == 1e9
    assert err == ""  # no terminal
    status, out, _ = hobbit(*argv, "--cache", "1500KiB", "--pairs", "q5_K+q3_K", "--thresholds", "0.7/0.7", "0.6/1", "--policy", "lru")
    assert status == 0 and "q5_K, the rest skipped, T1 0.7, policy lru" in out and "q5_K+q3_K, T1 0.6, T2 1, policy lru" in out
    status, out, _ = hobbit(*argv, "--cache", "10MiB", "--pairs")
    assert "All experts as q3_K fit into this memory: an ordinary q3_K file needs no offloading at all." in out


@pytest.mark.parametrize("more, words", [
    (("--cache", "auto"), "the memory is 'auto', which differs between types"), (("--cache", "nine"), "--cache is 'nine'"),
    (("--cache", "8KiB"), "below what one token can need for every setting"), (("--cache", "50%", "--pairs", "q5_K"), "a pair is a high and a low type"),
    (("--cache", "50%", "--pairs", "q3_K+q5_K"), "is not smaller than"), (("--cache", "50%", "--thresholds", "0.9/0.6"), "--t2 must be at least --t1"),
    (("--cache", "50%", "--thresholds", "1"), "give T1/T2"), (("--cache", "50%", "--chunks", "99"), "the text has"), (("--cache", "50%", "--chunks", "0"), "chunks must be"),
    (("--cache", "50%", "--types", "f32"), "cannot be made from"), (("--cache", "50%", "--png", "x.jpg"), "is no name for a picture"),
    (("--cache", "50%", "--read-speed", "fast"), "is not a size"), (("--cache", "50%", "--ctx", "2"), "--ctx must be at least 4"),
])
def test_refused(hobbit, work, more, words):
    status, out, err = hobbit("frontier", engine.DEFAULT_MODEL, "--text", engine.SAMPLE_TEXT, "--work", work, "--threads", "1", *more)
    last = err.strip().splitlines()[-1]
    assert status == 1 and out == "" and last.startswith("error: ") and words in last


def test_text_that_is_not_there(hobbit, tmp_path):
    status, _, err = hobbit("frontier", engine.DEFAULT_MODEL, "--text", tmp_path / "none.txt", "--cache", "50%", "--work", tmp_path / "w")
    assert status == 1 and "none.txt: No such file" in err and not (tmp_path / "w").exists()


def test_budget(trace):
    high = int((trace.layers["high_bytes"].sum(axis=1) * trace.layers["n_expert"]).sum())
    assert budget_bytes("25%", trace.layers) == high // 4 and budget_bytes("2MiB", trace.layers) == budget_bytes(2**21, trace.layers) == 2**21


def test_pair_names():
    assert parse_pair(" q6_K+q4_K ") == ("q6_k", "q4_k")


def test_speed(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * 2**20 + 5))
    assert read_speed(path, 100000, seconds=0.05) > 0
    assert read_speed(path, 2**30, threads=1, seconds=0) > 0
    (tmp_path / "short").write_bytes(b"x")
    assert read_speed(tmp_path / "short", 4096, seconds=0) > 0


@pytest.mark.parametrize("miss, speed", [("auto", 3e9), ("cpu", 2e9), ("fetch", None)])
def test_speed_of_misses_in_host_memory(models, miss, speed):
    """As the engine reports it; where it has none, the storage's is taken."""
    given = {} if miss == "fetch" else {"host_copies": True, "miss": miss, "miss_speeds": (1e9, 2e9)}
    with Llama(models.pair(*models.reference), t1=1.0, cache_bytes="50%", n_ctx=64, verbose=False, **given) as llm:
        assert _miss_speed(llm.offload_stats()["settings"]) == speed


# --- pictures ---------------------------------------------------------------------------------


def test_without_the_library(hobbit, work, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    status, _, err = hobbit("frontier", engine.DEFAULT_MODEL, "--text", engine.SAMPLE_TEXT, "--work", work, "--cache", "50%", "--png", "x.png")
    assert status == 1 and "drawing needs altair and vl-convert-python" in err and "pip install '.[plot]'" in err


def test_pictures(report, tmp_path):
    pytest.importorskip("altair", exc_type=ImportError)
    pytest.importorskip("vl_convert", exc_type=ImportError)
    for name in ("é.png", "é.html"):
        plot.save(report, str(tmp_path / name))
    assert (tmp_path / "é.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (tmp_path / "é.html").read_text(encoding="utf-8")
    assert "q5_K+q3_K 0.7/1" in text and "<script src" not in text and "<link" not in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["é.html", "é.png"]
