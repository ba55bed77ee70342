"""hobbit evaluate: what a setting costs in quality."""

from __future__ import annotations

import argparse
import json
import sys


def add_evaluate_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL.gguf", help="main file of a converted model, or an ordinary GGUF")
    p.add_argument("--text", metavar="FILE", help="text to measure perplexity and divergence on")
    p.add_argument("--reference", metavar="FILE.gguf", help="what to compare with, such as the f16 original (default: the same model, all experts at high precision)")
    p.add_argument("--mode", choices=("served", "worst", "both"), help="served: token by token with the cache in the loop, as in generation; worst: "
                   "the same, but no expert is ever found in memory (default: served)")
    p.add_argument("--chunks", type=int, metavar="N", help="chunks of the text (default: all)")
    p.add_argument("--pairs", metavar="FILE.jsonl", help='minimal pairs, a line {"good": "...", "bad": "..."} for each')
    p.add_argument("--n-pairs", type=int, metavar="N", help="so many of them, evenly spread (default: all)")
    p.add_argument("--structured", action="store_true", help="check JSON under a grammar, and the structure of tool calls")
    p.add_argument("--json", action="store_true", help="print all numbers as JSON")


def evaluate(args) -> int:
    from . import evaluate as module
    from .cli import llama_arguments

    for name in ("ctx", "chunks", "n_pairs", "threads"):
        least = 4 if name == "ctx" else 1
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    if args.text is None and args.pairs is None and not args.structured:
        raise ValueError("there is nothing to evaluate: give --text, --pairs or --structured")
    modes = {None: None, "both": module.MODES}.get(args.mode, (args.mode,))
    report = module.evaluate(args.model, text=args.text, reference=args.reference, modes=modes, n_ctx=args.ctx or module.N_CTX,
                             chunks=args.chunks, pairs=args.pairs, n_pairs=args.n_pairs, structured=args.structured,
                             progress=True, verbose=args.verbose, **llama_arguments(args))
    print(json.dumps(report.to_dict(), indent=1, allow_nan=False) if args.json else report.table())
    if not report.json_parsed:
        print("error: not every text that was written under a JSON grammar parses", file=sys.stderr)
        return 1
    return 0
