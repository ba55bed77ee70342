"""Parts of Llama: its context, what stands in for a closed one, and the record of a generation."""

from __future__ import annotations

import os
import time
import weakref

from . import bindings as b  # before llama_cpp: it makes llama_cpp use our libraries

import llama_cpp
from llama_cpp import _internals as internals

from . import _log, stats
from ._turns import Turns
from .errors import HobbitError


class Context(internals.LlamaContext):
    """The context of a model with offloaded experts: says why a forward pass failed or was ended."""

    engine = None
    hooks = None
    abort = None

    def decode(self, batch):
        self._run("llama_decode", batch)

    def encode(self, batch):
        self._run("llama_encode", batch)

    def _run(self, name, batch):
        with _log.errors(show=self.verbose) as lines:
            code = getattr(llama_cpp, name)(self.ctx, batch.batch)
        errors = [source.take_error() for source in (self.hooks, self.abort) if source]
        for error in errors:
            if error is not None:
                raise error
        if code != 0:
            reason = b.hobbit_decode_error(self.engine).decode("utf-8", "replace") if code == -3 else ""
            if reason:
                raise HobbitError(reason)
            raise RuntimeError(f"{name} returned {code}" + (f" ({lines[-1]})" if lines else ""))


CLOSED = "this Llama was closed: load the model again"
FORKED = "this Llama was loaded before the process forked, and its loader threads stayed behind: load the model in the child"


class Closed:
    """In the place of a closed model's parts; the C functions behind those crash on a freed model."""

    def __init__(self, why: str):
        self._why = why

    def __getattr__(self, name):
        raise RuntimeError(self._why)


_offloaded = weakref.WeakSet()


def watch_forks(llm) -> None:
    """A forked child has memory and locks of its parent's models, but none of their threads: there they are closed, and
    never freed, which would wait for those threads."""
    _offloaded.add(llm)


def _after_fork():
    for llm in list(_offloaded):
        for owner, stack in ((llm, "_stack"), (llm._batch, "_exit_stack"), (llm._ctx, "_exit_stack"), (llm._model, "_exit_stack")):
            if not isinstance(owner, Closed):
                getattr(owner, stack).pop_all()
        llm._turns = Turns()  # a thread of the parent's may hold the locks
        llm._abandon(FORKED)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Generation:
    """Counters and time at the start of a generation, at its first token, and at its latest.

    lengths   [tokens of the prompt, new tokens without the one that ends the text]
    """

    def __init__(self, llm, n_prompt: int):
        self.llm = llm
        self.lengths = [n_prompt, 0]
        self.n_layers = 0
        if llm._engine:
            info = b.hobbit_info()
            b.hobbit_get_info(llm._engine, info)
            self.n_layers = info.n_layers
        self.marks = [self._now()]

    def _now(self):
        return {**(self.llm._raw() if self.n_layers else {}), "evaluated": self.llm._evaluated, "seconds": time.perf_counter()}

    def mark(self):
        """After each token."""
        if not self.llm._closed:
            self.marks[min(2, len(self.marks)):] = [self._now()]

    def report(self):
        marks = self.marks + [self.marks[-1]] * (3 - len(self.marks))
        parts = [stats.difference(after, before) for before, after in zip(marks, marks[1:])]
        return {name: stats.counters(part, self.n_layers) if self.n_layers else part for name, part in zip(("prompt", "decode"), parts)}
