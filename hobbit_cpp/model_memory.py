"""What a model takes besides its routed experts: residents, KV cache, compute buffers. Upper bounds, in bytes.

    need = estimate(metadata, n_ctx=4096, n_batch=512, n_ubatch=512)
    need.total

`metadata` is anything with get(key, default), such as gguf_tools.reader.Reader. Where a model's shape is
unusual (sliding windows, compressed attention) the estimate is the larger, plain case. Against what llama.cpp
allocates for Mixtral's shape, 128 fine-grained experts' shape and the built-in model, with 512 to 8192 tokens of context and
ubatches of 512 and 2048: KV cache exact, compute buffer and work area 1.3 to 1.8 times, and 32 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from .memory import MIB

F16 = 1  # ggml type
MAX_LAYERS = 4096  # llama.cpp has room for 512
MAX_NUMBER = 2**32 - 1


@dataclass(frozen=True)
class Need:
    residents: int  # the main file's tensors
    kv_cache: int   # and recurrent state
    compute: int    # graph buffers, the CPU's work area, logits
    plain: bool     # True where kv_cache is what will be allocated, not just a bound

    @property
    def total(self) -> int:
        return self.residents + self.kv_cache + self.compute


def type_bytes(kind: int, n: int) -> int:
    """Bytes of n values of a ggml type, rounded up to a block."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    return -(-n // block) * size


def check_number(key: str, value):
    """A whole number, or one per layer, from a file. Raises ValueError for anything else."""
    limit = MAX_LAYERS if key.endswith(".block_count") else MAX_NUMBER
    several = value if isinstance(value, list) else [value]
    if len(several) > MAX_LAYERS or not all(isinstance(x, int) and 0 <= x <= limit for x in several):
        shown = repr(value)
        raise ValueError(f"{key} is {shown if len(shown) < 60 else shown[:60] + '...'}, not a whole number from 0 to {limit}")
    if key.endswith(".block_count") and isinstance(value, list):
        raise ValueError(f"{key} is a list")
    return value


class _Shape:
    """The numbers of a model, per layer where a file may give them so."""

    def __init__(self, metadata):
        arch = metadata.get("general.architecture") or ""

        def get(key, default=0):
            value = metadata.get(f"{arch}.{key}")
            return default if value is None else check_number(f"{arch}.{key}", value)

        def most(value):
            return max(value, default=0) if isinstance(value, list) else value

        self.n_layer = get("block_count")
        self.n_embd = most(get("embedding_length"))
        tokens = metadata.get("tokenizer.ggml.tokens")
        self.n_vocab = most(get("vocab_size")) or (len(tokens) if isinstance(tokens, list) else 0)
        heads = get("attention.head_count")
        kv = get("attention.head_count_kv", heads)
        self.n_head = most(heads)
        self.kv_heads = kv if isinstance(kv, list) else [kv] * self.n_layer
        usual = self.n_embd // self.n_head if self.n_head else 0
        self.key = most(get("attention.key_length", usual))
        self.value = most(get("attention.value_length", usual))
        self.ff = max(most(get("feed_forward_length")), most(get("expert_shared_feed_forward_length")))
        self.ff_exp = most(get("expert_feed_forward_length")) or self.ff
        self.n_expert = most(get("expert_count"))
        self.n_used = most(get("expert_used_count"))
        self.ctx_train = most(get("context_length", 4096))
        inner, state = most(get("ssm.inner_size")), most(get("ssm.state_size"))
        conv, groups = most(get("ssm.conv_kernel")), most(get("ssm.group_count"))
        self.recurrent = 4 * self.n_layer * (inner * state + max(0, conv - 1) * (inner + 2 * groups * state))
        self.plain = not (get("attention.sliding_window") or get("attention.kv_lora_rank") or inner or get("attention.indexer.head_count"))


def estimate(metadata, *, resident_bytes: int = 0, n_ctx: int = 512, n_batch: int = 512, n_ubatch: int = 512, n_used: int = 0,
             type_k: int | None = None, type_v: int | None = None, logits_all: bool = False, flash_attn: bool = False) -> Need:
    """The bounds for one context. n_ctx 0: the model's own; n_used 0: as the file says; n_ctx, n_batch, n_ubatch in tokens."""
    s = _Shape(metadata)
    n_ctx = n_ctx or s.ctx_train
    n_kv = -(-n_ctx // 256) * 256
    n_batch = min(n_batch, n_ctx)
    n_ub = min(n_ubatch, n_batch)
    n_used = n_used or s.n_used
    cells = n_kv * sum(s.kv_heads)
    kv = type_bytes(F16 if type_k is None else type_k, cells * s.key) + type_bytes(F16 if type_v is None else type_v, cells * s.value)

    # One part of the graph at a time holds memory. Values per token:
    attention = 3 * s.n_head * max(s.key, s.value) + n_kv * (1 if flash_attn else 1 + s.n_head)  # projections, mask, scores
    ffn = 3 * max(s.ff, n_used * s.ff_exp) + 2 * n_used * s.n_embd + 4 * s.n_expert
    per_token = 4 * (6 * s.n_embd + max(attention, ffn, s.n_vocab))
    work = 8 * s.n_layer * s.n_expert * n_used + 4 * max(s.n_embd, s.ff, n_used * s.ff_exp)  # mul_mat_id: rows of each slot, its input
    outputs = 4 * s.n_vocab * ((n_batch + n_ctx) if logits_all else 4)       # llama.cpp's, and Llama.scores
    seq_ids = n_batch * min(4 * n_ctx, 8192)                                 # LlamaBatch
    compute = n_ub * (per_token + work) + outputs + seq_ids
    return Need(resident_bytes, kv + s.recurrent, compute + compute // 10 + 32 * MIB, s.plain)
