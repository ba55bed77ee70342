"""Every ggml type as the type of expert copies: converted, run, compared with the ordinary file of the same weights.

    python tests/expert_types.py      writes docs/types.md
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as conftest.py says

import engine
from gguf_tools import ggml
from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter
from hobbit_cpp._convert_plan import EXPERT_NAME, TERNARY
from hobbit_cpp._version import LLAMA_CPP_COMMIT
from hobbit_cpp.convert import convert
from makers import make_imatrix, make_model, values

TABLE = Path(__file__).resolve().parent.parent / "docs" / "types.md"
TYPES = [t.name for t in reversed(ggml.quantizable())]  # widest first


def model(folder: Path, types) -> Path:
    return make_model(folder / "m.gguf", "qwen3moe", n_layer=2, n_expert=6, n_used=2, ff=256, types=types)


def importance(folder: Path, source) -> Path:
    """An importance matrix for every expert of a model, random."""
    rng = np.random.default_rng(0)
    with Reader(str(source)) as r:
        return make_imatrix(folder / "i.gguf", {n: (rng.random((t.shape[2], t.shape[0]), dtype=np.float32) + 0.1, np.ones(t.shape[2]))
                                                for n, t in r.tensors.items() if EXPERT_NAME.match(n)})


def ordinary(dual, which: str, out) -> Path:
    """The ordinary GGUF whose experts are the high or the low copies of a pair."""
    with Reader(str(dual)) as r, Reader(str(dual).removesuffix(".gguf") + ".experts.gguf") as x, StreamWriter(out, None, r.alignment, True) as w:
        w.copy_metadata(r, drop=("hobbit.",))
        parts = [(r, t, t.name) for t in r.tensors.values()]
        parts += [(x, t, t.name.removesuffix("." + which)) for t in x.tensors.values() if t.name.endswith("." + which)]
        for _, t, name in parts:
            w.add_tensor(name, t.shape, t.type)
        w.begin_data()
        for reader, t, name in parts:
            w.write(name, 0, reader.read(t))
    return Path(out)


def all_low(model):
    """Every expert of every token comes as its low copy."""
    def select(_user, _layer, n_tokens, n_used, _experts, _weights, wanted):
        np.ctypeslib.as_array(wanted, (n_tokens * n_used,))[:] = engine.LOW

    model.hooks = engine.hobbit.hobbit_hooks()
    model.hooks.select = engine.hobbit.hobbit_select_fn(select)
    engine.hobbit.hobbit_set_hooks(model.h, model.hooks)


def check_copies(dual, folder: Path) -> None:
    """With all experts high, and with all low, a pair gives the logits of the ordinary file of those copies."""
    for which, change in (("high", None), ("low", all_low)):
        with engine.Model(ordinary(dual, which, folder / "plain.gguf")) as stock:
            prompt = engine.prompt(40, stock.n_vocab)
            expected = engine.run(stock, prompt, n_ubatch=32, generate=10)
        assert np.isfinite(expected[0]).all()
        # room for all low copies: a request for a low one may be served by a high one, where there is no slot
        room = {"t1": 1.0, **engine.fraction(dual, 0.4)} if which == "high" else {"t1": 0.0, "low_fraction": 0.9, "force_miss": 1, **engine.fraction(dual, 3.0)}
        with engine.Model(dual, direct_io=0, **room) as m:
            if change:
                change(m)
            got = engine.run(m, prompt, n_ubatch=32, generate=10)
            s = m.stats()
            other = (s.hits_low, s.misses_low) if which == "high" else (s.hits_high, s.misses_high, s.upgrades)
            assert not any(other), f"{which}: {other} of {s.requests} were of the other copy"
        assert np.array_equal(got[0], expected[0]), f"{which} copies: logits differ by up to {np.abs(got[0] - expected[0]).max():.3g}"
        assert got[1] == expected[1]


def below(name: str) -> str | None:
    """A low type for a high one: the widest that is smaller and needs no importance matrix."""
    t = ggml.type_info(name)
    return next((o for o in TYPES if ggml.type_info(o).bits < t.bits and not ggml.requires_imatrix(o) and (o not in TERNARY or t.bits < 2.6)), None)


def check_high(name: str, folder: Path) -> None:
    """Experts that are stored in this type are kept as they are."""
    dual = folder / "high.gguf"
    convert(model(folder, name), dual, "keep", below(name), force=True)
    check_copies(dual, folder)


def check_low(name: str, folder: Path, imatrix: bool) -> float:
    """Experts get low copies of this type; returns the relative squared error of normally distributed weights."""
    source, dual = model(folder, "f32"), folder / "low.gguf"
    convert(source, dual, "keep", name, imatrix=importance(folder, source) if imatrix else None, force=True)
    check_copies(dual, folder)
    x = values("error", (512, 256))
    q = ggml.dequantize(name, ggml.quantize(name, x, np.ones(512, np.float32) if ggml.requires_imatrix(name) else None), 512)
    return float(((q - x) ** 2).sum() / (x ** 2).sum())


HEAD = """# Types of expert copies

A copy may have any type that llama.cpp's ggml ({commit}) can quantize to. Each was tried on a tiny model (6 experts, 2 used): *high*
are experts that the source stores in this type, kept as they are; *low* are copies that the converter made, without and with
an importance matrix. *Equal*: with all experts high, or all low, the logits of a prompt of 40 tokens and of 10 decoded ones are
those of the ordinary file of the same copies bit for bit. *Error*: relative squared error of normally distributed weights.

    python tests/expert_types.py      makes this page again

| type | bits | rows are multiples of | high | low | low, importance matrix | error |
|---|---|---|---|---|---|---|
"""

TAIL = """
`q1_0`, `q2_0`, `tq1_0` and `tq2_0` are for models that were trained with so few bits. Nothing is smaller than `q1_0`, so it
cannot be a high type. `q8_1`, `q8_k` and the integer types hold no weights.

## What an importance matrix is worth

On a trained model with 8 experts (books-8x2-small, f16, every miss served at `t1=0.6, t2=1`), Kullback-Leibler divergence from
the f16 model per token, without and with an importance matrix of 60 chunks of other text of the same kind:

| low copies | without | with |
|---|---|---|
| q2_k | 0.0149 ± 0.0008 | 0.0107 ± 0.0006 |
| iq2_s | 0.0146 ± 0.0010 | 0.0105 ± 0.0007 |

    hobbit imatrix SRC.gguf --text CALIBRATION -o I.gguf --chunks 60
    hobbit convert SRC.gguf -o OUT.gguf --low q2_k --imatrix I.gguf
    hobbit evaluate OUT.gguf --text TEXT --ctx 256 --mode worst --chunks 12

## Rows that do not fit

Where an expert's rows are no whole number of blocks (widths such as 1408, 1536 or 2880 with types of 256), that tensor
alone gets another type: llama.cpp's own substitute, or else the largest one that fits and is smaller than the high copy. The report of
`hobbit convert` lists it, `hobbit.fallbacks` in the sidecar keeps it, `--no-fallback` refuses.

| rows of | asked | used |
|---|---|---|
"""


def fallbacks(folder: Path) -> list[tuple[int, str, str]]:
    found = []
    for ff in (1408, 1536, 2880):
        source = make_model(folder / "w.gguf", "qwen3moe", n_layer=1, n_expert=2, ff=ff)
        for low in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq3_s", "iq4_xs"):
            report = convert(source, folder / "f.gguf", "keep", low, force=True)
            if report.fallbacks:
                found.append((ff, low, report.fallbacks[0].split(" -> ")[1].split(" ")[0]))
    return found


def main() -> int:
    p = argparse.ArgumentParser(description="Check every type and write the table.")
    p.add_argument("-o", "--output", type=Path, default=TABLE)
    args = p.parse_args()
    lines, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="hobbit-types-") as folder:
        folder = Path(folder)
        for name in TYPES:
            t, cells, error = ggml.type_info(name), [], None
            for work in (lambda: check_high(name, folder), lambda: check_low(name, folder, False), lambda: check_low(name, folder, True)):
                i = len(cells)
                if i == 0 and not below(name):
                    cells.append("nothing is smaller")
                elif i > 0 and name == "f32":
                    cells.append("")
                elif i == 1 and ggml.requires_imatrix(name):
                    cells.append("needs one")
                else:
                    try:
                        error = work() if i else work() or error
                        cells.append("equal")
                    except AssertionError as why:
                        failed += 1
                        cells.append(str(why))
            lines.append(f"| {name} | {t.bits:.4g} | {t.block} | {' | '.join(cells)} | {'' if error is None else f'{error:.2g}'} |")
            print(lines[-1], flush=True)
        rest = [f"| {ff} | {asked} | {used} |" for ff, asked, used in fallbacks(folder)]
    args.output.write_text(HEAD.format(commit=LLAMA_CPP_COMMIT) + "\n".join(lines) + "\n" + TAIL + "\n".join(rest) + "\n", encoding="utf-8")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
