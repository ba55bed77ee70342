"""llama_cpp's sampler without its ways to end the process or to lose an error.

There a grammar that does not parse is a null pointer (a crash at the first token), one that no token can satisfy ends in a C++
exception (abort), and what a logits processor raises is printed and forgotten.
"""

from __future__ import annotations

import ctypes
import json

from . import bindings as b  # noqa: F401  before llama_cpp: it makes llama_cpp use our libraries

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals

from . import _log
from .errors import HobbitError


def check_grammar(model, grammar) -> None:
    """ValueError unless llama.cpp can use it, TypeError for anything but a LlamaGrammar."""
    if not isinstance(grammar, llama_cpp.LlamaGrammar):
        raise TypeError(f"grammar must be a llama_cpp.LlamaGrammar (LlamaGrammar.from_string(text)), not {type(grammar).__name__}")
    with _log.errors(show=False) as lines:
        sampler = llama_cpp.llama_sampler_init_grammar(model.vocab, grammar._grammar.encode("utf-8"), grammar._root.encode("utf-8"))
    if not sampler:
        raise ValueError("the grammar cannot be used" + (f": {lines[-1]}" if lines else "; llama.cpp's log says why"))
    llama_cpp.llama_sampler_free(sampler)


def check_schema(response_format) -> None:
    """ValueError for a JSON schema that llama_cpp cannot turn into a grammar: it would take that of any JSON."""
    if isinstance(response_format, dict) and "schema" in response_format:
        try:
            llama_cpp.LlamaGrammar.from_json_schema(json.dumps(response_format["schema"]), verbose=False)
        except Exception as error:  # it asserts, and looks up what is not there
            raise ValueError(f"the JSON schema of response_format cannot be used: {error or type(error).__name__}") from None


class Processors(list):
    """A LogitsProcessorList whose members' exception is kept in .error; they are not called again after one."""

    def __init__(self, processors):
        super().__init__(self._kept(p) for p in processors)
        self.error = None

    def _kept(self, processor):
        def call(input_ids, scores):
            if self.error is None:
                try:
                    return processor(input_ids, scores)
                except BaseException as error:  # KeyboardInterrupt, too
                    self.error = error
            return scores
        return call


class Sampler(internals.LlamaSampler):
    """An internals.LlamaSampler becomes one by its __class__. Members to set:

    processors  Processors, or None
    candidates  internals.LlamaTokenDataArray where there is a grammar, else None
    """

    processors = candidates = None

    def sample(self, ctx, idx=-1):
        with _log.errors(show=False):
            logits = ctx.get_logits_ith(idx)
        if not logits:
            raise RuntimeError("there are no logits to sample from: eval() comes first, and gives the last token's unless logits_all=True")
        token = super().sample(ctx, idx) if self.candidates is None else self._constrained(logits)
        if self.processors is not None and self.processors.error is not None:
            raise self.processors.error
        return token

    def _constrained(self, logits) -> int:
        """llama_sampler_sample(), but a token that is not allowed is not accepted."""
        c = self.candidates
        c.copy_logits(np.ctypeslib.as_array(logits, (c.n_vocab,)))
        array = llama_cpp.llama_token_data_array(data=c.candidates.data, size=c.n_vocab, selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self.sampler, ctypes.byref(array))
        token = array.data[array.selected] if 0 <= array.selected < array.size else None
        if token is None or not np.isfinite(token.logit):
            raise HobbitError("no token is left that the grammar and the logits processors allow")
        self.accept(token.id)
        return token.id
