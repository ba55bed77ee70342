"""MODEL.gguf DUAL.gguf: the same logits from both, where everything is read at high precision? Exit status 1 if not. See aarch64.sh.

Without repacking of weights, which llama.cpp does for ordinary files on ARM and which makes other sums.
"""

import platform
import sys

import numpy as np

import engine

PROMPT = [1, *range(300, 316)]


def logits(path, **offload):
    with engine.Model(path, **offload) as model:
        return np.asarray(engine.run(model, PROMPT, generate=4)[0])


stock = logits(sys.argv[1])
ours = logits(sys.argv[2], t1=1.0, budget_kind=engine.MIN)
low = logits(sys.argv[2], t1=0.0, t2=0.0, budget_kind=engine.MIN)
same = np.array_equal(stock, ours)
print(f"{platform.machine()}: logits of {len(stock)} tokens; all high {'equals' if same else 'DIFFERS FROM'} stock; "
      f"T1 = T2 = 0 {'equals it, too, so that this says nothing' if np.array_equal(stock, low) else 'does not'}")
sys.exit(not same or np.array_equal(stock, low))
