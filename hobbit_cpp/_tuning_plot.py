"""The plane of a frontier as a picture (altair, an optional extra: plot)."""

from __future__ import annotations

import os

from ._paths import check_folder
from ._tuning_models import shown

WIDTH, HEIGHT = 560, 380  # points


def check(paths) -> None:
    """ValueError where a picture could not be drawn or written."""
    for path in paths:
        kind = os.path.splitext(path)[1].lower()
        if kind not in (".png", ".html"):
            raise ValueError(f"{path} is no name for a picture: --png takes NAME.png, --html NAME.html")
        check_folder(path)
    _altair()


def _altair():
    try:
        import altair
        import vl_convert  # noqa: F401  draws PNGs and holds the scripts of a self-contained HTML
    except ImportError as error:
        raise ValueError(f"drawing needs altair and vl-convert-python ({error}): pip install '.[plot]' in hobbit-cpp's folder, or leave out --png and --html") from None
    return altair


def save(report, path: str) -> None:
    """Write a frontier.Report as NAME.png or NAME.html, under a temporary name first."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{os.getpid()}.{name}")
    try:
        _chart(report).save(temporary, **({"inline": True} if name.lower().endswith(".html") else {"ppi": 80}))
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _chart(report):
    alt = _altair()
    # both axes are logarithms; the reference itself differs from itself by rounding alone
    rows = [_row(p) for p in report.points if not (p.setting.uniform and p.setting.high == report.own) and p.kl.value > 0 and p.bytes_per_token > 0]
    if not rows:
        raise ValueError("there is nothing to draw: no setting lost or loaded anything")
    x = alt.X("KB:Q", title="loaded per token, kB", scale=alt.Scale(type="log", nice=False, padding=30), axis=alt.Axis(tickCount=6))
    y = alt.Y("KL:Q", title="mean KL divergence, nats", scale=alt.Scale(type="log", nice=False, padding=20), axis=alt.Axis(tickCount=6))
    base = alt.Chart(alt.Data(values=rows))
    uniform = base.transform_filter("datum.kind == 'uniform type'")
    kinds = alt.Scale(domain=["uniform type", "mixed pair"], range=["#4c566a", "#c8553d"])
    line = uniform.mark_line(color="#4c566a", opacity=0.5, strokeDash=[4, 3]).encode(x=x, y=y, order="KB:Q")
    bars = base.mark_rule(opacity=0.6).encode(x=x, y=alt.Y("lower:Q", scale=alt.Scale(type="log")), y2="upper:Q", color=alt.Color("kind:N", scale=kinds))
    marks = base.mark_point(filled=True, size=70, opacity=1).encode(
        x=x, y=y, color=alt.Color("kind:N", scale=kinds, title=None), shape=alt.Shape("pareto:N", title=None, scale=alt.Scale(
            domain=["no other is better in both", "another is better in both"], range=["circle", "cross"])),
        tooltip=["setting:N", "KL:Q", "KB:Q", "tok/s:Q", "to uniform:N"])
    def names(below: bool, **where):  # what is below the line of the uniform types is named there, away from their names
        return base.transform_filter(f"datum.below == {str(below).lower()}").mark_text(fontSize=10, **where).encode(
            x=x, y=y, text="label:N", color=alt.Color("kind:N", scale=kinds))

    labels = names(True, align="right", dx=-7, dy=7) + names(False, align="left", dx=7, dy=-5)
    from .memory import format_bytes

    title = alt.TitleParams(f"{os.path.basename(report.model)}, {format_bytes(report.cache_bytes)} for experts",
                            subtitle=f"to all experts as {shown(report.own)}; {report.n_scored} tokens; bars: standard errors")
    return (line + bars + marks + labels).properties(width=WIDTH, height=HEIGHT, title=title)


def _row(p) -> dict:
    from .frontier import change

    error = p.kl.error or 0.0
    s = p.setting
    label = s.name if s.uniform else f"{s.name} {s.t1:g}/{s.t2:g}"
    return {"setting": str(s), "label": label + ("" if s.policy == "hobbit" else f" {s.policy}"), "kind": "uniform type" if s.uniform else "mixed pair", "KL": p.kl.value, "below": p.over_uniform is not None and p.over_uniform.value < 1,
            "lower": max(p.kl.value - error, p.kl.value / 10), "upper": p.kl.value + error, "KB": p.bytes_per_token / 1000,
            "tok/s": p.tokens_per_second, "pareto": "no other is better in both" if p.pareto else "another is better in both",
            "to uniform": "-" if p.over_uniform is None else change(p.over_uniform)}
