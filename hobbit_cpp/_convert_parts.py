"""A sidecar in several files of limited size, named and marked as llama.cpp's split GGUFs are."""

from __future__ import annotations

import contextlib
import os

from gguf_tools.ggml import TypeInfo
from gguf_tools.writer import StreamWriter

from ._convert_plan import ConvertError, Copies

HEADER_BYTES = 1 << 20  # room left for a part's header
IN_ALL = ("hobbit.format_version", "hobbit.role", "hobbit.pair_id")  # metadata that every part has; part 1 has all


def sidecar_tensors(experts: list[Copies], link: bool) -> list[tuple[str, tuple[int, ...], TypeInfo, int]]:
    """(name, shape, type, bytes) of the sidecar's tensors, in file order: by layer, high copies first."""
    out = []
    for layer in sorted({c.layer for c in experts}):
        for which in ("low",) if link else ("high", "low"):
            out += [(f"{c.tensor.name}.{which}", c.tensor.shape, getattr(c, which), c.nbytes(which)) for c in experts if c.layer == layer]
    return out


def divide(tensors, max_bytes: int | None, alignment: int) -> list[set[str]]:
    """Names of the tensors of each part; no part is larger than max_bytes. Raises ConvertError where one tensor is."""
    if max_bytes is None:
        return [{name for name, *_ in tensors}]
    room, parts, filled = max_bytes - HEADER_BYTES, [set()], 0
    for name, _, _, nbytes in tensors:
        size = -(-nbytes // alignment) * alignment
        if size > room:
            raise ConvertError(f"--split-max-size {max_bytes:,} bytes: {name} alone has {nbytes:,} bytes, and a header takes up to "
                               f"{HEADER_BYTES:,}; a tensor is not divided")
        if filled + size > room:
            parts.append(set())
            filled = 0
        parts[-1].add(name)
        filled += size
    return parts


def part_names(sidecar: str, n: int) -> list[str]:
    """NAME.experts.gguf, or NAME.experts-00001-of-0000N.gguf and so on."""
    stem = sidecar.removesuffix(".gguf")
    return [sidecar] if n == 1 else [f"{stem}-{i + 1:05}-of-{n:05}.gguf" for i in range(n)]


class PartsWriter:
    """StreamWriter's interface over several files."""

    def __init__(self, paths: list[str], parts: list[set[str]], arch: str, alignment: int, overwrite: bool):
        self.path = paths[0]
        self.writers = [StreamWriter(path, arch, alignment, overwrite) for path in paths]
        self._of = {name: w for w, names in zip(self.writers, parts) for name in names}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "PartsWriter":
        with contextlib.ExitStack() as stack:
            for i, w in enumerate(self.writers):
                stack.enter_context(w)
                if len(self.writers) > 1:
                    w.add("split.no", i, "u16")
                    w.add("split.count", len(self.writers), "u16")
                    w.add("split.tensors.count", len(self._of), "i32")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> bool | None:
        return self._stack.__exit__(*error)

    def add(self, key: str, value, vtype: str | None = None) -> None:
        for w in self.writers if key in IN_ALL else self.writers[:1]:
            w.add(key, value, vtype)

    def reserve(self, key: str, n: int | None = None) -> None:
        self.writers[0].reserve(key, n)

    def fill(self, key: str, value) -> None:
        self.writers[0].fill(key, value)

    def add_tensor(self, name: str, shape, ggml_type) -> None:
        self._of[name].add_tensor(name, shape, ggml_type)

    def begin_data(self) -> None:
        for w in self.writers:
            w.begin_data()

    @property
    def data_size(self) -> int:
        return sum(w.data_size for w in self.writers)

    def write(self, name: str, offset: int, data) -> None:
        self._of[name].write(name, offset, data)

    def seal(self) -> None:
        for w in self.writers:
            w.seal()

    def publish(self, sync: bool = True) -> None:
        """The first part last: what is complete has it."""
        for w in reversed(self.writers):
            w.publish(sync)

    def size(self) -> int:
        """Bytes of all files."""
        return sum(os.path.getsize(w.path) for w in self.writers)
