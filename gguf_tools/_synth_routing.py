"""Routing of the synthetic models: token embeddings and router matrices whose choices are known beforehand.

The residual stream starts as the token's embedding e (RMS 1) and every sublayer adds something random of RMS
`residual gain`. Routers read the whole normalised stream, so e decides and the additions disturb:

random   e of token id i is one step of a slow Gaussian process over the ids, e[i+1] = repeat * e[i] + noise, and router
         rows are random of norm `sharpness`. Router logits are then Gaussian with that standard deviation, whatever
         the layer, which fixes the shares of high, low and skipped experts. Channel 0 is 1 for every token: through it
         each expert has a constant bias of standard deviation skew * sharpness, which makes some experts popular.
like     for L layers of E experts, L*E orthonormal directions of e carry the wanted logits themselves, read from a
         recorded trace: token id i routes as position i of the trace did. Popularity and repetition are the trace's.

Text for these models is the sequence of CONSECUTIVE token ids (i, i+1, i+2, ...), wrapping round: neighbours in the
process are neighbours in the text. Other texts route with the same shares, but without the repetition.
The residual gain sets how well a layer's router input predicts the next layer's choice (recall).
"""

import numpy as np

CHUNK = 512  # token ids per generated piece


class SynthError(Exception):
    """A request that cannot be met; the message is one sentence."""


def plan_shares(weights, t1, t2):
    """Shares (high, low, skip) that the selection rule wants, each 0..1.

    weights [n, k]: gate weights of the chosen experts in any order and scale.
    """
    g = -np.sort(-np.asarray(weights, np.float64), axis=1)
    g /= g.sum(axis=1, keepdims=True)
    s = np.cumsum(g, axis=1) - g
    s[:, 0] = 0
    high = s <= t1
    high[:, 0] = True
    skip = (s > t2) & ~high
    return high.mean(), 1 - high.mean() - skip.mean(), skip.mean()


def top_weights(logits, k):
    """The k largest of logits [n, E] as softmax weights over the k, largest first [n, k]."""
    top = -np.partition(-logits, k - 1, axis=1)[:, :k] if k < logits.shape[1] else logits
    top = -np.sort(-top, axis=1)
    w = np.exp(top - top[:, :1])
    return w / w.sum(axis=1, keepdims=True)


def find_sharpness(high_share, experts, used, skew, seed, t1=0.6, t2=0.9):
    """The sharpness at which `high_share` (0..1) of the requests want the high copy; bisection on samples.

    Gaussian logits leave the split between low and skip no freedom; with 8 experts top-2, 67 % high comes with 30 % low
    and 3 % skip, as in Mixtral.
    """
    rng = np.random.default_rng([seed, 11])
    z = rng.standard_normal((20000, experts)) + skew * rng.standard_normal((20, experts)).repeat(1000, axis=0)
    z = -np.partition(-z, used - 1, axis=1)[:, :used]

    def high(sharpness):
        return plan_shares(top_weights(z * sharpness, used), t1, t2)[0]

    lo, hi = 1e-3, 64.0
    if not high(hi) <= high_share <= high(lo):
        raise SynthError(f"a share of {high_share:.0%} high is out of reach for {used} of {experts} experts; "
                         f"it can be {high(hi):.0%} to {high(lo):.0%}")
    for _ in range(30):
        mid = (lo * hi) ** 0.5
        lo, hi = (mid, hi) if high(mid) > high_share else (lo, mid)
    return (lo * hi) ** 0.5


def random_logits(sharpness, experts, seed):
    """Router logits [5000, experts] as the random routers give them, without skew."""
    return np.random.default_rng([seed, 12]).standard_normal((5000, experts)) * sharpness


def mean_square_weight(logits, used):
    """E[sum of g_i^2] over the chosen experts: the variance of their mix when each has variance 1. logits [n, E]."""
    return float((top_weights(logits, used) ** 2).sum(axis=1).mean())


def load_trace(path, experts, used):
    """Router logits [n_tokens, n_layers, experts] (float32) that give a recorded trace's choices and weights.

    The file is .npy, or .npz whose first fitting array is taken: a structured array with the fields seq, pos,
    layer, expert[k], weight[k], one row per token and layer. Logits of experts that were not chosen are unknown;
    they are drawn below the smallest chosen one, by once to a few times the mean distance between two ranks.
    """
    try:
        data = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as e:
        raise SynthError(f"{path} is not a readable .npy or .npz file: {e}") from None
    arrays = [data[name] for name in data.files] if hasattr(data, "files") else [data]
    need = {"seq", "pos", "layer", "expert", "weight"}
    rows = next((a for a in arrays if need <= set(a.dtype.names or ())), None)
    if rows is None or rows.ndim != 1 or not len(rows):
        raise SynthError(f"{path} holds no routing trace (a structured array with seq, pos, layer, expert, weight)")
    k = rows["expert"].reshape(len(rows), -1).shape[1]
    if k != used:
        raise SynthError(f"{path} was recorded with {k} experts per token, the model uses {used}")
    rows = rows[np.argsort(rows["layer"], kind="stable")]  # recorded in the order of time: sequences may start over
    layers, counts = np.unique(rows["layer"], return_counts=True)
    if (counts != counts[0]).any() or (rows[["seq", "pos"]].reshape(len(layers), -1) != rows[["seq", "pos"]][:counts[0]]).any():
        raise SynthError(f"{path} lacks some layer for some token")
    rows = rows.reshape(len(layers), -1).T
    expert = rows["expert"].reshape(*rows.shape, k).astype(np.int64)
    if expert.max() >= experts or expert.min() < 0:
        raise SynthError(f"{path} names expert {expert.max()}, the model has {experts}")
    logw = np.log(np.maximum(rows["weight"].reshape(*rows.shape, k).astype(np.float32), 1e-6))
    gap = float((logw.max(-1) - logw.min(-1)).mean()) / max(k - 1, 1) or 1.0
    rng = np.random.default_rng(13)
    below = gap * (1 + rng.standard_exponential((*logw.shape[:2], experts), dtype=np.float32))
    logits = logw.min(-1, keepdims=True) - below
    np.put_along_axis(logits, expert, logw, axis=2)
    return logits - logits.mean(axis=2, keepdims=True)


class Routing:
    """Embeddings and routers of one model.

    growth: factor by which the residual stream's variance grows per layer (1 + gain^2).
    """

    def __init__(self, *, d, layers, experts, used, vocab, seed, sharpness, repeat=0.0, skew=0.0, growth=1.0, trace=None):
        self.d, self.layers, self.experts, self.used, self.vocab, self.seed = d, layers, experts, used, vocab, seed
        self.sharpness, self.repeat, self.skew, self.growth = sharpness, repeat, skew, growth
        self.logits = None
        if trace is not None:
            n = layers * experts
            if n > d:
                raise SynthError(f"--like needs layers x experts <= d; {layers} x {experts} is more than {d}")
            z = trace[:, np.arange(layers) % trace.shape[1]]      # [n_trace, layers, experts]
            self.scale = float(z.std())
            self.logits = (z / self.scale).reshape(len(z), n)
            rng = np.random.default_rng([seed, 2])
            self.basis = np.linalg.qr(rng.standard_normal((d, n), dtype=np.float32))[0].T.copy()  # [n, d]

    def embeddings(self):
        """Pieces [<= CHUNK, d] of the embedding table, float32, in the order of the token ids; RMS of a row is 1."""
        rng = np.random.default_rng([self.seed, 1])
        keep, fresh = self.repeat, (1 - self.repeat ** 2) ** 0.5
        last = rng.standard_normal(self.d, dtype=np.float32)
        for start in range(0, self.vocab, CHUNK):
            e = rng.standard_normal((min(CHUNK, self.vocab - start), self.d), dtype=np.float32)
            if self.logits is not None:
                want = self.logits[np.arange(start, start + len(e)) % len(self.logits)]
                e += (want - e @ self.basis.T) @ self.basis
            else:
                for row in e:
                    row *= fresh
                    row += keep * last
                    last = row.copy()
                if self.skew:
                    e[:, 0] = 1
            yield e / np.sqrt((e * e).mean(axis=1, keepdims=True))

    def router(self, layer):
        """Router matrix [experts, d] of a layer, float32."""
        grown = self.growth ** (layer / 2)  # RMS of the residual stream against the embedding's
        if self.logits is not None:
            rows = self.basis[layer * self.experts:(layer + 1) * self.experts]
            return rows * np.float32(self.scale * self.sharpness * grown)
        rng = np.random.default_rng([self.seed, 3, layer])
        rows = rng.standard_normal((self.experts, self.d), dtype=np.float32)
        if self.skew:
            rows[:, 0] = 0
        rows *= self.sharpness / np.sqrt((rows * rows).sum(axis=1, keepdims=True))
        if self.skew:
            rows[:, 0] = self.skew * self.sharpness * grown * rng.standard_normal(self.experts)
        return rows
