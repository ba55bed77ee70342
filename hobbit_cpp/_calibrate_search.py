"""The search of calibrate: many settings by prediction, few by measurement."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from ._evaluate_stats import Value
from ._tuning_measure import Bench, Measured, Setting
from ._tuning_models import Models, shown
from ._tuning_predict import Prediction, Predictor
from .settings import POLICIES

T1 = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
T2 = (0.9, 0.95, 1.0)  # and t1 itself: skip what is beyond
LOW_FRACTIONS = (0.0, 0.1, 0.25)
SKIP_AT = 0.9   # where the loss of skipping is measured
ABOVE = 2       # types to judge above the first that is within the limit: high halves of pairs
REFINED = 12    # settings whose policy and split of slots are varied
FINALISTS = 6   # measured at most


@dataclass(frozen=True)
class Finalist:
    """A setting that was predicted and then measured on the fitting text."""
    predicted: Prediction
    measured: Measured

    @property
    def kl(self) -> Value:
        return self.measured.divergence.kl_mean

    def within(self, max_kl: float) -> bool:
        # a uniform type was judged in batches; token by token only roundings differ
        return min(self.kl.value, self.predicted.kl if self.predicted.setting.uniform else self.kl.value) <= max_kl


def judge_types(bench: Bench, ladder: list[str], max_kl: float, say) -> dict[str, Value]:
    """{type: mean KL of all experts at it}, from the narrowest up to ABOVE types past the first within the limit."""
    found: dict[str, Value] = {}
    within = 0
    for kind in reversed(ladder):
        found[kind] = bench.quality(kind).kl_mean
        say(f"all experts {shown(kind)}: mean KL {found[kind].value:.5f}")
        within += found[kind].value <= max_kl
        if within > ABOVE:
            break
    return found


def grid(models: Models, ladder: list[str], quality: dict[str, Value], max_kl: float) -> list[Setting]:
    """Uniform types within the limit, and everything mixed that has one of them as the high type."""
    judged = [t for t in ladder if t in quality]  # widest first
    highs = [t for t in judged if quality[t].value <= max_kl]
    if len(judged) == len(ladder) and (not highs or len(highs) <= ABOVE):
        highs.insert(0, models.own)  # the ladder ended before the limit was passed by ABOVE types
    out = [Setting(*models.uniform(t), 1.0, 1.0) for t in highs]
    order = [models.own, *judged]
    for high in highs:
        lows = [low for low in order[order.index(high) + 1:] if models.possible(high, low)]
        out += [Setting(*models.uniform(high), t, t) for t in T1]
        out += [Setting(high, low, t1, t2) for low in lows for t1, t2 in itertools.product(T1, T2) if t2 >= t1]
    return out


def shortlist(predictor: Predictor, settings: list[Setting], max_kl: float, threads, bar) -> list[Prediction]:
    """Predictions within the limit, those that load least first, of the settings and of variations of the best."""
    hopeful = [s for s in settings if (least := predictor.bounds(s)[0]) is not None and least <= max_kl]
    bar.total = max(1, len(hopeful))
    found = [p for p in predictor.predict(hopeful, threads, bar.add) if p]
    good = sorted((p for p in found if p.kl is not None and p.kl <= max_kl), key=lambda p: p.bytes_per_token)
    best = good[:REFINED]
    best += [p for p in good[REFINED:] if p.setting.uniform][:1]
    varied = [dataclasses.replace(p.setting, policy=policy, low_fraction=share)
              for p in best for policy in POLICIES for share in (LOW_FRACTIONS if not p.setting.uniform else (0.0,))]
    varied = [s for s in varied if s not in {p.setting for p in found}]
    bar.total += len(varied)
    good += [p for p in predictor.predict(varied, threads, bar.add) if p and p.kl is not None and p.kl <= max_kl]
    return sorted(good, key=lambda p: p.bytes_per_token)


def choose(bench: Bench, candidates: list[Prediction], max_kl: float, cache_bytes: int, say) -> tuple[Finalist | None, list[Finalist]]:
    """(the best of those that were measured, all that were). What was measured corrects the divergence that is predicted for
    mixed settings that were not."""
    measured: list[Finalist] = []
    chosen = None
    while len(measured) < FINALISTS:
        done = {f.predicted.setting for f in measured}
        left = [p for p in standing(candidates, measured, max_kl) if p.setting not in done]
        if not left or (chosen and left[0].bytes_per_token >= chosen.predicted.bytes_per_token):
            break
        if len(measured) == FINALISTS - 1 and chosen is None:  # the last try: what is surest
            left = [p for p in left if p.setting.uniform] or left
        f = Finalist(left[0], bench.measure(left[0].setting, cache_bytes))
        say(f"measured {f.predicted.setting}: mean KL {f.kl.value:.5f} (predicted {f.predicted.kl:.5f}), "
            f"{f.measured.bytes_per_token / 1000:,.0f} kB a token (predicted {f.predicted.bytes_per_token / 1000:,.0f})")
        measured.append(f)
        if f.within(max_kl) and (chosen is None or f.predicted.bytes_per_token < chosen.predicted.bytes_per_token):
            chosen = f
    return chosen, measured


def standing(candidates: list[Prediction], measured: list[Finalist], max_kl: float) -> list[Prediction]:
    """Those that are within the limit as far as is known: by measurement, else by the corrected prediction."""
    known, ratio = {f.predicted.setting: f for f in measured}, _ratio(measured)

    def good(p):
        return known[p.setting].within(max_kl) if p.setting in known else (p.kl if p.setting.uniform else p.kl * ratio) <= max_kl

    return [p for p in candidates if good(p)]


def _ratio(measured: list[Finalist]) -> float:
    logs = [math.log(f.kl.value / f.predicted.kl) for f in measured if not f.predicted.setting.uniform and f.predicted.kl and f.kl.value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0
