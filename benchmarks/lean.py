"""What routing that leans to residents costs and saves: `hobbit evaluate` at several strengths, as served token by token.

    python benchmarks/lean.py PAIR.gguf --text FILE [--original MODEL-f16.gguf] [--t1 1] [--cache 25%] [--chunks 4] [--lean 0 0.02 0.05]

Two measures, both against the pair with all experts high and no leaning: the mean KL divergence, and the change of the mean loss (ln of the
perplexities' ratio) with the error of the paired difference. --original adds the KL divergence from that file, which has the quantization
in it. Bytes are those loaded per token.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hobbit_cpp.evaluate import evaluate  # noqa: E402

NONE = 1e-7  # of the spread: served token by token as the others are, but no choice changes


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("pair")
    p.add_argument("--text", required=True)
    p.add_argument("--original", metavar="FILE")
    p.add_argument("--t1", type=float, default=1.0)
    p.add_argument("--cache", default="25%")
    p.add_argument("--chunks", type=int, default=4)
    p.add_argument("--lean", type=float, nargs="+", default=[0, 0.02, 0.05, 0.1, 0.2])
    a = p.parse_args()
    common = dict(text=a.text, chunks=a.chunks, t1=a.t1, cache_bytes=a.cache, modes="served", n_threads=1, direct_io=False)

    print(f"{os.path.basename(a.pair)}, T1 {a.t1:g}, {a.cache} of the experts in slots, {a.chunks} chunks of 512\n")
    print("| lean | MB/token | | choices changed | perplexity | change of the loss | mean KL |" + (" mean KL to the original |" if a.original else ""))
    print("|---|---|---|---|---|---|---|" + ("---|" if a.original else ""), flush=True)
    first = None
    for lean in a.lean:
        run = evaluate(a.pair, lean=lean or NONE, **common).runs[0]
        t, d = run.totals, run.divergence
        first = first or t["bytes_per_token"]
        row = (f"| {lean:g} | {t['bytes_per_token'] / 1e6:.3f} | {100 * (t['bytes_per_token'] / first - 1):+.1f} % | {100 * t['leaned'] / t['requests']:.1f} % "
               f"| {run.perplexity.value:.3f} | {d.ln_ratio.value:+.4f} ± {d.ln_ratio.error:.4f} | {d.kl_mean.value:.4f} ± {d.kl_mean.error:.4f} |")
        if a.original:
            d = evaluate(a.pair, lean=lean or NONE, reference=a.original, **common).runs[0].divergence
            row += f" {d.kl_mean.value:.4f} ± {d.kl_mean.error:.4f} |"
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
