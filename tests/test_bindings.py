"""hobbit_cpp/bindings.py against csrc/include/hobbit.h, which cffi reads."""

import ctypes
import re

import pytest

from hobbit_cpp import _libs, bindings

cffi = pytest.importorskip("cffi")

PRIMITIVES = {
    "float": ctypes.c_float, "double": ctypes.c_double, "int": ctypes.c_int, "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "char": ctypes.c_char,
}


@pytest.fixture(scope="module")
def header(repo):
    return (repo / "csrc/include/hobbit.h").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ffi(header):
    lines = re.sub(r"//.*|/\*.*?\*/", "", header).splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    text = re.sub(r'extern "C" \{|\}\s*$', "", text).replace("HOBBIT_API ", "")
    ffi = cffi.FFI()
    ffi.cdef(text)
    return ffi


@pytest.fixture(scope="module")
def lib(ffi):
    return ffi.dlopen(_libs.ensure()._name)


def expected(ffi, kind):
    """The ctypes type for a cffi type; where bindings.py must have one of that name, that one."""
    if kind.kind == "primitive":
        return PRIMITIVES[kind.cname]
    if kind.kind == "array":
        return expected(ffi, kind.item) * kind.length
    if kind.kind == "struct":
        return getattr(bindings, kind.cname.replace("struct ", ""))
    if kind.kind == "void":
        return None
    if kind.kind == "function":
        return ctypes.CFUNCTYPE(expected(ffi, kind.result), *(expected(ffi, a) for a in kind.args))
    assert kind.kind == "pointer", kind
    to = kind.item
    if to.kind == "void" or to.kind == "struct" and to.fields is None:
        return ctypes.c_void_p
    return ctypes.c_char_p if to.cname == "char" else ctypes.POINTER(expected(ffi, to))


def test_every_struct(ffi):
    structs = [n for n in ffi.list_types()[1] if ffi.typeof("struct " + n).fields is not None]
    assert len(structs) >= 5
    for name in structs:
        want, have = ffi.typeof("struct " + name), getattr(bindings, name)
        assert ctypes.sizeof(have) == ffi.sizeof(want), name
        assert [f[0] for f in have._fields_] == [f[0] for f in want.fields], name
        for (field, detail), (_, kind) in zip(want.fields, have._fields_):
            where = f"{name}.{field}"
            assert getattr(have, field).offset == detail.offset, where
            assert getattr(have, field).size == ffi.sizeof(detail.type), where
            assert kind is expected(ffi, detail.type), where
    ours = {n for n, v in vars(bindings).items() if isinstance(v, type) and issubclass(v, ctypes.Structure)}
    assert ours == set(structs)


def test_every_constant(ffi, header):
    want = {k: int(v) for k, v in re.findall(r"^#define (HOBBIT_\w+)\s+(\d+)", header, re.M)}
    for enum in re.findall(r"^enum (\w+) \{", header, re.M):
        want.update(ffi.typeof("enum " + enum).relements)
    assert len(want) > 10
    assert {k: v for k, v in vars(bindings).items() if k.startswith("HOBBIT_")} == want


def test_every_callback_type(ffi):
    wanted = [n for n in ffi.list_types()[0] if n.startswith("hobbit_")]
    assert len(wanted) == 4
    for name in wanted:
        assert getattr(bindings, name) is expected(ffi, ffi.typeof(name)), name


def test_every_function(ffi, lib, header):
    declared = re.findall(r"^HOBBIT_API .*?(\w+)\(", header, re.M)
    assert sorted(declared) == sorted(n for n in dir(lib) if n.startswith("hobbit_"))
    for name in declared:
        want, have = ffi.typeof(getattr(lib, name)), getattr(bindings, name)
        assert have.restype is expected(ffi, want.result), name
        assert list(have.argtypes) == [expected(ffi, a) for a in want.args], name
    ours = {n for n, v in vars(bindings).items() if isinstance(v, ctypes._CFuncPtr)}
    assert ours == set(declared)


def test_each_prototype_stands_beside_its_declaration(repo, header):
    """The comment above each function is the header's declaration."""
    text = (repo / "hobbit_cpp/bindings.py").read_text(encoding="utf-8")
    for declaration in re.findall(r"^HOBBIT_API .*?;", header, re.M):
        plain = re.sub(r"\s*/\*.*?\*/", "", re.sub(r" +", " ", declaration))
        assert f"# {plain}\n@ctypes_function(" in text, plain


def test_library_speaks():
    assert bindings.hobbit_api_version() == bindings.HOBBIT_API_VERSION
    params = bindings.hobbit_params()
    bindings.hobbit_default_params(params)
    assert (round(params.t1, 6), params.t2, params.n_io_threads) == (0.6, 1.0, 4)
    assert bindings.hobbit_check_params(params) == 0
    params.n_io_threads = 0
    assert bindings.hobbit_check_params(params) < 0
    assert "n_io_threads" in bindings.hobbit_last_error().decode()
