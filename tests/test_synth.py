"""gguf_tools.synth on tiny models."""

import contextlib
import io

import numpy as np
import pytest

from gguf_tools import _synth_report as report
from gguf_tools import ggml, synth
from gguf_tools._synth_model import SHAPES, vocabulary
from gguf_tools._synth_routing import Routing, SynthError, find_sharpness, load_trace, plan_shares, top_weights
from gguf_tools.reader import Reader

needs_ggml = pytest.mark.skipif(not ggml.available(), reason="libggml-base is not built")


def run(*args):
    """(exit status, stdout, stderr) of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = synth.main([str(a) for a in args])
        except SystemExit as e:
            status = e.code
    return status, out.getvalue(), err.getvalue()


def routing(sharpness, *, experts=8, used=2, d=256, **more):
    return Routing(**dict(dict(d=d, layers=4, experts=experts, used=used, vocab=2048, seed=0, sharpness=sharpness, growth=1.09), **more))


# --- files --------------------------------------------------------------------------------------

@needs_ggml
@pytest.mark.parametrize("arch,kind", [("llama", "q8_0"), ("qwen3moe", "f16"), ("llama", "q2_k"), ("llama", "iq2_xxs")])
def test_file_has_the_shape_that_was_asked_for(tmp_path, arch, kind):
    path = tmp_path / "m.gguf"
    status, out, err = run(path, "--arch", arch, "--type", kind, "--layers", 2, "--experts", 4, "--vocab", 300)
    assert (status, err) == (0, "")
    s = SHAPES["tiny"]
    with Reader(path) as r:
        assert r.get("general.architecture") == arch
        assert r.get(f"{arch}.block_count") == 2
        assert r.get(f"{arch}.expert_count") == 4
        assert len(r.get("tokenizer.ggml.tokens")) == 300
        assert r.get("synth.sharpness") > 0
        for il in range(2):
            for name, shape in (("gate", (s.d, s.ff, 4)), ("up", (s.d, s.ff, 4)), ("down", (s.ff, s.d, 4))):
                t = r.tensors[f"blk.{il}.ffn_{name}_exps.weight"]
                assert (t.shape, t.type.name) == (shape, kind)
        assert r.tensors["token_embd.weight"].shape == (s.d, 300)
        assert ("blk.0.attn_q_norm.weight" in r.tensors) == (arch == "qwen3moe")


@needs_ggml
def test_experts_differ_and_have_the_right_variance(tmp_path):
    path = tmp_path / "m.gguf"
    assert run(path, "--type", "f16")[0] == 0
    with Reader(path) as r:
        t = r.tensors["blk.1.ffn_up_exps.weight"]
        x = ggml.dequantize("f16", r.read(t), t.shape[0]).reshape(t.shape[::-1])
    assert abs(x.std() * t.shape[0] ** 0.5 - 1) < 0.02
    for a in range(8):
        for b in range(a):
            assert (x[a] != x[b]).mean() > 0.9


@needs_ggml
def test_seed_decides_the_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(tmp_path / name, "--layers", 1, "--vocab", 400, "--seed", seed)[0] == 0
    a, b, c = ((tmp_path / n).read_bytes() for n in "abc")
    assert a == b
    assert a != c


@needs_ggml
@pytest.mark.parametrize("args,sentence", [
    (["--type", "q9_9"], "unknown type 'q9_9'"),
    (["--type", "i8"], "ggml cannot quantize to i8"),
    (["--d", "192", "--type", "q4_k"], "rows of blk.0.ffn_gate_exps.weight have 192 elements, which is not a multiple of the block of 256 of q4_k"),
    (["--d", "72"], "not a multiple of the block of 32 of q8_0"),
    (["--used", "9"], "--used 9 is more than --experts 8"),
    (["--layers", "0"], "--layers must be at least 1, not 0"),
    (["--heads", "5"], "--heads 5 is not a multiple of --kv-heads 2"),
    (["--vocab", "100"], "--vocab must be at least"),
    (["--arch", "gpt2"], "--arch must be llama or qwen3moe, not gpt2"),
    (["--shares", "67/30"], "--shares wants three numbers"),
    (["--shares", "60/30/3"], "--shares must be three numbers that sum to 100"),
    (["--shares", "30/60/10"], "a share of 30% high is out of reach for 2 of 8 experts"),
    (["--shares", "67/30/3", "--router-sharpness", "1"], "exclude each other"),
    (["--repeat", "1"], "--repeat must be at least 0 and below 1"),
    (["--residual-gain", "-1"], "--residual-gain must be 0 to 4"),
    (["--router-sharpness", "nan"], "--router-sharpness must be positive"),
    (["--seed", "-1"], "--seed must be 0 to"),
    (["--like", "no-such-trace.npy"], "no-such-trace.npy is not a readable .npy or .npz file"),
])
def test_errors_are_one_sentence_and_leave_no_file(tmp_path, args, sentence):
    status, out, err = run(tmp_path / "m.gguf", *args)
    assert status == 2
    assert sentence in err and err.count("\n") == 1 and out == ""
    assert list(tmp_path.iterdir()) == []


@needs_ggml
def test_an_existing_file_is_kept_unless_forced(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"mine")
    status, _, err = run(path)
    assert status == 2 and "exists already" in err
    assert path.read_bytes() == b"mine"
    assert run(path, "--force", "--layers", 1)[0] == 0
    assert path.stat().st_size > 1000


def test_missing_folder_is_exit_status_1(tmp_path):
    if not ggml.available():
        pytest.skip("libggml-base is not built")
    status, _, err = run(tmp_path / "none" / "m.gguf")
    assert status == 1 and "No such file or directory" in err


def test_vocabulary_is_unique_and_reachable():
    pieces, scores, types = vocabulary(4000)
    assert len(pieces) == len(scores) == len(types) == len(set(pieces)) == 4000
    have = set(pieces)
    assert all(len(p) == 1 or {p[:-1], p[-1:]} <= have for p in pieces[259:])


# --- routing ------------------------------------------------------------------------------------

def test_rule_of_the_shares():
    assert plan_shares([[0.55, 0.45]], 0.6, 0.9) == (1.0, 0.0, 0.0)
    assert plan_shares([[0.3, 0.7]], 0.6, 0.9) == (0.5, 0.5, 0.0)
    assert plan_shares([[19.0, 1.0]], 0.6, 0.9) == (0.5, 0.0, 0.5)
    high, low, skip = plan_shares([[0.4, 0.3, 0.25, 0.05]], 0.6, 0.9)  # s = 0, .4, .7, .95
    assert (high, low, skip) == (0.5, 0.25, 0.25)


def test_shares_are_reached_by_the_routers():
    for target, experts, used in ((0.67, 8, 2), (0.58, 8, 2), (0.45, 64, 8)):
        sharpness = find_sharpness(target, experts, used, 0.0, 0)
        figures = report.planned(routing(sharpness, experts=experts, used=used), 1024)
        assert abs(figures["high"].mean() - target) < 0.03


def test_every_number_of_used_experts_has_a_default():
    for used in (1, 2, 3, 8, 16):
        args = synth.parse_args(["m.gguf", "--experts", "16", "--used", str(used)])
        assert synth.routing_of(args, synth.shape_of(args))[0].sharpness > 0


def test_mixtral_shares_come_together():
    z = np.random.default_rng(1).standard_normal((20000, 8)) * find_sharpness(0.67, 8, 2, 0.0, 0)
    high, low, skip = plan_shares(top_weights(z, 2), 0.6, 0.9)
    assert abs(high - 0.67) < 0.01 and abs(low - 0.30) < 0.015 and abs(skip - 0.03) < 0.015


def test_use_is_balanced_unless_skewed():
    even = report.planned(routing(1.5), 1024)
    assert even["entropy"].min() > 0.97
    skewed = report.planned(routing(1.5, skew=1.0), 1024)
    assert skewed["entropy"].mean() < even["entropy"].min()


def test_repetition_and_recall_follow_their_settings():
    plain, slow = (report.planned(routing(1.5, repeat=x), 1024) for x in (0.0, 0.8))
    assert abs(plain["reuse"] - plain["chance"]).max() < 0.05
    assert slow["reuse"].mean() > slow["chance"].mean() + 0.2
    near, far = (report.planned(routing(1.5, growth=1 + g * g), 1024)["recall"].mean() for g in (0.1, 1.0))
    assert near > 0.9 > 0.75 > far


# --- traces -------------------------------------------------------------------------------------

def make_trace(path, n=700, layers=4, experts=8, k=2, seed=3):
    """A trace in which expert 0 is popular and tokens repeat the previous token's experts half the time."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(n * layers, [("seq", "i4"), ("pos", "i4"), ("layer", "i4"), ("expert", "i4", (k,)), ("weight", "f4", (k,))])
    p = np.full(experts, 0.7 / (experts - 1))
    p[0] = 0.3
    for il in range(layers):
        last = None
        for i in range(n):
            if last is None or rng.random() < 0.5:
                last = rng.choice(experts, k, replace=False, p=p)
            w = np.sort(rng.uniform(0.2, 1.0, k))[::-1]
            rows[i * layers + il] = (0, i, il, last, w / w.sum())
    np.save(path, rows)
    return rows


def test_like_replays_the_trace(tmp_path):
    rows = make_trace(tmp_path / "t.npy")
    args = synth.parse_args([str(tmp_path / "m.gguf"), "--like", str(tmp_path / "t.npy"), "--residual-gain", "0.05"])
    shape = synth.shape_of(args)
    r, gain, _ = synth.routing_of(args, shape)
    assert gain == 0.05
    e = np.concatenate(list(r.embeddings()))[:700]
    for il in range(4):
        got = np.sort(np.argsort(-(e @ r.router(il).T), axis=1)[:, :2], axis=1)
        want = np.sort(rows["expert"].reshape(700, 4, 2)[:, il], axis=1)
        assert (got == want).mean() > 0.99
    figures = report.planned(r, 400)
    assert figures["reuse"].mean() > figures["chance"].mean() + 0.15
    assert figures["top"].mean() > 0.2


def test_like_takes_a_trace_whose_sequences_start_over(tmp_path):
    """Recorded layer by layer in batches, with the same positions again and again, as of a text in pieces."""
    rows = make_trace(tmp_path / "t.npy", n=20)
    layers = len(np.unique(rows["layer"]))
    logits = load_trace(tmp_path / "t.npy", 8, 2)
    piece = rows[np.argsort(rows["layer"], kind="stable")]
    np.save(tmp_path / "twice.npy", np.concatenate([piece, piece]))
    twice = load_trace(tmp_path / "twice.npy", 8, 2)
    assert twice.shape == (40, layers, 8)
    assert (np.argsort(twice)[..., -2:] == np.argsort(np.concatenate([logits, logits]))[..., -2:]).all()
    np.save(tmp_path / "short.npy", piece[:-1])
    with pytest.raises(SynthError, match="lacks some layer"):
        load_trace(tmp_path / "short.npy", 8, 2)


def test_like_refuses_a_trace_of_another_shape(tmp_path):
    make_trace(tmp_path / "t.npy", n=20, k=3)
    status, _, err = run(tmp_path / "m.gguf", "--like", tmp_path / "t.npy")
    assert status == 2 and "was recorded with 3 experts per token, the model uses 2" in err
    make_trace(tmp_path / "t.npy", n=20, experts=64)
    status, _, err = run(tmp_path / "m.gguf", "--like", tmp_path / "t.npy")
    assert status == 2 and "the model has 8" in err
    np.save(tmp_path / "t.npy", np.zeros(3))
    status, _, err = run(tmp_path / "m.gguf", "--like", tmp_path / "t.npy")
    assert status == 2 and "holds no routing trace" in err
    status, _, err = run(tmp_path / "m.gguf", "--like", tmp_path / "t.npy", "--skew", "1")
    assert status == 2 and "--like takes sharpness" in err


# --- in llama.cpp -------------------------------------------------------------------------------

@needs_ggml
def test_llama_cpp_routes_as_planned(tmp_path):
    """Own process: the bindings load their library once and for all."""
    import os
    import pathlib
    import re
    import subprocess
    import sys

    pytest.importorskip("gguf")
    if not any(any(f.glob("libllama.*")) for f in ggml.library_folders()):
        pytest.skip("libllama is not built")
    env = {k: v for k, v in os.environ.items() if k != "LLAMA_CPP_LIB_PATH"}
    env["PYTHONPATH"] = str(pathlib.Path(synth.__file__).resolve().parent.parent)
    done = subprocess.run([sys.executable, "-m", "gguf_tools.synth", str(tmp_path / "m.gguf"), "--report", "--repeat", "0.5", "--tokens", "512"],
                          env=env, capture_output=True, text=True, timeout=120)
    if "needs llama-cpp-python" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    measured = done.stdout[done.stdout.index("measured in llama.cpp"):]

    def mean(line):
        return float(re.search(rf"{line}\s+([\d.]+)", measured)[1])

    assert abs(mean("wanted high at T1 0.6, T2 0.9") - 67) < 4
    assert mean("entropy of the experts' use") > 97
    assert mean("reused from the previous token") > mean("the same by chance") + 10
    assert 75 < mean("next layer's choice recalled") < 92
