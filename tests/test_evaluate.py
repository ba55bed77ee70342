"""hobbit evaluate: its numbers are llama-perplexity's, its modes serve what they say, and structured output is checked."""

import json
import math
import pathlib
import re
import sys

import numpy as np
import pytest

import golden_perplexity
from hobbit_cpp import Llama
from hobbit_cpp import _evaluate_pairs as pairs_
from hobbit_cpp import _evaluate_run as run_
from hobbit_cpp import _evaluate_stats as stats_
from hobbit_cpp import _evaluate_structured as structured_
from hobbit_cpp import evaluate as module
from hobbit_cpp._progress import Progress
from hobbit_cpp.convert import convert
from hobbit_cpp.evaluate import evaluate

DATA = pathlib.Path(__file__).resolve().parent.parent / "hobbit_cpp" / "data"
SOURCE = DATA / "books-8x2-small-q8_0.gguf"
TEXT = DATA / "sample.txt"
ONE = {"n_threads": 1, "n_threads_batch": 1}  # contention does no harm


@pytest.fixture(scope="module")
def dual(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluate") / "small.gguf"
    convert(SOURCE, path, "keep", "q2_k", threads=1)
    return path


@pytest.fixture
def evaluated(hobbit):
    return lambda *argv: hobbit("evaluate", *argv, "--threads", "1")


# --- llama-perplexity's numbers ----------------------------------------------------------------


@pytest.fixture(scope="module")
def golden():
    return json.loads(golden_perplexity.GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def f16(tmp_path_factory):
    """The two models that the golden numbers are of: (reference, setting)."""
    folder = tmp_path_factory.mktemp("golden")
    paths = folder / "f16.gguf", folder / "experts.gguf"
    golden_perplexity.plain(paths[0])
    golden_perplexity.plain(paths[1], golden_perplexity.TYPE)
    return paths


# Another order of additions (flash attention on instead of off) changed the golden run's perplexity by 0.004 %, mean KL by 0.1 % and
# its error by 0.3 %, and quantiles of KL by up to 1.4 %; storing the reference in 16 bits changes them by less. Other processors
# get about ten times that. A half or a BOS that is out by one token changes the perplexity by 2.5 to 6 % (the next test).
PPL, KL_MEAN, KL_QUANTILE = 5e-4, 0.03, 0.1


def test_numbers_of_llama_perplexity(f16, golden):
    reference, setting = f16
    report = evaluate(setting, text=TEXT, reference=reference, n_ctx=golden_perplexity.N_CTX, **ONE)
    run, d, g = report.runs[0], report.runs[0].divergence, golden["kl"]
    assert report.n_chunks == len(golden["so_far"]) and report.n_tokens == report.n_chunks * 15
    assert [report.reference.perplexity.value, report.reference.perplexity.error] == pytest.approx(golden["ppl"], rel=PPL)
    assert [run.perplexity.value, run.perplexity.error] == pytest.approx(g["ppl"], rel=PPL)
    assert [d.kl_mean.value, d.kl_mean.error] == pytest.approx(g["kl_mean"], rel=KL_MEAN)
    assert [d.kl_median.value, d.kl_99.value, d.kl_99_9.value, d.kl_max] == pytest.approx(
        [g["kl_median"], g["kl_99"], g["kl_99.9"], g["kl_max"]], rel=KL_QUANTILE)
    assert 100 * d.same_top.value == pytest.approx(g["same_top"][0], abs=100 * 2.1 / report.n_tokens)  # two tokens that are nearly tied
    assert 100 * d.same_top.error == pytest.approx(g["same_top"][1], rel=0.03)
    assert [100 * d.dp_rms.value, 100 * d.dp_rms.error] == pytest.approx(g["dp_rms"], rel=0.01)
    assert 100 * d.dp_mean.value == pytest.approx(g["dp_mean"][0], abs=0.01)
    # the logarithms differ by both perplexities' tolerance
    assert [d.ln_ratio.value, d.ln_ratio.error] == pytest.approx(g["ln_ratio"], abs=2 * PPL)
    assert 100 * d.correlation == pytest.approx(g["cor"], abs=0.02)


@pytest.mark.parametrize("change", ["no BOS", "BOS put in", "half + 1", "half - 1"])
def test_the_tolerance_tells_other_chunks_apart(f16, golden, monkeypatch, change):
    def chunks(llm, path, n_ctx, n_chunks):
        tokens = llm.tokenize(pathlib.Path(path).read_bytes().rstrip(b"\n"))
        step = n_ctx - (change == "BOS put in")
        cut = [tokens[i:i + step] for i in range(0, len(tokens) - step + 1, step)]
        return [[llm.token_bos(), *c] if change == "BOS put in" else c if change == "no BOS" else [llm.token_bos(), *c[1:]] for c in cut]

    monkeypatch.setattr(module, "text_chunks", chunks)
    if change.startswith("half"):
        monkeypatch.setattr(module._Work, "first", property(lambda self: self.n_ctx // 2 + (1 if "+" in change else -1)))
    found = evaluate(f16[0], text=TEXT, n_ctx=golden_perplexity.N_CTX, **ONE).runs[0].perplexity
    assert abs(found.value / golden["ppl"][0] - 1) > 20 * PPL


def as_stored(row):
    """A reference's log probabilities as llama-perplexity keeps them: 16 bits, 16 nats below the largest at most."""
    top, bottom = row.max(), max(row.min(), row.max() - 16)
    scale = (top - bottom) / 65535
    steps = np.where(row > bottom, np.rint((row - bottom) / scale), 0)
    return steps * scale + bottom - top - math.log(np.exp(row - top).sum())


def test_definitions_against_a_transcription():
    """The sums of perplexity.cpp, term by term, on random logits. Their 16 bits for the reference move the mean KL by less
    than one step, because the roundings of a vocabulary are independent and p sums up to 1."""
    n, rng = 120, np.random.default_rng(5)
    base = rng.normal(0, 2.5, (n, 40))
    logits = base + rng.normal(0, 0.4, base.shape)
    targets = rng.integers(0, 40, n)
    scores = stats_.TextScores()
    for part in (slice(0, 7), slice(7, n)):
        scores.add(logits[part], targets[part], base[part])

    def mean_and_uncertainty(x):
        f = sum(x) / len(x)
        return f, math.sqrt((sum(v * v for v in x) / len(x) - f * f) / (len(x) - 1))

    def check(keep, tolerance):
        nll, nll_base, kl, dp, same = [], [], [], [], []
        for p_row, q_row, t in zip(base, logits, targets):
            q = [v - q_row.max() - math.log(sum(math.exp(w - q_row.max()) for w in q_row)) for v in q_row]
            p = keep(p_row)
            nll.append(-q[t])
            nll_base.append(-p[t])
            kl.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q) if a > -16))
            dp.append(math.exp(q[t]) - math.exp(p[t]))
            same.append(int(np.argmax(q) == np.argmax(p)))
        d, ppl = scores.divergence(), scores.perplexity()
        mean_q, mean_p = mean_and_uncertainty(nll), mean_and_uncertainty(nll_base)
        cov = (sum(a * b for a, b in zip(nll, nll_base)) / n - mean_q[0] * mean_p[0]) / (n - 1)
        ratio = math.sqrt(mean_q[1] ** 2 + mean_p[1] ** 2 - 2 * cov)
        square, square_error = mean_and_uncertainty([x * x for x in dp])
        top = sum(same) / n
        ppl_q, ppl_p = math.exp(mean_q[0]), math.exp(mean_p[0])
        difference = math.sqrt((ppl_q * mean_q[1]) ** 2 + (ppl_p * mean_p[1]) ** 2 - 2 * ppl_q * ppl_p * cov)
        close = dict(rel=tolerance, abs=tolerance)
        for found, expected in [
                (ppl, (ppl_q, ppl_q * mean_q[1])), (d.kl_mean, mean_and_uncertainty(kl)), (d.same_top, (top, math.sqrt(top * (1 - top) / (n - 1)))),
                (d.dp_rms, (math.sqrt(square), 0.5 / math.sqrt(square) * square_error)), (d.dp_mean, mean_and_uncertainty(dp)),
                (d.ln_ratio, (mean_q[0] - mean_p[0], ratio)), (d.ratio, (ppl_q / ppl_p, ppl_q / ppl_p * ratio)),
                (d.difference, (ppl_q - ppl_p, difference))]:
            assert (found.value, found.error) == pytest.approx(expected, **close)
        assert d.correlation == pytest.approx(cov / (mean_q[1] * mean_p[1]), **close)
        kl.sort()
        assert d.kl_median.value == pytest.approx((kl[n // 2 - 1] + kl[n // 2]) / 2, **close)
        at = 0.99 * (n - 1)
        assert d.kl_99.value == pytest.approx((1 - at % 1) * kl[int(at)] + at % 1 * kl[int(at) + 1], **close)
        assert d.kl_max == pytest.approx(kl[-1], **close)

    check(lambda row: row - row.max() - math.log(np.exp(row - row.max()).sum()), 1e-9)
    check(as_stored, 16 / 65535)


def test_quantile_error_is_that_of_repeated_samples():
    rng = np.random.default_rng(6)
    for q in (0.5, 0.99):
        found = [stats_.quantile(rng.exponential(size=2000), q) for _ in range(300)]
        spread = np.std([v.value for v in found])
        assert np.mean([v.error for v in found]) == pytest.approx(spread, rel=0.2)
    assert stats_.quantile(np.arange(20.0), 0.99).error is None  # beyond the largest value


def test_a_token_without_a_chance_and_a_constant():
    scores = stats_.TextScores()
    row = np.array([[1.0, 2.0, -np.inf]])
    scores.add(row, [1], row)
    d = scores.divergence()
    assert (d.kl_mean.value, d.same_top.value, d.dp_rms.value, d.correlation) == (0, 1, 0, None) and d.kl_mean.error is None


# --- modes -----------------------------------------------------------------------------------


def by_hand(path, n_ctx, **arguments):
    """Perplexity of the first chunk, one token at a time, with nothing of the module."""
    with Llama(path, n_ctx=n_ctx, logits_all=True, verbose=False, **ONE, **arguments) as llm:
        tokens = llm.tokenize(TEXT.read_bytes())[:n_ctx]
        for t in tokens:
            llm.eval([t])
        x = llm.scores[n_ctx // 2:n_ctx - 1].astype(np.float64)
        x = x[np.arange(len(x)), tokens[n_ctx // 2 + 1:]] - np.log(np.exp(x).sum(axis=1))
        return math.exp(-x.mean())


def test_modes(dual):
    settings = {"t1": 0.3, "t2": 0.8, "cache_bytes": "25%"}
    report = evaluate(dual, text=TEXT, n_ctx=64, chunks=1, modes=("served", "worst"), **settings, **ONE)
    served, worst = report.runs
    assert (served.mode, worst.mode, report.reference.mode) == ("served", "worst", "reference")
    assert served.perplexity.value == pytest.approx(by_hand(dual, 64, **settings), rel=1e-9)
    assert worst.perplexity.value == pytest.approx(by_hand(dual, 64, force_miss=True, **settings), rel=1e-9)
    assert served.totals["hit_rate"] > 0 and worst.totals["hit_rate"] == 0 and worst.totals["share_low"] > served.totals["share_low"] > 0
    assert 0 < served.divergence.kl_mean.value < worst.divergence.kl_mean.value
    assert served.totals["graphs"] == 63  # token by token, none after the last that is predicted
    assert report.reference.totals["share_high"] == 1


def test_all_high_is_no_divergence(dual):
    """Reference and setting take the same path then; what is in memory, and the mode, change nothing."""
    report = evaluate(dual, text=TEXT, n_ctx=64, chunks=2, t1=1, cache_bytes="30%", modes="worst", reference=SOURCE, **ONE)
    run = report.runs[0]
    assert run.mode == "high" and report.reference.settings is None
    assert run.perplexity == report.reference.perplexity
    assert (run.divergence.kl_max, run.divergence.same_top.value, run.divergence.dp_rms.value) == (0, 1, 0)


def test_batches_are_bounded(monkeypatch):
    """However few rows of logits fit, they are the same ones."""
    whole = evaluate(SOURCE, text=TEXT, n_ctx=64, chunks=1, **ONE).runs[0].perplexity
    monkeypatch.setattr(run_, "LOGITS_BYTES", 5 * 4 * 4096)
    sizes = []
    decode = run_.Runner._decode
    monkeypatch.setattr(run_.Runner, "_decode", lambda self, tokens, n_past, scored: (sizes.append(len(tokens)), decode(self, tokens, n_past, scored))[1])
    assert evaluate(SOURCE, text=TEXT, n_ctx=64, chunks=1, **ONE).runs[0].perplexity.value == pytest.approx(whole.value, rel=5e-3)
    assert sizes == [32, 5, 5, 5, 5, 5, 5, 1]


def test_reference_with_other_tokens(dual, monkeypatch):
    chunks = run_.text_chunks
    monkeypatch.setattr(module, "text_chunks", lambda llm, *a: [c[::-1] if llm.is_offloaded else c for c in chunks(llm, *a)])
    with pytest.raises(ValueError, match="do not turn a text into the same tokens"):
        evaluate(dual, text=TEXT, n_ctx=32, chunks=1, reference=SOURCE, cache_bytes="min", **ONE)


def test_no_room_for_the_reference(dual, monkeypatch):
    monkeypatch.setattr(run_.shutil, "disk_usage", lambda folder: type("usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match=r"the reference's logits take [\d.]+ KiB, and .* TMPDIR"):
        evaluate(dual, text=TEXT, n_ctx=32, chunks=1, cache_bytes="min", **ONE)


def test_arguments(dual):
    with pytest.raises(TypeError, match="force_miss is evaluate"):
        evaluate(dual, text=TEXT, force_miss=True)
    with pytest.raises(ValueError, match="a mode must be served or worst, not 'best'"):
        evaluate(dual, text=TEXT, modes="best")
    with pytest.raises(ValueError, match="at least one mode"):
        evaluate(dual, text=TEXT, modes=())
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(dual)


# --- minimal pairs -----------------------------------------------------------------------------


PAIRS = [("The old man walked along the road.", "The old man walks along the the road.", "a"),
         ("She opened the door and went in.", "She opened the door and goed in.", "a"),
         ("There were two of them.", "There was two of them.", "b"), ("It was a fine morning.", "of the the", "b")]


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(("good", "bad", "set"), p))) for p in PAIRS) + "\n\n", encoding="utf-8")
    return path


def test_pairs(dual, pairs_file):
    report = evaluate(dual, pairs=pairs_file, t1=0.3, cache_bytes="25%", **ONE)
    run, reference = report.runs[0], report.reference
    assert report.text is None and run.perplexity is None and run.divergence is None
    assert run.pairs.n == 4 and run.pairs.sets["a"].value == 1 and run.pairs.accuracy.value == 0.75  # of the last, the bad one is the shorter
    assert (run.pairs.same_choice.value, run.pairs.difference.value, reference.pairs.same_choice) == (1, 0, None)
    with Llama(SOURCE, n_ctx=128, verbose=False, logits_all=True, **ONE) as llm:
        expected = []
        for text in PAIRS[1][:2]:
            tokens = llm.tokenize(text.encode())
            llm.reset()
            llm.eval(tokens)
            x = llm.scores[:len(tokens) - 1].astype(np.float64)
            expected.append((x[np.arange(len(x)), tokens[1:]] - np.log(np.exp(x).sum(axis=1))).sum())
        runner = run_.Runner(llm, False, Progress(1, False))
        found = pairs_.margins(runner, pairs_.tokenize(runner, PAIRS[1:2]))
    assert found == pytest.approx([expected[0] - expected[1]], rel=1e-6)


def test_pairs_against_a_reference():
    found = pairs_.score([("", "", "x")] * 4, np.array([1.0, -1, 2, 0]), np.array([1.0, 1, -2, 3]))
    assert (found.accuracy.value, found.same_choice.value, found.difference.value) == (0.5, 0.25, -0.25)  # a tie is not right
    assert found.difference.error == pytest.approx(np.std([0, -1, 1, -1]) / math.sqrt(3))


def test_pairs_files(tmp_path, pairs_file):
    assert pairs_.read_pairs(pairs_file) == PAIRS
    assert pairs_.read_pairs(pairs_file, 2) == PAIRS[::2] and pairs_.read_pairs(pairs_file, 9) == PAIRS
    for text, message in ((b"", "has no pairs"), (b'{"good": "a", "bad": "b"}\nx', "line 2 is no JSON"), (b"\xff", "line 1 is no JSON"),
                          (b'{"good": "a"}', "line 1 must be an object"), (b'{"good": "a", "bad": ""}', "line 1 must be"), (b"[]", "line 1 must be")):
        (tmp_path / "x").write_bytes(text)
        with pytest.raises(ValueError, match=message):
            pairs_.read_pairs(tmp_path / "x")


def test_blimp(shared_dir):
    """Trained models know a good part of the grammar."""
    report = evaluate(SOURCE, pairs=shared_dir / "text" / "blimp-2000.jsonl", n_pairs=60, **ONE)
    accuracy = report.runs[0].pairs.accuracy
    assert 0.5 + 2 * accuracy.error < accuracy.value < 0.9 and len(report.runs[0].pairs.sets) == 20


# --- structured output ---------------------------------------------------------------------------


def test_structured(dual, monkeypatch):
    """Also where little more than each token's first expert is served: all texts parse, and the calls' structure suffers."""
    monkeypatch.setattr(structured_, "DOCUMENTS", structured_.DOCUMENTS[:2])
    monkeypatch.setattr(structured_, "RECORDS", structured_.RECORDS[::3])
    report = evaluate(dual, structured=True, t1=0, t2=0, cache_bytes="25%", modes="worst", **ONE)
    run, reference = report.runs[0], report.reference
    assert run.totals["share_skip"] > 0.4 and report.json_parsed and run.json.n == run.json.parsed == len(structured_.RECORDS)
    assert all(isinstance(json.loads(text), dict) for text in run.json.texts) and 0 < run.json.first_choice.value < 1
    assert reference.tools.right.value > 0.7  # copying the examples' shape is in reach of the small model
    assert reference.tools.right.value > run.tools.right.value and run.tools.kept.value + 3 * run.tools.kept.error < 1
    assert run.tools.n_calls == 8 and reference.tools.kept is None


def test_structure_is_found_in_the_tokens():
    with Llama(SOURCE, n_ctx=512, verbose=False, vocab_only=True) as llm:
        runner = type("runner", (), {"llm": llm, "tokens": run_.Runner.tokens, "piece": run_.Runner.piece, "prefix": run_.Runner.prefix})()
        parts = structured_.document(structured_.DOCUMENTS[0])
        tokens, call = structured_.label(runner, parts)
        for c in range(4):
            spelled = b"".join(runner.piece(t) for t, which in zip(tokens, call) if which == c).decode()
            shape = "".join(text for text, which in parts if which == c)
            assert shape.startswith('<tool_call>\n{"name": "", "arguments": {"') and len(spelled) > 0.9 * len(shape)
            assert set(spelled) <= set(shape) and "London" not in spelled and "get_weather" not in spelled
        assert call.max() == 3 and call[0] == -1
        runner.piece = lambda token: b"?"
        with pytest.raises(ValueError, match="does not give the tool calls' text back"):
            structured_.label(runner, parts)


def test_json_that_does_not_parse():
    fields = {"a": "integer", "b": {"c": "list"}}
    assert structured_.parses(b'{"a": 1, "b": {"c": ["x"]}}', fields)
    for text in (b'{"a": 1, "b": {"c": ["x"]}', b'{"a": true, "b": {"c": []}}', b'{"b": {"c": []}, "a": 1}', b'{"a": 1, "b": []}', b"1", b"\xff"):
        assert not structured_.parses(text, fields)
    assert len('{"a": -123456, "b": {"c": ["' + '\\u1234' * 12 + '", "' + '\\u1234' * 12 + '"]}}') <= structured_.longest(fields)


def test_structure_that_breaks():
    base = structured_.Structure(np.array([0, 0, 1, 1]), np.array([True, True, True, False]), np.array([0.1, 0.1, 0.1, 1.0]))
    worse = structured_.Structure(base.call, np.array([True, True, False, True]), base.nll + 0.5)
    found = structured_.score_calls(worse, base)
    assert (found.right.value, found.whole_calls.value, found.kept.value) == (0.75, 0.5, pytest.approx(2 / 3))
    assert found.ln_ratio.value == pytest.approx(0.5)


# --- the command ---------------------------------------------------------------------------------


def test_command(evaluated, dual, pairs_file):
    argv = (dual, "--text", TEXT, "--ctx", 64, "--chunks", 1, "--mode", "both", "--cache", "25%", "--pairs", pairs_file, "--t1", 0.3)
    status, out, err = evaluated(*argv)
    assert (status, err) == (0, "")  # quiet in a pipe
    assert "T1 0.3, T2 1, policy hobbit, cache 25%" in out and "1 chunk of 64 tokens, of which the second half counts: 31 tokens" in out
    head = next(line for line in out.splitlines() if "as served" in line)
    assert head.split() == ["reference", "as", "served", "worst", "case"]
    for name in ("perplexity", "KL divergence: mean", "  median", "  99th percentile", "same first choice", "change of probability, RMS", "minimal pairs: right"):
        assert any(line.startswith(name) and "." in line for line in out.splitlines()), name
    status, out, err = evaluated(*argv, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "") and [r["mode"] for r in found["runs"]] == ["served", "worst"]
    assert found["runs"][0]["divergence"]["kl_mean"]["value"] > 0 and found["reference"]["divergence"] is None
    assert found["runs"][0]["divergence"]["kl_99"]["error"] is None and found["runs"][1]["totals"]["hit_rate"] == 0


def test_command_on_an_ordinary_file(evaluated):
    status, out, err = evaluated(SOURCE, "--text", TEXT, "--ctx", 64, "--chunks", 1)
    assert (status, err) == (0, "") and "perplexity" in out and "KL" not in out and "experts" not in out


def test_progress_on_a_terminal(evaluated, dual, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _, _, err = evaluated(dual, "--text", TEXT, "--ctx", 256, "--chunks", 1, "--cache", "25%")
    assert "as served: " in err and "tok/s" in err and "left" in err and err.endswith("\r")


def test_command_says_when_json_does_not_parse(evaluated, dual, monkeypatch):
    monkeypatch.setattr(structured_, "DOCUMENTS", structured_.DOCUMENTS[:1])
    monkeypatch.setattr(structured_, "RECORDS", (("Go:", {"a": "integer"}),))
    monkeypatch.setattr(structured_, "grammar_of", lambda fields: 'root ::= "{"')
    status, out, err = evaluated(dual, "--structured", "--cache", "25%")
    assert status == 1 and "0 of 1" in out and err == "error: not every text that was written under a JSON grammar parses\n"


@pytest.mark.parametrize("argv, message", [
    (("{dual}",), "give --text, --pairs or --structured"),
    (("{dual}", "--text", "nothing.txt"), "nothing.txt: No such file"),
    (("{dual}", "--pairs", "nothing.jsonl"), "nothing.jsonl: No such file"),
    (("nothing.gguf", "--text", "{text}"), "nothing.gguf does not exist"),
    (("{dual}", "--text", "{text}", "--reference", "nothing.gguf"), "nothing.gguf does not exist"),
    (("{dual}", "--text", "{text}", "--ctx", "3"), "--ctx must be at least 4"),
    (("{dual}", "--text", "{text}", "--chunks", "0"), "--chunks must be at least 1"),
    (("{dual}", "--text", "{pairs}", "--ctx", "512"), r"has \d+ tokens, and a chunk takes 512: give a longer text or a smaller --ctx"),
    (("{dual}", "--text", "{text}", "--t1", "0.9", "--t2", "0.5"), "--t1 is 0.9 and --t2 is 0.5"),
    (("{source}", "--text", "{text}", "--mode", "worst"), "is an ordinary GGUF, which is served in one way only"),
    (("{source}", "--text", "{text}", "--t1", "0.5"), "is an ordinary GGUF: convert it first"),
])
def test_errors(evaluated, dual, pairs_file, argv, message):
    status, out, err = evaluated(*(a.format(dual=dual, source=SOURCE, text=TEXT, pairs=pairs_file) for a in argv))
    assert status == 1 and out == "" and err.startswith("error: ")
    assert err.count("\n") == 1 and re.search(message, err)
