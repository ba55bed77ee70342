"""LoRA adapters beside offloaded experts: on attention they equal stock's, on experts they are refused."""

import numpy as np
import pytest

import engine
from gguf_tools.writer import StreamWriter
from hobbit_cpp import Llama
from makers import make_model, values

RANK = 4


def make_lora(path, shapes: dict, arch: str = "qwen3moe"):
    """An adapter with random matrices for weights of these shapes."""
    with StreamWriter(path, arch, overwrite=True) as w:
        w.add("general.type", "adapter")
        w.add("adapter.type", "lora")
        w.add("adapter.lora.alpha", 8.0, "f32")
        parts = {}
        for name, (n_in, n_out, *more) in shapes.items():
            parts |= {name + ".lora_a": (n_in, RANK, *more), name + ".lora_b": (RANK, n_out, *more)}
        for name, shape in parts.items():
            w.add_tensor(name, shape, "f32")
        w.begin_data()
        for name, shape in parts.items():
            w.write(name, 0, values(name, shape, scale=0.2))
    return path


@pytest.fixture(scope="module")
def source():
    return make_model(engine.cache_dir() / "lora-base.gguf", "qwen3moe", n_layer=2, n_expert=6, n_used=2, ff=256)


def logits(path, tokens, **arguments):
    with Llama(path, n_ctx=128, n_batch=64, logits_all=True, verbose=False, seed=0, **arguments) as llm:
        llm.eval(tokens)
        return np.array(llm.scores[:len(tokens)])


def test_on_attention_and_router(source, tmp_path):
    lora = make_lora(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (256, 256), "blk.1.attn_output.weight": (256, 256),
                                           "blk.1.ffn_gate_inp.weight": (256, 6)})
    tokens = engine.prompt(30, 262)
    stock = logits(source, tokens, lora_path=lora)
    assert not np.array_equal(stock, logits(source, tokens))
    # f16 experts: llama.cpp does not repack those, which would change the order of sums
    ours = logits(engine.pair(source), tokens, lora_path=lora, t1=1.0, cache_bytes="min")
    assert np.array_equal(ours, stock)


def test_on_experts(source, tmp_path, capfd):
    lora = make_lora(tmp_path / "e.gguf", {"blk.1.ffn_up_exps.weight": (256, 256, 6)})
    logits(source, [1, 5], lora_path=lora)  # llama.cpp can
    with pytest.raises(Exception, match="changes offloaded experts.*merge the adapter"):
        logits(engine.pair(source), [1, 5], lora_path=lora, cache_bytes="min")
