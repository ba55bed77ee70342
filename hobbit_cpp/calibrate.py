"""The fastest setting under a memory budget whose quality is within a limit, plain smaller types included.

    from hobbit_cpp.calibrate import calibrate
    found = calibrate("mixtral-f16.gguf", text="book.txt", budget="12GiB", max_kl=0.005)
    print(found.report())                         # and in found.model + .profile.json, which Llama takes its settings from

docs/choosing-settings.md says how to use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass

import numpy as np

from . import waterfill
from ._calibrate_search import SKIP_AT, Finalist, choose, grid, judge_types, shortlist, standing
from ._evaluate_stats import Value
from ._paths import check_folder, check_text
from ._progress import Progress
from ._tuning_measure import N_CTX, Bench, Measured, Setting, budget_bytes, check_budget, spread
from ._tuning_models import Models, shown
from ._tuning_pareto import at_equal_loss
from ._tuning_predict import Predictor, wanted
from ._tuning_speed import storage_speed
from .convert import convert
from .memory import format_bytes
from .profiles import Profile, path_for
from .settings import check_int, check_number

__all__ = ["Calibration", "calibrate"]

PROMISE = 0.1  # of the predicted bytes per token, on text that nothing was fitted on
ERRORS = 2     # standard errors within which the divergence on that text must be under the limit


@dataclass(frozen=True)
class Calibration:
    """Result of calibrate(). Bytes a token, nats, tokens per second, bytes/s.

    model      main file of the pair; profile: the file beside it, None where the quality on unseen text was not kept
    uniform    {type: mean KL of all experts at it}, of the types that were judged
    predicted_bytes, predicted_kl    from the fitting text, by simulator and formula
    fitted     measured on the fitting text; unseen: on text that nothing was fitted on
    equal_uniform   bytes of a uniform type with the divergence fitted, by the simulator; None where there is no such type
    ceiling    bits of any allotment of bits by gate weight at that divergence; None likewise
    ceiling_gain    bytes of a uniform type of ceiling.bits over those of one of ceiling.mean_bits, on the line of the uniform types
    fits       uniform types within the limit whose experts all fit into the budget, widest first
    """
    model: str
    profile: str | None
    source: str
    own: str
    text: str
    setting: Setting
    cache_bytes: int
    max_kl: float
    speed: float
    uniform: dict[str, Value]
    n_predicted: int
    finalists: list[Finalist]
    predicted_bytes: float
    predicted_kl: float
    fitted: Measured
    unseen: Measured
    n_tokens: int
    equal_uniform: float | None
    ceiling: waterfill.Ceiling | None
    ceiling_gain: float | None
    best_uniform: tuple[str, float] | None  # within the limit as far as is known: name, predicted bytes
    best_mixed: tuple[str, float] | None    # likewise
    fits: list[str]
    storage_bytes: int

    @property
    def bytes_off(self) -> float:
        """Unseen over predicted, minus 1."""
        return self.unseen.bytes_per_token / self.predicted_bytes - 1 if self.predicted_bytes else 0.0

    @property
    def bytes_kept(self) -> bool:
        return abs(self.bytes_off) <= PROMISE

    @property
    def quality_kept(self) -> bool:
        kl = self.unseen.divergence.kl_mean
        return self.setting == dataclasses.replace(self.setting, high=self.own, t1=1.0) or kl.value - ERRORS * (kl.error or 0.0) <= self.max_kl

    @property
    def gain(self) -> float | None:
        """Bytes of a uniform type of the same divergence over the setting's."""
        if self.setting.uniform:
            return 1.0
        return self.equal_uniform / self.fitted.bytes_per_token if self.equal_uniform and self.fitted.bytes_per_token else None

    def to_dict(self) -> dict:
        """Plain values, ready for JSON."""
        return {**dataclasses.asdict(self), "name": str(self.setting), "bytes_off": self.bytes_off, "bytes_kept": self.bytes_kept,
                "quality_kept": self.quality_kept, "gain": self.gain}

    def report(self) -> str:
        """What the command prints."""
        s, kl, fit = self.setting, self.unseen.divergence.kl_mean, self.fitted.divergence.kl_mean
        lines = [self._answer(), "",
                 f"{self.n_predicted} settings predicted, {len(self.finalists)} measured; {format_bytes(self.cache_bytes)} for experts; "
                 f"limit: mean KL {self.max_kl:g} to all experts as given ({shown(self.own)})", "",
                 f"{'':<24}{'predicted':>14}{'fitting text':>22}{'unseen text':>22}",
                 f"{'loaded per token':<24}{_kb(self.predicted_bytes):>14}{_kb(self.fitted.bytes_per_token):>22}{_kb(self.unseen.bytes_per_token):>22}   "
                 f"{100 * self.bytes_off:+.1f} % to the prediction, {'within' if self.bytes_kept else 'NOT within'} the promised {100 * PROMISE:.0f} %",
                 f"{'mean KL':<24}{self.predicted_kl:>14.5f}{_pm(fit):>22}{_pm(kl):>22}   {self._quality(kl)}",
                 f"{'tok/s':<24}{_rate(self.predicted_bytes, self.speed):>14}{self.fitted.tokens_per_second:>22.1f}{self.unseen.tokens_per_second:>22.1f}   "
                 f"predicted: loads alone, at {format_bytes(self.speed)}/s",
                 "", *self._ceiling()]
        profile = f"profile: {self.profile} (hobbit run uses it; its flags come first)" if self.profile else \
            "no profile was written: give more --chunks, or a lower --max-kl to leave room"
        lines += ["", f"experts on disk: {format_bytes(self.storage_bytes)}" + ("" if s.uniform else f"; {shown(s.high)} alone would take less (hobbit frontier lists both)"),
                  f"model: {self.model}", profile]
        return "\n".join(lines)

    def _answer(self) -> str:
        s = self.setting
        if s.uniform:
            text = f"Take {shown(s.high)} for all experts (policy {s.policy}): "
            if self.best_mixed:
                more = 100 * (self.best_mixed[1] / self.predicted_bytes - 1) if self.predicted_bytes else 0
                text += f"no mixed setting within the limit loads less; the best, {self.best_mixed[0]}, loads {more:.0f} % more."
            else:
                text += "no mixed setting is within the limit."
        else:
            text = f"Take {s}."
            if self.best_uniform:
                less = 100 * (1 - self.predicted_bytes / self.best_uniform[1])
                text += f" It loads {less:.0f} % less than the best uniform type within the limit, {shown(self.best_uniform[0])}."
            else:
                text += " No uniform type here is within the limit."
        if self.fits:
            kind = shown(self.fits[0])
            text += f"\nBut all experts as {kind} fit into this memory: an ordinary {kind} file runs without any loading, and is the better choice."
        return text

    def _quality(self, kl: Value) -> str:
        if kl.value <= self.max_kl:
            return f"under the limit of {self.max_kl:g}"
        return f"{'over the limit, within error bars' if self.quality_kept else 'OVER THE LIMIT'} ({self.max_kl:g})"

    def _ceiling(self) -> list[str]:
        if not self.ceiling:
            return ["No uniform type has this divergence: nothing to compare the setting with."]
        reached = "is uniform: 1.00x" if self.setting.uniform else "cannot be compared" if self.gain is None else f"reaches {self.gain:.2f}x"
        most = "" if self.ceiling_gain is None else f", about {self.ceiling_gain:.2f}x fewer bytes under this budget"
        return [f"At this divergence a uniform type has {self.ceiling.bits:.2f} bits; the best allotment of bits by gate weight (water-filling) would have "
                f"{self.ceiling.mean_bits:.2f}{most}.", f"The chosen setting {reached}."]


def _kb(n: float) -> str:
    return f"{n / 1000:,.0f} kB"


def _pm(v: Value) -> str:
    return f"{v.value:.5f}" + ("" if v.error is None else f" ± {v.error:.5f}")


def _rate(n: float, speed: float) -> str:
    return f"{speed / n:.1f}" if n else "-"


def calibrate(model, *, text, budget, max_kl: float, types=None, n_ctx: int = N_CTX, chunks: int | None = None, speed: float | None = None,
              output=None, force: bool = False, work=None, progress: bool = False, say=lambda text: None, **arguments) -> Calibration:
    """Find the setting that loads least per token with a mean KL divergence of at most max_kl.

    model    a GGUF wide enough to make the types from, or a converted one: then its high copies are the reference
    text     file; 2 x chunks chunks of n_ctx tokens, spread evenly over it, in turn for fitting and for the measurement after it
    budget   memory for experts, as `cache` of frontier()
    max_kl   nats, of the mean over tokens, to all experts as given
    types    to judge, high and low; default: the k-quants and q8_0 that are narrower than the model's
    output   NAME.gguf for the pair; default: it stays in the work folder. force: replace it
    speed, work, say, arguments   as for frontier()

    The profile is written beside the pair, unless the divergence on unseen text is over the limit by more than the error
    bars. Raises ValueError (ConvertError is one) where nothing is within the limit or
    something is wrong with an argument or file, OSError, HobbitError.
    """
    if chunks is not None:
        check_int("chunks", chunks, 1, 2**31 - 1)
    check_budget(budget)
    check_number("max_kl", max_kl, 1e-6, unit=" nats")
    if speed is not None:
        check_number("speed", speed, 1, unit=" bytes/s")
    if output is not None:
        output = os.fspath(output)
        if not output.endswith(".gguf"):
            raise ValueError(f"the output must be called NAME.gguf, not {output}")
        check_folder(output)
        if os.path.exists(output) and not force:
            raise ValueError(f"{output} exists already: give another output name, or --force to replace it")
    check_text(text)  # before models are made
    with Models(model, work, threads=arguments.get("n_threads"), progress=progress, say=say) as models:
        ladder = models.ladder(types)

        def part(i):
            return Bench(models, text, n_ctx=n_ctx, pick=lambda found: spread(found, chunks, i, 2), progress=progress, **arguments)

        with part(0) as bench:
            trace = bench.record()
            cache = budget_bytes(budget, trace.layers)
            uniform = judge_types(bench, ladder, max_kl, say)
            predictor = _predictor(bench, models, trace, cache, uniform, arguments)
            settings = grid(models, ladder, uniform, max_kl)
            bar = Progress(1, progress, "settings/s", 1, "predicting")
            candidates = shortlist(predictor, settings, max_kl, arguments.get("n_threads"), bar)
            bar.clear()
            if not candidates:
                raise ValueError(f"no setting is within a mean KL of {max_kl:g} under {format_bytes(cache)}: give more --budget or a higher --max-kl")
            chosen, finalists = choose(bench, candidates, max_kl, cache, say)
        left = standing(candidates, finalists, max_kl)
        if chosen is None:
            raise ValueError(f"none of the {len(finalists)} settings measured is within a mean KL of {max_kl:g}, though they were predicted to be: "
                             "give a higher --max-kl or more --chunks")
        setting = chosen.predicted.setting
        say(f"chosen: {setting}; measuring on unseen text")
        with part(1) as test:
            unseen, n_tokens = test.measure(setting, cache), test.n_tokens
        if speed is None:
            speed = unseen.miss_speed or storage_speed(models, setting, trace, predictor.n_io_threads)
        path = _deliver(models, setting, output, force, arguments.get("n_threads"), progress, say)
        line, ceiling, ceiling_gain = _comparison(predictor, models, uniform, chosen)
        result = Calibration(
            model=path, profile=path_for(path), source=models.source, own=models.own, text=os.fspath(text), setting=setting, cache_bytes=cache,
            max_kl=float(max_kl), speed=speed, uniform=uniform, n_predicted=bar.done, finalists=finalists,
            predicted_bytes=chosen.predicted.bytes_per_token, predicted_kl=chosen.predicted.kl, fitted=chosen.measured, unseen=unseen, n_tokens=n_tokens,
            equal_uniform=line, ceiling=ceiling, ceiling_gain=ceiling_gain, best_uniform=_best(left, True), best_mixed=_best(left, False),
            fits=[t for t in ladder if t in uniform and uniform[t].value <= max_kl and models.stored(t, None) <= cache],
            storage_bytes=models.stored(setting.high, None if setting.uniform else setting.low))
        if not result.quality_kept:
            return dataclasses.replace(result, profile=None)
        _write_profile(result)
        return result


def _predictor(bench: Bench, models: Models, trace, cache: int, uniform: dict[str, Value], arguments: dict) -> Predictor:
    _, square = wanted(trace.rows["weight"], SKIP_AT, SKIP_AT)
    skip = bench.skipping(SKIP_AT).kl_mean.value / square.skip if square.skip > 0 else None
    return Predictor(models, trace, cache, {t: v.value for t, v in uniform.items()}, skip, n_io_threads=arguments.get("n_io_threads") or 4)


def _best(candidates, uniform: bool):
    p = next((p for p in candidates if p.setting.uniform == uniform), None)
    return p and (p.setting.high if uniform else str(p.setting), p.bytes_per_token)


def _comparison(predictor: Predictor, models: Models, uniform: dict[str, Value], chosen: Finalist):
    """(bytes of a uniform type of the chosen setting's divergence, the ceiling there in bits, and its gain in bytes)."""
    s, kl = chosen.predicted.setting, chosen.kl.value
    loads = predictor.predict([Setting(*models.uniform(t), 1.0, 1.0, s.policy) for t in uniform])
    known = [(models.bits(t), p.bytes_per_token, uniform[t].value) for t, p in zip(uniform, loads) if p]
    equal = at_equal_loss([(n, loss, None) for _, n, loss in known], kl)
    equal_bytes = equal and equal[0]
    equal = (models.bits(s.high), 0) if s.uniform else at_equal_loss([(bits, loss, None) for bits, _, loss in known], kl)
    if equal is None:
        return equal_bytes, None, None
    equal_bits = equal[0]
    most = max(equal_bits, models.bits(models.own if s.uniform else s.high))
    used = predictor.trace.rows["expert"] >= 0
    ceiling = waterfill.ceiling(np.asarray(predictor.g, np.float64)[used], equal_bits, most)
    ends = [_bytes_at(known, bits) for bits in (ceiling.bits, ceiling.mean_bits)]
    return equal_bytes, ceiling, ends[0] / ends[1] if all(ends) else None


def _bytes_at(known, bits: float) -> float | None:
    """Bytes per token of a uniform type of so many bits, straight in both logarithms between the known ones; None beyond."""
    line = sorted((b, n) for b, n, _ in known if n > 0)
    if not line or not line[0][0] <= bits <= line[-1][0]:
        return None
    return float(np.exp(np.interp(np.log(bits), *np.log(np.array(line).T))))


def _deliver(models: Models, s: Setting, output, force: bool, threads, progress: bool, say) -> str:
    if output is None:
        return models.pair(s.high, s.low)
    say(f"writing {output}")
    convert(models.source, output, models.asked(s.high), s.low, force=force, threads=threads, progress=progress)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path_for(output))  # of the pair that was replaced
    return output


def _write_profile(c: Calibration) -> None:
    from gguf_tools.reader import Reader

    with Reader(c.model) as reader:
        pair = reader.get("hobbit.pair_id")
    kl = c.unseen.divergence.kl_mean
    found = {"setting": str(c.setting), "max_kl": c.max_kl, "cache_bytes": c.cache_bytes, "text": os.path.basename(c.text),
             "predicted_bytes_per_token": c.predicted_bytes, "unseen_bytes_per_token": c.unseen.bytes_per_token,
             "unseen_kl": kl.value, "unseen_kl_error": kl.error, "reference": c.own}
    Profile(c.profile, pair, {**c.setting.arguments, "cache_bytes": c.cache_bytes}, found).save()
