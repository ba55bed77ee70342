"""hobbit imatrix: how large the inputs of each expert are on a text."""

from __future__ import annotations


def add_parser(commands) -> None:
    p = commands.add_parser("imatrix", help="make an importance matrix for hobbit convert",
                            description="Run a text through an ordinary GGUF and record how large the inputs of each routed expert are; "
                                        "hobbit convert --imatrix makes better low copies with it.")
    p.add_argument("model", metavar="SRC.gguf", help="the model to be converted; it is mapped and need not fit into memory")
    p.add_argument("--text", metavar="FILE", required=True, help="text like what the model is for; some hundred thousand tokens do")
    p.add_argument("-o", "--output", metavar="FILE.gguf", required=True)
    p.add_argument("--chunks", type=int, metavar="N", help="so many chunks at most (default: all of the text)")
    p.add_argument("--ctx", type=int, default=512, metavar="N", help="tokens of a chunk (default: %(default)s)")
    p.add_argument("--threads", type=int, metavar="N", help="computing threads (default: half of the cores)")
    p.add_argument("-ngl", "--gpu-layers", type=int, metavar="N", help="layers on the GPU, -1: all (default: none)")
    p.add_argument("--force", action="store_true", help="replace the output")
    p.set_defaults(function=run)


def run(args) -> int:
    from .imatrix import imatrix

    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be at least 1, not {args.threads}")
    given = {"n_threads": args.threads, "n_threads_batch": args.threads, "n_gpu_layers": args.gpu_layers}
    counts = imatrix(args.model, args.text, args.output, n_ctx=args.ctx, chunks=args.chunks, force=args.force, progress=True,
                     **{k: v for k, v in given.items() if v is not None})
    never = sum(int((c == 0).sum()) for c in counts.values())
    least = min(int(c.min()) for c in counts.values())
    print(f"{args.output}: {len(counts)} expert tensors; the least used expert saw {least:,} tokens" + (f", {never} experts' tensors none" if never else ""))
    return 0
