"""What a pair says of itself, wrong: further tables of malformed.py."""

from __future__ import annotations

import struct

from malformed import LINKED, MAIN, SIDECAR, case, value

OTHERS = {"u32": ("u32", 7), "i32": ("i32", -1), "u64": ("u64", 2**63), "f32": ("f32", 0.5), "str": ("str", "x"), "bool": ("bool", 1),
          "array": ("u32", [1, 2]), "strings": ("str", ["a"]), "empty": ("str", "")}


def _key(table, label, key, packed):
    """packed: bytes, or None: the key is missing."""
    def change(g, *_):
        g.kv.pop(key) if packed is None else g.kv.__setitem__(key, packed)
    case(table, label)(change)


def _wrong_types(table, key, right):
    _key(table, f"{key} missing", key, None)
    for name, (kind, x) in OTHERS.items():
        if name != right:
            _key(table, f"{key} is {name}", key, value(kind, x))


# --- main ---
for _k, _right in (("hobbit.format_version", "none"), ("hobbit.role", "none"), ("hobbit.sidecar", "none"), ("hobbit.pair_id", "none")):
    _wrong_types(MAIN, _k, _right)
_key(MAIN, "role experts", "hobbit.role", value("str", "experts"))
_key(MAIN, "version 2", "hobbit.format_version", value("u32", 2))
_key(MAIN, "another pair", "hobbit.pair_id", value("str", "0" * 64))
for _name in ("none.gguf", "../pair.experts.gguf", "/etc/passwd", "..", ".", "pair.gguf", "a\\b.gguf", "pair.experts.gguf\0", "\0", "x" * 5000):
    _key(MAIN, f"sidecar {_name[:20]!r}", "hobbit.sidecar", value("str", _name))
for _k in ("expert_count", "expert_used_count", "block_count", "embedding_length", "attention.head_count"):
    for _name in ("str", "f32", "strings"):
        _key(MAIN, f"llama.{_k} is {_name}", f"llama.{_k}", value(*OTHERS[_name]))
    for _n in (0, 2**31, 2**32 - 1):
        _key(MAIN, f"llama.{_k} {_n}", f"llama.{_k}", value("u32", _n))
for _k, _n in (("expert_count", 3), ("expert_count", 5), ("block_count", 1), ("block_count", 3), ("expert_used_count", 5),
               ("embedding_length", 255), ("feed_forward_length", 511), ("attention.head_count", 3), ("attention.head_count_kv", 3), ("attention.key_length", 63)):
    _key(MAIN, f"llama.{_k} {_n}, wrong", f"llama.{_k}", value("u32", _n))
for _x in (float("nan"), -1.0, float("inf")):
    _key(MAIN, f"epsilon {_x}", "llama.attention.layer_norm_rms_epsilon", value("f32", _x))  # ggml asserts when it computes
_key(MAIN, "rope base nan", "llama.rope.freq_base", value("f32", float("nan")))
_key(MAIN, "an array with nan", "llama.some.scales", value("f64", [1.0, float("nan")]))
_key(MAIN, "another architecture", "general.architecture", value("str", "none"))
_key(MAIN, "architecture is a number", "general.architecture", value("u32", 1))
_key(MAIN, "no architecture", "general.architecture", None)
_key(MAIN, "tokens are numbers", "tokenizer.ggml.tokens", value("u32", [1, 2]))
_key(MAIN, "no tokens", "tokenizer.ggml.tokens", None)
_key(MAIN, "tokens are a string", "tokenizer.ggml.tokens", value("str", "a"))
_key(MAIN, "fewer tokens than rows", "tokenizer.ggml.tokens", value("str", ["a", "b", "c"]))
_key(MAIN, "unknown vocabulary", "tokenizer.ggml.model", value("str", "nonesuch"))


def _tensor(table, label, name, change):
    case(table, label)(lambda g, *_: change(g, g.tensor(name)))


_UP = "blk.0.ffn_up_exps.weight"
_tensor(MAIN, "a tensor is missing", "blk.0.attn_q.weight", lambda g, t: g.tensors.remove(t))
_tensor(MAIN, "a router for other experts", "blk.0.ffn_gate_inp.weight", lambda g, t: (t.dims.__setitem__(1, 3), setattr(t, "data", t.data[:256 * 4 * 3])))
_tensor(MAIN, "a norm is q8_0", "output_norm.weight", lambda g, t: (setattr(t, "type", 8), setattr(t, "data", bytes(256 // 32 * 34))))
_tensor(MAIN, "a norm is i32", "output_norm.weight", lambda g, t: setattr(t, "type", 26))
_tensor(MAIN, "a matrix is i16", "blk.0.attn_q.weight", lambda g, t: setattr(t, "type", 25))
_tensor(MAIN, "a router is i32", "blk.0.ffn_gate_inp.weight", lambda g, t: setattr(t, "type", 26))
_tensor(MAIN, "embeddings are i16", "token_embd.weight", lambda g, t: setattr(t, "type", 25))

# --- sidecar ---
for _k, _right in (("hobbit.format_version", "none"), ("hobbit.role", "none"), ("hobbit.pair_id", "none"), ("hobbit.link", "bool")):
    _wrong_types(SIDECAR, _k, _right)
_key(SIDECAR, "role main", "hobbit.role", value("str", "main"))
_key(SIDECAR, "version 2", "hobbit.format_version", value("u32", 2))
_key(SIDECAR, "version 0", "hobbit.format_version", value("u32", 0))
_key(SIDECAR, "another pair", "hobbit.pair_id", value("str", "0" * 64))
_key(SIDECAR, "says that it is linked", "hobbit.link", value("bool", 1))
_key(SIDECAR, "says that it has parts", "split.count", value("u16", 2))
_key(SIDECAR, "says that it has 65535 parts", "split.count", value("u16", 65535))
_key(SIDECAR, "crc names wrong", "hobbit.crc32.tensors", value("str", ["x"]))
_key(SIDECAR, "crc names numbers", "hobbit.crc32.tensors", value("u32", [1]))
_key(SIDECAR, "crc names twice", "hobbit.crc32.tensors", value("str", [f"{_UP}.low", f"{_UP}.low"]))
_key(SIDECAR, "crc names missing", "hobbit.crc32.tensors", None)
_key(SIDECAR, "crc values few", "hobbit.crc32.values", value("u32", [1, 2, 3]))
_key(SIDECAR, "crc values none", "hobbit.crc32.values", value("u32", []))
_key(SIDECAR, "crc values u64", "hobbit.crc32.values", value("u64", [1, 2, 3]))
_key(SIDECAR, "crc values no array", "hobbit.crc32.values", value("u32", 1))
_key(SIDECAR, "crc chunk missing", "hobbit.crc32.chunk", None)
_key(SIDECAR, "crc chunk a string", "hobbit.crc32.chunk", value("str", "x"))


@case(SIDECAR, "swapped high and low")
def _(g, *_):
    for t in g.tensors:
        t.name = t.name.replace(b".high", b".X").replace(b".low", b".high").replace(b".X", b".low")


@case(SIDECAR, "swapped in one tensor")
def _(g, *_):
    a, b = g.tensor(f"{_UP}.high"), g.tensor(f"{_UP}.low")
    a.name, b.name = b.name, a.name


@case(SIDECAR, "no tensors")
def _(g, *_):
    g.tensors = []


@case(SIDECAR, "a layer is missing")
def _(g, *_):
    g.tensors = [t for t in g.tensors if not t.name.startswith(b"blk.1.")]


for _number in (2, 511, 2**31 - 1, 2**31, 2**32, 10**18):
    @case(SIDECAR, f"layer 1 is called {_number}")
    def _(g, *_, n=_number):
        for t in g.tensors:
            t.name = t.name.replace(b"blk.1.", f"blk.{n}.".encode())


@case(SIDECAR, "a layer too many")
def _(g, *_):
    import copy
    more = [copy.deepcopy(t) for t in g.tensors if t.name.startswith(b"blk.1.")]
    for t in more:
        t.name = t.name.replace(b"blk.1.", b"blk.2.")
    g.tensors += more


for _which in ("high", "low"):
    _tensor(SIDECAR, f"no {_which} copy", f"{_UP}.{_which}", lambda g, t: g.tensors.remove(t))


@case(SIDECAR, "no down")
def _(g, *_):
    g.tensors = [t for t in g.tensors if b"blk.0.ffn_down" not in t.name]


@case(SIDECAR, "only down")
def _(g, *_):
    g.tensors = [t for t in g.tensors if b"ffn_down" in t.name]


@case(SIDECAR, "gate, up and gate_up")
def _(g, *_):
    import copy
    for which in ("high", "low"):
        t = copy.deepcopy(g.tensor(f"{_UP}.{which}"))
        t.name = t.name.replace(b"_up_", b"_gate_up_")
        g.tensors.append(t)


def _shape(label, dims, names=("high", "low")):
    @case(SIDECAR, label)
    def _(g, *_):
        for which in names:
            t = g.tensor(f"{_UP}.{which}")
            t.dims = dims(t.dims)
            t.data = (t.data * 4)[:t.size()] if t.dims and 0 not in t.dims else b""


_shape("fewer experts", lambda d: [d[0], d[1], d[2] - 1])
_shape("more experts", lambda d: [d[0], d[1], d[2] + 1])
_shape("fewer experts in the low copy", lambda d: [d[0], d[1], d[2] - 1], ("low",))
_shape("no experts", lambda d: [d[0], d[1], 0])
_shape("one expert, two dimensions", lambda d: d[:2])
_shape("one dimension", lambda d: d[:1])
_shape("four dimensions", lambda d: [d[0], d[1], 2, 2])
_shape("other rows", lambda d: [d[0], d[1] // 2, d[2]])
_shape("other columns", lambda d: [d[0] * 2, d[1], d[2]])
_shape("rows and experts exchanged", lambda d: [d[0], d[2], d[1]])


def _types(label, high, low):
    @case(SIDECAR, label)
    def _(g, *_):
        for which, kind in (("high", high), ("low", low)):
            t = g.tensor(f"{_UP}.{which}")
            if kind is not None:
                t.type = kind
                t.data = (t.data * 40)[:t.size()]


@case(SIDECAR, "a row whose bytes wrap to few")
def _(g, *_):
    last = g.tensors[-1]
    for t in (last, g.tensor(last.name.decode().replace(".low", ".high"))):
        t.dims = [2**62, 1, 1]
        t.type = 2


_types("high copy is i16", 25, None)
_types("low copy is i8", None, 24)
_types("high copy is f64", 28, None)
_types("high copy is q8_1", 9, None)
_types("low copy is q8_k", None, 15)
_types("the low copy is the larger one", 8, 1)


@case(SIDECAR, "a tensor of its own name")
def _(g, *_):
    g.tensors[0].name = b"x.low"


for _bad in ("blk.+0.ffn_up_exps.weight", "blk. 0.ffn_up_exps.weight", "blk.00.ffn_up_exps.weight", "blk.-1.ffn_up_exps.weight", "blk.0.ffn_up_exps.weightx",
             "blk.0.ffn_up.weight", "blk..ffn_up_exps.weight", "blk.0.ffn_ups_exps.weight", "blk.0x.ffn_up_exps.weight", "blk.0.ffn_.weight"):
    @case(SIDECAR, f"called {_bad}")
    def _(g, *_, bad=_bad):
        for which in ("high", "low"):
            g.tensor(f"{_UP}.{which}").name = f"{bad}.{which}".encode()

# --- linked ---
_ARRAYS = {"tensors": "str", "types": "u32", "offsets": "u64", "file_index": "u32", "files": "str", "sizes": "u64", "header_fnv": "u64"}


def items(packed: bytes) -> list:
    kind, n = struct.unpack_from("<IQ", packed, 4)
    if kind != 8:
        return list(struct.unpack_from(f"<{n}{'I' if kind == 4 else 'Q'}", packed, 16))
    out, at = [], 16
    for _ in range(n):
        size = struct.unpack_from("<Q", packed, at)[0]
        out.append(packed[at + 8:at + 8 + size].decode())
        at += 8 + size
    return out


for _k, _kind in _ARRAYS.items():
    _key(LINKED, f"link.{_k} missing", f"hobbit.link.{_k}", None)
    _key(LINKED, f"link.{_k} empty", f"hobbit.link.{_k}", value(_kind, []))
    _key(LINKED, f"link.{_k} no array", f"hobbit.link.{_k}", value(_kind, "x" if _kind == "str" else 1))
    _key(LINKED, f"link.{_k} of floats", f"hobbit.link.{_k}", value("f32", [1.0] * 6))

    @case(LINKED, f"link.{_k} one short")
    def _(g, *_, k=_k, kind=_kind):
        g.kv[f"hobbit.link.{k}"] = value(kind, items(g.kv[f"hobbit.link.{k}"])[:-1])

    @case(LINKED, f"link.{_k} one more")
    def _(g, *_, k=_k, kind=_kind):
        old = items(g.kv[f"hobbit.link.{k}"])
        g.kv[f"hobbit.link.{k}"] = value(kind, old + old[:1])


def _entry(label, key, change):
    @case(LINKED, label)
    def _(g, *_):
        packed = g.kv[f"hobbit.link.{key}"]
        g.kv[f"hobbit.link.{key}"] = value(_ARRAYS[key], [change(x) if i == 0 else x for i, x in enumerate(items(packed))])


_entry("a link to the next tensor", "offsets", lambda x: x + 4096)
_entry("a link beyond the file", "offsets", lambda x: 2**63)
_entry("a link that wraps", "offsets", lambda x: 2**64 - 64)
_entry("a link with another type", "types", lambda x: 8)
_entry("a link with no type", "types", lambda x: 2**32 - 1)
_entry("a link to a file that is not named", "file_index", lambda x: 1)
_entry("a link to file 2^32-1", "file_index", lambda x: 2**32 - 1)
_entry("a link of another tensor", "tensors", lambda x: x.replace("blk.0", "blk.7"))
_entry("a source of another size", "sizes", lambda x: x + 1)
_entry("another source", "header_fnv", lambda x: x ^ 1)
for _path in ("none.gguf", "/etc/passwd", "/dev/zero", ".", "", "pair.gguf", "pair.experts.gguf"):
    _entry(f"the source is {_path!r}", "files", lambda x, p=_path: p)
