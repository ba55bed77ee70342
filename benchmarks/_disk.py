"""How fast a file can be read past the page cache: the floor under everything that waits for storage."""

import mmap
import os
import threading
import time

SETTINGS = [(threads, kib) for threads in (2, 4, 8) for kib in (1024, 4096)]


def read_speed(path, threads, chunk, start, size):
    """Bytes per second of `threads` threads that read [start, start + size) of the file in chunks, O_DIRECT."""
    lock, at, failures = threading.Lock(), [start], []

    def work():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            buffer = mmap.mmap(-1, chunk)  # page-aligned
            try:
                while True:
                    with lock:
                        offset = at[0]
                        at[0] += chunk
                    if offset + chunk > start + size:
                        return
                    os.preadv(fd, [buffer], offset)
            finally:
                os.close(fd)
        except OSError as e:
            failures.append(e)

    begin = time.monotonic()
    pool = [threading.Thread(target=work) for _ in range(threads)]
    for t in pool:
        t.start()
    for t in pool:
        t.join()
    if failures:
        raise failures[0]
    return size // chunk * chunk / (time.monotonic() - begin)


def measure(path, sample=1 << 30):
    """Speeds of all SETTINGS, {"threads x KiB": bytes per second}; each reads its own region of the file."""
    total = os.path.getsize(path)
    region = min(sample, total // len(SETTINGS)) >> 22 << 22  # whole chunks of every setting
    if not region:
        region = total >> 20 << 20
    out = {}
    for i, (threads, kib) in enumerate(SETTINGS):
        start = (total - region) * i // len(SETTINGS) >> 12 << 12
        if region >= kib << 10:
            out[f"{threads} x {kib} KiB"] = read_speed(path, threads, kib << 10, start, region)
    return out
