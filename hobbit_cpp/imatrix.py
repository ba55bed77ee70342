"""Importance matrix of the routed experts: how large each input of each expert is on a text, for quantizing its low copy.

    from hobbit_cpp.imatrix import imatrix
    imatrix("mixtral-q8_0.gguf", "calibration.txt", "mixtral.imatrix.gguf", chunks=100)

For each expert tensor X the file has X.in_sum2 (f32 [n_in, n_expert]: sum over the tokens that the router gave the expert of each
input's square) and X.counts (f32 [1, n_expert]: how many tokens). That is llama-imatrix's form and definition, of the
routed experts alone; `hobbit convert --imatrix` takes both tools' files.
"""

from __future__ import annotations

import ctypes
import os

from . import bindings  # noqa: F401  before llama_cpp: it makes llama_cpp use our libraries

import llama_cpp
import numpy as np
from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter

from . import _libs, _load
from ._convert_plan import EXPERT_NAME
from ._evaluate_run import text_chunks
from ._paths import check_folder, check_text
from ._progress import Progress
from .errors import HobbitError
from .llama import Llama
from .settings import check_int

__all__ = ["imatrix"]

N_CTX = 512


class _Tensor(ctypes.Structure):
    """struct ggml_tensor (ggml.h of the pinned llama.cpp); its size is checked against the library's."""


_Tensor._fields_ = [
    ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4), ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32), ("src", ctypes.POINTER(_Tensor) * 10), ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t), ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64), ("extra", ctypes.c_void_p), ("padding", ctypes.c_char * 8),
]
_OBJECT_BYTES = 32  # struct ggml_object, in front of every tensor


class _Collector:
    """Sees the products with expert tensors as a graph runs, and adds up the squares of their inputs."""

    def __init__(self):
        self.sums: dict[str, np.ndarray] = {}    # [n_expert, n_in], float64
        self.counts: dict[str, np.ndarray] = {}  # [n_expert]
        self.error: Exception | None = None      # of a callback, which cannot raise
        lib = ctypes.CDLL(str(next(_libs.lib_dir().glob("libggml-base.*"))))
        lib.ggml_tensor_overhead.restype = ctypes.c_size_t
        if lib.ggml_tensor_overhead() != ctypes.sizeof(_Tensor) + _OBJECT_BYTES:
            raise HobbitError("this build's ggml lays out its tensors in another way than the pinned one")
        self._get = lib.ggml_backend_tensor_get
        self._get.argtypes, self._get.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t], None
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._see)

    def _see(self, address, ask, _user):
        try:
            src = ctypes.cast(address, ctypes.POINTER(_Tensor)).contents.src
            name = src[0].contents.name.decode("utf-8", "replace") if src[0] else ""
            if not EXPERT_NAME.match(name) or not src[2] or self.error:
                return not ask  # of no interest; the run goes on
            if not ask:
                self._add(name, src[0].contents, src[1], src[2])
        except Exception as error:  # noqa: BLE001  told after the run
            self.error = error
        return True

    def _read(self, tensor, dtype) -> np.ndarray:
        """The values of a tensor [ne2, ne1, ne0], which may be a view and lie on a device."""
        t = tensor.contents
        n0, n1, n2 = t.ne[0], t.ne[1], t.ne[2]
        size = (n2 - 1) * t.nb[2] + (n1 - 1) * t.nb[1] + n0 * t.nb[0]
        raw = np.empty(size, np.uint8)
        self._get(ctypes.addressof(t), raw.ctypes.data, 0, size)
        return np.lib.stride_tricks.as_strided(raw.view(dtype), (n2, n1, n0), (t.nb[2], t.nb[1], t.nb[0]))

    def _add(self, name, weight, x, ids) -> None:
        n_in, n_expert = weight.ne[0], weight.ne[2]
        chosen = self._read(ids, np.int32)[0]                        # [n_tokens, n_used]
        squares = self._read(x, np.float32).astype(np.float64) ** 2  # [n_tokens, n_used or 1, n_in]
        squares = np.broadcast_to(squares, (*chosen.shape, n_in))
        sums = self.sums.setdefault(name, np.zeros((n_expert, n_in)))
        counts = self.counts.setdefault(name, np.zeros(n_expert, np.int64))
        for expert in np.unique(chosen):
            here = chosen == expert
            sums[expert] += squares[here].sum(axis=0)
            counts[expert] += here.sum()


def imatrix(model, text, out, *, n_ctx: int = N_CTX, chunks: int | None = None, force: bool = False, progress: bool = False,
            **arguments) -> dict[str, np.ndarray]:
    """Run a text through a model and write what its experts saw.

    model      an ordinary GGUF (mapped: it need not fit into memory), the one to be converted or the same at another precision
    text       text file; cut into chunks of n_ctx tokens as llama-imatrix does, each a sequence of its own
    out        file to write, GGUF
    n_ctx      tokens of a chunk, at least 16
    chunks     so many at most; default: all that the text has
    force      replace an existing file
    progress   show a progress line on stderr if that is a terminal
    arguments  further arguments of Llama: n_threads, n_gpu_layers, ...

    Returns {tensor name: tokens of each expert}. Raises ValueError or TypeError, in one sentence, for arguments and files that are
    wrong, OSError for files that cannot be read or written, HobbitError where the model gives numbers that are not finite.
    """
    path, out = _load.check_path(model), os.fspath(out)
    n_ctx = check_int("n_ctx", n_ctx, 16, 2**31 - 1)
    chunks = None if chunks is None else check_int("chunks", chunks, 1, 2**31 - 1)
    _check_model(path)
    check_folder(out)
    check_text(text)
    if os.path.lexists(out) and not force:
        raise ValueError(f"{out} exists already: give another output name, or force (--force) to replace it")
    seen = _Collector()
    with StreamWriter(out, None, overwrite=force) as w:  # first: what cannot be written is told before the work
        with Llama(path, n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ctx, verbose=False, **arguments) as llm:
            parts = text_chunks(llm, text, n_ctx, chunks)
            _run(llm, parts, seen, progress)
        _write(w, seen, os.fspath(text), len(parts), n_ctx)
    return seen.counts


def _check_model(path: str) -> None:
    with Reader(path) as r:
        if r.get("hobbit.role") is not None:
            raise ValueError(f"{path} is a converted model: give the model that it was made from")
        if not any(EXPERT_NAME.match(name) for name in r.tensors):
            raise ValueError(f"{path} has no routed experts")


def _run(llm, parts, seen: _Collector, progress: bool) -> None:
    params = llm.context_params
    params.cb_eval = seen.callback
    meter = Progress(sum(map(len, parts)), progress, "tokens/s", 1)
    context = llama_cpp.llama_init_from_model(llm._model.model, params)
    if not context:
        raise HobbitError(f"{llm.model_path}: llama.cpp cannot make a context of {llm.n_ctx()} tokens")
    try:
        for tokens in parts:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            # logits of all: the last layer leaves out the tokens that give none
            llm._batch.set_batch(batch=tokens, n_past=0, logits_all=True)
            status = llama_cpp.llama_decode(context, llm._batch.batch)
            if seen.error:
                raise seen.error
            if status != 0:
                raise HobbitError(f"{llm.model_path}: llama_decode returned {status}")
            meter.add(len(tokens))
    finally:
        meter.clear()
        llama_cpp.llama_free(context)


def _write(w: StreamWriter, seen: _Collector, text: str, n_chunks: int, n_ctx: int) -> None:
    for name, sums in seen.sums.items():
        if not np.isfinite(sums).all():
            raise HobbitError(f"the inputs of {name} are not finite")
    w.add("general.type", "imatrix")
    w.add("imatrix.datasets", [text], "str")
    w.add("imatrix.chunk_count", n_chunks, "u32")
    w.add("imatrix.chunk_size", n_ctx, "u32")
    for name, sums in seen.sums.items():
        w.add_tensor(name + ".in_sum2", sums.shape[::-1], "f32")
        w.add_tensor(name + ".counts", (1, len(sums)), "f32")
    w.begin_data()
    for name, sums in seen.sums.items():
        w.write(name + ".in_sum2", 0, sums.astype(np.float32))
        w.write(name + ".counts", 0, seen.counts[name].astype(np.float32))
