"""Host memory for a device that refuses to pin it, or pins a part: what is refused is ordinary memory, and nothing ends."""

import os
import shutil
import subprocess

import llama_source
import pytest


def test_memory_that_is_pinned_in_part(repo, tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("needs a C++ compiler")
    try:
        llama = llama_source.root("ggml/include", "ggml/src/ggml-backend-impl.h", "ggml/src/ggml-impl.h")
    except llama_source.NoSource as error:
        pytest.skip(str(error))
    lib = repo / "hobbit_cpp" / "lib"
    include = [f"-I{p}" for p in (repo / "csrc/include", repo / "csrc/core", repo / "csrc/llama", llama / "ggml/include", llama / "ggml/src")]
    program = tmp_path / "pinned"
    subprocess.run([compiler, "-std=c++17", "-O1", *include, repo / "tests/pinned.cpp", repo / "csrc/llama/hobbit-pinned.cpp", repo / "csrc/llama/hobbit-threads.cpp", "-o", program,
                    f"-L{lib}", "-lggml-base", "-Wl,--allow-shlib-undefined", f"-Wl,-rpath,{lib}", "-lpthread"], check=True)
    p = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stdout + p.stderr
