"""ggml's own quantization, through ctypes and libggml-base.

    from gguf_tools import ggml
    q = ggml.quantize("q2_k", rows)          # float32 [n_rows, n_in] -> uint8 [n_rows, row_bytes]
    x = ggml.dequantize("q2_k", q, n_in)     # and back

The library is looked for in the folder named by HOBBIT_LIB_PATH, or else in lib/ of the hobbit_cpp
package. Sizes and names of types (`type_info`) are also known without it, from the gguf package.
Every call releases the GIL, so a thread pool over row blocks uses all cores.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

# GGML_TYPE_COUNT of the pinned ggml.h. ggml_type_name() does not check its argument, so the number of
# ids cannot be asked for; names and sizes are.
TYPE_COUNT = 43


class GGMLError(RuntimeError):
    """The library is missing, or was asked for something that it would answer with an abort or rubbish."""


@dataclass(frozen=True)
class TypeInfo:
    id: int
    name: str    # lower case: "q2_k", "iq4_nl", "f16"
    block: int   # elements per block; a row must be a whole number of blocks
    size: int    # bytes per block

    def row_bytes(self, n_in: int) -> int:
        """Bytes of a row of n_in elements; raises GGMLError if the row is not a whole number of blocks."""
        if n_in % self.block:
            raise GGMLError(f"a row of {n_in} elements cannot hold {self.name}, whose blocks are {self.block} elements")
        return n_in // self.block * self.size

    def fits(self, n_in: int) -> bool:
        return n_in % self.block == 0

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.size / self.block


class _Traits(ctypes.Structure):  # struct ggml_type_traits, ggml.h
    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    ]


_to_float_t = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def library_folders() -> list[Path]:
    """Folders that are searched for the library, in order."""
    env = os.environ.get("HOBBIT_LIB_PATH")
    if env:
        return [Path(env)]
    spec = importlib.util.find_spec("hobbit_cpp")  # finds the package without running it
    roots = [Path(p) for p in spec.submodule_search_locations or []] if spec else []
    roots.append(Path(__file__).resolve().parent.parent / "hobbit_cpp")
    return [root / "lib" for root in dict.fromkeys(roots)]


@functools.lru_cache(maxsize=None)
def _library() -> ctypes.CDLL:
    folders = library_folders()
    for folder in folders:
        for name in ("libggml-base.so", "libggml-base.so.0", "libggml-base.dylib"):
            if (folder / name).is_file():
                try:
                    return _declare(ctypes.CDLL(str(folder / name)))
                except (OSError, AttributeError) as e:
                    raise GGMLError(f"cannot use {folder / name}: {e}") from None
    raise GGMLError(
        f"libggml-base is not in {' or '.join(map(str, folders))}: build hobbit-cpp, or set HOBBIT_LIB_PATH to the "
        "folder of its libraries")


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    # const char * ggml_type_name(enum ggml_type type);
    lib.ggml_type_name.restype = ctypes.c_char_p
    lib.ggml_type_name.argtypes = [ctypes.c_int]
    # const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type type);
    lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
    # bool ggml_quantize_requires_imatrix(enum ggml_type type);
    lib.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    lib.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    # void ggml_quantize_init(enum ggml_type type);
    lib.ggml_quantize_init.restype = None
    lib.ggml_quantize_init.argtypes = [ctypes.c_int]
    # size_t ggml_quantize_chunk(enum ggml_type type, const float * src, void * dst, int64_t start,
    #                            int64_t nrows, int64_t n_per_row, const float * imatrix);
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
                                        ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    return lib


def available() -> bool:
    """True if the library can be loaded."""
    try:
        _library()
        return True
    except GGMLError:
        return False


@functools.lru_cache(maxsize=None)
def types() -> dict[int, TypeInfo]:
    """All types that data can be stored in, by ggml type id."""
    if not available():  # reading and copying files needs sizes only, and must work without the library
        return {int(t): TypeInfo(int(t), t.name.lower(), *sizes) for t, sizes in gguf.GGML_QUANT_SIZES.items()}
    lib, table = _library(), {}
    for i in range(TYPE_COUNT):
        t = lib.ggml_get_type_traits(i).contents
        if t.type_size and t.blck_size:  # 0: an id that was given up
            table[i] = TypeInfo(i, lib.ggml_type_name(i).decode().lower(), t.blck_size, t.type_size)
    return table


def type_info(which) -> TypeInfo:
    """TypeInfo of a type given by id, name (any case) or TypeInfo; raises GGMLError if there is none."""
    if isinstance(which, TypeInfo):
        return which
    if isinstance(which, str):
        for t in types().values():
            if t.name == which.lower():
                return t
    elif int(which) in types():
        return types()[int(which)]
    raise GGMLError(f"unknown type {which!r}")


def can_quantize(which) -> bool:
    """True if ggml_quantize_chunk() knows the type; it aborts the process for all others."""
    t = type_info(which)
    if t.name in ("f32", "f16", "bf16"):
        return True
    # every type of its switch has an exported quantize_TYPE()
    return hasattr(_library(), "quantize_" + _library().ggml_type_name(t.id).decode())


def can_dequantize(which) -> bool:
    t = type_info(which)
    return t.name == "f32" or bool(_library().ggml_get_type_traits(t.id).contents.to_float)


@functools.lru_cache(maxsize=None)
def quantizable() -> tuple[TypeInfo, ...]:
    """Types that `quantize` accepts and `dequantize` can read back, smallest first."""
    return tuple(sorted((t for t in types().values() if can_quantize(t) and can_dequantize(t)), key=lambda t: t.bits))


def requires_imatrix(which) -> bool:
    return _library().ggml_quantize_requires_imatrix(type_info(which).id)


def init(which) -> None:
    """Build the type's lookup tables now (some take a second) and not in the first `quantize`."""
    _library().ggml_quantize_init(type_info(which).id)


def quantize(which, rows: np.ndarray, imatrix: np.ndarray | None = None) -> np.ndarray:
    """Quantize float32 rows [n_rows, n_in] to uint8 [n_rows, row_bytes].

    imatrix: float32 [n_in], the weight of each column's error, or None. Raises GGMLError where
    ggml_quantize_chunk() would abort the process (type without quantizer, missing imatrix, values that
    are not finite) or write rubbish (rows that are not whole blocks).
    """
    t = type_info(which)
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    n_rows, n_in = rows.shape
    out = np.empty((n_rows, t.row_bytes(n_in)), dtype=np.uint8)
    if not can_quantize(t):
        raise GGMLError(f"ggml cannot quantize to {t.name}")
    weights = None
    if imatrix is not None:
        imatrix = np.ascontiguousarray(imatrix, dtype=np.float32)
        if imatrix.shape != (n_in,):
            raise GGMLError(f"an importance matrix of {imatrix.size} columns was given for rows of {n_in}")
        weights = imatrix.ctypes.data
    elif requires_imatrix(t):
        raise GGMLError(f"{t.name} needs an importance matrix")
    if not np.isfinite(rows).all():
        raise GGMLError("the weights hold values that are not finite (NaN or infinity)")
    _library().ggml_quantize_chunk(t.id, rows.ctypes.data, out.ctypes.data, 0, n_rows, n_in, weights)
    return out


def dequantize(which, data, n_in: int, out: np.ndarray | None = None) -> np.ndarray:
    """Float32 rows [n_rows, n_in] of packed data (any buffer of n_rows * row_bytes).

    out: float32 array of that shape to write into, or None.
    """
    t = type_info(which)
    data = np.frombuffer(data, dtype=np.uint8)
    row_bytes = t.row_bytes(n_in)
    n_rows, rest = divmod(data.size, row_bytes)
    if rest:
        raise GGMLError(f"{data.size} bytes are no whole number of {t.name} rows of {n_in} elements")
    if out is None:
        out = np.empty((n_rows, n_in), dtype=np.float32)
    assert out.shape == (n_rows, n_in) and out.dtype == np.float32 and out.flags.c_contiguous
    if t.name == "f32":
        out[...] = data.view(np.float32).reshape(n_rows, n_in)
        return out
    to_float = _library().ggml_get_type_traits(t.id).contents.to_float
    if not to_float:
        raise GGMLError(f"ggml cannot turn {t.name} into floats")
    _to_float_t(to_float)(data.ctypes.data, out.ctypes.data, n_rows * n_in)
    return out
