"""CRC-32 of a GGUF's tensor data, kept in its metadata (docs/format.md, "Checksums").

    sums = Checksums({"blk.0.ffn_up_exps.weight.low": (slab_bytes, n_slabs)})
    sums.add("blk.0.ffn_up_exps.weight.low", data)    # all bytes of a tensor, in order, in any pieces
    sums.values                                       # {name: [one CRC per chunk]}

A slab is what is read at once: one expert of a sidecar's tensor, the whole tensor elsewhere. The CRC is zlib's. It finds
accidents, not forgeries.
"""

from __future__ import annotations

import zlib
from typing import Iterator

from .errors import GGUFError
from .reader import Reader, Tensor

CHUNK = 2 << 20  # bytes; IO_CHUNK of csrc/core/layout.h: what the loader reads at once
PREFIX = "hobbit.crc32."
HEADER, CHUNK_KEY, TENSORS, VALUES = (PREFIX + name for name in ("header", "chunk", "tensors", "values"))


def chunks(slab: int, n_slabs: int = 1) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each chunk of n_slabs slabs of `slab` bytes."""
    for i in range(n_slabs):
        for at in range(0, slab, CHUNK):
            yield i * slab + at, min(CHUNK, slab - at)


def count(slab: int, n_slabs: int) -> int:
    return -(-slab // CHUNK) * n_slabs


class Checksums:
    """CRCs of tensors whose bytes come in order. slabs: {name: (bytes of a slab, number of slabs)}."""

    def __init__(self, slabs: dict[str, tuple[int, int]]):
        self.slabs = slabs
        self.values: dict[str, list[int]] = {name: [] for name in slabs}
        self._chunks = {name: chunks(*slab) for name, slab in slabs.items()}
        self._open: dict[str, tuple[int, int]] = {}  # name -> (CRC so far, bytes left) of an unfinished chunk

    def add(self, name: str, data) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            crc, left = self._open.pop(name, None) or (0, next(self._chunks[name])[1])
            n = min(left, len(view))
            crc, view, left = zlib.crc32(view[:n], crc), view[n:], left - n
            if left:
                self._open[name] = crc, left
            else:
                self.values[name].append(crc)


def stored(reader: Reader, slabs: dict[str, tuple[int, int]]) -> dict[str, list[int]] | None:
    """{tensor: its CRCs} of the file's metadata, None if it has none.

    slabs: as for Checksums, every tensor that must have them. Raises GGUFError if they do not fit it.
    """
    names, values = reader.get(TENSORS, None, list), reader.get(VALUES, None, list)
    if names is None or values is None:
        return None
    chunk = reader.get(CHUNK_KEY, 0, int)
    if chunk != CHUNK:
        raise GGUFError(f"{reader.path}: its checksums are of pieces of {chunk} bytes, which this program does not know ({CHUNK})")
    found, at = {}, 0
    for name in names:
        if name not in slabs or name in found:
            raise GGUFError(f"{reader.path} is damaged: {TENSORS} names {name!r}, which is not there or was named before")
        n = count(*slabs[name])
        found[name] = values[at:at + n]
        at += n
    if at != len(values) or len(found) != len(slabs):
        raise GGUFError(f"{reader.path} is damaged: {VALUES} has {len(values)} entries for {at} pieces of {len(found)} of {len(slabs)} tensors")
    return found


def header_crc(head: bytes, at: int) -> int:
    """CRC of what lies before the tensor data; `at`: where this value itself is, which counts as 0."""
    return zlib.crc32(head[at + 4:], zlib.crc32(bytes(4), zlib.crc32(head[:at])))


def damaged(tensor: Tensor, slab: int, wrong: list[tuple[int, int]]) -> list[str]:
    """A line for each slab with chunks that differ: which expert, which bytes of the file. wrong: (offset, bytes) in the tensor."""
    lines: dict[int, list[tuple[int, int]]] = {}
    for offset, n in wrong:
        lines.setdefault(offset // slab, []).append((offset, n))
    n_slabs = tensor.nbytes // slab
    return [f"{tensor.name}" + (f", expert {i}" if n_slabs > 1 else "") +
            f": bytes {tensor.offset + parts[0][0]} to {tensor.offset + sum(parts[-1])}" for i, parts in lines.items()]
