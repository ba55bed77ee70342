"""Reader: opens a GGUF, single or split, and checks everything before the first byte of data is read.

    with Reader("model.gguf") as r:                      # or model-00001-of-00003.gguf
        r.get("llama.expert_count")                      # a metadata value, None if absent
        t = r.tensors["blk.0.ffn_up_exps.weight"]        # name, type, shape, file, offset, nbytes
        rows = r.read(t, offset=0, nbytes=4096)          # pread; a whole tensor is never held

The header is walked here and not by gguf.GGUFReader: that maps the file (a file cut while mapped kills
the process), loops without end on a damaged array length, knows fewer types than ggml, and loses the
type of empty arrays. The tests hold both against each other.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFValueType as V

from . import ggml
from .errors import GGUFError

SPLIT_NAME = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")

_SCALARS = {
    V.UINT8: "<u1", V.INT8: "<i1", V.UINT16: "<u2", V.INT16: "<i2", V.UINT32: "<u4", V.INT32: "<i4",
    V.FLOAT32: "<f4", V.BOOL: "|b1", V.UINT64: "<u8", V.INT64: "<i8", V.FLOAT64: "<f8",
}
_CHUNK = 1 << 20
MAX_HEADER = 1 << 28     # bytes; real headers have some megabytes
MAX_ARRAY = 1 << 24      # elements of a metadata array; vocabularies have some 100 000
MAX_NAME = 63            # bytes; GGML_MAX_NAME - 1: llama.cpp refuses longer names of tensors
MAX_COUNT = 1 << 20      # tensors, metadata keys
# what get() gives for a type
_PYTHON = {V.STRING: str, V.BOOL: bool, V.ARRAY: list, V.FLOAT32: float, V.FLOAT64: float}


@dataclass(frozen=True)
class Field:
    """A metadata value as it lies in the file: its type and the packed value."""
    raw: bytes

    @property
    def kind(self) -> V:
        return V(struct.unpack_from("<I", self.raw)[0])

    @property
    def item_kind(self) -> V | None:
        """Type of an array's elements, None for other values."""
        return V(struct.unpack_from("<I", self.raw, 4)[0]) if self.kind == V.ARRAY else None

    def value(self) -> Any:
        """int, float, bool, str, or a list of those. Bytes that are not UTF-8 become U+FFFD."""
        if self.kind == V.ARRAY:
            n = struct.unpack_from("<Q", self.raw, 8)[0]
            return self._items(self.item_kind, 16, n)
        return self._items(self.kind, 4, 1)[0]

    def _items(self, kind: V, at: int, n: int) -> list:
        if kind != V.STRING:
            return np.frombuffer(self.raw, dtype=_SCALARS[kind], count=n, offset=at).tolist()
        items = []
        for _ in range(n):
            size = struct.unpack_from("<Q", self.raw, at)[0]
            items.append(self.raw[at + 8:at + 8 + size].decode("utf-8", "replace"))
            at += 8 + size
        return items


@dataclass(frozen=True)
class Tensor:
    name: str
    type: ggml.TypeInfo
    shape: tuple[int, ...]  # as in ggml: row length first
    file: int               # index into Reader.files
    offset: int             # absolute in that file, bytes
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.shape[0])

    @property
    def n_rows(self) -> int:
        return self.nbytes // self.row_bytes


class _Header:
    """Cursor over the start of a file; reads ahead in pieces and refuses to leave the file."""

    def __init__(self, path: str, fd: int, size: int):
        self.path, self.fd, self.size = path, fd, size
        self.buffer = bytearray()
        self.at = 0

    def take(self, n: int, what: str) -> int:
        """Offset of the next n bytes in the buffer; the cursor moves behind them."""
        end = self.at + n
        if MAX_HEADER < end <= self.size:
            raise GGUFError(f"{self.path} is damaged: {what} would end at byte {end}, too far for a header")
        if end > self.size:
            raise GGUFError(f"{self.path} is truncated or damaged: {what} needs bytes {self.at} to {end}, "
                            f"the file has {self.size}")
        while len(self.buffer) < end:
            more = os.pread(self.fd, max(_CHUNK, end - len(self.buffer)), len(self.buffer))
            if not more:
                raise GGUFError(f"{self.path} became shorter while it was read")
            self.buffer += more
        start, self.at = self.at, end
        return start

    def number(self, form: str, what: str) -> int:
        return struct.unpack_from(form, self.buffer, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str) -> bytes:
        n = self.number("<Q", what)
        start = self.take(n, what)
        return bytes(self.buffer[start:start + n])

    def name(self, what: str) -> str:
        try:
            return self.string(what).decode()
        except UnicodeDecodeError:
            raise GGUFError(f"{self.path} is damaged: {what} is not UTF-8") from None

    def skip_value(self, kind: int, what: str, nested: bool = False) -> None:
        if kind == V.STRING:
            self.take(self.number("<Q", what), what)
        elif kind in _SCALARS:
            self.take(np.dtype(_SCALARS[kind]).itemsize, what)
        elif kind == V.ARRAY and not nested:
            item = self.number("<I", what)
            n = self.number("<Q", what)
            if MAX_ARRAY < n <= self.size:
                raise GGUFError(f"{self.path} is damaged: {what} is an array of {n} elements, more than any model has")
            if item in _SCALARS:
                self.take(n * np.dtype(_SCALARS[item]).itemsize, what)
            elif item == V.STRING:
                if n * 8 > self.size - self.at:  # the lengths alone
                    self.take(n * 8, what)
                for _ in range(n):
                    self.take(self.number("<Q", what), what)
            else:
                raise GGUFError(f"{self.path}: {what} is an array of the unknown type {item}")
        else:
            raise GGUFError(f"{self.path}: {what} has the unknown value type {kind}")


class File:
    """One GGUF file of a model: header parsed, tensor ranges checked against the file's size."""

    def __init__(self, path: str, index: int):
        self.path = path
        self._value_at: dict[str, int] = {}
        self.fd = open_regular(path)
        try:
            self.size = os.fstat(self.fd).st_size
            header = _Header(path, self.fd, self.size)
            self._magic(header)
            n_tensors = header.number("<Q", "the tensor count")
            n_fields = header.number("<Q", "the metadata count")
            for n, what in ((n_tensors, "tensors"), (n_fields, "metadata keys")):
                if n > MAX_COUNT:
                    raise GGUFError(f"{path} is damaged: it says that it has {n} {what}, more than any model has")
            self.fields = self._fields(header, n_fields)
            self.alignment = self._alignment()
            infos = self._infos(header, n_tensors)
            self.header_bytes = header.at  # before padding
            self.data_offset = -(-header.at // self.alignment) * self.alignment
            self.tensors = self._tensors(infos, index)
            header.take(min(self.data_offset, self.size) - header.at, "the header")
            self.head = bytes(header.buffer[:header.at])  # what lies before the tensor data, padding included
        except BaseException:
            os.close(self.fd)
            raise

    def _magic(self, header: _Header) -> None:
        start = os.pread(self.fd, 64, 0)
        if not start:
            raise GGUFError(f"{self.path} is empty")
        if start[:4] != b"GGUF":
            text = start.lstrip().lower()
            if text.startswith(b"version https://git-lfs"):
                what = "a git-lfs pointer, not the model: fetch it with `git lfs pull`"
            elif text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<")):
                what = "a web page, not a model"
            else:
                what = f"not a GGUF file (it starts with {start[:4]!r})"
            raise GGUFError(f"{self.path} is {what}")
        header.take(4, "the magic")
        version = header.number("<I", "the version")
        if version & 0xffff == 0 and version:
            raise GGUFError(f"{self.path} is a big-endian GGUF, which this program cannot read")
        if version not in (2, 3):
            raise GGUFError(f"{self.path} is GGUF version {version}; 2 and 3 are known")

    def _fields(self, header: _Header, n: int) -> dict[str, Field]:
        fields: dict[str, Field] = {}
        for i in range(n):
            key = header.name(f"metadata key {i}")
            start = header.at
            header.skip_value(header.number("<I", key), key)
            if not key or "\0" in key:
                raise GGUFError(f"{self.path} is damaged: metadata key {i} is " + (repr(key[:80]) if key else "empty"))
            if key in fields:
                raise GGUFError(f"{self.path} is damaged: the metadata key {key} is there twice")
            fields[key] = Field(bytes(header.buffer[start:header.at]))
            self._value_at[key] = start + 4
        return fields

    def value_at(self, key: str) -> int:
        """Offset in the file of a metadata value, behind its type."""
        return self._value_at[key]

    def _alignment(self) -> int:
        field = self.fields.get("general.alignment")
        if field is None:
            return 32
        if field.kind != V.UINT32:
            raise GGUFError(f"{self.path}: general.alignment is of type {field.kind.name.lower()}, not uint32")
        n = field.value()
        if n == 0 or n & (n - 1):
            raise GGUFError(f"{self.path}: general.alignment is {n}, which is not a power of two")
        return n

    def _infos(self, header: _Header, n: int) -> list[tuple[str, list[int], int, int]]:
        infos = []
        for i in range(n):
            name = header.name(f"the name of tensor {i}")
            if not name or "\0" in name:
                raise GGUFError(f"{self.path} is damaged: the name of tensor {i} is {name!r}")
            if len(name.encode()) > MAX_NAME:
                raise GGUFError(f"{self.path}: the name of tensor {i}, {name[:80]!r}, is longer than {MAX_NAME} bytes")
            n_dims = header.number("<I", name)
            if not 1 <= n_dims <= 4:
                raise GGUFError(f"{self.path}: tensor {name} has {n_dims} dimensions; 1 to 4 are possible")
            shape = [header.number("<Q", name) for _ in range(n_dims)]
            infos.append((name, shape, header.number("<I", name), header.number("<Q", name)))
        return infos

    def _tensors(self, infos, index: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        expected = 0
        for name, shape, type_id, offset in infos:
            if name in tensors:
                raise GGUFError(f"{self.path} is damaged: the tensor {name} is there twice")
            kind = ggml.types().get(type_id)
            if kind is None:
                raise GGUFError(f"{self.path}: tensor {name} has type id {type_id}, which this build does not know")
            n_rows = int(np.prod([1, *shape[1:]], dtype=object))
            if min(shape) < 1 or shape[0] * n_rows >= 1 << 62:
                raise GGUFError(f"{self.path}: tensor {name} has the impossible shape {shape}")
            if not kind.fits(shape[0]):
                raise GGUFError(f"{self.path}: tensor {name} is {kind.name}, but its rows of {shape[0]} are no "
                                f"whole number of blocks of {kind.block}")
            nbytes = kind.row_bytes(shape[0]) * n_rows
            if offset != expected:  # as llama.cpp demands it: one behind the other
                raise GGUFError(f"{self.path} is damaged: tensor {name} is at offset {offset}, not {expected}")
            start = self.data_offset + offset
            if start + nbytes > self.size:
                raise GGUFError(f"{self.path} is truncated: tensor {name} needs bytes {start} to {start + nbytes} "
                                f"(offset + size), the file has {self.size}")
            expected += -(-nbytes // self.alignment) * self.alignment
            tensors[name] = Tensor(name, kind, tuple(shape), index, start, nbytes)
        return tensors

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Reader:
    """A model of one or several files; see the module's text for its use.

    files    list of File
    fields   {key: Field} of the first file, in file order
    tensors  {name: Tensor} of all files, in file order

    Raises GGUFError, in one sentence, for anything that is wrong with a file, before data is read.
    """

    def __init__(self, path):
        path = os.fspath(path)
        self.files = [File(path, 0)]
        self.fields = self.files[0].fields
        self.tensors: dict[str, Tensor] = {}
        try:
            for other in self._other_parts(path):
                self.files.append(File(other, len(self.files)))
            self._join()
        except BaseException:
            self.close()
            raise

    def _other_parts(self, path: str) -> list[str]:
        count, no = self.get("split.count", 0, int), self.get("split.no", 0, int)
        if count <= 1:
            return []
        folder, name = os.path.split(path)
        match = SPLIT_NAME.match(name)
        if no != 0:
            first = f"{match[1]}-00001-of-{match[3]}.gguf" if match else "part 1"
            raise GGUFError(f"{path} is part {no + 1} of {count} of a split model: give {first}")
        if not match or int(match[2]) != 1 or int(match[3]) != count:
            raise GGUFError(f"{path} is part 1 of {count} of a split model, but is not called "
                            f"NAME-00001-of-{count:05}.gguf, so that the other parts cannot be found")
        others = [os.path.join(folder, f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]
        for i, other in enumerate(others, 2):
            if not os.path.exists(other):
                raise GGUFError(f"part {i} of {count} is missing: {other}")
        return others

    def _join(self) -> None:
        for i, file in enumerate(self.files):
            if i > 0:
                no, count = (file.fields[k].value() if k in file.fields else None for k in ("split.no", "split.count"))
                if (no, count) != (i, len(self.files)):
                    raise GGUFError(f"{file.path} is not part {i + 1} of {len(self.files)}: its header says "
                                    f"split.no = {no}, split.count = {count}")
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise GGUFError(f"{file.path}: the tensor {name} is in another part, too")
                self.tensors[name] = tensor
        total = self.get("split.tensors.count")
        if len(self.files) > 1 and total is not None and total != len(self.tensors):
            raise GGUFError(f"{self.path}: its parts hold {len(self.tensors)} tensors, its header says {total}")

    @property
    def path(self) -> str:
        return self.files[0].path

    @property
    def alignment(self) -> int:
        """general.alignment of the first file, 32 where it is not given."""
        return self.files[0].alignment

    def get(self, key: str, default: Any = None, kind: type | None = None) -> Any:
        """The value of a metadata key, `default` where it is absent.

        kind: str, int, bool, float or list; another type in the file raises GGUFError.
        """
        field = self.fields.get(key)
        if field is None:
            return default
        if kind is not None and _PYTHON.get(field.kind, int) is not kind:
            raise GGUFError(f"{self.path}: {key} is of type {field.kind.name.lower()}, not {kind.__name__}")
        return field.value()

    def read(self, tensor: Tensor, offset: int = 0, nbytes: int | None = None) -> bytearray:
        """Bytes of a tensor from an offset in it. Thread-safe; raises GGUFError if the file was cut meanwhile."""
        nbytes = tensor.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or nbytes < 0 or offset + nbytes > tensor.nbytes:
            raise GGUFError(f"bytes {offset} to {offset + nbytes} are outside {tensor.name}")
        file = self.files[tensor.file]
        out = bytearray(nbytes)
        view, done = memoryview(out), 0
        while done < nbytes:
            n = os.preadv(file.fd, [view[done:]], tensor.offset + offset + done)
            if n == 0:
                raise GGUFError(f"{file.path} was cut while it was read: {tensor.name} at {tensor.offset + offset + done}")
            done += n
        return out

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_regular(path: str) -> int:
    """File descriptor of a regular file; O_NONBLOCK so that a FIFO does not hang."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise GGUFError(f"cannot open {path}: {e.strerror}") from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "not a regular file"
        raise GGUFError(f"{path} is {kind}, not a GGUF file")
    return fd


def sidecar_path(main: Reader) -> str:
    """Of a main file, the sidecar that it names. GGUFError where that is no name, or there is no such file."""
    name = main.get("hobbit.sidecar", "", str)
    if not name or os.path.basename(name) != name or "\0" in name or "\\" in name or len(name.encode()) > 255:
        raise GGUFError(f"{main.path} is damaged: hobbit.sidecar is {name[:80]!r}, not the name of a file beside it")
    path = os.path.join(os.path.dirname(main.path), name)
    if not os.path.exists(path):
        near = os.path.splitext(main.path)[0] + ".experts.gguf"
        renamed = f" ({near} is there: a pair keeps the names that it was made with)" if os.path.exists(near) else ""
        raise GGUFError(f"{main.path} is the main file of a converted model, but its sidecar {path} is missing{renamed}")
    return path
