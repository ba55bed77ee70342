"""Profiles: what loading takes from them, what goes before them, and what is refused."""

import json
import pickle

import pytest

import engine
from gguf_tools.reader import Reader
from hobbit_cpp import Llama
from hobbit_cpp.convert import convert
from hobbit_cpp.evaluate import evaluate
from hobbit_cpp.profiles import Profile, path_for, read_profile

FOUND = {"t1": 0.35, "t2": 0.85, "policy": "lfu", "low_fraction": 0.125, "cache_bytes": 3 * 2**20}
KW = {"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "é small.gguf"
    convert(engine.DEFAULT_MODEL, path, "keep", "q2_k", threads=1)
    return path


def pair_id(path):
    with Reader(path) as reader:
        return reader.get("hobbit.pair_id")


@pytest.fixture
def profile(model):
    p = Profile(path_for(model), pair_id(model), FOUND, {"setting": "for people"})
    p.save()
    yield p
    model.with_name("é small.profile.json").unlink(missing_ok=True)


def in_force(model, **given):
    with Llama(model, **KW, **given) as llm:
        s = llm.offload_stats()["settings"]
        return {k: s[k] for k in FOUND}, llm.profile


def test_loading_takes_it(model, profile):
    assert in_force(model) == (FOUND, profile.path)
    assert read_profile(model, profile.pair_id) == profile


def test_what_is_given_comes_first(model, profile):
    assert in_force(model, low_fraction=0, cache_bytes="50%")[0] == {**FOUND, "low_fraction": 0, "cache_bytes": "50%"}
    # a t1 above the profile's t2 would be no pair: both go
    assert in_force(model, t1=0.9)[0] == {**FOUND, "t1": 0.9, "t2": 1.0}
    assert in_force(model, policy="lcu", policy_weights=None)[0] == {**FOUND, "policy": "lcu"}
    assert in_force(model, policy_weights=(1, 1, 2, 1))[0] == {**FOUND, "policy": "hobbit"}


def test_left_aside(model, profile):
    default, path = in_force(model, profile=False, cache_bytes="50%")
    assert path is None and default == {"t1": 0.6, "t2": 1.0, "policy": "hobbit", "low_fraction": 0, "cache_bytes": "50%"}
    with pytest.raises(TypeError, match="profile must be True or False"):
        Llama(model, profile="no", **KW)
    with Llama(model, profile=False, cache_bytes="50%", **KW) as llm:
        state = pickle.dumps(llm)
    with pickle.loads(state) as again:
        assert again.profile is None


def test_the_command_says_so(hobbit, model, profile):
    argv = ("run", model, "-p", "Once", "-n", 2, "--threads", 1, "--ctx", 64)
    status, _, err = hobbit(*argv)
    assert status == 0 and f"[profile {profile.path}: T1 0.35, T2 0.85, policy lfu, cache 3.0 MiB]\n" in err
    assert "T1 0.5, T2 1, policy lfu, cache 60%]" in hobbit(*argv, "--t1", "0.5", "--cache", "60%")[2]
    assert "profile" not in hobbit(*argv, "--no-profile", "--cache", "60%")[2]
    assert f"profile {profile.path}" in hobbit(*argv, "--stats")[2]


def test_evaluate_measures_what_loading_would_do(model, profile):
    report = evaluate(model, text=engine.SAMPLE_TEXT, n_ctx=32, chunks=1, n_threads=1, n_threads_batch=1)
    run = report.runs[0]
    assert f"T1 0.35, T2 0.85, policy lfu, cache 3.0 MiB\nprofile: {profile.path}\n" in report.table()
    assert (run.settings["t1"], run.settings["policy"], run.settings["profile"]) == (0.35, "lfu", profile.path)


def test_another_pair(hobbit, model, profile):
    Profile(profile.path, "0" * 64, FOUND).save()
    with pytest.raises(ValueError, match="is the profile of another pair than .*é small.gguf: calibrate again, remove it, or leave it aside with --no-profile"):
        Llama(model, **KW)
    status, _, err = hobbit("run", model, "-p", "x", "-n", 1, "--ctx", 64)
    assert status == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert hobbit("run", model, "-p", "x", "-n", 1, "--ctx", 64, "--cache", "50%", "--no-profile")[0] == 0


@pytest.mark.parametrize("text, words", [
    ("{", "not JSON"), ("[1]", "no profile of hobbit calibrate"), ('{"settings": {}}', "no profile of hobbit calibrate"),
    ("\xff", "not JSON"), ("NEW", "is of version 2, this program knows 1"), ("T1", "t1 must be"), ("ODD", "n_io_threads is no setting of a profile"),
])
def test_damaged(model, profile, text, words):
    good = {"hobbit_profile": 1, "pair_id": profile.pair_id, "settings": FOUND, "found": {}}
    changed = {"NEW": {**good, "hobbit_profile": 2}, "T1": {**good, "settings": {"t1": "much"}}, "ODD": {**good, "settings": {"n_io_threads": 9}}}
    with open(profile.path, "wb") as f:
        f.write(json.dumps(changed[text]).encode() if text in changed else text.encode("latin-1"))
    with pytest.raises(ValueError, match=words) as info:
        Llama(model, **KW)
    assert "\n" not in str(info.value) and profile.path in str(info.value)


def test_nothing_half_written(model, profile, monkeypatch):
    with pytest.raises(TypeError):
        Profile(profile.path, profile.pair_id, {"t1": object()}).save()
    assert read_profile(model, profile.pair_id) == profile
    assert [p.name for p in model.parent.iterdir() if ".tmp" in p.name] == []
