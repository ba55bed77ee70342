"""The models that a comparison of types needs, in a folder of their own: made once, used again by later runs.

Every model is a pair (docs/format.md). A uniform type is the high copy of a pair, run with t1=1. The reference is
the model as it was given: a pair whose high copies stay in its file.
"""

from __future__ import annotations

import os

import numpy as np

from gguf_tools import ggml
from gguf_tools.errors import GGUFError
from gguf_tools.reader import SPLIT_NAME, Reader

from ._convert_plan import check_source, choose_types, find_experts, parse_type
from ._tuning_source import original
from .convert import ConvertError, convert, source_id
from .memory import format_bytes

LADDER = ("q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k")  # each about one bit below the one before
LEAST = "tq1_0"  # below q2_k; for copies that nobody reads


def shown(kind: str) -> str:
    """A type as people write it: q6_K."""
    return kind.replace("_k", "_K")


def pair_name(high: str, low: str) -> str:
    return f"{shown(high)}+{shown(low)}"


class Models:
    """Pairs made of one model.

    model   a GGUF whose experts are wide enough to make the types from, or a converted one: then its high copies
            are what everything is made from
    folder  where the pairs lie, made if it is not there. Default: MODEL-tuning in the current folder
    say     called with a line about what is being done

    source     path of the ordinary GGUF that everything is made from
    own        name of its experts' type, the widest if there are several
    Raises ConvertError, in one sentence.
    """

    def __init__(self, model, folder=None, *, threads: int | None = None, progress: bool = False, say=lambda text: None):
        model = os.fspath(model)
        self.folder = os.fspath(folder) if folder is not None else f"{_stem(model)}-tuning"
        self._threads, self._progress, self._say = threads, progress, say
        try:
            with Reader(model) as given:
                if given.get("hobbit.role") is None:
                    check_source(given)  # told before a folder is made
            os.makedirs(self.folder, exist_ok=True)
            self.source = original(model, self.folder, say)
            self._reader = Reader(self.source)
        except GGUFError as error:
            raise ConvertError(str(error)) from None
        except FileExistsError:
            raise ConvertError(f"{self.folder} is no folder: give another one for the models that are compared") from None
        try:
            experts = find_experts(self._reader)
        except BaseException:
            self._reader.close()
            raise
        self.stem, self._id = _stem(self.source), source_id(self._reader)
        widest = max(experts, key=lambda c: c.tensor.type.bits)
        self.own, self._own_bits = widest.tensor.type.name, widest.tensor.type.bits
        self.n_weights = sum(c.n_weights for c in experts)

    @property
    def identity(self) -> list:
        """What tells this source from others: its header, and size and date of its files."""
        return [self._id, *([f.size, os.stat(f.path).st_mtime_ns] for f in self._reader.files)]

    def ladder(self, types=None) -> list[str]:
        """Names of the types to compare, widest first: those given, or LADDER, that are narrower than the source's.

        ConvertError for a given type that cannot be made.
        """
        if types is None:
            names = [t for t in LADDER if ggml.type_info(t).bits < self._own_bits and self.possible(*self.uniform(t))]
            if not names:
                raise ConvertError(f"{self.source} has experts of {self.own}: nothing narrower to compare with; give the model it was made from")
        else:
            names = list(dict.fromkeys(self.check(t) for t in types))
        return sorted((t for t in names if t != self.own), key=lambda t: -ggml.type_info(t).bits)

    def check(self, kind: str) -> str:
        """The type's name; ConvertError where copies of it cannot be made from the source."""
        found = parse_type(kind, "the type", False)
        if found.bits > self._own_bits or (found.bits == self._own_bits and found.name != self.own):
            raise ConvertError(f"{shown(found.name)} ({found.bits:.4g} bits) cannot be made from {self.source}, whose experts are {self.own} "
                               f"({self._own_bits:.4g} bits): give a wider source, or leave the type out")
        return found.name

    @property
    def reference(self) -> tuple[str, str]:
        """The pair whose high copies are the source's own."""
        return self.own, self.uniform(self.own)[1]

    def uniform(self, kind: str) -> tuple[str, str]:
        """The pair that stands for a uniform type."""
        return kind, "q2_k" if ggml.type_info(kind).bits > ggml.type_info("q2_k").bits else LEAST

    def bits(self, kind: str) -> float:
        """Bits per weight of the experts as that type, replacements where rows do not fit included."""
        experts = self._plan(*self.uniform(kind))
        return 8 * sum(c.nbytes("high") for c in experts) / self.n_weights

    def _plan(self, high: str, low: str):
        experts = find_experts(self._reader)
        choose_types(self._reader, experts, self.asked(high), low, False, True)
        return experts

    def asked(self, high: str) -> str:
        """As convert() takes it. Where the source has several types, its narrower tensors stay as they are."""
        return "keep" if high == self.own else f"<={high}"

    def possible(self, high: str, low: str) -> bool:
        """Can the pair be made? Not where a low copy would not be smaller than its high one."""
        try:
            self._plan(high, low)
        except ConvertError:
            return False
        return True

    def layers(self, recorded: np.ndarray, high: str, low: str) -> np.ndarray:
        """simulate.LAYER [n_layers] of a pair, made or not; recorded: the same of the reference."""
        where = {}
        for c in self._plan(high, low):
            where.setdefault((c.layer, c.projection.startswith("ch")), []).append(c)
        out, groups = recorded.copy(), {}
        for layer, copies in zip(out, (where[k] for k in sorted(where))):
            key = tuple((c.tensor.shape, c.high.id, c.low.id) for c in copies)
            layer["group"] = groups.setdefault(key, len(groups))
            for which in ("high", "low"):
                sizes = [c.nbytes(which) // c.n_expert for c in copies]
                layer[f"{which}_bytes"] = sizes + [0] * (3 - len(sizes))
        return out

    def path(self, high: str, low: str) -> str:
        return os.path.join(self.folder, f"{self.stem}.{pair_name(high, low)}.gguf")

    def stored(self, high: str, low: str | None) -> int:
        """Bytes of all experts as that pair, or as the high type alone."""
        experts = self._plan(high, low or self.uniform(high)[1])
        return sum(c.nbytes("high") + (c.nbytes("low") if low else 0) for c in experts)

    def pair(self, high: str, low: str) -> str:
        """Path of the pair's main file; made if it is not there or was made from another model."""
        path = self.path(high, low)
        if self._usable(path):
            return path
        link = high == self.own
        self._say(f"making {path} ({format_bytes(self.stored(high, low) - (self.stored(high, None) if link else 0))} of experts)")
        convert(self.source, path, self.asked(high), low, link=link, force=True, threads=self._threads, progress=self._progress)
        return path

    def _usable(self, path: str) -> bool:
        sidecar = path.removesuffix(".gguf") + ".experts.gguf"
        try:
            with Reader(path) as main, Reader(sidecar) as experts:
                return (experts.get("hobbit.source.id") == self._id and main.get("hobbit.pair_id") == experts.get("hobbit.pair_id")
                        and os.stat(path).st_mtime >= max(os.stat(f.path).st_mtime for f in self._reader.files))
        except (GGUFError, OSError):
            return False

    def close(self) -> None:
        self._reader.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _stem(path: str) -> str:
    name = os.path.basename(path)
    match = SPLIT_NAME.match(name)
    return match[1] if match else name.removesuffix(".gguf")


