"""One thread computes with a Llama at a time; another gets an error, never a crash and never the other's text."""

import os
import threading
import time

import numpy as np
import pytest

import engine
from hobbit_cpp import HobbitError
from hobbit_cpp._turns import Turns
from hobbit_cpp.errors import Cancelled
from test_llama import PROMPT, SOURCE, load, python, text
from tiny_recurrent import make_jamba

LONG = "word " * 100


@pytest.fixture(scope="module")
def dual():
    return engine.pair(SOURCE, "q2_k")


class Busy:
    """with Busy(llm) as busy: a thread is in the middle of a forward pass of llm until busy.go is set."""

    def __init__(self, llm, use=lambda llm: llm(PROMPT, max_tokens=500, temperature=0)):
        self.inside, self.go, self.error, self.result = threading.Event(), threading.Event(), None, None

        def wait(*_):
            self.inside.set()
            self.go.wait(30)

        def work():
            try:
                self.result = use(llm)
            except BaseException as error:
                self.error = error

        llm.set_hooks(prefetch=wait)
        self.thread = threading.Thread(target=work)

    def __enter__(self):
        self.thread.start()
        assert self.inside.wait(30)
        return self

    def end(self):
        self.go.set()
        self.thread.join(60)
        assert not self.thread.is_alive()

    def __exit__(self, *_):
        self.end()


def test_a_second_thread_is_refused(dual):
    with load(dual, cache_bytes="50%", t1=1.0) as llm:
        expected = text(llm, 30)
        llm.eval([1, 5])
        state = llm.save_state()
        with Busy(llm, lambda llm: text(llm, 30)) as busy:
            for use in (lambda: llm("x"), lambda: next(llm("x", stream=True)), lambda: llm.eval([1]), llm.reset, llm.save_state, lambda: llm.load_state(state),
                        lambda: llm.create_chat_completion([{"role": "user", "content": "x"}]), lambda: next(llm.generate([1])), llm.sample,
                        lambda: llm.embed("x"), llm.set_hooks):
                with pytest.raises(HobbitError, match="another thread is running this Llama"):
                    use()
            # these are for everybody
            assert llm.offload_stats()["mode"] == "high" and llm.thresholds == (1.0, 1.0) and llm.tokenize(b"x") and llm.last_stats
            llm.thresholds = (1.0, 1.0)
            llm.set_policy("lru")
            llm.prefetch(0, 0)
        assert busy.error is None and busy.result == expected
        llm.set_hooks()
        assert text(llm, 30) == expected


def test_many_threads_at_once(dual):
    """Whoever gets through has the right text."""
    with load(dual, cache_bytes="25%", t1=1.0) as llm:
        expected = {p: text(llm, 10, prompt=p) for p in (f"Story number {i}" for i in range(4))}
        wrong, right, refused = [], [], []

        def work(prompt):
            for _ in range(15):
                try:
                    (right if text(llm, 10, prompt=prompt) == expected[prompt] else wrong).append(prompt)
                except HobbitError as error:
                    refused.append(str(error))
                    time.sleep(0.01)

        threads = [threading.Thread(target=work, args=(p,)) for p in expected]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong and right and len(right) + len(refused) == 60
        assert all("another thread" in r for r in refused)


def test_threads_that_take_turns(dual):
    """A lock is all it needs; a stream may be read by another thread than began it."""
    with load(dual, cache_bytes="25%", t1=1.0) as llm:
        expected, lock, texts = text(llm), threading.Lock(), []

        def work():
            with lock:
                texts.append(text(llm))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert texts == [expected] * 8
        stream = llm(PROMPT, max_tokens=24, temperature=0, stream=True)
        pieces = [next(stream)]
        t = threading.Thread(target=lambda: pieces.extend(stream))
        t.start()
        t.join()
        assert "".join(p["choices"][0]["text"] for p in pieces) == expected


def test_cancel(dual):
    with load(dual, cache_bytes="50%", t1=1.0) as llm:
        expected = text(llm)
        llm.cancel()  # nothing runs: nothing happens
        assert text(llm) == expected
        with Busy(llm) as busy:
            llm.cancel()
        assert isinstance(busy.error, Cancelled)
        llm.set_hooks()
        assert text(llm) == expected


def test_cancel_in_the_middle_of_a_prompt(dual):
    with load(dual, cache_bytes="50%", t1=1.0, n_batch=16, n_ctx=512) as llm:
        expected = text(llm, 8, prompt=LONG)
        llm.reset()
        llm.set_hooks()
        before = llm._evaluated
        with Busy(llm, lambda llm: text(llm, 8, prompt=LONG)) as busy:
            llm.cancel()
        assert isinstance(busy.error, Cancelled) and llm._evaluated == before  # not even the batch that was being computed
        llm.set_hooks()
        assert text(llm, 8, prompt=LONG) == expected  # goes on from there


def test_close_waits_for_the_token(dual):
    llm = load(dual, cache_bytes="50%")
    with Busy(llm) as busy:
        closing = threading.Thread(target=llm.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        busy.end()
        closing.join(30)
    assert isinstance(busy.error, RuntimeError) and "was closed" in str(busy.error)
    with pytest.raises(RuntimeError, match="was closed"):
        text(llm)


def test_statistics_while_it_is_closed(dual):
    """A thread that looks at the counters all the time sees numbers, then an error."""
    for _ in range(5):
        llm, seen = load(dual, cache_bytes="50%"), []

        def look():
            try:
                while True:
                    seen.append(llm.offload_stats()["totals"]["requests"])
            except RuntimeError as error:
                seen.append(str(error))

        thread = threading.Thread(target=look)
        thread.start()
        text(llm, 3)
        llm.close()
        thread.join(30)
        assert len(seen) > 1 and "was closed" in seen[-1]


def test_other_threads_steer_while_it_runs(dual, tmp_path):
    """Statistics, prefetches, settings and traces of other threads change no text. Two threads compute."""
    with load(dual, cache_bytes="25%", t1=1.0, n_threads=2, n_threads_batch=2, prefetch=1) as llm:
        expected, stop, errors = [text(llm, 12, prompt=p) for p in (PROMPT, LONG)], threading.Event(), []

        def steer(step):
            try:
                while not stop.wait(0.001):
                    step()
            except BaseException as error:
                errors.append(error)

        def trace():
            with llm.trace(tmp_path / "t.npy"):
                stop.wait(0.01)

        numbers = np.random.default_rng(1)
        steps = (lambda: llm.offload_stats(), lambda: llm.prefetch(int(numbers.integers(2)), int(numbers.integers(8)), "low"),
                 lambda: llm.set_policy(("lru", "lfu", "hobbit", "lcu")[numbers.integers(4)]), lambda: setattr(llm, "thresholds", (1.0, 1.0)), trace)
        threads = [threading.Thread(target=steer, args=(step,)) for step in steps]
        for t in threads:
            t.start()
        got = [[text(llm, 12, prompt=p) for p in (PROMPT, LONG)] for _ in range(3)]
        stop.set()
        for t in threads:
            t.join()
        assert not errors and got == [expected] * 3
        assert np.load(tmp_path / "t.npy").dtype.names == ("seq", "pos", "layer", "expert", "weight")


@pytest.mark.parametrize("what", ["close", "set_hooks"])
def test_hooks_must_leave_the_model_alone(dual, what):
    with load(dual, cache_bytes="50%") as llm:
        llm.set_hooks(event=lambda *_: getattr(llm, what)())
        with pytest.raises(RuntimeError, match="a hook must not"):
            text(llm, 3)
        llm.set_hooks()
        assert text(llm, 3)


def test_turns():
    turns = Turns()
    with turns.run(), turns.run():
        turns.check()
        turns.stop(Cancelled("x"))
        with pytest.raises(Cancelled):
            turns.check()
    with turns.run():
        turns.check()  # a new run starts afresh
    turns.stop(Cancelled("x"))
    with turns.run():
        turns.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit()", "llm.close(); sys.exit()", "del llm; sys.exit()"])
def test_a_forked_child_says_that_it_cannot(dual, end):
    """Loader threads do not live in a child: it says so, and neither waits for them nor crashes, however it ends."""
    out = python(f"""
        import os, sys
        from hobbit_cpp import Llama
        llm = Llama(sys.argv[1], n_threads=1, n_threads_batch=1, verbose=False, cache_bytes="min", n_ctx=256)
        llm("Once", max_tokens=2)
        stream = llm("Once", stream=True)
        next(stream)
        pid = os.fork()
        if pid == 0:
            for use in (lambda: llm("Another", max_tokens=4), lambda: next(stream), llm.offload_stats):
                try:
                    use()
                except RuntimeError as error:
                    print("error:", error, flush=True)
            {end}
        print(os.waitpid(pid, 0)[1])
        print(len(llm("Once", max_tokens=2)["choices"]))
    """, dual)
    lines = out.splitlines()
    assert lines[3:] == ["0", "1"] and all("loaded before the process forked" in x for x in lines[:3])


def test_a_recurrent_model_after_a_pass_that_ended_early(tmp_path):
    """Its state has no way back: it says so, and begins anew with the next prompt or after reset()."""
    source = make_jamba(tmp_path / "jamba.gguf")
    tokens, more = [1, 5, 9, 33, 7, 8, 20, 21], {"n_ctx": 128, "logits_all": True}

    def logits(llm):
        for part in (tokens, [4], [6]):
            llm.eval(part)
        return llm.scores[:llm.n_tokens].copy()

    def complete(llm):
        return llm.create_completion(tokens * 3, max_tokens=6, temperature=0)["choices"][0]["text"]

    with load(source, **more) as stock:
        expected = logits(stock)
        stock.reset()
        said = complete(stock)

    def end_early(llm, use):
        llm.set_hooks(event=lambda *_: None)  # it asks before each layer's hooks
        asked = iter(range(1))
        llm.set_abort(lambda: next(asked, None) is None)
        with pytest.raises(Cancelled, match="the abort function ended the call"):
            use()
        llm.set_abort(None)
        llm.set_hooks()

    with load(engine.pair(source), t1=1.0, cache_bytes="min", **more) as llm:
        llm.eval(tokens)
        end_early(llm, lambda: llm.eval([4]))
        with pytest.raises(HobbitError, match="cannot go back: call reset"):
            llm.eval([4])
        llm.reset()
        assert np.array_equal(logits(llm), expected)
        end_early(llm, lambda: complete(llm))
        assert complete(llm) == said
