"""The C++ core builds without llama.cpp, and its unit tests pass."""

import os
import shutil
import subprocess

import pytest

cmake = shutil.which("cmake")
pytestmark = pytest.mark.skipif(not cmake, reason="needs cmake")


def run(*command):
    result = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert result.returncode == 0, result.stdout[-8000:]
    return result.stdout


def test_core(repo):
    build = repo / "build" / "core-tests"  # as `make core-test`; kept, so that the next run is quick
    run(cmake, "-S", repo, "-B", build, "-DHOBBIT_CORE_TESTS=ON")
    run(cmake, "--build", build, "--parallel", os.cpu_count() or 1)
    print(run(build / "hobbit-core-tests"))


def test_configures_in_an_awkward_folder(repo, tmp_path):
    tree = tmp_path / "a b" / "é"
    (tree / "hobbit_cpp").mkdir(parents=True)
    for name in ("cmake", "csrc"):
        shutil.copytree(repo / name, tree / name)
    shutil.copy(repo / "CMakeLists.txt", tree)
    shutil.copy(repo / "hobbit_cpp" / "_version.py", tree / "hobbit_cpp")
    run(cmake, "-S", tree, "-B", tree / "build", "-DHOBBIT_CORE_TESTS=ON", "-DHOBBIT_SANITIZE=address,undefined")
    assert (tree / "build" / "CMakeCache.txt").is_file()
