"""What each quantization and each mixed setting loses, against what it loads, under one memory budget.

    from hobbit_cpp.frontier import frontier
    report = frontier("mixtral-f16.gguf", text="book.txt", cache="12GiB")
    print(report.table())

docs/frontier.md says how to read it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from dataclasses import dataclass

from ._evaluate_stats import Value
from ._paths import check_text
from ._tuning_measure import N_CTX, Bench, Measured, Setting, budget_bytes, check_budget, spread
from ._tuning_models import Models, shown
from ._tuning_pareto import at_equal_loss, pareto
from ._tuning_predict import Predictor
from ._tuning_speed import storage_speed
from .memory import format_bytes
from .settings import check_int, check_number

__all__ = ["N_CTX", "Point", "Report", "THRESHOLDS", "frontier", "parse_pair"]

THRESHOLDS = ((0.7, 0.95), (0.6, 1.0))


@dataclass(frozen=True)
class Point:
    """One setting under the budget.

    kl, bytes_per_token, tokens_per_second   measured, token by token
    predicted_bytes              by the simulator, from the reference's routing
    predicted_tokens_per_second  what the speed allows for the predicted bytes if computing took no time; None: nothing to load
    storage_bytes                of the experts on disk
    pareto                       no other point has fewer bytes and less divergence
    over_uniform                 bytes over those of the line through the uniform types at this divergence, with the error that those of
                                 the divergences make; None beyond its ends
    """
    setting: Setting
    kl: Value
    same_top: Value
    bytes_per_token: float
    hit_rate: float
    tokens_per_second: float
    predicted_bytes: float
    predicted_tokens_per_second: float | None
    storage_bytes: int
    pareto: bool = False
    over_uniform: Value | None = None


@dataclass(frozen=True)
class Report:
    """Result of frontier(). Sizes in bytes, speed in bytes/s."""
    model: str
    text: str
    own: str               # the source's type, the reference
    cache_bytes: int
    speed: float
    speed_given: bool
    n_tokens: int          # decoded for each point
    n_scored: int          # of which count
    points: list[Point]    # uniform types, widest first, then the others
    left_out: list[str]    # settings whose floor is above the budget

    def to_dict(self) -> dict:
        """Plain values, ready for JSON."""
        return {**dataclasses.asdict(self), "points": [{"name": str(p.setting), **dataclasses.asdict(p)} for p in self.points]}

    def table(self) -> str:
        head = ("", "setting", "mean KL", "read/token", "to uniform", "hits %", "tok/s", "loads alone", "experts on disk")
        rows = []
        for p in self.points:
            rows.append(("*" if p.pareto else "", str(p.setting), _kl(p.kl), format_bytes(p.bytes_per_token),
                         "" if p.setting.uniform else "-" if p.over_uniform is None else change(p.over_uniform),
                         f"{100 * p.hit_rate:.1f}", _rate(p.tokens_per_second), _rate(p.predicted_tokens_per_second), format_bytes(p.storage_bytes)))
        width = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
        lines = [f"{self.model}: {format_bytes(self.cache_bytes)} for experts; reference: all experts as given ({shown(self.own)})",
                 f"{self.text}: {self.n_tokens} tokens decoded one by one for each setting, of which {self.n_scored} count",
                 f"{'given' if self.speed_given else 'measured'}: loads at {format_bytes(self.speed)}/s", ""]
        lines += ["  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(r, width))).rstrip() for r in (head, *rows)]
        lines += ["", "*: no other setting here has both fewer bytes and less divergence.  ±: standard error over tokens.",
                  "to uniform: bytes against a uniform type of the same divergence, on the line between the two nearest, and what the errors of the divergences make of it.",
                  "loads alone: tok/s that the speed allows if computing took no time.", "", self.verdict()]
        lines += [f"left out: {name} (the budget is below its floor)" for name in self.left_out]
        return "\n".join(lines)

    def verdict(self) -> str:
        """In words: are mixed settings worth it under this budget?"""
        fits = next((p for p in self.points if p.setting.uniform and p.setting.high != self.own and p.storage_bytes <= self.cache_bytes), None)
        if fits:
            name = shown(fits.setting.high)
            return f"All experts as {name} fit into this memory: an ordinary {name} file needs no offloading at all."
        mixed = [p for p in self.points if not p.setting.uniform]
        if not mixed:
            return "Only uniform types were compared."
        compared = sorted((p for p in mixed if p.over_uniform), key=lambda p: p.over_uniform.value)
        if not compared:
            return "No mixed setting here has a divergence between those of two uniform types: nothing to compare them with."
        best, clear = compared[0], [p for p in compared if p.over_uniform.value + 2 * p.over_uniform.error < 1]
        if best.over_uniform.value >= 1:
            text = "No mixed setting here loads less than a uniform type of the same divergence: take the smaller file."
        elif not clear:
            text = f"No mixed setting here loads less than a uniform type of the same divergence by more than the error bars; {best.setting} comes nearest ({change(best.over_uniform)})."
        else:
            best = clear[0]
            text = f"{best.setting} loads least against a uniform type of its divergence: {change(best.over_uniform)}."
        more = sum(p.over_uniform.value > 1 for p in compared)
        return text + (f" {more} of {len(compared)} mixed settings load more than a uniform type would." if more else "")


def _kl(v: Value) -> str:
    if v.value == 0:
        return "0"
    return f"{v.value:.5f}" + ("" if v.error is None else f" ± {v.error:.5f}")


def change(ratio: Value) -> str:
    return f"{100 * (ratio.value - 1):+.0f} ± {100 * ratio.error:.0f} %"


def _rate(x: float | None) -> str:
    return "-" if x is None else f"{x:.{0 if x >= 100 else 1 if x >= 10 else 2}f}"


def parse_pair(text: str) -> tuple[str, str]:
    """"q6_K+q4_K" -> ("q6_k", "q4_k"); ValueError."""
    match = re.fullmatch(r"\s*(\w+)\+(\w+)\s*", text)
    if not match:
        raise ValueError(f"a pair is a high and a low type, such as q6_K+q4_K, not {text!r}")
    return match[1].lower(), match[2].lower()


def default_pairs(types: list[str]) -> list[tuple[str, str]]:
    """Types two steps apart: one step saves too little for what the low copies take, three lose too much."""
    return list(zip(types, types[2:]))


def frontier(model, *, text, cache, types=None, pairs=None, thresholds=THRESHOLDS, policies=("hobbit",), low_fraction: float = 0.0,
             n_ctx: int = N_CTX, chunks: int | None = None, speed: float | None = None, work=None, progress: bool = False,
             say=lambda text: None, **arguments) -> Report:
    """Measure uniform types and mixed settings under one budget.

    model       a GGUF wide enough to make the types from, or a converted one: then its high copies are the reference
    text        file; chunks of n_ctx tokens spread evenly over it are decoded token by token for each setting
    cache       bytes, "8GiB", or "25%" of all experts as given: the same bytes for every setting
    types       uniform types; default: the k-quants and q8_0 that are narrower than the model's
    pairs       (high, low) of mixed settings, each with all thresholds and policies; default: types two steps apart.
                () for none
    thresholds  (t1, t2); equal ones skip what is beyond
    speed       bytes/s of loads, for the prediction; default: the storage's, or of link and CPU where misses lie in host memory, measured
    work        folder for the models that are made and kept for later runs; default: MODEL-tuning in the current folder
    say         called with a line about what is being done
    arguments   for Llama: n_threads, n_gpu_layers, n_io_threads, ...

    Raises ValueError (ConvertError is one) in one sentence, OSError, HobbitError.
    """
    if chunks is not None:
        check_int("chunks", chunks, 1, 2**31 - 1)
    check_budget(cache)
    check_number("low_fraction", low_fraction, 0, 1)
    if speed is not None:
        check_number("speed", speed, 1, unit=" bytes/s")
    check_text(text)  # before models are made
    with Models(model, work, threads=arguments.get("n_threads"), progress=progress, say=say) as models:
        names = models.ladder(types)
        pairs = [p for p in default_pairs(names) if models.possible(*p)] if pairs is None else [tuple(models.check(t) for t in p) for p in pairs]
        settings = [Setting(*models.uniform(t), 1.0, 1.0, policy) for policy in policies for t in (models.own, *names)]
        settings += [Setting(high, low, t1, t2, policy, low_fraction)
                     for (high, low), (t1, t2), policy in itertools.product(pairs, thresholds, policies)]
        for s in settings:
            models.stored(s.high, s.low)  # whether it can be made is told before anything is
        with Bench(models, text, n_ctx=n_ctx, pick=lambda found: spread(found, chunks), progress=progress, **arguments) as bench:
            trace = bench.record()
            budget = budget_bytes(cache, trace.layers)
            predictor = Predictor(models, trace, budget, n_io_threads=arguments.get("n_io_threads") or 4)
            predicted = predictor.predict(settings)
            if not any(predicted):
                raise ValueError(f"{format_bytes(budget)} are below what one token can need for every setting: give more --cache")
            given, points = speed is not None, []
            for i, (setting, p) in enumerate(zip(settings, predicted), 1):
                if p is None:
                    continue
                say(f"{i} of {len(settings)}: {setting}")
                found = bench.measure(setting, budget)
                if speed is None:
                    speed = found.miss_speed or storage_speed(models, setting, trace, arguments.get("n_io_threads") or 4)
                points.append(_point(models, setting, p, found, speed))
            return Report(os.fspath(model), os.fspath(text), models.own, budget, speed, given, bench.n_tokens, bench.n_scored, _marked(points, models.own),
                          [str(s) for s, p in zip(settings, predicted) if p is None])


def _point(models: Models, setting: Setting, p, found: Measured, speed: float) -> Point:
    return Point(setting, found.divergence.kl_mean, found.divergence.same_top, found.bytes_per_token, found.hit_rate, found.tokens_per_second,
                 p.bytes_per_token, speed / p.bytes_per_token if p.bytes_per_token else None,
                 models.stored(setting.high, None if setting.uniform else setting.low))


def _marked(points: list[Point], own: str) -> list[Point]:
    """The points with pareto and over_uniform."""
    on = pareto([(p.bytes_per_token, p.kl.value) for p in points])
    out = []
    for p, best in zip(points, on):
        line = [(q.bytes_per_token, q.kl.value, q.kl.error) for q in points if q.setting.uniform and q.setting.high != own and q.setting.policy == p.setting.policy]
        equal = None if p.setting.uniform else at_equal_loss(line, p.kl.value, p.kl.error)
        ratio = None if equal is None else Value(p.bytes_per_token / equal[0], p.bytes_per_token / equal[0] * equal[1])
        out.append(dataclasses.replace(p, pareto=best, over_uniform=ratio))
    return out
