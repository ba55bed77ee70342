"""What a setting costs in quality: perplexity and divergence from a reference, minimal pairs, structured output.

    from hobbit_cpp.evaluate import evaluate
    report = evaluate("mixtral.gguf", text="wiki.test.raw", chunks=20, modes=("served", "worst"), cache_bytes="25%")
    print(report.table())
    print(report.runs[0].divergence.kl_mean)

docs/evaluate.md says what the numbers mean.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

import numpy as np

from . import bindings  # noqa: F401  before llama_cpp: it makes llama_cpp use our libraries

from . import _evaluate_pairs as pairs_
from . import _evaluate_structured as structured_
from . import _load
from ._evaluate_report import TITLES, Report, Run
from ._evaluate_run import Runner, Store, text_chunks
from ._evaluate_stats import Divergence, TextScores, Value
from ._paths import check_text
from ._progress import Progress
from .llama import Llama
from .settings import DEFAULTS, check_int

__all__ = ["Divergence", "Evaluator", "MODES", "Report", "Run", "Value", "evaluate"]

MODES = ("served", "worst")
N_CTX = 512
OTHER_N_CTX = 512  # at least that much context where sentences or tool calls are read


class Evaluator:
    """One reference and one text, many settings: the reference runs once, its logits wait in a temporary file.

        with Evaluator(reference, text="book.txt", n_ctx=256, pick=lambda chunks: chunks[:16]) as e:
            run = e.measure("pair.gguf", "served", t1=0.7, t2=1.0, cache_bytes=2**30)

    reference, text, n_ctx, arguments as for evaluate(); pick takes from the text's chunks (lists of tokens) those to use.
    """

    def __init__(self, reference, *, text, n_ctx: int = N_CTX, pick=None, progress: bool = False, **arguments):
        self._work = _Work(reference, text, n_ctx, None, None, None, False, progress, pick)
        self._base = _run(self._work, "reference", self._work.model, _of_reference(arguments, _is_dual(self._work.model)), None)

    @property
    def chunks(self) -> list[list[int]]:
        """The tokens of each chunk. All but a chunk's last go through a model that is measured."""
        return self._base.tokens[1]

    def measure(self, model, mode: str, **arguments) -> Run:
        """A run under a setting against the reference. mode "served" and "worst" as for evaluate(), token by token even where
        t1 is 1; "high": in batches."""
        more = {"force_miss": True} if mode == "worst" else {}
        return _run(self._work, mode, _load.check_path(model), {**arguments, **more}, self._base).report(self._base)

    def close(self) -> None:
        self._base.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def evaluate(model, *, text=None, reference=None, modes=None, n_ctx: int = N_CTX, chunks: int | None = None, pairs=None,
             n_pairs: int | None = None, structured: bool = False, progress: bool = False, **arguments) -> Report:
    """Evaluate a model under the settings given against a reference.

    model       main file of a dual GGUF, or an ordinary GGUF
    text        file to measure perplexity and divergence on
    reference   file to compare with: an ordinary GGUF, or a dual one, of which all experts come at high precision.
                Default: the model itself that way; of an ordinary GGUF there is no such default, and no divergence
    modes       "served": token by token with the cache in the loop, as decoding serves them; "worst": token by token, and
                no expert is ever found in memory; or both. Default: served. An ordinary GGUF has no modes
    n_ctx       tokens of a chunk, at least 4; the second half of each counts
    chunks      evaluate so many chunks at most; default: all that the text has
    pairs       JSON-lines file of minimal pairs, {"good": ..., "bad": ..., "set": ...} each
    n_pairs     take so many of them, evenly spread; default: all
    structured  check JSON under a grammar and the structure of tool calls
    progress    show a progress line on stderr if that is a terminal
    arguments   as for Llama: t1, t2, cache_bytes, policy, n_gpu_layers, n_threads, ... The reference gets all of them but
                those that choose precisions (and an ordinary file those of llama_cpp.Llama only)

    The reference is run first, in batches (where every expert comes at high precision, what is in memory changes nothing),
    and closed before the setting is loaded; its logits wait in a temporary file, 4 bytes x vocabulary for each token that
    counts. Memory in use is that of one model and a few hundred MiB.

    Returns a Report. Raises ValueError or TypeError, in one sentence, for arguments and files that are wrong, OSError for files that
    cannot be read, and HobbitError where a forward pass fails.
    """
    work = _Work(model, text, n_ctx, chunks, pairs, n_pairs, structured, progress)
    for name in ("n_batch", "n_ubatch", "logits_all", "force_miss", "verbose_prompt"):
        if name in arguments:
            raise TypeError(f"{name} is evaluate()'s own to set")
    offloaded = _is_dual(work.model)
    modes = _check_modes(modes, offloaded, work.model, arguments)
    if reference is None and offloaded:
        reference = work.model
    with contextlib.ExitStack() as stack:
        base = base_run = None
        if reference is not None:
            base = _run(work, "reference", os.fspath(reference), _of_reference(arguments, _is_dual(os.fspath(reference))), None)
            stack.callback(base.close)
            base_run = base.report(None)
        runs = []
        for mode in modes:
            more = {"force_miss": True} if mode == "worst" else {}
            found = _run(work, mode, work.model, {**arguments, **more}, base)
            stack.callback(found.close)
            runs.append(found.report(base))
        return Report(model=work.model, text=None if text is None else os.fspath(text), n_ctx=n_ctx, n_chunks=found.n_chunks,
                      n_tokens=found.n_chunks * work.scored_per_chunk, pairs=None if pairs is None else os.fspath(pairs),
                      reference=base_run, runs=runs)


class _Work:
    """What every run does, checked."""

    def __init__(self, model, text, n_ctx, chunks, pairs, n_pairs, structured, progress, pick=None):
        self.model = _load.check_path(model)
        self.pick = pick
        self.text, self.structured, self.progress = text, structured, progress
        if text is None and pairs is None and not structured:
            raise ValueError("there is nothing to evaluate: give a text, minimal pairs, or structured")
        self.n_ctx = check_int("n_ctx", n_ctx, 4, 2**31 - 1)
        self.chunks = None if chunks is None else check_int("chunks", chunks, 1, 2**31 - 1)
        n_pairs = None if n_pairs is None else check_int("n_pairs", n_pairs, 1, 2**31 - 1)
        self.pairs = None if pairs is None else pairs_.read_pairs(pairs, n_pairs)
        if text is not None:
            check_text(text)  # before a model is loaded

    @property
    def first(self) -> int:
        """Position in a chunk of the first token whose logits count."""
        return self.n_ctx // 2

    @property
    def scored_per_chunk(self) -> int:
        return self.n_ctx - 1 - self.first

    @property
    def context(self) -> int:
        """Context to load a model with."""
        return max(self.n_ctx, OTHER_N_CTX) if self.pairs or self.structured else self.n_ctx


@dataclass
class _Found:
    """What a run found; of a reference, what the others are compared with."""
    mode: str
    model: str
    work: _Work
    n_chunks: int = 0
    tokens: tuple | None = None  # (size of the vocabulary, chunks of the text, tool calls)
    text: TextScores | None = None
    store: Store | None = None  # of a reference
    margins: np.ndarray | None = None  # of the pairs
    calls: structured_.Structure | None = None
    json: structured_.JsonScores | None = None
    totals: dict | None = None
    settings: dict | None = None
    passes: int = 0
    pass_seconds: float = 0.0
    seconds: float = 0.0

    def report(self, base) -> Run:
        return Run(
            mode=self.mode, model=self.model, perplexity=self.text and self.text.perplexity(),
            divergence=self.text.divergence() if self.text and base else None,
            pairs=None if self.margins is None else pairs_.score(self.work.pairs, self.margins, base and base.margins),
            json=self.json, tools=None if self.calls is None else structured_.score_calls(self.calls, base and base.calls),
            totals=self.totals, settings=self.settings, passes=self.passes,
            pass_seconds=self.pass_seconds, seconds=self.seconds)

    def close(self) -> None:
        if self.store:
            self.store.close()


def _is_dual(path: str) -> bool:
    return _load.read_metadata(_load.check_path(path)).get("hobbit.role") == "main"


def _check_modes(modes, offloaded: bool, model: str, arguments: dict) -> tuple[str, ...]:
    if modes is not None:
        modes = (modes,) if isinstance(modes, str) else tuple(modes)
        for mode in modes:
            if mode not in MODES:
                raise ValueError(f"a mode must be {' or '.join(MODES)}, not {mode!r}")
        if not modes:
            raise ValueError(f"give at least one mode: {', '.join(MODES)}")
        if not offloaded:
            raise ValueError(f"{model} is an ordinary GGUF, which is served in one way only: leave out the mode, or convert it first (hobbit convert)")
    if not offloaded:
        return ("ordinary",)
    t1 = arguments.get("t1")
    if isinstance(t1, (int, float)) and t1 >= 1 and not arguments.get("lean"):
        return ("high",)
    return tuple(dict.fromkeys(modes or ("served",)))


def _of_reference(arguments: dict, dual: bool) -> dict:
    if dual:
        changes = ("t2", "lean", "prefetch", "prefetch_copy", "prefetch_ranks")  # the numbers, or nothing in batches
        return {**{k: v for k, v in arguments.items() if k not in changes}, "t1": 1.0}
    return {k: v for k, v in arguments.items() if k not in DEFAULTS}


def _run(work: _Work, mode: str, path: str, arguments: dict, base: _Found | None) -> _Found:
    """One pass over everything; a reference (mode "reference") keeps its logits."""
    start = time.perf_counter()
    found = _Found(mode, path, work)
    with Llama(path, n_ctx=work.context, n_batch=min(work.context, 512), **{"verbose": False, **arguments}) as llm:
        meter = Progress(1, work.progress, "tok/s", 1, TITLES[mode])
        runner = Runner(llm, mode in MODES, meter)
        try:
            _do(work, runner, found, base)
        except BaseException:
            found.close()
            raise
        finally:
            meter.clear()
        if llm.is_offloaded:
            s = llm.offload_stats()
            found.totals, found.settings = s["totals"], s["settings"]
        found.passes, found.pass_seconds = runner.passes, runner.seconds
    found.seconds = time.perf_counter() - start
    return found


def _do(work: _Work, runner: Runner, found: _Found, base: _Found | None) -> None:
    llm = runner.llm
    chunks = text_chunks(llm, work.text, work.n_ctx, work.chunks) if work.text is not None else []
    if work.pick:
        chunks = work.pick(chunks)
    sentences = pairs_.tokenize(runner, work.pairs) if work.pairs else []
    calls = [structured_.label(runner, structured_.document(tools)) for tools in structured_.DOCUMENTS] if work.structured else []
    found.n_chunks, found.tokens = len(chunks), (runner.n_vocab, chunks, [tokens for tokens, _ in calls])
    if base is not None and found.tokens != base.tokens:
        raise ValueError(f"{found.model} and the reference {base.model} do not turn a text into the same tokens: they cannot be compared")
    # what is written is not known before: counted as what is read
    runner.meter.total = max(1, sum(map(len, chunks)) + sum(map(len, sentences)) + sum(len(tokens) for tokens, _ in calls))
    if chunks:
        _read_text(work, runner, found, base)
    if sentences:
        found.margins = pairs_.margins(runner, sentences)
    if work.structured:
        found.calls = structured_.read_calls(runner, calls)
        found.json = structured_.write_json(runner)


def _read_text(work: _Work, runner: Runner, found: _Found, base: _Found | None) -> None:
    found.text = TextScores()
    if found.mode == "reference":
        found.store = Store(found.n_chunks * work.scored_per_chunk, runner.n_vocab)
    elif base is not None:
        base.store.rewind()
    for tokens in found.tokens[1]:
        at = work.first + 1
        for logits in runner.logits(tokens, work.first):
            n = len(logits)
            if found.store:
                found.store.write(logits)
            found.text.add(logits, tokens[at:at + n], base and base.store.read(n))
            at += n
