"""Builds libllama with CMake as a step of the ordinary setuptools build.

    pip install .       libraries into the wheel
    pip install -e .    libraries into hobbit_cpp/lib

Environment: CMAKE_ARGS (passed to CMake, "-DGGML_CUDA=ON"), CMAKE_BUILD_PARALLEL_LEVEL (default: all
cores), HOBBIT_LLAMA_CPP_SOURCE (a llama.cpp folder or sdist file to use instead of a download).
The build folder is build/ and is kept, so that the next build compiles only what changed; with a toolchain file in CMAKE_ARGS
(another processor, docs/edge.md) it is one in build/, of that file's name.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = pathlib.Path(__file__).resolve().parent
CMAKE_ARGS = shlex.split(os.environ.get("CMAKE_ARGS", ""))
TOOLCHAIN = re.findall(r"^-DCMAKE_TOOLCHAIN_FILE(?::\w+)?=(.+)$", "\n".join(CMAKE_ARGS), re.M)
BUILD = ROOT / "build" / pathlib.Path(TOOLCHAIN[-1]).stem if TOOLCHAIN else ROOT / "build"
PIN = dict(re.findall(r'^(\w+) = "?(.*?)"?$', (ROOT / "hobbit_cpp" / "_version.py").read_text(encoding="utf-8"), re.M))


def find_cmake():
    """The first CMake of PATH if it is new enough, else None."""
    cmake = shutil.which("cmake")
    if cmake:
        text = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"version (\d+)\.(\d+)", text)
        if found and tuple(map(int, found.groups())) >= (3, 21):
            return cmake
    return None


def n_cores():
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


class BuildLibraries(Command):
    """Configure, build and install with CMake."""

    description = "build libllama and ggml with CMake"
    user_options = []

    def initialize_options(self):
        self.build_lib = None
        self.editable_mode = False

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        cmake = find_cmake()
        if cmake is None:
            sys.exit("error: hobbit-cpp needs CMake 3.21 or newer to build (apt install cmake, or pip install cmake)")
        # Editable: into the source tree. Otherwise where setuptools gathers the wheel.
        target = ROOT if self.editable_mode else pathlib.Path(self.build_lib).resolve()
        BUILD.mkdir(parents=True, exist_ok=True)
        self.drop_foreign_cache()
        self.call(cmake, "-S", str(ROOT), "-B", str(BUILD), f"-DHOBBIT_PYTHON={sys.executable}", *self.cmake_args())
        jobs = [] if os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") else ["--parallel", str(n_cores())]
        self.call(cmake, "--build", str(BUILD), "--config", "Release", *jobs)
        self.call(cmake, "--install", str(BUILD), "--config", "Release", "--prefix", str(target))
        self.drop_stale_libraries(target / "hobbit_cpp" / "lib")

    def call(self, *command):
        print("+", shlex.join(command), flush=True)
        if subprocess.run(command).returncode != 0:
            sys.exit(f"error: '{shlex.join(command)}' failed; the reason stands above")

    @staticmethod
    def drop_foreign_cache():
        """CMake refuses a build folder that was copied or moved here with its tree."""
        cache = BUILD / "CMakeCache.txt"
        if cache.is_file():
            found = re.search(r"^CMAKE_CACHEFILE_DIR:INTERNAL=(.*)$", cache.read_text(encoding="utf-8", errors="replace"), re.M)
            if not found or pathlib.Path(found.group(1)).resolve() != BUILD.resolve():
                cache.unlink()
                shutil.rmtree(BUILD / "CMakeFiles", ignore_errors=True)

    @staticmethod
    def cmake_args():
        """CMAKE_ARGS; what an earlier build was given and this one is not goes out of CMake's cache."""
        names = re.findall(r"^-D([^:=]+)", "\n".join(CMAKE_ARGS), re.M)
        record = BUILD / "hobbit_cmake_args.json"
        before = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else []
        record.write_text(json.dumps(names), encoding="utf-8")
        return [f"-U{name}" for name in before if name not in names] + CMAKE_ARGS

    @staticmethod
    def drop_stale_libraries(folder):
        """Remove what an earlier build with other back ends left in the folder."""
        manifest = (BUILD / "install_manifest.txt").read_text(encoding="utf-8").splitlines()
        installed = {pathlib.PurePath(line).name for line in manifest}
        for path in folder.iterdir():
            if path.is_file() and path.name not in installed:
                path.unlink()

    # What setuptools asks of a step of the build; the libraries are no sources and need no mapping.
    def get_source_files(self):
        return []

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class Build(build):
    sub_commands = [("build_libraries", None)] + build.sub_commands

    def run(self):
        # Nothing of an earlier build (a module since removed) may get into this wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BdistWheel(bdist_wheel):
    def get_tag(self):
        # Libraries loaded with ctypes: any Python 3, this platform; or the one that they were built for.
        platform = super().get_tag()[2]
        if TOOLCHAIN and not self.plat_name_supplied:
            platform = "linux_" + json.loads((BUILD / "hobbit_build.json").read_text(encoding="utf-8"))["processor"]
        return ("py3", "none", platform)


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


readme = ROOT / "README.md"
setup(
    version=PIN["__version__"],
    long_description=readme.read_text(encoding="utf-8") if readme.is_file() else "",
    long_description_content_type="text/markdown",
    install_requires=[f"llama-cpp-python=={PIN['LLAMA_CPP_PYTHON_VERSION']}", "numpy", "gguf==0.19.0"],
    setup_requires=[] if find_cmake() else ["cmake>=3.21"],
    distclass=BinaryDistribution,
    cmdclass={"build": Build, "build_libraries": BuildLibraries, "bdist_wheel": BdistWheel},
)
