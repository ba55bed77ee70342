"""The work itself: reads the source in blocks, quantizes on all cores, writes both files.

A block is a run of rows of one expert, about BLOCK_WEIGHTS weights. Memory in use is about 20 bytes
per weight of a block and thread, whatever the model's size.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import math
import signal
import threading
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator

import numpy as np

from gguf_tools import ggml
from gguf_tools.checksums import Checksums
from gguf_tools.reader import Reader, Tensor
from gguf_tools.writer import StreamWriter

from ._convert_imatrix import Imatrix
from ._convert_parts import PartsWriter
from ._convert_plan import ConvertError, Copies
from ._progress import Progress

BLOCK_WEIGHTS = 1 << 19
COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class Errors:
    """Sums of squares over a block or, added up, over a tensor."""
    source: float = 0.0      # of the source's weights
    high: float = 0.0        # of the high copy's weights
    high_error: float = 0.0  # of high - source
    low_error: float = 0.0   # of low - high


def write_pair(reader: Reader, experts: list[Copies], main: StreamWriter, sidecar: PartsWriter, *, link: bool,
               imatrix: Imatrix | None, threads: int, progress: bool,
               warn: Callable[[str], None], checksums: Checksums | None = None) -> dict[str, Errors]:
    """Write the data of both files; both writers are past begin_data(). Returns {tensor name: Errors}.

    checksums is told every byte of every tensor that it knows.

    The first error of any thread stops all of them and is raised: ConvertError, GGUFError, OSError.
    """
    names = {c.tensor.name for c in experts}
    rest = [t for t in reader.tensors.values() if t.name not in names]
    meter = Progress(sum(c.tensor.nbytes for c in experts), progress)  # copying the rest takes no time worth showing
    missing: dict[str, list[str]] = {}  # of the layer that is being done: "1 of 8 experts" -> projections
    sums: dict[str, list[Errors]] = {c.tensor.name: [] for c in experts}

    def jobs() -> Iterator[Callable[[], tuple]]:
        for t in rest:
            for offset in range(0, t.nbytes, COPY_BYTES):
                yield lambda t=t, offset=offset: _copy(reader, t, offset, main)
        for i, c in enumerate(experts):
            weights = None
            if imatrix is not None:
                weights, empty = imatrix.weights(c)
                if empty:
                    missing.setdefault(f"{len(empty)} of {c.n_expert} experts", []).append(c.projection)
                if missing and (i + 1 == len(experts) or experts[i + 1].layer != c.layer):
                    meter.clear()
                    what = ", ".join(f"{n} ({', '.join(projections)})" for n, projections in missing.items())
                    warn(f"layer {c.layer}: the importance matrix has no data for {what}; they get weight 1")
                    missing.clear()
            step = max(1, BLOCK_WEIGHTS // c.n_in)
            for expert in range(c.n_expert):
                for row in range(0, c.n_out, step):
                    n = min(step, c.n_out - row)
                    w = None if weights is None else weights[expert]
                    yield lambda c=c, e=expert, r=row, n=n, w=w: _convert(reader, c, e, r, n, w, sidecar, link)

    try:
        # closing: no thread may be left when this returns, by an exception too
        with _late_interrupts() as check, contextlib.closing(in_order(jobs(), threads)) as results:
            for name, nbytes, errors, written in results:
                check()
                for tensor, data in written if checksums else ():
                    checksums.add(tensor, data)
                if errors:
                    sums[name].append(errors)
                    meter.add(nbytes)
    finally:
        meter.clear()
    return {name: Errors(*(math.fsum(v) for v in zip(*((e.source, e.high, e.high_error, e.low_error) for e in blocks))))
            for name, blocks in sums.items()}


@contextlib.contextmanager
def _late_interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises where the function given is called, and when the block is left. Raised anywhere, as Python does it, it
    can hit the thread pool between taking a lock and giving it back, and then no thread ever ends."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed = threading.Event()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


def in_order(jobs: Iterable[Callable[[], tuple]], threads: int) -> Iterator[tuple]:
    """Results of the jobs, in order; at most 2 * threads of them are under way or waiting."""
    pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="convert")
    waiting: collections.deque = collections.deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) >= 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # the files may be closed only after the last thread let go of them
        pool.shutdown(wait=True, cancel_futures=True)


def _copy(reader: Reader, t: Tensor, offset: int, out: StreamWriter) -> tuple[str, int, None, list]:
    n = min(COPY_BYTES, t.nbytes - offset)
    data = reader.read(t, offset, n)
    out.write(t.name, offset, data)
    return t.name, n, None, [(t.name, data)]


def _convert(reader: Reader, c: Copies, expert: int, row: int, n_rows: int, weights: np.ndarray | None,
             out: PartsWriter, link: bool) -> tuple[str, int, Errors, list]:
    """Make both copies of rows [row, row + n_rows) of one expert. Last in the result: (name, bytes) of each, for the checksums."""
    t, first = c.tensor, expert * c.n_out + row
    raw = reader.read(t, first * t.row_bytes, n_rows * t.row_bytes)
    try:
        x = ggml.dequantize(t.type, raw, c.n_in)
        if c.keeps_high:
            high, packed = x, raw
            if not link:
                out.write(t.name + ".high", first * t.row_bytes, raw)
        else:
            high, packed = _quantize_to(c.high, x, weights, out, t.name + ".high", first)
        low, packed_low = _quantize_to(c.low, x, weights, out, t.name + ".low", first)
    except ggml.GGMLError as e:
        raise ConvertError(f"{t.name}, expert {expert}: {e}") from None
    with np.errstate(over="ignore", invalid="ignore"):
        errors = Errors(_squares(x), 0.0 if high is x else _squares(high), 0.0 if high is x else _squares(high - x),
                        _squares(low - high))
    if high is x:
        errors = Errors(errors.source, errors.source, 0.0, errors.low_error)
    if not math.isfinite(errors.high_error + errors.low_error):
        raise ConvertError(f"{t.name}, expert {expert}: the weights do not fit {c.high.name} and {c.low.name} "
                           "(too large)")
    return t.name, len(raw), errors, [(t.name + ".high", packed), (t.name + ".low", packed_low)]


def _quantize_to(kind: ggml.TypeInfo, x: np.ndarray, weights, out: PartsWriter, name: str,
                 first: int) -> tuple[np.ndarray, np.ndarray]:
    """Write rows as `kind`, the first of them being row `first` of the tensor; returns (what they read back as, their bytes)."""
    packed = ggml.quantize(kind, x, weights)
    out.write(name, first * packed.shape[1], packed)
    return ggml.dequantize(kind, packed, x.shape[1]), packed


def _squares(x: np.ndarray) -> float:
    # float32 within a row, float64 across rows
    return float(np.einsum("ij,ij->i", x, x).sum(dtype=np.float64))
