"""How fast the storage reads experts: random pieces of a file, past the page cache where the file system can."""

from __future__ import annotations

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

from .memory import MIB

ALIGN = 4096
LARGEST = 2 * MIB  # the loader reads larger experts in such pieces


def read_speed(path, piece: int, threads: int = 4, seconds: float = 0.5) -> float:
    """Bytes/s with `threads` reads of `piece` bytes in flight, for about so many seconds. OSError."""
    piece = max(ALIGN, min(piece, LARGEST) // ALIGN * ALIGN)
    size = os.path.getsize(path)
    piece = min(piece, max(ALIGN, size // ALIGN * ALIGN))
    fd = _open(path)
    places = max(1, (size - piece) // ALIGN + 1)
    end = time.perf_counter() + seconds

    def work(seed: int) -> int:
        rng, done = random.Random(seed), 0
        with mmap.mmap(-1, piece) as buffer:  # page-aligned, as direct reads want it
            while done == 0 or time.perf_counter() < end:
                done += os.preadv(fd, [buffer], rng.randrange(places) * ALIGN)
        return done

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(work, range(threads)))
        return done / (time.perf_counter() - start)
    finally:
        os.close(fd)


def storage_speed(models, setting, trace, threads: int) -> float:
    """read_speed() of a setting's sidecar in pieces of its high copies; trace: a recorded routing, for the layers."""
    sidecar = models.pair(setting.high, setting.low).removesuffix(".gguf") + ".experts.gguf"
    piece = int(models.layers(trace.layers, setting.high, setting.low)["high_bytes"].max())
    return read_speed(sidecar, piece, threads)


def _open(path) -> int:
    if hasattr(os, "O_DIRECT"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, ALIGN) as buffer:
                os.preadv(fd, [buffer], 0)
            return fd
        except OSError:
            os.close(fd)
    return os.open(path, os.O_RDONLY)
