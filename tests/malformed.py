"""Bad GGUF files, byte by byte: a file taken apart, changed, and put together without any check.

    g = Gguf.parse(path.read_bytes())
    g.kv["llama.block_count"] = value("u32", 3)
    g.tensors[0].dims[0] = 2**62
    path.write_bytes(g.build())

CATALOGUE holds what llama.cpp's tests/test-gguf.cpp tries (names in capitals are its own), and more of the kind: {name: change},
where change(g) returns the bytes of the file. MAIN, SIDECAR and LINKED are about what a pair says of itself.
"""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass

from gguf_tools import ggml

FORMS = {"u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"),
         "bool": (7, "<B"), "str": (8, None), "arr": (9, None), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d")}
NAMES = {number: name for name, (number, _) in FORMS.items()}
HUGE = 2**64 - 1


def text(s) -> bytes:
    s = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(s)) + s


def pack(kind: str, x) -> bytes:
    return text(x) if kind == "str" else struct.pack(FORMS[kind][1], x)


def value(kind: str, x, n: int | None = None) -> bytes:
    """A packed metadata value, its type in front; a list is an array, n another length than its own."""
    number = struct.pack("<I", FORMS[kind][0])
    if isinstance(x, (list, tuple)):
        return struct.pack("<I", 9) + number + struct.pack("<Q", len(x) if n is None else n) + b"".join(pack(kind, v) for v in x)
    return number + pack(kind, x)


@dataclass
class Info:
    name: bytes
    dims: list[int]
    type: int
    offset: int | None  # None: where it belongs, behind the one before
    data: bytes

    def size(self) -> int:
        t = ggml.types()[self.type]
        n = -(-self.dims[0] // t.block) * t.size
        for d in self.dims[1:]:
            n *= d
        return n


class Gguf:
    def __init__(self):
        self.magic, self.version, self.n_tensors, self.n_kv = b"GGUF", 3, None, None
        self.kv: dict = {}  # key -> packed value
        self.more_kv = b""  # behind them, not counted by itself
        self.tensors: list[Info] = []
        self.alignment = 32
        self.boundaries: list[int] = []  # of the last build: where something begins or ends

    @classmethod
    def parse(cls, data: bytes) -> "Gguf":
        g, at = cls(), 24
        n_tensors, n_kv = struct.unpack_from("<QQ", data, 8)

        def string(at):
            n = struct.unpack_from("<Q", data, at)[0]
            return data[at + 8:at + 8 + n], at + 8 + n

        for _ in range(n_kv):
            key, start = string(at)
            kind, at = NAMES[struct.unpack_from("<I", data, start)[0]], start + 4
            n = 1
            if kind == "arr":
                kind, n = NAMES[struct.unpack_from("<I", data, at)[0]], struct.unpack_from("<Q", data, at + 4)[0]
                at += 12
            for _ in range(n if kind == "str" else 0):
                at = string(at)[1]
            at += 0 if kind == "str" else n * struct.calcsize(FORMS[kind][1])
            g.kv[key.decode()] = data[start:at]
        if "general.alignment" in g.kv:
            g.alignment = struct.unpack_from("<I", g.kv["general.alignment"], 4)[0]
        infos = []
        for _ in range(n_tensors):
            name, at = string(at)
            n = struct.unpack_from("<I", data, at)[0]
            *dims, kind, offset = struct.unpack_from(f"<{n}QIQ", data, at + 4)
            at += 4 + 8 * n + 12
            infos.append((Info(name, dims, kind, None, b""), offset))
        begin = -(-at // g.alignment) * g.alignment
        for info, offset in infos:
            info.data = data[begin + offset:begin + offset + info.size()]
            g.tensors.append(info)
        return g

    def tensor(self, name: str) -> Info:
        return next(t for t in self.tensors if t.name == name.encode())

    def build(self, pad: int | None = None, end: bytes = b"") -> bytes:
        """pad: alignment really used, if not the one that is said."""
        pad = pad or self.alignment
        out = bytearray(self.magic + struct.pack("<I", self.version))
        marks = [0, 4, 8]
        out += struct.pack("<QQ", len(self.tensors) if self.n_tensors is None else self.n_tensors, len(self.kv) if self.n_kv is None else self.n_kv)
        marks += [16, 24]
        for key, packed in self.kv.items():
            out += text(key)
            marks.append(len(out))
            out += packed[:4]
            marks.append(len(out))
            out += packed[4:]
            marks.append(len(out))
        out += self.more_kv
        at = 0
        for t in self.tensors:
            out += text(t.name)
            marks.append(len(out))
            out += struct.pack(f"<I{len(t.dims)}Q", len(t.dims), *(d % 2**64 for d in t.dims))
            marks.append(len(out))
            out += struct.pack("<IQ", t.type, at if t.offset is None else t.offset)
            marks.append(len(out))
            at += -(-len(t.data) // pad) * pad
        out += bytes(-len(out) % pad)
        for t in self.tensors:
            marks.append(len(out))
            out += t.data + bytes(-len(t.data) % pad)
        self.boundaries = sorted(set(marks) | {len(out)})
        return bytes(out + end)


CATALOGUE: dict = {}   # refused, whatever kind of GGUF it is
ACCEPTED: dict = {}    # unusual, and right
MAIN: dict = {}        # refused as the main file of a pair
SIDECAR: dict = {}     # refused as the sidecar of a pair
LINKED: dict = {}      # refused as a sidecar that links to its source


def case(table, name):
    def add(function):
        assert name not in table
        table[name] = lambda g, *more: _changed(function, copy.deepcopy(g), more)
        return function
    return add


def _changed(function, g, more):
    result = function(g, *more)
    return result if isinstance(result, bytes) else g.build()


def _set(table, name, attribute, x):
    case(table, name)(lambda g: setattr(g, attribute, x))


for _name, _attribute, _x in (
        ("HEADER_BAD_MAGIC", "magic", b"FUGG"), ("HEADER_BAD_VERSION_0", "version", 0), ("HEADER_BAD_VERSION_1", "version", 1),
        ("HEADER_BAD_VERSION_FUTURE", "version", 4), ("big endian", "version", 3 << 24), ("HEADER_BAD_N_TENSORS", "n_tensors", HUGE),
        ("HEADER_BAD_N_KV", "n_kv", HUGE), ("n_tensors 2^40", "n_tensors", 2**40), ("n_kv 2^40", "n_kv", 2**40), ("n_tensors -2^63", "n_tensors", 2**63),
        ("n_kv -2^63", "n_kv", 2**63)):
    _set(CATALOGUE, _name, _attribute, _x)
case(CATALOGUE, "one tensor more is said")(lambda g: setattr(g, "n_tensors", len(g.tensors) + 1))
case(CATALOGUE, "one key more is said")(lambda g: setattr(g, "n_kv", len(g.kv) + 1))
case(CATALOGUE, "one key less is said")(lambda g: setattr(g, "n_kv", len(g.kv) - 1))


@case(CATALOGUE, "HEADER_EMPTY")
def _(g):
    g.kv, g.tensors = {}, []


def _key(name, raw):
    def change(g):
        g.n_kv, g.more_kv = len(g.kv) + 1, raw
    case(CATALOGUE, name)(change)


_ONE = value("u8", 1)
_key("KV_BAD_KEY_SIZE", struct.pack("<Q", HUGE) + b"k" + _ONE)
_key("a key of 2^40 bytes", struct.pack("<Q", 2**40) + b"k" + _ONE)
_key("KV_EMPTY_KEY", text("") + _ONE)
_key("a key that is not UTF-8", text(b"\xff\xfe") + _ONE)
_key("a key with a null character", text("k\0x") + _ONE)
_key("KV_BAD_TYPE", text("k") + struct.pack("<IB", 13, 1))
_key("type -1", text("k") + struct.pack("<iB", -1, 1))
_key("KV_BAD_VALUE_SIZE", text("k") + struct.pack("<IQ", 8, HUGE) + b"x")
_key("a string of 2^40 bytes", text("k") + struct.pack("<IQ", 8, 2**40) + b"x")
_key("array of arrays", text("k") + struct.pack("<IIQ", 9, 9, 1) + value("u8", [1]))
_key("array of a bad type", text("k") + struct.pack("<IIQ", 9, 13, 1) + b"\0")
for _n in (HUGE, 2**63, 2**61, 2**40, 2**32):
    _key(f"array of {_n} bytes", text("k") + value("u8", [1, 2], _n))
    _key(f"array of {_n} numbers", text("k") + value("u64", [1, 2], _n))
    _key(f"array of {_n} strings", text("k") + value("str", ["a"], _n))
_key("array with a string of 2^63 bytes", text("k") + struct.pack("<IIQQ", 9, 8, 1, 2**63))


@case(CATALOGUE, "KV_DUPLICATE_KEY")
def _(g):
    key, packed = next(iter(g.kv.items()))
    g.n_kv, g.more_kv = len(g.kv) + 1, text(key) + packed


for _n in (0, 13, 48, 2**32 - 1):
    case(CATALOGUE, f"KV_BAD_ALIGN {_n}")(lambda g, n=_n: g.kv.update({"general.alignment": value("u32", n)}))
for _kind in ("i32", "u64", "u16", "f32", "str", "bool"):
    case(CATALOGUE, f"KV_WRONG_TYPE_ALIGN {_kind}")(
        lambda g, k=_kind: g.kv.update({"general.alignment": value(k, "32" if k == "str" else 1 if k == "bool" else 32)}))
case(CATALOGUE, "alignment array")(lambda g: g.kv.update({"general.alignment": value("u32", [32])}))
for _n in (2**20, 2**31):  # data would begin behind the end
    case(CATALOGUE, f"alignment {_n}")(lambda g, n=_n: g.kv.update({"general.alignment": value("u32", n)}))


@case(CATALOGUE, "TENSORS_INCONSISTENT_ALIGN")
def _(g):  # laid out for another alignment than the file says
    g.tensors[1].data = g.tensors[1].data[:-1]
    return g.build(pad=1)


def _tensor(name, change, which=-1):
    case(CATALOGUE, name)(lambda g: change(g.tensors[which]))


_tensor("TENSORS_BAD_NAME_SIZE", lambda t: setattr(t, "name", b"blk.0." + b"x" * 80))
_tensor("an empty name", lambda t: setattr(t, "name", b""))
_tensor("a name with a null character", lambda t: setattr(t, "name", t.name + b"\0x"))
_tensor("a name that is not UTF-8", lambda t: setattr(t, "name", b"\xff\xfe"))
_tensor("TENSORS_BAD_N_DIMS", lambda t: t.dims.extend([1] * (5 - len(t.dims))))
_tensor("no dimensions", lambda t: setattr(t, "dims", []))
_tensor("TENSORS_BAD_SHAPE", lambda t: setattr(t, "dims", [-1] * len(t.dims)))
_tensor("a negative dimension", lambda t: t.dims.__setitem__(-1, -t.dims[-1]))
_tensor("TENSORS_ZERO_DIM", lambda t: t.dims.__setitem__(-1, 0))
_tensor("zero rows length", lambda t: t.dims.__setitem__(0, 0))
_tensor("TENSORS_NE_TOO_BIG", lambda t: setattr(t, "dims", [4 * (2**31 - 1)] * 2))
_tensor("TENSORS_NBYTES_TOO_BIG", lambda t: (setattr(t, "dims", [1533916892] * 2), setattr(t, "type", 27)))
_tensor("TENSORS_NBYTES_PAD_WRAP", lambda t: (setattr(t, "dims", [4, 2**30 - 1, 2**30 + 1]), setattr(t, "type", 0)))
_tensor("DATA_MEM_SIZE_OVERFLOW", lambda t: (setattr(t, "dims", [0x7FFFFFFFFFFFFFC0]), setattr(t, "type", 24)))
_tensor("2^63 - 1 elements", lambda t: (setattr(t, "dims", [(2**63 - 1) // 7, 7]), setattr(t, "type", 24)))  # gguf.cpp lets it pass, ggml asserts
_tensor("a product of dimensions that wraps to a small one", lambda t: setattr(t, "dims", [2**32, 2**32, 256]))
_tensor("TENSORS_BAD_TYPE", lambda t: setattr(t, "type", ggml.TYPE_COUNT))
for _n in (4, 5, 31, 33, 36, 2**31, 2**32 - 1):  # types that were given up, and none
    _tensor(f"type {_n}", lambda t, n=_n: setattr(t, "type", n))
_tensor("a row that is no whole number of blocks", lambda t: t.dims.__setitem__(0, t.dims[0] + 1) or setattr(t, "type", 8))
for _n in (HUGE, 2**63, 2**40, 1):
    _tensor(f"TENSORS_BAD_OFFSET {_n}", lambda t, n=_n: setattr(t, "offset", n))
_tensor("tensors that overlap", lambda t: setattr(t, "offset", 0))
_tensor("a gap before a tensor", lambda t: setattr(t, "offset", 4096), which=1)


@case(CATALOGUE, "TENSORS_DUPLICATE_NAME")
def _(g):
    g.tensors[1].name = g.tensors[0].name


@case(CATALOGUE, "DATA_NOT_ENOUGH_DATA")
def _(g):
    data = g.build()
    last = g.tensors[-1]
    return data[:len(data) - (-len(last.data) % g.alignment) - 1]


case(CATALOGUE, "no data at all")(lambda g: g.build()[:-sum(len(t.data) for t in g.tensors)])
case(CATALOGUE, "nothing")(lambda g: b"")
case(CATALOGUE, "zeros")(lambda g: bytes(4096))
case(CATALOGUE, "text")(lambda g: b"hello\n" * 100)

case(ACCEPTED, "more behind the end")(lambda g: g.build(end=b"x" * 5000))
case(ACCEPTED, "KV_SUCCESS")(lambda g: g.kv.update({f"k.{k}": value(k, "s" if k == "str" else 1) for k in FORMS if k != "arr"}))
case(ACCEPTED, "empty arrays")(lambda g: g.kv.update({f"k.{k}": value(k, []) for k in FORMS if k != "arr"}))
case(ACCEPTED, "a bool that is 2")(lambda g: g.kv.update({"k.bool": value("bool", 2)}))
case(ACCEPTED, "version 2")(lambda g: setattr(g, "version", 2))


def truncations(g: Gguf) -> list[int]:
    """Lengths: every structural boundary, one byte less and one more; none holds all of the last tensor."""
    data = g.build()
    needed = len(data) - (-len(g.tensors[-1].data) % g.alignment)
    return sorted({n for b in g.boundaries for n in (b - 1, b, b + 1) if 0 <= n < needed})
