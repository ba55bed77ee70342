"""llama-cpp-python's own tests, from its pinned source distribution, with hobbit_cpp.Llama in the place of llama_cpp.Llama.

What they would download is replaced: the language model and the embedding model by the small one that comes along
(the latter with mean pooling), the recurrent and the hybrid one by random ones. docs/python.md lists what is skipped.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as xml

import pytest

import engine
from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter
from hobbit_cpp import _version
from tiny_recurrent import make_jamba, make_mamba

VOCABULARY = "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf"
# these compare with what one model of somebody else's says; test_llama.py and test_llama_features.py ask the same of ours
SKIPPED = {"test_real_model", "test_real_llama", "test_real_llama_repeated_prompt_cache"}
STORIES, EMBEDDINGS, RECURRENT, HYBRID = ("ggml-org/models", "CompendiumLabs/bge-small-en-v1.5-gguf", "QuantFactory/mamba-130m-hf-GGUF",
                                          "tiiuae/Falcon-H1-Tiny-90M-Instruct-GGUF")


def wanted(name: str) -> bool:
    return name == VOCABULARY or (name.startswith("tests/") and name.endswith(".py") and "/" not in name[6:])


@pytest.fixture(scope="module")
def upstream(repo, tmp_path_factory):
    """A folder with llama-cpp-python's tests and the vocabulary they use."""
    name = f"llama_cpp_python-{_version.LLAMA_CPP_PYTHON_VERSION}"
    places = [pathlib.Path(p) for p in (os.environ.get("HOBBIT_LLAMA_CPP_SOURCE"), repo / "build" / "download" / f"{name}.tar.gz") if p]
    found = next((p for p in places if p.is_file() or (p / "tests" / "test_llama.py").is_file()), None)
    if found is None:
        pytest.skip(f"llama-cpp-python's source distribution is not here: none of {', '.join(map(str, places))} (set HOBBIT_LLAMA_CPP_SOURCE)")
    out = tmp_path_factory.mktemp("upstream")
    if found.is_dir():
        for path in found.rglob("*"):
            if path.is_file() and wanted(path.relative_to(found).as_posix()):
                target = out / path.relative_to(found)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        return out
    with tarfile.open(found) as tar:
        for member in tar:
            relative = member.name.partition("/")[2]
            if member.isfile() and wanted(relative):
                (out / relative).parent.mkdir(parents=True, exist_ok=True)
                (out / relative).write_bytes(tar.extractfile(member).read())
    return out


def with_mean_pooling(src, path):
    with Reader(src) as r, StreamWriter(path, None, overwrite=True) as w:
        w.copy_metadata(r)
        w.add("llama.pooling_type", 1, "u32")
        for t in r.tensors.values():
            w.add_tensor(t.name, t.shape, t.type)
        w.begin_data()
        for t in r.tensors.values():
            w.write(t.name, 0, r.read(t, 0, t.nbytes))
    return path


@pytest.mark.parametrize("which", ["stock", "hobbit"])
def test_tests_of_llama_cpp_python(upstream, repo, tmp_path, which):
    pooled = with_mean_pooling(engine.DEFAULT_MODEL, tmp_path / "pooled.gguf")
    models = {STORIES: engine.DEFAULT_MODEL, EMBEDDINGS: pooled, HYBRID: make_jamba(tmp_path / "jamba.gguf")}
    if which == "hobbit":
        models = {name: engine.pair(path) for name, path in models.items()}
    plan = {"llama": which, "models": {**{k: str(v) for k, v in models.items()}, RECURRENT: str(make_mamba(tmp_path / "mamba.gguf"))},
            "offloaded": [str(path) for path in models.values()] if which == "hobbit" else []}
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(repo), str(repo / "tests"), os.environ.get("PYTHONPATH", "")]),
           "HOBBIT_UPSTREAM_MODELS": str(tmp_path / "plan.json"), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "upstream", "-p", "no:cacheprovider", "-q", "--rootdir", ".", "-c", os.devnull,
                           f"--junitxml={tmp_path / 'results.xml'}", "tests"], cwd=upstream, env=env, capture_output=True, text=True, timeout=300)
    results = {}
    for case in xml.parse(tmp_path / "results.xml").iter("testcase"):
        results[case.get("name")] = next((child.tag for child in case if child.tag in ("skipped", "failure", "error")), "passed")
    assert {n for n, r in results.items() if r in ("failure", "error")} == set(), done.stdout + done.stderr
    assert {n for n, r in results.items() if r == "skipped"} == SKIPPED
    assert sum(r == "passed" for r in results.values()) >= 22 and done.returncode == 0, done.stdout + done.stderr
