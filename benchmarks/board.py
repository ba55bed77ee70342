"""What a board does, in one JSON: what it is, whether results are right, and how fast it is beside llama.cpp.

    python benchmarks/board.py --dir FOLDER [--gib N] [--model FILE.gguf] [--out board.json] [--quick]

FOLDER is on the disk that will hold the models. Three parts:

1. what there is: hobbit doctor --board, the disk's speed from FOLDER;
2. right or wrong: the small model that comes along, all high, against llama.cpp on the same back end (tokens and logits),
   with the slots where they are by default, and in memory that CPU and GPU share;
3. speed: a synthetic model of Mixtral's shape in int8+int2, by default half as large again as the memory (--gib), or a model of yours:
   hobbit at 0.6/0.9 and all high beside llama.cpp's mmap, a process and an emptied page cache each, --repeats rounds in turn.
   Floor: the bytes read while decoding, at the disk's speed.

Needs no root: the models' files are pushed out of the page cache before each run.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [HERE, ROOT]

import _disk  # noqa: E402

MIXTRAL_LAYER = 8 * 3 * 4096 * 14336 * 34 / 32  # bytes, q8_0
PHASES = [["prefill", 128], ["decode", 16]]


def parse_args():
    p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    p.add_argument("--dir", required=True)
    p.add_argument("--gib", type=float, help="size of the synthetic model (default: 1.5 times the memory, as far as the disk allows)")
    p.add_argument("--model", help="an ordinary GGUF with experts to measure instead")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--quick", action="store_true", help="a model of 0.3 GB, one round: does everything run?")
    p.add_argument("--out", default="board.json")
    return p.parse_args()


def python(*command, env=None, **kwargs):
    return subprocess.run([sys.executable, *command], env={**os.environ, "PYTHONPATH": ROOT, **(env or {})}, cwd=ROOT, stdout=subprocess.PIPE, text=True, **kwargs)


def say(text):
    print(text, file=sys.stderr, flush=True)


def identity(gpu):
    """All high against llama.cpp, on the small model."""
    code = """
import json, sys, tempfile, os
import numpy as np
from hobbit_cpp import Llama
from hobbit_cpp.convert import convert
src, gpu = sys.argv[1], int(sys.argv[2])
args = dict(n_ctx=512, n_gpu_layers=gpu, logits_all=True, verbose=False)
def run(llm):
    ids = llm.tokenize(b"Once upon a time there was a") * 4
    llm.eval(ids)
    tokens = []
    for _ in range(24):
        tokens.append(int(np.argmax(llm.scores[llm.n_tokens - 1])))
        llm.eval(tokens[-1:])
    return tokens, np.array(llm.scores[:llm.n_tokens])
out = {}
with tempfile.TemporaryDirectory() as folder:
    dual = os.path.join(folder, "dual.gguf")
    convert(src, dual, "keep", "q2_k")
    with Llama(src, **args) as llm:
        tokens, scores = run(llm)
    for name, more in {"default": {}, "floor": {"cache_bytes": "min"}, **({"shared memory": {"unified_memory": True}} if gpu else {})}.items():
        try:
            with Llama(dual, t1=1.0, **{"cache_bytes": "25%", "miss": "fetch", **more}, **args) as llm:
                t, s = run(llm)
                out[name] = {"tokens_equal": t == tokens, "logits_equal": bool(np.array_equal(s, scores)),
                             "unified": llm.offload_stats()["settings"]["unified_memory"]}
        except Exception as error:
            out[name] = {"error": str(error)}
print(json.dumps(out))
"""
    done = python("-c", code, os.path.join(ROOT, "hobbit_cpp", "data", "books-8x2-small-q8_0.gguf"), "-1" if gpu else "0", stderr=subprocess.PIPE)
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-2000:]}


def files(a, memory):
    """(ordinary GGUF, main file of its pair)."""
    os.makedirs(a.dir, exist_ok=True)
    if a.model:
        plain = a.model
    elif a.quick:
        plain = os.path.join(a.dir, "board-quick.gguf")
        shape = ["--shape", "tiny", "--d", "1024", "--ff", "2048", "--layers", "6", "--vocab", "2048"]
    else:
        room = shutil.disk_usage(a.dir).free / 2.6  # the model, both copies, and some air
        layers = max(2, round(min((a.gib or 1.5 * memory / 2**30) * 2**30, room) / MIXTRAL_LAYER))
        plain = os.path.join(a.dir, f"board-mixtral-{layers}l.gguf")
        shape = ["--shape", "mixtral", "--layers", str(layers)]
    if not os.path.exists(plain):
        say(f"making {plain}")
        if python("-m", "gguf_tools.synth", plain, *shape, "--type", "q8_0", "--shares", "67/30/3", "--repeat", "0.3").returncode:
            sys.exit(f"board: {plain} could not be made")
    pair = os.path.join(a.dir, os.path.basename(plain).removesuffix(".gguf") + "-hobbit.gguf")
    if not os.path.exists(pair):
        say(f"converting to {pair}")
        command = ["-m", "hobbit_cpp.convert", plain, "-o", pair, "--preset", "int8+int2"] if a.model else [os.path.join(HERE, "_pair.py"), plain, pair, "q2_k"]
        if python(*command).returncode:
            sys.exit(f"board: {plain} could not be converted")
    return plain, pair


def forget(folder):
    """The models' files out of the page cache."""
    for name in os.listdir(folder):
        if name.endswith(".gguf"):
            with open(os.path.join(folder, name), "rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(job):
    forget(os.path.dirname(os.path.abspath(job["model"])))
    try:
        stock = {"LLAMA_CPP_LIB_PATH": os.path.join(ROOT, "hobbit_cpp", "lib")} if job["engine"] == "stock" else None
        done = python(os.path.join(HERE, "_worker.py"), json.dumps(job), env=stock, stderr=subprocess.PIPE, timeout=3600)
        result = json.loads(done.stdout) if done.stdout else {"error": f"exit status {done.returncode}: {done.stderr[-1000:]}"}
    except subprocess.TimeoutExpired:
        result = {"error": "more than an hour"}
    return result


def main():
    a = parse_args()
    report = {"time": time.strftime("%Y-%m-%d %H:%M"), "doctor": json.loads(python("-m", "hobbit_cpp", "doctor", "--board", "--json", "--no-disk", check=True).stdout)}
    board = report["doctor"]["board"]
    for remark in board["remarks"]:
        say(f"remark: {remark}")
    gpu = report["doctor"]["machine"]["gpu"]
    say("comparing with llama.cpp")
    report["identity"] = identity(gpu)
    plain, pair = files(a, board["memory"])
    speeds = _disk.measure(pair.removesuffix(".gguf") + ".experts.gguf")
    report["disk_bytes_per_second"] = speed = max(speeds.values())
    common = dict(threads=a.threads, n_ctx=256, n_ubatch=128, first_token=300, phases=PHASES, extra_bufts=False)
    layers = -1 if gpu else 0
    jobs = {"hobbit 0.6/0.9": dict(common, engine="hobbit", model=pair, hobbit=dict(t1=0.6, t2=0.9, n_gpu_layers=layers)),
            "hobbit all high": dict(common, engine="hobbit", model=pair, hobbit=dict(t1=1.0, n_gpu_layers=layers)),
            "llama.cpp mmap, CPU": dict(common, engine="stock", model=plain, load="mmap")}
    report["model"] = {"file": os.path.basename(plain), "bytes": os.path.getsize(plain), "sidecar_bytes": os.path.getsize(pair.removesuffix(".gguf") + ".experts.gguf")}
    report["runs"] = {name: [] for name in jobs}
    for i in range(1 if a.quick else a.repeats):
        for name, job in jobs.items():
            r = measure(job)
            report["runs"][name].append(r)
            say(f"round {i + 1}, {name}: " + (r["error"] if "error" in r else f"{r['phases'][1]['tok_s']:.3f} tok/s"))
            with open(a.out + ".part", "w") as f:
                json.dump(report, f, indent=1)
    report["celsius_after"] = json.loads(python("-m", "hobbit_cpp", "doctor", "--board", "--json", "--no-disk", check=True).stdout)["board"]["celsius"]
    report["summary"] = {}
    for name, runs in report["runs"].items():
        good = [r for r in runs if "error" not in r]
        if good:
            decode = [r["phases"][1] for r in good]
            read = statistics.median(p["bytes"] for p in decode)
            report["summary"][name] = {"prefill_tok_s": statistics.median(r["phases"][0]["tok_s"] for r in good), "decode_tok_s": statistics.median(p["tok_s"] for p in decode),
                                       "bytes_per_token": read / PHASES[1][1], "times_floor": statistics.median(p["seconds"] for p in decode) * speed / read if read else None}
    with open(a.out, "w") as f:
        json.dump(report, f, indent=1)
    os.remove(a.out + ".part")
    print(f"{report['model']['file']}, {report['model']['bytes'] / 1e9:.1f} GB, memory {board['memory'] / 1e9:.1f} GB, disk {speed / 1e9:.2f} GB/s; tok/s")
    print(f"{'':22} {'prompt':>8} {'decode':>8} {'GB/token':>9} {'x floor':>8}")
    for name, s in report["summary"].items():
        print(f"{name:22} {s['prefill_tok_s']:8.2f} {s['decode_tok_s']:8.3f} {s['bytes_per_token'] / 1e9:9.2f} {s['times_floor'] or 0:8.2f}")
    print("against llama.cpp:", ", ".join(f"{k}: {'equal' if v.get('logits_equal') else v.get('error', 'different')}" for k, v in report["identity"].items())
          if "error" not in report["identity"] else report["identity"]["error"])
    print(f"everything is in {a.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
