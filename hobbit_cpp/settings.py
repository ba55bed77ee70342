"""The offload settings of Llama: their defaults, checks, and the way into struct hobbit_params.

Every check raises TypeError or ValueError in a sentence that names the argument and the allowed range.
Nothing here needs the libraries.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from .memory import parse_bytes

POLICIES = ("lru", "lfu", "hobbit", "lcu", "follow")  # the index is enum hobbit_policy

DEFAULTS = {
    "t1": 0.6,
    "t2": 1.0,
    "cache_bytes": "auto",
    "policy": "hobbit",
    "policy_weights": None,  # a quarter each
    "skip_mass": 1.0,
    "low_fraction": 0.0,
    "n_io_threads": 4,
    "direct_io": True,
    "force_miss": False,
    "verify": False,
    "miss": "auto",
    "miss_speeds": None,  # measured
    "admit": "often",
    "preload": "auto",
    "cpu_batch": 16,
    "host_copies": "auto",
    "unified_memory": "auto",
    "prefetch": 0,
    "prefetch_copy": "rule",
    "prefetch_ranks": 1,
    "prefetch_prompts": True,
    "lean": 0.0,
}

MISS = ("fetch", "cpu", "auto")  # the index is enum hobbit_miss
ADMIT = ("never", "free", "often")  # the index is enum hobbit_admit
PREFETCH_COPY = ("rule", "low", "high")  # the index is enum hobbit_prefetch_copy
MAX_PREFETCH = 3  # layers


def _is_bool(x) -> bool:
    return isinstance(x, bool) or type(x).__name__ in ("bool_", "bool")  # NumPy's is no bool


def check_number(name: str, x, low: float, high: float = math.inf, unit: str = "") -> float:
    """x as a finite float within low..high."""
    allowed = (f"a number of at least {low:g}" if math.isinf(high) else f"a number from {low:g} to {high:g}") + unit
    if _is_bool(x) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be {allowed}, not {x!r} ({type(x).__name__})")
    try:
        x = float(x)
    except OverflowError:
        x = math.inf
    if not math.isfinite(x) or not low <= x <= high:
        raise ValueError(f"{name} must be {allowed}, not {x:g}")
    return x


def check_int(name: str, x, low: int, high: int) -> int:
    if _is_bool(x) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name} must be a whole number from {low} to {high}, not {x!r} ({type(x).__name__})")
    if not low <= x <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {x}")
    return int(x)


def check_bool(name: str, x) -> bool:
    if not _is_bool(x):
        raise TypeError(f"{name} must be True or False, not {x!r}")
    return bool(x)


def check_switch(name: str, x):
    if not _is_bool(x) and not (isinstance(x, str) and x == "auto"):
        raise TypeError(f"{name} must be True, False or 'auto', not {x!r}")
    return x if isinstance(x, str) else bool(x)


def check_host_copies(x):
    """(True, False, "auto" or what was given, bytes where it is a size)."""
    if isinstance(x, str) and x == "auto":
        return x, 0
    if _is_bool(x):
        return bool(x), 0
    if isinstance(x, str):
        try:
            n = parse_bytes(x)
        except ValueError:
            raise ValueError(f"host_copies is {x!r}: give True, False, 'auto', or a size such as '16GiB'") from None
    elif isinstance(x, numbers.Integral):
        n = int(x)
    else:
        raise TypeError(f"host_copies must be True, False, 'auto' or a size, not {x!r}")
    if not 0 < n < 2**63:
        raise ValueError(f"host_copies must be a size of at least 1 byte, not {x!r}")
    return x, n


def check_prefetch(layers, copy, t1: float) -> tuple[int, int]:
    """(layers ahead, -1 for "auto"; enum hobbit_prefetch_copy)."""
    if layers == "auto":
        layers = -1
    elif isinstance(layers, str) or _is_bool(layers) or not isinstance(layers, numbers.Integral):
        raise TypeError(f"prefetch must be a number of layers from 0 (off) to {MAX_PREFETCH}, or 'auto', not {layers!r}")
    elif not 0 <= layers <= MAX_PREFETCH:
        raise ValueError(f"prefetch must be from 0 (off) to {MAX_PREFETCH} layers, or 'auto', not {layers}")
    if copy not in PREFETCH_COPY:
        raise ValueError(f"prefetch_copy must be one of {', '.join(PREFETCH_COPY)}, not {copy!r}")
    if layers and copy == "low" and t1 >= 1:
        raise ValueError("prefetch_copy='low' loads what is wanted at low precision, and with t1 1 or more nothing is: give 'high', or a smaller t1")
    return int(layers), PREFETCH_COPY.index(copy)


def check_thresholds(t1, t2) -> tuple[float, float]:
    """t1 >= 1 means "all high": then t2 has no effect and may be anything."""
    t1 = check_number("t1", t1, 0.0, unit=" (1 or more: every expert at high precision)")
    t2 = check_number("t2", t2, 0.0, unit=" (1 or more: nothing is skipped)")
    if t1 < 1 and t2 < t1:
        raise ValueError(f"t2 must be at least t1, but t1 is {t1:g} and t2 is {t2:g}")
    return t1, t2


def check_policy(policy, weights) -> tuple[int, tuple[float, ...] | None]:
    """(enum hobbit_policy, the four weights or None)."""
    if not isinstance(policy, str):
        raise TypeError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r} ({type(policy).__name__})")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    if weights is None:
        return POLICIES.index(policy), None
    if policy != "hobbit":
        raise ValueError(f"policy_weights belong to policy 'hobbit' and have no effect on '{policy}': leave them out")
    if isinstance(weights, (str, bytes, dict)) or not hasattr(weights, "__len__"):
        raise TypeError(f"policy_weights must be four numbers (recency, frequency, high uses, layer distance), not {weights!r}")
    if len(weights) != 4:
        raise ValueError(f"policy_weights must be four numbers (recency, frequency, high uses, layer distance), not {len(weights)}")
    w = tuple(check_number(f"policy_weights[{i}]", x.item() if hasattr(x, "item") else x, 0.0) for i, x in enumerate(weights))
    if sum(w) == 0:
        raise ValueError("policy_weights must not all be 0")
    return POLICIES.index(policy), w


def check_speeds(speeds) -> tuple[float, float]:
    """(link, CPU) in bytes/s; (0, 0) where they are to be measured."""
    if speeds is None:
        return 0.0, 0.0
    if isinstance(speeds, (str, bytes, dict)) or not hasattr(speeds, "__len__") or len(speeds) != 2:
        raise TypeError(f"miss_speeds must be two numbers, of the link and of the CPU in bytes/s, not {speeds!r}")
    return tuple(check_number(f"miss_speeds[{i}]", x, 1.0, unit=" bytes/s") for i, x in enumerate(speeds))


@dataclass(frozen=True)
class Budget:
    """How much memory the experts get. kind: "bytes", "fraction", "min" or "auto"."""
    kind: str
    bytes: int = 0
    fraction: float = 0.0


BUDGET_FORMS = "a size such as 8GiB, 8GB or 512MiB, a number of bytes, 25% (of all experts at high precision), min or auto"


def parse_budget(x) -> Budget:
    """The cache_bytes argument."""
    if isinstance(x, str):
        text = x.strip().lower()
        if text in ("auto", "min"):
            return Budget(text)
        if text.endswith("%"):
            try:
                percent = float(text[:-1])
            except ValueError:
                percent = math.nan
            if not 0 < percent <= 100:
                raise ValueError(f"cache_bytes is {x!r}: a share must be more than 0 and at most 100 %")
            return Budget("fraction", fraction=percent / 100)
        try:
            n = parse_bytes(x)
        except ValueError:
            raise ValueError(f"cache_bytes is {x!r}: give {BUDGET_FORMS}") from None
        if n < 4096:
            unit = "less than any model needs" if any(c.isalpha() for c in x) else f"which is {n} bytes: give a unit (8GiB), or a share of all experts (25%)"
            raise ValueError(f"cache_bytes is {x!r}, {unit}")
        x = n
    elif _is_bool(x) or not isinstance(x, numbers.Integral):
        raise TypeError(f"cache_bytes is {x!r} ({type(x).__name__}): give {BUDGET_FORMS}")
    if not 0 <= x < 2**63:
        raise ValueError(f"cache_bytes must be from 0 to {2**63 - 1}, not {x}")
    return Budget("bytes", bytes=int(x))


class Settings:
    """Checked settings; what is not given, or None, is the default. Attributes as in DEFAULTS, and:

    given          the arguments that were given, as they were
    budget         Budget
    policy_number  enum hobbit_policy
    """

    def __init__(self, **given):
        self.given = {k: v for k, v in given.items() if v is not None}
        use = {**DEFAULTS, **self.given}
        self.t1, self.t2 = check_thresholds(use["t1"], use["t2"])
        self.budget = parse_budget(use["cache_bytes"])
        self.cache_bytes = use["cache_bytes"] if isinstance(use["cache_bytes"], str) else self.budget.bytes
        self.policy = use["policy"]
        self.policy_number, self.policy_weights = check_policy(use["policy"], use["policy_weights"])
        self.skip_mass = check_number("skip_mass", use["skip_mass"], 0.0, unit=" (1 or more: no bound)")
        self.low_fraction = check_number("low_fraction", use["low_fraction"], 0.0, 1.0)
        self.n_io_threads = check_int("n_io_threads", use["n_io_threads"], 1, 64)
        self.direct_io = check_bool("direct_io", use["direct_io"])
        self.force_miss = check_bool("force_miss", use["force_miss"])
        self.verify = check_bool("verify", use["verify"])
        self.miss = use["miss"]
        if self.miss not in MISS:
            raise ValueError(f"miss must be one of {', '.join(MISS)}, not {self.miss!r}")
        self.admit = use["admit"]
        if self.admit not in ADMIT:
            raise ValueError(f"admit must be one of {', '.join(ADMIT)}, not {self.admit!r}")
        self.cpu_batch = check_int("cpu_batch", use["cpu_batch"], 1, 512)
        self.miss_speeds = check_speeds(use["miss_speeds"])
        self.host_copies, self.host_bytes = check_host_copies(use["host_copies"])
        self.preload = check_switch("preload", use["preload"])
        self.unified_memory = check_switch("unified_memory", use["unified_memory"])
        self.prefetch, self.prefetch_copy = check_prefetch(use["prefetch"], use["prefetch_copy"], self.t1)
        self.prefetch_ranks = check_int("prefetch_ranks", use["prefetch_ranks"], 0, 2**31 - 1)
        for name in ("prefetch_copy", "prefetch_ranks"):
            if name in self.given and not self.prefetch:
                raise ValueError(f"{name} is about what prefetch predicts: give prefetch, too, or leave it out")
        self.prefetch_prompts = check_bool("prefetch_prompts", use["prefetch_prompts"])
        self.lean = check_number("lean", use["lean"], 0.0, 1.0)
        if self.miss == "cpu" and (self.host_copies is False or self.host_bytes):
            raise ValueError("miss='cpu' computes from copies in host memory and needs them all: leave host_copies out, or give True")
        if self.unified_memory is True and (self.miss == "cpu" or self.host_copies is True or self.host_bytes):
            raise ValueError("with unified_memory=True there are no copies beside the slots: leave host_copies and miss='cpu' out")

    def fill(self, params, auto_bytes: int = 0, on_device: bool = False) -> None:
        """Write everything into a hobbit_params; auto_bytes is what "auto" came to: a budget, or with on_device what
        each device must keep for the rest."""
        params.t1, params.t2 = self.t1, self.t2
        params.policy = self.policy_number
        if self.policy_weights is not None:
            params.policy_weights[:] = self.policy_weights
        params.budget_kind = {"bytes": 0, "auto": 4 if on_device else 1, "fraction": 2, "min": 3}[self.budget.kind]
        params.cache_bytes = auto_bytes if self.budget.kind == "auto" else self.budget.bytes
        params.cache_fraction = self.budget.fraction
        params.skip_mass = self.skip_mass
        params.low_fraction = self.low_fraction
        params.n_io_threads = self.n_io_threads
        params.direct_io = self.direct_io
        params.force_miss = self.force_miss
        params.verify = self.verify
        params.miss = MISS.index(self.miss)
        params.admit = ADMIT.index(self.admit)
        params.cpu_batch = self.cpu_batch
        params.link_speed, params.cpu_speed = self.miss_speeds
        params.host_copies = 3 if self.host_bytes else 2 if self.host_copies == "auto" else int(self.host_copies)
        params.host_bytes = self.host_bytes
        params.unified = 2 if self.unified_memory == "auto" else int(self.unified_memory)
        params.preload = 2 if self.preload == "auto" else int(self.preload)
        params.prefetch, params.prefetch_copy, params.prefetch_ranks = self.prefetch, self.prefetch_copy, self.prefetch_ranks
        params.prefetch_prompts = self.prefetch_prompts
        params.lean = self.lean
