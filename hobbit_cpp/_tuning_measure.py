"""What frontier and calibrate measure with: one reference, the routing of the same text, and settings against both."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass

from . import bindings  # noqa: F401  before llama_cpp: it makes llama_cpp use our libraries

import numpy as np

from . import simulate
from ._evaluate_stats import Divergence, Value
from ._progress import Progress
from ._tuning_ledger import Ledger
from ._tuning_models import Models, pair_name, shown
from .evaluate import Evaluator
from .llama import Llama
from .settings import DEFAULTS, Budget, check_int, check_policy, check_thresholds, parse_budget

N_CTX = 256  # tokens of a chunk
CHUNKS = 16  # of the text, where nothing is said
BATCH = 128  # tokens that go through the model together while the routing is recorded


@dataclass(frozen=True)
class Setting:
    """What can be chosen under one budget. t1 >= 1 is the uniform type `high`; low is then the pair's other half, never read."""
    high: str
    low: str
    t1: float
    t2: float
    policy: str = "hobbit"
    low_fraction: float = 0.0

    def __post_init__(self):
        check_thresholds(self.t1, self.t2)
        check_policy(self.policy, None)

    @property
    def uniform(self) -> bool:
        return self.t1 >= 1

    @property
    def arguments(self) -> dict:
        """For Llama and Simulation."""
        return {"t1": self.t1, "t2": self.t2, "policy": self.policy, "low_fraction": self.low_fraction}

    @property
    def name(self) -> str:
        if self.uniform:
            return shown(self.high)
        return f"{shown(self.high)}, the rest skipped" if self.t1 == self.t2 else pair_name(self.high, self.low)

    def __str__(self) -> str:
        parts = [self.name] + ([] if self.uniform else [f"T1 {self.t1:g}" if self.t1 == self.t2 else f"T1 {self.t1:g}, T2 {self.t2:g}"])
        return ", ".join(parts + ([] if self.policy == DEFAULTS["policy"] else [f"policy {self.policy}"]) + ([f"{100 * self.low_fraction:g} % for low copies"] if self.low_fraction else []))


@dataclass(frozen=True)
class Measured:
    """One setting as served, token by token. bytes_per_token: loaded, and computed by the CPU where it computes; passes and
    pass_seconds: forward passes and their time; miss_speed: bytes/s at which the engine found link and CPU to deal with misses that
    lie in host memory, None where they come from storage."""
    divergence: Divergence
    bytes_per_token: float
    hit_rate: float
    passes: int
    pass_seconds: float
    miss_speed: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.passes / self.pass_seconds

    @classmethod
    def of(cls, plain: dict) -> Measured:
        """From dataclasses.asdict()."""
        divergence = {k: Value(**v) if isinstance(v, dict) else v for k, v in plain["divergence"].items()}
        return cls(**{**plain, "divergence": Divergence(**divergence)})


def _miss_speed(settings: dict) -> float | None:
    """From Llama.offload_stats()["settings"]."""
    if settings["miss_speeds"] is None:
        return None
    link, cpu = settings["miss_speeds"]
    return {"auto": link + cpu, "fetch": link, "cpu": cpu}[settings["miss"]] or None


def spread(chunks: list, n: int | None, part: int = 0, parts: int = 1) -> list:
    """n chunks spread evenly over the text; with parts, those that fall to part 0, 1, ... when they are dealt in turn. None: CHUNKS,
    or as many as there are. ValueError where there are too few."""
    if n is None:
        n = max(1, min(CHUNKS, len(chunks) // parts))
    total = n * parts
    if total > len(chunks):
        raise ValueError(f"the text has {len(chunks)} chunks and {total} are needed: give a longer text, fewer chunks or a smaller context")
    return [chunks[i * len(chunks) // total] for i in range(part, total, parts)]


def check_budget(cache) -> Budget:
    """ValueError for a budget that is not the same for all types."""
    budget = parse_budget(cache)
    if budget.kind not in ("bytes", "fraction"):
        raise ValueError(f"the memory is {cache!r}, which differs between types: give a size such as 8GiB, or a share such as 25%, of the experts as they were given")
    return budget


def budget_bytes(cache, layers: np.ndarray) -> int:
    """Bytes of a budget, a share taken of all experts in `layers`. ValueError as check_budget()."""
    budget = check_budget(cache)
    if budget.kind == "bytes":
        return budget.bytes
    return int(budget.fraction * float((layers["high_bytes"].sum(axis=1) * layers["n_expert"]).sum()))


class Bench:
    """The reference's log probabilities and routing on one part of a text, and settings measured on the same.

    arguments   for Llama: n_threads, n_gpu_layers, ...; none that choose precisions or memory
    """

    def __init__(self, models: Models, text, *, n_ctx: int, pick, progress: bool = False, **arguments):
        self.models, self._arguments, self._progress = models, arguments, progress
        self._ledger = Ledger(os.path.join(models.folder, "measured.jsonl"))
        check_int("n_ctx", n_ctx, 4, 2**31 - 1)
        self._evaluator = Evaluator(models.pair(*models.reference), text=text, n_ctx=n_ctx, pick=pick, progress=progress, profile=False, **arguments)

    @property
    def n_tokens(self) -> int:
        """Tokens that go through a model."""
        return sum(len(c) - 1 for c in self._evaluator.chunks)

    @property
    def n_scored(self) -> int:
        return sum(len(c) - 1 - len(c) // 2 for c in self._evaluator.chunks)

    def record(self) -> simulate.Trace:
        """The reference's routing of the tokens that measure() decodes."""
        path = self.models.pair(*self.models.reference)
        chunks = self._evaluator.chunks
        longest = max(map(len, chunks))
        bar = Progress(self.n_tokens, self._progress, "tokens/s", 1, "routing")
        with tempfile.TemporaryDirectory(prefix="hobbit-tuning-") as folder:
            name = os.path.join(folder, "routing.npy")
            with Llama(path, n_ctx=longest, n_batch=BATCH, n_ubatch=BATCH, logits_all=True, t1=1.0, profile=False, verbose=False,
                       **self._arguments) as llm, contextlib.ExitStack() as stack:
                stack.callback(bar.clear)
                with llm.trace(name):
                    for tokens in chunks:
                        llm.reset()
                        llm.eval(tokens[:-1])  # all logits are asked for: the last layer leaves out tokens that give none
                        bar.add(len(tokens) - 1)
            return simulate.read_trace(name)

    def measure(self, setting: Setting, cache_bytes: int) -> Measured:
        """Decode the text under a setting, with the cache in the loop; what an earlier run finished is taken from its folder."""
        tokens = hashlib.sha256(json.dumps(self._evaluator.chunks).encode()).hexdigest()
        key = Ledger.key(source=self.models.identity, tokens=tokens, setting=dataclasses.asdict(setting), cache_bytes=cache_bytes,
                         arguments={k: str(v) for k, v in self._arguments.items()})
        known = self._ledger.get(key)
        if known is not None:
            return Measured.of(known)
        run = self._evaluator.measure(self.models.pair(setting.high, setting.low), "served", cache_bytes=cache_bytes, profile=False,
                                      **setting.arguments, **self._arguments)
        computed = run.totals["bytes_cpu"] / run.passes
        found = Measured(run.divergence, run.totals["bytes_per_token"] + computed, run.totals["hit_rate"], run.passes, run.pass_seconds,
                         _miss_speed(run.settings))
        self._ledger.put(key, dataclasses.asdict(found), setting=str(setting), cache_bytes=cache_bytes)
        return found

    def quality(self, kind: str) -> Divergence:
        """Divergence of a uniform type, in batches."""
        high, low = self.models.uniform(kind)
        return self._evaluator.measure(self.models.pair(high, low), "high", t1=1.0, profile=False, **self._arguments).divergence

    def skipping(self, t: float) -> Divergence:
        """Divergence of the reference with every expert beyond t of the gate weights skipped and nothing found in memory."""
        return self._evaluator.measure(self.models.pair(*self.models.reference), "worst", t1=t, t2=t, profile=False, **self._arguments).divergence

    def close(self) -> None:
        self._evaluator.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
