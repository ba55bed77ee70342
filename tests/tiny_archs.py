"""Tiny random models of architectures whose experts are special: biases (gpt-oss), one tensor for gate and up
and unnormalised weights (deepseek2), weights before the experts (llama4), a scale per expert (qwen3moe)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter
from makers import HEAD_DIM, metadata, packed, tensor_shapes

D, FF, LAYERS = 256, 256, 2


def write(path, arch: str, meta, shapes: dict, types="f16", f32=lambda name: False) -> Path:
    def kind(name):
        if "exps.weight" in name:
            return types
        return "f32" if len(shapes[name]) == 1 or not name.endswith(".weight") or "ffn_gate_inp" in name or f32(name) else "f16"

    with StreamWriter(path, arch, 32, overwrite=True) as w:
        for key, value, form in meta:
            w.add(key, value, form)
        for name, shape in shapes.items():
            w.add_tensor(name, shape, kind(name))
        w.begin_data()
        for name, shape in shapes.items():
            w.write(name, 0, packed(name, shape, kind(name)))
    return Path(path)


def base(arch: str, n_expert: int, n_used: int, layers: int = LAYERS):
    meta = metadata(arch, layers, D, FF, n_expert, n_used)
    n_vocab = len(next(v for k, v, _ in meta if k == "tokenizer.ggml.tokens"))
    return meta, tensor_shapes("llama", layers, D, FF, n_expert, n_vocab)


def make_gpt_oss(path, n_expert: int = 8, n_used: int = 4, types="f16") -> Path:
    meta, shapes = base("gpt-oss", n_expert, n_used)
    meta += [("gpt-oss.attention.sliding_window", 64, "u32")]
    for i in range(LAYERS):
        b = f"blk.{i}."
        del shapes[b + "ffn_norm.weight"]
        shapes[b + "post_attention_norm.weight"] = (D,)
        shapes |= {b + "attn_sinks.weight": (D // HEAD_DIM,), b + "attn_output.bias": (D,), b + "ffn_gate_inp.bias": (n_expert,),
                   b + "ffn_gate_exps.bias": (FF, n_expert), b + "ffn_up_exps.bias": (FF, n_expert), b + "ffn_down_exps.bias": (D, n_expert)}
    return write(path, "gpt-oss", meta, shapes, types)


def make_deepseek2(path, n_expert: int = 16, n_used: int = 4, *, scale: float = 1.0, weights_norm: bool = False, fused: bool = False,
                   v3: bool = False, types="f16") -> Path:
    """Latent attention in its old form, a dense layer before the others, shared experts. v3: a sigmoid, biased for selection, and the
    best two of four groups of experts."""
    meta, shapes = base("deepseek2", n_expert, n_used)
    replaced = {"deepseek2.block_count", "deepseek2.attention.key_length", "deepseek2.attention.value_length",
                "deepseek2.rope.dimension_count", "deepseek2.attention.head_count_kv"}
    meta = [m for m in meta if m[0] not in replaced]
    lora, rope, nope, heads = 32, 32, 32, D // HEAD_DIM
    meta += [("deepseek2.block_count", LAYERS + 1, "u32"), ("deepseek2.leading_dense_block_count", 1, "u32"),
             ("deepseek2.attention.head_count_kv", heads, "u32"), ("deepseek2.attention.q_lora_rank", 64, "u32"),
             ("deepseek2.attention.kv_lora_rank", lora, "u32"), ("deepseek2.attention.key_length", nope + rope, "u32"),
             ("deepseek2.attention.value_length", nope, "u32"), ("deepseek2.rope.dimension_count", rope, "u32"),
             ("deepseek2.expert_shared_count", 1, "u32"), ("deepseek2.expert_weights_scale", scale, "f32"),
             ("deepseek2.expert_weights_norm", weights_norm, "bool")]
    if v3:
        meta += [("deepseek2.expert_gating_func", 2, "u32"), ("deepseek2.expert_group_count", 4, "u32"), ("deepseek2.expert_group_used_count", 2, "u32")]
    experts = {n: s for n, s in shapes.items() if "ffn" in n}
    shapes = {n: s for n, s in shapes.items() if "blk" not in n}
    for i in range(LAYERS + 1):
        b = f"blk.{i}."
        shapes |= {b + "attn_norm.weight": (D,), b + "ffn_norm.weight": (D,),
                   b + "attn_q_a.weight": (D, 64), b + "attn_q_a_norm.weight": (64,), b + "attn_q_b.weight": (64, heads * (nope + rope)),
                   b + "attn_kv_a_mqa.weight": (D, lora + rope), b + "attn_kv_a_norm.weight": (lora,),
                   b + "attn_kv_b.weight": (lora, heads * 2 * nope), b + "attn_output.weight": (heads * nope, D)}
        if i == 0:
            shapes |= {b + "ffn_gate.weight": (D, FF), b + "ffn_up.weight": (D, FF), b + "ffn_down.weight": (FF, D)}
            continue
        for name, shape in experts.items():
            if name.startswith(f"blk.{i - 1}.") and "norm" not in name:
                shapes[b + name.split(".", 2)[2]] = shape
        shapes |= {b + "ffn_gate_shexp.weight": (D, FF), b + "ffn_up_shexp.weight": (D, FF), b + "ffn_down_shexp.weight": (FF, D)}
        if v3:
            shapes[b + "exp_probs_b.bias"] = (n_expert,)
        if fused:
            del shapes[b + "ffn_gate_exps.weight"], shapes[b + "ffn_up_exps.weight"]
            shapes[b + "ffn_gate_up_exps.weight"] = (D, 2 * FF, n_expert)
    return write(path, "deepseek2", meta, shapes, types)


def make_llama4(path, n_expert: int = 8, types="f16") -> Path:
    """Top-1, the weight applied before the experts, every second layer dense."""
    layers = 4  # the fourth has full attention, without which stock llama.cpp stops
    meta, shapes = base("llama4", n_expert, 1, layers)
    meta += [("llama4.interleave_moe_layer_step", 2, "u32")]
    for i in range(layers):
        b = f"blk.{i}."
        if (i + 1) % 2:
            shapes = {n: s for n, s in shapes.items() if not (n.startswith(b) and ("exps" in n or "gate_inp" in n))}
            shapes |= {b + "ffn_gate.weight": (D, FF), b + "ffn_up.weight": (D, FF), b + "ffn_down.weight": (FF, D)}
        else:
            shapes |= {b + "ffn_gate_shexp.weight": (D, FF), b + "ffn_up_shexp.weight": (D, FF), b + "ffn_down_shexp.weight": (FF, D)}
    return write(path, "llama4", meta, shapes, types)


def make_scaled(path, n_expert: int = 8, n_used: int = 2, types="f16") -> Path:
    """qwen3moe with a scale per expert and projection."""
    meta, shapes = base("qwen3moe", n_expert, n_used)
    for i in range(LAYERS):
        b = f"blk.{i}."
        shapes |= {b + "attn_q_norm.weight": (HEAD_DIM,), b + "attn_k_norm.weight": (HEAD_DIM,)}
        shapes |= {b + f"ffn_{p}_exps.scale": (n_expert,) for p in ("gate", "up", "down")}
    return write(path, "qwen3moe", meta, shapes, types)


def fill(path, value: float, which) -> None:
    """Overwrite the f32 and f16 tensors whose names which() takes with one value."""
    with Reader(str(path)) as r:
        tensors = [t for t in r.tensors.values() if which(t.name)]
    with open(path, "r+b") as f:
        for t in tensors:
            kind = {"f32": np.float32, "f16": np.float16}[t.type.name]
            f.seek(t.offset)
            f.write(np.full(t.nbytes // kind().itemsize, value, kind).tobytes())


def put_nan(path, name: str, row: int = 0) -> None:
    """Overwrite one value of a float32 tensor with NaN."""
    with Reader(str(path)) as r:
        t = r.tensors[name]
        at = t.offset + row * t.row_bytes
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(np.float32(np.nan).tobytes())
