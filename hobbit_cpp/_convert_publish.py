"""Final names for a pair. Two renames are not one, so the old sidecar keeps a second name until both are done."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from gguf_tools.errors import GGUFError
from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter

from ._convert_parts import PartsWriter


def _old_name(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.old")


def _keep(path: str) -> str:
    """The file's second name."""
    old = _old_name(path)
    try:
        os.link(path, old, follow_symlinks=False)
    except OSError:  # a file system without hard links: for a moment there is no sidecar
        os.replace(path, old)
    return old


def publish(m: StreamWriter, s: PartsWriter) -> None:
    """The sidecar's files get their names first: a main file never names a missing sidecar. Either both are in place
    afterwards, or an exception is raised and what was there before is there again."""
    with _uninterrupted():
        kept: list[tuple[str, str]] = []
        try:
            for w in s.writers:
                if os.path.lexists(w.path):
                    kept.append((_keep(w.path), w.path))
            try:
                s.publish(sync=False)  # nothing slow between the renames
                m.publish()
            except BaseException:
                _undo(s, kept)
                raise
        finally:
            for old, path in kept:
                with contextlib.suppress(OSError):
                    if os.path.lexists(path):
                        os.unlink(old)


def _undo(s: PartsWriter, kept: list[tuple[str, str]]) -> None:
    before = {path: old for old, path in kept}
    for w in s.writers:
        with contextlib.suppress(OSError):
            if w.path in before:
                os.replace(before[w.path], w.path)
            elif w.published:
                os.unlink(w.path)


def recover(m: StreamWriter, s: PartsWriter) -> None:
    """After a process was killed between the renames: the old sidecar goes back to the old main file that needs it.
    Both writers hold their locks, so that no other process is at it."""
    for w in s.writers:
        old = _old_name(w.path)
        if not os.path.lexists(old):
            continue
        wanted = _pair_id(m.path)
        if wanted and _pair_id(old) == wanted and _pair_id(w.path) != wanted:
            os.replace(old, w.path)
        else:
            os.unlink(old)


def _pair_id(path: str) -> str | None:
    try:
        with Reader(path) as reader:
            return reader.get("hobbit.pair_id", None, str)
    except (GGUFError, OSError):
        return None


@contextlib.contextmanager
def _uninterrupted():
    """Ctrl-C and SIGTERM wait until the block is left. By handlers, which are the process's: a blocked signal is only put off
    for one thread, and libraries have threads of their own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    def late(number, frame):
        pending.append(number)
    old = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    for s, handler in old.items():
        if handler is not None:  # one that is not Python's could not be put back
            signal.signal(s, late)
    try:
        yield
    finally:
        for s, handler in old.items():
            if handler is not None:
                signal.signal(s, handler)
    for number in pending:
        if number == signal.SIGINT and old[number] is signal.default_int_handler:
            raise KeyboardInterrupt("both files were complete")
        signal.raise_signal(number)
