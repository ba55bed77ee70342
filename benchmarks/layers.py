"""Do some layers, or projections, deserve other thresholds or types than others?

    python benchmarks/layers.py MODEL-f16.gguf --text FILE --slots 5.75MB [--pair q5_k+q3_k]

Half of the chunks say what the low type costs in each layer and each projection alone. The other half then compares, at the same budget:
one T1 for all layers with a T1 for each layer, skips in the later layers alone, low copies with one wider projection, and types that differ by layer or projection with the line of the uniform types.
docs/frontier.md has the results.
"""

import argparse
import os
import sys

from _plane import HIGH, LOW, PROJECTIONS, Table, add_type, measure, megabytes, play_pair, type_bytes, uniform_line

import numpy as np
from _forward import GIVEN, SKIP, Model, Routing, Text

MIXED, WIDER, LOW_MIXED = 102, 103, 104


def sensitivity(model, text, low):
    """Mean KL of the low type in one layer alone, and in one projection alone."""
    def alone(where):
        model.mix(MIXED, where)
        kl = text.divergence(model.run(text.tokens, lambda *_: MIXED)[0])
        return kl.mean(), kl.std() / len(kl) ** 0.5

    def show(names, found):
        mean = np.array([m for m, _ in found])
        print(f"| {' | '.join(names)} | mean / geometric mean |\n|{'---|' * (len(found) + 1)}\n| "
              f"{' | '.join(f'{m:.4f} ± {e:.4f}' for m, e in found)} | {mean.mean() / np.exp(np.log(mean).mean()):.3f} |\n", flush=True)
        return mean

    by_projection = [alone(lambda i, p: LOW if p == name else GIVEN) for name in PROJECTIONS]  # noqa: B023
    by_layer = [alone(lambda i, p: LOW if i == layer else GIVEN) for layer in range(model.n_layers)]  # noqa: B023
    print(f"Mean KL with {low} in one place alone\n")
    show(PROJECTIONS, by_projection)
    return show([f"layer {i}" for i in range(model.n_layers)], by_layer)


def skipping(model, text, t2):
    """Prints what it costs to skip, in one layer alone, what is beyond t2 of the gate weights."""
    print(f"All as given, skipped beyond {t2:g} in one layer\n\n| layer | uses skipped | of g^2 | mean KL | KL for the g^2 |\n|---|---|---|---|---|")
    for layer in range(model.n_layers):
        share = {}

        def choose(i, experts, gate):
            before = np.cumsum(gate, axis=1) - gate
            skip = (before > t2) & (before > 0) & (i == layer)  # noqa: B023
            if i == layer:  # noqa: B023
                share.update(uses=skip.mean(), square=(gate ** 2 * skip).sum() / (gate ** 2).sum())  # noqa: B023
            return np.where(skip, SKIP, GIVEN)

        kl = text.divergence(model.run(text.tokens, choose)[0])
        print(f"| {layer} | {100 * share['uses']:.1f} % | {100 * share['square']:.2f} % | {kl.mean():.5f} ± {kl.std() / len(kl) ** 0.5:.5f} | {kl.mean() / share['square']:.3f} |", flush=True)
    print()


def served_from(routing, first, t2):
    """The routing with gate weights that ask for no skip in the layers before `first`: their ranks weigh at most t2 together."""
    gate = routing.gate.copy()
    gate[:first] = np.diff(np.minimum(np.cumsum(gate[:first], axis=2), t2 - 1e-3), axis=2, prepend=0)
    return Routing(routing.experts, gate)


def thresholds(t1, cost):
    """T1 of each layer: what is worth a high copy weighs so much that g^2 times the layer's cost is the same in all."""
    return 1 - (1 - t1) * np.sqrt(np.exp(np.log(cost).mean()) / cost)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--text", required=True)
    p.add_argument("--slots", type=megabytes, required=True)
    p.add_argument("--pair", default="q5_k+q3_k")
    p.add_argument("--t1-skip", type=float, default=0.7, help="with --t2")
    p.add_argument("--t2", type=float, default=0.9, help="where some layers skip")
    p.add_argument("--wider", default="q4_k", help="for one projection of low copies")
    p.add_argument("--t1", type=float, nargs="+", default=[0.55, 0.65, 0.75, 0.85])
    p.add_argument("--chunks", type=int, default=12)
    a = p.parse_args()
    high, low = a.pair.split("+")
    model = Model(a.model)
    print(os.path.basename(a.model))
    sizes = add_type(model, HIGH, high), add_type(model, LOW, low)
    text = Text(model, a.model, a.text, chunks=a.chunks, part=0, parts=2)
    cost = sensitivity(model, text, low)
    skipping(model, text, a.t2)

    text = Text(model, a.model, a.text, chunks=a.chunks, part=1, parts=2)
    n = text.tokens.shape[1]

    def pair(t1):
        return measure(model, text, lambda r: play_pair(r, n, model.n_expert, *sizes, t1, 1.0, a.slots), lambda g: np.full(g.shape, LOW))

    table = Table(f"{a.pair}, T2 1, {a.slots / 1e6:g} MB of slots, other text; the line is one T1 for all layers")
    for t1 in a.t1:
        table.add(f"T1 {t1:g}", *pair(t1), line=True)
    for t1 in a.t1[1:]:
        each = thresholds(t1, cost)
        table.add(f"T1 {' '.join(f'{t:.2f}' for t in each)}", *pair(each))

    for first in dict.fromkeys((0, model.n_layers // 2, 5 * model.n_layers // 8)):
        found = measure(model, text, lambda r: play_pair(served_from(r, first, a.t2), n, model.n_expert, *sizes, a.t1_skip, a.t2, a.slots),  # noqa: B023
                        lambda g: np.full(g.shape, LOW))
        table.add(f"T1 {a.t1_skip:g}, T2 {a.t2:g} from layer {first} on", *found)
    for name in PROJECTIONS:  # low copies with one projection a type wider
        add_type(model, WIDER, a.wider)
        model.mix(LOW_MIXED, lambda i, p: WIDER if p == name else LOW)  # noqa: B023
        wider = [(type_bytes(model, a.wider) if p == name else sizes[1])[k] for k, p in enumerate(PROJECTIONS)]

        def play(routing):
            loaded, level = play_pair(routing, n, model.n_expert, sizes[0], wider, a.t1[1], 1.0, a.slots)  # noqa: B023
            return loaded, np.where(level == LOW, LOW_MIXED, level)

        table.add(f"T1 {a.t1[1]:g}, {name} of low copies {a.wider}", *measure(model, text, play, lambda g: np.full(g.shape, LOW_MIXED)))

    table = Table("\nTypes by place, all uses high; the line is one type for all")
    uniform_line(model, text, table, a.slots, ("q6_k", "q5_k", "q4_k"))
    wide, narrow = add_type(model, HIGH, "q5_k"), add_type(model, LOW, "q4_k")
    half = model.n_layers // 2
    for name, where in (("q5_k in the first half of the layers, q4_k in the second", lambda i, p: i < half),
                        ("q4_k in the first half, q5_k in the second", lambda i, p: i >= half),
                        ("q5_k for down, q4_k for gate and up", lambda i, p: p == "down"),
                        ("q4_k for down, q5_k for gate and up", lambda i, p: p != "down")):
        model.mix(MIXED, lambda i, p: HIGH if where(i, p) else LOW)  # noqa: B023
        size = [[(wide if where(i, p) else narrow)[k] for k, p in enumerate(PROJECTIONS)] for i in range(model.n_layers)]
        states, routing = model.run(text.tokens, lambda *_: MIXED)
        mean = np.mean(size, axis=0).astype(int).tolist()  # one pool: as if slots of two sizes could be shared
        loaded, _ = play_pair(routing, n, model.n_expert, mean, [1, 1, 1], 1.0, 1.0, a.slots)
        table.add(name, loaded, text.divergence(states))
    return 0


if __name__ == "__main__":
    sys.exit(main())
