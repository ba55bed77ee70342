"""Is every byte of a converted model what the converter wrote? `hobbit verify`, and the main file of Llama(verify=True).

    report = verify("OUT.gguf")                # the main file and its sidecar, and what that links to
    report.damaged                             # a line for each damaged piece; empty: all is well
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from typing import Iterator

from gguf_tools.checksums import HEADER, chunks, damaged, header_crc, stored
from gguf_tools.errors import GGUFError
from gguf_tools.reader import File, Reader, Tensor, sidecar_path

from ._convert_run import in_order
from ._progress import Progress

READ_BYTES = 32 << 20  # of chunks, at once


@dataclass
class Verified:
    """files: paths that were read; nbytes: tensor data compared; pieces: checksums compared; damaged: one line each."""
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    pieces: int = 0
    damaged: list[str] = field(default_factory=list)


def verify(path, *, threads: int = 2, progress: bool = False) -> Verified:
    """Compare a main file and its sidecar, or one of them, with their checksums.

    Raises GGUFError (a ValueError), in one sentence, where there is nothing to compare with or a header is damaged.
    """
    path = os.fspath(path)
    report = Verified()
    with Reader(path) as reader:
        if reader.get("hobbit.role") is None:
            raise GGUFError(f"{path} is an ordinary GGUF, which has no checksums; hobbit convert writes them")
        todo = [(reader, *_tensors(reader))]
        if reader.get("hobbit.role") != "main":
            _run(todo, report, threads, progress)
            return report
        with Reader(sidecar_path(reader)) as sidecar:
            check_pair(reader, sidecar)
            _run([*todo, (sidecar, *_tensors(sidecar))], report, threads, progress)
            return report


def verify_main(path: str) -> None:
    """Raises GGUFError for a main file that is damaged or has no checksums."""
    report = Verified()
    with Reader(path) as reader:
        _run([(reader, *_tensors(reader))], report, 2, False)
    if report.damaged:
        raise GGUFError(f"{report.damaged[0]}: damaged" + (f", and {len(report.damaged) - 1} more: hobbit verify tells all" if report.damaged[1:] else ""))


def check_pair(main: Reader, sidecar: Reader) -> None:
    """Raises GGUFError for a sidecar of another main file."""
    if sidecar.get("hobbit.pair_id") != main.get("hobbit.pair_id"):
        folder, name = os.path.split(sidecar.path)
        why = ("a conversion was interrupted while it replaced both: run hobbit convert again" if os.path.lexists(os.path.join(folder, f".{name}.old"))
               else "hobbit.pair_id differs")
        raise GGUFError(f"{sidecar.path}: belongs to another conversion than {main.path} ({why})")


def _tensors(reader: Reader) -> tuple[list[Tensor], dict[str, int], dict[str, list[int]]]:
    """(everything to compare, {name: bytes of a slab}, {name: checksums})."""
    experts = reader.get("hobbit.role") == "experts"
    tensors = list(reader.tensors.values())
    if experts and reader.get("hobbit.link", False, bool):
        tensors += _linked(reader)
    slabs = {t.name: t.shape[2] if experts and len(t.shape) > 2 else 1 for t in tensors}
    values = stored(reader, {t.name: (t.nbytes // slabs[t.name], slabs[t.name]) for t in tensors})
    if values is None:
        raise GGUFError(f"{reader.path} has no checksums: it was made before they came, or without them; convert the model again to have them")
    return tensors, {t.name: t.nbytes // slabs[t.name] for t in tensors}, values


def _linked(reader: Reader) -> list[Tensor]:
    """The high copies in the source's files, which the reader then closes with its own."""
    lists = [reader.get(f"hobbit.link.{key}", [], list) for key in ("files", "sizes", "tensors", "file_index", "types", "offsets")]
    paths, sizes, names, index, types, offsets = lists
    if len(paths) != len(sizes) or len({len(x) for x in lists[2:]}) != 1:
        raise GGUFError(f"{reader.path} is damaged: its hobbit.link arrays differ in length")
    first = len(reader.files)
    for path, size in zip(map(str, paths), sizes):
        full = os.path.join(os.path.dirname(reader.path), path)
        reader.files.append(File(full, len(reader.files)))
        if reader.files[-1].size != size:
            raise GGUFError(f"{full} has another size than when {reader.path} was made: convert again")
    found = []
    for name, i, kind, offset in zip(names, index, types, offsets):
        here = reader.files[first + i].tensors.get(name) if isinstance(i, int) and 0 <= i < len(paths) else None
        if here is None or (here.type.id, here.offset) != (kind, offset):
            raise GGUFError(f"{reader.path} is damaged, or its source has changed: the link of {name} leads to something else")
        found.append(Tensor(f"{name}.high", here.type, here.shape, first + i, here.offset, here.nbytes))
    return found


def _run(todo, report: Verified, threads: int, progress: bool) -> None:
    meter = Progress(sum(t.nbytes for _, tensors, _, _ in todo for t in tensors), progress, label="verify")
    try:
        for reader, tensors, slabs, values in todo:
            report.files += [f.path for f in reader.files]
            _check_headers(reader, report)
            wrong: dict[str, list[tuple[int, int]]] = {}
            for t, parts in in_order(_jobs(reader, tensors, slabs, values), threads):
                report.pieces += len(parts)
                report.nbytes += sum(n for _, n, _ in parts)
                meter.add(sum(n for _, n, _ in parts))
                wrong.setdefault(t.name, []).extend((at, n) for at, n, same in parts if not same)
            for t in tensors:
                report.damaged += [f"{reader.files[t.file].path}: {line}" for line in damaged(t, slabs[t.name], wrong.get(t.name, []))]
    finally:
        meter.clear()


def _check_headers(reader: Reader, report: Verified) -> None:
    for f in reader.files:
        crc = f.fields.get(HEADER)
        if crc is not None and header_crc(f.head, f.value_at(HEADER)) != crc.value():
            report.damaged.append(f"{f.path}: its header (metadata or table of tensors) was changed after the conversion")


def _jobs(reader: Reader, tensors: list[Tensor], slabs: dict[str, int], values: dict[str, list[int]]) -> Iterator:
    def compare(t: Tensor, parts: list[tuple[int, int, int]]):
        first = parts[0][0]
        data = memoryview(reader.read(t, first, sum(n for _, n, _ in parts)))
        return t, [(at, n, zlib.crc32(data[at - first:at - first + n]) == crc) for at, n, crc in parts]

    for t in tensors:
        parts, size = [], 0
        slab = slabs[t.name]
        for (at, n), crc in zip(chunks(slab, t.nbytes // slab), values[t.name]):
            parts.append((at, n, crc))
            size += n
            if size >= READ_BYTES:
                yield lambda t=t, parts=parts: compare(t, parts)
                parts, size = [], 0
        if parts:
            yield lambda t=t, parts=parts: compare(t, parts)
