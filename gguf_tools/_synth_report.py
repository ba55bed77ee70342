"""What the routers of a model do: shares, use of experts, reuse from token to token, recall of the next layer's choice.

`planned` looks at embeddings and routers alone; `measured` runs the file in llama.cpp and listens to its graph.
"""

import ctypes
import itertools
import os
from pathlib import Path

import numpy as np

from . import ggml
from ._synth_routing import CHUNK, SynthError, plan_shares, top_weights
from .reader import Reader

FIRST_TOKEN = 300  # the text of a report is FIRST_TOKEN, FIRST_TOKEN + 1, ...: past control and byte tokens


def chosen(logits, k):
    """Mask [n, E] of the k largest of each row."""
    mask = np.zeros(logits.shape, bool)
    np.put_along_axis(mask, np.argpartition(-logits, k - 1, axis=1)[:, :k], True, axis=1)
    return mask


def analyse(logits, k, ahead=None, t1=0.6, t2=0.9):
    """Figures of one text, a dict of arrays with one entry per layer, all 0..1.

    logits: per layer [n_tokens, E]. ahead: per layer the NEXT layer's logits from this layer's router input.
    entropy: of the experts' use, 1 = uniform. top: the busiest expert's share of requests. reuse: requests whose
    expert the previous token used too; chance: the same for independent tokens with the same use of experts.
    """
    out = {name: [] for name in ("high", "low", "skip", "entropy", "top", "reuse", "chance", "recall")}
    masks = [chosen(x, k) for x in logits]
    for i, (x, m) in enumerate(zip(logits, masks)):
        for name, share in zip(("high", "low", "skip"), plan_shares(top_weights(x, k), t1, t2)):
            out[name].append(share)
        p = m.mean(axis=0) / k
        out["entropy"].append(float(-(p[p > 0] * np.log(p[p > 0])).sum() / max(np.log(len(p)), 1e-9)))
        out["top"].append(float(p.max()))
        out["reuse"].append(float((m[1:] & m[:-1]).sum() / max(k * (len(m) - 1), 1)))
        out["chance"].append(float((p * p).sum() * k))
        if ahead is not None and i + 1 < len(masks):
            out["recall"].append(float((chosen(ahead[i], k) & masks[i + 1]).sum() / masks[i + 1].sum()))
    return {name: np.array(v) for name, v in out.items()}


def planned(routing, n_tokens):
    """analyse() of the routers on the embeddings, with white noise in the place of what the sublayers add."""
    rows = np.concatenate(list(itertools.islice(routing.embeddings(), -(-(FIRST_TOKEN + n_tokens) // CHUNK))))
    x = rows[FIRST_TOKEN:FIRST_TOKEN + n_tokens] if len(rows) > FIRST_TOKEN else rows
    rng = np.random.default_rng([routing.seed, 14])
    logits, ahead = [], []
    for il in range(routing.layers):
        rms = np.sqrt((x * x).mean(axis=1, keepdims=True))
        logits.append(x / rms @ routing.router(il).T)
        if il + 1 < routing.layers:
            ahead.append(x / rms @ routing.router(il + 1).T)
        x = x + rms * np.float32((routing.growth - 1) ** 0.5) * rng.standard_normal(x.shape, dtype=np.float32)
    return analyse(logits, routing.used, ahead)


def print_report(title, figures):
    print(f"{title}, per cent, mean over layers (least to most):")

    def line(name, values, note=""):
        if len(values):
            v = 100 * values
            print(f"  {name:<34}{v.mean():6.1f}  ({v.min():.1f} to {v.max():.1f}){note}")

    line("wanted high at T1 0.6, T2 0.9", figures["high"])
    line("wanted low", figures["low"])
    line("skipped", figures["skip"])
    line("entropy of the experts' use", figures["entropy"], "  100 = all equally")
    line("share of the busiest expert", figures["top"])
    line("reused from the previous token", figures["reuse"])
    line("  the same by chance", figures["chance"])
    line("next layer's choice recalled", figures["recall"])


# --- llama.cpp ----------------------------------------------------------------------------------

def _llama():
    """The llama_cpp bindings with a library to load."""
    if not os.environ.get("LLAMA_CPP_LIB_PATH"):
        for folder in ggml.library_folders():
            if any(folder.glob("libllama.*")):
                os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    try:
        from llama_cpp import llama_cpp as lib
    except (ImportError, OSError, RuntimeError) as e:
        raise SynthError(f"the report needs llama-cpp-python and its library: {e}") from None
    path = os.environ.get("LLAMA_CPP_LIB_PATH")
    folder = Path(path) if path else Path(lib.__file__).parent / "lib"
    base = next((f for f in sorted(folder.glob("libggml-base.*"))), None)
    if base is None:
        raise SynthError(f"libggml-base is not in {folder}")
    g = ctypes.CDLL(str(base))
    # const char * ggml_get_name(const struct ggml_tensor * tensor);
    g.ggml_get_name.restype, g.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    # size_t ggml_nbytes(const struct ggml_tensor * tensor);
    g.ggml_nbytes.restype, g.ggml_nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    # void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
    g.ggml_backend_tensor_get.restype = None
    g.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return lib, g


def measured(path, n_tokens, threads=None):
    """analyse() of a file run in llama.cpp on n_tokens consecutive token ids, with recall."""
    with Reader(path) as r:
        arch = r.get("general.architecture")
        k, layers, d = (r.get(f"{arch}.{key}") for key in ("expert_used_count", "block_count", "embedding_length"))
        if not k:
            raise SynthError(f"{path} has no experts")
        vocab = r.tensors["token_embd.weight"].shape[1]
        routers = {}
        for il in range(layers):
            t = r.tensors.get(f"blk.{il}.ffn_gate_inp.weight")
            if t is not None:
                routers[il] = ggml.dequantize(t.type, r.read(t), t.shape[0])
    lib, g = _llama()
    got = {}

    def listen(tensor, ask, _):
        name = (g.ggml_get_name(tensor) or b"").decode()
        kind, _, il = name.rpartition("-")
        if kind not in ("ffn_norm", "ffn_moe_logits") or not il.isdigit():  # "3 (reshaped)" is a view
            return not ask
        if not ask:
            data = np.empty(g.ggml_nbytes(tensor) // 4, np.float32)
            g.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
            got[kind, int(il)] = data
        return True

    quiet = lib.llama_log_callback(lambda level, text, user: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    mp = lib.llama_model_default_params()
    mp.n_gpu_layers, mp.use_extra_bufts = 0, False
    model = lib.llama_model_load_from_file(os.fsencode(path), mp)
    if not model:
        raise SynthError(f"llama.cpp cannot load {path}")
    cp = lib.llama_context_default_params()
    cp.n_ctx = cp.n_batch = cp.n_ubatch = n_tokens
    cp.n_threads = cp.n_threads_batch = threads or os.cpu_count() or 1
    callback = lib.ggml_backend_sched_eval_callback(listen)
    cp.cb_eval = callback
    ctx = lib.llama_init_from_model(model, cp)
    if not ctx:
        lib.llama_model_free(model)
        raise SynthError(f"llama.cpp cannot make a context of {n_tokens} tokens for {path}")
    batch = lib.llama_batch_init(n_tokens, 0, 1)
    batch.n_tokens = n_tokens
    for i in range(n_tokens):
        batch.token[i], batch.pos[i] = FIRST_TOKEN + i % (vocab - FIRST_TOKEN), i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1  # all: the last layer computes only these
    rc = lib.llama_decode(ctx, batch)
    lib.llama_batch_free(batch)
    lib.llama_free(ctx)
    lib.llama_model_free(model)
    lib.llama_log_set(lib.llama_log_callback(0), None)
    if rc:
        raise SynthError(f"llama_decode() gave {rc}")

    blocks = sorted(il for kind, il in got if kind == "ffn_moe_logits")
    if not blocks:
        raise SynthError(f"{path} has no router that llama.cpp calls ffn_moe_logits")
    logits = [got["ffn_moe_logits", il].reshape(-1, len(routers[il])) for il in blocks]
    ahead = [got["ffn_norm", a].reshape(-1, d) @ routers[b].T for a, b in zip(blocks, blocks[1:]) if ("ffn_norm", a) in got]
    return analyse(logits, k, ahead if len(ahead) == len(blocks) - 1 else None)

