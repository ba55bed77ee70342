"""Playing a recorded routing through the engine without a model, under many settings.

    trace = read_trace("trace.npy")
    for r in simulate_all(trace, [{"cache_bytes": "25%", "policy": p} for p in ("lru", "hobbit", "clairvoyant")]):
        print(r["policy"], r["penalty"], r["bytes_per_token"])

The engine is the one of a real run (csrc/core/simulate.h): same rule, records, slots, policies and plans. Tokens are
played one at a time, as in generation, whatever batches they were recorded in.

The miss penalty is the paper's (arXiv 2411.01433v2, section 4.3): 1 for a request served by a high copy that was
loaded for it, B_low/B_high for a low one, per token. "clairvoyant" evicts by the uses to come
(csrc/core/clairvoyant.h); under two costs that is a heuristic, not a bound.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np

from . import bindings as b, stats
from .errors import HobbitError
from .settings import Settings, check_int

CLAIRVOYANT = "clairvoyant"
SETTINGS = ("t1", "t2", "skip_mass", "cache_bytes", "policy", "policy_weights", "low_fraction", "n_io_threads", "slots")

LAYER = np.dtype([("block", "<i4"), ("group", "<i4"), ("n_expert", "<i4"), ("n_expert_used", "<i4"), ("high_bytes", "<u8", (3,)), ("low_bytes", "<u8", (3,))])
PIECE = 1 << 14  # rows that are played at a stretch: so long Ctrl-C waits


def row_type(k: int) -> np.dtype:
    """A row of a trace file with k experts a token (docs/trace.md)."""
    return np.dtype([("seq", "<i2"), ("pos", "<i4"), ("layer", "<i2"), ("expert", "<i2", (k,)), ("weight", "<f4", (k,))])


@dataclass(frozen=True)
class Trace:
    rows: np.ndarray           # row_type(k) [n_rows], token after token, a token's layers rising
    starts: np.ndarray         # int64 [n_tokens]: first row of each token
    layers: np.ndarray | None  # LAYER [n_layers]: the model it was recorded with; None: the file does not say

    @property
    def n_used(self) -> int:
        return self.rows["expert"].shape[1]

    @property
    def n_tokens(self) -> int:
        return len(self.starts)


def read_trace(path) -> Trace:
    """OSError for a file that cannot be read, ValueError for one that is no trace."""
    path = os.fspath(path)
    layers = None
    with open(path, "rb") as f:
        try:
            rows = np.load(f, allow_pickle=False)
            if f.read(1):
                f.seek(-1, os.SEEK_CUR)
                layers = np.load(f, allow_pickle=False)
        except (ValueError, EOFError):  # NumPy's words are about pickles
            raise ValueError(f"{path} is not a NumPy file, or damaged") from None
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or not {"seq", "pos", "layer", "expert", "weight"} <= set(rows.dtype.names or ()):
        raise ValueError(f"{path} holds no routing trace (an array with the fields seq, pos, layer, expert, weight)")
    if not len(rows):
        raise ValueError(f"{path} is a trace without rows")
    if layers is not None and layers.dtype != LAYER:
        raise ValueError(f"{path}: its second array does not describe layers")
    shape = rows["expert"].shape
    if len(shape) != 2 or rows["weight"].shape != shape or (rows["layer"] < 0).any():
        raise ValueError(f"{path} is a damaged trace: expert and weight must be arrays of the same length, layers not negative")
    return Trace(*_by_token(rows.astype(row_type(shape[1]), copy=False)), layers)


def _by_token(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows token after token, first row of each). Batches are recorded layer after layer, with all tokens of each."""
    layer = rows["layer"].astype(np.int64)
    if layer.max() == 0:
        return rows, np.arange(len(rows))
    batch = np.concatenate([[0], np.cumsum(layer[1:] < layer[:-1])])
    # consecutive tokens of one batch each have (seq, pos) of their own
    same = (np.diff(rows["seq"]) == 0) & (np.diff(rows["pos"]) == 0) & (np.diff(batch) == 0)
    if (same | (np.diff(batch) != 0)).all():
        return rows, np.flatnonzero(np.concatenate([[True], ~same]))
    key = np.stack([batch, rows["seq"], rows["pos"]], axis=1)
    _, first, token = np.unique(key, axis=0, return_index=True, return_inverse=True)
    first = first[token.reshape(-1)]  # per row: where its token was seen first
    order = np.lexsort((layer, first))
    rows = rows[order]
    return rows, np.flatnonzero(np.diff(first[order], prepend=-1))


def read_layers(path) -> np.ndarray:
    """LAYER [n_layers] of a converted model. ValueError if it is none."""
    name = os.fspath(path).encode("utf-8")
    n = b.hobbit_probe_layers(name, 0, None, 0)
    if n < 0:
        raise ValueError(_error())
    layers = np.zeros(n, LAYER)
    b.hobbit_probe_layers(name, 0, _pointer(layers), n)
    return layers


def _pointer(layers: np.ndarray):
    return layers.ctypes.data_as(ctypes.POINTER(b.hobbit_layer))


def _error() -> str:
    return b.hobbit_last_error().decode("utf-8", "replace")


def check(trace: Trace, layers: np.ndarray | None) -> np.ndarray:
    """The layers to simulate: those given, or the trace's own. ValueError where they do not fit the trace."""
    layers = trace.layers if layers is None else layers
    if layers is None:
        raise ValueError("the trace does not say the sizes of its model's experts: name the model it was recorded with")
    if not len(layers) or not np.isin(layers["group"], np.arange(len(layers))).all():
        raise ValueError("the trace is damaged: it does not say which layers of its model are alike")
    used, experts = int(layers["n_expert_used"].max()), int(layers["n_expert"].max())
    if trace.rows["layer"].max() >= len(layers) or trace.n_used > used or trace.rows["expert"].max() >= experts:
        raise ValueError(f"the trace is of another model: it has {trace.rows['layer'].max() + 1} layers of at least {trace.rows['expert'].max() + 1} experts, "
                         f"{trace.n_used} used; the model {len(layers)} of {experts}, {used} used")
    return np.ascontiguousarray(layers)


def _slot_pairs(slots, n_groups: int) -> list[int]:
    """[high, low of each group]. ValueError or TypeError for anything but pairs of whole numbers."""
    pairs = np.asarray(slots)
    if pairs.shape not in ((2,), (n_groups, 2)):
        raise ValueError(f"slots must be (high, low), or such a pair for each of the {n_groups} groups of layers, not {slots!r}")
    return [check_int("slots", n, 0, 2**31 - 1) for n in np.broadcast_to(pairs, (n_groups, 2)).reshape(-1).tolist()]


class Simulation:
    """One engine under one set of settings; close() frees it. Arguments as of Llama, and:

        policy  also "clairvoyant"
        slots   [(high, low) of each group of layers] or one pair for all, instead of a budget
        event   function (kind, layer, expert, precision, slot), as hobbit_event_fn without its first argument
    """

    def __init__(self, trace: Trace, layers: np.ndarray | None = None, *, slots=None, event=None, policy="hobbit", **settings):
        for name in settings:
            if name not in SETTINGS:
                raise TypeError(f"a simulation has no setting {name!r}; there are {', '.join(SETTINGS)}")
        self.trace, self.layers, self.h = trace, check(trace, layers), None
        self.policy = policy
        self.settings = Settings(policy="lru" if policy == CLAIRVOYANT else policy, **{"cache_bytes": "25%", **settings})
        if self.settings.budget.kind == "auto":
            raise ValueError("cache_bytes is 'auto', but a simulation has no machine to look at: give a size, a share or 'min'")
        params = b.hobbit_params()
        b.hobbit_default_params(params)
        self.settings.fill(params)
        n_groups = int(self.layers["group"].max()) + 1
        self.by_slots, c_slots = slots is not None, None
        if slots is not None:
            c_slots = (ctypes.c_int32 * (2 * n_groups))(*_slot_pairs(slots, n_groups))
        self.h = b.hobbit_simulate(_pointer(self.layers), len(self.layers), params, c_slots)
        if not self.h:
            raise ValueError(_error())
        if event is not None:
            self._hooks = b.hobbit_hooks()  # kept: C has a pointer into it
            self._hooks.event = b.hobbit_event_fn(lambda _user, *what: event(*what))
            b.hobbit_set_hooks(self.h, self._hooks)
        if policy == CLAIRVOYANT:
            try:
                self._check(b.hobbit_simulate_foresee(self.h, *self._rows(0, len(trace.rows))))
            except HobbitError:
                self.close()
                raise

    def _rows(self, begin: int, end: int):
        part = self.trace.rows[begin:end]
        return part.ctypes.data, len(part), self.trace.n_used

    def _check(self, code: int) -> None:
        if code < 0:
            raise HobbitError(_error())

    def run(self, cancelled=lambda: False) -> None:
        """Play the whole trace; stops early where cancelled() says so."""
        cuts = [*self.trace.starts[::max(1, PIECE // len(self.layers))].tolist(), len(self.trace.rows)]
        for begin, end in zip(cuts, cuts[1:]):
            if cancelled():
                return
            self._check(b.hobbit_simulate_run(self.h, *self._rows(begin, end)))

    def result(self) -> dict:
        """The settings, high_slots and low_slots [n_groups], tokens, and the counters of stats.py with, per token,
        penalty and bytes_per_token."""
        s, groups, penalty = b.hobbit_stats(), [], 0.0
        info = b.hobbit_info()
        b.hobbit_get_info(self.h, info)
        for i in range(info.n_groups):
            g = b.hobbit_group_info()
            self._check(b.hobbit_get_group(self.h, i, g))
            groups.append(g)
        for i, layer in enumerate(self.layers):
            self._check(b.hobbit_get_layer_stats(self.h, i, s))
            g = groups[layer["group"]]
            penalty += s.misses_high + s.misses_low * g.low_expert_bytes / g.high_expert_bytes
        b.hobbit_get_stats(self.h, s)
        counted = stats.counters({name: getattr(s, name) for name, _ in s._fields_ if not name.endswith("_us")}, 1)
        n = self.trace.n_tokens
        settings = {name: getattr(self.settings, name) for name in ("t1", "t2", "skip_mass", "cache_bytes", "policy_weights", "low_fraction")}
        if self.by_slots:
            settings |= {"cache_bytes": None, "low_fraction": None}
        return {**settings, "policy": self.policy, "budget_bytes": info.budget_bytes, "slot_bytes": info.slot_bytes,
                "high_slots": [g.high_slots for g in groups], "low_slots": [g.low_slots for g in groups],
                **counted, "tokens": n, "penalty": penalty / n, "bytes_per_token": s.bytes_read / n}

    def close(self) -> None:
        if self.h:
            b.hobbit_simulate_free(self.h)
        self.h = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def simulate(trace: Trace, layers: np.ndarray | None = None, **settings) -> dict:
    """Simulation.result() of one set of settings."""
    with Simulation(trace, layers, **settings) as s:
        s.run()
        return s.result()


def simulate_all(trace: Trace, configurations: list[dict], layers: np.ndarray | None = None, threads: int | None = None, progress=None) -> list[dict]:
    """simulate() of each, several at once; progress(1) after each."""
    stop = threading.Event()

    def one(settings):
        with Simulation(trace, layers, **settings) as s:
            s.run(stop.is_set)
            return s.result()

    threads = check_int("threads", (os.cpu_count() or 1) if threads is None else threads, 1, 1024)
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(one, c) for c in configurations]
        try:
            for job in as_completed(jobs):
                job.result()
                if progress:
                    progress(1)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [job.result() for job in jobs]
