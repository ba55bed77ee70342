"""Graded precision from one nested copy of each expert: what its prefixes lose, and where it stands on the plane of docs/frontier.md.

    python benchmarks/nested.py prefixes MODEL-f16.gguf --text FILE
    python benchmarks/nested.py plane MODEL-f16.gguf --text FILE --slots 5.6MB [--format k8] [--levels 3,4,5,6,8] [--bits 4,4.5,5]
    python benchmarks/nested.py variants MODEL-f16.gguf --text FILE --slots 5.6MB --bits 4.5
    python benchmarks/nested.py speed

plane compares, in one cache of so many bytes: uniform types, pairs, and nested copies. Loads are played (pairs and uniform types by the engine's
simulator, nested copies by nested.cpp, which knows the same policy); the divergence is that of a forward pass in NumPy with the precisions that
were served. docs/nested.md has the results.
"""

import argparse
import ctypes
import os
import sys
import time

from gguf_tools import ggml

from _plane import HIGH, LOW, PROJECTIONS, UNIFORM, Table, add_type, at_equal_loss, measure, megabytes, play_pair, relative_error, type_bytes, uniform_line

import numpy as np
from gguf_tools import ggml
from _forward import SKIP, Model, Text
from _nested_format import FORMATS, Q8, native, pointer

PAIRS = ("q6_k+q4_k", "q5_k+q3_k", "q4_k+q2_k")
THRESHOLDS = ((0.7, 0.95), (0.6, 1.0))
TYPES = {2: "q2_k", 3: "q3_k", 4: "q4_k", 5: "q5_k", 6: "q6_k", 8: "q8_0"}
ROOM = {"q8_0": dict.fromkeys(range(1, 9), 8.5),                                     # bits of a weight that was expanded on arrival
        "types": {2: 5.0, 3: 5.0, 4: 5.0, 5: 6.0, 6: 8.5, 7: 8.5, 8: 8.5}}            # to q4_1, q5_1 or q8_0


# --- copies ---

def add_nested(model: Model, form, levels) -> dict[int, float]:
    """The prefixes as levels of the model, named by their planes; {planes: mean square of the error over that of the weights}."""
    copies = {}

    def values(planes):
        def rounded(rows, layer, projection):
            if (layer, projection) not in copies:
                copies[layer, projection] = form(rows)
            return copies[layer, projection].values(planes)
        return rounded

    lost = {}
    for planes in levels:
        model.add(planes, values(planes), 32)
        lost[planes] = relative_error(model, planes)
    return lost


def nested_bytes(model: Model, form, planes: int) -> int:
    return round(sum(form.bits(planes, w.shape[2]) * w[0].size for w in (model.source[0][p] for p in PROJECTIONS)) / 8) if planes else 0


# --- the rule ---

def graded(g: np.ndarray, levels, lost: dict[int, float], size: dict[int, int], price: float) -> np.ndarray:
    """The level of each use with the least g^2 lost + price size; skipping loses all."""
    choices = (SKIP, *levels)
    cost = np.stack([g.astype(np.float64) ** 2 * (1.0 if c == SKIP else lost[c]) + price * size[c] for c in choices])
    return np.array(choices, np.int32)[cost.argmin(axis=0)]


def price_for(g, levels, lost, size, wanted: float) -> float:
    """The price at which a use wants so many bytes on average."""
    low, high = 1e-16, 1.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        of = np.vectorize(size.get)(graded(g, levels, lost, size, middle)).mean()
        low, high = (middle, high) if of > wanted else (low, middle)
    return high


# --- playing ---

def play_nested(routing, wanted, n_expert, n, levels, size, room, budget, own=False, whole=False):
    """(bytes a token, served level of each use). size, room: {level: bytes loaded as far as that, bytes in memory}; own, whole: see nested.cpp."""
    n_layers, n_tokens, n_used = routing.experts.shape
    place = {SKIP: 0, **{b: i + 1 for i, b in enumerate(levels)}}
    want = np.vectorize(place.get)(wanted).astype(np.int32)
    sizes, rooms = (np.array([0, *(x[b] for b in levels)], np.int64) for x in (size, room))
    pos = np.ascontiguousarray(np.arange(n_tokens) % n, np.int32)
    served = np.empty_like(want)
    experts = np.ascontiguousarray(routing.experts, np.int32)
    loaded = native().nested_play(n_layers, n_expert, n_used, n_tokens, pointer(pos), pointer(experts), pointer(want), len(levels), pointer(sizes), pointer(rooms),
                                  ctypes.c_int64(budget), int(own), int(whole), pointer(served))
    if loaded < 0:
        raise SystemExit("the slots do not hold what one layer of a token needs")
    return loaded / n_tokens, np.array([SKIP, *levels], np.int32)[served]


# --- commands ---

def prefixes(a):
    model = Model(a.model)
    text = Text(model, a.model, a.text, chunks=a.chunks)
    print("| copy | bits | mean KL | median | error² |\n|---|---|---|---|---|")

    def show(name, level, size):
        kl = text.divergence(model.run(text.tokens, lambda *_: level)[0])
        print(f"| {name} | {8 * size / model.n_weights:.3f} | {kl.mean():.5f} ± {kl.std() / len(kl) ** 0.5:.5f} | {np.median(kl):.5f} | {relative_error(model, level):.2e} |", flush=True)

    for kind in UNIFORM:
        show(kind, HIGH, sum(add_type(model, HIGH, kind)))
    for name in (f for f in a.format if f in FORMATS):
        add_nested(model, FORMATS[name], a.levels)
        for planes in a.levels:
            show(f"{name}, {planes} planes", planes, nested_bytes(model, FORMATS[name], planes))


def plane(a):
    model = Model(a.model)
    text = Text(model, a.model, a.text, chunks=a.chunks, part=a.part, parts=a.parts)
    n = text.tokens.shape[1]
    table = Table(f"{os.path.basename(a.model)}: {a.slots / 1e6:g} MB of slots, {text.tokens.size} tokens; the line is that of the uniform types")
    uniform_line(model, text, table, a.slots, a.types)
    for pair in a.pairs:
        sizes = [add_type(model, level, kind) for level, kind in zip((HIGH, LOW), pair.split("+"))]
        for t1, t2 in THRESHOLDS:
            table.add(f"{pair} {t1:g}/{t2:g}", *measure(model, text, lambda r: play_pair(r, n, model.n_expert, *sizes, t1, t2, a.slots),
                                                        lambda g: np.full(g.shape, LOW)))
    for name in a.format:
        levels, whole = sorted({*a.levels, *a.alone}), name == "types"
        if whole:
            size = {SKIP: 0, **{b: sum(add_type(model, b, TYPES[b])) for b in levels}}
            lost = {b: relative_error(model, b) for b in levels}
        else:
            lost = add_nested(model, FORMATS[name], levels)
            size = {b: nested_bytes(model, FORMATS[name], b) for b in (SKIP, *levels)}
        room = {b: round(size[b] if a.room == "planes" or b == SKIP else model.n_weights / 8 * ROOM[a.room][b]) for b in size}

        def point(title, levels, price):
            wish = lambda g: graded(g, levels, lost, size, price)  # noqa: E731
            table.add(title, *measure(model, text, lambda r: play_nested(r, wish(r.gate), model.n_expert, n, levels, size, room, a.slots, a.own, whole), wish))

        for bits in a.bits:
            price = price_for(text.routing.gate, a.levels, lost, size, bits * model.n_weights / 8)
            point(f"{name}, {bits:g} bits wanted of {','.join(map(str, a.levels))}", a.levels, price)
        for planes in a.alone:
            point(f"{name}, all {planes} planes", (planes,), 0.0)


def variants(a):
    """Bytes against the uniform types of equal distortion (mean of g^2 D as served), on the routing of the model as given."""
    model = Model(a.model)
    text = Text(model, a.model, a.text, chunks=a.chunks)
    routing, n, levels, bits = text.routing, text.tokens.shape[1], a.levels, a.bits[0]
    square = routing.gate.astype(np.float64) ** 2
    line = []

    def distortion(served, lost):
        return (square * np.vectorize({SKIP: 1.0, **lost}.get)(served)).sum() / square.sum()

    def against(loaded, loss):
        equal = at_equal_loss(line, loss)
        return "-" if equal is None else f"{100 * (loaded / equal[0] - 1):+.1f} %"

    size, lost = {}, {}
    for level, kind in TYPES.items():
        size[level] = sum(by_projection := add_type(model, level, kind))
        lost[level] = relative_error(model, level)
        line.append((play_pair(routing, n, model.n_expert, by_projection, [1, 1, 1], 1.0, 1.0, a.slots)[0], lost[level], 0))

    def show(name, levels, size, lost, room=None, **how):
        size, lost = {SKIP: 0, **size}, {b: lost[b] for b in levels}
        wanted = lambda g: graded(g, levels, lost, size, price)  # noqa: E731
        price = price_for(routing.gate, levels, lost, size, bits * model.n_weights / 8)
        room = {b: round(model.n_weights / 8 * ROOM[room][b]) if room and b else size[b] for b in size}
        loaded, served = play_nested(routing, wanted(routing.gate), model.n_expert, n, levels, size, room, a.slots, **how)
        print(f"| {name} | {against(loaded, distortion(served, lost))} | {100 * (wanted(routing.gate) == SKIP).mean():.2f} % |", flush=True)

    print(f"{os.path.basename(a.model)}, {bits:g} bits wanted\n\n| | to uniform | wants to skip |\n|---|---|---|")
    for pair in a.pairs:
        high, low = (next(b for b, kind in TYPES.items() if kind == k) for k in pair.split("+"))
        loaded, served = play_pair(routing, n, model.n_expert, type_bytes(model, TYPES[high]), type_bytes(model, TYPES[low]), 0.6, 1.0, a.slots)
        print(f"| {pair} 0.6/1 | {against(loaded, distortion(served, {HIGH: lost[high], LOW: lost[low]}))} | |", flush=True)
    for name in FORMATS:
        nested_lost = add_nested(model, FORMATS[name], range(2, 9))
        nested_size = {b: nested_bytes(model, FORMATS[name], b) for b in range(2, 9)}
        show(f"{name}, planes in memory", levels, nested_size, nested_lost)
    show("k8, parts rated by the uses that wanted them", levels, nested_size, nested_lost, own=True)
    for some in ((2, 3, 4, 5, 6, 7, 8), (3, 4, 5, 6), (3, 5, 8), (4, 6, 8)):
        show(f"k8, levels {','.join(map(str, some))}", some, nested_size, nested_lost)
    show("k8, in memory as q8_0", levels, nested_size, nested_lost, "q8_0")
    show("k8, in memory as q4_1, q5_1 or q8_0", levels, nested_size, nested_lost, "types")
    show(f"copies of their own: {', '.join(TYPES[b] for b in levels)}", levels, size, lost, whole=True)


class _CpuTraits(ctypes.Structure):  # struct ggml_type_traits_cpu, ggml-cpu.h
    _fields_ = [("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)), ("vec_dot", ctypes.c_void_p),
                ("vec_dot_type", ctypes.c_int), ("nrows", ctypes.c_int64)]


def speed(a):
    """A product of planes against those of ggml's types, by ggml's kernels, in time of the thread, fastest of many; the results must agree."""
    lib, (n_rows, n_in) = native(), a.shape
    ggml.types()  # loads what the next needs
    cpu = next(ctypes.CDLL(str(f)) for folder in ggml.library_folders() for f in folder.glob("libggml-cpu*"))
    cpu.ggml_cpu_init()
    cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CpuTraits)
    rows, vector = np.random.default_rng(1).standard_normal((n_rows, n_in), np.float32), np.random.default_rng(2).standard_normal((1, n_in), np.float32)
    copy, x = Q8(rows), Q8(vector)
    planes, scale = copy.planes(), copy.scale.ravel().copy()
    integers, x_scale = np.ascontiguousarray(x.integers), x.scale.ravel().copy()
    y = np.empty(n_rows, np.float32)
    exact = rows @ vector[0]
    size = ctypes.c_int(n_rows), ctypes.c_int(n_in)

    def report(name, f, bits, loss):
        """loss: largest error that is right, in parts of the largest result."""
        best, until = float("inf"), time.monotonic() + 1
        while time.monotonic() < until:
            start = time.thread_time()
            f()
            best = min(best, time.thread_time() - start)
        if not np.abs(y - exact).max() < loss * np.abs(exact).max():
            raise SystemExit(f"{name}: the product is wrong")
        print(f"| {name} | {1e9 * best / rows.size:.3f} | {rows.size * bits / 8 / best / 1e9:.1f} |", flush=True)

    print(f"{n_rows} rows of {n_in}, one thread\n\n| | ns a weight | GB/s |\n|---|---|---|")
    for name in ("q8_0", "q6_k", "q5_k", "q4_k", "q3_k"):
        info = ggml.type_info(name)
        traits = cpu.ggml_get_type_traits_cpu(info.id).contents
        data, row_bytes = ggml.quantize(name, rows), info.row_bytes(n_in)
        to = ggml.type_info(traits.vec_dot_type)
        inputs = np.zeros(to.row_bytes(n_in), np.uint8)
        cpu.ggml_get_type_traits_cpu(to.id).contents.from_float(vector.ctypes.data, inputs.ctypes.data, n_in)
        report(name, lambda: lib.ggml_product(ctypes.c_void_p(traits.vec_dot), pointer(data), ctypes.c_size_t(row_bytes), pointer(inputs), *size, pointer(y)), info.bits, 0.2)
    for b in a.levels:
        which = (ctypes.c_void_p * 8)(*(planes[i].ctypes.data for i in range(8)))
        report(f"{b} planes", lambda: lib.nested_product(b, which, pointer(scale), pointer(integers), pointer(x_scale), *size, pointer(y)), b + 1, 0.4)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=("prefixes", "plane", "variants", "speed"))
    p.add_argument("model", nargs="?")
    p.add_argument("--text")
    p.add_argument("--chunks", type=int, default=12)
    p.add_argument("--part", type=int, default=0)
    p.add_argument("--parts", type=int, default=1, help="deal the chunks in turn and take one part")
    p.add_argument("--format", nargs="+", choices=[*FORMATS, "types"], default=["k8"], help="types: a copy of its own for each level")
    p.add_argument("--levels", type=lambda s: tuple(map(int, s.split(","))), default=(3, 4, 5, 6, 8))
    p.add_argument("--alone", nargs="*", type=int, default=[], help="also: all uses at so many planes")
    p.add_argument("--bits", type=lambda s: tuple(map(float, s.split(","))), default=(4.0, 4.5, 5.0, 5.5, 6.5))
    p.add_argument("--pairs", nargs="*", default=PAIRS)
    p.add_argument("--types", nargs="*", default=UNIFORM)
    p.add_argument("--slots", type=megabytes, help="bytes for slots, such as 5.6MB")
    p.add_argument("--room", choices=("planes", *ROOM), default="planes", help="what is in the slots: planes, or what they were expanded to on arrival")
    p.add_argument("--own", action="store_true", help="a part of an expert counts the uses that wanted it, not all")
    p.add_argument("--shape", type=lambda s: tuple(map(int, s.split("x"))), default=(4096, 4096), help="speed: rows x their length")
    a = p.parse_args()
    {"prefixes": prefixes, "plane": plane, "variants": variants, "speed": speed}[a.command](a)
    return 0


if __name__ == "__main__":
    sys.exit(main())
