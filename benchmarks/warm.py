"""What the policy `follow` would gain by starting with what an earlier text taught it.

    hobbit trace PAIR.gguf --text TRAIN -o learn.npy -n 8192
    hobbit trace PAIR.gguf --text OTHER -o play.npy -n 4096
    python benchmarks/warm.py learn.npy play.npy --slots 8+1 16+1 32+1

Bytes loaded a token in each stretch of the second trace: played alone, and the change where the first was played before it. `hobbit` beside it
says how much of that is what was in the slots already. docs/simulate.md has the results.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hobbit_cpp import bindings, simulate  # noqa: E402

STRETCHES = ((0, 500), (500, 1000), (1000, 2000), (2000, 4000))


def part(trace, begin, end):
    starts = [*trace.starts, len(trace.rows)]
    first, last = starts[min(begin, trace.n_tokens)], starts[min(end, trace.n_tokens)]
    return simulate.Trace(trace.rows[first:last], trace.starts[begin:end] - first, trace.layers)


def play(before, trace, **settings):
    """Bytes loaded a token in each stretch."""
    found = []
    with simulate.Simulation(before or trace, **settings) as s:
        if before:
            s.run()
        for begin, end in STRETCHES:
            bindings.hobbit_reset_stats(s.h)
            s.trace = part(trace, begin, end)
            s.run()
            found.append(s.result()["bytes_per_token"])
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("learn")
    p.add_argument("play")
    p.add_argument("--slots", nargs="+", default=["16+1"], help="high+low")
    p.add_argument("--t1", type=float, nargs="+", default=[1.0, 0.7])
    a = p.parse_args()
    learn, trace = simulate.read_trace(a.learn), simulate.read_trace(a.play)
    if trace.n_tokens < STRETCHES[-1][1]:
        raise SystemExit(f"{a.play} has {trace.n_tokens} tokens: give {STRETCHES[-1][1]}")
    print("| slots, T1, policy | " + " | ".join(f"{b + 1}-{e}" for b, e in STRETCHES) + " |\n" + "|---" * (len(STRETCHES) + 1) + "|")
    for slots in a.slots:
        for t1 in a.t1:
            for policy in ("hobbit", "follow"):
                how = {"slots": tuple(map(int, slots.split("+"))), "t1": t1, "t2": 1.0, "policy": policy}
                alone, after = play(None, trace, **how), play(learn, trace, **how)
                print(f"| {slots}, {t1:g}, {policy} | " + " | ".join(f"{x / 1000:,.0f} kB, {100 * (y / x - 1):+.1f} %" for x, y in zip(alone, after)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
