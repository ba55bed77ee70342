"""What hobbit doctor reports, as plain values. Sizes are bytes."""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import platform
import random
import time

from . import memory
from ._devices import devices
from .settings import Settings

PIECE = 2 * memory.MIB  # what the loader reads at once


def build() -> dict:
    """ImportError where the libraries are not usable, with the reason."""
    from . import _libs, _version, bindings

    import llama_cpp

    info = _libs.build_info()
    features = llama_cpp.llama_print_system_info().decode().replace(" = 1", "")
    return {"version": _version.__version__, "llama_cpp": info.get("llama_cpp_commit"), "llama_cpp_python": llama_cpp.__version__, "python": platform.python_version(),
            "folder": str(_libs.lib_dir()), "build_type": info.get("build_type"), "libraries": info.get("libraries", []),
            "api_version": bindings.hobbit_api_version(), "cpu_features": " ".join(features.replace("|", " ").split()).removeprefix("CPU : ")}


def machine() -> dict:
    now = memory.read_memory()
    found = devices()
    limit = memory.limit(now)
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count()
    return {"cores": cores, "devices": found, "gpu": any(d["gpu"] for d in found),
            "memory": {"total": now.total, "limit": limit, "limited": limit < now.total, "available": memory.available(now), "swap_free": now.swap_free,
                       "reserve": memory.reserve(now)}}


def model(args) -> dict:
    """What Llama would do with the arguments of the command (cli.py), from the files' headers. ValueError as from Llama."""
    from . import _load, bindings
    from ._cli_run import context_of
    from .cli import llama_arguments

    given = llama_arguments(args)
    use_profile = given.pop("profile", True)
    n_gpu, n_threads = given.pop("n_gpu_layers", None), given.pop("n_threads", None)
    given.pop("n_threads_batch", None)
    settings = Settings(**given)
    path = _load.check_path(args.model)
    metadata = _load.read_metadata(path)
    arch = metadata.get("general.architecture")
    n_ctx = context_of(args)
    need = _load.need_of(metadata, path, {"n_ctx": n_ctx}, 0)
    _load.check_context(need, {"n_ctx": n_ctx, "n_gpu_layers": n_gpu})
    report = {"path": path, "architecture": arch, "n_ctx": n_ctx, "threads": n_threads or max((os.cpu_count() or 1) // 2, 1), "threads_batch": n_threads or os.cpu_count() or 1, "residents": need.residents,
              "kv_cache": need.kv_cache, "compute": need.compute, "offloaded": metadata.get("hobbit.role") == "main"}
    if not report["offloaded"]:
        experts = metadata.get(f"{arch}.expert_count")
        short = need.total > memory.available(memory.read_memory())
        report["advice"] = ("it has experts and does not fit: hobbit convert" if experts and short else
                            "it does not fit, and has no routed experts to offload: take a smaller quantization" if short else "it fits as it is")
        return report
    report["profile"] = None
    sidecar = _load.check_sidecar(path, metadata)
    if use_profile:
        settings, report["profile"] = _load.apply_profile(settings, path, metadata)
    params = _load.make_params(settings, path, need, 0, n_gpu)
    _load.set_load_params(params)
    info = bindings.hobbit_info()
    try:
        if bindings.hobbit_probe(path.encode("utf-8"), 0, info) < 0:
            raise ValueError(_load.last_error(path))
    finally:
        bindings.hobbit_set_load_params(None)
    on_device = settings.budget.kind == "auto" and params.budget_kind == bindings.HOBBIT_BUDGET_DEVICE
    budget = None if on_device else _budget(settings, params, info)
    everything = info.floor_bytes + info.high_bytes
    report.update(sidecar=sidecar, layers=info.n_layers, n_expert=info.n_expert,
                  n_used=info.n_expert_used, high_bytes=info.high_bytes, low_bytes=info.low_bytes, floor_bytes=info.floor_bytes, budget=budget,
                  t1=settings.t1, t2=settings.t2, policy=settings.policy, policy_weights=settings.policy_weights, low_fraction=settings.low_fraction)
    if budget is None:
        report["advice"] = "hobbit run --stats says what the GPU had left"
    elif budget < info.floor_bytes:
        report["advice"] = f"the budget is below the floor of {info.floor_bytes} bytes: this is refused"
    elif budget >= everything:
        report["budget"] = min(budget, everything + info.low_bytes)  # more is never taken
        report["advice"] = "all experts fit: after the first use nothing is read, and all are served at high precision"
    else:
        more = "a smaller context leaves more; " if settings.budget.kind == "auto" else ""
        report["advice"] = (f"about {100 * budget / info.high_bytes:.0f} % of the experts fit, {memory.format_bytes(everything)} hold all; {more}"
                            "an ordinary quantization that fits whole reads nothing")
    return report


def _budget(settings, params, info) -> int:
    kind = settings.budget.kind
    if kind == "min":
        return info.floor_bytes
    if kind == "fraction":
        return int(settings.budget.fraction * info.high_bytes)
    return max(params.cache_bytes, info.floor_bytes) if kind == "auto" else params.cache_bytes


def disk(path: str | None, seconds: float = 1.0, most: int = 512 * memory.MIB, threads: int = 4) -> dict:
    """Reads pieces at random places of a file (default: the small model that comes along), past the page cache if that can be."""
    from .demo import MODEL

    path = os.fspath(path or MODEL)
    direct, size = True, os.path.getsize(path)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (AttributeError, OSError):  # no such flag, or a file system that refuses it
        direct = False
    piece = min(PIECE, max(4096, size // 4096 * 4096))
    places = [p * piece for p in range(max(1, size // piece))]
    random.Random(0).shuffle(places)
    places = places[:max(1, most // piece)]
    end = time.perf_counter() + seconds

    def read(mine) -> int:
        handle, done = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0)), 0
        try:
            with mmap.mmap(-1, piece) as buffer:  # aligned to a page, as direct reads want
                for place in mine:
                    done += os.preadv(handle, [buffer], place)
                    if time.perf_counter() > end:
                        break
        finally:
            os.close(handle)
        return done

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, [places[i::threads] for i in range(threads)]))
    return {"path": path, "bytes": done, "piece": piece, "threads": threads, "direct": direct, "bytes_per_second": done / (time.perf_counter() - began)}
