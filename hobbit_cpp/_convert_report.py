"""What a conversion did, as numbers and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from gguf_tools.info import merge_layers

from ._convert_plan import PROJECTIONS, Copies
from ._convert_run import Errors


@dataclass(frozen=True)
class Row:
    """All tensors of one copy, projection, and pair of types."""
    copy: str            # "high" or "low"
    projection: str      # gate, up, gate_up, down
    asked: str           # type asked for
    used: str            # type written
    tensors: int
    bytes: int
    weights: int         # number of weights
    error: float | None  # mean squared error / mean square; None if copied unchanged

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.bytes / self.weights


@dataclass
class Report:
    """Result of convert(). Sizes in bytes."""
    source: str
    main: str
    sidecar: str              # its first file
    parts: int                # files of the sidecar
    description: str          # one line about the source
    rows: list[Row]
    high_bytes: int           # all high copies (linked: in the source)
    low_bytes: int
    main_bytes: int           # size of the main file
    sidecar_bytes: int
    link: bool
    seconds: float
    fallbacks: list[str] = field(default_factory=list)  # as in hobbit.fallbacks
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Bytes of the low copies / bytes of the high copies."""
        return self.low_bytes / self.high_bytes

    def to_dict(self) -> dict:
        """Everything, as plain values; rows with their bits per weight."""
        return {**asdict(self), "ratio": self.ratio, "rows": [{**asdict(r), "bits": r.bits} for r in self.rows]}

    def table(self) -> str:
        """The summary that the command prints, several lines."""
        head = ("copy", "projection", "asked", "used", "tensors", "MiB", "bits/weight", "rel. MSE")
        cells = [(r.copy, r.projection, r.asked, r.used, str(r.tensors), f"{r.bytes / 2**20:,.1f}", f"{r.bits:.3f}",
                  "unchanged" if r.error is None else f"{r.error:.2e}") for r in self.rows]
        width = [max(map(len, column)) for column in zip(head, *cells)]
        lines = ["  ".join(v.ljust(w) if i < 4 else v.rjust(w) for i, (v, w) in enumerate(zip(line, width)))
                 for line in (head, *cells)]
        lines.append("rel. MSE: mean squared error / mean square; high against the source, low against high")
        where = "in the source (linked)" if self.link else "in the sidecar"
        lines.append(f"low/high: {self.low_bytes / 2**20:,.1f} MiB / {self.high_bytes / 2**20:,.1f} MiB = {self.ratio:.3f}; "
                     f"high copies {where}")
        if self.fallbacks:
            lines.append(f"other types than asked for, {len(self.fallbacks)} of {sum(r.tensors for r in self.rows)} copies:")
            lines += [f"  {f}" for f in merge_layers(self.fallbacks)]
        lines += [f"note: {n}" for n in self.notes]
        lines.append(f"wrote {self.main} ({self.main_bytes / 2**20:,.1f} MiB)")
        more = f" and {self.parts - 1} more part{'s' if self.parts > 2 else ''}" if self.parts > 1 else ""
        lines.append(f"wrote {self.sidecar}{more} ({self.sidecar_bytes / 2**20:,.1f} MiB) in {self.seconds:.1f} s")
        return "\n".join(lines)


def summarize(experts: list[Copies], errors: dict[str, Errors]) -> list[Row]:
    """One Row per copy, projection and types, high copies first."""
    groups: dict[tuple, list[Copies]] = {}
    for which in ("high", "low"):
        for c in experts:
            asked, used = (c.high_asked, c.high.name) if which == "high" else (c.low_asked, c.low.name)
            unchanged = which == "high" and c.keeps_high
            groups.setdefault((which, c.projection, asked, used, unchanged), []).append(c)
    order = sorted(groups, key=lambda k: (k[0], k[1].startswith("ch"), PROJECTIONS.index(k[1].removeprefix("ch")), k[2:]))
    rows = []
    for key in order:
        which, projection, asked, used, unchanged = key
        members = groups[key]
        sums = [errors[c.tensor.name] for c in members]
        error = sum(e.high_error if which == "high" else e.low_error for e in sums)
        square = sum(e.source if which == "high" else e.high for e in sums)
        rows.append(Row(which, projection, asked, used, len(members), sum(c.nbytes(which) for c in members),
                        sum(c.n_weights for c in members), None if unchanged else error / square if square else 0.0))
    return rows
