"""Importance matrices as llama.cpp's llama-imatrix writes them: the GGUF form and the old .dat form.

GGUF form: for each weight X the tensors X.in_sum2 (f32 [n_in, n_expert], sums of squared inputs) and
X.counts (f32 [1, n_expert], tokens seen). Old form: i32 number of entries; per entry i32 length, name,
i32 number of calls, i32 number of values, f32 values (mean times calls); experts that were never
routed have mean 1 there. See tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp.
"""

from __future__ import annotations

import os
import struct

import numpy as np

from gguf_tools.reader import Reader, open_regular

from ._convert_plan import ConvertError, Copies


class Imatrix:
    """Column weights for quantization. Raises ConvertError or GGUFError if the file is damaged or of another model."""

    def __init__(self, path):
        self.path = os.fspath(path)
        self._reader: Reader | None = None
        self._fd = -1
        self._old: dict[str, tuple[int, int, int]] = {}  # old form: name -> (offset, values, calls)
        self._fd = open_regular(self.path)
        if os.pread(self._fd, 4, 0) == b"GGUF":
            self._reader = Reader(self.path)
            ending = ".in_sum2"
            self.names = [n.removesuffix(ending) for n in self._reader.tensors if n.endswith(ending)]
            if not self.names:
                raise ConvertError(f"{self.path} is no importance matrix: it holds no *.in_sum2 tensors")
        else:
            self._index_old()
            self.names = list(self._old)

    def check(self, experts: list[Copies]) -> None:
        """Raises ConvertError unless every entry has the size of its tensor and at least one is there."""
        if not any(c.tensor.name in self.names for c in experts):
            raise ConvertError(f"{self.path} has no entry for any routed expert tensor (its first is {self.names[0]}, the "
                               f"model has {experts[0].tensor.name}): it is of another model")
        for c in experts:
            if c.tensor.name in self.names:
                n_values, n_counts = self._sizes(c.tensor.name)
                if n_values != c.n_in * c.n_expert or n_counts not in (1, c.n_expert):
                    raise ConvertError(f"{self.path}: the entry for {c.tensor.name} has {n_values} values "
                                       f"({n_counts} counts), the tensor needs {c.n_in} x {c.n_expert} = "
                                       f"{c.n_in * c.n_expert}: it is of another model")

    def weights(self, c: Copies) -> tuple[np.ndarray, list[int]]:
        """Float32 weights [n_expert, n_in] of one tensor, and the experts that have no data (weight 1)."""
        name, shape = c.tensor.name, (c.n_expert, c.n_in)
        if name not in self.names:
            return np.ones(shape, np.float32), list(range(c.n_expert))
        if self._reader:
            sums = self._floats(name + ".in_sum2").reshape(shape)
            counts = np.rint(self._floats(name + ".counts"))
            counts = np.broadcast_to(counts.reshape(-1, 1), (c.n_expert, 1))
            with np.errstate(divide="ignore", invalid="ignore"):
                weights = np.where(counts > 0, sums / counts, np.float32(0))
        else:
            offset, n, calls = self._old[name]
            weights = np.frombuffer(os.pread(self._fd, 4 * n, offset), dtype="<f4").reshape(shape)
            if calls > 0:
                weights = weights / np.float32(calls)
        weights = np.ascontiguousarray(weights, dtype=np.float32)
        if not np.isfinite(weights).all() or (weights < 0).any():
            raise ConvertError(f"{self.path}: the entry for {name} holds values that are negative or not finite")
        empty = ~weights.any(axis=1)  # never routed; a quantizer given only zeros has nothing to go by
        weights[empty] = 1
        return weights, np.flatnonzero(empty).tolist()

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _floats(self, name: str) -> np.ndarray:
        return np.frombuffer(self._reader.read(self._reader.tensors[name]), dtype="<f4")

    def _sizes(self, name: str) -> tuple[int, int]:
        if not self._reader:
            return self._old[name][1], 1
        sizes = []
        for ending in (".in_sum2", ".counts"):
            t = self._reader.tensors.get(name + ending)
            if t is None or t.type.name != "f32":
                raise ConvertError(f"{self.path} is damaged: {name}{ending} is missing or not f32")
            sizes.append(t.nbytes // 4)
        return sizes[0], sizes[1]

    def _index_old(self) -> None:
        size, at = os.fstat(self._fd).st_size, 0

        def take(n: int) -> bytes:
            nonlocal at
            if n < 0 or at + n > size:
                raise ConvertError(f"{self.path} is no importance matrix (neither a GGUF nor a complete .dat file)")
            at += n
            return os.pread(self._fd, n, at - n)

        def number() -> int:
            return struct.unpack("<i", take(4))[0]

        n_entries = number()
        if not 1 <= n_entries <= size // 16:
            raise ConvertError(f"{self.path} is no importance matrix (neither a GGUF nor a .dat file)")
        for _ in range(n_entries):
            length = number()
            if not 1 <= length <= 1024:
                raise ConvertError(f"{self.path} is no importance matrix (neither a GGUF nor a .dat file)")
            name = take(length).decode("utf-8", "replace")
            calls, n = number(), number()
            self._old[name] = (at, n, calls)
            if n < 1 or at + 4 * n > size:
                raise ConvertError(f"{self.path} is truncated: the entry for {name} needs {n} values")
            at += 4 * n

