"""A model bigger than memory on a CPU-only machine: hobbit against stock llama.cpp in the same small cgroup.

    python benchmarks/big.py --dir FOLDER                 Mixtral's shape, 8 layers, q8_0 (12.6 GB), low copies q2_K; 4 GiB
    python benchmarks/big.py --dir FOLDER --quick         a small model in 320 MiB: does everything run?

Needs root (memory cgroup, dropping the page cache), 30 GB of disk in FOLDER, and hobbit-cpp built. Model files are made
there when they are missing (gguf_tools.synth, hobbit_cpp.convert or its faster stand-in _pair.py) and kept.

Every run is a process of its own that joins a fresh cgroup before it loads anything, with a cold page cache, and is fed
the same fixed tokens: a prompt of --prompt tokens, --tokens single tokens after it, and a prompt of 32 in an emptied
context. Runs are interleaved, --repeats rounds; the table shows medians. Stock llama.cpp loads the ordinary GGUF by the
same bindings in four ways; those that need more memory than there is are killed, which is reported, and not tried again.

Floor: the bytes a run read while decoding, at the best speed of parallel direct reads from the same file (several
settings, before each round and after the last). `x floor` is decode time over that; 1.0 cannot be beaten without reading
less.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time

import _disk
from _cgroup import CgroupError, MemoryCgroup, ReadLimit, drop_caches

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
SHORT = 32

BIG = dict(name="mixtral-8l-q8_0", memory="4G", repeats=3, prompt=512, tokens=32,
           synth="--shape mixtral --layers 8 --type q8_0 --shares 67/30/3 --repeat 0.3")
QUICK = dict(name="quick-q8_0", memory="320M", repeats=1, prompt=64, tokens=8,
             synth="--shape tiny --d 1024 --ff 2048 --layers 6 --vocab 2048 --type q8_0 --shares 67/30/3 --repeat 0.3")

STOCK = {
    "stock mmap": dict(load="mmap", extra_bufts=False),
    "stock mmap, defaults": dict(load="mmap", extra_bufts=True),
    "stock no mmap": dict(load="none", extra_bufts=False),
    "stock direct I/O": dict(load="direct_io", extra_bufts=False),
}
HOBBIT = {
    "hobbit 0.6/0.9": dict(t1=0.6, t2=0.9),
    "hobbit 0.6/1, no skips": dict(t1=0.6, t2=1.0),
    "hobbit all high": dict(t1=1.0, t2=1.0),
}


def size(text):
    """Bytes of '4G', '320M', '123456'."""
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper())
    try:
        n = int(float(text[:-1]) * (1 << unit)) if unit else int(text)
    except ValueError:
        n = 0
    if n <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4G or 320M")
    return n


def parse_args():
    p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    p.add_argument("--dir", required=True, help="folder for the model files, on the disk to be measured")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--memory", type=size, metavar="SIZE", help="limit of the cgroup (default: 4G; quick: 320M)")
    p.add_argument("--read-limit", type=size, metavar="SIZE", help="bytes a second that may be read from the disk (default: no limit)")
    p.add_argument("--cache", default="auto", help="hobbit's budget: auto or a size")
    p.add_argument("--repeats", type=int)
    p.add_argument("--prompt", type=int, metavar="N", help="tokens of the long prompt (default: 512)")
    p.add_argument("--tokens", type=int, metavar="N", help="decoded tokens (default: 32)")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--model", help="an ordinary GGUF to take instead of the synthetic one")
    p.add_argument("--dual", help="main file of its converted pair (default: made in --dir)")
    p.add_argument("--low", default="q2_k", help="type of the low copies")
    p.add_argument("--also", action="append", default=[], metavar="FILE", help="another ordinary GGUF for stock with mmap, such as the model in a smaller type")
    p.add_argument("--only", action="append", metavar="TEXT", help="only the runs whose name holds TEXT; repeatable")
    p.add_argument("--stock-lib", metavar="DIR", help="folder of another libllama for the stock runs (default: hobbit_cpp's own, whose kernels are the same)")
    p.add_argument("--out", default="big.json", help="results with every single run (default: big.json)")
    args = p.parse_args()
    preset = QUICK if args.quick else BIG
    args.name, args.synth = preset["name"], preset["synth"]
    for key in ("repeats", "prompt", "tokens"):
        if getattr(args, key) is None:
            setattr(args, key, preset[key])
        if getattr(args, key) < 1:
            p.error(f"--{key} must be at least 1")
    args.memory = args.memory or size(preset["memory"])
    if args.cache != "auto":
        args.cache = size(args.cache)
    return args


def say(text):
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


# --- files --------------------------------------------------------------------------------------

def environment(lib=None):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    env.pop("LLAMA_CPP_LIB_PATH", None)
    if lib:
        env["LLAMA_CPP_LIB_PATH"] = lib
    return env


def make(args, command):
    say("$ python " + " ".join(command))
    done = subprocess.run([sys.executable, *command], env=environment(), stdout=subprocess.DEVNULL if not sys.stderr.isatty() else None)
    if done.returncode:
        sys.exit(f"big: 'python {' '.join(command)}' failed")


def model_files(args, want_pair):
    """(ordinary GGUF, main file of the pair or None, file whose disk is measured)."""
    os.makedirs(args.dir, exist_ok=True)
    plain = args.model or os.path.join(args.dir, args.name + ".gguf")
    stem = os.path.basename(plain).removesuffix(".gguf")
    pair = args.dual or os.path.join(args.dir, f"{stem}-{args.low}-hobbit.gguf")
    sidecar = pair.removesuffix(".gguf") + ".experts.gguf"
    if not os.path.exists(plain):
        if args.model:
            sys.exit(f"big: {plain} does not exist")
        need = 30e9 if not args.quick else 1e9
        if shutil.disk_usage(args.dir).free < need:
            sys.exit(f"big: {args.dir} has less than {need / 1e9:.0f} GB free for the model files")
        make(args, ["-m", "gguf_tools.synth", plain, *args.synth.split()])
    if want_pair and not (os.path.exists(pair) and os.path.exists(sidecar)):
        if args.dual:
            sys.exit(f"big: {pair} or its sidecar {sidecar} does not exist")
        make(args, ["-m", "hobbit_cpp.convert", plain, "-o", pair, "--high", "keep", "--low", args.low, "--force"] if args.model
             else [os.path.join(HERE, "_pair.py"), plain, pair, args.low])  # the same, sooner
    return plain, pair if want_pair else None, sidecar if want_pair else plain


# --- runs ---------------------------------------------------------------------------------------

def run(args, job, lib):
    """One run in its cgroup: the worker's JSON with outcome, exit and the cgroup's figures."""
    drop_caches()
    with contextlib.ExitStack() as groups:
        group = groups.enter_context(MemoryCgroup(f"hobbit-bench-{os.getpid()}", args.memory))
        job = dict(job, procs=[group.procs])
        if args.read_limit:
            job["procs"].append(groups.enter_context(ReadLimit(f"hobbit-bench-{os.getpid()}", job["model"], args.read_limit)).procs)
        child = subprocess.Popen([sys.executable, os.path.join(HERE, "_worker.py"), json.dumps(job)], env=environment(lib),
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = child.communicate(timeout=3600)
        except BaseException:
            child.kill()
            child.wait()
            raise
        try:
            result = json.loads(out)
        except ValueError:
            result = {}
        result["cgroup_max"] = group.max_usage()
        kills = group.oom_kills()
    if child.returncode == 0:
        result["outcome"] = "ok"
    elif kills or (child.returncode == -signal.SIGKILL):
        result["outcome"] = "killed: out of memory"
    elif child.returncode < 0:
        result["outcome"] = f"died of {signal.Signals(-child.returncode).name}"
    else:
        result["outcome"] = result.get("error") or f"exit status {child.returncode}"
    if result["outcome"] != "ok":
        result["stderr"] = err.decode("utf-8", "replace")[-2000:]
    return result


def jobs(args, plain, pair):
    common = dict(threads=args.threads, n_ctx=(args.prompt + args.tokens + 255) // 256 * 256, n_ubatch=max(args.prompt, SHORT), first_token=300,
                  phases=[["prefill", args.prompt], ["decode", args.tokens], ["clear", 0], ["prefill", SHORT]])
    out = {name: dict(common, engine="hobbit", model=pair, extra_bufts=False, hobbit=dict(h, cache_bytes=args.cache)) for name, h in HOBBIT.items()}
    out.update({name: dict(common, engine="stock", model=plain, **s) for name, s in STOCK.items()})
    out.update({f"stock mmap {os.path.basename(f)}": dict(common, engine="stock", model=f, **STOCK["stock mmap"]) for f in args.also})
    return {name: job for name, job in out.items() if not args.only or any(text in name for text in args.only)}


# --- table --------------------------------------------------------------------------------------

def median(runs, pick):
    values = [v for v in (pick(r) for r in runs) if v is not None]
    return statistics.median(values) if values else None


def summary(runs, speed):
    """Medians over the good runs of one configuration."""
    good = [r for r in runs if r["outcome"] == "ok"]

    def phase(i, key):
        return median(good, lambda r: r["phases"][i][key])

    out = {"outcome": good[0]["outcome"] if good else runs[0]["outcome"], "runs": len(good)}
    if good:
        read = phase(1, "bytes")
        out.update(load_s=median(good, lambda r: r["load_s"]), prefill_tok_s=phase(0, "tok_s"), prefill_short_tok_s=phase(2, "tok_s"),
                   decode_tok_s=phase(1, "tok_s"), decode_bytes_per_token=read / good[0]["phases"][1]["tokens"],
                   times_floor=phase(1, "seconds") / (read / speed) if read and speed else None,
                   decode_spread=[min(r["phases"][1]["tok_s"] for r in good), max(r["phases"][1]["tok_s"] for r in good)])
    out.update(peak_rss=median(runs, lambda r: r.get("peak_rss")), cgroup_max=median(runs, lambda r: r.get("cgroup_max")))
    return out


def print_table(args, results):
    head = ["run", "load s", f"prefill {args.prompt}", f"prefill {SHORT}", "decode", "GB/token", "x floor", "RSS GB", "cgroup GB", "outcome"]
    rows = []
    for name, s in results.items():
        def cell(key, form="{:.2f}", scale=1):
            return form.format(s[key] / scale) if s.get(key) is not None else "-"
        rows.append([name, cell("load_s", "{:.1f}"), cell("prefill_tok_s"), cell("prefill_short_tok_s"), cell("decode_tok_s", "{:.3f}"),
                     cell("decode_bytes_per_token", "{:.2f}", 1e9), cell("times_floor"), cell("peak_rss", scale=1e9), cell("cgroup_max", scale=1e9), s["outcome"]])
    widths = [max(len(r[i]) for r in [head] + rows) for i in range(len(head))]
    for r in [head] + rows:
        print("  ".join(c.ljust(w) if i in (0, len(head) - 1) else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths))).rstrip())


def main():
    args = parse_args()
    lib = args.stock_lib or os.path.join(ROOT, "hobbit_cpp", "lib")
    try:
        MemoryCgroup(f"hobbit-bench-{os.getpid()}", args.memory).remove()  # say so before files are made
        drop_caches()
        wanted = jobs(args, "", "")
        if not wanted:
            sys.exit("big: --only leaves no run")
        plain, pair, measured = model_files(args, any(j["engine"] == "hobbit" for j in wanted.values()))
        raw, speeds = {name: [] for name in wanted}, []
        for round_ in range(args.repeats):
            drop_caches()
            speeds.append(_disk.measure(measured))
            say(f"disk: {max(speeds[-1].values()) / 1e9:.2f} GB/s")
            for name, job in jobs(args, plain, pair).items():
                if raw[name] and raw[name][-1]["outcome"] != "ok":
                    continue
                result = run(args, job, lib if job["engine"] == "stock" else None)
                raw[name].append(result)
                rate = f"{result['phases'][1]['tok_s']:.3f} tok/s" if result["outcome"] == "ok" else result["outcome"]
                say(f"round {round_ + 1} of {args.repeats}, {name}: {rate}")
        drop_caches()
        speeds.append(_disk.measure(measured))
    except CgroupError as e:
        print(f"big: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"big: {e.filename or args.dir}: {e.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("big: interrupted", file=sys.stderr)
        return 130
    speed = min(max(max(s.values()) for s in speeds), args.read_limit or float("inf"))
    results = {name: summary(runs, speed) for name, runs in raw.items()}
    print(f"{os.path.basename(plain)}, {os.path.getsize(plain) / 1e9:.2f} GB, in {args.memory / 2**30:.2f} GiB; {args.threads} threads; "
          f"direct reads {speed / 1e9:.2f} GB/s; median of {args.repeats}; tok/s")
    print_table(args, results)
    busy = max((p["others_cpu"] for runs in raw.values() for r in runs if r["outcome"] == "ok" for p in r["phases"]), default=0)
    if busy > 0.1:
        print(f"Other processes took up to {busy:.0%} of the cores during a measurement: repeat this on an idle machine.")
    with open(args.out, "w") as f:
        json.dump({"time": time.strftime("%Y-%m-%d %H:%M"), "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}",
                   "settings": {k: v for k, v in vars(args).items() if k not in ("dir", "out", "stock_lib")},
                   "direct_read_bytes_per_s": speeds, "summary": results, "runs": raw}, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
