"""Where the settings of hobbit serve come from, and how wrong ones are told."""

import json
import socket

import pytest

import engine
from test_llama import python

pytest.importorskip("pydantic", reason="the extra `server` is not installed")
pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `server` is not installed")

from hobbit_cpp._serve_settings import ServeSettings, settings  # noqa: E402


def test_flags_before_environment_before_file_before_defaults(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: file.gguf\nport: 1\nctx: 100\nt1: 0.5\nalias: [a, b]\n", encoding="utf-8")
    s = settings({"port": 3}, str(path), {"HOBBIT_SERVE_PORT": "2", "HOBBIT_SERVE_CTX": "200", "HOBBIT_SERVE_EMBEDDING": "true", "HOBBIT_T1": "0.9"})
    assert (s.model, s.port, s.ctx, s.t1, s.embedding, s.alias, s.host) == ("file.gguf", 3, 200, 0.5, True, ["a", "b"], "127.0.0.1")
    (tmp_path / "c.json").write_text(json.dumps({"model": "j.gguf", "max_body": "1MiB", "cache": "25%"}), encoding="utf-8")
    s = settings({}, None, {"HOBBIT_SERVE_CONFIG": str(tmp_path / "c.json"), "HOBBIT_SERVE_API_KEY": "a,b"})
    assert (s.model, s.max_body, s.cache, s.api_key) == ("j.gguf", 2**20, "25%", ["a", "b"])


@pytest.mark.parametrize("flags, file, environment, message", [
    ({}, None, {}, r"no model is given: hobbit serve MODEL.gguf, HOBBIT_SERVE_MODEL, or model in the configuration file"),
    ({"port": 70000}, None, {}, r"--port: .*65535, not 70000"),
    ({"low_fraction": "x"}, None, {}, r"--low-fraction: .*number"),
    ({}, None, {"HOBBIT_SERVE_PORT": "http"}, r"HOBBIT_SERVE_PORT: .*integer.*not 'http'"),
    ({}, None, {"HOBBIT_SERVE_CAHCE": "1"}, r"HOBBIT_SERVE_CAHCE: there is no such setting$"),
    ({}, "cahce: 1", {}, r"c.yaml: cahce: there is no such setting$"),
    ({}, "policy: best", {}, r"c.yaml: policy: .*'lru'.*not 'best'"),
    ({}, "- 1", {}, r"c.yaml: it must hold names and values"),
    ({}, "a: [", {}, r"c.yaml: while parsing"),
    ({"max_body": "much"}, None, {}, r"--max-body: 'much' is not a size: [^']*$"),
    ({"grace": -1}, None, {}, r"--grace: .*greater than or equal to 0"),
])
def test_wrong_settings(tmp_path, flags, file, environment, message):
    path = tmp_path / "c.yaml"
    if file:
        path.write_text(file, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as info:
        settings({**({} if "no model" in message else {"model": "x.gguf"}), **flags}, str(path) if file else None, environment)
    assert "\n" not in str(info.value)


def test_a_key_is_not_repeated():
    with pytest.raises(ValueError) as info:
        settings({"model": "x", "api_key": {"secret": 1}}, None, {})
    assert "secret" not in str(info.value)


def test_every_setting_is_a_flag(hobbit):
    from hobbit_cpp.cli import _parser

    args = vars(_parser().parse_args(["serve"]))
    assert set(ServeSettings.model_fields) <= set(args)


@pytest.mark.parametrize("argv, message", [
    ((), "no model is given"),
    (("nothing.gguf",), "nothing.gguf does not exist"),
    (("{model}", "--cache", "1GiB"), "is an ordinary GGUF"),
    (("{model}", "--port", "99999"), "--port: "),
    (("{model}", "--pooling", "mean"), "--pooling is for embeddings"),
    (("{model}", "--config", "nothing.yaml"), "nothing.yaml: No such file"),
    (("{model}", "--config", "README.md"), "README.md: a configuration file is called .json, .yaml or .yml"),
    (("{model}", "--host", "no.such.host.invalid"), ""),
    (("{model}", "--chat-format", "nonsense"), "chat_format"),
])
def test_errors_of_the_command(hobbit, repo, monkeypatch, argv, message):
    monkeypatch.chdir(repo)
    port = () if "--port" in argv else ("--port", 0)
    status, out, err = hobbit("serve", *(a.format(model=engine.DEFAULT_MODEL) for a in argv), *port)
    assert status == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_port_that_is_taken(hobbit):
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, _, err = hobbit("serve", engine.DEFAULT_MODEL, "--port", other.getsockname()[1])
    assert status == 1 and err.startswith("error: ") and "is in use: give another --port" in err and err.count("\n") == 1


@pytest.mark.parametrize("missing", ["uvicorn", "fastapi", "pydantic", "prometheus_client"])
def test_without_the_packages(missing):
    out = python(f"""
        import contextlib, io, sys
        sys.modules[{missing!r}] = None
        from hobbit_cpp.cli import main
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            status = main(["serve", "x.gguf"])
        print(status, err.getvalue())
    """)
    assert out.startswith(f"1 error: hobbit serve needs more packages ({missing}") and "pip install '.[server]'" in out
