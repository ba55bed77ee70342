"""Llama: llama-cpp-python's class, with routed experts offloaded at two precisions.

    from hobbit_cpp import Llama
    llm = Llama("mixtral.gguf", n_ctx=4096, cache_bytes="8GiB", t1=0.6, t2=0.9)

Everything llama_cpp.Llama can do works as there: completion, chat, streaming, embeddings, grammars,
states. Ordinary GGUFs load and behave as with llama_cpp.Llama.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading

from . import bindings as b  # before llama_cpp: it makes llama_cpp use our libraries

import llama_cpp
import numpy as np

from . import _load, _log, _sampling, stats
from ._abort import Abort
from ._hooks import Hooks
from ._parts import CLOSED, Closed, Context, Generation, watch_forks
from ._turns import Turns
from .errors import Cancelled, HobbitError
from .settings import MISS, POLICIES, PREFETCH_COPY, Settings, check_bool, check_int, check_policy, check_thresholds
from .verify import verify_main

__all__ = ["Cancelled", "HobbitError", "Llama"]

PRECISION = {"low": b.HOBBIT_LOW, "high": b.HOBBIT_HIGH}


class Llama(llama_cpp.Llama):
    """A model; arguments and methods of llama_cpp.Llama, and those below.

    Args:
        model_path: The main file of a dual GGUF (made by `hobbit convert`), or an ordinary GGUF. A str or path.
        t1: Of a token's experts, those whose larger ones sum up to at most t1 of the gate weights are wanted at
            high precision. 0 or more, default 0.6; 1 or more: all of them, which gives llama.cpp's own results.
        t2: Beyond t1, up to t2 experts are wanted at low precision, beyond t2 they are skipped. At least t1,
            default 1.0: nothing is skipped.
        skip_mass: Of a token's gate weights in a layer at most this share is skipped, 0 or more, default 1: no bound.
            Experts beyond t2 that are in a slot serve anyway; of those that are not the lightest are skipped up to
            this share, the others are wanted at low precision.
        cache_bytes: Memory for experts (slots, buffers, bookkeeping): bytes as int; "8GiB", "512MiB", "1.5G"
            (powers of 1024) or "8GB" (powers of 1000); "25%" of all experts at high precision; "min", the least
            that works; "auto" (default), what the machine or its container has left after the rest of the model.
        policy: Which copy gives up its slot: "hobbit" (default), "follow" (learns which experts follow which, in memory
            that is part of cache_bytes), "lcu", "lfu" or "lru".
        policy_weights: For "hobbit": four numbers of at least 0 that weigh recency, frequency, uses at high
            precision and layer distance. Default: equal.
        low_fraction: Share of cache_bytes for slots of low copies, 0 to 1, default 0: as few as one step needs.
        n_io_threads: Reads in flight, 1 to 64, default 4.
        direct_io: Read past the page cache where the file system can, default True.
        force_miss: Load every expert anew each time, to measure the worst case. Default False.
        verify: Compare the main file at load, and every expert when it is read, with the checksums that the converter wrote
            (hobbit verify compares all at once). Damage then raises ValueError at load, HobbitError later. Default False.
        host_copies: Hold both copies of all experts in host memory, pinned where a GPU takes them from there: True or
            False; a size as for cache_bytes: so much memory for some of them, a second level between the file and the
            slots; "auto" (default): where the slots are on a GPU, all if the memory is there, else as many as fit.
        unified_memory: The GPU has no memory of its own (Jetson, APU): experts are read from the file into slots that CPU and GPU both see,
            and there are no copies beside them. True or False, or "auto" (default): what the device says. True on another GPU works, at
            the speed of the bus.
        miss: Who serves a miss when all copies are in host memory: "fetch" brings it into a slot, "cpu" lets the
            CPU compute it (and holds the copies for that), "auto" (default) divides a layer's misses by the measured
            speeds. Without all copies there every miss is fetched; offload_stats() says what is in force.
        admit: Does an expert that the CPU computed also get a slot: "never", "free" (while slots are free), or "often"
            (default), also where it is used more than twice as often as the expert it would push out.
        preload: Read the experts into their slots at load where the slots of a group of layers hold them all. Those
            layers then run as in llama.cpp, without a look at the routing, and all their requests count as wanted and
            served at high precision. True, False, or "auto" (default): where the slots are on a GPU.
        cpu_batch: Tokens of the largest batch whose misses the CPU computes, 1 to 512, default 16; larger ones are fetched.
        miss_speeds: (link, CPU) in bytes/s, to divide misses by instead of measured speeds.
        prefetch: Layers ahead whose experts are predicted while a few tokens are decoded (batches of up to 4), and loaded when the storage is
            idle: 0 to 3, default 0, or "auto": as many as were right often enough lately. The next layers' routers, applied to
            the running layer's input, are right about 6 to 8 times in 10 (docs/prefetch.md).
        prefetch_copy: Which copies of predicted experts are loaded: "rule" (default), as on a miss, low ones first; "low", only those that
            are wanted low; "high", at high precision all that are not to be skipped.
        prefetch_ranks: Of what is predicted for a token and layer, load at most so many experts, the heaviest; default 1, 0: all.
        prefetch_prompts: Load the next layers' experts ahead while a prompt is processed. Default True.
        lean: Routing leans to residents: in batches of up to 4 tokens, experts whose high copy is in a slot get so much of the spread of the
            router's logits as a bonus when experts are chosen, 0 to 1; default 0: off. A token's best expert and the gate weights stay
            as they are. Changes the output with t1=1, too (docs/prefetch.md has what it costs and saves).
        profile: False: leave aside the settings that `hobbit calibrate` wrote beside the model (NAME.profile.json). By
            default they take the place of the defaults of t1, t2, policy, policy_weights, low_fraction and cache_bytes;
            what is given here comes first. The attribute `profile` says which file was used, None if none.

    For a dual GGUF use_mmap is False unless given: what stays resident then lies in memory that the page
    cache cannot push out.

    One thread at a time computes: a call while another thread's runs raises HobbitError. Statistics, settings and cancel() are
    for every thread at any time, and close() waits for the token or batch being computed. A generation ends when something else
    is computed with the model: the stream raises HobbitError when it is asked for more.

    Raises:
        TypeError: an unknown argument, or a value of the wrong type.
        ValueError: a value out of range; a file that is missing, damaged or not half of a pair; a budget below
            the floor (stated in bytes); an offload argument for an ordinary GGUF.
    """

    def __init__(self, model_path, *, t1=None, t2=None, skip_mass=None, cache_bytes=None, policy=None, policy_weights=None, low_fraction=None,
                 n_io_threads=None, direct_io=None, force_miss=None, verify=None, host_copies=None, unified_memory=None, miss=None, admit=None,
                 preload=None, cpu_batch=None, miss_speeds=None, prefetch=None, prefetch_copy=None, prefetch_ranks=None,
                 prefetch_prompts=None, lean=None, profile=None, **kwargs):
        self._stack = contextlib.ExitStack()  # close() works on an object that got no further
        self._turns = Turns()
        self._current = None  # the generation whose tokens are in the context
        self._stepping = False
        self._engine = None
        self._hooks = None
        self.last_generation = None
        self._evaluated = 0
        self._broken = False  # the state of a recurrent model, by a pass that ended early
        self._closed = ""  # why nothing works any more
        _load.check_keywords(kwargs)
        self._settings = Settings(t1=t1, t2=t2, skip_mass=skip_mass, cache_bytes=cache_bytes, policy=policy, policy_weights=policy_weights,
                                  low_fraction=low_fraction, n_io_threads=n_io_threads, direct_io=direct_io, force_miss=force_miss, verify=verify,
                                  host_copies=host_copies, unified_memory=unified_memory, miss=miss, admit=admit, preload=preload,
                                  cpu_batch=cpu_batch, miss_speeds=miss_speeds,
                                  prefetch=prefetch, prefetch_copy=prefetch_copy, prefetch_ranks=prefetch_ranks,
                                  prefetch_prompts=prefetch_prompts, lean=lean)
        self.profile, self._use_profile = None, profile is None or check_bool("profile", profile)
        path = _load.check_path(model_path)
        if kwargs.get("lora_path") is not None:
            kwargs["lora_path"] = _load.check_path(kwargs["lora_path"], "lora_path")
            _load.read_metadata(kwargs["lora_path"])
        metadata = _load.read_metadata(path)
        _load.check_chat_format(kwargs.get("chat_format"), metadata)
        if metadata.get("hobbit.role") == "experts":
            raise ValueError(f"{path}: is a sidecar: name the main file that belongs to it")
        dual = metadata.get("hobbit.role") == "main"
        if metadata.get("hobbit.role") is None and self._settings.given:
            name = next(iter(self._settings.given))
            raise ValueError(f"{path} is an ordinary GGUF: convert it first (hobbit convert), or leave out {name}")
        self._sidecar = _load.check_sidecar(path, metadata) if dual else None

        params = None
        _load.check_vocabulary(metadata, path)
        if not kwargs.get("vocab_only"):
            _load.check_types(metadata, path, kwargs.get("n_gpu_layers"))
            _load.check_floats(metadata, path)
            n_used = _load.check_used_experts(kwargs.get("kv_overrides"), metadata)
            need = _load.need_of(metadata, path, kwargs, n_used)
            _load.check_context(need, kwargs)
            if dual:
                if self._settings.verify:
                    verify_main(path)
                if self._use_profile:
                    self._settings, self.profile = _load.apply_profile(self._settings, path, metadata)
                params = _load.make_params(self._settings, path, need, n_used, kwargs.get("n_gpu_layers"))
        if dual:
            kwargs.setdefault("use_mmap", False)
        del metadata
        self._load(path, params, kwargs)
        if self._n_ctx > len(self.input_ids):  # llama.cpp rounds n_ctx up, and prompts are checked against that
            self.input_ids = np.ndarray((self._n_ctx,), dtype=np.intc)
            if self._logits_all:
                self.scores = np.ndarray((self._n_ctx, self._n_vocab), dtype=np.single)
        self._engine = b.hobbit_from_model(self._model.model)
        if self._engine:
            self._ctx.__class__ = Context
            self._ctx.engine, self._ctx.abort = self._engine, Abort(self._turns)
            b.hobbit_set_abort(self._engine, self._ctx.ctx, self._ctx.abort.c, None)
            watch_forks(self)
        if self.verbose and sys.stderr is not None:
            print(stats.one_line(self.offload_stats()), file=sys.stderr)

    def _load(self, path, params, kwargs):
        verbose = kwargs.get("verbose", True)
        _load.set_load_params(params)  # of this thread; also forgets the last error
        try:
            with _log.errors(show=verbose) as lines:
                super().__init__(path, **kwargs)
                if self.lora_path and not self._lora_adapter:  # a null pointer object, which the base takes for an adapter
                    raise RuntimeError(f"Failed to load the LoRA adapter {self.lora_path}")
            if self._lora_adapter:  # before the model, also where the garbage collector finds that first
                self._model._exit_stack.callback(llama_cpp.llama_adapter_lora_free, self._lora_adapter)
                self._lora_adapter = None
        except Exception as error:
            reason = _load.last_error(path)
            if isinstance(error, OSError) and not reason:  # too many open files, say
                reason = f"{path}: {error.strerror or error}"
            self.close()
            if isinstance(error, (ValueError, OSError)) and reason:
                raise ValueError(reason) from None
            if type(error) in (ValueError, RuntimeError) and lines:
                raise type(error)(f"{path}: {error} ({lines[-1]})") from None
            raise
        except BaseException:
            self.close()
            raise
        finally:
            b.hobbit_set_load_params(None)

    # --- llama_cpp.Llama's, with more care ---

    @contextlib.contextmanager
    def _run(self):
        """Around everything that computes or changes the context."""
        with self._turns.run():
            if not self._stepping:
                self._current = None
            yield

    def _not_in_a_hook(self, what):
        if self._hooks is not None and self._hooks.thread == threading.get_ident():
            raise RuntimeError(f"a hook must not {what} the model that called it")

    def _check_tokens(self, tokens):
        """llama.cpp aborts, or says -1, for tokens that do not exist."""
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self._n_vocab:
            wrong = next(t for t in tokens if not 0 <= t < self._n_vocab)
            raise ValueError(f"token {wrong} is not in the vocabulary of {self._n_vocab}")

    def detokenize(self, tokens, *args, **kwargs):
        if not self._closed:
            self._check_tokens(tokens)
        return super().detokenize(tokens, *args, **kwargs)

    def _init_sampler(self, *args, logits_processor=None, grammar=None, **kwargs):
        if grammar is not None:
            _sampling.check_grammar(self._model, grammar)
        if logits_processor is not None:
            logits_processor = _sampling.Processors(logits_processor)
        sampler = super()._init_sampler(*args, logits_processor=logits_processor, grammar=grammar, **kwargs)
        sampler.__class__ = _sampling.Sampler
        sampler.processors = logits_processor
        sampler.candidates = self._candidates if grammar is not None else None
        return sampler

    def eval(self, tokens):
        self._not_in_a_hook("run")
        self._check_tokens(tokens)
        if self._broken:
            raise HobbitError("the last forward pass ended early, and the state of a recurrent model cannot go back: call reset() and evaluate the text again")
        with self._run():
            try:
                for i in range(0, max(1, len(tokens)), self.n_batch):
                    self._turns.check()
                    part = tokens[i:i + self.n_batch]
                    super().eval(part)
                    self._evaluated += len(part)
            except BaseException:
                self._requires_eval = True  # the logits of the pass before are gone
                self._broken = bool(self._is_recurrent or self._is_hybrid) and not self._closed
                raise

    def reset(self):
        with self._run():
            super().reset()
            self._broken = False

    def sample(self, *args, **kwargs):
        with self._turns.run():
            return super().sample(*args, **kwargs)

    def save_state(self):
        with self._turns.run():
            return super().save_state()

    def load_state(self, state):
        with self._run():
            super().load_state(state)
            self._broken = False

    def embed(self, *args, **kwargs):
        with self._run():
            return super().embed(*args, **kwargs)

    def generate(self, tokens, *args, reset=True, **kwargs):
        if not len(tokens) and (reset or self.n_tokens == 0):
            raise ValueError("the prompt is empty: there is no token to go on from")
        if reset and self._broken:
            self.reset()
        mine = sent = None
        generator = super().generate(tokens, *args, reset=reset, **kwargs)
        try:
            while True:
                with self._turns.run():
                    if mine is None:
                        mine = self._current = self.last_generation = Generation(self, len(tokens))
                    if self._current is not mine and not self._closed:
                        raise HobbitError("this generation is over: something else was computed with the model before it ended")
                    self._turns.check()
                    self._stepping = True
                    try:
                        token = generator.send(sent)
                    except StopIteration:
                        return
                    finally:
                        self._stepping = False
                        mine.mark()
                    mine.lengths[1] += not llama_cpp.llama_vocab_is_eog(self._model.vocab, token)
                sent = yield token
        finally:
            generator.close()

    def _create_completion(self, *args, **kwargs):
        """A call that does not stream is one step of this: other threads stay out until it ends."""
        bias = kwargs.get("logit_bias")
        if bias:
            self._check_tokens([int(token) for token in bias])
        steps = super()._create_completion(*args, **kwargs)
        try:
            while True:
                with self._turns.run():
                    try:
                        part = next(steps)
                    except StopIteration:
                        return
                yield part
        finally:
            steps.close()

    def create_chat_completion(self, messages, *args, **kwargs):
        _sampling.check_schema(kwargs.get("response_format"))
        return super().create_chat_completion(messages, *args, **kwargs)

    def cancel(self):
        """End the call that another thread is in: it raises Cancelled, with offloaded experts within a tenth of a second or the
        operation that is being computed, else after the token or the batch of a prompt. Nothing happens where none runs. The
        object stays usable."""
        self._turns.stop(Cancelled("the call was cancelled"))

    def close(self):
        """Free the model; what another thread may be computing ends as by cancel(). Every later call raises RuntimeError."""
        self._not_in_a_hook("close")
        self._turns.stop(RuntimeError(CLOSED))
        with self._turns.end():
            super().close()
            if not self._closed:
                self._abandon(CLOSED)

    def _abandon(self, why):
        self._closed = why
        self._engine = self._hooks = None
        self._ctx = self._model = self._batch = Closed(why)
        if isinstance(getattr(self, "tokenizer_", None), llama_cpp.LlamaTokenizer):
            self.tokenizer_ = Closed(why)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __getstate__(self):
        given = dict(self._settings.given)
        if given.get("policy", "hobbit") != "hobbit":
            given.pop("policy_weights", None)
        return {**super().__getstate__(), **given, "profile": self._use_profile}

    # --- offloading ---

    @property
    def is_offloaded(self) -> bool:
        """Are this model's experts offloaded?"""
        return bool(self._engine)

    @contextlib.contextmanager
    def _offload(self):
        """The engine, which is not freed meanwhile; RuntimeError if there is none."""
        with self._turns.look():
            if self._closed:
                raise RuntimeError(self._closed)
            if not self._engine:
                raise HobbitError(f"{self.model_path} is an ordinary GGUF: its experts are not offloaded; convert it first (hobbit convert)")
            yield self._engine

    def _check(self, code, kind):
        if code < 0:
            raise kind(b.hobbit_last_error().decode("utf-8", "replace"))
        return code

    def _params(self):
        params = b.hobbit_params()
        with self._offload() as engine:
            b.hobbit_get_params(engine, params)
        return params

    @property
    def t1(self) -> float:
        """As in the constructor; may be set at any time, as thresholds."""
        return self.thresholds[0]

    @t1.setter
    def t1(self, value):
        self.thresholds = (value, self.t2)

    @property
    def t2(self) -> float:
        return self.thresholds[1]

    @t2.setter
    def t2(self, value):
        self.thresholds = (self.t1, value)

    @property
    def thresholds(self) -> tuple[float, float]:
        """(t1, t2), as in the constructor; may be set at any time, between tokens too."""
        p = self._params()
        return _plain(p.t1), _plain(p.t2)

    @thresholds.setter
    def thresholds(self, value):
        if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 2:
            raise TypeError(f"thresholds must be a pair (t1, t2), not {value!r}")
        t1, t2 = check_thresholds(*value)
        with self._offload() as engine:
            self._check(b.hobbit_set_thresholds(engine, t1, t2), ValueError)
        self._settings.given.update(t1=t1, t2=t2)

    @property
    def policy(self) -> str:
        """Name of the eviction policy; may be set."""
        return POLICIES[self._params().policy]

    @policy.setter
    def policy(self, name):
        self.set_policy(name)

    def set_policy(self, name, weights=None):
        """Change the eviction policy; weights as policy_weights in the constructor, None keeps those in force.
        ValueError for "follow" where the model was not loaded with it: it learns from the load on."""
        number, weights = check_policy(name, weights)
        c_weights = None if weights is None else (ctypes.c_float * 4)(*weights)
        with self._offload() as engine:
            self._check(b.hobbit_set_policy(engine, number, c_weights), ValueError)
        given = self._settings.given
        given["policy"] = name
        if weights is not None:
            given["policy_weights"] = weights

    def set_hooks(self, *, select=None, prefetch=None, event=None):
        """Functions that see and steer the cache; replaces all earlier ones, without arguments removes them.

        select(layer, experts, weights, wanted)   before the lookup, once a layer and batch. Arrays [n_tokens, n_used]:
                                   experts int32, weights float32 (of a token they sum to 1), wanted int32: the rule's
                                   choice, 0 skip, 1 low, 2 high; may be changed, or a new array returned.
        prefetch(layer, experts, weights)   after this layer's loads were queued; may call self.prefetch().
        event(kind, layer, expert, precision, slot)   kind "hit", "load", "evict", "skip", "prefetch" or "cpu" (computed by
                                   the CPU, whole or in part; slot -1); precision "high", "low" or "skip".

        layer counts layers with offloaded experts. The arrays are the function's own. An exception raised in a hook
        ends the forward pass and comes out of the call that needed it. Hooks must not run the model, close it or
        change its hooks; event must not call self.prefetch() either.
        """
        self._not_in_a_hook("change the hooks of")
        with self._turns.run(), self._offload() as engine:
            hooks = Hooks(select, prefetch, event) if select or prefetch or event else None
            b.hobbit_set_hooks(engine, hooks.c if hooks else None)
            self._hooks = self._ctx.hooks = hooks

    def set_abort(self, function):
        """function() is asked while the model computes or waits for storage, at most twenty times a second: true ends the call, which raises
        Cancelled; an exception ends it, too, and comes out of it. None: no function. Ctrl-C and cancel() need none."""
        if function is not None and not callable(function):
            raise TypeError(f"abort must be a function or None, not {function!r}")
        with self._offload():
            self._ctx.abort.function = function

    def prefetch(self, layer: int, expert: int, precision: str = "high") -> bool:
        """Ask for a copy to be loaded when the storage is idle. False: it is there, or no slot can be spared. RuntimeError in an event hook."""
        if precision not in PRECISION:
            raise ValueError(f"precision must be 'low' or 'high', not {precision!r}")
        layer, expert = check_int("layer", layer, 0, 2**31 - 1), check_int("expert", expert, 0, 2**31 - 1)
        if self._hooks is not None and self._hooks.thread == threading.get_ident() and self._hooks.running == "event":
            raise RuntimeError("an event hook must not load experts: it is told in the middle of a change; use a prefetch hook")
        with self._offload() as engine:
            return bool(self._check(b.hobbit_prefetch(engine, layer, expert, PRECISION[precision]), ValueError))

    @contextlib.contextmanager
    def trace(self, path):
        """with llm.trace("routing.npy"): ...   (see start_trace)"""
        self.start_trace(path)
        try:
            yield self
        finally:
            if not self._closed:
                self.stop_trace()

    def start_trace(self, path):
        """Record the routing of every token from now on as a NumPy file: numpy.load(path) has one row per token and
        layer, with the fields seq, pos, layer, expert [n_used] and weight [n_used]. The file appears at stop_trace()
        or close(). Raises HobbitError where it cannot be written or a trace is running."""
        with self._offload() as engine:
            name = os.fsencode(path)
            if b"\0" in name:
                raise ValueError(f"{path!r} is no name of a file")
            self._check(b.hobbit_trace_start(engine, name), HobbitError)

    def stop_trace(self):
        with self._offload() as engine:
            self._check(b.hobbit_trace_stop(engine), HobbitError)

    def _raw(self) -> dict:
        s = b.hobbit_stats()
        with self._offload() as engine:
            b.hobbit_get_stats(engine, s)
        return _dict(s)

    def reset_offload_stats(self):
        """Set all counters to 0."""
        with self._offload() as engine:
            b.hobbit_reset_stats(engine)

    @property
    def last_stats(self):
        """The last generation (a completion, chat reply or generate()): {"prompt": ..., "decode": ...}, None before the
        first. Both have "seconds" and "evaluated", the tokens that went through the model, and with offloaded experts
        the counters of offload_stats()["totals"]. The prompt's part ends with the first new token."""
        return None if self.last_generation is None else self.last_generation.report()

    def offload_stats(self) -> dict:
        """What is set up and what was counted since the load or the last reset; plain values only.

        mode      "mixed", "high" (t1 >= 1) or "none" (ordinary GGUF; then only mode and model are there)
        model, sidecar   paths
        settings  t1, t2, skip_mass, policy, policy_weights, low_fraction, n_io_threads, direct_io (in force), force_miss, verify, cache_bytes (as given),
                  prefetch, prefetch_copy, prefetch_ranks, prefetch_prompts, lean, profile (path, None if none was used), miss, miss_speeds (None where
                  neither was measured nor given), host_copies, host_pinned and unified_memory (in force)
        budget    budget_bytes, floor_bytes, slot_bytes, staging_bytes, record_bytes, high_bytes, low_bytes (all experts)
        groups    per set of alike layers: slots, resident copies, types, bytes of an expert, backend
        totals    counters (stats.py)
        layers    counters of each layer with offloaded experts, and its block number in the model
        """
        with self._turns.look():
            if not self._closed and not self._engine:
                return {"mode": "none", "model": self.model_path}
        with self._offload() as engine:
            return self._report(engine)

    def _report(self, engine) -> dict:
        p, info = self._params(), b.hobbit_info()
        b.hobbit_get_info(engine, info)
        groups, layers = [], []
        for i in range(info.n_groups):
            g = b.hobbit_group_info()
            self._check(b.hobbit_get_group(engine, i, g), HobbitError)
            g = {k: v.decode() if isinstance(v, bytes) else v for k, v in _dict(g).items()}
            g["backend"] = g.pop("buffer_type")
            groups.append(g)
        for i in range(info.n_layers):
            s = b.hobbit_stats()
            self._check(b.hobbit_get_layer_stats(engine, i, s), HobbitError)
            layers.append({"block": b.hobbit_get_layer_block(engine, i), **stats.counters(_dict(s), 1)})
        return {
            "mode": "high" if p.t1 >= 1 else "mixed",
            "model": self.model_path,
            "sidecar": self._sidecar,
            "settings": {
                "t1": _plain(p.t1), "t2": _plain(p.t2), "skip_mass": _plain(p.skip_mass), "policy": POLICIES[p.policy],
                "policy_weights": [_plain(w) for w in p.policy_weights] if POLICIES[p.policy] == "hobbit" else None,
                "low_fraction": _plain(p.low_fraction), "n_io_threads": p.n_io_threads, "direct_io": bool(info.direct_io),
                "force_miss": bool(p.force_miss), "verify": bool(p.verify), "cache_bytes": self._settings.cache_bytes,
                "prefetch": "auto" if p.prefetch < 0 else p.prefetch, "prefetch_copy": PREFETCH_COPY[p.prefetch_copy],
                "prefetch_ranks": p.prefetch_ranks, "prefetch_prompts": bool(p.prefetch_prompts), "lean": _plain(p.lean),
                "profile": self.profile, "miss": MISS[info.miss],
                "miss_speeds": [info.link_speed, info.cpu_speed] if info.cpu_speed > 0 else None, "host_copies": info.host_bytes > 0, "host_pinned": bool(info.host_pinned), "unified_memory": bool(info.unified),
            },
            "budget": {k: v for k, v in _dict(info).items() if k.endswith("_bytes")},
            "groups": groups,
            "totals": stats.counters(self._raw(), info.n_layers),
            "layers": layers,
        }


def _dict(structure) -> dict:
    return {name: getattr(structure, name) for name, _ in structure._fields_}


def _plain(x: float) -> float:
    """A C float as it was written: 0.6, not 0.6000000238."""
    return float(f"{x:.7g}")
