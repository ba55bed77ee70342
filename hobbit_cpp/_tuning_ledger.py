"""Measurements that were finished, so that a run that was stopped or is changed a little does not repeat them.

One JSON line each, appended when it is complete. A line is found again where everything that decides its numbers is
the same: model, tokens, setting, memory, arguments and libraries.
"""

from __future__ import annotations

import hashlib
import json
import os

from . import _libs


class Ledger:
    """The lines of a file, by the hash of what they depend on. A file that cannot be read or written is done without."""

    def __init__(self, path: str):
        self.path, self._found = path, {}
        try:
            with open(path, encoding="utf-8") as f:
                for line in f:
                    self._take(line)
        except (OSError, UnicodeDecodeError):
            pass

    def _take(self, line: str) -> None:
        try:
            entry = json.loads(line)
            self._found[entry["key"]] = entry["value"]
        except (ValueError, TypeError, KeyError):  # the last line of a run that was killed
            pass

    @staticmethod
    def key(**what) -> str:
        return hashlib.sha256(json.dumps({**what, "libraries": _libraries()}, sort_keys=True).encode()).hexdigest()

    def get(self, key: str):
        return self._found.get(key)

    def put(self, key: str, value, **about) -> None:
        """about: for people who read the file."""
        self._found[key] = value
        try:
            with open(self.path, "ab") as f:
                at = f.tell()
                f.write((b"\n" if at and not self._ends_line() else b"") + json.dumps({**about, "key": key, "value": value}).encode() + b"\n")
        except OSError:
            pass

    def _ends_line(self) -> bool:
        with open(self.path, "rb") as f:
            f.seek(-1, os.SEEK_END)
            return f.read(1) == b"\n"


def _libraries() -> list:
    folder = _libs.lib_dir()
    return [[e.name, s.st_size, s.st_mtime_ns] for e in sorted(os.scandir(folder), key=lambda e: e.name) for s in (e.stat(),)]
