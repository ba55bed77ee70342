"""What was built and how it is found: versions, pins, the libraries, and every way to get the wrong ones."""

import ctypes
import importlib.metadata
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import textwrap

import pytest

from hobbit_cpp import _libs, _version

CC = shutil.which("cc") or shutil.which("gcc")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF and /proc")
needs_cc = pytest.mark.skipif(not CC, reason="needs a C compiler")

LOAD = """
    try:
        import hobbit_cpp
        from hobbit_cpp import _libs
        lib = _libs.ensure()
    except ImportError as error:
        print("ImportError:", error)
    else:
        print("loaded", lib._name)
"""


def python(code, path=(), **variables):
    """Run code in a fresh interpreter, without the variables that choose libraries."""
    env = {k: v for k, v in os.environ.items() if k not in ("LLAMA_CPP_LIB_PATH", "LD_LIBRARY_PATH")}
    env.update({k: str(v) for k, v in variables.items()}, PYTHONUTF8="1")
    code = "import sys\n" + "".join(f"sys.path.insert(0, {str(p)!r})\n" for p in path) + textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def copy_of_libraries(folder):
    shutil.copytree(_libs.lib_dir(), folder)
    return folder


# --- versions and pins -------------------------------------------------------------------------


def test_versions_agree(repo):
    metadata = importlib.metadata.metadata("hobbit-cpp")
    assert metadata["Version"] == _version.__version__
    pins = [r.split(";")[0].replace(" ", "") for r in metadata.get_all("Requires-Dist")]
    assert f"llama-cpp-python=={_version.LLAMA_CPP_PYTHON_VERSION}" in pins
    header = (repo / "csrc/include/hobbit.h").read_text(encoding="utf-8")
    assert f"#define HOBBIT_API_VERSION {_version.HOBBIT_API_VERSION}\n" in header
    assert importlib.metadata.version("llama-cpp-python") == _version.LLAMA_CPP_PYTHON_VERSION


def test_pins_stand_in_one_place(repo):
    files = ["CMakeLists.txt", "setup.py", "pyproject.toml", "Makefile", *(p.relative_to(repo) for p in (repo / "cmake").iterdir() if p.is_file())]
    for name in files:
        text = (repo / name).read_text(encoding="utf-8")
        for pin in (_version.LLAMA_CPP_PYTHON_VERSION, _version.LLAMA_CPP_PYTHON_SHA256, _version.LLAMA_CPP_COMMIT):
            assert pin not in text, f"{pin} in {name}"


def test_library_says_what_it_is():
    lib = _libs.ensure()
    assert lib.hobbit_api_version() == _version.HOBBIT_API_VERSION
    lib.hobbit_build_info.restype = ctypes.c_char_p
    assert lib.hobbit_build_info().decode() == f"hobbit-cpp {_version.__version__}, llama.cpp {_version.LLAMA_CPP_COMMIT}"


def test_console_script():
    (script,) = [e for e in importlib.metadata.entry_points().get("console_scripts", ()) if e.name == "hobbit"] \
        if sys.version_info < (3, 10) else importlib.metadata.entry_points(group="console_scripts", name="hobbit")
    assert script.value == "hobbit_cpp.cli:main"


# --- the libraries -----------------------------------------------------------------------------


@linux
@linux
@pytest.mark.parametrize("toolchain", [None, "arm.cmake"])
def test_a_wheel_is_tagged_for_the_processor_that_it_was_built_for(repo, tmp_path, monkeypatch, toolchain):
    setuptools = pytest.importorskip("setuptools", minversion="70.1")  # its bdist_wheel
    for name in ("setup.py", "hobbit_cpp/_version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(repo / name, tmp_path / name)
    arguments = {}
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    monkeypatch.setenv("CMAKE_ARGS", f"-DGGML_NATIVE=OFF -DCMAKE_TOOLCHAIN_FILE=elsewhere/{toolchain}" if toolchain else "")
    runpy.run_path(str(tmp_path / "setup.py"))
    command = arguments["cmdclass"]["bdist_wheel"](arguments["distclass"]({"name": "x"}))
    command.finalize_options()
    if toolchain:
        (tmp_path / "build/arm").mkdir(parents=True)
        (tmp_path / "build/arm/hobbit_build.json").write_text('{"processor": "aarch64"}', encoding="utf-8")
        assert command.get_tag() == ("py3", "none", "linux_aarch64")
    else:
        assert command.get_tag() == ("py3", "none", re.sub(r"\W", "_", sysconfig.get_platform()))


def test_each_library_once_and_by_its_own_name():
    folder = _libs.lib_dir()
    info = json.loads((folder / "hobbit_build.json").read_text(encoding="utf-8"))
    assert sorted(p.name for p in folder.glob("*.so*")) == sorted(f"lib{name}.so" for name in info["libraries"])
    assert not [p for p in folder.iterdir() if p.is_symlink()]
    assert (folder / "LICENSE.llama.cpp").is_file()
    readelf = shutil.which("readelf")
    if readelf:
        text = subprocess.run([readelf, "-d", str(folder / "libllama.so")], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
        assert re.search(r"\(RPATH\).*\[\$ORIGIN", text) and "(RUNPATH)" not in text
        assert "[libggml-base.so]" in text and "soname: [libllama.so]" in text


@linux
def test_all_loaded_libraries_are_ours():
    output = python("""
        from hobbit_cpp import _libs
        _libs.ensure()
        print(*{line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/libggml" in line or "/libllama" in line}, sep="\\n")
    """)
    paths = [pathlib.Path(p) for p in output.splitlines()]
    assert {p.parent for p in paths} == {_libs.lib_dir()}
    assert {"libllama.so", "libggml.so", "libggml-base.so"} <= {p.name for p in paths}


@needs_cc
def test_build_stops_if_the_symbol_is_missing(repo, tmp_path):
    cmake, nm = shutil.which("cmake"), shutil.which("nm")
    if not cmake or not nm:
        pytest.skip("needs cmake and nm")

    def check(code):
        subprocess.run([CC, "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "lib.so")], input=code, text=True, check=True)
        return subprocess.run([cmake, f"-DNM={nm}", f"-DLIBRARY={tmp_path / 'lib.so'}", "-DSYMBOL=hobbit_api_version", "-P",
                               str(repo / "cmake/check_export.cmake")], capture_output=True, text=True)

    assert check("int hobbit_api_version(void) { return 1; }").returncode == 0
    assert check("int hobbit_api_version2(void) { return 1; }").returncode != 0
    result = check("static int hobbit_api_version(void) { return 1; } int other(void) { return hobbit_api_version(); }")
    assert result.returncode != 0 and "does not export hobbit_api_version" in " ".join(result.stderr.split())


# --- the wrong libraries -----------------------------------------------------------------------


def test_ours_are_loaded_and_the_environment_is_left_alone():
    output = python(LOAD + "\n    import os; print(os.environ.get('LLAMA_CPP_LIB_PATH'))")
    loaded, variable = output.splitlines()
    assert pathlib.Path(loaded[len("loaded "):]).parent == _libs.lib_dir()
    assert variable == "None"


def test_path_preset_to_our_folder():
    assert python(LOAD, LLAMA_CPP_LIB_PATH=_libs.lib_dir()).startswith("loaded ")
    assert python("import llama_cpp\n" + textwrap.dedent(LOAD), LLAMA_CPP_LIB_PATH=_libs.lib_dir()).startswith("loaded ")


def test_path_preset_to_another_folder(tmp_path):
    output = python(LOAD, LLAMA_CPP_LIB_PATH=tmp_path)
    assert output.startswith("ImportError:") and output.count("\n") == 0
    assert str(tmp_path) in output and str(_libs.lib_dir()) in output and "unset LLAMA_CPP_LIB_PATH" in output


def test_llama_cpp_imported_first_with_other_libraries(tmp_path):
    other = copy_of_libraries(tmp_path / "other é")
    output = python(f"""
        import os
        os.environ["LLAMA_CPP_LIB_PATH"] = {str(other)!r}
        import llama_cpp
        del os.environ["LLAMA_CPP_LIB_PATH"]
    """ + LOAD.replace("\n    ", "\n        "))
    assert output.startswith("ImportError:") and output.count("\n") == 0
    assert str(other) in output and str(_libs.lib_dir()) in output and "import hobbit_cpp first" in output


@linux
def test_ld_library_path_with_wrong_libraries(tmp_path):
    for path in _libs.lib_dir().glob("*.so"):
        for name in (path.name, path.name + ".0"):
            (tmp_path / name).write_bytes(b"not a library")
    assert python(LOAD, LD_LIBRARY_PATH=tmp_path).startswith("loaded ")


@linux
@pytest.mark.parametrize("how", ["loaded before", "preloaded"])
def test_another_ggml_in_the_process(tmp_path, how):
    other = copy_of_libraries(tmp_path / "other") / "libggml-base.so"
    if how == "preloaded":
        output = python(LOAD, LD_PRELOAD=other)
    else:
        output = python(f"import ctypes; ctypes.CDLL({str(other)!r})\n" + textwrap.dedent(LOAD))
    assert output.startswith("ImportError:") and "another ggml" in output
    assert str(other) in output and str(_libs.lib_dir()) in output


# The rest is about libraries that this build does not make: a copy of _libs.py beside made-up ones.


class Package:
    """hobbit_cpp with nothing but _libs.py, libraries made from a line of C, and bindings that only load them."""

    def __init__(self, top):
        self.top, self.lib = top, top / "hobbit_cpp" / "lib"
        self.lib.mkdir(parents=True)
        for module in (_libs, _version):
            shutil.copy(module.__file__, top / "hobbit_cpp")
        (top / "hobbit_cpp" / "__init__.py").touch()
        (top / "llama_cpp").mkdir()
        (top / "llama_cpp" / "__init__.py").write_text("from .llama_cpp import *\n")
        (top / "llama_cpp" / "llama_cpp.py").write_text(
            "import ctypes, os\n_lib = ctypes.CDLL(os.path.join(os.environ['LLAMA_CPP_LIB_PATH'], 'libllama.so'))\n")

    def compile(self, code):
        subprocess.run([CC, "-shared", "-fPIC", "-x", "c", "-", "-o", str(self.lib / "libllama.so")], input=code, text=True, check=True)

    def load(self):
        return python(LOAD, path=[self.top])


@pytest.fixture
def package(tmp_path):
    return Package(tmp_path)


def test_libraries_missing(package):
    output = package.load()
    assert output.startswith("ImportError:") and str(package.lib) in output and "pip install" in output


@linux
@needs_cc
def test_library_without_the_engine(package):
    package.compile("int llama_max_devices(void) { return 1; }")
    assert "is a plain llama.cpp without hobbit-cpp's engine" in package.load()


@linux
@needs_cc
def test_library_of_another_api_version(package):
    package.compile("unsigned hobbit_api_version(void) { return 99; }")
    output = package.load()
    assert f"has API version 99, this package needs {_version.HOBBIT_API_VERSION}" in output
    package.compile(f"unsigned hobbit_api_version(void) {{ return {_version.HOBBIT_API_VERSION}; }}")
    assert package.load().startswith("loaded ")


@linux
def test_library_that_does_not_load(package):
    (package.lib / "libllama.so").write_bytes(b"not a library")
    # llama-cpp-python turns the loader's OSError into a RuntimeError
    module = package.top / "llama_cpp" / "llama_cpp.py"
    module.write_text("try:\n    " + module.read_text().replace("\n_lib", "\n    _lib") + "except OSError as e:\n    raise RuntimeError(e)\n")
    output = package.load()
    assert output.startswith("ImportError:") and "cannot be loaded" in output and str(package.lib) in output


@linux
@needs_cc
def test_library_built_for_a_newer_processor(package):
    package.compile("unsigned hobbit_api_version(void) { return 1; }")
    (package.lib / "hobbit_build.json").write_text(json.dumps({"cpu_flags": ["avx9000"]}))
    output = package.load()
    assert output.startswith("ImportError:") and "avx9000" in output and "GGML_NATIVE=OFF" in output


@linux
def test_flags_recorded_at_build_are_this_machines():
    """hobbit_build.json speaks /proc/cpuinfo's language."""
    flags = _libs.build_info()["cpu_flags"]
    if not flags:
        pytest.skip("built for any processor")
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    assert set(flags) <= set(cpuinfo.split())


def test_bindings_missing(package):
    package.lib.joinpath("libllama.so").touch()
    shutil.rmtree(package.top / "llama_cpp")
    output = python("""
        import importlib.abc, sys
        class Hide(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.partition(".")[0] == "llama_cpp":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Hide())
    """ + LOAD.replace("\n    ", "\n        "), path=[package.top])
    assert output.startswith("ImportError:") and "llama-cpp-python" in output and "not installed" in output
