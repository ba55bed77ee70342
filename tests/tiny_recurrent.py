"""Tiny random models with a recurrent state: mamba (no experts), and jamba, which has both kinds of memory, and experts."""

from __future__ import annotations

from pathlib import Path

from tiny_archs import D, base, write

CONV, INNER, STATE, RANK = 4, 2 * D, 16, 16


def _meta(arch: str, layers: int, replaced: dict, n_expert: int = 0, n_used: int = 0):
    meta, shapes = base(arch, n_expert, n_used, layers)
    drop = {f"{arch}.{k}" for k in replaced}
    if not n_expert:
        drop |= {f"{arch}.expert_count", f"{arch}.expert_used_count", f"{arch}.expert_feed_forward_length"}
    meta = [m for m in meta if m[0] not in drop] + [(f"{arch}.{k}", *v) for k, v in replaced.items()]
    meta += [(f"{arch}.ssm.{k}", v, "u32") for k, v in (("conv_kernel", CONV), ("inner_size", INNER), ("state_size", STATE), ("time_step_rank", RANK))]
    return meta, shapes


def _mixer(b: str, norms: bool) -> dict:
    shapes = {b + "attn_norm.weight": (D,), b + "ssm_in.weight": (D, 2 * INNER), b + "ssm_conv1d.weight": (CONV, INNER), b + "ssm_conv1d.bias": (INNER,),
              b + "ssm_x.weight": (INNER, RANK + 2 * STATE), b + "ssm_dt.weight": (RANK, INNER), b + "ssm_dt.bias": (INNER,),
              b + "ssm_a": (STATE, INNER), b + "ssm_d": (INNER,), b + "ssm_out.weight": (INNER, D)}
    if norms:
        shapes |= {b + "ssm_dt_norm.weight": (RANK,), b + "ssm_b_norm.weight": (STATE,), b + "ssm_c_norm.weight": (STATE,)}
    return shapes


def make_mamba(path, layers: int = 2) -> Path:
    meta, shapes = _meta("mamba", layers, {"feed_forward_length": (0, "u32"), "attention.head_count": (0, "u32"), "attention.head_count_kv": (0, "u32")})
    shapes = {n: s for n, s in shapes.items() if "blk" not in n}
    for i in range(layers):
        shapes |= _mixer(f"blk.{i}.", norms=False)
    return write(path, "mamba", meta, shapes, f32=lambda name: "conv1d" in name)


def make_jamba(path, n_expert: int = 8, n_used: int = 2) -> Path:
    """Layer 0 recurrent with experts, layer 1 attention with experts."""
    heads = D // 64
    meta, shapes = _meta("jamba", 2, {"attention.head_count": (heads, "u32"), "attention.head_count_kv": ([0, heads // 2], "u32")}, n_expert, n_used)
    shapes = {n: s for n, s in shapes.items() if not n.startswith("blk.0.attn")} | _mixer("blk.0.", norms=True)
    return write(path, "jamba", meta, shapes, f32=lambda name: "conv1d" in name)
