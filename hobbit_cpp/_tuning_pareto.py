"""Which points of the plane (cost, loss) are worth having, and how far each is from the line of the uniform types."""

from __future__ import annotations

import math


def pareto(points) -> list[bool]:
    """For each (cost, loss): is there no other that is at most as high in both and lower in one?"""
    order = sorted(range(len(points)), key=lambda i: tuple(points[i]))
    on, best = [False] * len(points), math.inf
    at = 0
    while at < len(order):
        cost = points[order[at]][0]
        same = [i for i in order[at:] if points[i][0] == cost]
        least = points[same[0]][1]
        if least < best:
            for i in same:
                on[i] = points[i][1] == least
            best = least
        at += len(same)
    return on


def at_equal_loss(line, loss: float, error: float | None = None) -> tuple[float, float] | None:
    """(cost, its relative error) at which the line through (cost, loss, error of the loss) points has a loss, itself with an error.

    Between neighbours the line is straight in both logarithms. Points that another undercuts in both are left out. Errors (None: 0)
    are taken for independent, and small. None beyond the line's ends, and where the loss is 0.
    """
    on = pareto([p[:2] for p in line])
    line = sorted({p for p, best in zip(line, on) if best and min(p[:2]) > 0})
    if loss <= 0:
        return None
    for (c0, l0, e0), (c1, l1, e1) in zip(line, line[1:]):
        if l1 <= loss <= l0:
            share = math.log(loss / l0) / math.log(l1 / l0)
            slope = math.log(c1 / c0) / math.log(l1 / l0)
            spread = math.hypot((error or 0) / loss, (1 - share) * (e0 or 0) / l0, share * (e1 or 0) / l1)
            return math.exp(math.log(c0) + share * math.log(c1 / c0)), abs(slope) * spread
    return None
