"""Make a mixture-of-experts GGUF of a given shape with random weights, for timing.

    python -m gguf_tools.synth OUT.gguf --shape mixtral --layers 8 --type q8_0
    python -m gguf_tools.synth OUT.gguf --shape tiny --shares 67/30/3 --report
    python -m gguf_tools.synth OUT.gguf --shape mixtral --like trace.npz
    python -m gguf_tools.synth FILE.gguf --report            (an existing file: only measure it)

The file loads, tokenizes any text and generates (nonsense) in llama.cpp. Weights are Gaussian, of the variance that
keeps activations stable, and quantized by ggml itself. To be quick, one random matrix is quantized per layer and
projection, and each expert is this matrix with its ROWS ROTATED by a random number: experts differ in every page and
compute different functions, but hold the same set of rows. Quality cannot be measured on such a file, only speed.

How routing is set, and which text has repetition (consecutive token ids), is told in _synth_routing.py. Written into
the file: synth.seed, synth.sharpness, synth.residual_gain and what else decided the routing.
"""

import argparse
import dataclasses
import os
import sys
import time

from . import _synth_model as model
from . import _synth_report as report
from ._synth_routing import Routing, SynthError, find_sharpness, load_trace, mean_square_weight, random_logits
from ._synth_write import check_types, write
from .errors import GGUFError
from .ggml import GGMLError

T1, T2 = 0.6, 0.9  # the thresholds that --shares and the report are about


def parse_args(argv):
    p = argparse.ArgumentParser(prog="python -m gguf_tools.synth", formatter_class=argparse.RawDescriptionHelpFormatter,
                                description=__doc__)
    p.add_argument("out", metavar="OUT.gguf")
    p.add_argument("--shape", choices=sorted(model.SHAPES), help="default: tiny; the options below change parts of it")
    for f in dataclasses.fields(model.Shape):
        p.add_argument("--" + f.name.replace("_", "-"), type=f.type, metavar="NAME" if f.type is str else "N", help=f.metadata["help"])
    p.add_argument("--type", help="ggml type of the experts (default: q8_0)")
    p.add_argument("--trunk", choices=["f16", "bf16", "q8_0", "f32"], help="type of all other matrices (default: f16 for float experts, else q8_0)")
    p.add_argument("--seed", type=int, default=0)
    routing = p.add_argument_group("routing")
    routing.add_argument("--shares", metavar="H/L/S", help=f"per cent of requests wanted high/low/skip at T1={T1}, T2={T2}: find the sharpness that reaches H (default: 67/30/3, Mixtral's; 41/42/17 where not 2 experts are used)")
    routing.add_argument("--router-sharpness", type=float, metavar="X", help="standard deviation of the router's logits, instead of --shares")
    routing.add_argument("--residual-gain", type=float, metavar="X", help="RMS of what a sublayer adds, against the residual stream's (default: 0.3; with --like 0.1); smaller: the next layer's choice is easier to predict")
    routing.add_argument("--repeat", type=float, default=0.0, metavar="X", help="correlation of consecutive token ids' embeddings, 0..1 (default: 0)")
    routing.add_argument("--skew", type=float, default=0.0, metavar="X", help="standard deviation of the experts' constant bias, in units of the sharpness (default: 0, balanced)")
    routing.add_argument("--like", metavar="TRACE", help="copy the routing of a recorded trace (.npy, .npz), token id i as its position i; excludes the four above but --residual-gain")
    p.add_argument("--force", action="store_true", help="replace OUT.gguf if it exists")
    p.add_argument("--report", action="store_true", help="run the file in llama.cpp and print what its routers do")
    p.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens of the report (default: 256)")
    return p.parse_args(argv)


def asked_nothing_else(args):
    """True if no option asks for a new file."""
    plain = vars(parse_args([args.out]))
    return all(value == plain[name] for name, value in vars(args).items() if name not in ("report", "tokens"))


def shape_of(args):
    base = model.SHAPES[args.shape or "tiny"]
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(model.Shape)}
    shape = dataclasses.replace(base, **{k: v for k, v in given.items() if v is not None})
    shape.check()
    return shape


def high_share(text):
    try:
        h, l, s = (float(x) for x in text.split("/"))
    except ValueError:
        raise SynthError(f"--shares wants three numbers as in 67/30/3, not {text!r}") from None
    if min(h, l, s) < 0 or abs(h + l + s - 100) > 0.5:
        raise SynthError(f"--shares must be three numbers that sum to 100, not {text!r}")
    return h / 100


def routing_of(args, shape):
    """(Routing, residual gain, mix): mix as model.tensors() wants it."""
    if args.like and (args.shares or args.router_sharpness is not None or args.repeat or args.skew):
        raise SynthError("--like takes sharpness, repetition and skew from the trace: leave out --shares, --router-sharpness, --repeat and --skew")
    if args.shares and args.router_sharpness is not None:
        raise SynthError("--shares and --router-sharpness exclude each other")
    if not 0 <= args.repeat < 1:
        raise SynthError(f"--repeat must be at least 0 and below 1, not {args.repeat}")
    if not args.skew >= 0:
        raise SynthError(f"--skew must not be negative, not {args.skew}")
    gain = args.residual_gain if args.residual_gain is not None else 0.1 if args.like else 0.3
    if not 0 <= gain <= 4:
        raise SynthError(f"--residual-gain must be 0 to 4, not {gain}")
    if not 0 <= args.seed < 1 << 32:
        raise SynthError(f"--seed must be 0 to {(1 << 32) - 1}, not {args.seed}")
    trace, sharpness = None, args.router_sharpness
    if args.like:
        trace, sharpness = load_trace(args.like, shape.experts, shape.used), 1.0
    elif sharpness is None and shape.used == 1 and not args.shares:
        sharpness = 1.0  # one expert is always wanted high, whatever the sharpness
    elif sharpness is None:
        shares = args.shares or ("67/30/3" if shape.used == 2 else "41/42/17")
        sharpness = find_sharpness(high_share(shares), shape.experts, shape.used, args.skew, args.seed, T1, T2)
    elif not sharpness > 0:
        raise SynthError(f"--router-sharpness must be positive, not {sharpness}")
    routing = Routing(d=shape.d, layers=shape.layers, experts=shape.experts, used=shape.used, vocab=shape.vocab,
                      seed=args.seed, sharpness=sharpness, repeat=args.repeat, skew=args.skew, growth=1 + gain * gain, trace=trace)
    logits = random_logits(sharpness, shape.experts, args.seed) if trace is None else trace.reshape(-1, shape.experts)
    return routing, gain, mean_square_weight(logits, shape.used)


def progress_bar():
    """A function (done, total) that shows per cent on a terminal; None elsewhere."""
    if not sys.stderr.isatty():
        return None
    last = -1

    def show(done, total):
        nonlocal last
        if done * 100 // total != last:
            last = done * 100 // total
            print(f"\r{last} %" if done < total else "\r     \r", end="", file=sys.stderr, flush=True)
    return show


def make(args):
    """Write the file and say what was planned."""
    shape = shape_of(args)
    routing, gain, mix = routing_of(args, shape)
    kind = (args.type or "q8_0").lower()
    trunk = args.trunk or ("f16" if kind in ("f16", "bf16", "f32") else "q8_0")
    tensors = model.tensors(shape, routing, kind, trunk, gain, mix)
    check_types(tensors)
    notes = dict(seed=args.seed, sharpness=float(routing.sharpness), residual_gain=float(gain),
                 repeat=float(args.repeat), skew=float(args.skew))
    if args.like:
        notes["like"] = os.path.basename(args.like)
    name = f"synthetic {shape.arch} {shape.layers} x {shape.experts} experts, d {shape.d}, ff {shape.ff}"
    start = time.monotonic()
    write(args.out, shape.arch, model.metadata(shape, name, notes), tensors, args.force, progress_bar())
    print(f"{args.out}: {name}, {kind}; {os.path.getsize(args.out) / 1e9:.2f} GB in {time.monotonic() - start:.0f} s; "
          f"sharpness {routing.sharpness:.3f}, residual gain {gain:g}")
    report.print_report("planned", report.planned(routing, min(args.tokens, shape.vocab)))


def main(argv=None):
    args = parse_args(argv)
    try:
        if args.tokens < 2:
            raise SynthError(f"--tokens must be at least 2, not {args.tokens}")
        if not (args.report and asked_nothing_else(args) and os.path.isfile(args.out)):
            make(args)
        if args.report:
            report.print_report(f"measured in llama.cpp on {args.tokens} tokens", report.measured(args.out, args.tokens))
    except (SynthError, GGUFError, GGMLError) as e:
        print(f"synth: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"synth: {e.filename or args.out}: {e.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("synth: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
