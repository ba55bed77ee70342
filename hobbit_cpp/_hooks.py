"""Python functions as the engine's hooks.

Called on the thread that computes, within llama_decode. An exception cannot pass through C: it is kept,
the hooks do nothing more in this forward pass, and take_error() hands it to whoever called decode.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from . import bindings as b

PRECISIONS = ("skip", "low", "high")  # the index is enum hobbit_precision
EVENTS = ("hit", "load", "evict", "skip", "prefetch", "cpu")  # enum hobbit_event_kind


class _Memory:
    """The engine's own memory, for numpy.asarray(). np.ctypeslib.as_array() has ctypes make types for each shape, and it keeps them for good."""

    def __init__(self, pointer, shape):
        self.__array_interface__ = {"version": 3, "data": (ctypes.addressof(pointer.contents), False), "shape": shape, "typestr": np.dtype(pointer._type_).str}


def _array(pointer, n_tokens: int, n_used: int) -> np.ndarray:
    return np.asarray(_Memory(pointer, (n_tokens, n_used)))


class Hooks:
    """struct hobbit_hooks for up to three Python functions; alive as long as the engine may call it."""

    def __init__(self, select=None, prefetch=None, event=None):
        for name, f in (("select", select), ("prefetch", prefetch), ("event", event)):
            if f is not None and not callable(f):
                raise TypeError(f"{name} must be a function or None, not {f!r}")
        self.error = None
        self.thread = None  # where one of them runs
        self.running = None  # its name
        self.c = b.hobbit_hooks()
        if select:
            self.c.select = b.hobbit_select_fn(self._guard("select", lambda *a: self._select(select, *a)))
        if prefetch:
            self.c.prefetch = b.hobbit_prefetch_fn(self._guard("prefetch", lambda *a: self._prefetch(prefetch, *a)))
        if event:
            self.c.event = b.hobbit_event_fn(self._guard("event", lambda *a: self._event(event, *a)))

    def _guard(self, name, f):
        def call(*args):
            if self.error is None:
                self.thread, self.running = threading.get_ident(), name
                try:
                    f(*args)
                except BaseException as error:  # KeyboardInterrupt, too
                    self.error = error
                finally:
                    self.thread = self.running = None
        return call

    def take_error(self):
        error, self.error = self.error, None
        return error

    @staticmethod
    def _select(f, _user, layer, n_tokens, n_used, experts, weights, wanted):
        # copies: what the function keeps must not change under its hands
        out = _array(wanted, n_tokens, n_used)
        mine = out.copy()
        result = f(layer, _array(experts, n_tokens, n_used).copy(), _array(weights, n_tokens, n_used).copy(), mine)
        mine = mine if result is None else np.asarray(result)
        if mine.shape != out.shape or not np.issubdtype(mine.dtype, np.integer) or ((mine < 0) | (mine > 2)).any():
            raise ValueError(f"the select hook must leave or return integers 0 (skip), 1 (low) or 2 (high) of shape {out.shape}")
        out[...] = mine

    @staticmethod
    def _prefetch(f, _user, _engine, layer, n_tokens, n_used, experts, weights):
        f(layer, _array(experts, n_tokens, n_used).copy(), _array(weights, n_tokens, n_used).copy())

    @staticmethod
    def _event(f, _user, kind, layer, expert, precision, slot):
        f(EVENTS[kind], layer, expert, PRECISIONS[precision], slot)
