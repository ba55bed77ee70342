"""Mixed use of one process for a long time: does memory grow, is a token lost, is the output still stock llama.cpp's?

    python benchmarks/soak.py [MODEL.gguf] [--seconds 3600] [--seed N]

Cycle after cycle: load the pair with a random small budget and random settings; completions with prompts of random length,
streams that are left, cancels by another thread and by an abort function, changed settings, hooks, traces, saved states, failing
hooks, several sequences in one batch; at the end of the cycle prompts and new tokens in all-high mode against stock llama.cpp with
the same batches, bit for bit. Memory is compared between cycles, when the pair is closed. The exit status is 0 if all is well.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import hobbit_cpp  # noqa: E402
import numpy as np  # noqa: E402
from hobbit_cpp import Cancelled, HobbitError, Llama  # noqa: E402  before llama_cpp
import llama_cpp  # noqa: E402
from hobbit_cpp.convert import convert  # noqa: E402

DATA = pathlib.Path(hobbit_cpp.__file__).parent / "data"
COMMON = {"n_ctx": 768, "n_batch": 256, "n_ubatch": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "logits_all": True}
WARM_UP = 0.2  # share of the cycles before memory counts: heaps and caches fill


class Failed(Exception):
    pass


def check(condition, what):
    if not condition:
        raise Failed(what)


class Deliberate(Exception):
    """Raised by a hook."""


class Batches:
    """Several sequences in one llama_decode(), on a context of its own."""

    def __init__(self, model, n_seq):
        p = llama_cpp.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.n_threads, p.n_threads_batch, p.kv_unified = 512, 256, 256, n_seq, 1, 1, True
        self.ctx, self.n_seq = llama_cpp.llama_init_from_model(model.model, p), n_seq
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model.model))

    def run(self, tokens, first):
        """tokens [n, n_seq] at positions first..first+n-1 of every sequence; logits [n * n_seq, n_vocab]."""
        n = tokens.size
        b = llama_cpp.llama_batch_init(n, 0, 1)
        b.n_tokens = n
        for i, token in enumerate(tokens.ravel()):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = int(token), first + i // self.n_seq, 1, 1
            b.seq_id[i][0] = i % self.n_seq
        code = llama_cpp.llama_decode(self.ctx, b)
        llama_cpp.llama_batch_free(b)
        check(code == 0, f"llama_decode gave {code}")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.ctx), (n, self.n_vocab)).copy()

    def close(self):
        llama_cpp.llama_free(self.ctx)


class Soak:
    def __init__(self, source, folder, seed):
        self.source, self.rng, self.done = str(source), random.Random(seed), {}
        self.folder = pathlib.Path(folder)
        self.pair = self.folder / "pair.gguf"
        convert(self.source, self.pair, "keep", "q2_k", threads=1)
        self.stock = llama_cpp.Llama(self.source, **COMMON)
        self.stock.scores[:] = 0  # the whole array is there from now on, not as far as the longest prompt so far
        pointer = ctypes.pointer(ctypes.c_float())
        for n in range(1, COMMON["n_batch"] + 1):  # with logits_all llama-cpp-python has ctypes make types for each length of a batch, which stay
            np.ctypeslib.as_array(pointer, shape=(n * self.stock.n_vocab(),))
        self.words = (DATA / "sample.txt").read_text(encoding="utf-8").split()
        self.tokens = 0

    def count(self, what):
        self.done[what] = self.done.get(what, 0) + 1

    def prompt(self, most):
        n, at = self.rng.randint(1, most), self.rng.randrange(len(self.words) - most)
        return " ".join(self.words[at:at + n])

    # --- what is done with a loaded model; each leaves it usable ---

    def complete(self, llm):
        n = self.rng.randint(1, 40)
        r = llm(self.prompt(300), max_tokens=n, temperature=self.rng.choice((0, 0.8)), seed=self.rng.randrange(1000))
        got, why = r["usage"]["completion_tokens"], r["choices"][0]["finish_reason"]
        check(got == n if why == "length" else got < n or why == "stop", f"{got} of {n} tokens, {why}")
        self.tokens += got

    def stream(self, llm):
        """Streamed text is the text, token by token."""
        prompt, n = self.prompt(40), self.rng.randint(1, 20)
        whole = llm(prompt, max_tokens=n, temperature=0)
        llm.reset()
        parts = [p["choices"][0]["text"] for p in llm(prompt, max_tokens=n, temperature=0, stream=True)]
        if llm.thresholds[0] >= 1:  # else what is in slots decides, too
            again = llm(prompt, max_tokens=n, temperature=0)
            check("".join(parts) == again["choices"][0]["text"], "a stream and a call differ")
        self.tokens += whole["usage"]["completion_tokens"]

    def leave(self, llm):
        parts = llm(self.prompt(100), max_tokens=100, temperature=0, stream=True)
        for _ in range(self.rng.randint(1, 10)):
            next(parts, None)
        parts.close()

    def cancel(self, llm):
        stop = threading.Timer(self.rng.random() * 0.2, llm.cancel)
        stop.start()
        with contextlib.suppress(Cancelled):
            llm(self.prompt(300), max_tokens=200, temperature=0.8)
        stop.join()

    def abort(self, llm):
        countdown = iter(range(self.rng.randint(0, 3)))
        llm.set_abort(lambda: next(countdown, None) is None)
        with contextlib.suppress(Cancelled):
            llm(self.prompt(300), max_tokens=200, temperature=0.8)
        llm.set_abort(None)

    def settings(self, llm):
        t1 = self.rng.choice((0, 0.3, 0.6, 1))
        llm.thresholds = (t1, max(t1, self.rng.choice((0.9, 1))))
        llm.set_policy(self.rng.choice(("hobbit", "lcu", "lfu", "lru")))
        llm.reset_offload_stats()

    def hooks(self, llm):
        seen = []
        llm.set_hooks(event=lambda *e: seen.append(e[0]), prefetch=lambda layer, *_: llm.prefetch(self.rng.randrange(2), self.rng.randrange(8)))
        self.complete(llm)
        llm.set_hooks()
        check(seen, "no event")

    def failing_hook(self, llm):
        left = [self.rng.randint(0, 50)]

        def fail(*_):
            left[0] -= 1
            if left[0] < 0:
                raise Deliberate
        llm.set_hooks(event=fail)
        try:
            llm(self.prompt(100), max_tokens=30, temperature=0)
        except Deliberate:
            pass
        llm.set_hooks()

    def trace(self, llm):
        path = self.folder / "t.npy"
        with llm.trace(path):
            self.complete(llm)
        rows = np.load(path)
        check(len(rows) > 0 and set(np.unique(rows["layer"])) == set(range(rows["layer"].max() + 1)), "the trace lacks layers")

    def state(self, llm):
        llm.reset()
        llm.eval(llm.tokenize(self.prompt(30).encode()))
        state = llm.save_state()
        self.complete(llm)
        llm.load_state(state)
        check(llm.n_tokens == state.n_tokens, "the state has another length")

    def statistics(self, llm):
        t = llm.offload_stats()["totals"]
        check(t["requests"] == t["hits_high"] + t["hits_low"] + t["misses_high"] + t["misses_low"] + t["skips"], "the counters do not add up")

    # --- against stock ---

    def compare(self, llm):
        """A prompt and greedy tokens, one sequence and several, in all-high mode."""
        llm.thresholds = (1.0, 1.0)
        llm.set_hooks()
        text = llm.tokenize(self.prompt(300).encode())[:500]
        for x in (self.stock, llm):
            x.reset()
            x.eval(text)
        for _ in range(8):
            check(np.array_equal(self.stock.scores[:self.stock.n_tokens], llm.scores[:llm.n_tokens]), "logits differ from stock's")
            token = int(llm.scores[llm.n_tokens - 1].argmax())
            self.stock.eval([token])
            llm.eval([token])
        self.tokens += len(text) + 8
        n_seq = self.rng.randint(2, 4)
        tokens = np.array([self.rng.randrange(3, llm.n_vocab()) for _ in range(12 * n_seq)]).reshape(12, n_seq)
        a, b = Batches(self.stock._model, n_seq), Batches(llm._model, n_seq)
        for first, last in ((0, 9), (9, 10), (10, 12)):
            check(np.array_equal(a.run(tokens[first:last], first), b.run(tokens[first:last], first)), "logits of several sequences differ from stock's")
        a.close()
        b.close()

    def cycle(self, n_uses):
        rng = self.rng
        with Llama(self.pair, cache_bytes=rng.choice(("min", "min", "15%", "40%")), t1=rng.choice((0.3, 0.6, 1)), host_copies=False,
                   policy=rng.choice(("hobbit", "follow", "lru")), n_io_threads=rng.randint(1, 4), direct_io=rng.random() < 0.5,
                   low_fraction=rng.choice((0, 0.3)), **COMMON) as llm:
            uses = (self.complete, self.complete, self.stream, self.leave, self.cancel, self.abort, self.settings, self.hooks, self.failing_hook,
                    self.trace, self.state, self.statistics)
            for _ in range(n_uses):
                use = rng.choice(uses)
                use(llm)
                self.count(use.__name__)
            self.compare(llm)
            self.count("compare")


_libc = ctypes.CDLL(None)


class Mallinfo(ctypes.Structure):  # struct mallinfo2 of glibc
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def in_use():
    """Bytes that somebody has from malloc (0 where it does not tell), and blocks of Python's own allocator."""
    if not hasattr(_libc, "mallinfo2"):
        return 0, sys.getallocatedblocks()
    _libc.mallinfo2.restype = Mallinfo
    info = _libc.mallinfo2()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()


def memory():
    """Resident bytes that are no file's, after everything that can be freed was."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
    with open("/proc/self/status", encoding="ascii") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", default=DATA / "books-8x2-small-q8_0.gguf")
    p.add_argument("--seconds", type=float, default=3600)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--uses", type=int, default=15, help="uses of the model between two loads (default: 15)")
    p.add_argument("--growth", type=float, default=1.0, help="percent that memory may grow by (default: 1)")
    a = p.parse_args()
    end = time.monotonic() + a.seconds
    sizes, began, status = [], time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="hobbit-soak-") as folder:
        soak = Soak(a.model, folder, a.seed)
        try:
            while time.monotonic() < end or len(sizes) < 5:
                soak.cycle(a.uses)
                sizes.append((memory(), len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task")), *in_use()))
                if sys.stderr.isatty():
                    print(f"\rcycle {len(sizes)}: {sizes[-1][0] / 2**20:.1f} MiB, {soak.tokens} tokens ", end="", file=sys.stderr, flush=True)
        except (Failed, HobbitError, RuntimeError, ValueError):
            traceback.print_exc()
            status = 1
    counted = sizes[int(len(sizes) * WARM_UP):]
    part = max(1, len(counted) // 4)
    first, last = (statistics.median(s[0] for s in x) for x in (counted[:part], counted[-part:]))
    growth = 100 * (last / first - 1)
    leaked = [x for x in (1, 2, 3) if statistics.median(s[x] for s in counted[-part:]) > statistics.median(s[x] for s in counted[:part])]
    print(json.dumps({"seconds": round(time.monotonic() - began), "cycles": len(sizes), "tokens": soak.tokens, "uses": soak.done,
                      "memory_MiB": [round(statistics.median(s[0] for s in sizes[i:i + part]) / 2**20, 2) for i in range(0, len(sizes), part)],
                      "malloc_MiB": [round(statistics.median(s[4] for s in sizes[i:i + part]) / 2**20, 2) for i in range(0, len(sizes), part)],
                      "python_blocks": [int(statistics.median(s[5] for s in sizes[i:i + part])) for i in range(0, len(sizes), part)],
                      "memory_first": int(first), "memory_last": int(last), "growth_percent": round(growth, 3),
                      "more_of": [("", "files", "python threads", "threads")[x] for x in leaked]}))
    return status or int(growth > a.growth or bool(leaked))


if __name__ == "__main__":
    sys.exit(main())
