"""What settings cost in quality: perplexity, and KL divergence to the ordinary model, token by token as in decoding.

    python benchmarks/quality.py MODEL-f16.gguf --text FILE --pairs f16+q4_0 q8_0+q4_k [--t 0.6/0.9] [--chunks 4]

Definitions as in llama-perplexity: chunks of 512 tokens, each begun with BOS; the second half of each counts.
KL is the mean of sum p log(p/q), p of the ordinary model. Worst case: every request a miss. As served: with so
large a part of the experts (at high precision) in slots. A prompt in one batch would be served nearly all high,
because the most demanding token decides; therefore one token at a time.
"""

import argparse
import os
import sys
import tempfile

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hobbit_cpp import Llama  # noqa: E402
from hobbit_cpp.convert import convert  # noqa: E402

CHUNK = 512


def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def scores(llm, chunks, one_by_one):
    """Log probabilities after each token of the second half of each chunk but its last: [n][255, n_vocab] float32."""
    out = []
    for tokens in chunks:
        llm.reset()
        if one_by_one:
            for t in tokens:
                llm.eval([t])
        else:
            llm.eval(tokens)
        out.append(log_softmax(llm.scores[CHUNK // 2:CHUNK - 1]).astype(np.float32))
    return out


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
    args = dict(n_ctx=CHUNK, n_batch=CHUNK, logits_all=True, verbose=False)

    with Llama(a.model, **args) as llm, open(a.text, "rb") as f:
        tokens = llm.tokenize(f.read(a.chunks * CHUNK * 16), add_bos=False)
        chunks = [[llm.token_bos(), *tokens[i * (CHUNK - 1):(i + 1) * (CHUNK - 1)]] for i in range(a.chunks)]
        base = scores(llm, chunks, False)

    def report(name, got):
        nll = np.array([-row[np.arange(len(row)), c[CHUNK // 2 + 1:]] for row, c in zip(got, chunks)]).ravel()
        kl = np.array([(np.exp(b.astype(np.float64)) * (b - g)).sum(axis=1) for b, g in zip(base, got)]).ravel()
        same = np.mean([b.argmax(axis=1) == g.argmax(axis=1) for b, g in zip(base, got)])
        print(f"| {name} | {np.exp(nll.mean()):.3f} | {kl.mean():.4f} +- {kl.std() / np.sqrt(len(kl)):.4f} | {np.percentile(kl, 99):.3f} | {100 * same:.1f} % |", flush=True)

    print(f"{os.path.basename(a.model)}, {a.chunks} chunks, T1/T2 {a.t}\n\n| | perplexity | mean KL | 99th percentile | same first choice |\n|---|---|---|---|---|", flush=True)
    report("the ordinary model", base)
    with tempfile.TemporaryDirectory(prefix="hobbit-quality-") as folder:
        for pair in a.pairs:
            high, low = pair.split("+")
            dual = os.path.join(folder, f"{pair}.gguf")
            convert(a.model, dual, high=high, low=low)
            with Llama(dual, t1=1.0, cache_bytes="100%", **args) as llm:
                report(f"{pair}, all high", scores(llm, chunks, False))
            with Llama(dual, t1=t1, t2=t2, cache_bytes="25%", force_miss=True, **args) as llm:
                report(f"{pair}, worst case", scores(llm, chunks, True))
            for share in a.shares:
                with Llama(dual, t1=t1, t2=t2, cache_bytes=f"{100 * share:g}%", **args) as llm:
                    report(f"{pair}, as served with {share:.0%}", scores(llm, chunks, True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
