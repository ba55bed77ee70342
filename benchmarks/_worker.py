"""One timed run, in its own process: python _worker.py JSON. Prints one JSON line on the real stdout.

The JSON says: engine (stock, hobbit), model, threads, n_ctx, n_ubatch, first_token (of the fixed token stream),
phases ([["prefill", n], ["decode", n], ["clear", 0], ...]), and optionally n_gpu_layers of stock, procs (files of cgroups, joined
before anything is loaded), extra_bufts (repacked weights and AMX: other kernels). Stock: load (mmap, none, direct_io).
Hobbit: hobbit (arguments of Llama).

Tokens are fed to llama_decode() directly, the same ones in every run: nothing is sampled.
Bytes are what this process made the block device read (/proc/self/io), times are seconds. others_cpu is the share of
all cores that other processes (and other guests of the host) took meanwhile, 0..1: above 0.1, times say little.
"""

import json
import os
import sys
import time


def read_bytes():
    with open("/proc/self/io") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("read_bytes"))


def peak_rss():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def cpu_seconds():
    """CPU time of (this process, the whole machine), seconds, without idle and waiting."""
    with open("/proc/stat") as f:
        user, nice, system, _, _, irq, softirq, steal = (int(x) for x in f.readline().split()[1:9])
    t = os.times()
    return t.user + t.system, (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def load_stock(job):
    import llama_cpp
    from llama_cpp import llama_cpp as lib

    lib.llama_backend_init()
    mp = lib.llama_model_default_params()
    mp.n_gpu_layers = job.get("n_gpu_layers", 0)
    mp.load_mode = {"mmap": lib.LLAMA_LOAD_MODE_MMAP, "none": lib.LLAMA_LOAD_MODE_NONE, "direct_io": lib.LLAMA_LOAD_MODE_DIRECT_IO}[job["load"]]
    mp.use_extra_bufts = job["extra_bufts"]
    model = lib.llama_model_load_from_file(job["model"].encode(), mp)
    if not model:
        raise RuntimeError("the model does not load")
    cp = lib.llama_context_default_params()
    cp.n_ctx = job["n_ctx"]
    cp.n_batch = cp.n_ubatch = job["n_ubatch"]
    cp.n_threads = cp.n_threads_batch = job["threads"]
    cp.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # as llama_cpp.Llama sets it
    ctx = lib.llama_init_from_model(model, cp)
    if not ctx:
        raise RuntimeError("no context can be made")
    return llama_cpp, ctx, None


def load_hobbit(job):
    from hobbit_cpp import Llama
    import hobbit_cpp.bindings  # noqa: F401  before llama_cpp
    import llama_cpp
    from llama_cpp import llama_cpp as lib

    defaults = lib.llama_model_default_params

    def plain_kernels():  # Llama has no argument for this
        mp = defaults()
        mp.use_extra_bufts = job["extra_bufts"]
        return mp

    lib.llama_model_default_params = plain_kernels
    llm = Llama(model_path=job["model"], n_ctx=job["n_ctx"], n_batch=job["n_ubatch"], n_ubatch=job["n_ubatch"],
                n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False, **job["hobbit"])
    return llama_cpp, llm.ctx, llm


def counters(llm):
    """Counters of offloading since the load; {} for stock."""
    return {k: v for k, v in llm.offload_stats()["totals"].items() if isinstance(v, int)} if llm else {}


def run(job):
    io0, start = read_bytes(), time.monotonic()
    llama_cpp, ctx, llm = (load_hobbit if job["engine"] == "hobbit" else load_stock)(job)
    out = {"load_s": time.monotonic() - start, "load_bytes": read_bytes() - io0, "phases": []}

    import ctypes

    from llama_cpp import llama_cpp as lib

    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(lib.llama_get_model(ctx)))
    first, token = job["first_token"], job["first_token"]

    def decode(n):
        nonlocal token
        ids = (ctypes.c_int * n)(*(first + (token + i - first) % (vocab - first) for i in range(n)))
        token += n
        rc = lib.llama_decode(ctx, lib.llama_batch_get_one(ids, n))
        if rc:
            raise RuntimeError(f"llama_decode() gave {rc} for {n} tokens")
        lib.llama_synchronize(ctx)

    for kind, n in job["phases"]:
        if kind == "clear":
            lib.llama_memory_clear(lib.llama_get_memory(ctx), True)
            continue
        stats0, io0 = counters(llm), read_bytes()
        cpu0, times = cpu_seconds(), []
        for size in ([1] * n if kind == "decode" else [min(job["n_ubatch"], n - i) for i in range(0, n, job["n_ubatch"])]):
            start = time.monotonic()
            decode(size)
            times.append(time.monotonic() - start)
        own, machine = (b - a for a, b in zip(cpu0, cpu_seconds()))
        phase = {"kind": kind, "tokens": n, "seconds": sum(times), "tok_s": n / sum(times), "bytes": read_bytes() - io0, "cpu_s": own,
                 "others_cpu": max(0.0, machine - own) / sum(times) / os.cpu_count(), "step_s": [round(t, 4) for t in times]}
        if llm:
            phase["stats"] = {k: v - stats0[k] for k, v in counters(llm).items()}
        out["phases"].append(phase)
    if llm:
        out["stats"] = llm.offload_stats()
    return out


def main():
    job = json.loads(sys.argv[1])
    real = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    for procs in job.get("procs", []):
        with open(procs, "w") as f:
            f.write(str(os.getpid()))
    try:
        out = run(job)
    except Exception as e:
        out = {"error": f"{type(e).__name__}: {e}"}
    out["peak_rss"] = peak_rss()
    os.write(real, (json.dumps(out, default=str) + "\n").encode())
    os._exit(0 if "error" not in out else 1)  # no teardown: its time is nobody's concern


if __name__ == "__main__":
    main()
