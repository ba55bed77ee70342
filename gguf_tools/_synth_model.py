"""Shapes, metadata and tensors of the synthetic models; see synth.py."""

import dataclasses
import itertools

import numpy as np

from ._synth_routing import SynthError

SLICE = 16 << 20  # elements quantized at a time (64 MiB as float32)


def _field(text):
    return dataclasses.field(metadata={"help": text})


@dataclasses.dataclass
class Shape:
    arch: str = _field("llama (Mixtral's graph) or qwen3moe")
    d: int = _field("width of the residual stream")
    ff: int = _field("width of one expert")
    experts: int = _field("experts per layer")
    used: int = _field("experts per token")
    heads: int = _field("attention heads")
    kv_heads: int = _field("attention heads of keys and values")
    head_dim: int = _field("width of one head")
    layers: int = _field("layers")
    vocab: int = _field("token ids")

    def check(self):
        for name, value in dataclasses.asdict(self).items():
            if name != "arch" and value < 1:
                raise SynthError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.arch not in ("llama", "qwen3moe"):
            raise SynthError(f"--arch must be llama or qwen3moe, not {self.arch}")
        if self.used > self.experts:
            raise SynthError(f"--used {self.used} is more than --experts {self.experts}")
        if self.heads % self.kv_heads:
            raise SynthError(f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}")
        if self.head_dim % 2:
            raise SynthError(f"--head-dim must be even, not {self.head_dim}")
        if self.vocab < N_SPECIAL + 30:
            raise SynthError(f"--vocab must be at least {N_SPECIAL + 30} (control and byte tokens, letters), not {self.vocab}")


SHAPES = {
    "mixtral": Shape("llama", 4096, 14336, 8, 2, 32, 8, 128, 8, 32000),
    "fine": Shape("qwen3moe", 2048, 768, 128, 8, 32, 4, 128, 12, 32000),
    "tiny": Shape("llama", 256, 256, 8, 2, 4, 2, 64, 4, 1024),
}


# --- vocabulary ---------------------------------------------------------------------------------

N_SPECIAL = 3 + 256  # <unk> <s> </s> and the bytes
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def vocabulary(n):
    """n pieces, scores and types of a SentencePiece vocabulary that covers any text.

    Three control tokens, 256 bytes, then letter strings, shortest first, each also with a leading space: every
    piece is reachable by merging two earlier ones. llama.cpp's token types: 1 normal, 2 unknown, 3 control, 6 byte.
    """
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    words = ("".join(w) for length in itertools.count(1) for w in itertools.product(LETTERS, repeat=length))
    spaced = (s for w in words for s in (w, "\u2581" + w))
    pieces += ["\u2581"] + list(itertools.islice(spaced, n - N_SPECIAL - 1))
    scores = [0.0] * N_SPECIAL + [-float(i) for i in range(n - N_SPECIAL)]
    types = [2, 3, 3] + [6] * 256 + [1] * (n - N_SPECIAL)
    return pieces, scores, types


def metadata(shape, name, notes):
    """GGUF metadata but the architecture: a list of (key, type, value); the type of a list is its elements'."""
    a = shape.arch
    pieces, scores, types = vocabulary(shape.vocab)
    out = [
        ("general.name", "str", name),
        (f"{a}.block_count", "u32", shape.layers),
        (f"{a}.context_length", "u32", 32768),
        (f"{a}.embedding_length", "u32", shape.d),
        (f"{a}.feed_forward_length", "u32", shape.ff),
        (f"{a}.attention.head_count", "u32", shape.heads),
        (f"{a}.attention.head_count_kv", "u32", shape.kv_heads),
        (f"{a}.attention.key_length", "u32", shape.head_dim),
        (f"{a}.attention.value_length", "u32", shape.head_dim),
        (f"{a}.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        (f"{a}.rope.freq_base", "f32", 1e6),
        (f"{a}.rope.dimension_count", "u32", shape.head_dim),
        (f"{a}.expert_count", "u32", shape.experts),
        (f"{a}.expert_used_count", "u32", shape.used),
        (f"{a}.vocab_size", "u32", shape.vocab),
    ]
    if a == "qwen3moe":
        out.append((f"{a}.expert_feed_forward_length", "u32", shape.ff))
    out += [
        ("tokenizer.ggml.model", "str", "llama"),
        ("tokenizer.ggml.pre", "str", "default"),
        ("tokenizer.ggml.tokens", "str", pieces),
        ("tokenizer.ggml.scores", "f32", scores),
        ("tokenizer.ggml.token_type", "i32", types),
        ("tokenizer.ggml.bos_token_id", "u32", 1),
        ("tokenizer.ggml.eos_token_id", "u32", 2),
        ("tokenizer.ggml.unknown_token_id", "u32", 0),
        ("tokenizer.ggml.add_bos_token", "bool", True),
    ]
    return out + [(f"synth.{key}", "f32" if isinstance(v, float) else "u32" if isinstance(v, int) else "str", v)
                  for key, v in notes.items()]


# --- tensors ------------------------------------------------------------------------------------

@dataclasses.dataclass
class Tensor:
    name: str
    shape: tuple   # ggml's order: ne[0] (row length) first
    type: str      # lower-case ggml type name
    pieces: object # function -> float32 arrays [rows, ne[0]], together one matrix
    rotations: list = None  # experts: the quantized matrix is written once per entry, its rows rotated by so many


def tensors(shape, routing, expert_type, trunk_type, gain, mix):
    """All tensors in file order.

    gain: RMS of what a sublayer adds, against the RMS of the residual stream at its layer.
    mix: E[sum of squared gate weights]; see mean_square_weight().
    """
    s, growth = shape, routing.growth
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    seed = routing.seed

    def normal(n_in, n_out, rms, *key, zero_rows=0):
        def pieces():
            rng = np.random.default_rng([seed, *key])
            step = max(1, SLICE // n_in)
            for start in range(0, n_out, step):
                w = rng.standard_normal((min(step, n_out - start), n_in), dtype=np.float32)
                w *= rms
                w[:max(0, zero_rows - start)] = 0
                yield w
        return pieces

    def ones(n):
        return lambda: iter([np.ones((1, n), np.float32)])

    def rotations(rows, *key):
        rng = np.random.default_rng([seed, *key])
        return [int(r) for r in rng.choice(rows, s.experts, replace=s.experts > rows)]

    out = [
        Tensor("token_embd.weight", (s.d, s.vocab), trunk_type, routing.embeddings),
        Tensor("output_norm.weight", (s.d,), "f32", ones(s.d)),
        # the control tokens' logits are 0: generation never ends by itself
        Tensor("output.weight", (s.d, s.vocab), trunk_type, normal(s.d, s.vocab, 2 * s.d ** -0.5, 4, zero_rows=3)),
    ]
    silu_gate = 0.3558 ** 0.5  # RMS of silu(a) * b for independent standard normal a, b
    for il in range(s.layers):
        p = f"blk.{il}."
        rms = growth ** (il / 2)  # of the residual stream at this layer
        up = s.d ** -0.5
        down = gain * rms / (silu_gate * (s.ff * mix) ** 0.5)
        out += [
            Tensor(p + "attn_norm.weight", (s.d,), "f32", ones(s.d)),
            Tensor(p + "attn_q.weight", (s.d, q), trunk_type, normal(s.d, q, up, 5, il)),
            Tensor(p + "attn_k.weight", (s.d, kv), trunk_type, normal(s.d, kv, up, 6, il)),
            Tensor(p + "attn_v.weight", (s.d, kv), trunk_type, normal(s.d, kv, up, 7, il)),
            Tensor(p + "attn_output.weight", (q, s.d), trunk_type, normal(q, s.d, gain * rms * q ** -0.5, 8, il)),
        ]
        if s.arch == "qwen3moe":
            out += [Tensor(p + f"attn_{x}_norm.weight", (s.head_dim,), "f32", ones(s.head_dim)) for x in "qk"]
        out += [
            Tensor(p + "ffn_norm.weight", (s.d,), "f32", ones(s.d)),
            Tensor(p + "ffn_gate_inp.weight", (s.d, s.experts), "f32", lambda il=il: iter([routing.router(il)])),
        ]
        for i, (name, n_in, n_out, scale) in enumerate((("gate", s.d, s.ff, up), ("up", s.d, s.ff, up), ("down", s.ff, s.d, down))):
            out.append(Tensor(p + f"ffn_{name}_exps.weight", (n_in, n_out, s.experts), expert_type,
                              normal(n_in, n_out, scale, 9, il, i), rotations(n_out, 10, il, i)))
    return out
