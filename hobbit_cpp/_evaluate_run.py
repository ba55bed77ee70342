"""How an evaluation runs a model: forward passes in batches or token by token, and the store of a reference's logits."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time

from . import bindings  # noqa: F401  before llama_cpp: it makes llama_cpp use our libraries

import llama_cpp
import numpy as np

from ._progress import Progress
from .memory import MIB, format_bytes

LOGITS_BYTES = 256 * MIB  # of one forward pass; a row of 150,000 tokens is 0.6 MB


class Runner:
    """A loaded model under evaluation.

    one_by_one: every token is a forward pass, as in decoding. A batch would be served nearly all high, because the most
    demanding of its tokens decides about an expert.
    """

    def __init__(self, llm, one_by_one: bool, meter: Progress):
        self.llm, self.one_by_one, self.meter = llm, one_by_one, meter
        self.n_vocab = llm.n_vocab()
        self.passes, self.seconds = 0, 0.0  # in forward passes
        self._rows = max(1, min(llm.n_batch, LOGITS_BYTES // (4 * self.n_vocab)))

    def reset(self) -> None:
        """The next token is the first of a sequence. What is in the slots stays."""
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()

    def logits(self, tokens, first: int = 0):
        """Yields logits [n, n_vocab] float32, valid until the next step: all rows together are those after
        tokens[first:-1], so row i predicts tokens[first + 1 + i]."""
        self.reset()
        at, end = 0, len(tokens) - 1
        while at < end:
            scored = self.one_by_one or at >= first  # decoding asks for logits after every token, a prompt does not
            step = 1 if self.one_by_one else min(self._rows, end - at) if scored else min(self.llm.n_batch, first - at)
            rows = self._decode(tokens[at:at + step], at, scored)
            if at >= first:
                yield rows
            at += step
            self.meter.add(step)

    def _decode(self, tokens, n_past: int, scored: bool) -> np.ndarray:
        llm = self.llm
        llm._batch.set_batch(batch=tokens, n_past=n_past, logits_all=scored)
        start = time.perf_counter()
        llm._ctx.decode(llm._batch)
        self.seconds += time.perf_counter() - start
        self.passes += 1
        n = len(tokens) if scored else 1
        return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(n * self.n_vocab,)).reshape(n, self.n_vocab)

    def greedy(self, prompt, grammar, n_max: int):
        """Yields (token, the model's own first choice) for what it writes after the prompt under a grammar, up to and
        without the end token. The first choice is what it would have written without the grammar."""
        llm = self.llm
        self.reset()
        for part in ([t] for t in prompt[:-1]) if self.one_by_one else [prompt[:-1]]:
            if part:
                llm.eval(part)
        for n, token in enumerate(llm.generate(prompt[-1:], temp=0.0, grammar=grammar, reset=False)):
            if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token) or n == n_max:
                return
            row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(self.n_vocab,))
            self.meter.add(1)
            yield token, int(row.argmax())

    # --- tokens ---

    def prefix(self) -> int:
        """What a sentence is conditioned on: BOS, or the end token where a vocabulary has no BOS."""
        for token in (self.llm.token_bos(), self.llm.token_eos()):
            if token >= 0:
                return token
        raise ValueError(f"{self.llm.model_path}: the vocabulary has neither a begin nor an end token to start a sentence with")

    def tokens(self, text: str) -> list[int]:
        """The prefix and the text's tokens."""
        return [self.prefix(), *self.llm.tokenize(text.encode("utf-8"), add_bos=False)]

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        size = 32
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self.llm._model.vocab, token, buffer, size, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


def text_chunks(llm, path, n_ctx: int, n_chunks: int | None) -> list[list[int]]:
    """The text's tokens, cut into chunks of n_ctx as llama-perplexity does: the end that fills no chunk is left out, and BOS
    takes the place of each chunk's first token where the vocabulary adds one. One line end at the text's end is no part of it."""
    with open(path, "rb") as f:
        text = f.read()
    text = text[:-1] if text.endswith(b"\n") else text
    tokens = llm.tokenize(text, add_bos=True)
    n = len(tokens) // n_ctx
    if n == 0:
        raise ValueError(f"{path} has {len(tokens)} tokens, and a chunk takes {n_ctx}: give a longer text or a smaller --ctx")
    chunks = [tokens[i * n_ctx:(i + 1) * n_ctx] for i in range(n if n_chunks is None else min(n, n_chunks))]
    if llm._model.add_bos_token():
        for chunk in chunks:
            chunk[0] = llm.token_bos()
    return chunks


class Store:
    """Logits of a reference, in a temporary file without a name; read in the order of writing, as often as wanted."""

    def __init__(self, n_rows: int, n_vocab: int):
        self.n_vocab = n_vocab
        needed, folder = 4 * n_rows * n_vocab, tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ValueError(f"the reference's logits take {format_bytes(needed)}, and {folder} has {format_bytes(free)} free: "
                             "give fewer --chunks, or set TMPDIR to a folder with more room")
        self._file = tempfile.TemporaryFile(prefix="hobbit-evaluate-")

    def write(self, logits: np.ndarray) -> None:
        self._file.write(memoryview(np.ascontiguousarray(logits, np.float32)).cast("B"))

    def rewind(self) -> None:
        self._file.seek(0)

    def read(self, n: int) -> np.ndarray:
        """The next n rows, float32 [n, n_vocab]."""
        data = self._file.read(4 * n * self.n_vocab)
        return np.frombuffer(data, np.float32).reshape(n, self.n_vocab)

    def close(self) -> None:
        self._file.close()
