"""Offloading on a GPU against llama.cpp's own ways, at equal GPU memory for experts, in one run on one machine.

    python benchmarks/gpu.py --ours LIB:INCLUDE --peer LIB:INCLUDE --dir FOLDER [--models mixtral-f16+q4_0 ...] [--out results.jsonl]
    python benchmarks/gpu.py --table results.jsonl [--plot docs/gpu.png]

LIB is a folder with libllama and ggml's libraries, INCLUDE a source tree of llama.cpp (include/ and ggml/include/).
The peer is a llama.cpp that has an expert cache (--moe-cache-mib). Both should be built with the same options.

Models are made by gguf_tools.synth and removed after use: "SHAPE-TYPE+LOW" or "SHAPE-TYPE+LOW@TRACE", the latter with
the routing of a recorded trace (hobbit trace; fine: of a model with 64 experts). Decoding: median of five rounds of 24 tokens, one token at a time, after a prompt of 64
tokens and 32 to settle; prompts: median of three (one, beyond 1024 tokens). Loading is not timed. Needs matplotlib for --plot.
"""

import argparse
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)

LAYERS = {"mixtral": 8, "fine": 12}
EXPERT_VALUES = {"mixtral": 8 * 3 * 4096 * 14336, "fine": 128 * 3 * 2048 * 768}  # of a layer
VALUE_BYTES = {"f16": 2.0, "q8_0": 34 / 32}
MODELS = ["mixtral-f16+q4_0", "mixtral-q8_0+q4_k", "fine-f16+q4_0", "fine-q8_0+q4_0", "fine-q8_0+q2_k"]
SHARES = (0.25, 0.5)


def driver(side, folder, where, flags):
    """The driver against one side's libraries; where: LIB:INCLUDE, or a driver that was built before."""
    if os.path.isfile(where):
        return os.path.abspath(where)
    lib, tree = where.split(":")
    lib = os.path.abspath(lib)
    out = os.path.join(folder, f"gpu_run_{side}")
    subprocess.run(["g++", "-std=c++17", "-O2", *flags, f"-I{tree}/include", f"-I{tree}/ggml/include", f"-I{ROOT}/csrc/include",
                    os.path.join(HERE, "gpu_run.cpp"), "-o", out, f"-L{lib}", "-lllama", "-lggml", "-lggml-base", "-Wl,--allow-shlib-undefined",
                    f"-Wl,-rpath,{lib},--disable-new-dtags"], check=True)
    return out


def make_models(name, folder):
    """(ordinary file, dual file)."""
    shape, rest = name.split("-", 1)
    rest, _, trace = rest.partition("@")
    kind, low = rest.split("+")
    plain = os.path.join(folder, f"{shape}-{kind}.gguf")
    dual = os.path.join(folder, f"{shape}-{kind}-{low}-dual.gguf")
    routing = ["--like", os.path.abspath(trace)] if trace else []
    if trace and shape == "fine": # as many experts as the trained model has, of the same size together
        routing += ["--experts", "64", "--ff", "1536"]
    if not os.path.exists(plain):
        subprocess.run([sys.executable, "-m", "gguf_tools.synth", plain, "--shape", shape, "--layers", str(LAYERS[shape]), "--type", kind, *routing],
                       cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    if not os.path.exists(dual):
        subprocess.run([sys.executable, os.path.join(HERE, "_pair.py"), plain, dual, low], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    os.sync() # nothing is written while others are measured
    return plain, dual


def run(driver, model, name, out, meta, env=None, **options):
    began = time.time()
    args = [f"{k}={v}" for k, v in options.items()]
    try:
        p = subprocess.run([driver, model, f"name={name}", *args], capture_output=True, text=True, timeout=150, env={**os.environ, **(env or {})})
    except subprocess.TimeoutExpired:
        print(f"  {name}: more than 150 s, left out", flush=True)
        return []
    lines = [json.loads(x) for x in p.stdout.splitlines() if x.startswith("{")]
    if p.returncode or not lines:
        print(f"  {name}: failed ({p.returncode}): {(p.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)
    for x in lines:
        x.update(meta, options=options)
        out.write(json.dumps(x) + "\n")
        out.flush()
        label = f"{name} {x['t1']:g}/{x['t2']:g}" if "t1" in x else name
        print(f"  {label:34} " + " ".join(f"{k} {x[k]:g}" for k in ("decode", "prompt_512", "prompt_4096", "gpu_mib") if k in x) + f"  ({time.time() - began:.0f} s)", flush=True)
    return lines


def measure(name, ours, peer, folder, out, a):
    shape = name.split("-")[0]
    kind = name.split("-", 1)[1].partition("@")[0].split("+")[0]
    n, prompts = LAYERS[shape], a.prompts
    mib = EXPERT_VALUES[shape] * n * VALUE_BYTES[kind] / 2**20
    began = time.time()
    plain, dual = make_models(name, folder)
    print(f"{name}: {mib:.0f} MiB of experts, made in {time.time() - began:.0f} s", flush=True)
    meta = {"model": name, "experts_mib": round(mib)}
    same = {"prompts": prompts, "ubatch": a.ubatch, "tokens": "ids" if "@" in name else "random"}

    def mine(label, share, t="0.6/0.9,1/1", **options):
        run(ours, dual, f"hobbit {label}", out, {**meta, "who": "hobbit", "share": share}, t=t, **same, **options)

    def other(label, share, **options):
        run(peer, plain, label, out, {**meta, "who": label.split()[0], "share": share}, **same, **options)

    room = dict(x.split("=") for x in a.room).get(f"{shape}-{kind}", 0)
    for share in SHARES:
        mine(f"{share:.0%}", share, cache_bytes=int((share * mib + float(room)) * 2**20), threads=a.threads)
        keep = round(n * (1 - share))
        for threads in a.peer_threads:
            other(f"n-cpu-moe {share:.0%} {threads}t", share, ncmoe=keep, threads=threads)
        if a.brief:
            continue
        if a.all_peers or share < 0.5 or shape != "mixtral": # with few large experts it is far behind
            other(f"moe-cache {share:.0%}", share, ncmoe=n, moe_cache_mib=int(mib * share), threads=a.peer_threads[-1])
        if a.all_peers:
            half = n - round(n * share / 2)
            other(f"moe-cache+n-cpu-moe {share:.0%}", share, ncmoe=half, moe_cache_mib=int(mib * share / 2), threads=a.peer_threads[-1])
            other(f"layer-spill {share:.0%}", share, ngl=round(n * share), threads=a.peer_threads[-1])
    if not a.brief:
        mine("all", 1.0, t="0.6/0.9", cache_bytes=2**40, host=0, threads=a.threads)
        other("all on GPU", 1.0)
        other("cpu-moe", 0.0, ncmoe=n, threads=a.peer_threads[-1])
    if not a.keep:
        for f in (plain, dual, dual.replace(".gguf", ".experts.gguf")):
            if os.path.exists(f):
                os.remove(f)


def table(path):
    rows = [json.loads(x) for x in open(path)]
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model]
        print(f"\n{model}\n\n| | experts in GPU memory | GPU MiB | decode tok/s (min..max) | against the best peer | prompt 512 | prompt 4096 |\n|---|---|---|---|---|---|---|")
        for r in sorted(mine, key=lambda r: (r["share"], r["who"] == "hobbit")):
            peers = [x for x in mine if x["share"] == r["share"] and x["who"] != "hobbit"]
            best = max((x["decode"] for x in peers), default=0)
            label = f"hobbit {r['t1']:g}/{r['t2']:g}" if "t1" in r else r["name"]
            ratio = f"{r['decode'] / best:.2f}x" if r["who"] == "hobbit" and best else ""
            print(f"| {label} | {r['share']:.0%} | {r['gpu_mib']:.0f} | {r['decode']:.1f} ({r['decode_min']:.1f}..{r['decode_max']:.1f}) | {ratio} | "
                  f"{r.get('prompt_512', 0):.0f} | {r.get('prompt_4096', 0):.0f} |")


def plot(path, png):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = [json.loads(x) for x in open(path)]
    models = list(dict.fromkeys(r["model"] for r in rows))
    fig, axes = plt.subplots(1, len(models), figsize=(4.5 * len(models), 4), squeeze=False)
    for ax, model in zip(axes[0], models):
        series = {}
        for r in rows:
            if r["model"] == model:
                who = f"hobbit {r['t1']:g}/{r['t2']:g}" if "t1" in r else "llama.cpp, all on the GPU" if r["share"] == 1 else r["who"]
                point = series.setdefault(who, {})
                point[r["gpu_mib"]] = max(r["decode"], point.get(r["gpu_mib"], 0))
        for who, points in series.items():
            xs = sorted(points)
            ax.plot([x / 1024 for x in xs], [points[x] for x in xs], "o-" if who.startswith("hobbit") else "x--", label=who)
        ax.set(title=model, xlabel="GPU memory, GiB", ylabel="tokens/s, decoding", yscale="log")
        ax.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(png, dpi=110)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ours")
    p.add_argument("--peer")
    p.add_argument("--dir")
    p.add_argument("--models", nargs="+", default=MODELS)
    p.add_argument("--out", default="gpu.jsonl")
    p.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="of hobbit; one core is left for the copies")
    p.add_argument("--peer-threads", type=int, nargs="+", default=[os.cpu_count() or 1], help="n-cpu-moe is run with each, the others with the last")
    p.add_argument("--all-peers", action="store_true", help="also layer spill, and an expert cache beside layers on the GPU")
    p.add_argument("--brief", action="store_true", help="no peer but --n-cpu-moe, the best in most runs")
    p.add_argument("--room", nargs="+", default=[], metavar="SHAPE-TYPE=MIB", help="slots beyond the share, where others' compute buffers are so much larger: equal GPU memory")
    p.add_argument("--prompts", default="512,4096")
    p.add_argument("--ubatch", type=int, default=2048)
    p.add_argument("--keep", action="store_true", help="do not remove the models")
    p.add_argument("--table", metavar="RESULTS")
    p.add_argument("--plot", metavar="PNG")
    a = p.parse_args()
    if a.table:
        table(a.table)
        if a.plot:
            plot(a.table, a.plot)
        return 0
    if not (a.ours and a.peer and a.dir):
        p.error("--ours, --peer and --dir are needed (or --table)")
    os.makedirs(a.dir, exist_ok=True)
    ours = driver("hobbit", a.dir, a.ours, ["-DHOBBIT"])
    peer = driver("llama", a.dir, a.peer, ["-DMOE_CACHE"])
    with open(a.out, "a") as out:
        for name in a.models:
            measure(name, ours, peer, a.dir, out, a)
    table(a.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
