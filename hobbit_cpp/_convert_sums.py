"""The checksums of a pair: room for them in both headers, and their values once the data is written."""

from __future__ import annotations

from gguf_tools.checksums import CHUNK, CHUNK_KEY, HEADER, TENSORS, VALUES, Checksums, count, header_crc
from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter

from ._convert_parts import PartsWriter
from ._convert_plan import Copies


class PairChecksums:
    """sums is fed by write_pair(). nbytes: what all of it adds to the headers, at most."""

    def __init__(self, reader: Reader, experts: list[Copies]):
        taken = {c.tensor.name for c in experts}
        self.main = {t.name: (t.nbytes, 1) for t in reader.tensors.values() if t.name not in taken}
        self.sidecar = {f"{c.tensor.name}.{which}": (c.nbytes(which) // c.n_expert, c.n_expert) for c in experts for which in ("high", "low")}
        self.sums = Checksums({**self.main, **self.sidecar})
        self.nbytes = sum(8 + len(name) + 4 * count(*slab) for name, slab in self.sums.slabs.items()) + 1024

    def reserve(self, m: StreamWriter, s: PartsWriter) -> None:
        for out, slabs in ((m, self.main), (s, self.sidecar)):
            out.add(CHUNK_KEY, CHUNK, "u32")
            out.add(TENSORS, list(slabs), "str")
            out.reserve(VALUES, sum(count(*slab) for slab in slabs.values()))
        for out in (m, *s.writers):
            out.reserve(HEADER)

    def fill(self, m: StreamWriter, s: PartsWriter) -> None:
        for out, slabs in ((m, self.main), (s, self.sidecar)):
            out.fill(VALUES, [crc for name in slabs for crc in self.sums.values[name]])
        for out in (m, *s.writers):
            out.fill(HEADER, header_crc(out.header(), out.reserved_at(HEADER)))
