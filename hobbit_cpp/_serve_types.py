"""What requests may hold: llama-cpp-python's request types, with what its server lets pass or drops without a word made strict."""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, Literal, Optional, Union

from . import bindings  # noqa: F401  before llama_cpp: it makes llama_cpp use our libraries

import llama_cpp
from llama_cpp.server import types
from pydantic import BaseModel, ConfigDict, Field, field_validator

STRICT = ConfigDict(allow_inf_nan=False)


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Generation(BaseModel):
    """What completions and chats have in common."""

    model_config = STRICT
    stream_options: Optional[StreamOptions] = None

    @field_validator("n", "best_of", check_fields=False)
    @classmethod
    def _only_one(cls, value):
        if value not in (None, 1):
            raise ValueError("one answer at a time: must be 1")
        return value

    @field_validator("stop", check_fields=False)
    @classmethod
    def _stop(cls, value):
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError("an empty text stops before the first token: leave it out")
        return value

    @field_validator("temperature", check_fields=False)
    @classmethod
    def _temperature(cls, value):
        if value < 0:  # llama_cpp would leave the other samplers out
            raise ValueError("must be 0 or more")
        return value

    @field_validator("seed", check_fields=False)
    @classmethod
    def _seed(cls, value):
        if value is not None and not -1 <= value < 2**32:
            raise ValueError("must be from 0 to 4294967295, or -1")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Generation, types.CreateCompletionRequest):
    prompt: Union[str, List[int], List[str]]
    max_tokens: Optional[int] = Field(16, ge=1)

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, value):
        if value and isinstance(value, list) and isinstance(value[0], str):
            if len(value) > 1:
                raise ValueError("one prompt at a time: must be a text, a list with one text, or a list of tokens")
            return value[0]
        return value


class ChatRequest(_Generation, types.CreateChatCompletionRequest):
    messages: List[llama_cpp.ChatCompletionRequestMessage] = Field(min_length=1)
    max_tokens: Optional[int] = Field(None, ge=1)
    max_completion_tokens: Optional[int] = Field(None, ge=1)
    response_format: Optional[Dict[str, Any]] = None

    @field_validator("messages")
    @classmethod
    def _text_only(cls, value):
        for message in value:
            parts = message.get("content")
            if isinstance(parts, list) and any(part.get("type") != "text" for part in parts):
                raise ValueError("content must be text: this server sees no images and hears nothing")
        return value

    @field_validator("response_format")
    @classmethod
    def _form(cls, value):
        """{"type": "json_schema", "json_schema": {"schema": ...}} as llama_cpp wants it."""
        kind = value.get("type") if value else "text"
        if kind == "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict) or "schema" not in inner:
                raise ValueError("json_schema needs {\"schema\": ...}")
            return {"type": "json_object", "schema": inner["schema"]}
        if kind not in ("text", "json_object"):
            raise ValueError("type must be text, json_object or json_schema")
        return value


class EmbeddingRequest(BaseModel):
    model: Optional[str] = None
    input: Union[str, List[str]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Optional[int] = None
    user: Optional[str] = None

    @field_validator("input")
    @classmethod
    def _something(cls, value):
        if not value:
            raise ValueError("there is nothing to embed")
        return value

    @field_validator("dimensions")
    @classmethod
    def _as_the_model(cls, value):
        if value is not None:
            raise ValueError("embeddings have the model's size: leave it out")
        return value


def _names(function):
    return frozenset(inspect.signature(function).parameters) - {"self", "model", "logits_processor"}


COMPLETION, CHAT = _names(llama_cpp.Llama.create_completion), _names(llama_cpp.Llama.create_chat_completion)


def arguments(body: BaseModel, allowed, llm, name: str, most: Optional[int]) -> Dict[str, Any]:
    """For Llama.create_completion or create_chat_completion; ValueError for values that do not fit the model. Uses llm.

    name  the model's, for the answer; most  the server's limit for max_tokens
    """
    given = body.model_dump()
    if body.logprobs is not None and body.logprobs is not False and not llm._logits_all:
        raise ValueError("logprobs need the logits of all tokens: start the server with --logits-all")
    if given.get("max_completion_tokens") is not None:
        given["max_tokens"] = given["max_completion_tokens"]
    result = {k: v for k, v in given.items() if k in allowed and v is not None}
    result["max_tokens"] = min(filter(None, (given["max_tokens"], most)), default=None)
    result["model"] = name
    if body.logit_bias:
        result["logit_bias"] = _bias(body, llm)
    if body.grammar is not None:
        result["grammar"] = llama_cpp.LlamaGrammar.from_string(body.grammar, verbose=False)
    if body.min_tokens > 0:
        result["logits_processor"] = llama_cpp.LogitsProcessorList([llama_cpp.MinTokensLogitsProcessor(body.min_tokens, llm.token_eos())])
    return result


def _bias(body, llm) -> Dict[int, float]:
    if body.logit_bias_type == "tokens":
        return {t: bias for text, bias in body.logit_bias.items() for t in llm.tokenize(text.encode("utf-8"), add_bos=False, special=True)}
    try:
        return {int(t): bias for t, bias in body.logit_bias.items()}
    except ValueError:
        raise ValueError("logit_bias: the keys must be numbers of tokens, or logit_bias_type must be 'tokens'") from None
