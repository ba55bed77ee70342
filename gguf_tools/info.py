"""What a GGUF file or a dual GGUF holds.

    python -m gguf_tools.info FILE.gguf          a plain model, a main file (with its sidecar), or a sidecar
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from typing import Iterable

from . import ggml
from .errors import GGUFError, printable
from .reader import Reader, sidecar_path

_EXPERT = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down|gate_up)_(?:ch)?exps\.weight(\.high|\.low)?$")
_OUTER = re.compile(r"^(token_embd|output|rope_freqs)")


def role(name: str) -> str:
    """What a tensor is for: expert, shared expert, router, attention, feed-forward, embedding, norm or other."""
    if _EXPERT.match(name):
        return "expert"
    if "_shexp" in name:
        return "shared expert"
    if "ffn_gate_inp" in name or "exp_probs" in name:
        return "router"
    if "norm" in name:
        return "norm"
    if _OUTER.match(name):
        return "embedding, output"
    if ".attn_" in name or ".ssm_" in name:
        return "attention"
    return "feed-forward" if ".ffn_" in name else "other"


def types_by_role(reader: Reader) -> dict[str, Counter]:
    """{role: {type name: bytes}}; the copies of a sidecar are the roles "expert, high" and "expert, low"."""
    table: dict[str, Counter] = {}
    for t in reader.tensors.values():
        match = _EXPERT.match(t.name)
        what = f"expert, {match[3][1:]}" if match and match[3] else role(t.name)
        table.setdefault(what, Counter())[t.type.name] += t.nbytes
    return table


def merge_layers(fallbacks: Iterable[str]) -> list[str]:
    """Lines that differ in the layer only, as one: "blk.0-3,5.ffn_down_exps...: q2_k -> q4_0 (...)"."""
    groups: dict[str, list[int]] = {}
    for text in fallbacks:
        match = re.match(r"blk\.(\d+)\.(.*)", text)
        if match:
            groups.setdefault(match[2], []).append(int(match[1]))
    lines = []
    for rest, layers in groups.items():
        runs: list[list[int]] = []
        for n in sorted(layers):
            if runs and n == runs[-1][1] + 1:
                runs[-1][1] = n
            else:
                runs.append([n, n])
        lines.append(f"blk.{','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)}.{rest}")
    return lines


def _mib(n: int) -> str:
    return f"{n / 2**20:,.1f} MiB"


def _table(reader: Reader) -> list[str]:
    lines = []
    for what, types in sorted(types_by_role(reader).items(), key=lambda item: -sum(item[1].values())):
        detail = ", ".join(f"{name} {_mib(n)}" for name, n in types.most_common())
        lines.append(f"  {what:<18} {_mib(sum(types.values())):>14}   {detail}")
    return lines


def _model(reader: Reader) -> list[str]:
    arch = reader.get("general.architecture", "?", str)
    lines = [f"architecture   {arch}" + (f" ({reader.get('general.name')})" if reader.get("general.name") else "")]
    for label, key in (("layers", "block_count"), ("experts", "expert_count"), ("used", "expert_used_count")):
        value = reader.get(f"{arch}.{key}", kind=int)
        if value is not None:
            lines.append(f"{label:<14} {value}")
    if len(reader.files) > 1:
        lines.append(f"files          {len(reader.files)}")
    return lines


def _plain(reader: Reader) -> list[str]:
    whole = sum(t.nbytes for t in reader.tensors.values())
    experts = sum(t.nbytes for t in reader.tensors.values() if role(t.name) == "expert")
    lines = _model(reader) + [f"tensors        {len(reader.tensors)}, {_mib(whole)}"] + _table(reader)
    if experts:
        lines.append(f"routed experts are {100 * experts / whole:.1f} % of the bytes; not converted yet")
    else:
        lines.append("no routed experts")
    return lines


def _sidecar(reader: Reader) -> list[str]:
    fallbacks = reader.get("hobbit.fallbacks", [], list)
    lines = [
        f"made from      {reader.get('hobbit.source.name')} (id {str(reader.get('hobbit.source.id'))[:16]}...)",
        f"asked for      high {reader.get('hobbit.high')}, low {reader.get('hobbit.low')}",
    ]
    low = sum(t.nbytes for t in reader.tensors.values() if t.name.endswith(".low"))
    if reader.get("hobbit.link"):
        high, detail = _linked(reader)
        lines += [f"high copies    {_mib(high)} in the source: {detail}"]
        lines += [f"  linked file  {text}" for text in _link_state(reader)]
    else:
        high = sum(t.nbytes for t in reader.tensors.values() if t.name.endswith(".high"))
    lines += _table(reader)
    lines.append(f"low/high       {_mib(low)} / {_mib(high)}" + (f" = {low / high:.3f}" if high else ""))
    lines.append(f"fallbacks      {len(fallbacks) or 'none'}")
    return lines + [f"  {text}" for text in merge_layers(map(str, fallbacks))]


def _linked(reader: Reader) -> tuple[int, str]:
    """Bytes of the linked high copies, and "type bytes, ..."."""
    types: Counter = Counter()
    for name, type_id in zip(reader.get("hobbit.link.tensors", [], list), reader.get("hobbit.link.types", [], list)):
        low, kind = reader.tensors.get(f"{name}.low"), ggml.types().get(type_id)
        if low is None or kind is None or not kind.fits(low.shape[0]):
            raise GGUFError(f"{reader.path} is damaged: the link entry of {name} does not fit its low copy")
        types[kind.name] += kind.row_bytes(low.shape[0]) * low.n_rows
    return sum(types.values()), ", ".join(f"{name} {_mib(n)}" for name, n in types.most_common())


def _link_state(reader: Reader) -> list[str]:
    folder = os.path.dirname(reader.path)
    lines = []
    for path, size in zip(reader.get("hobbit.link.files", [], list), reader.get("hobbit.link.sizes", [], list)):
        full = os.path.join(folder, str(path))
        found = os.path.getsize(full) if os.path.isfile(full) else None
        state = "is missing" if found is None else "present" if found == size else f"has {found} bytes instead of {size}"
        lines.append(f"{path}: {state}")
    return lines


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(map(printable, lines))


def describe(path: str) -> str:
    """The text that the command prints. Raises GGUFError if the file, or its sidecar, is not usable."""
    with Reader(path) as reader:
        kind = reader.get("hobbit.role", None, str)
        if kind is None:
            return _lines([f"{path}: a GGUF model", *_plain(reader)])
        if kind == "experts":
            return _lines([f"{path}: sidecar of a dual GGUF (all routed experts, twice)", *_sidecar(reader)])
        if kind != "main":
            raise GGUFError(f"{path} has the unknown hobbit.role '{kind}'")
        pair, other = reader.get("hobbit.pair_id", "", str), sidecar_path(reader)
        with Reader(other) as sidecar:
            if sidecar.get("hobbit.role") != "experts":
                raise GGUFError(f"{other}, which {path} names as its sidecar, is none")
            if sidecar.get("hobbit.pair_id") != pair:
                raise GGUFError(f"{path} and {other} are not a pair: their hobbit.pair_id differ")
            main = sum(t.nbytes for t in reader.tensors.values())
            high = sum(t.nbytes for t in sidecar.tensors.values() if t.name.endswith(".high"))
            if sidecar.get("hobbit.link"):
                high = _linked(sidecar)[0]
            lines = [f"{path}: main file of a dual GGUF", *_model(reader), *_table(reader),
                     f"sidecar        {other}: a pair (id {pair[:16]}...)", *_sidecar(sidecar),
                     f"routed experts (high copies) are {100 * high / max(main + high, 1):.1f} % of the model's bytes"]
            return _lines(lines)


def summary(path: str) -> dict:
    """The same as plain values: bytes by role and type, and for a dual GGUF its sidecar. Raises as describe() does."""
    describe(path)
    with Reader(path) as reader:
        report = _summary(reader)
        if report["kind"] == "main":
            with Reader(os.path.join(os.path.dirname(path), reader.get("hobbit.sidecar", "", str))) as sidecar:
                report["sidecar"] = _summary(sidecar)
        return report


def _summary(reader: Reader) -> dict:
    arch = reader.get("general.architecture", None, str)
    kind = {None: "model", "main": "main", "experts": "sidecar"}[reader.get("hobbit.role")]
    report = {"path": reader.path, "kind": kind, "architecture": arch, "name": reader.get("general.name"), "layers": reader.get(f"{arch}.block_count"),
              "experts": reader.get(f"{arch}.expert_count"), "used": reader.get(f"{arch}.expert_used_count"), "files": len(reader.files),
              "tensors": len(reader.tensors), "bytes": {role: dict(types) for role, types in types_by_role(reader).items()}}
    if kind == "sidecar":
        report.update(source=reader.get("hobbit.source.name"), high=reader.get("hobbit.high"), low=reader.get("hobbit.low"),
                      fallbacks=[str(f) for f in reader.get("hobbit.fallbacks", [], list)], linked=list(map(str, reader.get("hobbit.link.files", [], list))))
    return report


def print_text(text: str) -> None:
    """print() that ends quietly where the reader of a pipe has gone (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit


def main(argv: list[str] | None = None, prog: str = "python -m gguf_tools.info") -> int:
    """The command; returns its exit status: 0, or 1 for an error."""
    p = argparse.ArgumentParser(prog=prog, description="Say what a GGUF file or a dual GGUF holds.")
    p.add_argument("file", metavar="FILE.gguf")
    p.add_argument("--json", action="store_true", help="print the numbers as JSON")
    args = p.parse_args(argv)
    try:
        print_text(json.dumps(summary(args.file), indent=1) if args.json else describe(args.file))
    except (GGUFError, ggml.GGMLError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
