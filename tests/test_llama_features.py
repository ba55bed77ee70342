"""What llama-cpp-python can do, on a model with offloaded experts, all high: the same as the ordinary file under llama_cpp.Llama."""

import itertools
import json
import os

import numpy as np
import pytest

import engine
import llama_cpp
from hobbit_cpp import HobbitError, Llama
from test_llama import PROMPT, SOURCE, load, text, usage

COMMON = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}, "required": ["name", "age"],
          "additionalProperties": False}


@pytest.fixture(scope="module")
def dual():
    return engine.pair(SOURCE, "q2_k")


def ours(dual, **kwargs):
    return load(dual, **{"t1": 1.0, "cache_bytes": "25%", **kwargs})


def both(dual, use, **kwargs):
    """use(llm) of stock with the ordinary file, and of ours."""
    stock = llama_cpp.Llama(str(SOURCE), **{**COMMON, **kwargs})
    try:
        expected = use(stock)
    finally:
        stock.close()
    with ours(dual, **kwargs) as llm:
        return expected, use(llm)


# --- sampling ----------------------------------------------------------------------------------


def said(llm, **kwargs):
    return llm.create_completion(PROMPT, **{"max_tokens": 24, "temperature": 0.9, **kwargs})["choices"][0]["text"]


@pytest.mark.parametrize("how", [{"seed": 7}, {"seed": 2**32 - 2}, {"seed": 1, "top_k": 5, "top_p": 0.7, "min_p": 0.2, "typical_p": 0.9},
                                 {"seed": 3, "repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
                                 {"seed": 5, "mirostat_mode": 2, "mirostat_tau": 4.0}, {"seed": 2, "logit_bias": {300: 2.0}, "stop": ["\n"]}])
def test_the_same_seed_says_the_same_as_stock(dual, how):
    expected, got = both(dual, lambda llm: said(llm, **how))
    assert got == expected and got


def test_seeds_differ_and_repeat(dual):
    with ours(dual) as llm:
        texts = [said(llm, seed=s) for s in (1, 2, 1)]
        assert texts[0] == texts[2] != texts[1]
        llm.set_seed(9)
        first = said(llm)
        llm.set_seed(9)
        assert said(llm) == first


def test_logits_processors_and_stopping_criteria(dual):
    seen = []

    def only_even(input_ids, scores):
        seen.append(len(input_ids))
        scores[1::2] = -np.inf
        return scores

    def use(llm):
        seen.clear()
        processors = llama_cpp.LogitsProcessorList([only_even])
        stop = llama_cpp.StoppingCriteriaList([lambda ids, logits: len(ids) >= 20])
        prompt = llm.tokenize(PROMPT.encode())
        return list(llm.generate(prompt, temp=0.0, logits_processor=processors, stopping_criteria=stop)), len(prompt), list(seen)

    expected, (tokens, n_prompt, lengths) = both(dual, use)
    assert (tokens, n_prompt, lengths) == expected
    assert all(t % 2 == 0 for t in tokens) and n_prompt + len(tokens) == 20 and lengths[0] == n_prompt


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_processor_that_raises(dual, capfd, error):
    """Stock prints it and goes on."""
    def fail(input_ids, scores):
        raise error("from the processor")

    with ours(dual) as llm:
        good = text(llm)
        for stream in (False, True):
            with pytest.raises(error, match="from the processor"):
                list(llm(PROMPT, max_tokens=4, stream=stream, logits_processor=llama_cpp.LogitsProcessorList([fail])))
        assert text(llm) == good
    assert capfd.readouterr().err == ""


def test_log_probabilities(dual):
    def use(llm):
        choice = llm.create_completion(PROMPT, max_tokens=6, temperature=0, logprobs=3)["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]

    expected, got = both(dual, use, logits_all=True)
    assert got == expected and len(got[1]) == 6


# --- grammars ----------------------------------------------------------------------------------


def test_grammar(dual):
    grammar = 'root ::= ("yes" | "no") " " [0-9] [0-9] "."'
    expected, got = both(dual, lambda llm: said(llm, seed=4, grammar=llama_cpp.LlamaGrammar.from_string(grammar, verbose=False)))
    assert got == expected and got.split()[0] in ("yes", "no") and got.endswith(".") and len(got.split()[1]) == 3


@pytest.mark.parametrize("t1, t2", [(1.0, 1.0), (0.0, 1.0), (0.3, 0.6)])
def test_json_schema_always_parses(dual, t1, t2):
    """All but the first expert low, or skipped: the text gets worse, its form does not."""
    with load(dual, t1=t1, t2=t2, cache_bytes="min", chat_format="chatml") as llm:
        for seed in range(3):
            answer = llm.create_chat_completion([{"role": "user", "content": "Who?"}], max_tokens=60, seed=seed,
                                                response_format={"type": "json_object", "schema": SCHEMA})
            value = json.loads(answer["choices"][0]["message"]["content"])
            assert set(value) == {"name", "age"} and isinstance(value["age"], int)


@pytest.mark.parametrize("wrong", ["root := nonsense", "root ::= [a-", 'word ::= "a"', "root ::= root", 'root ::= root "a" | "b"'])
def test_grammar_that_is_wrong(dual, wrong):
    """Stock: a crash."""
    with ours(dual) as llm:
        with pytest.raises(ValueError, match="the grammar cannot be used"):
            said(llm, grammar=llama_cpp.LlamaGrammar.from_string(wrong, verbose=False))
        with pytest.raises(TypeError, match="grammar must be a llama_cpp.LlamaGrammar"):
            said(llm, grammar=wrong)
        assert text(llm)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_grammar_that_nothing_satisfies(dual, temperature):
    """Stock: an abort."""
    def forbid(input_ids, scores):
        scores[:] = -np.inf
        return scores

    with ours(dual) as llm:
        with pytest.raises(HobbitError, match="no token is left"):
            said(llm, temperature=temperature, grammar=llama_cpp.LlamaGrammar.from_string('root ::= "yes"', verbose=False),
                 logits_processor=llama_cpp.LogitsProcessorList([forbid]))
        assert text(llm)


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "#/nope"}, {"type": "string", "pattern": "(("}, [], "x"])
def test_schema_that_is_wrong(dual, schema):
    """Stock takes any JSON instead, without a word."""
    with ours(dual, chat_format="chatml") as llm, pytest.raises(ValueError, match="the JSON schema of response_format cannot be used"):
        llm.create_chat_completion([{"role": "user", "content": "x"}], response_format={"type": "json_object", "schema": schema})


# --- values that llama.cpp aborts on -----------------------------------------------------------


def test_tokens_that_do_not_exist(dual):
    with ours(dual) as llm:
        good = text(llm)
        for token in (-1, 4096, 2**31 - 1):
            for use in (lambda: llm.eval([1, token]), lambda: llm([1, token]), lambda: llm.detokenize([token]),
                        lambda: llm("x", logit_bias={token: 1.0}), lambda: llm("x", logit_bias={str(token): 1.0})):
                with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of 4096"):
                    use()
        for use in (lambda: llm([]), lambda: next(llm.generate([]))):
            with pytest.raises(ValueError, match="the prompt is empty"):
                use()
        assert text(llm) == good


def test_sampling_without_logits(dual):
    with ours(dual) as llm:
        llm.eval([1, 5, 6])
        assert llm.sample(temp=0) == llm.sample(temp=0, idx=2)
        state = llm.save_state()
        with pytest.raises(RuntimeError, match="no logits to sample from"):
            llm.sample(idx=0)
    with ours(dual) as llm:
        llm.load_state(state)
        with pytest.raises(RuntimeError, match="no logits to sample from"):
            llm.sample()


# --- states and caches -------------------------------------------------------------------------


def test_state_goes_from_one_object_to_another(dual):
    with ours(dual) as a, ours(dual, cache_bytes="min") as b:
        a.eval(a.tokenize(PROMPT.encode()))
        state = a.save_state()
        rest = list(itertools.islice(a.generate(a.tokenize(PROMPT.encode()), temp=0.0), 12))
        text(b, prompt="Quite another text, so that something has to be replaced")
        b.load_state(state)
        assert b.n_tokens == state.n_tokens and list(itertools.islice(b.generate(b.tokenize(PROMPT.encode()), temp=0.0), 12)) == rest
        assert b.last_stats["prompt"]["evaluated"] == 1  # the rest of the prompt came with the state


def test_state_of_a_sampled_text(dual):
    """The same seed from the same state says the same again."""
    with ours(dual) as llm:
        llm.set_seed(11)
        llm.eval(llm.tokenize(PROMPT.encode()))
        state = llm.save_state()
        first = said(llm)
        said(llm, seed=12)
        llm.load_state(state)
        assert said(llm) == first


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_prompt_cache(dual, tmp_path, kind):
    with ours(dual) as llm:
        expected = [text(llm, prompt=p) for p in (PROMPT, "Another story", PROMPT + " and")]
    cache = llama_cpp.LlamaRAMCache() if kind == "ram" else llama_cpp.LlamaDiskCache(str(tmp_path / "cache"))
    with ours(dual) as llm:
        llm.set_cache(cache)
        assert [text(llm, prompt=p) for p in (PROMPT, "Another story")] == expected[:2]
    with ours(dual) as llm:
        llm.set_cache(cache)
        assert [text(llm, prompt=p) for p in (PROMPT + " and", "Another story", PROMPT)] == [expected[2], expected[1], expected[0]]
        assert llm.last_stats["prompt"]["evaluated"] < len(llm.tokenize(PROMPT.encode()))


def test_embeddings_equal_stock(dual):
    texts = ["The old man", "A completely different, longer sentence about the sea."]
    for pooling in (llama_cpp.LLAMA_POOLING_TYPE_MEAN, llama_cpp.LLAMA_POOLING_TYPE_LAST):
        expected, got = both(dual, lambda llm: (llm.embed(texts), llm.create_embedding(texts[0])), embedding=True, pooling_type=pooling)
        assert np.array_equal(got[0], expected[0]) and len(got[0][0]) == 256
        assert got[1]["data"] == expected[1]["data"] and got[1]["usage"] == expected[1]["usage"]


def test_generation_from_an_embedding_model(dual):
    """llama.cpp serves both; embed() needs the argument."""
    with ours(dual, embedding=True) as llm:
        assert text(llm)
    with ours(dual) as llm, pytest.raises(RuntimeError, match="embedding=True"):
        llm.embed("x")


# --- streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "forget", "keep"])
def test_a_stream_that_is_left_in_the_middle(dual, end):
    with ours(dual) as llm:
        expected = text(llm), text(llm, prompt="Another story")
        stream = llm(PROMPT, max_tokens=200, temperature=0, stream=True)
        for _ in range(3):
            next(stream)
        if end == "close":
            stream.close()
        if end == "forget":
            del stream
        assert (text(llm), text(llm, prompt="Another story")) == expected
        if end == "keep":
            with pytest.raises(HobbitError, match="this generation is over"):
                for _ in stream:
                    pass
            assert text(llm) == expected[0]


@pytest.mark.parametrize("other", ["eval", "reset", "load_state", "stream"])
def test_two_things_at_once_with_one_model(dual, other):
    """Stock goes on with the context of the other, without a word."""
    with ours(dual) as llm:
        llm.eval(llm.tokenize(b"Once"))
        state = llm.save_state()
        generation = llm.generate(llm.tokenize(PROMPT.encode()), temp=0.0)
        next(generation)
        if other == "stream":
            next(llm("Another story", stream=True))
        else:
            {"eval": lambda: llm.eval([5]), "reset": llm.reset, "load_state": lambda: llm.load_state(state)}[other]()
        with pytest.raises(HobbitError, match="this generation is over"):
            next(generation)


def test_objects_take_turns(dual):
    with ours(dual) as a, ours(dual, cache_bytes="min") as b, load(SOURCE) as c:
        expected = text(a)
        streams = [llm(PROMPT, max_tokens=24, temperature=0, stream=True) for llm in (a, b, c)]
        pieces = list(itertools.zip_longest(*([p["choices"][0]["text"] for p in s] for s in streams), fillvalue=""))
        assert ["".join(p) for p in zip(*pieces)] == [expected] * 3
        streams = [llm.generate(llm.tokenize(PROMPT.encode()), temp=0.0) for llm in (a, b, c)]
        rounds = [[next(s) for s in streams] for _ in range(20)]  # one token of each in turn
        assert all(len(set(r)) == 1 for r in rounds)


# --- memory ------------------------------------------------------------------------------------


def test_garbage_collection_returns_the_memory(dual):
    """Without close(), and with a hook that refers to the object, which makes a cycle."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer keeps for a while what was freed")
    def once():
        llm = Llama(dual, cache_bytes="100%", **{**COMMON, "n_ctx": 2048})
        llm.set_hooks(prefetch=lambda layer, *_: layer < 5 and llm.prefetch(layer + 1, 0))
        text(llm, 2)
        size = llm.offload_stats()["budget"]["budget_bytes"]
        stream = llm("Once", stream=True)
        next(stream)
        return size

    for _ in range(3):
        size = once()
    before = usage()
    for _ in range(10):
        once()
    after = usage()
    assert after[1:] == before[1:]
    assert after[0] - before[0] < size  # ten of them were loaded


def test_chat_format_that_does_not_exist(dual):
    """Stock says so at the first chat."""
    with pytest.raises(ValueError, match="chat_format 'vicunna' is not known; is 'vicuna' meant"):
        load(dual, chat_format="vicunna")
    for path in (dual, SOURCE):
        with pytest.raises(ValueError, match="chat_format 'chat_template.default' is not known"):
            load(path, chat_format="chat_template.default")  # this model has none
