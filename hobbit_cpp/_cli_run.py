"""hobbit run: one prompt, or a chat."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings

from . import memory, stats
from .memory import format_budget, format_bytes


def open_model(args, **more):
    """Llama as the arguments say; more: further arguments of its."""
    from .cli import llama_arguments
    from .llama import Llama

    given = llama_arguments(args)
    llm = Llama(args.model, n_ctx=context_of(args), verbose=args.verbose, **given, **more)
    trained = llm._model.n_ctx_train()
    if args.ctx is not None and args.ctx > trained:
        warnings.warn(f"--ctx {args.ctx} is more than the {trained} tokens that the model was trained with", RuntimeWarning, stacklevel=2)
    return llm


def context_of(args) -> int:
    """--ctx, or the model's own context, at most 4096 tokens."""
    from . import _load

    if args.ctx is not None:
        return args.ctx
    metadata = _load.read_metadata(_load.check_path(args.model))
    arch = metadata.get("general.architecture")
    return min(4096, metadata.get(f"{arch}.context_length", 4096, int) or 4096)


def has_template(llm) -> bool:
    return "tokenizer.chat_template" in llm.metadata


def check_sampling(args) -> None:
    """ValueError for numbers that no text can be sampled with: llama.cpp would take some of them for others."""
    for name, good, must in (("tokens", lambda n: n >= 1, "at least 1"), ("temp", lambda x: 0 <= x < math.inf, "0 or more"), ("top_k", lambda n: n >= 0, "0 or more"),
                             ("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1"), ("min_p", lambda x: 0 <= x <= 1, "from 0 to 1"),
                             ("seed", lambda n: 0 <= n < 2**32, "from 0 to 4294967295"), ("repeat_penalty", lambda x: 0 < x < math.inf, "above 0")):
        value = getattr(args, name)
        if value is not None and not good(value):
            raise ValueError(f"--{name.replace('_', '-')} must be {must}, not {value}")


def run(args) -> int:
    check_sampling(args)
    prompt = _prompt(args)
    if args.json and prompt is None:
        raise ValueError("--json is for a prompt: give -p or -f")
    with open_model(args) as llm:
        if args.chat and not has_template(llm):
            raise ValueError(f"{args.model} has no chat template: leave out --chat")
        if llm.profile:
            p = llm.offload_stats()["settings"]
            print(f"[profile {llm.profile}: T1 {p['t1']:g}, T2 {p['t2']:g}, policy {p['policy']}, cache {format_budget(p['cache_bytes'])}]", file=sys.stderr)
        chat = has_template(llm) and not args.raw
        if args.system is not None and not chat:
            raise ValueError("--system needs a chat template" + (": leave out --raw" if args.raw else f", and {args.model} has none: leave it out"))
        talk = (Chat if chat else _Text)(llm, args)
        if args.json:
            text = "".join(talk.reply(prompt))
            print(json.dumps({"text": text, "generation": llm.last_stats, "offload": llm.offload_stats(), "peak_bytes": memory.peak_rss()}, indent=1))
            return 0
        if prompt is None:
            converse(talk, llm)
        else:
            print_stream(talk.reply(prompt))
            if sum(llm.last_generation.lengths) >= llm.n_ctx():
                print(f"[the context of {llm.n_ctx()} tokens is full: --ctx gives more]", file=sys.stderr)
            print(_closing_line(llm), file=sys.stderr)
        if args.stats:
            print(stats.table(llm.offload_stats()), file=sys.stderr)
    return 0


def _prompt(args) -> str | None:
    if args.file is None:
        return args.prompt if args.prompt is None else _checked(args.prompt, "the prompt")
    if args.file == "-":
        return _checked(sys.stdin.read(), "standard input")
    with open(args.file, encoding="utf-8", errors="surrogateescape") as f:
        return _checked(f.read(), args.file)


def _checked(text: str, what: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not valid UTF-8") from None
    return text


class _Sampling:
    def __init__(self, llm, args, default_tokens):
        self.llm = llm
        given = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p", "repeat_penalty", "stop")}
        self.options = {"max_tokens": args.tokens or default_tokens, "temperature": args.temp, "stream": True, **{k: v for k, v in given.items() if v is not None}}
        self.seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed

    def command(self, line):
        """Of a conversation: see _cli_chat.py. None: the line is none."""
        return None

    def next_options(self):
        self.seed = (self.seed + 1) % 2**32
        return {**self.options, "seed": (self.seed - 1) % 2**32}


class _Text(_Sampling):
    """Plain continuation; in a conversation, of everything said so far."""

    def __init__(self, llm, args):
        super().__init__(llm, args, 128)
        self.so_far = ""

    def reply(self, text):
        self.so_far += text
        for chunk in self.llm.create_completion(self.so_far, **self.next_options()):
            piece = chunk["choices"][0]["text"]
            self.so_far += piece
            yield piece

    def forget(self):
        self.so_far = ""


class Chat(_Sampling):
    """Turns in the model's chat template."""

    def __init__(self, llm, args):
        super().__init__(llm, args, None)
        self.system = [] if args.system is None else [{"role": "system", "content": args.system}]
        self.messages = list(self.system)

    def reply(self, text):
        self.messages.append({"role": "user", "content": text})
        said = ""
        try:
            for chunk in self.llm.create_chat_completion(messages=self.messages, **self.next_options()):
                piece = chunk["choices"][0]["delta"].get("content") or ""
                said += piece
                yield piece
        finally:  # what was said before Ctrl-C counts
            self.messages.append({"role": "assistant", "content": said})

    def forget(self):
        self.messages = list(self.system)


def print_stream(pieces) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)


def converse(talk, llm) -> None:
    try:
        import readline  # noqa: F401  line editing for input()
    except ImportError:
        pass
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print("Ctrl-C stops a reply, Ctrl-D leaves." + ("" if isinstance(talk, Chat) else
              " The model has no chat template: it continues what was written."), file=sys.stderr)
    while True:
        try:
            text = input(prompt)
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            print()
            continue
        if not _checked(text, "standard input").strip():
            continue
        said = talk.command(text)
        if said is not None:
            text = said
        if not text:
            continue
        before = llm.last_generation
        try:
            print_stream(talk.reply(text))
            if llm.last_generation is not before:
                print(_closing_line(llm), file=sys.stderr)
        except KeyboardInterrupt:
            print()
        except ValueError as error:
            if "exceed context window" not in str(error):
                raise
            talk.forget()
            print(f"the context of {llm.n_ctx()} tokens is full: starting afresh (--ctx gives more room)", file=sys.stderr)


def _closing_line(llm) -> str:
    last = llm.last_stats
    prompt, decode = last["prompt"], last["decode"]

    def speed(part, name, n):  # n: the last token of a reply is not evaluated
        rate = f", {part['evaluated'] / part['seconds']:.1f} tok/s" if part["evaluated"] and part["seconds"] > 0 else ""
        return f"{name} {n} token{'s' if n != 1 else ''}{rate}"

    parts = [speed(prompt, "prompt", prompt["evaluated"]), speed(decode, "reply", llm.last_generation.lengths[1])]
    if llm.is_offloaded:
        both = stats.counters({k: prompt[k] + decode[k] for k in prompt}, len(llm.offload_stats()["layers"]))
        budget = llm.offload_stats()["budget"]
        parts += [f"hits {100 * both['hit_rate']:.1f} %", f"{format_bytes(both['bytes_per_token'])} read per token",
                  f"experts {format_bytes(used_bytes(budget))} of budget {format_bytes(budget['budget_bytes'])}"]
    parts.append(f"peak memory {format_bytes(memory.peak_rss())}")
    return f"[{'; '.join(parts)}]"


def used_bytes(budget: dict) -> int:
    """What of a budget is really taken: slots, read buffers, bookkeeping."""
    return budget["slot_bytes"] + budget["staging_bytes"] + budget["record_bytes"]
