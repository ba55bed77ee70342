"""Programs of llama.cpp that know nothing of us: a dual file opens, with settings from variables of the environment.

The program here is llama_cpp itself, imported alone on our libraries. HOBBIT_TOOLS_DIR=build/tools/bin (make tools) tries
llama.cpp's own tools as well.
"""

import argparse
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request

import pytest

import engine
from hobbit_cpp import _libs, bindings, profiles
from hobbit_cpp.cli import add_offload_arguments
from hobbit_cpp.settings import Settings
from makers import make_model

SOURCE = engine.DEFAULT_MODEL
FIELDS = ("t1", "t2", "policy", "budget_kind", "cache_bytes", "cache_fraction", "n_io_threads", "low_fraction", "skip_mass", "direct_io", "miss", "host_copies", "host_bytes",
          "unified", "verify", "prefetch", "prefetch_copy", "prefetch_ranks", "prefetch_prompts", "lean")

LOADS = """
    import ctypes, json, os, sys
    import llama_cpp.llama_cpp as llama      # alone, as somebody else's program has it
    from hobbit_cpp import bindings          # to look at what was set up
    path, fields, cases = json.load(sys.stdin)
    log = []
    note = llama.llama_log_callback(lambda level, text, _: log.append(text.decode()))
    llama.llama_log_set(note, None)
    model_params = llama.llama_model_default_params()
    for case in cases:
        os.environ.update(case)
        log.clear()
        model = llama.llama_model_load_from_file(path.encode(), model_params)
        for name in case:
            del os.environ[name]
        said = {"log": "".join(log)}
        if model:
            p = bindings.hobbit_params()
            bindings.hobbit_get_params(bindings.hobbit_from_model(model), p)
            said["params"] = {name: getattr(p, name) for name in fields}
            llama.llama_model_free(model)
        print(json.dumps(said), flush=True)
"""


def plain(code, stdin="", status=0, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOBBIT_")}
    env.update(variables, LLAMA_CPP_LIB_PATH=str(_libs.lib_dir()), PYTHONUTF8="1")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], input=stdin, capture_output=True, text=True, env=env)
    assert done.returncode == status, done.stderr
    return done


def loads(path, cases):
    """[(params or None, log)] of a load with each of the cases, {variable: value}."""
    out = plain(LOADS, json.dumps([str(path), FIELDS, cases])).stdout
    return [(said.get("params"), said["log"]) for said in map(json.loads, out.splitlines())]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return engine.pair(make_model(tmp_path_factory.mktemp("tiny") / "m.gguf", n_layer=6), "q4_0")


def filled(**given):
    p = bindings.hobbit_params()
    bindings.hobbit_default_params(p)
    settings = Settings(**given)
    settings.fill(p)
    return {name: getattr(p, name) for name in FIELDS}


GOOD = {"CACHE": ("cache_bytes", ["40 MiB", "24.5m", "60%", " 100 % ", "min", "MIN", "90071993"]), "T1": ("t1", ["0", "1e-1", " .25"]), "T2": ("t2", ["0.75"]),
        "SKIP_MASS": ("skip_mass", ["0.5"]), "LOW_FRACTION": ("low_fraction", ["0.25"]), "POLICY": ("policy", ["lru", "follow"]), "IO_THREADS": ("n_io_threads", ["2"]),
        "HOST_COPIES": ("host_copies", ["none", "auto", "8MiB"]), "MISS": ("miss", ["fetch", "auto"]), "UNIFIED_MEMORY": ("unified_memory", ["auto", "on", "off"]), "VERIFY": ("verify", ["true", "no"]),
        "PREFETCH": ("prefetch", ["0", "3", "auto"]), "PREFETCH_COPY": ("prefetch_copy", ["high"]), "PREFETCH_RANKS": ("prefetch_ranks", ["2"]),
        "LEAN": ("lean", ["0.05"])}
NUMBERS = ("t1", "t2", "skip_mass", "low_fraction", "lean")
WORDS = {"none": False, "on": True, "true": True, "off": False, "no": False}


def test_values_mean_what_they_mean_in_python(tiny):
    cases, wanted = [], []
    for name, (argument, values) in GOOD.items():
        for text in values:
            value = float(text) if argument in NUMBERS else int(text) if argument in ("n_io_threads", "prefetch", "prefetch_ranks") and text != "auto" else WORDS.get(text, text)
            ahead = argument.startswith("prefetch_")  # means nothing without prefetch
            cases.append({f"HOBBIT_{name}": text, **({"HOBBIT_PREFETCH": "1"} if ahead else {})})
            wanted.append(filled(**{"cache_bytes": "25%", **({"prefetch": 1} if ahead else {}), argument: value}))
    cases += [{}, {"HOBBIT_NO_DIRECT_IO": "yes", "HOBBIT_T1": "1", "HOBBIT_T2": "0"}, {"HOBBIT_NO_PROMPT_PREFETCH": "1"}]
    wanted += [filled(cache_bytes="25%"), filled(cache_bytes="25%", direct_io=False, t1=1, t2=0), filled(cache_bytes="25%", prefetch_prompts=False)]
    for case, want, (params, log) in zip(cases, wanted, loads(tiny, cases)):
        ignored = () if want["budget_kind"] == engine.FRACTION else ("cache_fraction",)  # not in use then
        assert params and {k: v for k, v in params.items() if k not in ignored} == {k: v for k, v in want.items() if k not in ignored}, (case, log)
        assert all(f"{k}={v}" in log for k, v in case.items())


def test_names_are_those_of_the_flags(tiny):
    parser = argparse.ArgumentParser(add_help=False)
    add_offload_arguments(parser)
    names = [f"HOBBIT_{action.dest.upper()}" for action in parser._actions if action.dest != "no_profile"]
    for name, (params, log) in zip(names, loads(tiny, [{name: "?"} for name in names])):
        assert params is None and f'{name} is "?": ' in log


WRONG = [
    ({"HOBBIT_T1": "0,5"}, 'HOBBIT_T1 is "0,5": it must be a number'),
    ({"HOBBIT_T1": "0.9", "HOBBIT_T2": "0.5"}, "settings of the environment (HOBBIT_...): t2 is 0.5: it must be at least t1 (0.9)"),
    ({"HOBBIT_LOW_FRACTION": "2"}, "settings of the environment (HOBBIT_...): low_fraction is 2: it must be 0 to 1"),
    ({"HOBBIT_MISS": "cpu", "HOBBIT_HOST_COPIES": "none"}, "the CPU computes from copies in host memory and needs them all"),
    ({"HOBBIT_CACHE": "1000"}, "1000"),  # below the floor
    ({"HOBBIT_CACHE": "auto"}, "hobbit env MODEL.gguf --ctx N works it out"),
]


def test_wrong_values_fail_the_load_in_one_sentence(tiny):
    for (case, sentence), (params, log) in zip(WRONG, loads(tiny, [case for case, _ in WRONG])):
        errors = [line for line in log.splitlines() if "error loading model" in line]
        assert params is None and len(errors) == 1 and sentence in errors[0], (case, log)


def test_names_without_an_effect_are_said(tiny):
    (params, log), = loads(tiny, [{"HOBBIT_CAHCE": "1GiB", "HOBBIT_SERVE_CACHE": "?"}])
    assert params and "HOBBIT_CAHCE has no effect" in log and "SERVE" not in log


TEXT = """
    import sys, llama_cpp
    for path in sys.argv[1:]:
        llm = llama_cpp.Llama(path, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, seed=1)
        print(repr(llm("Once upon a time", max_tokens=24, temperature=0)["choices"][0]["text"]))
        llm.close()
"""


def test_text_of_a_program_that_knows_nothing_of_us():
    dual = engine.pair(SOURCE, "q2_k")
    code = textwrap.dedent(TEXT).replace("sys.argv[1:]", repr([str(SOURCE), str(dual)]))
    stock, ours = plain(code, HOBBIT_T1="1", HOBBIT_CACHE="min").stdout.splitlines()
    assert stock == ours and len(stock) > 40
    stock, other = plain(code, HOBBIT_T1="0", HOBBIT_T2="0", HOBBIT_CACHE="min").stdout.splitlines()
    assert other != stock  # the variables have an effect, on the dual file alone
    assert "HOBBIT_POLICY" in plain(code.replace("verbose=False", "verbose=True"), HOBBIT_POLICY="best", status=1).stderr


MEASURE = """
    import json, sys
    import llama_cpp.llama_cpp as llama
    from hobbit_cpp import bindings
    mp, cp = llama.llama_model_default_params(), llama.llama_context_default_params()
    mp.no_alloc, mp.load_mode, cp.n_ctx = True, llama.LLAMA_LOAD_MODE_NONE, 64
    model = llama.llama_model_load_from_file(sys.stdin.read().encode(), mp)
    context = llama.llama_init_from_model(model, cp)
    info = bindings.hobbit_info()
    bindings.hobbit_get_info(bindings.hobbit_from_model(model), info)
    print(json.dumps([bool(context), info.budget_bytes, info.slot_bytes]))
    llama.llama_free(context)
    llama.llama_model_free(model)
"""


def test_a_load_that_only_measures(tiny):
    """As llama.cpp's tools do before the real one, to fit a model into a device (-fit)."""
    has_context, budget, slots = json.loads(plain(MEASURE, str(tiny), HOBBIT_CACHE="40MiB").stdout)
    assert has_context and budget == 40 * 2**20 and 0 < slots < budget


# --- hobbit env ------------------------------------------------------------------------------------


def env_of(hobbit, *argv):
    status, out, err = hobbit("env", *argv)
    assert status == 0, err
    return dict(line.split("=") for line in out.splitlines())


def test_env_says_what_run_would_take(hobbit, tiny, tmp_path):
    said = env_of(hobbit, tiny, "--ctx", 64, "--host-copies", "none", "--io-threads", 2)
    (params, log), = loads(tiny, [said])
    assert params and int(said["HOBBIT_CACHE"]) == params["cache_bytes"] > 0 and params["budget_kind"] == engine.BYTES, log
    assert {k: v for k, v in said.items() if k != "HOBBIT_CACHE"} == {"HOBBIT_T1": "0.6", "HOBBIT_T2": "1.0", "HOBBIT_POLICY": "hobbit", "HOBBIT_HOST_COPIES": "none", "HOBBIT_IO_THREADS": "2"}
    from gguf_tools.reader import Reader
    with Reader(tiny) as reader:
        profile = profiles.Profile(profiles.path_for(tiny), reader.get("hobbit.pair_id"), {"t1": 0.125, "t2": 0.5, "policy": "lcu", "cache_bytes": "50%"})
    profile.save()
    try:
        said = env_of(hobbit, tiny)
        assert (said["HOBBIT_T1"], said["HOBBIT_T2"], said["HOBBIT_POLICY"]) == ("0.125", "0.5", "lcu")
        assert env_of(hobbit, tiny, "--no-profile")["HOBBIT_T1"] == "0.6"
    finally:
        os.unlink(profile.path)
    assert hobbit("env", SOURCE)[0] == 1


# --- llama.cpp's own tools -------------------------------------------------------------------------

TOOLS = pathlib.Path(os.environ.get("HOBBIT_TOOLS_DIR") or pathlib.Path(__file__).resolve().parent.parent / "build" / "tools" / "bin")
needs_tools = pytest.mark.skipif(not (TOOLS / "llama-cli").is_file(), reason=f"llama.cpp's tools are not in {TOOLS}: make tools, or set HOBBIT_TOOLS_DIR")


def tool(name, *argv, status=0, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOBBIT_")}
    done = subprocess.run([TOOLS / name, *map(str, argv)], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=600, env={**env, **variables})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


ONE_THREAD = ("-t", 1, "--no-repack")
ALL_HIGH = {"HOBBIT_T1": "1", "HOBBIT_CACHE": "min"}


@needs_tools
@pytest.mark.parametrize("argv", [("llama-cli", "-st"), ("llama-completion", "-no-cnv")], ids=lambda argv: argv[0])
def test_tool_text(argv):
    dual = engine.pair(SOURCE, "q2_k")
    more = ("-p", "Once upon a time", "-n", 24, "--temp", 0, "-c", 256, "--no-perf", *ONE_THREAD)
    stock, ours = (tool(argv[0], "-m", path, *argv[1:], *more, **ALL_HIGH) for path in (SOURCE, dual))
    assert spoken(stock) == spoken(ours) and len(spoken(stock)) > 40


def spoken(output):
    """From the prompt on, without what differs from run to run: file names, times, speeds."""
    lines = output[output.index("Once upon a time"):].splitlines()
    return "\n".join(x for x in lines if x and not re.match(r"\d+\.\d+\.\d+\.\d+ |\[ ?Prompt", x))


@needs_tools
def test_tool_perplexity():
    def of(path):
        said = tool("llama-perplexity", "-m", path, "-f", engine.SAMPLE_TEXT, "-c", 256, *ONE_THREAD, **ALL_HIGH)
        return re.search(r"Final estimate: PPL = (\S+ \+/- \S+)", said)[1]
    assert of(SOURCE) == of(engine.pair(SOURCE, "q2_k"))


@needs_tools
def test_tool_bench():
    assert "tg4" in tool("llama-bench", "-m", engine.pair(SOURCE, "q2_k"), "-p", 8, "-n", 4, "-r", 1, "-t", 1, **ALL_HIGH)


@needs_tools
def test_tool_server():
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOBBIT_")}
    answers = []
    for path in (SOURCE, engine.pair(SOURCE, "q2_k")):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        server = subprocess.Popen([TOOLS / "llama-server", "-m", path, "-c", "256", "--host", "127.0.0.1", "--port", str(port), *map(str, ONE_THREAD)],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**env, **ALL_HIGH})
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", headers={"Content-Type": "application/json"},
                                             data=json.dumps({"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}).encode())
            for _ in range(600):
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        answers.append(json.load(answer)["choices"][0]["text"])
                    break
                except OSError:  # it is still loading
                    assert server.poll() is None
                    time.sleep(0.2)
        finally:
            server.kill()
            server.wait()
    assert len(answers) == 2 and answers[0] == answers[1] and len(answers[0]) > 20


@needs_tools
@pytest.mark.parametrize("argv", [("llama-completion", "-p", "x", "-n", 1), ("llama-perplexity", "-f", engine.SAMPLE_TEXT), ("llama-server", "--port", 1), ("llama-cli", "-st", "-p", "x"), ("llama-bench", "-n", 1, "-p", 1)],
                         ids=lambda argv: argv[0])
def test_tool_wrong_value(argv):
    said = tool(argv[0], "-m", engine.pair(SOURCE, "q2_k"), *argv[1:], status=1, HOBBIT_POLICY="best")
    assert argv[0] == "llama-bench" or 'HOBBIT_POLICY is "best": it must be one of lru, lfu, hobbit, lcu, follow' in said  # llama-bench shows no log
