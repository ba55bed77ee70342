"""The command hobbit, as a user runs it."""

import os
import pathlib
import re
import shutil
import select
import signal
import subprocess
import sys
import time

import pytest

from hobbit_cpp import __version__
from hobbit_cpp.convert import convert

DATA = pathlib.Path(__file__).resolve().parent.parent / "hobbit_cpp" / "data"
SOURCE = DATA / "books-8x2-small-q8_0.gguf"
HOBBIT = [sys.executable, "-m", "hobbit_cpp"]


@pytest.fixture(scope="module")
def dual(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "small.gguf"
    convert(SOURCE, path, "keep", "q2_k", threads=1)
    return path


# --- usage ------------------------------------------------------------------------------------


COMMANDS = ("run", "convert", "info", "demo", "bench", "evaluate", "trace", "simulate", "imatrix", "frontier", "calibrate", "serve", "chat", "doctor")


def test_help_and_version(hobbit):
    status, out, _ = hobbit("--help")
    assert status == 0 and all(f"    {c} " in out for c in COMMANDS)
    assert hobbit("--version")[:2] == (0, f"hobbit-cpp {__version__}\n")
    for command in COMMANDS:
        status, out, _ = hobbit(command, "--help")
        assert status == 0 and out.startswith("usage:")


@pytest.mark.parametrize("argv", [(), ("walk",), ("run",), ("run", "m", "--t1", "x"), ("run", "m", "--nonsense"), ("run", "m", "--raw", "--chat"),
                                  ("run", "m", "--policy", "best"), ("bench",), ("convert",)])
def test_wrong_usage(hobbit, argv):
    status, out, err = hobbit(*argv)
    assert status == 2 and out == "" and ("usage:" in err or err == "error: hobbit run knows no --nonsense (hobbit run --help)\n")


def test_help_is_a_command(hobbit):
    assert hobbit("help") == hobbit("--help")

# --- run --------------------------------------------------------------------------------------


def test_run(hobbit, dual):
    argv = ("run", dual, "-p", "Once upon a time", "-n", 20, "--threads", 1, "--seed", 3, "--cache", "30%")
    status, out, err = hobbit(*argv)
    assert status == 0 and len(out.strip()) > 20
    assert re.fullmatch(r"\[prompt \d+ tokens, [\d.]+ tok/s; reply 20 tokens, [\d.]+ tok/s; hits [\d.]+ %; [\d.]+ \w+ read per token; "
                        r"experts [\d.]+ MiB of budget 2.9 MiB; peak memory [\d.]+ [MG]iB\]\n", err)
    assert hobbit(*argv)[1] == out  # the seed decides
    status, _, err = hobbit(*argv, "--stats", "--t1", 0.3, "--t2", 0.5, "--policy", "lru", "--no-direct-io", "--io-threads", 2)
    assert status == 0 and "T1 0.3, T2 0.5, policy lru, 2 buffered reads" in err
    assert re.search(r"^  all +\d+ ", err, re.M) and re.search(r"^    5 +5 ", err, re.M)


def test_run_with_copies_in_memory(hobbit, dual):
    argv = ("run", dual, "-p", "Once upon a time", "-n", 8, "--threads", 1, "--temp", 0, "--cache", "30%", "--t1", 1, "--stats")
    plain = hobbit(*argv)
    for more in (("--host-copies", "all", "--miss", "cpu"), ("--miss", "cpu"), ("--host-copies", "8MiB"), ("--host-copies", "none")):
        status, out, err = hobbit(*argv, *more)
        assert (status, out) == (0, plain[1])
        assert ("of copies in host memory; misses: " in err) == ("none" not in more)
        assert ("the CPU computed" in err) == ("cpu" in more)
    status, _, err = hobbit(*argv, "--host-copies", "plenty")
    assert status == 1 and "--host-copies is 'plenty'" in err


def test_gpu_layers_need_a_gpu(hobbit, dual):
    import llama_cpp
    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this build has a GPU back end")
    status, out, err = hobbit("run", dual, "-p", "Once", "-ngl", 99)
    assert (status, out) == (1, "") and err.startswith("error: --gpu-layers: this build has no GPU back end") and err.count("\n") == 1


def test_run_an_ordinary_file(hobbit):
    status, out, err = hobbit("run", SOURCE, "-p", "Once", "-n", 4, "--threads", 1, "--temp", 0, "--stats")
    assert status == 0 and out.strip() and "hits" not in err and "no experts are offloaded" in err


def test_prompt_from_a_file(hobbit, dual, tmp_path):
    (tmp_path / "p.txt").write_text("Once upon a time", encoding="utf-8")
    a = hobbit("run", dual, "-f", tmp_path / "p.txt", "-n", 5, "--threads", 1, "--temp", 0)
    b = hobbit("run", dual, "-p", "Once upon a time", "-n", 5, "--threads", 1, "--temp", 0)
    assert a[0] == 0 and a[1] == b[1]


def test_sampling(hobbit, dual):
    argv = ("run", dual, "-p", "Once upon a time", "-n", 12, "--threads", 1, "--t1", 1, "--seed", 5)
    greedy = hobbit(*argv, "--temp", 0)[1]
    assert hobbit(*argv, "--temp", 2)[1] != greedy
    for only_the_first in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1)):
        assert hobbit(*argv, "--temp", 2, *only_the_first)[1] == greedy
    word = greedy.split()[-3]
    assert hobbit(*argv, "--temp", 0, "--stop", word)[1].strip() == greedy[:greedy.index(word)].strip()
    loose, strict = (hobbit(*argv[:5], 60, *argv[6:], "--temp", 0, *more)[1].split() for more in ((), ("--repeat-penalty", 50)))
    assert len(loose) - len(set(loose)) > 3 > len(strict) - len(set(strict))


def test_a_full_context_is_said(hobbit, dual):
    status, _, err = hobbit("run", dual, "-p", "Once upon a time", "-n", 300, "--ctx", 256, "--threads", 1, "--temp", 0)
    assert status == 0 and err.startswith("[the context of 256 tokens is full: --ctx gives more]\n[prompt ")


def test_settings_in_the_environment_are_not_taken_in_silence(hobbit, dual, monkeypatch):
    monkeypatch.setenv("HOBBIT_T1", "1")
    monkeypatch.setenv("HOBBIT_HOST_COPIES", "none")
    monkeypatch.setenv("HOBBIT_SHARED", "nowhere")
    status, out, err = hobbit("run", dual, "-p", "Once", "-n", 2, "--threads", 1)
    assert status == 0 and [line for line in err.splitlines() if line.startswith("warning:")] == [
        "warning: HOBBIT_HOST_COPIES counts for llama.cpp's own programs, not here: give --host-copies",
        "warning: HOBBIT_T1 counts for llama.cpp's own programs, not here: give --t1"]


@pytest.mark.parametrize("argv, message", [
    (("nothing.gguf", "-p", "x"), "nothing.gguf does not exist"),
    (("{dual}", "-p", "x", "--cache", "5000"), r"--cache is 5000, .* need \d+ bytes"),
    (("{dual}", "-p", "x", "--cache", "25"), "--cache is '25', which is 25 bytes: give a unit"),
    (("{dual}", "-p", "x", "--cache", "lots"), "--cache is 'lots'"),
    (("{dual}", "-p", "x", "--t1", "0.9", "--t2", "0.5"), "--t1 is 0.9 and --t2 is 0.5"),
    (("{dual}", "-p", "x", "--t1", "nan"), "t1 must be"),
    (("{dual}", "-p", "x", "-n", "0"), "--tokens must be at least 1"),
    (("{dual}", "-p", "x", "--temp", "-1"), "--temp must be 0 or more"),
    (("{dual}", "-p", "x", "--top-p", "0"), "--top-p must be above 0"),
    (("{dual}", "-p", "x", "--min-p", "nan"), "--min-p must be from 0 to 1"),
    (("{dual}", "-p", "x", "--top-k", "-1"), "--top-k must be 0 or more"),
    (("{dual}", "-p", "x", "--repeat-penalty", "0"), "--repeat-penalty must be above 0"),
    (("{dual}", "-p", "x", "--seed", "-1"), "--seed must be from 0 to 4294967295"),
    (("{dual}", "-p", "x", "--threads", "100000"), "--threads must be from -1 to 512"),
    (("{dual}", "-p", "x", "--system", "Be brief."), "--system needs a chat template, and .* has none"),
    (("{dual}", "-p", "x", "--cache", "1KiB"), "--cache is '1KiB', less than any model needs"),
    (("{dual}", "-p", "x", "--cache", "9" * 400 + ".5GiB"), "--cache is '99999"),
    (("{dual}", "-p", "x", "--ctx", "0"), "--ctx must be at least 1"),
    (("{dual}", "-p", "x", "--threads", "0"), "--threads must be at least 1"),
    (("{dual}", "-p", "x", "--chat"), "has no chat template"),
    (("{dual}", "-p", "word " * 400, "--ctx", "32"), "exceed context window of 256: give a larger --ctx"),
    (("{dual}", "-f", "nothing.txt"), "nothing.txt: No such file"),
    (("{dual}", "-p", "\udcff"), "not valid UTF-8"),
    (("{source}", "-p", "x", "--cache", "1GiB"), "is an ordinary GGUF"),
])
def test_run_errors(hobbit, dual, argv, message):
    status, out, err = hobbit("run", *(a.format(dual=dual, source=SOURCE) for a in argv))
    assert status == 1 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(message, err)


def test_libraries_that_are_missing(tmp_path):
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(tmp_path)}
    done = subprocess.run([*HOBBIT, "run", "x.gguf", "-p", "x"], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stderr.startswith("error: hobbit_cpp: LLAMA_CPP_LIB_PATH") and done.stderr.count("\n") == 1


def test_reader_of_the_pipe_goes_away(dual):
    p = subprocess.Popen([*HOBBIT, "run", str(dual), "-p", "Once", "-n", "200", "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdout.read(5)
    p.stdout.close()
    assert p.stderr.read() == b"" and p.wait(30) == 0
    p.stderr.close()


def test_interrupt(dual):
    # Ctrl-C as in a terminal: what a shell starts in the background ignores it
    p = subprocess.Popen([*HOBBIT, "run", str(dual), "-p", "Once", "-n", "500", "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    p.stdout.read(5)
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=30)
    assert p.returncode == 130 and err.decode().strip() == "interrupted"


# --- conversation -----------------------------------------------------------------------------


def test_conversation_from_a_pipe(dual):
    done = subprocess.run([*HOBBIT, "run", str(dual), "-n", "6", "--threads", "1"], input="Hello\n\nAnd then\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("\n") >= 2 and done.stderr.count("[prompt") == 2


def test_conversation_that_fills_the_context(dual):
    done = subprocess.run([*HOBBIT, "run", str(dual), "-n", "30", "--ctx", "64", "--threads", "1"], input="Hello there my friend\n" * 12, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0 and "the context of" in done.stderr and "starting afresh" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="pty")
def test_conversation_on_a_terminal(dual):
    import pty

    ours, theirs = pty.openpty()
    p = subprocess.Popen([*HOBBIT, "run", str(dual), "-n", "100", "--threads", "1"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = ""

    def until(pattern):
        nonlocal seen
        while not (found := re.search(pattern, seen, re.S)):
            assert select.select([ours], [], [], 10)[0], f"{pattern!r} does not come after {seen!r}"
            try:
                seen += os.read(ours, 4096).decode("utf-8", "replace")
            except OSError:
                raise AssertionError(seen) from None
        seen = seen[found.end():]

    until(r"no chat template.*> ")
    os.write(ours, b"Once upon a time\n")
    until(r"Once upon a time\r\n\S* ?\S")
    os.kill(p.pid, signal.SIGINT)  # stops the reply
    until(r"> ")
    time.sleep(0.5)  # readline misses a signal that comes between its prompt and its wait
    os.kill(p.pid, signal.SIGINT)  # and does nothing here
    until(r"> ")
    os.write(ours, b"The end\n")
    until(r"\[prompt .*> ")
    os.write(ours, b"\x04")
    assert p.wait(30) == 0
    os.close(ours)


def test_chat_template(hobbit, dual, tmp_path):
    """A model with a template chats in it; --raw continues the text."""
    from gguf_tools.reader import Reader
    from gguf_tools.writer import StreamWriter

    path = tmp_path / "chatty.gguf"
    with Reader(SOURCE) as r, StreamWriter(path, None) as w:
        w.copy_metadata(r)
        w.add("tokenizer.chat_template", "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:")
        for t in r.tensors.values():
            w.add_tensor(t.name, t.shape, t.type)
        w.begin_data()
        for t in r.tensors.values():
            w.write(t.name, 0, r.read(t, 0, t.nbytes))
    argv = ("run", path, "-p", "Hello", "-n", 8, "--temp", 0, "--threads", 1)
    chat, raw = hobbit(*argv, "--chat"), hobbit(*argv, "--raw")
    assert chat[0] == raw[0] == 0 and chat[1] != raw[1]
    assert hobbit(*argv)[1] == chat[1]


# --- the others -------------------------------------------------------------------------------


def test_convert_and_info(hobbit, tmp_path):
    out = tmp_path / "small.gguf"
    status, text, _ = hobbit("convert", SOURCE, "-o", out, "--low", "q4_0", "--threads", 1)
    assert status == 0 and out.exists() and "q4_0" in text
    status, text, _ = hobbit("info", out)
    assert status == 0 and "a pair" in text
    status, _, err = hobbit("convert", tmp_path / "nothing.gguf", "-o", tmp_path / "x.gguf")
    assert status == 1 and err.startswith("error: ")
    assert hobbit("info", tmp_path / "nothing.gguf")[0] == 1


@pytest.mark.parametrize("command", [("run", "-p", "x"), ("doctor", "--no-disk"), ("env", "--cache", "min"), ("verify",)])
def test_a_pair_that_was_renamed(hobbit, dual, tmp_path, command):
    for ending in (".gguf", ".experts.gguf"):
        os.link(dual.with_suffix(ending), tmp_path / f"new{ending}")
    status, out, err = hobbit(command[0], tmp_path / "new.gguf", *command[1:])
    assert status == 1 and out == "" and err.count("\n") == 1
    assert f"its sidecar {tmp_path / dual.stem}.experts.gguf is missing ({tmp_path / 'new'}.experts.gguf is there: a pair keeps the names" in err


def test_a_prompt_that_is_no_text(hobbit, dual, tmp_path):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    assert hobbit("run", dual, "-f", tmp_path / "latin1.txt")[2] == f"error: {tmp_path / 'latin1.txt'} is not valid UTF-8\n"
    done = subprocess.run([*HOBBIT, "run", str(dual)], input=b"caf\xe9\n", capture_output=True, timeout=60)
    assert done.returncode == 1 and done.stderr == b"error: standard input is not valid UTF-8\n"


def test_a_linked_pair_without_its_source(hobbit, tmp_path):
    source = tmp_path / "src.gguf"
    shutil.copy(SOURCE, source)
    assert hobbit("convert", source, "-o", tmp_path / "linked.gguf", "--link", "--quiet")[0] == 0
    assert hobbit("run", tmp_path / "linked.gguf", "-p", "x", "-n", 1, "--threads", 1)[0] == 0
    source.rename(tmp_path / "moved.gguf")
    status, _, err = hobbit("run", tmp_path / "linked.gguf", "-p", "x", "-n", 1)
    assert status == 1 and err.count("\n") == 1 and "linked.experts.gguf: its experts are read from" in err and "src.gguf, which cannot be opened: No such file" in err


@pytest.mark.parametrize("argv, message", [
    (("trace", "{dual}", "--text", "{text}", "-o", "{tmp}/nowhere/t.npy"), "the folder .*/nowhere does not exist"),
    (("imatrix", "{source}", "--text", "{text}", "-o", "{tmp}/nowhere/i.gguf"), "the folder .*/nowhere does not exist"),
    (("imatrix", "{source}", "--text", "{text}", "-o", "{tmp}/i.gguf", "--threads", "0"), "--threads must be at least 1"),
    (("evaluate", "{dual}", "--text", "{source}"), "is no text: it has null characters"),
    (("run", "{dual}", "-p", "x", "--unified-memory", "on"), "--unified-memory on is about a GPU: give --gpu-layers"),
])
def test_told_before_the_work(hobbit, dual, tmp_path, argv, message):
    (tmp_path / "words.txt").write_text("Some words. " * 200)
    status, out, err = hobbit(*(a.format(dual=dual, source=SOURCE, tmp=tmp_path, text=tmp_path / "words.txt") for a in argv))
    assert (status, out) == (1, "") and err.count("\n") == 1 and re.search(message, err)


def test_a_context_beyond_what_was_trained(hobbit, dual):
    status, _, err = hobbit("run", dual, "-p", "Once", "-n", 2, "--ctx", 1024, "--cache", "min")
    assert status == 0 and "warning: --ctx 1024 is more than the 512 tokens" in err


def test_bench(hobbit, dual):
    status, out, _ = hobbit("bench", dual, "--against", SOURCE, "--repeat", 1, "--prompt-tokens", 16, "-n", 4, "--threads", 1, "--cache", "30%")
    lines = out.splitlines()
    assert status == 0 and len(lines) == 3 and "decode tok/s" in lines[0]
    assert lines[1].startswith(str(dual)) and "MiB" in lines[1] and lines[2].split()[4:6] == ["-", "-"]
    status, out, err = hobbit("bench", dual, "--repeat", 1, "--cache", "5000")
    assert status == 1 and out == "" and re.match(r"error: .*need \d+ bytes", err)
    assert hobbit("bench", dual, "--repeat", 0)[0] == 1
    assert hobbit("bench", dual, "--prompt-tokens", 300, "-n", 8, "--ctx", 128)[2] == "error: prompt and reply take 308 tokens, more than --ctx 128\n"


def test_demo():
    started = time.monotonic()
    done = subprocess.run([*HOBBIT, "demo", "--threads", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert time.monotonic() - started < 60
    number = {name: [float(x) for x in re.search(rf"{name} +([\d.]+) \S* +([\d.]+)", done.stdout).groups()] for name in
              ("memory for experts: budget", "memory for experts: used", "experts served at high", "experts served at low", "read per token")}
    assert all(used <= budget for used, budget in zip(number["memory for experts: used"], number["memory for experts: budget"]))
    assert number["experts served at high"][1] == 100 and 0 < number["experts served at low"][0] < 100
    assert number["read per token"][0] < number["read per token"][1]
    mixed, full = map(float, re.search(r"perplexity +([\d.]+) +([\d.]+)", done.stdout).groups())
    assert 10 < full <= mixed < 1.1 * full
    assert "Traceback" not in done.stdout and max(map(len, done.stdout.splitlines())) < 400
