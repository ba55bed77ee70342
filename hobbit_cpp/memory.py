"""How much memory there is, and how much of it expert slots may take.

Everything is computed from files below a root folder ("/"), so that a test can show another machine.
All sizes are in bytes. The rule of the automatic budget, where the machine and each control group around this process are a level:

    free(level)     of the machine MemAvailable, of a control group limit - (use - page cache)
    reserve(level)  10 % of the level's memory: of the machine at least 512 MiB, of a control group (what the rest of the system needs is
                    outside of it) at least 128 MiB; at most a quarter
    budget          the least free - reserve of all levels, less what loading the model will take besides (see model_memory.py)

Swap counts for nothing: experts in swap are slower than experts in their file. On a box whose GPU shares
the RAM (integrated), this is the rule as well: MemAvailable is what both have together.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

MIB = 2**20
GIB = 2**30

_UNITS = {"": 1, "B": 1}
for _i, _letter in enumerate("KMGT", 1):
    _UNITS[_letter] = _UNITS[_letter + "IB"] = 1024**_i
    _UNITS[_letter + "B"] = 1000**_i


# --- text ---

def parse_bytes(text: str) -> int:
    """Bytes from text like "8GiB", "8 GB", "512MiB", "1.5G" or "4096".

    KiB, MiB, GiB, TiB and the bare letters K, M, G, T are powers of 1024; KB, MB, GB, TB are powers of
    1000. Case and blanks do not matter. ValueError for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if unit is None:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 8GiB, 8GB, 512MiB or 1.5G")
    try:
        return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
    except (OverflowError, ValueError):  # beyond what a float has, or of more digits than Python reads
        raise ValueError(f"{text[:20]}... is not a size") from None


def format_bytes(n: float) -> str:
    """For people: "3.2 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def format_budget(cache_bytes) -> str:
    """A cache_bytes argument for people: "25%" as it was given, bytes with a unit."""
    return format_bytes(cache_bytes) if isinstance(cache_bytes, int) else str(cache_bytes)


# --- readings ---

@dataclass(frozen=True)
class Group:
    """One level of a control group: its limit (None: none), its use, and how much of that is page cache."""
    path: str
    limit: int | None
    used: int
    cache: int


@dataclass(frozen=True)
class Readings:
    total: int               # MemTotal
    available: int           # MemAvailable: free, or page cache that can be dropped
    swap_free: int
    groups: tuple[Group, ...]  # this process's group first, then its parents as far as they can be seen


def read_memory(root: str = "/") -> Readings:
    """The machine as it is now. OSError where there is no /proc/meminfo."""
    info = {m[1]: int(m[2]) * 1024 for m in re.finditer(r"^(\w+):\s+(\d+) kB", _read(root, "proc/meminfo"), re.M)}
    available = info.get("MemAvailable", info.get("MemFree", 0) + info.get("Cached", 0))  # Linux before 3.14 has none
    return Readings(info["MemTotal"], available, info.get("SwapFree", 0), tuple(_groups(root)))


def _read(root: str, path: str) -> str:
    with open(os.path.join(root, path.lstrip("/")), encoding="utf-8", errors="replace") as f:
        return f.read()


def _number(root: str, path: str) -> int | None:
    """Content of a one-number file; None: no such file, or "max"."""
    try:
        text = _read(root, path).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _groups(root: str):
    """Every level that limits this process, in cgroup v1 (controller memory) and v2."""
    try:
        own = [line.split(":", 2) for line in _read(root, "proc/self/cgroup").splitlines()]
        mounts = [line.split() for line in _read(root, "proc/self/mountinfo").splitlines()]
    except OSError:
        return
    for _, controllers, path in (fields for fields in own if len(fields) == 3):
        for fields in mounts:
            # ID PARENT DEVICE ROOT MOUNTPOINT OPTIONS ... - TYPE SOURCE SUPEROPTIONS
            kind = fields[fields.index("-") + 1:] if "-" in fields else [""]
            v2 = kind[0] == "cgroup2" and controllers == ""
            v1 = kind[0] == "cgroup" and "memory" in controllers.split(",") and "memory" in kind[-1].split(",")
            if v1 or v2:
                for folder in _levels(_unescape(fields[4]), _unescape(fields[3]), path):
                    yield from _group(root, folder, v2)
                break


def _unescape(text: str) -> str:
    return re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), text)


def _levels(mount: str, mount_root: str, path: str) -> list[str]:
    """Folders from the process's group up to the mount point. A container may see its own subtree only."""
    inside = os.path.relpath(path, mount_root) if path.startswith(mount_root) else "."
    parts = [] if inside == "." or inside.startswith("..") else inside.split("/")
    return ["/".join([mount.rstrip("/"), *parts[:n]]) for n in range(len(parts), -1, -1)]


_UNLIMITED = 1 << 60  # v1 says "no limit" with a number near 2**63


def _group(root: str, folder: str, v2: bool):
    names = ("memory.current", ("memory.max", "memory.high")) if v2 else ("memory.usage_in_bytes", ("memory.limit_in_bytes",))
    used = _number(root, f"{folder}/{names[0]}")
    if used is None:
        return
    try:
        stat = dict(line.split()[:2] for line in _read(root, f"{folder}/memory.stat").splitlines() if line.strip())
    except OSError:
        stat = {}
    limits = [_number(root, f"{folder}/{name}") for name in names[1]]
    prefix = "" if v2 else "total_"
    if not v2:  # covers parents that cannot be seen from here
        limits.append(int(stat.get("hierarchical_memory_limit", _UNLIMITED)))
    limits = [x for x in limits if x is not None and x < _UNLIMITED]
    cache = sum(int(stat.get(prefix + name, 0)) for name in ("active_file", "inactive_file"))
    yield Group(folder, min(limits) if limits else None, used, min(cache, used))


# --- the rule ---

def _free(r: Readings) -> list[tuple[int, int]]:
    """Of the machine and of each limited group: what is free, page cache included, and what is left to others, to the page cache and to what nobody foresaw."""
    groups = [(g.limit - (g.used - g.cache), min(max(128 * MIB, g.limit // 10), g.limit // 4)) for g in r.groups if g.limit is not None]
    return [(r.available, min(max(512 * MIB, r.total // 10), r.total // 4)), *groups]


def available(r: Readings) -> int:
    """Bytes that could be taken now without anything being killed or swapped; page cache counts as free."""
    return max(0, min(free for free, _ in _free(r)))


def limit(r: Readings) -> int:
    """The whole memory, or the smallest limit on it."""
    return min([r.total, *(g.limit for g in r.groups if g.limit is not None)])


def reserve(r: Readings) -> int:
    """Of what is available, the part that the automatic budget leaves alone."""
    return available(r) - _room(r)


def _room(r: Readings) -> int:
    return max(0, min(free - kept for free, kept in _free(r)))


def auto_budget(r: Readings, need: int, everything: int) -> int:
    """Bytes for expert slots, 0 if there is no room.

    need        what loading the model will take besides: residents, KV cache, buffers
    everything  enough for all experts at high precision; more is never given
    """
    return max(0, min(_room(r) - need, everything))


# --- address space ---

THREAD_BYTES = 72 * MIB  # a thread's stack, and what glibc sets aside for its allocations


def address_space_left(root: str = "/") -> int | None:
    """Bytes that this process may still map; None without a limit (RLIMIT_AS), or where that is not known."""
    try:
        import resource
        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        match = re.search(r"^VmSize:\s+(\d+) kB", _read(root, "proc/self/status"), re.M)
    except (ImportError, AttributeError, OSError):
        return None
    return None if soft == resource.RLIM_INFINITY or not match else max(0, soft - int(match[1]) * 1024)


# --- peaks, for reports ---

def peak_rss(root: str = "/") -> int:
    """Most memory that this process had resident at once, 0 if unknown."""
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB", _read(root, "proc/self/status"), re.M)
    except OSError:
        match = None
    if match:
        return int(match[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if os.uname().sysname == "Darwin" else most * 1024


def group_peak(root: str = "/") -> int | None:
    """Most memory that this process's control group had in use at once, page cache included; None if unknown."""
    for g in read_memory(root).groups[:1]:
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            n = _number(root, f"{g.path}/{name}")
            if n is not None:
                return n
    return None
