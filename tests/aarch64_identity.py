"""MODEL.gguf DUAL.gguf: the same logits from both, where everything is read at high precision? Exit status 1 if not. See aarch64.sh."""

import platform
import sys

import numpy as np

from hobbit_cpp import Llama

PROMPT = b"The old man sat by the fire and began to tell the children a story."


def logits(path, **offload):
    """Of a prompt in one batch and of tokens after it, one at a time."""
    with Llama(path, n_ctx=128, n_threads=2, n_threads_batch=2, verbose=False, logits_all=True, **offload) as llm:
        tokens = llm.tokenize(PROMPT)
        llm.eval(tokens[:-4])
        for t in tokens[-4:]:
            llm.eval([t])
        return llm.scores[:len(tokens)].copy(), llm.offload_stats() if offload else None


stock, _ = logits(sys.argv[1])
ours, stats = logits(sys.argv[2], t1=1.0, cache_bytes="min")
low, _ = logits(sys.argv[2], t1=0.0, cache_bytes="min")
totals = stats["totals"]
print(f"{platform.machine()}: {stock.shape[0]} tokens, {totals['misses_high']} misses, {totals['loads_high']} loads; "
      f"all high {'equals' if np.array_equal(stock, ours) else 'DIFFERS FROM'} stock, largest difference at T1 = 0: {np.abs(stock - low).max():.3f}")
sys.exit(not (np.array_equal(stock, ours) and totals["loads_high"] > 0 and not np.array_equal(stock, low)))
