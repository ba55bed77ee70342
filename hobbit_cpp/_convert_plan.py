"""What becomes of each routed expert tensor: which types its two copies get, and why."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from gguf_tools import ggml
from gguf_tools.errors import printable
from gguf_tools.ggml import TypeInfo
from gguf_tools.reader import Reader, Tensor


class ConvertError(ValueError):
    """Why a model cannot be converted, in one sentence."""

    def __init__(self, text: str):
        super().__init__(printable(text))


# docs/format.md
EXPERT_NAME = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down|gate_up)_(ch)?exps\.weight$")
OLD_EXPERT_NAME = re.compile(r"^blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight$")  # one tensor per expert, before 2024-04

PROJECTIONS = ("gate", "up", "gate_up", "down")

# Architectures of the pinned llama.cpp that can load gate and up as one tensor (users of
# create_tensor_gate_up_exps() in src/models, and gemma4, which does the same itself).
FUSED_ARCHITECTURES = ("cohere2moe", "deepseek2", "deepseek2-ocr", "gemma4", "granite_swa", "hy_v3", "mistral4",
                       "qwen35moe", "qwen3next", "qwen4exp")

# Architectures whose loader knows expert tensors, but whose graph does not use them (test_architectures.py finds them).
UNUSED_EXPERTS = ("refact",)

# tensor_type_fallback() of llama.cpp's src/llama-quant.cpp
_SUBSTITUTES = {
    "iq4_nl": ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"),
    "q4_0": ("q2_0", "q2_k", "q3_k", "tq1_0", "tq2_0"),
    "q5_0": ("q4_k",),
    "q5_1": ("q5_k",),
    "q8_0": ("q6_k",),
}

# Types for models that were trained with one or two bits. Other weights come out of them with half of their
# square lost (measured on Gaussian rows: q1_0 0.36, q2_0 0.52, tq1_0 and tq2_0 0.66; q2_k 0.09), so they are
# never taken as a substitute.
TERNARY = ("q1_0", "q2_0", "tq1_0", "tq2_0")


@dataclass
class Copies:
    """One routed expert tensor and the types of its two copies."""
    tensor: Tensor
    layer: int
    projection: str  # gate, up, gate_up, down; with "ch" in front for chunk experts
    high_asked: str
    low_asked: str
    high: TypeInfo = None
    low: TypeInfo = None
    fallbacks: list[str] = field(default_factory=list)  # "tensor: asked -> used (reason)"

    @property
    def n_in(self) -> int:
        return self.tensor.shape[0]

    @property
    def n_out(self) -> int:
        return self.tensor.shape[1]

    @property
    def n_expert(self) -> int:
        return self.tensor.shape[2] if len(self.tensor.shape) > 2 else 1

    @property
    def n_weights(self) -> int:
        return self.n_in * self.n_out * self.n_expert

    @property
    def keeps_high(self) -> bool:
        return self.high.id == self.tensor.type.id

    def nbytes(self, which: str) -> int:
        return (self.high if which == "high" else self.low).row_bytes(self.n_in) * self.n_out * self.n_expert


def parse_type(name: str, option: str, has_imatrix: bool) -> TypeInfo:
    """The type called `name`; raises ConvertError if ggml cannot quantize to it now."""
    names = ", ".join(t.name for t in ggml.quantizable())
    try:
        t = ggml.type_info(str(name))
    except ggml.GGMLError:
        raise ConvertError(f"{option} {name}: no such type; known are {names}") from None
    if t not in ggml.quantizable():
        raise ConvertError(f"{option} {name}: ggml cannot quantize to it; it can to {names}")
    if ggml.requires_imatrix(t) and not has_imatrix:
        needy = ", ".join(t.name for t in ggml.quantizable() if ggml.requires_imatrix(t))
        raise ConvertError(f"{option} {name}: the types {needy} need an importance matrix; give one with --imatrix")
    return t


def parse_high(high: str, has_imatrix: bool) -> tuple[str, TypeInfo | None]:
    """("keep", None), ("exactly", type) or ("at most", type)."""
    if high.lower() == "keep":
        return "keep", None
    if high.startswith("<="):
        return "at most", parse_type(high[2:], "--high", has_imatrix)
    return "exactly", parse_type(high, "--high", has_imatrix)


def check_source(reader: Reader) -> None:
    """Raises ConvertError if the file is not a model whose routed experts could be split off."""
    path = reader.path
    role = reader.get("hobbit.role", kind=str)
    if role is not None:
        what = "the main file" if role == "main" else "the sidecar"
        raise ConvertError(f"{path} is {what} of an already converted model: give the model that it was made from")
    kind, arch = reader.get("general.type", kind=str), reader.get("general.architecture", kind=str)
    if kind not in (None, "model"):
        raise ConvertError(f"{path} is not a text model: its general.type is '{kind}'")
    if arch == "clip":
        raise ConvertError(f"{path} is not a text model: it is a vision or audio projector (general.architecture 'clip')")
    if arch is None:
        raise ConvertError(f"{path} is not a model: it has no general.architecture")
    if any(EXPERT_NAME.match(name) for name in reader.tensors):
        return
    old = next((name for name in reader.tensors if OLD_EXPERT_NAME.match(name)), None)
    if old:
        raise ConvertError(f"{path} has the old layout with one tensor per expert ({old}), which llama.cpp no longer "
                           "loads: convert the original model to GGUF again")
    if not reader.tensors:
        raise ConvertError(f"{path} holds no tensors, so no routed experts (a vocabulary-only file?)")
    raise ConvertError(f"{path} has no routed experts: it is a dense model, for which there is nothing to do")


def find_experts(reader: Reader) -> list[Copies]:
    """Every routed expert tensor in the order of the sidecar; raises ConvertError if they do not fit together."""
    found = []
    for name, tensor in reader.tensors.items():
        match = EXPERT_NAME.match(name)
        if match:
            found.append(Copies(tensor, int(match[1]), (match[3] or "") + match[2], "", ""))
    found.sort(key=lambda c: (c.layer, c.projection.startswith("ch"), PROJECTIONS.index(c.projection.removeprefix("ch"))))
    _check_experts(reader, found)
    return found


def _check_experts(reader: Reader, experts: list[Copies]) -> None:
    path, arch = reader.path, reader.get("general.architecture")
    if arch in UNUSED_EXPERTS:
        raise ConvertError(f"{path}: llama.cpp loads experts for the architecture {arch}, but computes nothing with them")
    n_expert = reader.get(f"{arch}.expert_count", kind=int)
    layers: dict[tuple[int, str], dict[str, Copies]] = {}
    for c in experts:
        name, shape = c.tensor.name, list(c.tensor.shape)
        if not 2 <= len(shape) <= 3:
            raise ConvertError(f"{path}: {name} has the shape {shape}; [n_in, n_out, n_expert] is expected")
        kind = "ch" if c.projection.startswith("ch") else ""
        if not kind and n_expert is not None and c.n_expert != n_expert:
            raise ConvertError(f"{path}: {name} holds {c.n_expert} experts, but {arch}.expert_count is {n_expert}")
        layers.setdefault((c.layer, kind), {})[c.projection.removeprefix("ch")] = c
        if not ggml.can_dequantize(c.tensor.type):
            raise ConvertError(f"{path}: {name} is {c.tensor.type.name}, which ggml cannot turn into floats")
    for (layer, kind), group in layers.items():
        if "down" not in group or not ("up" in group or "gate_up" in group):
            raise ConvertError(f"{path}: layer {layer} has routed experts for {', '.join(group)} only; down and up "
                               "(or gate_up) are expected")
        counts = {c.n_expert for c in group.values()}
        if len(counts) > 1:
            raise ConvertError(f"{path}: the expert tensors of layer {layer} hold different numbers of experts "
                               f"({', '.join(map(str, sorted(counts)))})")
        if "gate_up" in group and arch not in FUSED_ARCHITECTURES:
            raise ConvertError(f"{path}: {group['gate_up'].tensor.name} holds gate and up in one tensor, which "
                               f"llama.cpp does not load for the architecture {arch}")


def choose_types(reader: Reader, experts: list[Copies], high: str, low: str, has_imatrix: bool, fallback: bool) -> str:
    """Fill in the types of all copies; returns what goes into hobbit.high.

    Raises ConvertError where no type will do, or where one would have to be replaced and fallback is off.
    """
    mode, high_type = parse_high(high, has_imatrix)
    low_type = parse_type(low, "--low", has_imatrix)
    for c in experts:
        c.low_asked = low_type.name
        _choose_high(c, mode, high_type)
        _choose_low(c, low_type, has_imatrix)
    replaced = [f for c in experts for f in c.fallbacks]
    if replaced and not fallback:
        raise ConvertError(f"{reader.path}: {replaced[0]} would be needed, and --no-fallback was given")
    if mode == "keep" or (mode == "at most" and not any(c.high == high_type for c in experts)):
        return "keep"
    for c in experts:
        if mode == "at most" and c.keeps_high and c.high != high_type and not any(".high:" in f for f in c.fallbacks):
            c.fallbacks.insert(0, f"{c.tensor.name}.high: {high_type.name} -> {c.high.name} (the source is not wider)")
    return high_type.name


def _unfit(t: TypeInfo, n_in: int) -> str:
    return f"rows of {n_in} are no whole number of blocks of {t.block}"


def _substitute(t: TypeInfo, n_in: int) -> TypeInfo | None:
    name = next((s for s, asked in _SUBSTITUTES.items() if t.name in asked), None)
    if name and ggml.type_info(name).fits(n_in):
        return ggml.type_info(name)
    return None


def _choose_high(c: Copies, mode: str, asked: TypeInfo | None) -> None:
    source = c.tensor.type
    c.high, c.high_asked = source, "keep"
    if mode == "keep":
        return
    c.high_asked = asked.name
    if asked.fits(c.n_in):
        if mode == "exactly" or asked.row_bytes(c.n_in) < source.row_bytes(c.n_in):
            c.high = asked
        return
    # a high copy needs no substitute that is larger than the source
    t = _substitute(asked, c.n_in) or ggml.type_info("f16")
    if t.row_bytes(c.n_in) < source.row_bytes(c.n_in):
        c.high = t
    c.fallbacks.append(f"{c.tensor.name}.high: {asked.name} -> {c.high.name} ({_unfit(asked, c.n_in)})")


def _choose_low(c: Copies, asked: TypeInfo, has_imatrix: bool) -> None:
    limit = c.high.row_bytes(c.n_in)
    if asked.fits(c.n_in):
        if asked.row_bytes(c.n_in) >= limit:
            raise ConvertError(f"{c.tensor.name}: the low type {asked.name} ({asked.bits:.4g} bits) is not smaller than "
                               f"the high type {c.high.name} ({c.high.bits:.4g} bits)")
        c.low = asked
        return
    # llama.cpp's substitute, or else the largest type that fits; smaller than the high copy in any case
    others = sorted((t for t in ggml.quantizable() if t.name not in TERNARY), key=lambda t: (-t.bits, t.id))
    usable = [t for t in [_substitute(asked, c.n_in), *others]
              if t and t.fits(c.n_in) and t.row_bytes(c.n_in) < limit and (has_imatrix or not ggml.requires_imatrix(t))]
    if not usable:
        ternary = [n for n in TERNARY if ggml.type_info(n).fits(c.n_in) and ggml.type_info(n).row_bytes(c.n_in) < limit]
        also = f" but {' and '.join(ternary)}, which are for models trained with so few bits" if ternary else ""
        raise ConvertError(f"{c.tensor.name}: --low {asked.name} is impossible ({_unfit(asked, c.n_in)}), and nothing else "
                           f"fits that is smaller than the high type {c.high.name} ({c.high.bits:.4g} bits){also}")
    c.low = usable[0]
    c.fallbacks.append(f"{c.tensor.name}.low: {asked.name} -> {c.low.name} ({_unfit(asked, c.n_in)})")


def describe(reader: Reader, experts: list[Copies]) -> str:
    """One line about the source, for the user."""
    arch = reader.get("general.architecture")
    size = sum(c.tensor.nbytes for c in experts)
    whole = sum(t.nbytes for t in reader.tensors.values())
    types = Counter()
    for c in experts:
        types[c.tensor.type.name] += c.tensor.nbytes
    n_expert = max(c.n_expert for c in experts)
    used = reader.get(f"{arch}.expert_used_count", "?")
    return (f"{arch}, {len({c.layer for c in experts})} layers with {n_expert} experts ({used} used); experts: "
            f"{size / 2**20:,.1f} MiB of {whole / 2**20:,.1f} MiB, {', '.join(t for t, _ in types.most_common())}")
