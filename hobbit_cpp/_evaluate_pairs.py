"""Minimal pairs: a model is right where it holds the good sentence for likelier than the bad one, which differs in little.

A sentence's log probability is the sum over all its tokens, after BOS (the end token where there is no BOS), as in
the published results on BLiMP. No chance is given for the sentence's end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from ._evaluate_stats import Value, blocks, log_softmax, mean, share


@dataclass(frozen=True)
class PairScores:
    """accuracy: share of pairs where the good sentence is the likelier; sets: the same by the pairs' "set". Against the
    reference, None without one: same_choice, share of pairs where both hold the same sentence for likelier, and
    difference, accuracy minus the reference's (the error is that of the difference on the same pairs)."""
    n: int
    accuracy: Value
    sets: dict[str, Value]
    same_choice: Value | None = None
    difference: Value | None = None


def read_pairs(path, limit: int | None = None) -> list[tuple[str, str, str]]:
    """(good, bad, set) of each line of a JSON-lines file {"good": ..., "bad": ..., "set": ...}; "set" may be left out.

    limit: take so many of them, evenly spread over the file. ValueError names the first line that is wrong.
    """
    pairs = []
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                x = json.loads(line)
            except ValueError:  # bytes that are no UTF-8, too
                raise ValueError(f"{path}, line {number} is no JSON") from None
            if not isinstance(x, dict) or not all(isinstance(x.get(k), str) and x[k] for k in ("good", "bad")):
                raise ValueError(f'{path}, line {number} must be an object with two sentences, {{"good": "...", "bad": "..."}}')
            pairs.append((x["good"], x["bad"], str(x.get("set", ""))))
    if not pairs:
        raise ValueError(f"{path} has no pairs")
    n = len(pairs) if limit is None else min(limit, len(pairs))
    return [pairs[i * len(pairs) // n] for i in range(n)]


def tokenize(runner, pairs) -> list[list[int]]:
    """Tokens of good, bad, good, bad, ...; ValueError for a sentence that is longer than the context."""
    sentences = [runner.tokens(text) for good, bad, _ in pairs for text in (good, bad)]
    n_ctx = runner.llm.n_ctx()
    for tokens, text in zip(sentences, (text for pair in pairs for text in pair[:2])):
        if len(tokens) > n_ctx:
            raise ValueError(f"the sentence {text[:40]!r}... has {len(tokens)} tokens, the context {n_ctx}: give a larger --ctx")
    return sentences


def margins(runner, sentences) -> np.ndarray:
    """Log probability of the good sentence minus that of the bad one, float64 [n pairs]."""
    sums = []
    for tokens in sentences:
        total, at = 0.0, 1
        for logits in runner.logits(tokens):
            for s in blocks(*logits.shape):
                log_p = log_softmax(logits[s])
                total += float(log_p[np.arange(len(log_p)), tokens[at:at + len(log_p)]].sum())
                at += len(log_p)
        sums.append(total)
    return np.array(sums[0::2]) - np.array(sums[1::2])


def score(pairs, found: np.ndarray, reference: np.ndarray | None) -> PairScores:
    """found, reference: margins()."""
    right = found > 0
    names = np.array([name for _, _, name in pairs])
    sets = {str(name): share(right[names == name]) for name in dict.fromkeys(names) if name}
    if reference is None:
        return PairScores(len(pairs), share(right), sets)
    other = reference > 0
    return PairScores(len(pairs), share(right), sets, share(right == other), mean(right.astype(float) - other))
