"""Makes llama_cpp, llama-cpp-python's bindings, run on our libllama.

llama_cpp loads libllama when it is first imported, from the folder that LLAMA_CPP_LIB_PATH names.
ensure() sets that, imports llama_cpp and then proves that the library in use is the one shipped
here: with any other, models load and run but nothing is offloaded, or the process crashes.
"""

import ctypes
import json
import os
import pathlib
import sys

from ._version import HOBBIT_API_VERSION

_VARIABLE = "LLAMA_CPP_LIB_PATH"
_BUILD = "build them with 'pip install .' or 'pip install -e .' in a checkout of hobbit-cpp"

_lib = None


def lib_dir():
    """The folder of our libllama and ggml libraries."""
    return pathlib.Path(__file__).resolve().parent / "lib"


def build_info():
    """What the libraries were built from (hobbit_build.json); {} if they are missing."""
    try:
        return json.loads((lib_dir() / "hobbit_build.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def ensure():
    """Import llama_cpp on our libraries and return libllama (a ctypes.CDLL); ImportError if that cannot be."""
    global _lib
    if _lib is None:
        _lib = _load()
    return _lib


def _load():
    want = lib_dir()
    if not any((want / name).is_file() for name in ("libllama.so", "libllama.dylib", "llama.dll")):
        raise ImportError(f"hobbit_cpp: the libraries are not in {want}; {_BUILD}.")

    if "llama_cpp" in sys.modules:
        lib = getattr(sys.modules.get("llama_cpp.llama_cpp"), "_lib", None)
        if lib is None or not _same(_folder_of(lib), want):
            raise ImportError(
                f"hobbit_cpp: llama_cpp was imported before and uses the libraries in {_folder_of(lib)}, not those in {want}; "
                "import hobbit_cpp first."
            )
    else:
        preset = os.environ.get(_VARIABLE)
        if preset is not None and not _same(preset, want):
            raise ImportError(
                f"hobbit_cpp: {_VARIABLE} makes llama_cpp use the libraries in {preset or 'the current folder'}, not those in {want}; "
                f"unset {_VARIABLE}."
            )
        _check_processor(want)
        os.environ[_VARIABLE] = str(want)
        try:
            import llama_cpp.llama_cpp
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "llama_cpp":
                raise
            raise ImportError(
                "hobbit_cpp: llama-cpp-python, whose bindings are used, is not installed; "
                "reinstall hobbit-cpp with its dependencies."
            ) from error
        except RuntimeError as error:  # the dynamic loader's complaint
            raise ImportError(f"hobbit_cpp: the libraries in {want} cannot be loaded ({error}); {_BUILD}.") from error
        finally:
            # Read once, above. Left set it would reach child processes that have nothing to do with us.
            if preset is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = preset
        lib = llama_cpp.llama_cpp._lib
        if not _same(_folder_of(lib), want):
            raise ImportError(f"hobbit_cpp: llama_cpp loaded the libraries in {_folder_of(lib)}, not those in {want}; import hobbit_cpp first.")

    _check_handshake(lib, want)
    _check_ggml(lib, want)
    if build_info().get("backend_dl"):
        # Back ends built as modules are otherwise looked for beside the Python executable.
        lib.ggml_backend_load_all_from_path(os.fsencode(want))
    return lib


def _folder_of(lib):
    return os.path.dirname(lib._name) if lib is not None else "an unknown place"


def _same(a, b):
    return os.path.realpath(a) == os.path.realpath(b)


def _check_handshake(lib, want):
    try:
        function = lib.hobbit_api_version
    except AttributeError:
        raise ImportError(f"hobbit_cpp: {lib._name} is a plain llama.cpp without hobbit-cpp's engine; {_BUILD}.") from None
    function.restype, function.argtypes = ctypes.c_uint32, []
    if function() != HOBBIT_API_VERSION:
        raise ImportError(
            f"hobbit_cpp: {lib._name} has API version {function()}, this package needs {HOBBIT_API_VERSION}; "
            f"the libraries in {want} are of another build: {_BUILD}."
        )


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    ]


def _check_ggml(lib, want):
    """Our libllama may have been given another ggml, one that the process had loaded before."""
    if os.name != "posix":
        return
    process = ctypes.CDLL(None)
    if not hasattr(process, "dladdr"):
        return
    process.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    # One function of libggml-base, one of libggml. `process` sees what was loaded for everyone
    # (LD_PRELOAD, RTLD_GLOBAL), which goes before a library's own dependencies.
    for scope in (process, lib):
        for name in ("ggml_init", "ggml_backend_reg_count"):
            function, info = getattr(scope, name, None), _DlInfo()
            if function is None or not process.dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)):
                continue
            path = os.fsdecode(info.fname)
            if not _same(os.path.dirname(path), want):
                raise ImportError(
                    f"hobbit_cpp: another ggml, {path}, was loaded into this process before the one in {want}; "
                    "import hobbit_cpp first."
                )


def _check_processor(want):
    """Libraries built with -march=native on a newer machine would die of an illegal instruction."""
    info = build_info()
    needed = info.get("cpu_flags")
    # An emulator (qemu-user) shows the file of the processor that it runs on: no line of the kind means that nothing is known.
    line_name = "features" if info.get("processor", "").startswith(("aarch64", "arm")) else "flags"
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            have = next((line.split(":", 1)[1].split() for line in f if line.lower().startswith(line_name)), None)
    except OSError:
        return
    missing = [flag for flag in needed or [] if have and flag not in have]
    if missing:
        raise ImportError(
            f"hobbit_cpp: the libraries in {want} were built for a processor with {', '.join(missing)}, which this one lacks; "
            "build them here, or with CMAKE_ARGS=-DGGML_NATIVE=OFF."
        )
