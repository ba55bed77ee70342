"""Runs models through llama.cpp's C API, ordinary and offloaded ones alike: what these tests need and no more.

    with engine.Model(path, t1=1.0, budget_kind=engine.MIN) as model:
        logits, tokens = engine.run(model, prompt, n_ubatch=64, generate=50)

Repacking of weights (use_extra_bufts) is off unless asked for: it changes the order of sums.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from gguf_tools.reader import Reader
from hobbit_cpp import _libs

_libs.ensure()

from hobbit_cpp import bindings as hobbit  # noqa: E402
from hobbit_cpp.convert import convert  # noqa: E402
from llama_cpp import llama_cpp as llama  # noqa: E402

BYTES, AT_LEAST, FRACTION, MIN = range(4)  # enum hobbit_budget
SKIP, LOW, HIGH = range(3)                 # enum hobbit_precision
HIT, LOAD, EVICT, SKIPPED, PREFETCH = range(5)  # enum hobbit_event_kind
EVENTS = {HIT: "hit", LOAD: "load", EVICT: "evict", SKIPPED: "skip", PREFETCH: "prefetch"}
DEFAULT_MODEL = Path(_libs.__file__).parent / "data" / "books-8x2-small-q8_0.gguf"
SAMPLE_TEXT = DEFAULT_MODEL.with_name("sample.txt")
POLICIES = {"lru": 0, "lfu": 1, "hobbit": 2, "lcu": 3, "follow": 4}

llama.llama_backend_init()


class DecodeError(Exception):
    pass


def cache_dir() -> Path:
    """A folder for models that live as long as the test session."""
    return _cache_dir()


@functools.lru_cache(maxsize=None)
def _cache_dir() -> Path:
    path = tempfile.mkdtemp(prefix="hobbit-test-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


_pairs: dict[tuple[str, str], Path] = {}


def pair(src, low: str = "q4_0") -> Path:
    """The dual GGUF of src whose high copies are the source's own bytes."""
    key = (os.fspath(src), low)
    if key not in _pairs:
        out = cache_dir() / f"{len(_pairs)}-{Path(src).stem}-{low}.gguf"
        convert(src, out, "keep", low)
        _pairs[key] = out
    return _pairs[key]


class Model:
    """A loaded model; .h is its engine, None for an ordinary one. Parameters: struct hobbit_params."""

    def __init__(self, path, *, n_expert_used: int | None = None, extra_bufts: bool = False, load_mtp: bool = False, **params):
        p = hobbit.hobbit_params()
        hobbit.hobbit_default_params(p)
        p.t1 = p.t2 = 1.0
        for key, value in params.items():
            if key == "policy_weights":
                value = (ctypes.c_float * 4)(*value)
            assert hasattr(p, key), key
            setattr(p, key, value)
        if hobbit.hobbit_set_load_params(p) != 0:
            raise ValueError(hobbit.hobbit_last_error().decode())
        mp = llama.llama_model_default_params()
        mp.use_extra_bufts = extra_bufts
        mp.load_mtp = load_mtp
        if n_expert_used is not None:
            overrides = (llama.llama_model_kv_override * 2)()
            overrides[0].key = f"{architecture(path)}.expert_used_count".encode()
            overrides[0].tag = llama.LLAMA_KV_OVERRIDE_TYPE_INT
            overrides[0].value.val_i64 = n_expert_used
            mp.kv_overrides = overrides
        self.handle = llama.llama_model_load_from_file(str(path).encode(), mp)
        why = hobbit.hobbit_last_error().decode()
        hobbit.hobbit_set_load_params(None)
        if not self.handle:
            raise ValueError(why)
        self.h = hobbit.hobbit_from_model(self.handle)
        self.vocab = llama.llama_model_get_vocab(self.handle)
        self.n_vocab = llama.llama_vocab_n_tokens(self.vocab)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()

    def free(self):
        if self.handle:
            llama.llama_model_free(self.handle)
        self.handle = None

    def tokenize(self, text: bytes, n_max: int) -> list[int]:
        out = (llama.llama_token * (len(text) + 8))()
        n = llama.llama_tokenize(self.vocab, text, len(text), out, len(out), True, False)
        assert n > 0
        return list(out[:min(n, n_max)])

    def stats(self, layer: int | None = None):
        s = hobbit.hobbit_stats()
        if layer is None:
            hobbit.hobbit_get_stats(self.h, s)
        else:
            assert hobbit.hobbit_get_layer_stats(self.h, layer, s) == 0
        return s

    def info(self):
        i = hobbit.hobbit_info()
        hobbit.hobbit_get_info(self.h, i)
        return i

    def group(self, index: int = 0):
        g = hobbit.hobbit_group_info()
        assert hobbit.hobbit_get_group(self.h, index, g) == 0
        return g

    def set_thresholds(self, t1: float, t2: float):
        assert hobbit.hobbit_set_thresholds(self.h, t1, t2) == 0

    def trace(self, path):
        """Context manager: records the routing into path."""
        return _Trace(self, path)

    def events(self) -> list[tuple]:
        """From now on (kind, layer, expert, precision) of every event is appended to the list given back."""
        out: list[tuple] = []
        self.hooks = hobbit.hobbit_hooks()  # kept: C has pointers into it
        self.hooks.event = hobbit.hobbit_event_fn(
            lambda _user, kind, layer, expert, precision, _slot: out.append((EVENTS[kind], layer, expert, precision)))
        hobbit.hobbit_set_hooks(self.h, self.hooks)
        return out


class _Trace:
    def __init__(self, model, path):
        self.model, self.path = model, path

    def __enter__(self):
        assert hobbit.hobbit_trace_start(self.model.h, str(self.path).encode()) == 0, hobbit.hobbit_last_error()

    def __exit__(self, *_):
        assert hobbit.hobbit_trace_stop(self.model.h) == 0, hobbit.hobbit_last_error()


class Context:
    """Further parameters: struct llama_context_params. With embeddings=True, decode() gives embeddings, not logits."""

    def __init__(self, model: Model, *, n_ctx: int = 512, n_ubatch: int = 512, n_seq_max: int = 1, n_threads: int = 2, **params):
        p = llama.llama_context_default_params()
        p.n_ctx = n_ctx
        p.n_batch = n_ctx
        p.n_ubatch = n_ubatch
        p.n_seq_max = n_seq_max
        p.n_threads = p.n_threads_batch = n_threads
        p.kv_unified = True
        for key, value in params.items():
            assert hasattr(p, key), key
            setattr(p, key, value)
        self.model = model
        self.output, self.width = ((llama.llama_get_embeddings_ith, llama.llama_model_n_embd(model.handle)) if p.embeddings
                                   else (llama.llama_get_logits_ith, model.n_vocab))
        self.handle = llama.llama_init_from_model(model.handle, p)
        assert self.handle

    def __enter__(self):
        return self

    def __exit__(self, *_):
        llama.llama_free(self.handle)
        self.handle = None

    def clear(self):
        """Forget everything; positions start at 0 again."""
        llama.llama_memory_clear(llama.llama_get_memory(self.handle), True)

    def decode(self, tokens, pos=0, seq=0, all_logits: bool = True) -> np.ndarray:
        """One llama_decode(); float32 [n, n_vocab] of all tokens, or of the last. pos: of the first token, or
        of each; seq: of all, or of each."""
        n = len(tokens)
        poss = range(pos, pos + n) if np.isscalar(pos) else pos
        seqs = [seq] * n if np.isscalar(seq) else seq
        b = llama.llama_batch_init(n, 0, 1)
        b.n_tokens = n
        for i in range(n):
            b.token[i], b.pos[i] = int(tokens[i]), int(poss[i])
            b.n_seq_id[i], b.seq_id[i][0] = 1, int(seqs[i])
            b.logits[i] = all_logits or i == n - 1
        status = llama.llama_decode(self.handle, b)
        llama.llama_batch_free(b)
        if status != 0:
            why = hobbit.hobbit_decode_error(self.model.h).decode() if self.model.h else ""
            raise DecodeError(f"{status} {why}")
        rows = range(n) if all_logits else [n - 1]
        return np.stack([self.row(i) for i in rows])

    def row(self, i: int) -> np.ndarray:
        """What the last pass gave for a token; valid until the next."""
        return np.ctypeslib.as_array(self.output(self.handle, i), shape=(self.width,))


def fraction(dual, part: float, n_expert_used: int = 0) -> dict:
    """Parameters for a budget of this part of all experts at high precision, raised to the floor."""
    info = hobbit.hobbit_info()
    assert hobbit.hobbit_probe(str(dual).encode(), n_expert_used, info) == 0, hobbit.hobbit_last_error()
    return {"budget_kind": AT_LEAST, "cache_bytes": int(part * info.high_bytes)}


def run(model: Model, prompt, *, n_ubatch: int = 512, generate: int = 0, n_ctx: int | None = None, **context):
    """Logits of every token of the prompt and of the greedy tokens after it, and those tokens."""
    with Context(model, n_ctx=n_ctx or len(prompt) + generate + 8, n_ubatch=n_ubatch, **context) as c:
        logits, tokens = [c.decode(prompt)], []
        for i in range(generate):
            tokens.append(int(logits[-1][-1].argmax()) % model.n_vocab)
            logits.append(c.decode(tokens[-1:], len(prompt) + i))
        return np.concatenate(logits), tokens


def prompt(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, n_vocab, n - 1).tolist()]


def text_tokens(model: Model, path: Path, n: int, offset: int = 0) -> list[int]:
    """The first n tokens of a text, from a byte on."""
    with open(path, "rb") as f:
        f.seek(offset)
        return model.tokenize(f.read(8 * n), n)


def architecture(path) -> str:
    with Reader(str(path)) as r:
        return r.get("general.architecture")
