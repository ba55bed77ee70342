"""What an evaluation found, as dataclasses, as plain values, and as a table."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ._evaluate_pairs import PairScores
from ._evaluate_stats import Divergence, Value
from ._evaluate_structured import JsonScores, ToolScores
from .memory import format_budget, format_bytes

TITLES = {"served": "as served", "worst": "worst case", "high": "all high", "ordinary": "ordinary file", "reference": "reference"}


@dataclass(frozen=True)
class Run:
    """One pass over everything. What was not asked for, or has no meaning, is None.

    mode        "served" or "worst"; "high" where every expert comes at high precision anyway (t1 >= 1), so that modes do
                not differ; "ordinary" for an ordinary GGUF; "reference"
    model       path
    perplexity  of the text
    divergence  from the reference on the text
    pairs, json, tools   minimal pairs; JSON under a grammar; the structure of tool calls
    totals      counters of the whole run (stats.py), None for an ordinary GGUF
    settings    those in force (Llama.offload_stats), None for an ordinary GGUF
    passes, pass_seconds   forward passes over the text and pairs, and the time they took
    seconds     it took, loading included
    """
    mode: str
    model: str
    perplexity: Value | None
    divergence: Divergence | None
    pairs: PairScores | None
    json: JsonScores | None
    tools: ToolScores | None
    totals: dict | None
    settings: dict | None
    passes: int
    pass_seconds: float
    seconds: float


@dataclass(frozen=True)
class Report:
    """Result of evaluate(). reference is None where there was none; n_tokens are those of the text that count."""
    model: str
    text: str | None
    n_ctx: int
    n_chunks: int
    n_tokens: int
    pairs: str | None
    reference: Run | None
    runs: list[Run]

    @property
    def json_parsed(self) -> bool:
        """Did every JSON text of every run parse?"""
        return all(r.json is None or r.json.parsed == r.json.n for r in self._all())

    def _all(self) -> list[Run]:
        return ([] if self.reference is None else [self.reference]) + self.runs

    def to_dict(self) -> dict:
        """Everything as plain values, ready for JSON. Shares are from 0 to 1, divergences in nats; numbers that are not
        finite are None."""
        return _plain(dataclasses.asdict(self))

    def table(self) -> str:
        """The table that the command prints: a column for each run, several lines."""
        runs = self._all()
        rows = [row for row in _rows(runs) if any(cell for cell in row[1:])]
        head = ("", *(TITLES[r.mode] for r in runs))
        cells = [tuple(cell or "-" for cell in row) for row in rows]
        width = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
        lines = [*self._about(), ""]
        lines += ["  ".join(v.ljust(w) if i == 0 else v.rjust(w) for i, (v, w) in enumerate(zip(row, width))).rstrip() for row in (head, *cells)]
        if any(cell and "±" in cell for row in cells for cell in row):
            lines.append("\n±: standard error, over tokens that are taken for independent")
        return "\n".join(lines)

    def _about(self) -> list[str]:
        lines = [self.model]
        with_settings = next((r for r in self.runs if r.settings), None)
        if with_settings:
            s = with_settings.settings
            if with_settings.mode == "high":
                lines[0] += ": every expert at high precision"
            else:
                lines[0] += f": T1 {s['t1']:g}, T2 {s['t2']:g}, policy {s['policy']}, cache {format_budget(s['cache_bytes'])}"
            if s["profile"]:
                lines.append(f"profile: {s['profile']}")
        if self.reference is not None:
            lines.append(f"reference: {'the same file' if self.reference.model == self.model else self.reference.model}"
                         + (", every expert at high precision" if self.reference.settings else ""))
        if self.text is not None:
            lines.append(f"{self.text}: {self.n_chunks} chunk{'s' if self.n_chunks > 1 else ''} of {self.n_ctx} tokens, "
                         f"of which the second half counts: {self.n_tokens} tokens")
        return lines


def _plain(x):
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x


# --- the table ---

def _number(v: Value | None, digits: int, scale: float = 1, unit: str = "") -> str:
    if v is None:
        return ""
    error = "" if v.error is None else f" ± {scale * v.error:.{digits}f}"
    return f"{scale * v.value:.{digits}f}{error}{unit}"


def _small(v: Value | None) -> str:
    """A divergence: places enough for two digits of its error, and at least four."""
    if v is None:
        return ""
    digits = 4
    if v.error:
        digits = min(9, max(4, 1 - math.floor(math.log10(v.error))))
    return _number(v, digits)


def _percent(v: Value | None) -> str:
    return _number(v, 2, 100, " %")


def _rows(runs: list[Run]):
    """(name, a cell for each run); "" where a run has no such number."""
    def row(name, part, cell):
        return (name, *("" if part(r) is None else cell(part(r)) for r in runs))

    def text(r): return r.perplexity
    def far(r): return r.divergence
    def pairs(r): return r.pairs
    def tools(r): return r.tools
    def totals(r): return None if r.mode == "reference" else r.totals

    return [
        row("perplexity", text, lambda v: _number(v, 3)),
        row("ln(perplexity / reference's)", far, lambda d: _small(d.ln_ratio)),
        row("KL divergence: mean", far, lambda d: _small(d.kl_mean)),
        row("  median", far, lambda d: _small(d.kl_median)),
        row("  99th percentile", far, lambda d: _small(d.kl_99)),
        row("  greatest", far, lambda d: f"{d.kl_max:.4f}"),
        row("same first choice", far, lambda d: _percent(d.same_top)),
        row("change of probability, RMS", far, lambda d: _percent(d.dp_rms)),
        row("minimal pairs: right", pairs, lambda p: _percent(p.accuracy)),
        row("  more than the reference", lambda r: r.pairs and r.pairs.difference, _percent),
        row("  same choice as the reference", lambda r: r.pairs and r.pairs.same_choice, _percent),
        row("JSON under a grammar: parsed", lambda r: r.json, lambda j: f"{j.parsed} of {j.n}"),
        row("  tokens it wanted by itself", lambda r: r.json and r.json.first_choice, _percent),
        row("tool calls: structure expected", tools, lambda t: _percent(t.right)),
        row("  of what the reference expects", lambda r: r.tools and r.tools.kept, _percent),
        row("  calls without a slip", tools, lambda t: f"{round(t.whole_calls.value * t.n_calls)} of {t.n_calls}"),
        row("  ln(perplexity / reference's)", lambda r: r.tools and r.tools.ln_ratio, _small),
        row("experts at high / low / skipped", totals, lambda t: f"{100 * t['share_high']:.1f} / {100 * t['share_low']:.1f} / {100 * t['share_skip']:.1f} %"),
        row("  found in memory", totals, lambda t: f"{100 * t['hit_rate']:.1f} %"),
        row("  read per token", totals, lambda t: format_bytes(t["bytes_per_token"])),
        row("seconds", lambda r: r.seconds, lambda s: f"{s:.1f}"),
    ]
