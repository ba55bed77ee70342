"""The examples in README.md and docs run, and the commands in them exist with their options."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import engine
from hobbit_cpp import Llama

REPO = pathlib.Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(page: pathlib.Path) -> list[str]:
    """Lines of indented blocks and of fenced ones without Python that call hobbit; continued lines joined."""
    text = re.sub(r"^```python\n.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S).replace("\\\n", " ")
    found = re.findall(r"^ *(?:\$ )?(?:HOBBIT_\w+=\S+ )*(?:\.venv/bin/)?hobbit ([a-z].*)$", text, re.M)
    return [c for c in found if not c.startswith("-")]


EXAMPLES = [(page, i) for page in PAGES for i in range(len(blocks(page, "python")))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the examples run: the names they use are pairs of the small model."""
    path = tmp_path_factory.mktemp("docs")
    dual = engine.pair(engine.DEFAULT_MODEL, "q2_k")
    for name in ("model.gguf", "mixtral.gguf"):
        os.symlink(dual, path / name)
    os.symlink(dual.with_name(dual.name.replace(".gguf", ".experts.gguf")), path / dual.name.replace(".gguf", ".experts.gguf"))
    (path / "wiki.test.raw").write_text(3 * engine.SAMPLE_TEXT.read_text(encoding="utf-8"), encoding="utf-8")
    with Llama(dual, n_ctx=256, verbose=False) as llm, llm.trace(path / "trace.npy"):
        llm("Once upon a time", max_tokens=4)
    return path


def examples_before(page, number) -> str:
    """An example may use the `llm` of those before it on its page."""
    code = blocks(page, "python")
    if "import" in code[number]:
        return code[number]
    return 'from hobbit_cpp import Llama\nllm = Llama("model.gguf", n_ctx=256, verbose=False)\n' + code[number] + '\nllm("Once", max_tokens=2)\n'


@pytest.mark.parametrize("page, number", EXAMPLES, ids=[f"{p.name}-{i}" for p, i in EXAMPLES])
def test_examples(page, number, folder):
    code = examples_before(page, number).replace("chunks=20", "chunks=1")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}

    def run(code):
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    if "openai" in code:
        for needed in ("openai", "fastapi", "uvicorn", "prometheus_client"):
            pytest.importorskip(needed)
        from serving import Server
        with Server(folder / "mixtral.gguf", "--cache", "50%") as server:
            run(code.replace("http://127.0.0.1:8000/v1", server.url))
    else:
        run(code)


@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
def test_commands(page):
    from hobbit_cpp.cli import _parser
    from hobbit_cpp.convert import _parser as convert_parser

    for command in commands(page):
        argv = shlex.split(command, comments=True)
        argv = argv[:next((i for i, a in enumerate(argv) if a in ("|", ">", "&&", "&")), len(argv))]
        if any(a in ("...", "…") or "{" in a for a in argv) or argv[0] == "info":
            continue
        try:
            (convert_parser("hobbit convert").parse_args(argv[1:]) if argv[0] == "convert" else _parser().parse_args(argv))
        except SystemExit:
            raise AssertionError(f"{page.name}: hobbit {command}") from None


def test_server_settings_in_the_docs(tmp_path):
    pytest.importorskip("pydantic")
    from hobbit_cpp._serve_settings import settings
    (example,) = blocks(REPO / "docs" / "server.md", "yaml")
    (tmp_path / "c.yaml").write_text(example, encoding="utf-8")
    s = settings({}, str(tmp_path / "c.yaml"), {})
    assert s.model == "mixtral.gguf" and s.t2 == 0.9 and len(s.alias) == 2
