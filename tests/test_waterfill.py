"""Reverse water-filling on cases that can be worked out by hand."""

import itertools

import numpy as np
import pytest

from hobbit_cpp.waterfill import allot, ceiling


def test_two_uses_by_hand():
    # g^2 = 1 and 1/4, 3 bits: mean distortion 5/8 / 64. Both uses get that distortion: 4^-b = 5/512 and 4 x 5/512.
    first = 0.5 * np.log2(512 / 5)
    assert allot([1, 0.5], 3, 8) == pytest.approx([first, first - 1])
    c = ceiling([1, 0.5], 3, 8)
    assert c.mean_bits == pytest.approx(first - 0.5) and c.gain == pytest.approx(3 / (first - 0.5))


def test_what_is_worth_less_than_the_level_gets_nothing():
    # g^2 = 1 and 1/64, 1 bit: mean distortion 65/512, of which the second use, without bits, has half of 1/64: 65/256 - 1/64 = 61/256 is left
    assert allot([1, 0.125], 1, 8) == pytest.approx([0.5 * np.log2(256 / 61), 0])


def test_not_more_than_the_high_type():
    # 3 bits for all of [1, 1/2] would give the first 3.34: with at most 3.2 the second makes up for it
    b = allot([1, 0.5], 3, 3.2)
    assert b[0] == 3.2 and (4.0 ** -b * [1, 0.25]).mean() == pytest.approx(5 / 512)
    assert allot([1, 0.5], 3, 3) == pytest.approx([3, 3])


def test_equal_weights_gain_nothing():
    assert ceiling(np.full((5, 2), 0.5), 4.5, 8.5).gain == pytest.approx(1)
    assert ceiling([0.7, 0.3, 0.0], 0, 8).mean_bits == pytest.approx(0)


@pytest.mark.parametrize("bits, most", [(2.0, 4.0), (1.0, 3.0), (3.0, 3.5)])
def test_nothing_on_a_grid_is_better(bits, most):
    g = np.array([0.62, 0.3, 0.05, 0.03])
    best = allot(g, bits, most)
    limit = (g * g * 4.0 ** -best).mean()
    assert limit == pytest.approx((g * g).mean() * 4.0 ** -bits) and (best >= 0).all() and (best <= most).all()
    steps = np.arange(0, most + 1e-9, 0.25)
    within = [b for b in itertools.product(steps, repeat=4) if (g * g * 4.0 ** -np.array(b)).mean() <= limit]
    assert within and min(map(sum, within)) >= best.sum() - 1e-9


@pytest.mark.parametrize("g, bits, most", [([], 1, 2), ([0, 0], 1, 2), ([1, -1], 1, 2), ([1, np.nan], 1, 2), ([1], 3, 2), ([1], -1, 2)])
def test_bad_arguments(g, bits, most):
    with pytest.raises(ValueError):
        ceiling(g, bits, most)
