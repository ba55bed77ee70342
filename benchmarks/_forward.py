"""A forward pass in NumPy whose experts may have a precision of their own for each use: what the engine has no kernels for.

    text = Text("model-f16.gguf", "book.txt", n_ctx=256, chunks=12)
    model = Model("model-f16.gguf")
    model.add(4, ggml_values("q4_k"), 256)
    states, routing = model.run(text.tokens, lambda layer, experts, gate: 4)
    kl = text.divergence(states).mean()

For the two architectures of the trained models that docs/frontier.md measures (llama with experts, qwen3moe), all chunks at
once. Experts' inputs are rounded to 8 bits as ggml's kernels do where the weights are quantized. benchmarks/layers.py and nested.py
use it; their first line compares it with the engine.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from gguf_tools import ggml  # noqa: E402
from gguf_tools.reader import Reader  # noqa: E402

PROJECTIONS = ("gate", "up", "down")
SKIP = 0    # a level: not computed
GIVEN = -1  # a level: the weights as given


@dataclass
class Routing:
    """experts int [n_layers, n_tokens, n_used], by weight, largest first; gate float32 of that shape, rows that sum to 1."""
    experts: np.ndarray
    gate: np.ndarray


class Model:
    """The trunk, and the experts as given: `source[layer][projection]` float32 [n_expert, n_out, n_in]. Their copies have numbers,
    levels, that add() gives them."""

    def __init__(self, path: str):
        with Reader(path) as r:
            arch = r.get("general.architecture")
            if arch not in ("llama", "qwen3moe"):
                raise SystemExit(f"{path} is {arch}: this forward pass knows llama with experts and qwen3moe")
            key = lambda name: r.get(f"{arch}.{name}")  # noqa: E731
            self.arch, self.n_layers, self.n_expert, self.n_used = arch, key("block_count"), key("expert_count"), key("expert_used_count")
            self.n_head, self.n_kv, self.d_head = key("attention.head_count"), key("attention.head_count_kv"), key("attention.key_length")
            self.eps, self.base = key("attention.layer_norm_rms_epsilon"), key("rope.freq_base")
            tensors = {t.name: _floats(r, t) for t in r.tensors.values()}
        self.trunk = {k: v for k, v in tensors.items() if "_exps." not in k}
        self.source = [{p: tensors[f"blk.{i}.ffn_{p}_exps.weight"] for p in PROJECTIONS} for i in range(self.n_layers)]
        self.levels = {GIVEN: (self.source, None)}  # values like source, block of the inputs' rounding

    @property
    def n_weights(self) -> int:
        """Of one expert."""
        return sum(self.source[0][p][0].size for p in PROJECTIONS)

    def add(self, level: int, rounded, block: int | None = 32) -> None:
        """rounded(rows float32 [n, n_in], layer, projection) -> the values of a copy; block: over how many inputs a scale of their
        rounding to 8 bits goes, None: not rounded."""
        made = []
        for i, layer in enumerate(self.source):
            made.append({p: rounded(w.reshape(-1, w.shape[-1]), i, p).reshape(w.shape) for p, w in layer.items()})
        self.levels[level] = (made, block)

    def mix(self, level: int, pick) -> None:
        """A level made of others: pick(layer, projection) -> the one whose values are taken."""
        names = [{p: pick(i, p) for p in PROJECTIONS} for i in range(self.n_layers)]
        made = [{p: self.levels[n][0][i][p] for p, n in layer.items()} for i, layer in enumerate(names)]
        self.levels[level] = (made, self.levels[names[-1]["gate"]][1])

    def run(self, tokens: np.ndarray, choose) -> tuple[np.ndarray, Routing]:
        """tokens [n_chunks, n] -> (final states [n_chunks, n, d], routing of all tokens, chunk after chunk).

        choose(layer, experts, gate) -> level of each use, [n_tokens, n_used], or one for all.
        """
        t = self.trunk
        n_chunks, n = tokens.shape
        x = t["token_embd.weight"][tokens.ravel()]
        rotation = self._rotation(n)
        found = Routing(np.empty((self.n_layers, len(x), self.n_used), np.int32), np.empty((self.n_layers, len(x), self.n_used), np.float32))
        for i in range(self.n_layers):
            x = x + self._attention(i, _norm(x, t[f"blk.{i}.attn_norm.weight"], self.eps), n_chunks, n, rotation)
            h = _norm(x, t[f"blk.{i}.ffn_norm.weight"], self.eps)
            scores = h @ t[f"blk.{i}.ffn_gate_inp.weight"].T
            experts = np.argsort(-scores, axis=1, kind="stable")[:, :self.n_used]
            gate = _softmax(np.take_along_axis(scores, experts, axis=1))  # both normalise over the chosen
            found.experts[i], found.gate[i] = experts, gate
            x = x + self._experts(i, h, experts, gate, choose(i, experts, gate))
        return _norm(x, t["output_norm.weight"], self.eps).reshape(n_chunks, n, -1), found

    def _experts(self, layer, h, experts, gate, level):
        level = np.broadcast_to(np.asarray(level), experts.shape)
        inputs: dict = {}
        out = np.zeros_like(h)
        for name in np.unique(level):
            if name == SKIP:
                continue
            made, block = self.levels[int(name)]
            if block not in inputs:
                inputs[block] = _round(h, block)
            for e in range(self.n_expert):
                token, rank = np.nonzero((experts == e) & (level == name))
                if len(token):
                    rows = inputs[block][token]
                    g, u = rows @ made[layer]["gate"][e].T, rows @ made[layer]["up"][e].T
                    y = _round(g / (1 + np.exp(-g)) * u, block and min(block, g.shape[1])) @ made[layer]["down"][e].T
                    out[token] += y * gate[token, rank, None]
        return out

    def _attention(self, i, h, n_chunks, n, rotation):
        t = self.trunk
        q, k, v = (h @ t[f"blk.{i}.attn_{c}.weight"].T for c in "qkv")
        q, k, v = (y.reshape(n_chunks, n, -1, self.d_head).transpose(0, 2, 1, 3) for y in (q, k, v))
        if self.arch == "qwen3moe":
            q, k = (_norm(y, t[f"blk.{i}.attn_{c}_norm.weight"], self.eps) for c, y in (("q", q), ("k", k)))
        q, k = self._rotate(q, rotation), self._rotate(k, rotation)
        out = np.empty_like(q)
        mask = np.triu(np.full((n, n), -np.inf, np.float32), 1)
        for j in range(self.n_head):
            kv = j // (self.n_head // self.n_kv)
            out[:, j] = _softmax(q[:, j] @ k[:, kv].transpose(0, 2, 1) / np.float32(np.sqrt(self.d_head)) + mask) @ v[:, kv]
        return out.transpose(0, 2, 1, 3).reshape(n_chunks * n, -1) @ t[f"blk.{i}.attn_output.weight"].T

    def _rotation(self, n):
        angle = np.arange(n)[:, None] * self.base ** (-np.arange(0, self.d_head, 2) / self.d_head)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def _rotate(self, y, rotation):
        cos, sin = rotation
        pairs = (slice(0, None, 2), slice(1, None, 2)) if self.arch == "llama" else (slice(0, self.d_head // 2), slice(self.d_head // 2, None))
        a, b = (y[..., p] for p in pairs)
        out = np.empty_like(y)
        out[..., pairs[0]], out[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
        return out


class Text:
    """Chunks of a text as hobbit frontier takes them, and the divergence from the model as given, whose routing is `routing`."""

    def __init__(self, model: Model, path: str, text: str, n_ctx: int = 256, chunks: int = 12, part: int = 0, parts: int = 1):
        from hobbit_cpp import bindings  # noqa: F401  before llama_cpp
        import llama_cpp
        from hobbit_cpp._evaluate_run import text_chunks
        from hobbit_cpp._tuning_measure import spread

        llm = llama_cpp.Llama(path, vocab_only=True, n_ctx=n_ctx, verbose=False)
        found = np.array(spread(text_chunks(llm, text, n_ctx, None), chunks, part, parts))
        self.tokens, self.first = found[:, :-1], n_ctx // 2
        self._output = model.trunk["output.weight"]
        states, self.routing = model.run(self.tokens, lambda *_: GIVEN)
        self._log_p = self._log(states)
        self._p = np.exp(self._log_p)

    def _log(self, states):
        logits = states[:, self.first:].reshape(-1, states.shape[-1]) @ self._output.T
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
        return logits

    def divergence(self, states) -> np.ndarray:
        """KL divergence in nats at each token that counts."""
        return (self._p * (self._log_p - self._log(states))).sum(axis=1, dtype=np.float64)


def ggml_values(kind: str):
    """For Model.add(): values after rounding to a ggml type, another where rows do not hold it (as hobbit convert)."""
    def rounded(rows, *_):
        t = held(kind, rows.shape[1])
        return ggml.dequantize(t, ggml.quantize(t, rows), rows.shape[1])
    return rounded


def held(kind: str, n_in: int) -> ggml.TypeInfo:
    from hobbit_cpp._convert_plan import _substitute

    t = ggml.type_info(kind)
    return t if t.fits(n_in) else _substitute(t, n_in)


def _floats(reader, tensor):
    rows = ggml.dequantize(tensor.type, reader.read(tensor), tensor.shape[0])
    return rows.reshape(tensor.shape[::-1])


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps)) * weight


def _softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _round(x, block):
    """To 8 bits, one scale for `block` values of a row."""
    if block is None:
        return x
    parts = x.reshape(len(x), -1, block)
    scale = np.abs(parts).max(axis=2, keepdims=True) / 127
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(scale > 0, np.rint(parts / scale) * scale, 0).reshape(x.shape).astype(np.float32)
