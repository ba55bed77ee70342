"""hobbit env: the settings of a model as variables that every program of llama.cpp built here takes (docs/tools.md)."""

from __future__ import annotations

import argparse
import warnings

from . import doctor


def add_parser(commands) -> None:
    from .cli import add_model_arguments, add_offload_arguments

    p = commands.add_parser("env", help="print settings as variables for llama.cpp's own programs",
                            description="Print what hobbit run would choose for a model, one NAME=VALUE a line, for llama.cpp's own programs: "
                                        "env $(hobbit env MODEL.gguf --ctx 4096) llama-server -m MODEL.gguf -c 4096. Loads no model.")
    p.add_argument("model", metavar="MODEL.gguf")
    add_model_arguments(p)
    add_offload_arguments(p)
    p.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    for name, value in variables(args).items():
        print(f"HOBBIT_{name}={value}")
    return 0


def variables(args) -> dict:
    """{name without HOBBIT_: value}. ValueError where there is nothing to say, or it cannot be said."""
    model = doctor.model(args)
    if not model["offloaded"]:
        raise ValueError(f"{args.model} is an ordinary GGUF: it takes no settings")
    if model["budget"] is None:
        raise ValueError("what a GPU has left is known when the model is there: give --cache a size")
    if model["policy_weights"]:
        warnings.warn("policy_weights cannot be said in a variable: equal weights are used", RuntimeWarning)
    found = {"CACHE": model["budget"], "T1": model["t1"], "T2": model["t2"], "POLICY": model["policy"]}
    more = {"SKIP_MASS": args.skip_mass, "LOW_FRACTION": model["low_fraction"] or None, "IO_THREADS": args.io_threads,
            "NO_DIRECT_IO": "true" if args.no_direct_io else None, "HOST_COPIES": args.host_copies, "MISS": args.miss,
            "VERIFY": "true" if args.verify else None, "UNIFIED_MEMORY": args.unified_memory, "PREFETCH": args.prefetch, "PREFETCH_COPY": args.prefetch_copy,
            "PREFETCH_RANKS": args.prefetch_ranks, "NO_PROMPT_PREFETCH": "true" if args.no_prompt_prefetch else None, "LEAN": args.lean}
    return {**found, **{name: value for name, value in more.items() if value is not None}}
