"""One copy of 8 bits a weight from which fewer bits are read as a prefix.

    copy = Q8(rows)               # planes of ggml's q8_0: all 8 of them are q8_0 bit for bit
    copy = K8(rows)               # scale and least value of 6 bits for 32 weights, as in q4_K
    copy.values(4)                # float32, as read from the first 4 planes
    copy.bits(4)                  # stored bits a weight, scales included

A value's integer is cut into planes, the sign's or greatest first; the i-th bits of a block are one plane of 32 bits. What the missing
planes would say is taken to be in the middle: 1000... in Q8, which makes any prefix a q8_0 block again.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile

import numpy as np

from gguf_tools import ggml

BLOCK = 32


class Q8:
    def __init__(self, rows: np.ndarray):
        blocks = ggml.quantize("q8_0", rows).reshape(-1, 34)
        self.shape = rows.shape
        self.scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)  # [n, 1]
        self.integers = blocks[:, 2:].view(np.int8).copy()                     # [n, 32]

    @staticmethod
    def bits(planes: int, n_in: int) -> float:
        return planes + 16 / BLOCK

    def prefix(self, planes: int) -> np.ndarray:
        """int8 [n, 32]: the integers of a q8_0 block."""
        if planes == 8:
            return self.integers
        rest = 8 - planes
        return ((self.integers >> rest) << rest) | np.int8(1 << (rest - 1))

    def values(self, planes: int) -> np.ndarray:
        return (self.scale * self.prefix(planes)).reshape(self.shape)

    def planes(self) -> np.ndarray:
        """uint32 [8, n]: bit i of a word is value i's."""
        bits = np.unpackbits(self.integers.view(np.uint8)[:, :, None], axis=2)  # [n, 32, 8], greatest first
        return np.packbits(bits.transpose(2, 0, 1), axis=2, bitorder="little").view(np.uint32)[:, :, 0]


class K8:
    """value = scale * integer - least, integer 0 to 255; scale and least are 6 bits of a half-precision number for 256 weights, or
    for a row where that is shorter. Which 6 bits: nested_fit() in nested.cpp."""

    def __init__(self, rows: np.ndarray):
        self.shape = rows.shape
        w = np.ascontiguousarray(rows, np.float32).reshape(-1, BLOCK)
        wide = min(256, rows.shape[1]) // BLOCK
        least = np.maximum(-w.min(axis=1), 0)
        units = [_unit(x, wide) for x in ((w.max(axis=1) + least) / 255, least)]
        self.scale, self.least = np.empty((len(w), 1), np.float32), np.empty((len(w), 1), np.float32)
        self.integers = np.empty(w.shape, np.uint8)
        native().nested_fit(ctypes.c_int64(len(w)), *map(pointer, (w, *units, self.integers, self.scale, self.least)))

    @staticmethod
    def bits(planes: int, n_in: int) -> float:
        return planes + 12 / BLOCK + 32 / min(256, n_in)

    def values(self, planes: int) -> np.ndarray:
        rest = 8 - planes
        middle = ((self.integers >> rest) << rest).astype(np.float32) + np.float32(((1 << rest) - 1) / 2)
        return (self.scale * middle - self.least).reshape(self.shape)


FORMATS = {"q8": Q8, "k8": K8}


def _unit(x: np.ndarray, wide: int) -> np.ndarray:
    """What one step of a 6-bit code is worth, for each block: the greatest of a row's part is 60, so that a search has room."""
    unit = np.maximum(x.reshape(-1, wide).max(axis=1) / 60, 1e-7).astype(np.float16).astype(np.float32)
    return np.repeat(unit, wide)


@functools.cache
def native() -> ctypes.CDLL:
    """nested.cpp, compiled for this machine."""
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nested.cpp")
    with tempfile.TemporaryDirectory(prefix="hobbit-nested-") as folder:
        out = os.path.join(folder, "nested.so")
        subprocess.run(["g++", "-O3", "-ffast-math", "-march=native", "-shared", "-fPIC", source, "-o", out], check=True)
        lib = ctypes.CDLL(out)
    lib.nested_play.restype = ctypes.c_int64
    return lib


def pointer(a: np.ndarray) -> ctypes.c_void_p:
    return a.ctypes.data_as(ctypes.c_void_p)
