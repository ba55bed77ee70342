"""hobbit doctor says what Llama then does; and --json of the commands that report."""

import json

import pytest

import engine
from hobbit_cpp import Llama, doctor, memory
from hobbit_cpp._version import LLAMA_CPP_COMMIT

MODEL = engine.DEFAULT_MODEL


@pytest.fixture(scope="module")
def dual():
    return engine.pair(MODEL, "q2_k")


def report(hobbit, *argv):
    status, out, err = hobbit("doctor", *argv, "--json")
    assert status == 0, err
    return json.loads(out)


def test_machine(hobbit):
    status, out, err = hobbit("doctor")
    assert (status, err) == (0, "")
    for line in ("build ", "libraries ", "CPU ", "memory ", "reserve ", "disk "):
        assert f"\n{line}" in f"\n{out}"
    r = report(hobbit)
    assert r["build"]["llama_cpp"] == LLAMA_CPP_COMMIT and r["machine"]["cores"] > 0 and any(d["name"] == "CPU" for d in r["machine"]["devices"])
    assert 0 < r["machine"]["memory"]["available"] <= r["machine"]["memory"]["limit"] <= r["machine"]["memory"]["total"]
    assert "disk" not in report(hobbit, "--no-disk")


def test_memory_of_a_control_group(hobbit, monkeypatch):
    small = memory.Readings(64 * 2**30, 50 * 2**30, 0, (memory.Group("g", 2**30, 900 * memory.MIB, 600 * memory.MIB),))
    monkeypatch.setattr(memory, "read_memory", lambda: small)
    m = report(hobbit, "--no-disk")["machine"]["memory"]
    assert (m["limit"], m["available"], m["limited"]) == (2**30, 724 * memory.MIB, True)
    assert "a control group's limit; the machine has 64.0 GiB" in hobbit("doctor", "--no-disk")[1]


@pytest.mark.parametrize("flags", [(), ("--cache", "25%"), ("--cache", "min"), ("--cache", "3MiB", "--io-threads", "2"), ("--t1", "0.3", "--t2", "0.8", "--policy", "lru", "--ctx", "64")])
def test_a_model_gets_what_was_said(hobbit, dual, flags):
    x = report(hobbit, dual, "--no-disk", "--threads", 1, *flags)["model"]
    names = {"--cache": ("cache_bytes", str), "--t1": ("t1", float), "--t2": ("t2", float), "--policy": ("policy", str), "--io-threads": ("n_io_threads", int), "--ctx": ("n_ctx", int)}
    given = {names[k][0]: names[k][1](v) for k, v in zip(flags[::2], flags[1::2])}
    with Llama(dual, **{"n_ctx": 512, "n_threads": 1, "verbose": False, **given}) as llm:
        s = llm.offload_stats()
        assert x["budget"] == s["budget"]["budget_bytes"] and x["floor_bytes"] == s["budget"]["floor_bytes"]
        assert (x["high_bytes"], x["low_bytes"]) == (s["budget"]["high_bytes"], s["budget"]["low_bytes"])
        assert (x["t1"], x["t2"], x["policy"], x["threads"]) == (s["settings"]["t1"], s["settings"]["t2"], s["settings"]["policy"], llm.n_threads)
        assert x["layers"] == len(s["layers"]) and x["sidecar"] == s["sidecar"]


def test_advice(hobbit, dual, monkeypatch):
    assert report(hobbit, dual, "--no-disk")["model"]["advice"].startswith("all experts fit")
    assert "about 25 % of the experts fit" in hobbit("doctor", dual, "--no-disk", "--cache", "25%")[1]
    assert "this is refused" in hobbit("doctor", dual, "--no-disk", "--cache", "10000")[1]
    assert report(hobbit, MODEL, "--no-disk")["model"]["advice"] == "it fits as it is"
    monkeypatch.setattr(memory, "read_memory", lambda: memory.Readings(2**30, 40 * memory.MIB, 0, ()))
    assert report(hobbit, MODEL, "--no-disk")["model"]["advice"] == "it has experts and does not fit: hobbit convert"


@pytest.mark.parametrize("argv, message", [(("nothing.gguf",), "does not exist"), (("{dual}", "--cache", "lots"), "--cache is 'lots'"), (("{dual}", "--t1", "nan"), "t1 must be"),
                                           (("{dual}", "--ctx", "2000000000"), "KV cache takes"), ((__file__,), "is not a GGUF file")])
def test_errors(hobbit, dual, argv, message):
    status, out, err = hobbit("doctor", *(a.format(dual=dual) for a in argv))
    assert status == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("size", [1, 5000, 3 * 2**20, 9 * 2**20 + 5])
def test_disk(tmp_path, size):
    path = tmp_path / "x"
    path.write_bytes(b"x" * size)
    d = doctor.disk(path, threads=3)
    assert 0 < d["bytes"] <= size and d["bytes_per_second"] > 0
    assert d["bytes"] >= size // d["piece"] * d["piece"]  # all of a small file, once
    assert doctor.disk(path, seconds=0, threads=1)["bytes"] <= d["piece"]


def test_json_of_the_others(hobbit, dual, tmp_path):
    r = json.loads(hobbit("convert", MODEL, "-o", tmp_path / "a.gguf", "--json", "--threads", 1)[1])
    assert r["ratio"] == r["low_bytes"] / r["high_bytes"] and {row["copy"] for row in r["rows"]} == {"high", "low"} and r["rows"][0]["bits"] == 8.5
    r = json.loads(hobbit("info", dual, "--json")[1])
    assert r["kind"] == "main" and r["experts"] == 8 and r["sidecar"]["low"] == "q2_k" and set(r["sidecar"]["bytes"]) == {"expert, high", "expert, low"}
    assert json.loads(hobbit("info", MODEL, "--json")[1])["bytes"]["expert"] == {"q8_0": 10027008}
    status, _, err = hobbit("info", tmp_path / "nothing.gguf", "--json")
    assert status == 1 and err.startswith("error: ")
    r = json.loads(hobbit("bench", dual, "--repeat", 1, "--prompt-tokens", 8, "-n", 3, "--threads", 1, "--json")[1])
    assert r[0]["path"] == str(dual) and r[0]["median"]["decode"] > 0 and len(r[0]["runs"]) == 1
    argv = ("run", dual, "-p", "Once upon a time", "-n", 6, "--threads", 1, "--temp", 0, "--t1", 1)
    r = json.loads(hobbit(*argv, "--json")[1])
    assert r["text"] == hobbit(*argv)[1][:-1] and r["generation"]["decode"]["evaluated"] == 5 and r["offload"]["mode"] == "high"
    assert hobbit("run", dual, "--json")[2] == "error: --json is for a prompt: give -p or -f\n"
