"""Makers of tiny random mixture-of-experts GGUFs for tests. llama.cpp loads the plain ones (llama, qwen3moe).

    make_model(path, "llama", n_layer=2, d=256, ff=512, n_expert=4, types="f16")

A tensor's values depend on the seed and its name alone, so that models that differ in order, alignment
or splitting hold the same weights.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from gguf_tools import ggml
from gguf_tools.writer import StreamWriter

HEAD_DIM = 64


def values(name: str, shape, seed: int = 0, scale: float = 0.05) -> np.ndarray:
    """Float32 [rows, shape[0]] of a tensor of ggml shape `shape`."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    rows = int(np.prod(shape[1:], dtype=np.int64))
    x = rng.standard_normal((rows, shape[0]), dtype=np.float32) * np.float32(scale)
    return x + np.float32(1) if name.endswith("norm.weight") else x


def packed(name: str, shape, kind: str, seed: int = 0) -> np.ndarray:
    """The tensor's bytes as type `kind`, uint8 [rows, row bytes]."""
    even = np.ones(shape[0], np.float32) if ggml.requires_imatrix(kind) else None
    return ggml.quantize(kind, values(name, shape, seed), even)


def tensor_shapes(arch: str, n_layer: int, d: int, ff: int, n_expert: int, n_vocab: int, *, fused: bool = False,
                  bias: bool = False, n_dense: int = 0) -> dict[str, tuple[int, ...]]:
    """{name: shape as in ggml}, in file order. The first n_dense layers have no experts."""
    heads, kv_heads = d // HEAD_DIM, max(1, d // HEAD_DIM // 2)
    shapes = {"token_embd.weight": (d, n_vocab), "output_norm.weight": (d,), "output.weight": (d, n_vocab)}
    for i in range(n_layer):
        b = f"blk.{i}."
        shapes |= {b + "attn_norm.weight": (d,), b + "ffn_norm.weight": (d,),
                   b + "attn_q.weight": (d, heads * HEAD_DIM), b + "attn_k.weight": (d, kv_heads * HEAD_DIM),
                   b + "attn_v.weight": (d, kv_heads * HEAD_DIM), b + "attn_output.weight": (heads * HEAD_DIM, d)}
        if arch == "qwen3moe":
            shapes |= {b + "attn_q_norm.weight": (HEAD_DIM,), b + "attn_k_norm.weight": (HEAD_DIM,)}
        if i < n_dense:
            shapes |= {b + "ffn_gate.weight": (d, ff), b + "ffn_up.weight": (d, ff), b + "ffn_down.weight": (ff, d)}
            continue
        shapes[b + "ffn_gate_inp.weight"] = (d, n_expert)
        if fused:
            shapes[b + "ffn_gate_up_exps.weight"] = (d, 2 * ff, n_expert)
        else:
            shapes |= {b + "ffn_gate_exps.weight": (d, ff, n_expert), b + "ffn_up_exps.weight": (d, ff, n_expert)}
        shapes[b + "ffn_down_exps.weight"] = (ff, d, n_expert)
        if bias:
            shapes |= {b + "ffn_up_exps.bias": (ff, n_expert), b + "ffn_down_exps.bias": (d, n_expert)}
    return shapes


def metadata(arch: str, n_layer: int, d: int, ff: int, n_expert: int, n_used: int) -> list[tuple]:
    """(key, value, type) of everything that llama.cpp wants, a vocabulary of bytes included."""
    heads = d // HEAD_DIM
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] + ["\u2581", "e", "\u2581the"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * 3
    return [
        ("general.name", "tiny random model", "str"),
        (f"{arch}.block_count", n_layer, "u32"), (f"{arch}.context_length", 512, "u32"),
        (f"{arch}.embedding_length", d, "u32"), (f"{arch}.feed_forward_length", ff, "u32"),
        (f"{arch}.expert_feed_forward_length", ff, "u32"),
        (f"{arch}.attention.head_count", heads, "u32"), (f"{arch}.attention.head_count_kv", max(1, heads // 2), "u32"),
        (f"{arch}.attention.key_length", HEAD_DIM, "u32"), (f"{arch}.attention.value_length", HEAD_DIM, "u32"),
        (f"{arch}.attention.layer_norm_rms_epsilon", 1e-5, "f32"), (f"{arch}.rope.freq_base", 10000.0, "f32"),
        (f"{arch}.rope.dimension_count", HEAD_DIM, "u32"),
        (f"{arch}.expert_count", n_expert, "u32"), (f"{arch}.expert_used_count", n_used, "u32"),
        (f"{arch}.vocab_size", len(tokens), "u32"),
        ("tokenizer.ggml.model", "llama", "str"), ("tokenizer.ggml.pre", "default", "str"),
        ("tokenizer.ggml.tokens", tokens, "str"), ("tokenizer.ggml.scores", [-float(i) for i in range(len(tokens))], "f32"),
        ("tokenizer.ggml.token_type", kinds, "i32"),
        ("tokenizer.ggml.bos_token_id", 1, "u32"), ("tokenizer.ggml.eos_token_id", 2, "u32"),
        ("tokenizer.ggml.unknown_token_id", 0, "u32"),
    ]


def make_model(path, arch: str = "llama", *, n_layer: int = 2, d: int = 256, ff: int = 512, n_expert: int = 4,
               n_used: int = 2, types="f16", seed: int = 0, alignment: int = 32, fused: bool = False, bias: bool = False,
               n_dense: int = 0, split: int = 1, reverse: bool = False, extra=(), drop=(), rename=None) -> Path:
    """Write a model; returns the path to load (part 1 of a split one, whose parts are PATH-00001-of-0000N).

    types   type of the expert tensors: a name, or a function of the tensor's name; other matrices are f16,
            vectors and routers f32
    split   number of files
    extra   further (key, value, type) metadata; replaces keys that are there
    drop    names of tensors to leave out
    rename  {old: new} names of tensors (values stay those of the old name)
    """
    path = Path(path)
    meta = metadata(arch, n_layer, d, ff, n_expert, n_used)
    n_vocab = len(next(v for k, v, _ in meta if k == "tokenizer.ggml.tokens"))
    shapes = tensor_shapes(arch, n_layer, d, ff, n_expert, n_vocab, fused=fused, bias=bias, n_dense=n_dense)
    names = [n for n in shapes if n not in drop]
    if reverse:
        names.reverse()
    parts = [names[len(names) * i // split:len(names) * (i + 1) // split] for i in range(split)]
    paths = [path] if split == 1 else [
        path.with_name(f"{path.name.removesuffix('.gguf')}-{i + 1:05}-of-{split:05}.gguf") for i in range(split)]
    for i, (part, members) in enumerate(zip(paths, parts)):
        with StreamWriter(part, arch if i == 0 else None, alignment, overwrite=True) as w:
            for key, value, kind in [*meta, *extra] if i == 0 else []:
                w.add(key, value, kind)
            if split > 1:
                w.add("split.no", i, "u16")
                w.add("split.count", split, "u16")
                w.add("split.tensors.count", len(names), "i32")
            kinds = {n: tensor_type(n, shapes[n], types) for n in members}
            new = {n: (rename or {}).get(n, n) for n in members}
            for n in members:
                w.add_tensor(new[n], shapes[n], kinds[n])
            w.begin_data()
            for n in members:
                w.write(new[n], 0, packed(n, shapes[n], kinds[n], seed))
    return paths[0]


def tensor_type(name: str, shape, types) -> str:
    if "exps.weight" in name:
        return types if isinstance(types, str) else types(name)
    return "f32" if len(shape) == 1 or "ffn_gate_inp" in name or name.endswith("bias") else "f16"


def make_imatrix(path, entries: dict[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    """The GGUF form. entries: {weight name: (sums of squares float32 [n_expert, n_in], counts [n_expert])}."""
    with StreamWriter(path, None, overwrite=True) as w:
        w.add("general.type", "imatrix")
        w.add("imatrix.datasets", ["test"], "str")
        w.add("imatrix.chunk_count", 4, "u32")
        w.add("imatrix.chunk_size", 512, "u32")
        for name, (sums, counts) in sorted(entries.items()):
            w.add_tensor(name + ".in_sum2", (sums.shape[1], sums.shape[0]), "f32")
            w.add_tensor(name + ".counts", (1, len(counts)), "f32")
        w.begin_data()
        for name, (sums, counts) in entries.items():
            w.write(name + ".in_sum2", 0, sums.astype(np.float32))
            w.write(name + ".counts", 0, np.asarray(counts, np.float32))
    return Path(path)


def make_old_imatrix(path, entries: dict[str, tuple[np.ndarray, np.ndarray]], calls: int = 4) -> Path:
    """The .dat form of the same, written as llama-imatrix does: no entry for a tensor without any count."""
    stored = {n: e for n, e in sorted(entries.items()) if np.any(e[1])}
    out = bytearray(np.int32(len(stored)).tobytes())
    for name, (sums, counts) in stored.items():
        counts = np.asarray(counts, np.float32).reshape(-1, 1)
        mean = np.where(counts > 0, sums / np.maximum(counts, 1), np.float32(1)).astype(np.float32)
        out += np.int32(len(name)).tobytes() + name.encode() + np.int32(calls).tobytes()
        out += np.int32(mean.size).tobytes() + (mean * np.float32(calls)).tobytes()
    out += np.int32(calls).tobytes() + np.int32(4).tobytes() + b"test"
    Path(path).write_bytes(out)
    return Path(path)
