"""hobbit chat, as a user runs it through a pipe."""

import json
import os
import subprocess
import sys

import pytest

import engine
from hobbit_cpp._cli_chat import read_history, write_history

MODEL = engine.DEFAULT_MODEL


@pytest.fixture(scope="module")
def dual():
    return engine.pair(MODEL, "q2_k")


def chat(model, said, *flags):
    done = subprocess.run([sys.executable, "-m", "hobbit_cpp", "chat", str(model), "--threads", "1", "--chat-format", "chatml", "-n", "6", "--seed", "1", *map(str, flags)],
                          input=said, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_history_is_kept(dual, tmp_path):
    path = tmp_path / "é.json"
    done = chat(dual, "Hello\nAnd you?\n", "--history", path, "--system", "Be kind.", "--t1", 1)
    assert done.returncode == 0 and done.stderr.count("[prompt") == 2
    first = json.loads(path.read_text(encoding="utf-8"))
    assert [m["role"] for m in first] == ["system", "user", "assistant", "user", "assistant"] and first[3]["content"] == "And you?"
    assert first[2]["content"] in done.stdout and first[4]["content"] in done.stdout
    done = chat(dual, "Bye\n", "--history", path, "--t1", 1)
    assert done.returncode == 0 and "4 messages so far" in done.stderr
    again = json.loads(path.read_text(encoding="utf-8"))
    assert again[:5] == first and again[5] == {"role": "user", "content": "Bye"} and len(again) == 7
    chat(dual, "", "--history", path, "--system", "Be brief.")
    done = chat(dual, "New\n", "--history", path, "--system", "Be brief.")
    assert [m["content"] for m in json.loads(path.read_text(encoding="utf-8"))][:2] == ["Be brief.", "New"]
    assert os.listdir(tmp_path) == ["é.json"]


def test_commands(dual, tmp_path):
    path = tmp_path / "h.json"
    done = chat(dual, "/undo\nOne\nTwo\n/undo\n/again\n/stats\n/thresholds 0.3 0.5\n/thresholds 2\n/thresholds 0.9 0.5\n/nonsense\n", "--history", path)
    assert done.returncode == 0
    for what in ("nothing was said yet", "taken back: Two", "evictions", "T1 0.3, T2 0.5", "takes two numbers", "t2 must be at least t1", "there is no command /nonsense", "/reset "):
        assert what in done.stderr
    assert [m["content"] for m in json.loads(path.read_text()) if m["role"] == "user"] == ["One"]
    done = chat(dual, "/reset\n", "--history", path)
    assert done.returncode == 0 and json.loads(path.read_text()) == []


def test_the_oldest_turns_give_way(dual, tmp_path):
    path = tmp_path / "h.json"
    done = chat(dual, "Tell me a long story about the sea\n" * 8, "--history", path, "--ctx", 256, "--system", "Be kind.")
    assert done.returncode == 0 and "of the oldest turns are forgotten" in done.stderr
    messages = json.loads(path.read_text())
    assert messages[0]["role"] == "system" and [m["role"] for m in messages[1:]] == ["user", "assistant"] * (len(messages) // 2) and len(messages) < 17
    done = chat(dual, "Hello\n" + "word " * 400 + "\n", "--ctx", 256, "--history", path)
    assert "does not fit the context of 256 tokens" in done.stderr and done.returncode == 0
    assert json.loads(path.read_text())[-2]["content"] == "Hello"  # it changed nothing
    done = chat(dual, "word " * 400 + "\nHello\n", "--ctx", 256)
    assert done.returncode == 0 and done.stderr.count("[prompt") == 1


def test_errors(hobbit, dual, tmp_path):
    status, _, err = hobbit("chat", dual, "--threads", 1)
    assert status == 1 and "has no chat template: give --chat-format" in err and err.count("\n") == 1
    for text in ("{", "{}", '[{"role": "nobody", "content": "x"}]', '[{"role": "user"}]', '["x"]'):
        (tmp_path / "h.json").write_text(text)
        status, _, err = hobbit("chat", dual, "--history", tmp_path / "h.json", "--chat-format", "chatml")
        assert status == 1 and "h.json holds no conversation" in err and err.count("\n") == 1
    assert hobbit("chat", dual, "-n", 0)[0] == 1


def test_a_history_is_never_half_written(tmp_path):
    path = tmp_path / "h.json"
    write_history(path, [{"role": "user", "content": "x"}])
    with pytest.raises(TypeError):
        write_history(path, [{"role": "user", "content": object()}])
    assert read_history(path) == [{"role": "user", "content": "x"}] and os.listdir(tmp_path) == ["h.json"]
