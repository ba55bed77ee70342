"""Ends a forward pass before its time: a signal (Ctrl-C), cancel() and close() of another thread, the user's own function."""

from __future__ import annotations

from . import bindings as b
from .errors import Cancelled


class Abort:
    """What the library asks while it computes, at most every 50 ms and before hooks. function may be set at any time."""

    function = None

    def __init__(self, turns):
        self._turns = turns
        self._error = None
        asked = self._asked()
        next(asked)
        self.c = b.hobbit_abort_fn(asked.send)

    def _asked(self):
        """A generator: the handler of a signal runs as soon as Python code does, and what it raises must be caught here. In a
        function that is before any `try`, and ctypes would print the exception and go on."""
        end = 0
        while True:
            try:
                yield end
                if self._error is None:
                    self._turns.check()
                    if self.function is not None and self.function():
                        raise Cancelled("the abort function ended the call")
            except GeneratorExit:
                return
            except BaseException as error:
                self._error = error
            end = int(self._error is not None)

    def take_error(self):
        error, self._error = self._error, None
        return error
