"""How much any allotment of bits by gate weight could save: reverse water-filling.

An expert's error enters a layer's output times the expert's gate weight g. With b bits a weight the mean square of the
rounding error falls as 2^(-2 b), so a use of an expert at b bits adds g^2 2^(-2 b) to the distortion. Of all allotments with
one mean distortion, the one with the fewest bits is (Cover and Thomas, Elements of Information Theory, section 10.3.3)

    b = log2(g^2 / level) / 2,   not below 0 and not above the bits of the high type,

with the level at which the mean distortion is the one asked for. A uniform type of B bits has mean(g^2) 2^(-2 B).
What no setting can reach: types come in steps, a copy in memory is used for all requests, and no cache is in this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

STEPS = 200  # halvings of the interval for the level's logarithm


@dataclass(frozen=True)
class Ceiling:
    """bits: of the uniform type; mean_bits: of the best allotment at the same distortion; gain: bits / mean_bits."""
    bits: float
    mean_bits: float

    @property
    def gain(self) -> float:
        return self.bits / self.mean_bits if self.mean_bits > 0 else float("inf")


def allot(g, bits: float, most: float) -> np.ndarray:
    """Bits of each use, float64 like g, with the mean distortion of `bits` for all and at most `most` bits each.

    g     gate weights of expert uses, any shape, at least 0, not all 0
    bits  of the uniform type, 0 to most
    ValueError for values outside.
    """
    g = np.asarray(g, np.float64)
    if not g.size or not np.isfinite(g).all() or (g < 0).any() or not (g > 0).any():
        raise ValueError("gate weights must be finite numbers of at least 0, not all 0")
    if not 0 <= bits <= most:
        raise ValueError(f"the uniform type's bits must be from 0 to those of the high type ({most:g}), not {bits:g}")
    square = g * g
    wanted = square.mean() * 4.0 ** -bits
    with np.errstate(divide="ignore"):
        log = np.where(square > 0, np.log2(square), -np.inf)

    def at(level):
        return np.clip((log - level) / 2, 0, most)

    # the distortion grows with the level; at the lower end every use that counts has the most bits, at the upper none has any
    low, high = log[square > 0].min() - 2 * most - 1, log.max()
    for _ in range(STEPS):
        middle = (low + high) / 2
        if (square * 4.0 ** -at(middle)).mean() > wanted:
            high = middle
        else:
            low = middle
    return at(low)


def ceiling(g, bits: float, most: float) -> Ceiling:
    """The fewest bits a use for the distortion of a uniform type; arguments as for allot()."""
    return Ceiling(float(bits), float(allot(g, bits, most).mean()))
