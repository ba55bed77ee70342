"""hobbit bench: speed of a model, and of an ordinary file beside it, each run in its own process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from .memory import format_bytes

COLUMNS = ("load s", "prompt tok/s", "decode tok/s", "hits %", "read/token", "peak memory")


def bench(args) -> int:
    from .cli import llama_arguments

    for name in ("prompt_tokens", "tokens", "repeat"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    arguments = llama_arguments(args)
    n_ctx = args.ctx or args.prompt_tokens + args.tokens + 8
    if n_ctx < args.prompt_tokens + args.tokens:
        raise ValueError(f"prompt and reply take {args.prompt_tokens + args.tokens} tokens, more than --ctx {n_ctx}")
    common = {"n_ctx": n_ctx, "verbose": args.verbose}
    jobs = [(args.model, {**common, **arguments})]
    if args.against:
        jobs.append((args.against, {**common, **{k: v for k, v in arguments.items() if k.startswith(("n_threads", "n_gpu_layers"))}}))
    results = [[] for _ in jobs]
    for _ in range(args.repeat):  # in turn, so that a change on the machine meets both
        for (path, kwargs), found in zip(jobs, results):
            found.append(_measure(path, kwargs, args.prompt_tokens, args.tokens))
    medians = [{k: statistics.median(f[k] for f in found) for k in found[0] if found[0][k] is not None} for found in results]
    if args.json:
        print(json.dumps([{"path": path, "arguments": kwargs, "median": m, "runs": found} for (path, kwargs), m, found in zip(jobs, medians, results)], indent=1))
        return 0
    width = max(len(path) for path, _ in jobs)
    print(f"{'median of ' + str(args.repeat):<{width}}" + "".join(f"{c:>14}" for c in COLUMNS))
    for (path, _), m in zip(jobs, medians):
        cells = [f"{m['load']:.2f}", f"{m['prompt']:.1f}", f"{m['decode']:.1f}",
                 f"{100 * m['hit_rate']:.1f}" if "hit_rate" in m else "-",
                 format_bytes(m["bytes"]) if "bytes" in m else "-", format_bytes(m["peak"])]
        print(f"{path:<{width}}" + "".join(f"{c:>14}" for c in cells), flush=True)
    return 0


def _measure(path, kwargs, n_prompt, n_tokens) -> dict:
    here = str(Path(__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    job = json.dumps({"path": path, "kwargs": kwargs, "n_prompt": n_prompt, "n_tokens": n_tokens})
    done = subprocess.run([sys.executable, "-m", "hobbit_cpp._cli_bench", job], env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{path}: the run ended with status {done.returncode}" if not done.stdout else done.stdout.strip())
    return json.loads(done.stdout)


def _work(job: dict) -> dict:
    """One run, in this process. Seconds, tokens per second, bytes."""
    from . import memory
    from .llama import Llama

    start = time.perf_counter()
    with Llama(job["path"], **job["kwargs"]) as llm:
        load = time.perf_counter() - start
        text = (Path(__file__).parent / "data" / "sample.txt").read_bytes()
        tokens = llm.tokenize(text)
        tokens = (tokens * (job["n_prompt"] // len(tokens) + 1))[:job["n_prompt"]]
        for i, _ in enumerate(llm.generate(tokens, temp=0.0)):
            if i == job["n_tokens"]:
                break
        prompt, decode = llm.last_stats["prompt"], llm.last_stats["decode"]
    return {"load": load, "prompt": prompt["evaluated"] / prompt["seconds"], "decode": decode["evaluated"] / decode["seconds"],
            "hit_rate": decode.get("hit_rate"), "bytes": decode.get("bytes_per_token"), "peak": memory.peak_rss()}


if __name__ == "__main__":
    try:
        print(json.dumps(_work(json.loads(sys.argv[1]))))
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(error)
        sys.exit(1)
