"""hobbit verify: is every byte what the converter wrote?"""

from __future__ import annotations

from gguf_tools.info import print_text

SHOWN = 20  # damaged pieces that are named


def add_parser(commands) -> None:
    p = commands.add_parser("verify", help="compare a converted model with its checksums",
                            description="Read a converted model, main file and sidecar, and compare every byte with the checksums that hobbit convert "
                                        "wrote. Exit status 1 if anything differs, or if there are no checksums.")
    p.add_argument("model", metavar="MODEL.gguf", help="main file of a converted model (its sidecar is read, too), or a sidecar")
    p.add_argument("--threads", type=int, default=2, metavar="N", help="threads that compare (default: %(default)s)")
    p.add_argument("--quiet", action="store_true", help="print what is damaged only")
    p.set_defaults(function=run)


def run(args) -> int:
    from .memory import format_bytes
    from .settings import check_int
    from .verify import verify

    report = verify(args.model, threads=check_int("--threads", args.threads, 1, 64), progress=not args.quiet)
    for line in report.damaged[:SHOWN]:
        print_text(f"damaged: {line}")
    if len(report.damaged) > SHOWN:
        print_text(f"damaged: {len(report.damaged) - SHOWN} more")
    if not args.quiet and not report.damaged:
        print_text(f"{args.model}: all is well: {len(report.files)} file{'s' if len(report.files) > 1 else ''}, {format_bytes(report.nbytes)} in {report.pieces:,} pieces")
    return 1 if report.damaged else 0
