"""hobbit calibrate: the fastest setting within a limit of quality."""

from __future__ import annotations

import json
import sys

from ._cli_frontier import add_common, common_arguments, say, split_list


def add_parser(commands) -> None:
    p = commands.add_parser("calibrate", help="find the fastest setting within a limit of quality",
                            description="Find types, thresholds, policy and split of slots that load least per token under a memory budget, with a mean KL "
                                        "divergence within a limit; plain uniform types included. The result is measured on text that it was not fitted on, "
                                        "and written beside the model, where hobbit run and Llama take it from.")
    add_common(p)
    p.add_argument("--budget", "--cache", metavar="SIZE", required=True, help="memory for experts: 8GiB, or 25%% of all experts as given")
    p.add_argument("--max-kl", type=float, metavar="X", required=True, help="most mean KL divergence, in nats, to all experts as given (0.001 to 0.01 are common)")
    p.add_argument("--chunks", type=int, metavar="N", help="chunks of text to fit on, and as many to measure the result on (default: 16, or as many as the text has)")
    p.add_argument("--read-speed", metavar="SIZE", help="bytes a second that loads run at, such as 1.5GB, for the predicted tok/s (default: measured)")
    p.add_argument("-o", "--output", metavar="OUT.gguf", help="write the chosen pair there (default: it stays in the work folder)")
    p.add_argument("--force", action="store_true", help="replace the output")
    p.set_defaults(function=run)


def run(args) -> int:
    from . import calibrate as module
    from .memory import parse_bytes

    found = module.calibrate(
        args.model, text=args.text, budget=args.budget, max_kl=args.max_kl, types=split_list(args.types), n_ctx=args.ctx or module.N_CTX,
        chunks=args.chunks, speed=None if args.read_speed is None else float(parse_bytes(args.read_speed)),
        output=args.output, force=args.force, work=args.work, progress=True, say=say, **common_arguments(args))
    print(json.dumps(found.to_dict(), indent=1, allow_nan=False) if args.json else found.report())
    if not found.quality_kept:
        print(f"error: on unseen text the divergence is over {args.max_kl:g} by more than the error bars; no profile was written", file=sys.stderr)
        return 1
    if not found.bytes_kept:
        print("warning: on unseen text the bytes differ by more than 10 % from the prediction: give more --chunks", file=sys.stderr)
    return 0
