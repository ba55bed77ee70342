"""hobbit trace: record the routing of a text. hobbit simulate: play it under many settings."""

from __future__ import annotations

import itertools
import json
import os

from .memory import format_bytes
from .settings import POLICIES

WINDOW = 512  # tokens
BATCH = 128   # tokens that go through the model together

CLAIRVOYANT = "clairvoyant"
SHOWN = ("lru", "lfu", "lcu", "hobbit", "follow", CLAIRVOYANT)


def add_parsers(commands) -> None:
    t = commands.add_parser("trace", help="record which experts a text uses",
                            description="Record which experts each token of a text uses, with all experts at high precision. The text goes through "
                                        "the model in windows, each a sequence of its own.")
    t.add_argument("model", metavar="MODEL.gguf", help="main file of a converted model")
    t.add_argument("--text", metavar="FILE", required=True)
    t.add_argument("-o", "--output", metavar="TRACE.npy", required=True)
    t.add_argument("-n", "--tokens", type=int, metavar="N", help="about so many, in windows spread evenly over the text (default: all)")
    t.add_argument("--window", type=int, default=WINDOW, metavar="N", help="tokens of a sequence (default: %(default)s)")
    t.add_argument("--cache", metavar="SIZE", help="memory for experts while recording (default: auto)")
    t.add_argument("--threads", type=int, metavar="N", help="computing threads (default: half of the cores)")
    t.add_argument("-ngl", "--gpu-layers", type=int, metavar="N", help="layers on the GPU, -1: all (default: none)")
    t.add_argument("--force", action="store_true", help="overwrite the output")
    t.set_defaults(function=trace)

    s = commands.add_parser("simulate", help="play a recorded routing under many settings",
                            description="Play a recorded routing through the engine, one token at a time, without the model. Of every option that takes "
                                        "several values each is combined with each of the others.")
    s.add_argument("trace", metavar="TRACE.npy")
    s.add_argument("--model", metavar="MODEL.gguf", help="a converted model whose experts' sizes to take instead of the recorded model's")
    s.add_argument("--cache", nargs="+", metavar="SIZE", help="memory for experts: 8GiB, 25%%, min (default: 12.5%% 25%% 50%%)")
    s.add_argument("--slots", nargs="+", metavar="HIGH+LOW", help="slots of every group of layers, instead of --cache")
    s.add_argument("--policy", nargs="+", choices=(*POLICIES, CLAIRVOYANT), default=list(SHOWN), help="(default: %(default)s)")
    s.add_argument("--weights", nargs="+", metavar="R,F,H,D", help="weights of policy hobbit: recency, frequency, high uses, layer distance (default: equal)")
    s.add_argument("--t1", nargs="+", type=float, default=[0.6], metavar="X", help="(default: 0.6)")
    s.add_argument("--t2", nargs="+", type=float, default=[1.0], metavar="X", help="(default: 1)")
    s.add_argument("--skip-mass", type=float, default=1.0, metavar="X", help="skip at most this share of a token's gate weights in a layer (default: 1)")
    s.add_argument("--low-fraction", nargs="+", type=float, default=[0.0], metavar="X", help="share of --cache for low copies (default: 0)")
    s.add_argument("--io-threads", type=int, default=4, metavar="N", help="reads in flight, whose buffers come out of --cache (default: %(default)s)")
    s.add_argument("--threads", type=int, metavar="N", help="simulations at once (default: all cores)")
    s.add_argument("--json", action="store_true", help="print everything that was counted as JSON")
    s.set_defaults(function=simulate)


# --- trace ---


def trace(args) -> int:
    from ._cli_run import open_model
    from ._load import check_path, read_metadata
    from ._paths import check_folder, check_text
    from ._progress import Progress

    for name, least in (("tokens", 1), ("window", 2)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, not {getattr(args, name)}")
    if os.path.exists(args.output) and not args.force:
        raise ValueError(f"{args.output} exists: give --force to overwrite it")
    check_folder(args.output)
    check_text(args.text)
    with open(args.text, "rb") as f:
        text = f.read()
    if read_metadata(check_path(args.model)).get("hobbit.role") is None:
        raise ValueError(f"{args.model} is an ordinary GGUF: convert it first (hobbit convert), its routing is that of the converted model")
    vars(args).update(ctx=args.window, verbose=False, t1=1.0, t2=None, skip_mass=None, policy=None, low_fraction=None, io_threads=None, no_direct_io=False, no_profile=True,
                      verify=False, host_copies=None, unified_memory=None, miss=None, prefetch=None, prefetch_copy=None, prefetch_ranks=None, no_prompt_prefetch=False, lean=None)
    # logits of all tokens: the last layer leaves out those that give none
    with open_model(args, n_batch=BATCH, n_ubatch=BATCH, logits_all=True) as llm:
        windows = cut(llm.tokenize(text, add_bos=False), begin_of(llm), args.window, args.tokens)
        if not windows:
            raise ValueError(f"{args.text} is empty")
        n = sum(map(len, windows))
        bar = Progress(n, True, "tokens/s", 1)
        layers = len(llm.offload_stats()["layers"])
        with llm.trace(args.output):
            for tokens in windows:
                llm.reset()
                llm.eval(tokens)
                bar.add(len(tokens))
        bar.clear()
    print(f"{args.output}: {n} tokens in {len(windows)} sequence{'s' if len(windows) > 1 else ''}, {layers} layers, {format_bytes(os.path.getsize(args.output))}")
    return 0


def begin_of(llm) -> list[int]:
    """The token that sequences of this model begin with, if they do with one."""
    return [llm.token_bos()] if llm._model.add_bos_token() else []


def cut(tokens: list[int], begin: list[int], window: int, most: int | None) -> list[list[int]]:
    """Windows of tokens, each with the beginning before it; with `most`, as many as have about so many tokens, spread
    evenly."""
    window = min(window, most or window)
    step = max(1, window - len(begin))
    starts = list(range(0, len(tokens), step))
    n = len(starts) if most is None else min(len(starts), max(1, round(most / window)))
    return [begin + tokens[s:s + step] for s in (starts[i * len(starts) // n] for i in range(n if starts else 0))]


# --- simulate ---


def simulate(args) -> int:
    from . import simulate as s
    from ._progress import Progress

    configurations = plan(args)
    recorded = s.read_trace(args.trace)
    layers = s.check(recorded, s.read_layers(args.model) if args.model else None)
    bar = Progress(len(configurations), True, "settings/s", 1)
    results = s.simulate_all(recorded, configurations, layers, args.threads, bar.add)
    bar.clear()
    if args.json:
        print(json.dumps({"trace": args.trace, "tokens": recorded.n_tokens, "layers": len(layers), "results": results}, indent=1))
    else:
        print(table(recorded, layers, results))
    return 0


def plan(args) -> list[dict]:
    """The settings of every simulation: the product of the options. ValueError for an option that cannot be used."""
    if args.slots and (args.cache or args.low_fraction != [0.0]):
        raise ValueError("--slots says what --cache and --low-fraction would: give one of them")
    if args.weights and "hobbit" not in args.policy:
        raise ValueError("--weights belong to policy hobbit, which is not simulated: leave them out")
    if args.slots:
        rooms = [{"slots": parse_slots(x)} for x in args.slots]
    else:
        rooms = [{"cache_bytes": c, "low_fraction": f} for c in args.cache or ("12.5%", "25%", "50%") for f in args.low_fraction]
    policies = []
    for p in args.policy:
        weighted = [parse_weights(w) for w in args.weights] if p == "hobbit" and args.weights else [None]
        policies += [{"policy": p, "policy_weights": w} for w in weighted]
    return [{**room, "t1": t1, "t2": t2, "skip_mass": args.skip_mass, "n_io_threads": args.io_threads, **policy}
            for t1, t2, room, policy in itertools.product(args.t1, args.t2, rooms, policies)]


def parse_slots(text: str) -> tuple[int, int]:
    high, plus, low = text.partition("+")
    if not text.isascii() or not plus or not high.isdigit() or not low.isdigit() or max(int(high), int(low)) >= 2**31:
        raise ValueError(f"--slots is {text!r}: give a number of high and one of low slots, such as 32+8")
    return int(high), int(low)


def parse_weights(text: str) -> tuple[float, ...]:
    try:
        weights = tuple(map(float, text.split(",")))
    except ValueError:
        weights = ()
    if len(weights) != 4:
        raise ValueError(f"--weights is {text!r}: give four numbers, such as 1,1,1,1")
    return weights


def table(recorded, layers, results: list[dict]) -> str:
    """One line a simulation; the differences are to lru and lfu with the other settings alike, the share closed is of
    the way from lru to clairvoyant."""
    def key(r):
        room = (str(r["cache_bytes"]), r["low_fraction"]) if r["cache_bytes"] is not None else (tuple(r["high_slots"]), tuple(r["low_slots"]))
        return r["t1"], r["t2"], *room

    references = {(key(r), r["policy"]): r["penalty"] for r in results}
    lines = [f"{recorded.n_tokens} tokens, {len(layers)} layers of {layers['n_expert'].max()} experts, {layers['n_expert_used'].max()} used",
             "penalty: per token, 1 for a miss served high, B_low/B_high for one served low; clairvoyant knows the uses to come (a heuristic, not a bound)", "",
             f"{'T1':>5} {'T2':>5} {'cache':>8} {'slots':>10}  {'policy':<20} {'hits %':>7} {'penalty':>9} {'to lru':>8} {'to lfu':>8} {'closed':>7} {'read/token':>12}"]
    for r in results:
        def change(policy):
            other = references.get((key(r), policy))
            return f"{100 * (r['penalty'] / other - 1):+.1f} %" if other else "-"

        lru, best = references.get((key(r), "lru")), references.get((key(r), CLAIRVOYANT))
        closed = f"{100 * (lru - r['penalty']) / (lru - best):.0f} %" if lru is not None and best is not None and lru > best else "-"
        slots = ",".join(f"{h}+{low}" for h, low in zip(r["high_slots"], r["low_slots"]))
        name = r["policy"] + (" " + ",".join(f"{w:g}" for w in r["policy_weights"]) if r["policy_weights"] else "")
        lines.append(f"{r['t1']:>5g} {r['t2']:>5g} {'-' if r['cache_bytes'] is None else r['cache_bytes']:>8} {slots:>10}  {name:<20} {100 * r['hit_rate']:>7.1f} {r['penalty']:>9.3f} {change('lru'):>8} {change('lfu'):>8} "
                     f"{closed:>7} {format_bytes(r['bytes_per_token']):>12}")
    return "\n".join(lines)
