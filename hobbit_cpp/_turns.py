"""Order among the threads that use one model: one computes, any number look, and the end waits for all of them."""

from __future__ import annotations

import contextlib
import threading

from .errors import HobbitError


class Turns:
    """Entered by every method of Llama that computes (run), and by those that read or set something of the engine (look).

    look() waits for nothing but an end(): hooks look while the engine's own lock is held, but none runs then.
    """

    def __init__(self):
        self._running = threading.RLock()
        self._depth = 0        # of run(), changed by the thread that has _running alone
        self._stop = None      # the exception that is to end what runs
        self._looking = {}     # thread: how many look() it is in
        self._ending = False
        self._change = threading.Condition()

    @contextlib.contextmanager
    def run(self):
        """Raises HobbitError where another thread is in here. The same thread may enter again."""
        if not self._running.acquire(blocking=False):
            raise HobbitError("another thread is running this Llama, which does one thing at a time: take turns with a lock, or load a second one")
        try:
            if self._depth == 0:
                self._stop = None
            self._depth += 1
            yield
        finally:
            self._depth -= 1
            self._running.release()

    def stop(self, error: BaseException) -> None:
        """Whatever runs now ends with this error at its next check()."""
        if self._depth:
            self._stop = error

    def check(self) -> None:
        if self._stop is not None:
            raise self._stop

    @contextlib.contextmanager
    def look(self):
        """The same thread may enter again."""
        me = threading.get_ident()
        with self._change:
            if me not in self._looking:
                self._change.wait_for(lambda: not self._ending)
            self._looking[me] = self._looking.get(me, 0) + 1
        try:
            yield
        finally:
            with self._change:
                self._looking[me] -= 1
                if not self._looking[me]:
                    del self._looking[me]
                    self._change.notify_all()

    @contextlib.contextmanager
    def end(self):
        """Waits until nobody runs and nobody looks, and lets nobody in meanwhile."""
        with self._running, self._change:
            self._ending = True
            try:
                self._change.wait_for(lambda: not self._looking)
                yield
            finally:
                self._ending = False
                self._change.notify_all()
