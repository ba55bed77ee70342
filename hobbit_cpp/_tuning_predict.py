"""What a setting will load and lose, from a recorded routing and the divergence of the uniform types.

Loads: the simulator plays the routing with the sizes of the pair's copies (docs/simulate.md). The routing is the
reference's; a coarser model routes a little differently.

Loss: an expert's error enters a layer's output times its gate weight g, so a use at some precision is taken to add g^2 times
that precision's loss, and the mean KL divergence of a setting to be

    sum over precisions of KL(all experts at it) x (share of the sum of g^2 that is served at it).

What the rule wants of each use is in the trace; of what it wants low or skipped, a part is served better because a high copy
is in memory. That part is taken to have the same mean g^2 as the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import simulate
from ._tuning_measure import Setting
from ._tuning_models import Models


@dataclass(frozen=True)
class Shares:
    """How uses are served, of their number or of their g^2: high, low, skip, summing to 1."""
    high: float
    low: float
    skip: float


@dataclass(frozen=True)
class Prediction:
    setting: Setting
    bytes_per_token: float
    hit_rate: float
    kl: float | None  # None where a type's divergence is not known


def wanted(g: np.ndarray, t1: float, t2: float) -> tuple[Shares, Shares]:
    """What the rule (csrc/core/select.h) wants of gate weights [n, n_used] that sum to 1 a row: shares of uses, shares of g^2."""
    t1, t2 = float(np.float32(t1)), float(np.float32(t2))  # as the engine has them
    ordered = -np.sort(-g.astype(np.float64), axis=1)
    before = np.cumsum(ordered, axis=1) - ordered
    used = ordered > 0
    high = used & ((before <= t1) | (t1 >= 1))
    high[:, 0] |= used[:, 0]
    skip = used & ~high & (before > t2) & (t2 < 1)
    low = used & ~high & ~skip

    def shares(weight):
        total = (weight * used).sum()
        return Shares(*(float((weight * part).sum() / total) for part in (high, low, skip)))

    return shares(np.ones_like(ordered)), shares(ordered * ordered)


def served(count: Shares, square: Shares, high: float, low: float, skip: float) -> Shares:
    """Shares of g^2 by what served them, from what the rule wanted and the shares of uses that were served at each."""
    def part(of, whole):
        return min(1.0, of / whole) if whole > 0 else 0.0

    skipped = square.skip * part(skip, count.skip)
    lowered = square.low * part(low, count.low)
    return Shares(1 - lowered - skipped, lowered, skipped)


class Predictor:
    """Predictions on one trace.

    divergence   {type: mean KL of all experts at it}; the source's own type is 0
    skip         mean KL for the share of g^2 that is skipped, None if it is not known
    """

    def __init__(self, models: Models, trace: simulate.Trace, cache_bytes: int, divergence=None, skip: float | None = None,
                 n_io_threads: int = 4):
        self.models, self.trace, self.cache_bytes = models, trace, cache_bytes
        self.divergence, self.skip, self.n_io_threads = {models.own: 0.0, **(divergence or {})}, skip, n_io_threads
        self.g = trace.rows["weight"]
        self._wanted = {}

    def wanted(self, t1: float, t2: float):
        if (t1, t2) not in self._wanted:
            self._wanted[t1, t2] = wanted(self.g, t1, t2)
        return self._wanted[t1, t2]

    def bounds(self, s: Setting) -> tuple[float, float]:
        """Least and greatest KL that the formula can give: everything in memory at high precision, nothing in memory."""
        _, square = self.wanted(s.t1, s.t2)
        return self._kl(s, Shares(1, 0, 0)), self._kl(s, square)

    def _kl(self, s: Setting, square: Shares) -> float | None:
        total = 0.0
        for share, loss in ((square.high, self.divergence.get(s.high)), (square.low, self.divergence.get(s.low)), (square.skip, self.skip)):
            if share > 0:
                if loss is None:
                    return None
                total += share * loss
        return total

    def predict(self, settings: list[Setting], threads: int | None = None, progress=None) -> list[Prediction | None]:
        """One for each setting; None where the budget is below the floor of its pair."""
        out = [None] * len(settings)
        by_pair: dict = {}
        for i, s in enumerate(settings):
            by_pair.setdefault((s.high, s.low), []).append(i)
        for (high, low), members in by_pair.items():
            layers = self.models.layers(self.trace.layers, high, low)
            jobs = [{"cache_bytes": self.cache_bytes, "n_io_threads": self.n_io_threads, **settings[i].arguments} for i in members]
            try:
                results = simulate.simulate_all(self.trace, jobs, layers, threads, progress)
            except ValueError:  # the floor: it is the same for all settings of a pair
                continue
            for i, r in zip(members, results):
                s = settings[i]
                count, square = self.wanted(s.t1, s.t2)
                by = served(count, square, r["share_high"], r["share_low"], r["share_skip"])
                out[i] = Prediction(s, r["bytes_per_token"], r["hit_rate"], self._kl(s, by))
        return out
