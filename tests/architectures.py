"""Every architecture with experts that the pinned llama.cpp has: a tiny random model of each is converted, run, and compared.

    python tests/architectures.py                        writes docs/architectures.md (some minutes)
    python tests/architectures.py --only qwen3moe glm    names that begin so; prints the rows

Each model is stored twice, its experts as q8_0 and as f16, and converted with the presets int8+int2 and f16+q4. With T1 = 1
a prompt of 40 tokens in two batches and 20 decoded tokens must give the logits of the ordinary file bit for bit, with memory for
what one token needs and with memory for everything. Each architecture is made and checked in a process of its own: llama.cpp
stops the process where it finds something wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import engine
import llama_source
from gguf_tools import ggml
from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter
from hobbit_cpp import _libs
from hobbit_cpp._convert_plan import EXPERT_NAME, FUSED_ARCHITECTURES
from hobbit_cpp._version import LLAMA_CPP_COMMIT
from hobbit_cpp.convert import PRESETS, ConvertError, convert

HERE = Path(__file__).resolve().parent
TABLE = HERE.parent / "docs" / "architectures.md"
STORED = {"int8+int2": "q8_0", "f16+q4": "f16"}  # the preset's high type: then the ordinary file has the same weights
NO_MEMORY = ("llada-moe", "rnd1")                # attention both ways: a prompt must be one batch
EMBEDDING = ("llama-embed", "nomic-bert-moe")    # embeddings are compared; a prompt must be one batch, too
# Whose draft head (multi-token prediction) has experts and runs on the fixtures: with those of others llama.cpp itself stops
DRAFT_HEADS = ("cohere2moe", "deepseek2", "deepseek32", "glm-dsa", "glm4moe", "hy_v3", "qwen35moe", "qwen3next")
DRAFT_HEAD = {"block_count": 3, "nextn_predict_layers": 1}
WITHOUT_SECTIONS = {"glm4moe": {"rope.dimension_sections": ""}}


# --- making models ---

@functools.lru_cache(maxsize=None)
def maker() -> Path:
    """The program that makes models. Raises llama_source.NoSource, or CalledProcessError with the compiler's words."""
    root = llama_source.root("tests/test-llama-archs.cpp", "include", "ggml/include", "src")
    lib, out = _libs.lib_dir(), engine.cache_dir() / "make_models"
    compiler = shutil.which("c++") or shutil.which("g++")
    if not compiler:
        raise llama_source.NoSource("no C++ compiler")
    includes = [f"-I{p}" for p in (HERE / "archs", root / "tests", root / "include", root / "ggml/include", root / "src")]
    subprocess.run([compiler, "-std=c++17", "-O1", *includes, HERE / "archs" / "make_models.cpp", f"-L{lib}", "-lllama", "-lggml",
                    "-lggml-base", "-lggml-cpu", f"-Wl,-rpath,{lib}", "-o", out], check=True, capture_output=True, text=True)
    return out


def names() -> list[str]:
    """All architectures, those without experts included."""
    return subprocess.run([maker()], check=True, capture_output=True, text=True).stdout.split()


def make(arch: str, path, **numbers) -> Path | None:
    """A model with 8 experts, 3 used, all tensors f32; None if llama.cpp cannot make one. numbers: further metadata, "": left out."""
    done = subprocess.run([maker(), arch, path, *(f"{k}={v}" for k, v in numbers.items())], capture_output=True)
    return Path(path) if done.returncode == 0 else None


def rewrite(src, dst, kind: str, apart: bool = False, drop=lambda name: False) -> Path:
    """A copy whose experts have another type (where it fits); apart: gate and up out of one tensor into two; drop: tensors to
    leave out."""
    with Reader(str(src)) as r, StreamWriter(dst, None, r.alignment, overwrite=True) as w:
        w.copy_metadata(r)
        parts = []  # (tensor, name, type, first row, rows)
        for t in (t for t in r.tensors.values() if not drop(t.name)):
            routed = EXPERT_NAME.match(t.name) and ggml.type_info(kind).fits(t.shape[0])
            new = ggml.type_info(kind) if routed else t.type
            if apart and "ffn_gate_up_exps.weight" in t.name:
                n = t.shape[1] // 2
                parts += [(t, t.name.replace("gate_up", p), new, i * n, n) for i, p in enumerate(("gate", "up"))]
            else:
                parts.append((t, t.name, new, 0, t.shape[1] if len(t.shape) > 1 else 1))
        for t, name, new, _, n in parts:
            w.add_tensor(name, (t.shape[0], n, *t.shape[2:]) if len(t.shape) > 1 else t.shape, new)
        w.begin_data()
        for t, name, new, first, n in parts:
            data = np.frombuffer(r.read(t), np.uint8)
            if new.id != t.type.id or len(t.shape) > 1 and n != t.shape[1]:
                rows = ggml.dequantize(t.type, data, t.shape[0]).reshape(-1, t.shape[1], t.shape[0])[:, first:first + n]
                data = ggml.quantize(new, rows.reshape(-1, t.shape[0]))
            w.write(name, 0, data)
    return Path(dst)


# --- what a model is like ---

def describe(path) -> dict:
    """Facts from the file."""
    with Reader(str(path)) as r:
        arch = r.get("general.architecture")
        routed = [n for n in r.tensors if EXPERT_NAME.match(n)]
        has = lambda *parts: any(all(p in n for p in parts) for n in r.tensors)  # noqa: E731
        used = r.get(f"{arch}.expert_used_count")
        return {
            "arch": arch, "layers": r.get(f"{arch}.block_count"), "moe": len({n.split(".")[1] for n in routed}),
            "experts": max(r.tensors[n].shape[2] for n in routed), "used": used,
            "shared": has("_shexp."), "projections": sorted({EXPERT_NAME.match(n)[2] for n in routed}),
            "biases": [what for what, found in (("experts", has("exps.bias")), ("router", has("ffn_gate_inp.bias")), ("choice", has("exp_probs_b")))
                       if found],
            "chunks": has("_chexps"),
        }


class Watch:
    """Sees the nodes of a graph as it runs: which function the router has."""

    def __init__(self):
        lib = ctypes.CDLL(str(_libs.lib_dir() / "libggml-base.so"))
        for f in ("ggml_get_name", "ggml_op_desc"):
            getattr(lib, f).restype, getattr(lib, f).argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self.ops: dict[str, str] = {}

        def see(tensor, _ask, _user):
            name = lib.ggml_get_name(tensor).decode("utf-8", "replace")
            if name.startswith("ffn_moe_"):
                self.ops.setdefault(re.sub(r"-\d+$", "", name), lib.ggml_op_desc(tensor).decode())
            return False

        self.callback = engine.llama.ggml_backend_sched_eval_callback(see)

    def router(self) -> str:
        op = self.ops.get("ffn_moe_probs", "")
        kind = {"SOFT_MAX": "softmax", "SIGMOID": "sigmoid", "SQRT": "sqrt(softplus)"}.get(op, "softmax of the chosen")
        return kind + (", normalised" if "ffn_moe_weights_norm" in self.ops else "")


# --- the check ---

def outputs(arch: str) -> dict:
    return {"embeddings": True, "pooling_type": engine.llama.LLAMA_POOLING_TYPE_NONE} if arch in EMBEDDING else {}


def run(model, prompt, arch: str, generate: int = 20):
    return engine.run(model, prompt, n_ubatch=64 if arch in NO_MEMORY + EMBEDDING else 32, generate=generate, **outputs(arch))


def nmse(got, expected) -> float:
    return float(((got - expected).astype(np.float64) ** 2).sum() / (expected.astype(np.float64) ** 2).sum())


def check(source, arch: str, folder: Path, *, apart: bool = False, presets=tuple(STORED)) -> dict:
    """Facts and measurements of one model. Raises AssertionError or what converter and engine raise."""
    result = {}
    for preset in presets:
        plain = rewrite(source, folder / f"{STORED[preset]}.gguf", STORED[preset], apart)
        dual = folder / f"{STORED[preset]}-dual.gguf"
        report = convert(plain, dual, *PRESETS[preset], force=True)
        watch = Watch()
        with engine.Model(plain) as stock:
            prompt = engine.prompt(40, stock.n_vocab)
            expected, tokens = run(stock, prompt, arch)
            first, _ = run(stock, prompt[:1], arch, generate=0)
            with engine.Context(stock, cb_eval=watch.callback, **outputs(arch)) as c:
                c.decode(prompt[:2])
        assert np.isfinite(expected).all(), "the ordinary model gives no numbers"
        for budget in ({"budget_kind": engine.MIN}, {"budget_kind": engine.AT_LEAST, "cache_bytes": 2**40}):
            with engine.Model(dual, direct_io=0, **budget) as model:
                assert model.h, "the pair was loaded as an ordinary model"
                got, same = run(model, prompt, arch)
                assert np.array_equal(got, expected), f"{preset}, T1 = 1: logits differ by up to {np.abs(got - expected).max():.3g}"
                assert same == tokens
        with engine.Model(dual, direct_io=0, t1=0.6, t2=0.9, budget_kind=engine.MIN) as model:
            assert np.isfinite(run(model, prompt, arch)[0]).all(), f"{preset}, T1 = 0.6: not finite"
        with engine.Model(dual, direct_io=0, t1=0.0, t2=1.0, budget_kind=engine.MIN) as model:
            error = nmse(run(model, prompt[:1], arch, generate=0)[0], first)
            assert error > 0, f"{preset}: low copies change nothing, so equal logits prove nothing"
        result[preset] = {"router": watch.router(), "fallbacks": len(report.fallbacks), "nmse": error}
    return {**describe(plain), **result[presets[-1]], "presets": result}


def draft(model, prompt) -> np.ndarray:
    """Logits of a model's draft head (multi-token prediction) for tokens and random states in place of the model's own."""
    llama, out = engine.llama, []
    n_embd = llama.llama_model_n_embd_out(model.handle)
    states = np.random.default_rng(0).standard_normal((len(prompt), n_embd), dtype=np.float32)
    with engine.Context(model, n_ctx=128, n_ubatch=32, ctx_type=llama.LLAMA_CONTEXT_TYPE_MTP) as c:
        batch = llama.llama_batch_ext_init(c.handle)
        for first in range(0, len(prompt), 30):
            llama.llama_batch_ext_clear(batch)
            for i in range(first, min(first + 30, len(prompt))):
                at = llama.llama_batch_ext_add_token(batch, 0, prompt[i])
                row = llama.llama_embd(states[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, n_embd)
                assert llama.llama_batch_ext_set_embd_token(batch, at, row)
                llama.llama_batch_ext_set_output_logits(batch, at, True)
                llama.llama_batch_ext_set_pos(batch, at, ctypes.byref(llama.llama_pos(i)))
            assert llama.llama_process(c.handle, llama.LLAMA_PROCESS_TYPE_DECODE, batch) == 0
            out += [np.array(c.row(i)) for i in range(at + 1)]
        llama.llama_batch_ext_free(batch)
    return np.stack(out)


def check_draft_head(source, arch: str, folder: Path) -> None:
    """A model with a draft head: loaded without it and with it, both equal the ordinary file, and so does the head."""
    with Reader(str(source)) as r:
        head_block = f"blk.{r.get(f'{arch}.block_count') - 1}."
        routed = [name for name in r.tensors if EXPERT_NAME.match(name)]
    # scales in a head are counted as missing by llama.cpp where the head is not loaded
    plain = rewrite(source, folder / "mtp.gguf", "f16", drop=lambda name: name.startswith(head_block) and name.endswith("scale"))
    dual = folder / "mtp-dual.gguf"
    convert(plain, dual, "keep", "q4_0", force=True)
    with engine.Model(plain, load_mtp=True) as stock:
        prompt = engine.prompt(40, stock.n_vocab)
        expected, head = run(stock, prompt, arch), draft(stock, prompt)
    assert np.isfinite(head).all()
    with engine.Model(plain) as stock:
        assert np.array_equal(run(stock, prompt, arch)[0], expected[0])
    layers = {}
    for load in (False, True):
        for budget in ({"budget_kind": engine.MIN}, {"budget_kind": engine.AT_LEAST, "cache_bytes": 2**40}):
            with engine.Model(dual, direct_io=0, load_mtp=load, **budget) as model:
                layers[load] = model.info().n_layers
                assert np.array_equal(run(model, prompt, arch)[0], expected[0]), f"logits differ with load_mtp={load}"
                if load:
                    got = draft(model, prompt)
                    assert np.array_equal(got, head), f"the head's logits differ by up to {np.abs(got - head).max():.3g}"
                    assert np.array_equal(run(model, prompt, arch)[0], expected[0]), "logits differ after the head ran"
    assert layers[True] >= layers[False] and any(n.startswith(head_block) for n in routed), "the head has no experts"


def check_both(source, arch: str, folder: Path, presets) -> list[dict]:
    """check() of a model and, where gate and up are one tensor, of its other form; {"refused": why} if it is not converted."""
    try:
        rows = [check(source, arch, folder, presets=presets)]
    except ConvertError as error:
        return [{"refused": str(error).split(": ", 1)[1]}]
    if "gate_up" in rows[0]["projections"]:  # the loader takes both forms
        rows.append(check(source, arch, folder, apart=True, presets=presets))
    if arch in DRAFT_HEADS:
        check_draft_head(folder / "head.gguf", arch, folder)
        rows[0]["head"] = True
    return rows


def in_process(arch: str, presets=tuple(STORED)) -> list[dict] | str | None:
    """The rows of an architecture, what went wrong, or None if it has no experts."""
    with tempfile.TemporaryDirectory(prefix="hobbit-arch-") as folder:
        source = make(arch, Path(folder) / "f32.gguf")
        if not source:
            return None
        with Reader(str(source)) as r:
            if not any(EXPERT_NAME.match(n) for n in r.tensors):
                return None
        if arch in DRAFT_HEADS:
            make(arch, Path(folder) / "head.gguf", **DRAFT_HEAD, **WITHOUT_SECTIONS.get(arch, {}))
        done = subprocess.run([sys.executable, __file__, "--check", arch, source, folder, *presets], capture_output=True, text=True, errors="replace",
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "passive"})
        for line in done.stdout.splitlines():
            if line.startswith("ROWS "):
                return json.loads(line[5:])
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "ASSERT" in line or "Error" in line]
        return (lines or [f"ended with status {done.returncode}"])[-1]


# --- the table ---

HEAD = """# Architectures

Tiny random models of every architecture with experts that the pinned llama.cpp ({commit}) has, made by its own loader:
converted with both presets, run with memory for what one token needs and with memory for everything. *Equal*: with
`t1=1` the logits of a prompt of 40 tokens and of 20 decoded ones are those of the ordinary file bit for bit, and with
`t1=0.6, t2=0.9` all are finite. *Low copies*: relative squared error of the first token's logits if every expert but the
first comes as q4_0, which shows that unequal weights would have been noticed. Where an architecture takes a scale per
expert, the model has them. *Draft head*: a model with a block for multi-token prediction, loaded without it and with it;
the head's logits are equal, too.

    python tests/architectures.py       makes this page again

| architecture | layers with experts | experts, used | router | shared | biases | tensors | low copies | result |
|---|---|---|---|---|---|---|---|---|
"""


def row(arch: str, r: dict) -> str:
    if "refused" in r:
        return f"| {arch} | | | | | | | | refused: {r['refused']} |"
    tensors = ", ".join(r["projections"]) + (", chunks" if r["chunks"] else "")
    return (f"| {arch} | {r['moe']} of {r['layers']} | {r['experts']}, {r['used']} | {r['router']} | {'yes' if r['shared'] else ''} | "
            f"{', '.join(r['biases'])} | {tensors} | {r['nmse']:.1e} | equal{', draft head too' if 'head' in r else ''} |")


def main() -> int:
    p = argparse.ArgumentParser(description="Check every architecture and write the table.")
    p.add_argument("--only", nargs="+", metavar="NAME", help="architectures whose names begin so; the table is not written")
    p.add_argument("-o", "--output", type=Path, default=TABLE)
    p.add_argument("--check", nargs="+", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.check:
        arch, source, folder, *presets = args.check
        print("ROWS " + json.dumps(check_both(source, arch, Path(folder), presets)))
        return 0
    lines, failed, fused = [], 0, []
    for arch in names():
        if args.only and not arch.startswith(tuple(args.only)):
            continue
        rows = in_process(arch)
        if rows is None:
            continue
        if isinstance(rows, str):
            failed += 1
            rows, text = [], f"| {arch} | | | | | | | | {rows} |"
            lines.append(text)
            print(text, flush=True)
        for r in rows:
            lines.append(row(arch, r))
            print(lines[-1], flush=True)
        if len(rows) > 1:
            fused.append(arch)
    if not args.only:
        if sorted(fused) != sorted(FUSED_ARCHITECTURES):
            print(f"gate and up in one tensor: {fused}, but the converter knows {FUSED_ARCHITECTURES}", file=sys.stderr)
            failed += 1
        args.output.write_text(HEAD.format(commit=LLAMA_CPP_COMMIT) + "\n".join(lines) + "\n", encoding="utf-8")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
