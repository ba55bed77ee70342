"""hobbit convert DIR: tiny random checkpoints, written by transformers, give the logits of transformers."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import engine
import llama_source
from gguf_tools.reader import Reader
from hobbit_cpp import _convert_hf
from hobbit_cpp.convert import ConvertError, convert, main

needs_torch = pytest.mark.skipif(bool(_convert_hf.missing()), reason=f"needs {', '.join(_convert_hf.NEEDED)} (pip install '.[hf]')")
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_experts_per_tok": 2, "max_position_embeddings": 512, "initializer_range": 0.1}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def make_mixtral(folder):
    """A Mixtral with a vocabulary of its own."""
    import sentencepiece
    import transformers

    text = folder / "text"
    text.write_text("the cat sat on the mat and the dog ran to the end of the road\n" * 50, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=300, byte_fallback=True,
                                             model_type="bpe", hard_vocab_limit=False, minloglevel=2)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    config = transformers.MixtralConfig(vocab_size=300, num_local_experts=4, sliding_window=None, **SHAPE)
    return transformers.MixtralForCausalLM(config)


def make_qwen3moe(folder):
    """A Qwen3 with the vocabulary that llama.cpp has among its test files: its converter knows vocabularies by what they do."""
    import transformers

    try:
        root = llama_source.root("models/ggml-vocab-qwen2.gguf")
    except llama_source.NoSource as why:
        pytest.skip(str(why))
    with Reader(str(root / "models" / "ggml-vocab-qwen2.gguf")) as r:
        tokens, merges, kinds = (r.get(f"tokenizer.ggml.{k}") for k in ("tokens", "merges", "token_type"))
    plain = [t for t, kind in zip(tokens, kinds) if kind == 1]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(plain)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>",
                                                              "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}), encoding="utf-8")
    config = transformers.Qwen3MoeConfig(vocab_size=len(plain) + 64, num_experts=8, moe_intermediate_size=256, head_dim=64,
                                         norm_topk_prob=True, **SHAPE)  # as llama.cpp computes
    return transformers.Qwen3MoeForCausalLM(config)


@needs_torch
@pytest.mark.parametrize("make, arch", [(make_mixtral, "llama"), (make_qwen3moe, "qwen3moe")])
def test_logits_of_transformers(make, arch, tmp_path):
    import torch

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    torch.manual_seed(0)
    theirs = make(folder).to(torch.float16)
    theirs.save_pretrained(folder)
    report = convert(folder, tmp_path / "o.gguf", "keep", "q4_0")
    assert report.source == str(folder) and arch in report.description
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "o.experts.gguf", "o.gguf"]
    with Reader(str(tmp_path / "o.gguf")) as r:
        assert r.get("tokenizer.chat_template") == TEMPLATE
    tokens = engine.prompt(20, 290)
    with torch.no_grad():
        expected = theirs.to(torch.float32)(torch.tensor([tokens])).logits[0].numpy()
    with engine.Model(tmp_path / "o.gguf", budget_kind=engine.MIN) as model:
        got, _ = engine.run(model, tokens)
    error = ((got - expected) ** 2).sum() / (expected ** 2).sum()
    assert error < 1e-4  # llama.cpp keeps keys and values in 16 bits


@needs_torch
def test_what_the_converter_refuses(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchForCausalLM"], "hidden_size": 8}), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(ConvertError, match="converter does not take .*NoSuchForCausalLM"):
        convert(tmp_path, tmp_path / "o.gguf")
    assert main([str(tmp_path), "-o", str(tmp_path / "o.gguf")]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_interrupted(tmp_path, repo, number, status):
    """Nothing is left when it is ended while llama.cpp's converter runs, not even that."""
    code = """
        import sys, time
        from pathlib import Path
        from hobbit_cpp import _convert_hf, convert
        slow = Path(sys.argv[1], "slow.py")
        slow.write_text("import os, sys, time; open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); time.sleep(100)")
        _convert_hf._converter = lambda: slow
        sys.exit(convert.main([sys.argv[1], "-o", sys.argv[1] + "/o.gguf"]))
    """
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], stderr=subprocess.DEVNULL, cwd=repo)
    while child.poll() is None and not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(timeout=60) == status
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors", "pid", "slow.py"]


def test_folders_that_are_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(_convert_hf, "missing", lambda: [])
    with pytest.raises(ConvertError, match="without config.json"):
        convert(tmp_path, tmp_path / "o.gguf")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConvertError, match="holds no weights"):
        convert(tmp_path, tmp_path / "o.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConvertError, match="--link .* must be a GGUF"):
        convert(tmp_path, tmp_path / "o.gguf", link=True)
    (tmp_path / "o.gguf").write_bytes(b"")
    with pytest.raises(ConvertError, match="exists already"):
        convert(tmp_path, tmp_path / "o.gguf")


def test_packages_that_are_missing(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    monkeypatch.setattr(_convert_hf, "missing", lambda: list(_convert_hf.NEEDED))
    with pytest.raises(ConvertError, match=r"needs the Python packages torch, transformers, sentencepiece: pip install '\.\[hf\]'"):
        convert(tmp_path, tmp_path / "o.gguf")


def test_the_converter_is_shipped():
    script = _convert_hf._libs.lib_dir() / "convert_hf" / "convert_hf_to_gguf.py"
    assert script.is_file() and (script.parent / "conversion" / "base.py").is_file() and (script.parent / "gguf-py" / "gguf").is_dir()
