"""What pairs and thresholds cost in quality: `hobbit evaluate` on several pairs of types and sizes of the cache, one table.

    python benchmarks/quality.py MODEL-f16.gguf --text FILE --pairs f16+q4_0 q8_0+q4_k [--t 0.6/0.9] [--chunks 4]

The reference is the model given. Each pair is converted, and measured all high, in the worst case, and as served with so
large a part of the experts (at high precision) in slots. docs/evaluate.md says what the numbers mean.
"""

import argparse
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hobbit_cpp.convert import convert  # noqa: E402
from hobbit_cpp.evaluate import evaluate  # noqa: E402


def line(name, run):
    d = run.divergence
    far = "| | | |" if d is None else (f"| {d.kl_mean.value:.4f} ± {d.kl_mean.error:.4f} | {d.kl_99.value:.3f} "
                                       f"| {100 * d.same_top.value:.1f} ± {100 * d.same_top.error:.1f} % |")
    print(f"| {name} | {run.perplexity.value:.3f} ± {run.perplexity.error:.3f} {far}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--text", required=True)
    p.add_argument("--pairs", nargs="+", default=["f16+q4_0"])
    p.add_argument("--t", default="0.6/0.9", help="T1/T2 (default: 0.6/0.9)")
    p.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5])
    p.add_argument("--chunks", type=int, default=4)
    a = p.parse_args()
    t1, t2 = (float(x) for x in a.t.split("/"))
    common = dict(text=a.text, reference=a.model, chunks=a.chunks, progress=True)

    print(f"{os.path.basename(a.model)}, {a.chunks} chunks, T1/T2 {a.t}\n\n| | perplexity | mean KL | 99th percentile | same first choice |\n|---|---|---|---|---|", flush=True)
    line("the ordinary model", evaluate(a.model, text=a.text, chunks=a.chunks, progress=True).runs[0])
    with tempfile.TemporaryDirectory(prefix="hobbit-quality-") as folder:
        for pair in a.pairs:
            high, low = pair.split("+")
            dual = os.path.join(folder, f"{pair}.gguf")
            convert(a.model, dual, high=high, low=low)
            line(f"{pair}, all high", evaluate(dual, t1=1.0, cache_bytes="100%", **common).runs[0])
            line(f"{pair}, worst case", evaluate(dual, t1=t1, t2=t2, cache_bytes="25%", modes="worst", **common).runs[0])
            for share in a.shares:
                line(f"{pair}, as served with {share:.0%}", evaluate(dual, t1=t1, t2=t2, cache_bytes=f"{100 * share:g}%", **common).runs[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
