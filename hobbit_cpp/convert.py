"""Make a dual GGUF: split off a model's routed experts and store each at two precisions.

    python -m hobbit_cpp.convert SRC.gguf -o OUT.gguf       writes OUT.gguf and OUT.experts.gguf
    python -m hobbit_cpp.convert DIR -o OUT.gguf            the same from a Hugging Face checkpoint

or, from Python:

    from hobbit_cpp.convert import convert
    report = convert("SRC.gguf", "OUT.gguf", high="q8_0", low="q2_k")
    print(report.table())

The files are described in docs/format.md.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import sys
import time
from typing import Callable

from gguf_tools import ggml
from gguf_tools.errors import GGUFError
from gguf_tools.info import print_text
from gguf_tools.reader import SPLIT_NAME, Reader
from gguf_tools.writer import StreamWriter

from . import _convert_hf
from ._convert_imatrix import Imatrix
from ._convert_parts import PartsWriter, divide, part_names, sidecar_tensors
from ._convert_plan import ConvertError, Copies, check_source, choose_types, describe, find_experts, parse_high, parse_type
from ._convert_publish import publish, recover
from ._convert_report import Report, summarize
from ._convert_run import write_pair
from ._convert_sums import PairChecksums
from .memory import parse_bytes

__all__ = ["ConvertError", "PRESETS", "Report", "convert", "main"]

FORMAT_VERSION = 1
SIDECAR_ALIGNMENT = 4096
PRESETS = {"int8+int2": ("<=q8_0", "q2_k"), "f16+q4": ("<=f16", "q4_0")}  # name -> high, low
DEFAULT_PRESET = "int8+int2"


def convert(src, out=None, high: str = "keep", low: str = "q2_k", *, link: bool = False, imatrix=None,
            force: bool = False, fallback: bool = True, split_max_bytes: int | None = None, checksums: bool = True,
            threads: int | None = None, progress: bool = False, on_warning: Callable[[str], None] | None = None) -> Report:
    """Convert a mixture-of-experts GGUF to a main file and a sidecar with both copies of every expert.

    src         the model, or part 1 of a split one, or the folder of a Hugging Face checkpoint, of which llama.cpp's own
                converter makes a GGUF that lies beside out meanwhile
    out         main file to write, NAME.gguf; the sidecar is NAME.experts.gguf beside it. Default:
                SRC-hobbit.gguf in the current folder
    high        "keep" (bytes unchanged), a ggml type, or "<=TYPE": that type where the source is wider,
                else unchanged
    low         a ggml type; must be smaller than the high copy
    link        leave the high copies in src (high must be "keep", or come to the same)
    imatrix     importance matrix of hobbit imatrix or llama-imatrix, either form, or None
    force       replace existing output files
    fallback    take another type, per tensor, where rows are no whole number of a type's blocks; False: refuse
    split_max_bytes  the sidecar in several files of at most so many bytes, NAME.experts-00001-of-0000N.gguf and so on
    checksums   write a CRC-32 of every piece of data into the metadata, for hobbit verify and Llama(verify=True)
    threads     quantizing threads; default: all cores this process may use
    progress    show a progress line on stderr if that is a terminal
    on_warning  called with each warning when it arises; they are in the report, too

    Returns a Report. Raises ConvertError, in one sentence, for everything that can be wrong with files,
    types or disks; then no output file was created or changed.
    """
    started = time.monotonic()
    warnings: list[str] = []

    def warn(text: str) -> None:
        warnings.append(text)
        if on_warning:
            on_warning(text)

    with contextlib.ExitStack() as stack:
        src = os.fspath(src)
        out = _default_output(src) if out is None else os.fspath(out)
        stack.enter_context(_one_sentence(out))
        parse_high(high, imatrix is not None)  # wrong types are told before any file is read
        parse_type(low, "--low", imatrix is not None)
        threads = _cores() if threads is None else threads
        if threads < 1:
            raise ConvertError(f"{threads} threads cannot convert anything")
        given = src
        if os.path.isdir(src):
            if link:
                raise ConvertError(f"--link leaves the high copies in the source, which must be a GGUF and not the folder {src}")
            _check_outputs([], out, 1, imatrix, force)
            _check_space(os.path.dirname(out), _convert_hf.weight_bytes(src))
            src = stack.enter_context(_convert_hf.as_gguf(src, os.path.dirname(out), progress))
        reader = stack.enter_context(Reader(src))
        check_source(reader)
        experts = find_experts(reader)
        high_used = choose_types(reader, experts, high, low, imatrix is not None, fallback)
        if link and not all(c.keeps_high for c in experts):
            changed = next(c for c in experts if not c.keeps_high)
            raise ConvertError(f"--link leaves the high copies in {src}, but {changed.tensor.name} would have to change from "
                               f"{changed.tensor.type.name} to {changed.high.name}: use --high keep")
        weights = None
        if imatrix is not None:
            weights = Imatrix(imatrix)
            stack.callback(weights.close)
            weights.check(experts)
        parts = divide(sidecar_tensors(experts, link), split_max_bytes, SIDECAR_ALIGNMENT)
        sidecars = _check_outputs([f.path for f in reader.files], out, len(parts), imatrix, force)
        with StreamWriter(out, reader.get("general.architecture"), reader.alignment, force) as m, \
                PartsWriter(sidecars, parts, "hobbit", SIDECAR_ALIGNMENT, force) as s:
            recover(m, s)
            sums = PairChecksums(reader, experts) if checksums else None
            _write_headers(reader, experts, m, s, high_used, low, link, sums)
            errors = write_pair(reader, experts, m, s, link=link, imatrix=weights, threads=threads,
                                progress=progress, warn=warn, checksums=sums and sums.sums)
            if sums:
                sums.fill(m, s)
            m.seal()
            s.seal()
            publish(m, s)
        return Report(
            source=given, main=out, sidecar=s.path, parts=len(parts), description=describe(reader, experts),
            rows=summarize(experts, errors), high_bytes=sum(c.nbytes("high") for c in experts),
            low_bytes=sum(c.nbytes("low") for c in experts), main_bytes=os.path.getsize(out),
            sidecar_bytes=s.size(), link=link, seconds=time.monotonic() - started,
            fallbacks=[f for c in experts for f in c.fallbacks], warnings=warnings, notes=_notes(experts))


def _notes(experts: list[Copies]) -> list[str]:
    notes = []
    wider = [c for c in experts if c.nbytes("high") > c.tensor.nbytes]
    if wider:
        notes.append(f"{len(wider)} high copies ({wider[0].high.name}) are larger than their source "
                     f"({wider[0].tensor.type.name}) and no better; --high keep avoids that")
    ratio = sum(c.nbytes("low") for c in experts) / sum(c.nbytes("high") for c in experts)
    if ratio > 0.8:
        notes.append(f"the low copies have {100 * ratio:.0f} % of the high copies' size: fetching them instead saves little")
    return notes


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- files ---

def _default_output(src: str) -> str:
    name = os.path.basename(os.path.realpath(src) if os.path.isdir(src) else src)  # in the current folder: models often lie where nothing should be written
    match = SPLIT_NAME.match(name)
    stem = match[1] if match else name.removesuffix(".gguf")
    return f"{stem}-hobbit.gguf"


def _check_outputs(sources: list[str], out: str, n_parts: int, imatrix, force: bool) -> list[str]:
    """Names of the sidecar's files; raises ConvertError if one of the files cannot be written there."""
    folder, name = os.path.split(out)
    if not name.endswith(".gguf") or name == ".gguf":
        raise ConvertError(f"the output must be called NAME.gguf, not {out}")
    _check_name(name)
    if not os.path.isdir(folder or "."):
        raise ConvertError(f"the folder {folder} does not exist")
    sidecars = part_names(out.removesuffix(".gguf") + ".experts.gguf", n_parts)
    inputs = sources + ([os.fspath(imatrix)] if imatrix is not None else [])
    for path in (out, *sidecars):
        if os.path.isdir(path):
            raise ConvertError(f"{path} is a folder")
        for given in inputs:
            if os.path.exists(path) and os.path.samefile(path, given):
                raise ConvertError(f"{path} is an input of this conversion and would be overwritten: give another output name")
        if os.path.lexists(path) and not force:
            raise ConvertError(f"{path} exists already: give another output name, or --force to replace it")
    return sidecars


def _check_name(name: str) -> None:
    """The sidecar's name stands in the main file: it must be text, and mean the same everywhere."""
    if not _is_text(name):
        raise ConvertError(f"the output's name {name!r} is not valid UTF-8, which GGUF and llama.cpp need: give another")
    bad = next((c for c in name if c == "\\" or not c.isprintable()), None)
    if bad:
        raise ConvertError(f"the output's name {name!r} has a {'backslash' if bad == chr(92) else 'control character'}: give another")


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_space(folder: str, needed: int) -> None:
    fs = os.statvfs(folder or ".")
    free = fs.f_bavail * fs.f_frsize
    if fs.f_blocks and needed > free:
        raise ConvertError(f"not enough room in {folder or '.'}: {needed:,} bytes ({needed / 2**20:,.1f} MiB) are needed, "
                           f"{free:,} ({free / 2**20:,.1f} MiB) are free")


@contextlib.contextmanager
def _one_sentence(out: str):
    """Turn what libraries and the operating system raise into a ConvertError."""
    try:
        yield
    except ConvertError:
        raise
    except (GGUFError, ggml.GGMLError) as e:
        raise ConvertError(str(e)) from None
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConvertError(f"the disk became full while {out} was being written; nothing was kept") from None
        raise ConvertError(f"cannot write {out}: {e.strerror or e}") from None


# --- headers (docs/format.md) ---

def _write_headers(reader: Reader, experts: list[Copies], m: StreamWriter, s: PartsWriter,
                   high: str, low: str, link: bool, sums: PairChecksums | None) -> None:
    source = source_id(reader)
    pair = _pair_id(source, experts)

    m.copy_metadata(reader, drop=("split.",))
    m.add("hobbit.format_version", FORMAT_VERSION, "u32")
    m.add("hobbit.role", "main")
    m.add("hobbit.sidecar", os.path.basename(s.path))
    m.add("hobbit.pair_id", pair)
    names = {c.tensor.name for c in experts}
    for t in reader.tensors.values():
        if t.name not in names:
            m.add_tensor(t.name, t.shape, t.type)

    s.add("hobbit.format_version", FORMAT_VERSION, "u32")
    s.add("hobbit.role", "experts")
    s.add("hobbit.pair_id", pair)
    s.add("hobbit.source.name", os.path.basename(reader.path).encode("utf-8", "replace").decode())
    s.add("hobbit.source.id", source)
    s.add("hobbit.high", high)
    s.add("hobbit.low", low.lower())
    s.add("hobbit.fallbacks", [f for c in experts for f in c.fallbacks], "str")
    s.add("hobbit.link", link, "bool")
    if link:
        _add_link(reader, experts, s)
    if sums:
        sums.reserve(m, s)
    for name, shape, kind, _ in sidecar_tensors(experts, link):
        s.add_tensor(name, shape, kind)

    headers = 2 * sum(len(f.head) for f in reader.files) + 200 * len(experts) + SIDECAR_ALIGNMENT + (sums.nbytes if sums else 0)
    _check_space(os.path.dirname(m.path), m.data_size + s.data_size + headers)
    m.begin_data()
    s.begin_data()


def source_id(reader: Reader) -> str:
    """SHA-256 over metadata (packed, in file order, without split.*), then tensor names, shapes and types.

    Equal for a model and its split form.
    """
    h = hashlib.sha256()
    for key, field in reader.fields.items():
        if not key.startswith("split."):
            h.update(key.encode() + b"\0" + field.raw)
    for t in reader.tensors.values():
        h.update(f"{t.name}\0{','.join(map(str, t.shape))}\0{t.type.name}\n".encode())
    return h.hexdigest()


def _pair_id(source: str, experts: list[Copies]) -> str:
    h = hashlib.sha256(source.encode())
    for c in experts:
        h.update(f"{c.tensor.name}\0{c.high.name}\0{c.low.name}\n".encode())
    return h.hexdigest()


def _add_link(reader: Reader, experts: list[Copies], s: PartsWriter) -> None:
    folder = os.path.realpath(os.path.dirname(s.path) or ".")
    paths = []
    for f in reader.files:
        path = os.path.realpath(f.path)
        if not _is_text(path):
            raise ConvertError(f"--link: the source's path {path!r} is not valid UTF-8, so the sidecar cannot name it: rename it")
        below = os.path.commonpath([folder, path]) == folder
        paths.append(os.path.relpath(path, folder) if below else path)
    tensors = [c.tensor for c in experts]
    s.add("hobbit.link.tensors", [t.name for t in tensors], "str")
    s.add("hobbit.link.types", [t.type.id for t in tensors], "u32")
    s.add("hobbit.link.offsets", [t.offset for t in tensors], "u64")
    s.add("hobbit.link.file_index", [t.file for t in tensors], "u32")
    s.add("hobbit.link.files", paths, "str")
    s.add("hobbit.link.sizes", [f.size for f in reader.files], "u64")
    s.add("hobbit.link.header_fnv", [fnv1a(f.head) for f in reader.files], "u64")


def fnv1a(data: bytes) -> int:
    """64-bit FNV-1a."""
    h = 0xcbf29ce484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return h


# --- command ---

def _parser(prog: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=prog,
        description="Split off a model's routed experts and store each of them at two precisions: OUT.gguf (everything else) "
                    "and OUT.experts.gguf (the experts).")
    p.add_argument("source", metavar="SRC.gguf", help="a mixture-of-experts model, or part 1 of a split one, or the folder of a Hugging "
                                                      "Face checkpoint (needs pip install '.[hf]')")
    p.add_argument("-o", "--output", metavar="OUT.gguf", help="main file to write (default: SRC-hobbit.gguf in the current folder)")
    p.add_argument("--preset", choices=list(PRESETS), default=DEFAULT_PRESET,
                   help="types of both copies. int8+int2: q8_0 and q2_k; f16+q4: f16 and q4_0. The high type is taken "
                        "only where the source is wider; other tensors are kept as they are (default: %(default)s)")
    p.add_argument("--high", metavar="TYPE", help="type of the high copies: 'keep' copies the source's bytes unchanged, a ggml "
                                                  "type is taken for every tensor (default: the preset's)")
    p.add_argument("--low", metavar="TYPE", help="type of the low copies: any type ggml can quantize to (default: the preset's)")
    p.add_argument("--link", action="store_true", help="leave the high copies in SRC, which must then stay where it is; implies "
                                                       "--high keep")
    p.add_argument("--imatrix", metavar="FILE", help="importance matrix of hobbit imatrix or llama-imatrix (GGUF or .dat)")
    p.add_argument("--no-fallback", action="store_true", help="refuse where a tensor's rows do not fit a type, instead of taking "
                                                              "another type for that tensor")
    p.add_argument("--split-max-size", metavar="SIZE", help="write the sidecar as several files of at most SIZE (50GB); the main file stays whole")
    p.add_argument("--no-checksums", action="store_true", help="leave out the checksums that hobbit verify compares")
    p.add_argument("--force", action="store_true", help="replace existing output files")
    p.add_argument("--threads", type=int, metavar="N", help="threads (default: all cores)")
    p.add_argument("--quiet", action="store_true", help="print errors and warnings only")
    p.add_argument("--json", action="store_true", help="print the report as JSON")
    return p


def main(argv: list[str] | None = None, prog: str = "python -m hobbit_cpp.convert") -> int:
    """The command; returns its exit status: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    args = _parser(prog).parse_args(argv)
    high, low = PRESETS[args.preset]
    if args.link and args.high is None:
        high = "keep"
    try:
        split = None if args.split_max_size is None else parse_bytes(args.split_max_size)
        report = convert(args.source, args.output, args.high or high, args.low or low, link=args.link, imatrix=args.imatrix,
                         force=args.force, fallback=not args.no_fallback, split_max_bytes=split, checksums=not args.no_checksums, threads=args.threads, progress=not args.quiet,
                         on_warning=lambda text: print(f"warning: {text}", file=sys.stderr))
    except ValueError as e:  # ConvertError, or a size that is none
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as e:
        print(f"interrupted; {e if e.args else 'nothing was written'}", file=sys.stderr)
        return 130
    if args.json:
        print_text(json.dumps(report.to_dict(), indent=1))
    elif not args.quiet:
        print_text(f"{report.source}: {report.description}\n{report.table()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
