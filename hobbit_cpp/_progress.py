"""A progress line for commands that take long."""

from __future__ import annotations

import sys
import time


class Progress:
    """A line on stderr with share, rate and time left, while that is a terminal; otherwise nothing.

    total is in units of which `scale` make one of `unit`. label stands before it all.
    """

    def __init__(self, total: int, enabled: bool, unit: str = "MiB/s", scale: int = 2**20, label: str = ""):
        self.total, self.done = max(total, 1), 0
        self.unit, self.scale, self.label = unit, scale, label and f"{label}: "
        self.enabled = enabled and sys.stderr.isatty()
        self.start = self.last = time.monotonic()

    def add(self, n: int) -> None:
        self.done += n
        now = time.monotonic()
        if self.enabled and now - self.last > 0.2:
            self.last = now
            rate = self.done / (now - self.start)
            left = (self.total - self.done) / rate
            shown = rate / self.scale
            print(f"\r{self.label}{100 * self.done / self.total:5.1f} %  {shown:,.{0 if shown >= 10 else 2}f} {self.unit}  {_clock(left)} left ",
                  end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.enabled:
            print("\r" + " " * (50 + len(self.label)) + "\r", end="", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    s = round(seconds)
    return f"{s // 3600}:{s // 60 % 60:02}:{s % 60:02}" if s >= 3600 else f"{s // 60}:{s % 60:02}"
