"""hobbit frontier: quality against bytes loaded, of uniform types and mixed settings under one budget."""

from __future__ import annotations

import argparse
import json
import sys

from .settings import POLICIES


def add_common(p: argparse.ArgumentParser) -> None:
    """What frontier and calibrate share."""
    p.add_argument("model", metavar="MODEL.gguf", help="a model with wide experts, such as f16, or a converted one, whose high copies then are the reference")
    p.add_argument("--text", metavar="FILE", required=True, help="text like the one that the model will be used for")
    p.add_argument("--types", metavar="T,T,...", help="types to compare (default: q8_0,q6_K,q5_K,q4_K,q3_K,q2_K, as far as they are narrower than the model's)")
    p.add_argument("--ctx", type=int, metavar="N", help="tokens of a chunk of text, of which the second half counts (default: 256)")
    p.add_argument("--work", metavar="DIR", help="folder for the models that are made; later runs use them again (default: MODEL-tuning in the current folder)")
    p.add_argument("--threads", type=int, metavar="N", help="computing threads (default: half of the cores)")
    p.add_argument("-ngl", "--gpu-layers", type=int, metavar="N", help="layers on the GPU, -1: all (default: none)")
    p.add_argument("--io-threads", type=int, metavar="N", help="reads in flight (default: 4)")
    p.add_argument("--json", action="store_true", help="print all numbers as JSON")


def common_arguments(args) -> dict:
    """Keyword arguments for Llama."""
    from .cli import llama_arguments

    for name, least in (("ctx", 4), ("threads", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, not {getattr(args, name)}")
    own = dict.fromkeys(("t1", "t2", "skip_mass", "cache", "policy", "low_fraction", "host_copies", "unified_memory", "miss",
                         "prefetch", "prefetch_copy", "prefetch_ranks", "lean"))  # what is compared is set for each setting
    return llama_arguments(argparse.Namespace(**{**vars(args), **own, "no_direct_io": False, "no_profile": False, "no_prompt_prefetch": False, "verify": False}))


def say(text: str) -> None:
    """A step of the work, for people who watch."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, file=sys.stderr)


def split_list(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip().lower() for part in text.split(",") if part.strip()]


def add_parser(commands) -> None:
    p = commands.add_parser("frontier", help="compare quantizations and mixed settings under one memory budget",
                            description="Mean KL divergence against bytes loaded per token, as served token by token under one budget, of uniform types "
                                        "and of mixed pairs.")
    add_common(p)
    p.add_argument("--cache", metavar="SIZE", required=True, help="memory for experts: 8GiB, or 25%% of all experts as given")
    p.add_argument("--pairs", nargs="*", metavar="HIGH+LOW", help="mixed pairs, such as q6_K+q4_K (default: types two steps apart; nothing after it: none)")
    p.add_argument("--thresholds", nargs="+", metavar="T1/T2", help="for the pairs; 0.7/0.7: what is beyond is skipped (default: 0.7/0.95 0.6/1)")
    p.add_argument("--policy", nargs="+", choices=POLICIES, default=["hobbit"], help="(default: hobbit)")
    p.add_argument("--low-fraction", type=float, default=0.0, metavar="X", dest="low_share", help="share of the memory for low copies of the pairs (default: 0)")
    p.add_argument("--chunks", type=int, metavar="N", help="chunks of text to decode for each setting (default: 16, or as many as the text has)")
    p.add_argument("--read-speed", metavar="SIZE", help="bytes a second that loads run at, such as 1.5GB, for the predicted tok/s (default: measured)")
    p.add_argument("--png", metavar="FILE", help="draw the plane")
    p.add_argument("--html", metavar="FILE", help="the same as one file for a browser, with the numbers under the pointer")
    p.set_defaults(function=run)


def parse_thresholds(text: str) -> tuple[float, float]:
    try:
        t1, t2 = map(float, text.split("/"))
    except ValueError:
        raise ValueError(f"--thresholds is {text!r}: give T1/T2, such as 0.7/0.95") from None
    return t1, t2


def run(args) -> int:
    from . import _tuning_plot as plot
    from . import frontier as module
    from .memory import parse_bytes

    arguments = common_arguments(args)
    drawings = [path for path in (args.png, args.html) if path]
    if drawings:
        plot.check(drawings)  # before anything takes long
    report = module.frontier(
        args.model, text=args.text, cache=args.cache, types=split_list(args.types),
        pairs=None if args.pairs is None else [module.parse_pair(p) for p in args.pairs],
        thresholds=[parse_thresholds(t) for t in args.thresholds] if args.thresholds else module.THRESHOLDS, policies=args.policy,
        low_fraction=args.low_share, n_ctx=args.ctx or module.N_CTX, chunks=args.chunks,
        speed=None if args.read_speed is None else float(parse_bytes(args.read_speed)), work=args.work, progress=True, say=say, **arguments)
    for path in drawings:
        plot.save(report, path)
    print(json.dumps(report.to_dict(), indent=1, allow_nan=False) if args.json else report.table())
    return 0
