"""What Llama checks and computes before a file is loaded. Errors are ValueError or TypeError, one sentence."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import warnings

from . import bindings as b  # before llama_cpp: it makes llama_cpp use our libraries

import llama_cpp
from gguf_tools import ggml
from gguf_tools.errors import GGUFError, printable
from gguf_tools.reader import Reader, sidecar_path

from . import memory, model_memory
from ._devices import devices
from .profiles import read_profile
from .settings import DEFAULTS, Settings, check_int
from .verify import check_pair

# {name: default} of llama_cpp.Llama's arguments
BASE_ARGUMENTS = {
    name: p.default
    for name, p in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if p.kind == p.KEYWORD_ONLY
}


# Left free on each GPU besides KV cache and compute buffers: what its libraries take once they run.
MAX_THREADS = 512  # GGML_MAX_N_THREADS
DEVICE_MARGIN = 768 * memory.MIB


def check_keywords(given) -> None:
    """llama_cpp.Llama takes every keyword and drops those that it does not know."""
    for name in given:
        if name not in BASE_ARGUMENTS:
            if name == "thresholds":
                raise TypeError("Llama() has no argument 'thresholds': give t1 and t2")
            near = difflib.get_close_matches(name, [*DEFAULTS, *BASE_ARGUMENTS], 1)
            raise TypeError(f"Llama() has no argument {name!r}" + (f"; is {near[0]!r} meant?" if near else ""))


def check_path(path, name: str = "model_path") -> str:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{name} must be a str or a path, not {path!r} ({type(path).__name__})")
    path = os.fsdecode(path)
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} {path!r} is not valid UTF-8, which llama.cpp needs: rename the file or the folder") from None
    if "\0" in path:
        raise ValueError(f"{name} {path!r} contains a null character")
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder: name the GGUF file in it")
    if not os.path.exists(path):
        raise ValueError(f"{path} does not exist")
    if not os.path.isfile(path):  # llama.cpp would wait for what comes out of a pipe
        raise ValueError(f"{path} is not a regular file")
    return path


def check_chat_format(name, metadata) -> None:
    """llama_cpp finds out at the first chat. metadata: a Reader, or None."""
    if name is None:
        return
    known = [*llama_cpp.llama_chat_format.LlamaChatCompletionHandlerRegistry()._chat_handlers]
    template = f"tokenizer.{name}".removesuffix(".default")  # the model's own are called chat_template.NAME
    if name not in known and (metadata is None or metadata.get(template) is None):
        near = difflib.get_close_matches(str(name), known, 1)
        raise ValueError(f"chat_format {name!r} is not known" + (f"; is {near[0]!r} meant?" if near else f"; there are {', '.join(sorted(known))}"))


def read_metadata(path: str) -> Reader:
    """A Reader whose file is closed again. Everything about a file's structure is checked here: llama.cpp's own reader trusts
    more of it. Raises GGUFError, which is a ValueError."""
    try:
        with Reader(path) as reader:
            return reader
    except OSError as error:
        raise GGUFError(f"cannot read {path}: {error.strerror or error}") from None


def check_sidecar(path: str, metadata: Reader) -> str:
    """Path of the sidecar, whose structure is sound; what it holds is checked by csrc/llama/hobbit-sidecar.cpp."""
    sidecar = sidecar_path(metadata)
    check_pair(metadata, read_metadata(sidecar))
    return sidecar


def check_types(metadata: Reader, path: str, n_gpu_layers) -> None:
    """ggml ends the process where it has no product or sum for a type."""
    for t in metadata.tensors.values():
        one = len(t.shape) == 1 or not t.name.endswith(".weight")  # added or multiplied, element by element
        names = ("f32", "f16", "bf16") if n_gpu_layers else ("f32",)
        if t.name.endswith("tid2eid.weight"):  # a table of numbers of experts
            good = t.type.name == "i32"
        else:
            good = t.type.name in names or (not one and ggml.can_dequantize(t.type))
        if not good:
            raise ValueError(f"{path} is damaged, or of an unknown kind: {t.name} {list(t.shape)} is {t.type.name}, with which it cannot be computed")


def check_vocabulary(metadata, path: str) -> None:
    """llama.cpp aborts the process for a token that is there twice; to it a text ends at a null character."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], str):
        sure = [t.partition("\0")[0] for t in tokens if "\ufffd" not in t]  # that one stands for bytes that are no UTF-8
        seen = set()
        twice = next((t for t in filter(None, sure) if t in seen or seen.add(t)), None)
        if twice is not None:
            raise ValueError(f"{path} is damaged: the token {twice!r} is in its vocabulary twice")


def check_floats(metadata, path: str) -> None:
    """ggml ends the process where it normalises with an epsilon that is no number, or negative."""
    arch = metadata.get("general.architecture")
    for key, field in metadata.fields.items():
        if key.startswith(f"{arch}.") and (field.item_kind or field.kind).name in ("FLOAT32", "FLOAT64"):
            value = field.value()
            for x in value if isinstance(value, list) else [value]:
                if math.isnan(x) or (key.endswith("epsilon") and not 0 <= x < math.inf):
                    raise ValueError(f"{path} is damaged: {key} is {x:g}")


def check_used_experts(overrides, metadata) -> int:
    """expert_used_count from kv_overrides, 0 if not there. llama.cpp aborts the process for values out of range."""
    arch = metadata.get("general.architecture")
    n_expert = metadata.get(f"{arch}.expert_count")
    n_used = 0
    if overrides is not None and not (isinstance(overrides, dict) and all(isinstance(key, str) for key in overrides)):
        raise TypeError(f"kv_overrides must be a dictionary from names to values, not {overrides!r}")
    if not isinstance(n_expert, int) or n_expert < 1:
        return 0
    for key, value in (overrides or {}).items():
        if key.endswith(".expert_used_count"):
            if key != f"{arch}.expert_used_count":
                raise ValueError(f"kv_overrides: {key} has no effect on this model; its key is {arch}.expert_used_count")
            n_used = check_int(f"kv_overrides[{key!r}]", value, 1, n_expert)
    return n_used


def need_of(metadata, path: str, arguments: dict, n_used: int) -> model_memory.Need:
    """What the model and its context will take; arguments as for Llama()."""
    def use(name):
        value = arguments.get(name)
        return BASE_ARGUMENTS[name] if value is None else value

    n_ctx = check_int("n_ctx", use("n_ctx"), 0, 2**31 - 1)
    for name in ("n_batch", "n_ubatch"):
        check_int(name, use(name), 1, 2**31 - 1)
    for name in ("n_threads", "n_threads_batch"):  # ggml has arrays of so many; -1 is llama.cpp's own default
        if arguments.get(name) is not None:
            check_int(name, arguments[name], -1, MAX_THREADS)
    for name in ("type_k", "type_v"):
        if arguments.get(name) is not None and arguments[name] not in ggml.types():
            raise ValueError(f"{name} is {arguments[name]!r}, which is none of ggml's types")
    try:
        return model_memory.estimate(
            metadata, resident_bytes=os.path.getsize(path), n_ctx=n_ctx, n_batch=use("n_batch"), n_ubatch=use("n_ubatch"), n_used=n_used,
            type_k=arguments.get("type_k"), type_v=arguments.get("type_v"), flash_attn=bool(use("flash_attn")),
            logits_all=bool(use("logits_all") or arguments.get("draft_model") is not None))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def check_context(need: model_memory.Need, arguments: dict) -> None:
    """A KV cache that cannot fit is refused here; llama.cpp would be killed for it."""
    if not need.plain or arguments.get("n_gpu_layers"):
        return
    try:
        now = memory.read_memory()
    except OSError:
        return
    room = memory.available(now) + now.swap_free
    if need.kv_cache > room:
        raise ValueError(f"n_ctx is {arguments.get('n_ctx', BASE_ARGUMENTS['n_ctx'])}: its KV cache takes {memory.format_bytes(need.kv_cache)}, but "
                         f"{memory.format_bytes(room)} are available; give a smaller n_ctx")


def apply_profile(settings: Settings, path: str, metadata) -> tuple[Settings, str | None]:
    """(settings, with those of the profile beside the model where none were given; the profile's path, None if there is none)."""
    profile = read_profile(path, metadata.get("hobbit.pair_id"))
    if profile is None:
        return settings, None
    return Settings(**profile.merged(settings.given)), profile.path


def make_params(settings: Settings, path: str, need: model_memory.Need, n_used: int, n_gpu_layers=None) -> b.hobbit_params:
    """The settings for the library, with "auto" worked out."""
    params = b.hobbit_params()
    b.hobbit_default_params(params)
    settings.fill(params)
    on_device = n_gpu_layers and llama_cpp.llama_supports_gpu_offload() and not shares_memory(settings)
    if settings.budget.kind == "auto" and on_device:
        settings.fill(params, need.kv_cache + need.compute + DEVICE_MARGIN, on_device=True)
    elif not on_device:
        set_load_params(params)  # the floor depends on n_io_threads
        info = b.hobbit_info()
        try:
            if b.hobbit_probe(path.encode("utf-8"), n_used, info) < 0:
                raise ValueError(last_error(path))
        finally:
            b.hobbit_set_load_params(None)
        if settings.budget.kind == "auto":
            settings.fill(params, auto_bytes(need, info.floor_bytes, info.high_bytes))
        else:
            check_budget(settings, need, info)
        check_address_space(path, settings, params, need, info)
    return params


def shares_memory(settings: Settings) -> bool:
    """Do the GPUs have the CPU's memory, or are they to be taken for such?"""
    gpus = [d for d in devices() if d["gpu"]]
    return settings.unified_memory is True or (settings.unified_memory == "auto" and bool(gpus) and all(d["integrated"] for d in gpus))


def asked_bytes(settings: Settings, info: b.hobbit_info) -> int:
    """Of a budget that is not "auto"; more than everything is never taken."""
    asked = {"bytes": settings.budget.bytes, "fraction": int(settings.budget.fraction * info.high_bytes), "min": info.floor_bytes}[settings.budget.kind]
    return min(asked, info.floor_bytes + info.high_bytes + info.low_bytes)


def copies_bytes(settings: Settings, info: b.hobbit_info) -> int:
    """Of host copies that were asked for."""
    return info.high_bytes + info.low_bytes if settings.host_copies is True or settings.miss == "cpu" else settings.host_bytes


def check_budget(settings: Settings, need: model_memory.Need, info: b.hobbit_info) -> None:
    """A budget beyond all memory, or a control group's limit, is refused: the process would be killed when it is used. One beyond what
    is available now is warned of."""
    try:
        now = memory.read_memory()
    except OSError:
        return
    budget = asked_bytes(settings, info)
    copies = copies_bytes(settings, info)
    rest = need.residents + (need.kv_cache if need.plain else 0) + copies
    whole = memory.limit(now)
    what = (f"cache_bytes={settings.cache_bytes!r} comes to {memory.format_bytes(budget)}, the rest of the model takes "
            f"{memory.format_bytes(rest - copies)} at least, {f'host copies take {memory.format_bytes(copies)}, ' if copies else ''}and ")
    if budget + rest > whole:
        group = next((g.path for g in now.groups if g.limit == whole), None)
        where = f"the limit of the control group {group} is" if group else "this machine has"
        raise ValueError(f"{what}{where} {memory.format_bytes(whole)}: give less, or 'auto'")
    if budget + rest > memory.available(now):
        warnings.warn(f"{what}only {memory.format_bytes(memory.available(now))} are available now", RuntimeWarning, stacklevel=4)


def check_address_space(path: str, settings: Settings, params: b.hobbit_params, need: model_memory.Need, info: b.hobbit_info) -> None:
    """llama.cpp aborts the process where it is refused an allocation: a limit (ulimit -v) is kept clear of."""
    left = memory.address_space_left()
    if left is None:
        return
    budget = params.cache_bytes if settings.budget.kind == "auto" else asked_bytes(settings, info)
    take = need.total + budget + copies_bytes(settings, info) + (settings.n_io_threads + (os.cpu_count() or 1)) * memory.THREAD_BYTES
    if take > left:
        raise ValueError(f"{path}: the limit on this process's address space leaves {memory.format_bytes(left)}, but the model and its threads can take "
                         f"{memory.format_bytes(take)}: raise the limit (ulimit -v), or give less cache_bytes, n_ctx or n_io_threads")


def auto_bytes(need: model_memory.Need, floor: int, high: int) -> int:
    try:
        now = memory.read_memory()
    except OSError as error:
        raise ValueError(f"cache_bytes='auto' cannot tell how much memory there is ({error}): give a size") from None
    budget = memory.auto_budget(now, need.total, floor + high)
    if budget < floor:
        warnings.warn(f"cache_bytes='auto': {memory.format_bytes(budget)} are free for experts, but one step can need "
                      f"{memory.format_bytes(floor)}, which is taken; a smaller n_ctx leaves more", RuntimeWarning, stacklevel=4)
    return budget


def set_load_params(params) -> None:
    if b.hobbit_set_load_params(params) < 0:
        raise ValueError(b.hobbit_last_error().decode("utf-8", "replace"))


def last_error(path: str) -> str:
    """The library's reason for a failed load, with the file's name; "" if it has none."""
    reason = printable(" ".join(b.hobbit_last_error().decode("utf-8", "replace").split()))
    return reason if not reason or os.path.basename(path) in reason else f"{path}: {reason}"
