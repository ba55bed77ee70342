"""The unit tests of csrc/core, plain and under the sanitizers; llama.cpp is not needed.

HOBBIT_CORE_ARGS="--steps 20000 --seed 7" makes the random tests long.
"""

import os
import shlex
import shutil
import subprocess

import pytest

cmake = shutil.which("cmake")
pytestmark = pytest.mark.skipif(not cmake, reason="needs cmake")

BUILDS = {"plain": "", "asan": "address,undefined", "tsan": "thread"}  # name: HOBBIT_SANITIZE


def run(*command, **kwargs):
    return subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **kwargs)


def need_sanitizer(flags, folder):
    """Skip where programs with these sanitizers cannot be built or run."""
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    for command in ([compiler, f"-fsanitize={flags}", source, "-o", folder / "probe"], [folder / "probe"]):
        result = run(*command)
        if result.returncode != 0:
            pytest.skip(f"no runtime for -fsanitize={flags}: {result.stdout.strip()[-200:]}")


@pytest.mark.parametrize("name", BUILDS)
def test_core(repo, name, tmp_path):
    flags = BUILDS[name]
    if flags:
        need_sanitizer(flags, tmp_path)
    build = repo / "build" / ("core-tests" if name == "plain" else f"core-tests-{name}")  # kept for the next run
    for command in ([cmake, "-S", repo, "-B", build, "-DHOBBIT_CORE_TESTS=ON", f"-DHOBBIT_SANITIZE={flags}"],
                    [cmake, "--build", build, "--parallel", os.cpu_count() or 1]):
        result = run(*command)
        assert result.returncode == 0, result.stdout[-8000:]
    env = {**os.environ, "TMPDIR": str(tmp_path), "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    result = run(build / "hobbit-core-tests", *shlex.split(os.environ.get("HOBBIT_CORE_ARGS", "")), env=env)
    print(result.stdout[-8000:])
    assert result.returncode == 0


def test_configures_in_an_awkward_folder(repo, tmp_path):
    tree = tmp_path / "a b" / "é"
    (tree / "hobbit_cpp").mkdir(parents=True)
    for name in ("cmake", "csrc"):
        shutil.copytree(repo / name, tree / name)
    shutil.copy(repo / "CMakeLists.txt", tree)
    shutil.copy(repo / "hobbit_cpp" / "_version.py", tree / "hobbit_cpp")
    result = run(cmake, "-S", tree, "-B", tree / "build", "-DHOBBIT_CORE_TESTS=ON", "-DHOBBIT_SANITIZE=address,undefined")
    assert result.returncode == 0, result.stdout[-8000:]
    assert (tree / "build" / "CMakeCache.txt").is_file()
