"""What llama.cpp's llama-perplexity says about the small model: writes golden_perplexity.json, which test_evaluate.py compares with.

    python tests/golden_perplexity.py LLAMA_PERPLEXITY

LLAMA_PERPLEXITY is the program, built from the pinned llama.cpp without patches. The reference is the small model with
its weights as f16, the setting the same with its experts rounded to q4_0 before. f16 all through, because products with
quantized weights round the activations as well: there another order of additions, as other kernels have, moves the
perplexity by 0.3 % (routing tips over), here by 0.004 %. Short chunks, because there BOS and the half that counts matter much.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

REPO = pathlib.Path(__file__).resolve().parent.parent
MODEL = REPO / "hobbit_cpp" / "data" / "books-8x2-small-q8_0.gguf"
TEXT = REPO / "hobbit_cpp" / "data" / "sample.txt"
GOLDEN = pathlib.Path(__file__).with_suffix(".json")
N_CTX = 32
TYPE = "q4_0"  # what the setting's experts are rounded to

ROWS = {"ppl": "Mean PPL(Q)", "ppl_base": "Mean PPL(base)", "cor": "Cor(ln(PPL(Q)), ln(PPL(base)))", "ln_ratio": "Mean ln(PPL(Q)/PPL(base))",
        "kl_mean": "Mean    KLD", "kl_max": "Maximum KLD", "kl_99.9": "99.9%   KLD", "kl_99": "99.0%   KLD", "kl_95": "95.0%   KLD",
        "kl_90": "90.0%   KLD", "kl_median": "Median  KLD", "kl_10": "10.0%   KLD", "dp_mean": "Mean    Δp", "dp_rms": "RMS Δp",
        "same_top": "Same top p"}


def plain(out, through=None) -> None:
    """The small model with its quantized weights as f16; experts rounded to the type `through` before."""
    sys.path.insert(0, str(REPO))
    from gguf_tools import ggml
    from gguf_tools.info import role
    from gguf_tools.reader import Reader
    from gguf_tools.writer import StreamWriter

    with Reader(MODEL) as r, StreamWriter(out, None) as w:
        w.copy_metadata(r)
        for t in r.tensors.values():
            w.add_tensor(t.name, t.shape, t.type if t.type.name == "f32" else "f16")
        w.begin_data()
        for t in r.tensors.values():
            data = r.read(t, 0, t.nbytes)
            if t.type.name != "f32":
                x = ggml.dequantize(t.type, data, t.shape[0])
                if through and role(t.name) == "expert":
                    x = ggml.dequantize(through, ggml.quantize(through, x), t.shape[0])
                data = x.astype("float16")
            w.write(t.name, 0, data)


def read_table(text) -> dict:
    """{name in ROWS: [value, error] or value} of what --kl-divergence prints; per cent stay per cent."""
    found = {}
    for key, name in ROWS.items():
        value, error = re.search(rf"^\s*{re.escape(name)}\s*: +(-?[\d.]+)%?(?: +± +([\d.]+))?", text, re.M).groups()
        found[key] = float(value) if error is None else [float(value), float(error)]
    return found


def measure(program, reference, setting, *options) -> dict:
    """ppl: [value, error] of the reference; so_far: its perplexity after each chunk; kl: as read_table()."""
    def run(*argv):
        done = subprocess.run([program, *map(str, argv), *options], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stderr}\nstatus {done.returncode}")
        return done.stdout + done.stderr

    with tempfile.TemporaryDirectory() as folder:
        logits = pathlib.Path(folder) / "logits"
        out = run("-m", reference, "--kl-divergence-base", logits)
        ppl = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", out).groups()
        return {"ppl": [float(x) for x in ppl], "so_far": [float(x) for x in re.findall(r"\[\d+\]([\d.]+),", out)],
                "kl": read_table(run("-m", setting, "--kl-divergence-base", logits, "--kl-divergence"))}


def main() -> None:
    options = ["-f", str(TEXT), "-c", str(N_CTX), "-fa", "off", "--no-repack"]
    with tempfile.TemporaryDirectory() as folder:
        reference, setting = pathlib.Path(folder) / "f16.gguf", pathlib.Path(folder) / f"experts-{TYPE}.gguf"
        plain(reference)
        plain(setting, TYPE)
        found = measure(sys.argv[1], reference, setting, *options)
    options[1] = TEXT.name
    command = "llama-perplexity -m {} --kl-divergence-base logits " + " ".join(options)
    found["commands"] = [command.format("f16.gguf"), command.format(f"experts-{TYPE}.gguf") + " --kl-divergence"]
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
