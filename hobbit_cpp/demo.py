"""hobbit demo: the small model that comes along, converted, run with memory for a quarter of its experts, and measured."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from . import memory
from ._cli_run import used_bytes
from .memory import format_bytes

DATA = Path(__file__).parent / "data"
MODEL = DATA / "books-8x2-small-q8_0.gguf"
SAMPLE = DATA / "sample.txt"
PROMPT = "The old man sat by the fire and began to tell the children a story."


def perplexity(llm, text: str, window: int = 256, skip: int = 32) -> tuple[float, int]:
    """(perplexity, tokens scored) of text, cut into windows of so many tokens, the first `skip` of each not scored.

    llm needs logits_all=True. With n_ubatch=1 tokens go through the model one at a time, as in generation; in larger
    batches the most demanding token decides an expert's precision, and nearly all come at high.
    """
    tokens = llm.tokenize(text.encode("utf-8"), add_bos=False)
    loss, n = 0.0, 0
    for start in range(0, len(tokens), window):
        part = tokens[start:start + window]
        if len(part) <= skip:
            break
        llm.reset()
        llm.eval([llm.token_bos(), *part])
        x = llm.scores[skip:len(part)].astype(np.float64)  # row i predicts token i of part
        x -= x.max(axis=1, keepdims=True)
        chosen = x[np.arange(len(x)), part[skip:]]
        loss += float((np.log(np.exp(x).sum(axis=1)) - chosen).sum())
        n += len(x)
    return float(np.exp(loss / n)), n


def _measure(path: Path, t1: float, common: dict) -> dict:
    from .llama import Llama

    with Llama(path, t1=t1, n_batch=512, n_ubatch=1, logits_all=True, **common) as llm:
        value, n = perplexity(llm, SAMPLE.read_text(encoding="utf-8"))
        s = llm.offload_stats()
    return {**s["totals"], "perplexity": value, "scored": n, "budget": s["budget"]["budget_bytes"], "used": used_bytes(s["budget"])}


def demo(prompt: str | None = None, threads: int | None = None) -> int:
    from .convert import DEFAULT_PRESET, PRESETS, convert
    from .llama import Llama

    started = time.perf_counter()
    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be at least 1, not {threads}")
    common = {"cache_bytes": "25%", "n_ctx": 512, "n_threads": threads, "verbose": False}
    print("A small mixture-of-experts model: 6 layers of 8 experts, of which each token uses 2.\n")
    with tempfile.TemporaryDirectory(prefix="hobbit-demo-") as folder:
        path = Path(folder) / "demo.gguf"
        high, low = PRESETS[DEFAULT_PRESET]
        report = convert(MODEL, path, high, low)
        print(f"1. Convert: every expert is stored twice, at high precision (8 bits) and at low precision (2 bits).\n"
              f"   High copies {format_bytes(report.high_bytes)}, low copies {format_bytes(report.low_bytes)}, "
              f"the rest of the model {format_bytes(report.main_bytes)}\n")

        with Llama(path, **common) as llm:
            s = llm.offload_stats()
            g, b = s["groups"][0], s["budget"]
            print(f"2. Generate, with {format_bytes(b['budget_bytes'])} for experts, a quarter of what all of them take at high precision.\n"
                  f"   Besides the read buffers that is room for {g['high_slots']} high copies and {g['low_slots']} low of {g['n_layers'] * g['n_expert']} experts;\n"
                  f"   the others stay in the file and are read when a token needs them.\n")
            text = prompt or PROMPT
            print(text, end="", flush=True)
            for chunk in llm.create_completion(text, max_tokens=90, temperature=0.7, seed=7, stream=True):
                print(chunk["choices"][0]["text"], end="", flush=True)
            last = llm.last_stats["decode"]
            print(f"\n\n   ({last['evaluated'] / last['seconds']:.0f} tokens per second on {llm.n_threads} "
                  f"thread{'s' if llm.n_threads > 1 else ''})\n", flush=True)

        mixed, full = _measure(path, 0.6, common), _measure(path, 1.0, common)
    _print_table(mixed, full)
    print(f"\n   This whole process, Python included, took at most {format_bytes(memory.peak_rss())} of memory "
          f"and {time.perf_counter() - started:.0f} seconds.")
    print("\nNext: hobbit convert YOUR-MODEL.gguf -o OUT.gguf, then hobbit run OUT.gguf")
    return 0


def _print_table(mixed: dict, full: dict) -> None:
    def percent(key):
        return lambda m: f"{100 * m[key]:.1f} %"

    print(f"3. Measure: {mixed['scored']} tokens of a short story, one at a time, as in generation, with the same memory.\n")
    rows = [
        ("memory for experts: budget", lambda m: format_bytes(m["budget"]), "what it was allowed"),
        ("memory for experts: used", lambda m: format_bytes(m["used"]), "slots and buffers, never above the budget"),
        ("experts served at high", percent("share_high"), "the important ones, and those in memory anyway"),
        ("experts served at low", percent("share_low"), "not in memory and of little weight: the small copy will do"),
        ("experts skipped", percent("share_skip"), "none unless asked for (t2 below 1)"),
        ("found in memory", percent("hit_rate"), "the rest had to be read"),
        ("read per token", lambda m: format_bytes(m["bytes_per_token"]), "this is what takes the time of a large model"),
        ("perplexity", lambda m: f"{m['perplexity']:.2f}", "how surprised the model is by the story; lower is better"),
    ]
    print(f"   {'':<28}{'mixed':>12}{'all high':>12}   what it says")
    for name, value, meaning in rows:
        print(f"   {name:<28}{value(mixed):>12}{value(full):>12}   {meaning}")
    fewer = 1 - mixed["bytes_per_token"] / full["bytes_per_token"]
    worse = mixed["perplexity"] / full["perplexity"] - 1
    print(f"\n   Mixed precision read {100 * fewer:.0f} % fewer bytes; the perplexity changed by {100 * worse:+.1f} %.")


if __name__ == "__main__":
    sys.exit(demo())
