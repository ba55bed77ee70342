"""The rule and the cache once more, in NumPy and plain Python, written from the formulas and not from the C++.

    wanted = rule(normalise(weights), t1, t2)   what every (token, rank) wants
    sim = Simulator(...); sim.token(pos, rows)  decode of one token at a time: the events, in order

Only batches of one token: with more, several experts' needs are merged and loaded in waves.
Numbers are rounded where the engine rounds them: normalised weights to float32, sums and priorities are
float64 in the order of the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

SKIP, LOW, HIGH = 0, 1, 2


def normalise(weights: np.ndarray) -> np.ndarray:
    """float32 [n, k] of any scale -> float32 [n, k], rows that sum to 1."""
    w = np.asarray(weights, np.float32).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        total = np.cumsum(w, axis=1)[:, -1:]
        g = (w / total).astype(np.float32)
    usable = np.isfinite(total) & (total > 0)
    return np.where(usable, g, np.float32(1.0 / w.shape[1]))


def rule(g: np.ndarray, t1: float, t2: float) -> np.ndarray:
    """float32 [n, k], normalised (as in a trace) -> int [n, k]: HIGH, LOW or SKIP, by what the ranks before
    weigh together. Rows that are no numbers are HIGH."""
    g = np.asarray(g, np.float32).astype(np.float64)
    order = np.argsort(-g, axis=1, kind="stable")
    ranked = np.take_along_axis(g, order, axis=1)
    before = np.concatenate([np.zeros((len(g), 1)), np.cumsum(ranked, axis=1)[:, :-1]], axis=1)
    t1, t2 = float(np.float32(t1)), float(np.float32(t2))
    ranked_wish = np.where(before <= t1, HIGH, np.where((before <= t2) | (t2 >= 1), LOW, SKIP))
    if t1 >= 1:
        ranked_wish[:] = HIGH
    ranked_wish[:, 0] = HIGH
    wish = np.empty_like(ranked_wish)
    np.put_along_axis(wish, order, ranked_wish, axis=1)
    wish[~np.isfinite(g).all(axis=1)] = HIGH
    return wish


@dataclass
class Use:
    """Records of one expert in the running sequence. Token numbers start at 1."""
    last: int = 0
    uses: int = 0
    high: int = 0
    low: int = 0


@dataclass
class Resident:
    clock: int  # layer steps so far, at its last use
    token: int  # forward pass of its last use


@dataclass
class Simulator:
    policy: str                   # lru, lfu, hobbit, lcu, follow
    t1: float
    t2: float
    high_slots: int
    low_slots: int
    n_layers: int
    weights: tuple = (1, 1, 1, 1)  # hobbit
    cost_low: float = 0.25         # bytes of a low copy / bytes of a high copy
    n_expert: int = 0              # follow
    n_used: int = 0                # follow
    high_bytes: int = 0            # follow: all experts at high precision
    skip_mass: float = 1.0
    events: list = field(default_factory=list)  # (kind, layer, expert, precision)

    def __post_init__(self):
        self.pools = {HIGH: {}, LOW: {}}  # (layer, expert) -> Resident
        self.slots = {HIGH: self.high_slots, LOW: self.low_slots}
        self.uses: dict[tuple[int, int], Use] = {}
        self.tokens = 0  # of the sequence
        self.passes = 0
        self.clock = 0
        self.w = [float(np.float32(w)) for w in self.weights]
        self.cost = float(np.float32(self.cost_low))
        self.succession = Succession(self.n_layers, self.n_expert, self.n_used, self.high_bytes) if self.policy == "follow" else None

    def token(self, pos: int, rows):
        """rows: (experts, weights) of each layer, in the router's order; weights normalised."""
        if pos == 0:
            self.uses.clear()
            self.tokens = 0
            if self.succession:
                self.succession.start()
        if self.succession:
            self.succession.begin()
        self.tokens += 1
        self.passes += 1
        for layer, (experts, weights) in enumerate(rows):
            self._layer(layer, [int(e) for e in experts], rule(np.asarray(weights)[None], self.t1, self.t2)[0], [float(w) for w in weights])

    def _layer(self, layer, experts, wanted, weights):
        self.clock += 1
        for expert, wish in zip(experts, wanted):  # the records know of this step when it evicts
            u = self.uses.setdefault((layer, expert), Use())
            u.last = self.tokens
            u.uses += 1
            u.high += wish == HIGH
            u.low += wish == LOW
        if self.succession:
            self.succession.serve(layer, experts)
        if self.skip_mass < 1:
            light = [i for i, e in enumerate(experts) if wanted[i] == SKIP and not any((layer, e) in p for p in self.pools.values())]
            mass = 0.0
            for i in sorted(light, key=lambda i: weights[i]):
                mass += weights[i]
                if mass > float(np.float32(self.skip_mass)):
                    wanted[i] = LOW
        needed, missing = set(), []
        for expert, wish in zip(experts, wanted):
            key = (layer, expert)
            # a resident copy at least as good as wanted serves as it is; a skip takes what there is
            copy = HIGH if key in self.pools[HIGH] else LOW if wish != HIGH and key in self.pools[LOW] else None
            if copy:
                self.pools[copy][key] = Resident(self.clock, self.passes)
                needed.add((copy, key))
                self.events.append(("hit", layer, expert, copy))
            elif wish == SKIP:
                self.events.append(("skip", layer, expert, SKIP))
            else:
                missing.append((int(wish), key))
        for copy, key in missing:
            pool = self.pools[copy]
            if len(pool) == self.slots[copy]:
                victim = min((k for k in pool if (copy, k) not in needed), key=lambda k: (self._priority(layer, k, pool[k], copy), pool[k].clock, k))
                del pool[victim]
                self.events.append(("evict", *victim, copy))
            pool[key] = Resident(self.clock, self.passes)
            needed.add((copy, key))
            self.events.append(("load", *key, copy))

    def _priority(self, serving, key, resident, copy):
        u, tokens = self.uses.get(key, Use()), self.tokens
        distance = (key[0] - serving) % self.n_layers or self.n_layers  # the layer being served is needed last
        if self.policy == "lru":
            return resident.clock
        if self.policy == "lfu":
            return u.uses / tokens
        if self.policy == "hobbit":
            recency, frequency, high, near = self.w
            p = (recency * u.last + frequency * u.uses + high * u.high) / tokens
            p += near * (1.0 - distance / self.n_layers)
            return p / (recency + frequency + high + near)
        if self.policy == "lcu":
            p = (u.high + self.cost * u.low) / tokens
            return p + 1.0 / (distance + 0.1) if resident.token >= self.passes - 1 else p
        if self.policy == "follow":
            base = 20.0 * (self.n_used / self.n_expert)
            expected = self.succession.chance(*key) + (u.uses + base) / (tokens + 20.0)
            value = ((1.0 + u.high if copy == HIGH else 0.0) + self.cost * u.low) / (1.0 + u.uses)
            return value * 2.0 ** (-distance / self.n_layers) * expected
        raise ValueError(self.policy)


class Succession:
    """Which experts follow which (csrc/core/succession.h), one sequence, tokens one at a time. Weights count in
    units of 2^-13; steps and their limit are those of 16 bits a table."""

    ONE, RATE, PLACES = 1 << 13, 128, 1024

    def __init__(self, n_layers, n_expert, n_used, high_bytes):
        self.n, self.n_expert = n_layers, n_expert
        width = -(-n_expert // 8) * 8
        left = max(high_bytes // 128, 64 << 10)
        self.same, self.before = [], []  # layers back
        for age in range(min(n_layers, 8)) if n_layers <= 8 else (0, 1, 2, 4):
            for ages in ((self.same, self.before) if age else (self.before,)):
                if n_layers * n_expert * width * 2 <= left:
                    left -= n_layers * n_expert * width * 2
                    ages.append(age)
                else:
                    left = 0
        self.weights = {(kind, age): np.zeros((n_layers, n_expert, n_expert), np.int64)  # [layer][expert before][expert]
                        for kind, ages in (("same", self.same), ("before", self.before)) for age in ages}
        share = min(n_used / n_expert, 0.99)
        self.bias = np.full((n_layers, n_expert), round(self.ONE * math.log(share / (1 - share))))
        self.stay = [0] * n_layers
        self.limit = 32767 // n_used - self.RATE
        self.table = [1 / (1 + math.exp(8 - (i + 0.5) * 16 / self.PLACES)) for i in range(self.PLACES)]
        self.steps = np.array([math.floor(self.RATE * p + 0.5) for p in self.table])
        self.start()

    def start(self):
        self.sums = self.bias.copy()
        self.running, self.last = {}, {}  # layer: experts, of this token and the one before

    def begin(self):
        self.running, self.last = {}, self.running

    def chance(self, layer, expert):
        return self.table[self._place(self.sums[layer][expert])]

    def _place(self, sums):
        return np.clip((sums + 8 * self.ONE) // (16 * self.ONE // self.PLACES), 0, self.PLACES - 1)

    def _base(self, layer, token, rows=None):
        """The first sum, of one token's choices."""
        z = self.bias[layer].copy()
        z[token.get(layer, [])] += self.stay[layer]
        for age in self.before:
            if age <= layer:
                self._add("before", age, layer, token.get(layer - age, []), z, rows)
        return z

    def _add(self, kind, age, layer, experts, z, rows):
        w = self.weights[kind, age][layer]
        z += w[experts].sum(axis=0)
        if rows is not None:
            rows.append((w, experts))

    def _correct(self, z, rows, experts):
        error = -self.steps[self._place(z)]
        error[experts] += self.RATE
        for w, chosen in rows:
            w[chosen] = np.clip(w[chosen] + error, -self.limit, self.limit)
        return error

    def serve(self, layer, experts):
        rows = []
        z = self._base(layer, self.last, rows)
        error = self._correct(z, rows, experts)
        self.bias[layer] += error
        self.stay[layer] += error[self.last.get(layer, [])].sum()
        for age in sorted(self.same, reverse=True):
            chosen = (self.running if age <= layer else self.last).get((layer - age) % self.n, [])
            if chosen:
                rows = []
                self._add("same", age, layer, chosen, z, rows)
                self._correct(z, rows, experts)
        self.running[layer] = experts
        self.sums[layer] = self._base(layer, self.running)
        for age in self.same:
            self._add("same", age, (layer + age) % self.n, experts, self.sums[(layer + age) % self.n], None)
