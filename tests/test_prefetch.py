"""Predicted experts (prefetch=...): the predictions are the routers' own, nothing depends on whether they were right, and what is counted
is what was done."""

import numpy as np
import pytest

import engine
from hobbit_cpp import Llama
from makers import make_model
from tiny_archs import fill, make_deepseek2, make_gpt_oss, make_llama4

RULE, LOW, HIGH = range(3)  # enum hobbit_prefetch_copy
AUTO = -1

ROUTERS = {
    "softmax": lambda path: make_model(path, "qwen3moe", n_layer=4, n_expert=12, n_used=3, ff=256),
    "softmax of the chosen, with a bias": make_gpt_oss,
    "sigmoid, biased for selection, groups": lambda path: make_deepseek2(path, v3=True),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_predictions_are_what_the_router_will_choose(name, tmp_path):
    """In a model whose layers add nothing to the stream, every layer's router sees what the one before saw: all predictions are right."""
    source = ROUTERS[name](tmp_path / "still.gguf")
    fill(source, 0.0, lambda n: n.endswith(("attn_output.weight", "attn_output.bias", "ffn_down_exps.weight", "ffn_down_exps.bias", "ffn_down_shexp.weight", "ffn_down.weight")))
    fill(source, 1.0, lambda n: n.endswith(("ffn_norm.weight", "post_attention_norm.weight")))
    with engine.Model(engine.pair(source), direct_io=0, prefetch=3, prefetch_copy=HIGH, **engine.fraction(engine.pair(source), 1.5)) as model:
        prompt = engine.prompt(40, model.n_vocab)
        engine.run(model, prompt, n_ubatch=1)
        s, n_layers = model.stats(), model.info().n_layers
        used = model.info().n_expert_used
        for ahead, predicted, correct in ((1, s.predicted_1, s.correct_1), (2, s.predicted_2, s.correct_2), (3, s.predicted_3, s.correct_3)):
            assert correct == predicted == 40 * used * max(0, n_layers - ahead)
        assert s.useful == s.predicted_loads > 0 and s.bytes_wasted == 0
        assert s.bytes_predicted == s.predicted_loads * model.group().high_expert_bytes


def test_no_prediction_where_the_input_is_weighted(tmp_path):
    source = make_llama4(tmp_path / "llama4.gguf")
    with engine.Model(engine.pair(source), prefetch=3, prefetch_copy=HIGH, budget_kind=engine.MIN) as model:
        engine.run(model, engine.prompt(10, model.n_vocab), n_ubatch=1)
        assert model.stats().predicted_1 == 0


def check_identity(source, **params):
    with engine.Model(source) as stock:
        prompt = engine.prompt(50, stock.n_vocab)
        expected = engine.run(stock, prompt, n_ubatch=40, generate=40)
    dual = engine.pair(source)
    for budget in (0.0, 0.6, 1.0):
        with engine.Model(dual, direct_io=0, **engine.fraction(dual, budget), **params) as model:
            got = engine.run(model, prompt, n_ubatch=40, generate=40)
            assert got[1] == expected[1] and np.array_equal(got[0], expected[0]), budget
            s = model.stats()
            assert s.predicted_1 > 0
            assert s.predicted_loads > 0 or budget != 0.6 or params["prefetch"] == AUTO
            assert s.late <= s.useful <= s.predicted_loads and s.bytes_wasted <= s.bytes_predicted <= s.bytes_prefetch


@pytest.mark.parametrize("prefetch, ranks", [(1, 1), (3, 0), (AUTO, 0)])
def test_all_high_stays_stock_bit_for_bit(tmp_path, prefetch, ranks):
    source = make_model(tmp_path / "m.gguf", "qwen3moe", n_layer=4, n_expert=12, n_used=3, ff=256)
    check_identity(source, prefetch=prefetch, prefetch_copy=HIGH, prefetch_ranks=ranks)


def test_all_high_stays_stock_with_gate_and_up_in_one(tmp_path):
    check_identity(make_deepseek2(tmp_path / "m.gguf", fused=True, v3=True), prefetch=2, prefetch_copy=RULE, prefetch_ranks=0)


def test_parallel_sequences_stay_stock(tmp_path):
    source = make_model(tmp_path / "m.gguf", "llama", n_layer=3, n_expert=8, n_used=2, ff=256)

    def decode(model):
        with engine.Context(model, n_seq_max=3) as c:
            return [c.decode([3 + t % 50, 7 + t % 50, 90 - t % 50], [t, t, t], [0, 1, 2]) for t in range(40)]

    with engine.Model(source) as stock, engine.Model(engine.pair(source), prefetch=2, prefetch_copy=HIGH, direct_io=0,
                                                     **engine.fraction(engine.pair(source), 0.6)) as model:
        assert np.array_equal(decode(model), decode(stock))
        assert model.stats().predicted_loads > 0


@pytest.fixture(scope="module")
def dual():
    return engine.pair(engine.DEFAULT_MODEL, "q2_k")


def decode(dual, n=150, **kwargs):
    """offload_stats() after n tokens of the sample text, one by one."""
    with Llama(dual, n_ctx=n + 8, n_threads=1, verbose=False, direct_io=False, cache_bytes="35%", **kwargs) as llm:
        for token in llm.tokenize(engine.SAMPLE_TEXT.read_bytes())[:n]:
            llm.eval([token])
        return llm.offload_stats()


def test_a_trained_model_is_predicted_well(dual):
    totals = {depth: decode(dual, prefetch=depth, prefetch_ranks=1)["totals"] for depth in (1, 3)}
    for t in totals.values():
        assert t["correct_1"] > 0.7 * t["predicted_1"] > 0
        assert 0.7 * t["predicted_loads"] < t["useful"] <= t["prefetch_hits"]  # the heaviest is the surest
    t = totals[3]
    assert t["correct_1"] / t["predicted_1"] > t["correct_2"] / t["predicted_2"] > t["correct_3"] / t["predicted_3"]
    assert totals[1]["predicted_2"] == 0


@pytest.mark.parametrize("copy", ["low", "high", "rule"])
def test_copies(dual, copy):
    s = decode(dual, t1=0.5, prefetch=1, prefetch_copy=copy, prefetch_ranks=0)
    high, low = s["groups"][0]["high_expert_bytes"], s["groups"][0]["low_expert_bytes"]
    t = s["totals"]
    assert t["predicted_loads"] > 0
    if copy == "high":  # what was given up is not read
        assert t["bytes_predicted"] > low * t["predicted_loads"]
    if copy == "low":
        assert t["bytes_predicted"] <= low * t["predicted_loads"]
    assert t["bytes_predicted"] <= high * t["predicted_loads"]
    assert s["settings"]["prefetch"] == 1 and s["settings"]["prefetch_copy"] == copy


def test_off_by_default(dual):
    s = decode(dual, n=20)
    assert s["settings"]["prefetch"] == 0 and s["totals"]["prefetches"] == s["totals"]["predicted_1"] == 0


def test_prompts_ahead_can_be_turned_off(dual):
    for on in (True, False):
        with Llama(dual, n_ctx=256, n_threads=1, verbose=False, t1=1.0, cache_bytes="70%", prefetch_prompts=on) as llm:
            llm.eval(llm.tokenize(engine.SAMPLE_TEXT.read_bytes())[:200])
            s = llm.offload_stats()
            assert (s["totals"]["prefetches"] > 0) == on == s["settings"]["prefetch_prompts"]


@pytest.mark.parametrize("kwargs, error, words", [
    ({"prefetch": 4}, ValueError, "prefetch must be from 0 \\(off\\) to 3 layers, or 'auto', not 4"),
    ({"prefetch": "much"}, TypeError, "prefetch must be a number of layers"),
    ({"prefetch": True}, TypeError, "prefetch must be a number of layers"),
    ({"prefetch": 1, "prefetch_copy": "middle"}, ValueError, "prefetch_copy must be one of rule, low, high"),
    ({"prefetch": 1, "prefetch_copy": "low", "t1": 1.0}, ValueError, "nothing is: give 'high'"),
    ({"prefetch_copy": "high"}, ValueError, "give prefetch, too"),
    ({"prefetch_ranks": 2}, ValueError, "give prefetch, too"),
    ({"prefetch": 1, "prefetch_ranks": -1}, ValueError, "prefetch_ranks must be from 0"),
    ({"prefetch_prompts": 2}, TypeError, "prefetch_prompts must be True or False"),
    ({"lean": -0.1}, ValueError, "lean must be a number from 0 to 1"),
    ({"lean": 2}, ValueError, "lean must be a number from 0 to 1"),
])
def test_wrong_settings(dual, kwargs, error, words):
    with pytest.raises(error, match=words):
        Llama(dual, verbose=False, **kwargs)


def test_wrong_settings_in_c():
    for wrong in ({"prefetch": 4}, {"prefetch": -2}, {"prefetch_copy": 3}, {"prefetch": 1, "prefetch_copy": LOW}, {"prefetch_ranks": -1}, {"lean": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            engine.Model(engine.DEFAULT_MODEL, **wrong)


def test_command_line(hobbit, dual):
    status, out, err = hobbit("run", dual, "-p", "The road", "-n", "12", "--temp", "0", "--cache", "35%", "--prefetch", "1", "--prefetch-ranks", "1",
                              "--lean", "0.1", "--stats", "--threads", "1")
    assert status == 0 and "prefetch 1, copies: rule, ranks: 1" in err and "1 layer ahead" in err and "routing leaned" in err
    status, out, err = hobbit("run", dual, "-p", "The road", "--prefetch", "far")
    assert status == 2 and "give a number of layers from 0 to 3, or auto" in err
    status, out, err = hobbit("run", dual, "-p", "The road", "--prefetch", "7")
    assert status == 1 and "prefetch must be from 0" in err
