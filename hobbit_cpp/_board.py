"""A small board as Linux shows it: what hobbit doctor --board reports, and what on it costs speed.

Everything is read from files below a root folder ("/"), so that a test can show another board; nvpmodel is asked where it is
installed. What a board does not tell is None.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess

from .memory import format_bytes, read_memory

ORIN = "tegra234"  # the chip of all Jetson Orin modules, in the device tree


def read(root: str = "/") -> dict:
    return {
        "model": _text(root, "proc/device-tree/model"),
        "chip": _chip(root),
        "l4t": _l4t(root),
        "kernel": platform.release(),
        "cpus": _text(root, "sys/devices/system/cpu/online"),
        "cpu_khz": _number(root, "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"),
        "governor": _text(root, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "gpu_hz": _gpu_clock(root),
        "power_mode": _power_mode() if root == "/" else None,
        "memory": read_memory(root).total,
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "large_pages": _chosen(_text(root, "sys/kernel/mm/transparent_hugepage/enabled")),
        "swap": _swap(root),
        "disks": _disks(root),
        "celsius": _temperatures(root),
    }


def remarks(b: dict) -> list[str]:
    """What to change before measuring or serving."""
    found = []
    zram = [s for s in b["swap"] if "zram" in s["name"]]
    if zram:
        found.append(f"{format_bytes(sum(s['bytes'] for s in zram))} of swap are compressed memory (zram): it takes from what experts could have; sudo systemctl disable nvzramconfig")
    if b["power_mode"] and "MAXN" not in b["power_mode"].upper():
        found.append(f"the power mode is {b['power_mode']}: grep POWER_MODEL /etc/nvpmodel.conf lists the board's, sudo nvpmodel -m ID takes one, sudo jetson_clocks holds it")
    if b["governor"] and b["governor"] not in ("performance", "schedutil"):
        found.append(f"the CPU's governor is {b['governor']}: sudo jetson_clocks sets clocks to their maximum")
    if b["model"] and b["disks"] and not any(d["name"].startswith("nvme") for d in b["disks"]):
        found.append("there is no NVMe disk: experts from eMMC or an SD card come at a tenth of its speed")
    hot = [f"{name} {t:.0f}" for name, t in b["celsius"].items() if t >= 85]
    if hot:
        found.append(f"it is hot ({', '.join(hot)} degrees): clocks will fall")
    return found


def lines(b: dict):
    yield f"board       {b['model'] or 'a computer without a device tree'}" + (f", {b['chip']}" if b["chip"] else "") + (f", L4T {b['l4t']}" if b["l4t"] else "")
    clocks = ", ".join(x for x in (f"CPU {b['cpu_khz'] / 1e6:.2f} GHz" if b["cpu_khz"] else "", f"GPU {b['gpu_hz'] / 1e9:.2f} GHz" if b["gpu_hz"] else "",
                                   f"governor {b['governor']}" if b["governor"] else "", f"power mode {b['power_mode']}" if b["power_mode"] else "") if x)
    yield f"clocks      CPUs {b['cpus']} online" + (f"; {clocks}" if clocks else "")
    yield f"pages       {b['page_bytes']} bytes, large ones {b['large_pages'] or 'unknown'}"
    yield "swap        " + (", ".join(f"{s['name']} {format_bytes(s['bytes'])}" for s in b["swap"]) or "none")
    yield "disks       " + (", ".join(f"{d['name']} {format_bytes(d['bytes'])}" + (f" ({d['model']})" if d["model"] else "") for d in b["disks"]) or "none found")
    for remark in remarks(b):
        yield f"remark      {remark}"


def _text(root: str, path: str) -> str | None:
    try:
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as f:
            return f.read().strip("\0\n ") or None
    except OSError:
        return None


def _number(root: str, path: str) -> int | None:
    text = _text(root, path)
    return int(text) if text and text.isdigit() else None


def _names(root: str, path: str) -> list[str]:
    try:
        return sorted(os.listdir(os.path.join(root, path)))
    except OSError:
        return []


def _chip(root: str) -> str | None:
    """The last of the names that the device tree gives, the most general one: "nvidia,tegra234" -> tegra234."""
    names = _text(root, "proc/device-tree/compatible")
    return names.split("\0")[-1].split(",")[-1] if names else None


def _l4t(root: str) -> str | None:
    """ "# R36 (release), REVISION: 4.3, ..." -> 36.4.3; JetPack 6 is 36."""
    found = re.search(r"R(\d+).*?REVISION:\s*([\d.]+)", _text(root, "etc/nv_tegra_release") or "")
    return f"{found[1]}.{found[2]}" if found else None


def _gpu_clock(root: str) -> int | None:
    for name in _names(root, "sys/class/devfreq"):
        if "gpu" in name or name.endswith((".gv11b", ".ga10b")):
            return _number(root, f"sys/class/devfreq/{name}/max_freq")
    return None


def _power_mode() -> str | None:
    if not shutil.which("nvpmodel"):
        return None
    try:
        out = subprocess.run(["nvpmodel", "-q"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"NV Power Mode:\s*(\S+)", out)
    return found[1] if found else None


def _chosen(text: str | None) -> str | None:
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


def _swap(root: str) -> list[dict]:
    rows = [line.split() for line in (_text(root, "proc/swaps") or "").splitlines()[1:]]
    return [{"name": r[0], "bytes": int(r[2]) * 1024} for r in rows if len(r) >= 3 and r[2].isdigit()]


def _disks(root: str) -> list[dict]:
    found = []
    for name in _names(root, "sys/block"):
        sectors = _number(root, f"sys/block/{name}/size")
        if sectors and not name.startswith(("loop", "ram", "zram", "dm-", "md", "sr")):
            found.append({"name": name, "bytes": sectors * 512, "model": _text(root, f"sys/block/{name}/device/model")})
    return found


def _temperatures(root: str) -> dict[str, float]:
    found = {}
    for zone in _names(root, "sys/class/thermal"):
        name, text = _text(root, f"sys/class/thermal/{zone}/type"), _text(root, f"sys/class/thermal/{zone}/temp")
        if zone.startswith("thermal_zone") and name and re.fullmatch(r"-?\d+", text or ""):
            found[name] = int(text) / 1000
    return found
