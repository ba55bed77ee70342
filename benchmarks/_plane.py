"""Points on the plane of docs/frontier.md from a forward pass in NumPy (_forward.py): mean KL against bytes loaded a token, in a cache of
so many bytes of slots. The engine's simulator says what is served; what was computed with that says what the routing is."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hobbit_cpp import simulate  # noqa: E402  before numpy's users of llama.cpp

import numpy as np  # noqa: E402
from _forward import PROJECTIONS, SKIP, Model, ggml_values, held  # noqa: E402
from hobbit_cpp._tuning_pareto import at_equal_loss  # noqa: E402

UNIFORM = ("q8_0", "q6_k", "q5_k", "q4_k", "q3_k")
HIGH, LOW = 100, 101  # levels of a pair


def megabytes(text: str) -> int:
    return round(1e6 * float(text.removesuffix("MB")))


def add_type(model: Model, level: int, kind: str) -> list[int]:
    """Copies of a type as a level; bytes of one expert, by projection."""
    model.add(level, ggml_values(kind), 256 if kind.endswith("_k") else 32)
    return type_bytes(model, kind)


def type_bytes(model: Model, kind: str) -> list[int]:
    return [held(kind, w.shape[2]).row_bytes(w.shape[2]) * w.shape[1] for w in (model.source[0][p] for p in PROJECTIONS)]


def relative_error(model: Model, level: int) -> float:
    """Mean square of a level's error over that of the weights."""
    made = model.levels[level][0]
    error = sum(((made[i][p] - w) ** 2).sum(dtype=np.float64) for i, layer in enumerate(model.source) for p, w in layer.items())
    return error / sum((w ** 2).sum(dtype=np.float64) for layer in model.source for w in layer.values())


def play_pair(routing, n, n_expert, high, low, t1, t2, budget):
    """(bytes a token, level of each use) of a pair in the engine's simulator, with as few low slots as there must be.

    n: tokens of a sequence; high, low: bytes by projection; t1: one for all layers, or one for each, of which t2 >= 1 is a condition
    """
    n_layers, n_tokens, n_used = routing.experts.shape
    gate = routing.gate
    if np.ndim(t1):  # what a layer's ranks weigh together is compared with one number: it is scaled instead
        gate, t1 = gate * (np.mean(t1) / np.asarray(t1, np.float32))[:, None, None], float(np.mean(t1))
        assert t2 >= 1
    rows = np.zeros((n_tokens, n_layers), simulate.row_type(n_used))
    rows["pos"] = (np.arange(n_tokens) % n)[:, None]
    rows["layer"] = np.arange(n_layers)
    rows["expert"], rows["weight"] = routing.experts.transpose(1, 0, 2), gate.transpose(1, 0, 2)
    layers = np.zeros(n_layers, simulate.LAYER)
    layers["block"], layers["n_expert"], layers["n_expert_used"], layers["high_bytes"], layers["low_bytes"] = np.arange(n_layers), n_expert, n_used, high, low
    trace = simulate.Trace(rows.ravel(), np.arange(n_tokens) * n_layers, layers)
    kept = {}

    def event(kind, layer, expert, precision, slot):
        if kind in (0, 1, 3):  # hit, load, skip
            kept.setdefault(layer, []).append((expert, precision))

    slots = (min((budget - (n_used - 1) * sum(low)) // sum(high), n_layers * n_expert), n_used - 1)
    with simulate.Simulation(trace, t1=t1, t2=t2, slots=slots, event=event) as s:
        s.run()
        result = s.result()
    served = np.full((n_layers, n_tokens, n_expert), -1, np.int32)
    for layer, found in kept.items():
        e, p = np.array(found).T.reshape(2, n_tokens, n_used)
        np.put_along_axis(served[layer], e, np.array([SKIP, LOW, HIGH])[p], axis=1)
    return result["bytes_per_token"], np.take_along_axis(served, routing.experts, axis=2)


def measure(model, text, play, wish):
    """Play, compute with what was served, and both once more with the routing that this gave.

    play(routing) -> (bytes a token, level of each use); wish(gate) -> levels, for uses that the second pass routes otherwise.
    Returns (bytes a token, KL of each token, share of these uses).
    """
    routing = text.routing
    for _ in range(2):
        loaded, served = play(routing)
        there = np.full((model.n_layers, routing.experts.shape[1], model.n_expert), -1, np.int32)
        np.put_along_axis(there, routing.experts, served, axis=2)
        other = [0]

        def choose(layer, experts, gate):
            level = np.take_along_axis(there[layer], experts, axis=1)
            other[0] += int((level < 0).sum())
            return np.where(level < 0, wish(gate), level)

        states, routing = model.run(text.tokens, choose)
    return loaded, text.divergence(states), other[0] / routing.experts.size


class Table:
    """Lines of a table as they are measured; settings are compared with the line of those before that were called the line's."""

    def __init__(self, title: str):
        self.line = []
        print(f"{title}\n\n| | mean KL | median | kB/token | to the line | routed otherwise |\n|---|---|---|---|---|---|", flush=True)

    def add(self, name, loaded, kl, other=0.0, line=False):
        mean, error = kl.mean(), kl.std() / len(kl) ** 0.5
        ratio = ""
        if line:
            self.line.append((loaded, mean, error))
        elif self.line:
            equal = at_equal_loss(self.line, mean, error)
            ratio = "-" if equal is None else f"{100 * (loaded / equal[0] - 1):+.1f} ± {100 * loaded / equal[0] * equal[1]:.1f} %"
        print(f"| {name} | {mean:.5f} ± {error:.5f} | {np.median(kl):.5f} | {loaded / 1000:,.0f} | {ratio} | {100 * other:.1f} % |", flush=True)


def uniform_line(model, text, table, budget, kinds=UNIFORM):
    for kind in kinds:
        size = add_type(model, HIGH, kind)
        states, routing = model.run(text.tokens, lambda *_: HIGH)
        loaded, _ = play_pair(routing, text.tokens.shape[1], model.n_expert, size, [1, 1, 1], 1.0, 1.0, budget)
        table.add(kind, loaded, text.divergence(states), line=True)
