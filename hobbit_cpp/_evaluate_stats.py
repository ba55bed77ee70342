"""Perplexity and divergence, defined as in llama.cpp's llama-perplexity (tools/perplexity/perplexity.cpp).

Where llama-perplexity rounds (exponentials in float32; with --kl-divergence the reference's log probabilities as
16-bit numbers in steps of 1/4096 nat, and nothing below e^-16), this computes in float64 from the logits as they are.

Error bars are standard errors over tokens, which take the tokens for independent, as llama-perplexity's do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BLOCK = 1 << 20  # numbers that are worked on at a time: 8 MiB in float64


@dataclass(frozen=True)
class Value:
    """A number with its standard error, None where there is none (too few tokens)."""
    value: float
    error: float | None = None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities, float64 [n, n_vocab], of logits [n, n_vocab]."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def blocks(n: int, n_vocab: int):
    """Slices of n rows, small enough to work on in float64."""
    step = max(1, BLOCK // n_vocab)
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def mean(x: np.ndarray) -> Value:
    """Mean of values per token; its error is sqrt((mean of squares - square of mean) / (n - 1))."""
    return Value(float(x.mean()), float(x.std() / math.sqrt(len(x) - 1)) if len(x) > 1 else None)


def share(hits: np.ndarray) -> Value:
    """Share of True; its error is the binomial one, which is mean()'s for zeros and ones."""
    return mean(hits.astype(np.float64))


def root_mean_square(x: np.ndarray) -> Value:
    square = mean(x * x)
    root = math.sqrt(square.value)
    return Value(root, 0.0 if root == 0 else None if square.error is None else 0.5 / root * square.error)


def exponential(log: Value) -> Value:
    value = math.exp(log.value)
    return Value(value, None if log.error is None else value * log.error)


def quantile(x: np.ndarray, q: float) -> Value:
    """Quantile, interpolated between its neighbours as in llama-perplexity.

    llama-perplexity gives no error. Here it is half the distance between the quantiles at q -+ sqrt(q (1 - q) / n), the
    ranks that a standard error moves it to; None where the upper of them is beyond the largest value.
    """
    step = math.sqrt(q * (1 - q) / len(x))
    error = float(np.quantile(x, q + step) - np.quantile(x, max(0.0, q - step))) / 2 if q + step <= 1 else None
    return Value(float(np.quantile(x, q)), error)


@dataclass(frozen=True)
class Divergence:
    """How far a setting is from its reference, over the same tokens. All in nats or shares, none in per cent.

    KL is sum p log(p/q) over the vocabulary, p the reference's probabilities, q the setting's. dp is the change of the
    probability of the text's own next token (llama-perplexity's "delta p"). same_top is the share of the tokens where both hold
    the same token for the likeliest. ratio is perplexity over the reference's, difference their difference; ln_ratio is
    the logarithm of ratio, and correlation that of the two means' errors, which these errors take into account.
    """
    kl_mean: Value
    kl_median: Value
    kl_99: Value
    kl_99_9: Value
    kl_max: float
    same_top: Value
    dp_rms: Value
    dp_mean: Value
    ln_ratio: Value
    ratio: Value
    difference: Value
    correlation: float | None


class TextScores:
    """Gathers what a run says about each token that counts; keeps four numbers a token, not the logits."""

    def __init__(self):
        self._nll, self._kl, self._same, self._nll_reference = [], [], [], []

    def add(self, logits: np.ndarray, targets, reference: np.ndarray | None = None) -> None:
        """logits, reference: [n, n_vocab]; targets [n], the tokens that really came."""
        targets = np.asarray(targets)
        for s in blocks(*logits.shape):
            self._add_block(log_softmax(logits[s]), targets[s], None if reference is None else log_softmax(reference[s]))

    def _add_block(self, log_q, targets, log_p) -> None:
        rows = np.arange(len(targets))
        self._nll.append(-log_q[rows, targets])
        if log_p is not None:
            self._nll_reference.append(-log_p[rows, targets])
            self._same.append(log_p.argmax(axis=1) == log_q.argmax(axis=1))
            with np.errstate(invalid="ignore"):  # a token that has no chance at all adds nothing: 0 * -inf
                terms = np.exp(log_p) * (log_p - log_q)
            terms[np.isneginf(log_p)] = 0
            self._kl.append(terms.sum(axis=1))

    @property
    def nll(self) -> np.ndarray:
        """Negative log probability of each token that counts, float64."""
        return np.concatenate(self._nll)

    def perplexity(self) -> Value:
        return exponential(mean(self.nll))

    def divergence(self) -> Divergence:
        nll, base, kl = self.nll, np.concatenate(self._nll_reference), np.concatenate(self._kl)
        dp = np.exp(-nll) - np.exp(-base)
        ln_ratio = mean(nll - base)  # var(a) + var(b) - 2 cov(a, b) is the variance of the difference
        ppl, ppl_base = math.exp(nll.mean()), math.exp(base.mean())
        constant = nll.std() == 0 or base.std() == 0
        return Divergence(
            kl_mean=mean(kl), kl_median=quantile(kl, 0.5), kl_99=quantile(kl, 0.99), kl_99_9=quantile(kl, 0.999), kl_max=float(kl.max()),
            same_top=share(np.concatenate(self._same)), dp_rms=root_mean_square(dp), dp_mean=mean(dp),
            ln_ratio=ln_ratio, ratio=exponential(ln_ratio),
            difference=Value(ppl - ppl_base, mean(ppl * nll - ppl_base * base).error),
            correlation=None if constant else float(np.corrcoef(nll, base)[0, 1]))
