"""hobbit calibrate: what it chooses is the best of what it may choose from, and what it writes is what loading takes."""

import dataclasses
import json
import types

import pytest

import engine
from hobbit_cpp import Llama, _calibrate_search as search
from hobbit_cpp._evaluate_stats import Value
from hobbit_cpp._progress import Progress
from hobbit_cpp._tuning_measure import Bench, Setting, spread
from hobbit_cpp._tuning_models import Models
from hobbit_cpp._tuning_predict import Prediction, Predictor
from hobbit_cpp.calibrate import calibrate

ONE = {"n_threads": 1, "n_threads_batch": 1}
SMALL = {"text": engine.SAMPLE_TEXT, "budget": "3MiB", "types": ["q5_k", "q4_k", "q3_k"], "n_ctx": 64, "chunks": 8, "speed": 1e9, **ONE}
LIMIT = 0.015


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def found(work):
    return calibrate(engine.DEFAULT_MODEL, max_kl=LIMIT, work=work, **SMALL)


def test_the_promise(found):
    assert found.fitted.divergence.kl_mean.value <= LIMIT or found.setting.uniform
    assert found.quality_kept and found.bytes_kept and abs(found.bytes_off) < 0.1
    assert found.unseen.passes == found.fitted.passes == found.n_tokens == SMALL["chunks"] * 63
    within = [f for f in found.finalists if f.kl.value <= LIMIT]
    assert found.predicted_bytes == min(f.predicted.bytes_per_token for f in within) and found.n_predicted > 100
    assert found.ceiling.mean_bits <= found.ceiling.bits and found.gain > 0


def test_loading_takes_the_profile(found):
    with Llama(found.model, n_ctx=64, verbose=False, **ONE) as llm:
        s = llm.offload_stats()["settings"]
    assert {k: s[k] for k in ("t1", "t2", "policy", "low_fraction", "cache_bytes")} == {**found.setting.arguments, "cache_bytes": 3 * 2**20}
    assert s["profile"] == found.profile
    with open(found.profile, encoding="utf-8") as f:
        assert json.load(f)["found"]["unseen_bytes_per_token"] == found.unseen.bytes_per_token


def test_report(found):
    text = found.report()
    assert text.startswith("Take ") and f"{100 * found.bytes_off:+.1f} % to the prediction, within the promised 10 %" in text
    assert "water-filling" in text and found.model in text and found.profile in text
    json.dumps(found.to_dict(), allow_nan=False)
    off = dataclasses.replace(found, predicted_bytes=found.unseen.bytes_per_token / 1.2)
    assert not off.bytes_kept and "NOT within the promised 10 %" in off.report()
    bad = dataclasses.replace(found, max_kl=1e-6)
    assert not bad.quality_kept and "OVER THE LIMIT" in bad.report()
    fits = dataclasses.replace(found, fits=["q5_k"])
    assert "an ordinary q5_K file runs without any loading, and is the better choice" in fits.report()
    mixed = dataclasses.replace(found, setting=Setting("q5_k", "q3_k", 0.7, 1.0), predicted_bytes=90.0, best_uniform=("q5_k", 100.0))
    assert mixed.report().startswith("Take q5_K+q3_K, T1 0.7, T2 1. It loads 10 % less than the best uniform type within the limit, q5_K.")
    plain = dataclasses.replace(found, setting=Setting("q5_k", "q2_k", 1.0, 1.0), predicted_bytes=100.0, best_mixed=("q5_K+q3_K", 110.0))
    assert "Take q5_K for all experts (policy hobbit): no mixed setting within the limit loads less; the best, q5_K+q3_K, loads 10 % more." in plain.report()


def test_every_prediction(found, work):
    """The first of the short list loads least of all that the grid has within the limit."""
    with Models(engine.DEFAULT_MODEL, work, threads=1) as models, \
            Bench(models, engine.SAMPLE_TEXT, n_ctx=64, pick=lambda c: spread(c, 4, 0, 2), **ONE) as bench:
        ladder = models.ladder(SMALL["types"])
        kl = {t: v.value for t, v in found.uniform.items()}
        predictor = Predictor(models, bench.record(), 3 * 2**20, kl, 0.5)
        settings = search.grid(models, ladder, found.uniform, LIMIT)
        listed = search.shortlist(predictor, settings, LIMIT, 2, Progress(1, False))
        everything = [p for p in predictor.predict(settings) if p.kl <= LIMIT]
        assert listed[0].bytes_per_token <= min(p.bytes_per_token for p in everything)
        assert all(p.kl <= LIMIT for p in listed) and any(p.setting.uniform for p in listed)
        lower, upper = predictor.bounds(Setting("q5_k", "q3_k", 0.5, 0.9))
        between = predictor.predict([Setting("q5_k", "q3_k", 0.5, 0.9)])[0].kl
        assert kl["q5_k"] == lower < between < upper


class FakeBench:
    """Measures what a function says."""

    def __init__(self, kl_of):
        self.kl_of, self.measured = kl_of, []

    def measure(self, setting, cache_bytes):
        self.measured.append(setting)
        return types.SimpleNamespace(divergence=types.SimpleNamespace(kl_mean=Value(self.kl_of(setting))), bytes_per_token=1.0)


def candidate(t1, n, kl):
    return Prediction(Setting("q5_k", "q3_k", t1, 1.0), n, 0.5, kl)


def test_what_is_over_the_limit_when_measured_is_not_taken():
    candidates = [candidate(0.1, 10, 0.009), candidate(0.2, 11, 0.006), candidate(0.3, 12, 0.004), Prediction(Setting("q5_k", "q2_k", 1.0, 1.0), 20, 0.5, 0.003)]
    bench = FakeBench(lambda s: {0.1: 0.018, 0.2: 0.012, 0.3: 0.008, 1.0: 0.003}[s.t1])
    chosen, measured = search.choose(bench, candidates, 0.01, 1, lambda text: None)
    # twice what was predicted: the second, 0.006, is not even tried
    assert [s.t1 for s in bench.measured] == [0.1, 0.3] and chosen.predicted is candidates[2] and len(measured) == 2
    bench = FakeBench(lambda s: 0.004 if s.uniform else 0.5)
    assert search.choose(bench, candidates, 0.01, 1, lambda text: None)[0].predicted.setting.uniform
    assert [p.setting.t1 for p in search.standing(candidates, measured, 0.01)] == [0.3, 1.0]
    assert search.choose(FakeBench(lambda s: 0.5), candidates[:3], 0.01, 1, lambda text: None)[0] is None


def test_uniform_types_are_judged_as_far_as_needed():
    kl = {"q8_0": 0.001, "q6_k": 0.002, "q5_k": 0.004, "q4_k": 0.01, "q3_k": 0.05}
    judged = []

    def quality(kind):
        judged.append(kind)
        return types.SimpleNamespace(kl_mean=Value(kl[kind]))

    models = types.SimpleNamespace(uniform=lambda t: (t, "q2_k"), pair=lambda high, low: f"{high}.gguf", own="f16", possible=lambda high, low: True)
    bench = types.SimpleNamespace(quality=quality, models=models)
    found = search.judge_types(bench, list(kl), 0.01, lambda text: None)
    assert judged == ["q3_k", "q4_k", "q5_k", "q6_k"]
    settings = search.grid(models, list(kl), found, 0.01)
    assert {s.high for s in settings} == {"q4_k", "q5_k", "q6_k"}  # two above the narrowest within the limit
    assert {s.low for s in settings if s.high == "q5_k" and not s.uniform and s.t1 != s.t2} == {"q4_k", "q3_k"}
    found = search.judge_types(bench, list(kl), 0.0005, lambda text: None)
    assert {s.high for s in search.grid(models, list(kl), found, 0.0005)} == {"f16"}


def test_output_and_what_is_refused(hobbit, work, tmp_path):
    argv = ["calibrate", engine.DEFAULT_MODEL, "--text", engine.SAMPLE_TEXT, "--budget", "3MiB", "--types", "q5_K", "--ctx", 32, "--chunks", 1, "--threads", 1,
            "--work", work, "--read-speed", "1GB"]
    out = tmp_path / "out.gguf"
    status, text, _ = hobbit(*argv, "--max-kl", 10, "-o", out)
    assert status == 0 and f"model: {out}" in text and (tmp_path / "out.profile.json").exists() and (tmp_path / "out.experts.gguf").exists()
    assert f"[profile {tmp_path / 'out.profile.json'}: " in hobbit("run", out, "-p", "x", "-n", 1, "--ctx", 64)[2]
    for more, words in ((("--max-kl", 10, "-o", out), "exists already"), (("--max-kl", 10, "-o", tmp_path / "out"), "must be called NAME.gguf"),
                        (("--max-kl", 10, "-o", tmp_path / "nowhere" / "out.gguf"), "nowhere does not exist"),
                        (("--max-kl", 10, "--budget", "banana"), "--budget is 'banana': give a size"),
                        (("--max-kl", 0), "--max-kl must be"), (("--max-kl", "nan"), "--max-kl must be"), (("--max-kl", 10, "--budget", "min"), "differs between types"),
                        (("--max-kl", 10, "--budget", "8KiB"), "give more --budget"), (("--max-kl", 10, "--chunks", 500), "chunks")):
        status, text, err = hobbit(*argv, *more)
        assert status == 1 and text == "" and words in err.strip().splitlines()[-1], more


def test_no_profile_for_a_broken_promise(hobbit, work, tmp_path, monkeypatch):
    """What was fine on the fitting text is ten times as far off on the other."""
    real = Bench.measure
    seen = []

    def measure(self, setting, cache_bytes):
        m = real(self, setting, cache_bytes)
        seen.append(self)
        return m if self is seen[0] else dataclasses.replace(m, divergence=dataclasses.replace(m.divergence, kl_mean=Value(50.0, 1.0)))

    monkeypatch.setattr(Bench, "measure", measure)
    out = tmp_path / "out.gguf"
    (tmp_path / "out.profile.json").write_text("of a pair that was there before")
    status, text, err = hobbit("calibrate", engine.DEFAULT_MODEL, "--text", engine.SAMPLE_TEXT, "--budget", "3MiB", "--types", "q5_K", "--ctx", 32, "--chunks", 1,
                               "--threads", 1, "--work", work, "--max-kl", 10, "-o", out)
    assert status == 1 and "OVER THE LIMIT" in text and "no profile was written" in text
    assert err.strip().splitlines()[-1].startswith("error: on unseen text the divergence is over 10 ") and not (tmp_path / "out.profile.json").exists()
