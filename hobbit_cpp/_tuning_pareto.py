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


def at_equal_loss(line, loss: float) -> float | None:
    """Cost at which the line through (cost, loss) points, straight in both logarithms between neighbours, has that loss.

    The points must fall: the costlier, the less loss; those that do not (another has less of both) are left out. None
    beyond the line's ends, and where the loss is 0.
    """
    line = [p for p, on in zip(line, pareto(line)) if on and min(p) > 0]
    line = sorted(set(line))
    if loss <= 0:
        return None
    for (c0, l0), (c1, l1) in zip(line, line[1:]):
        if l1 <= loss <= l0:
            share = math.log(loss / l0) / math.log(l1 / l0)
            return math.exp(math.log(c0) + share * math.log(c1 / c0))
    return None
