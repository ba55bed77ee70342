"""hobbit chat: a conversation that is kept in a file and goes on where it ended."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

from . import stats
from ._cli_run import Chat, check_sampling, converse, has_template, open_model

COMMANDS = """/again       another reply to what was said last
/undo        take the last turn back
/reset       forget everything but the system prompt
/thresholds T1 T2
/stats       what the expert cache did
/help"""
ROLES = ("system", "user", "assistant")


def add_parser(commands) -> None:
    from .cli import add_model_arguments, add_offload_arguments, add_sampling_arguments

    p = commands.add_parser("chat", help="chat, with a history", description="Chat in the model's template. Commands during the chat:\n\n" + COMMANDS,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", metavar="MODEL.gguf")
    p.add_argument("--history", metavar="FILE.json", help="keep the conversation there, and go on with what is in it")
    p.add_argument("--system", metavar="TEXT", help="how the model is to behave; begins a new conversation where the history has another")
    p.add_argument("--chat-format", metavar="NAME", help="for a model without a chat template, such as chatml")
    add_sampling_arguments(p, "most tokens of a reply (default: until it ends)", "for the same replies again (default: others each time)")
    add_model_arguments(p)
    add_offload_arguments(p)
    p.set_defaults(function=chat)


def read_history(path: str) -> list[dict]:
    """[{"role": ..., "content": ...}]; [] if there is no such file. ValueError for one that holds anything else."""
    try:
        with open(path, encoding="utf-8") as f:
            messages = json.load(f)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{path} holds no conversation: {error}") from None
    good = isinstance(messages, list) and all(isinstance(m, dict) and set(m) == {"role", "content"} and m["role"] in ROLES and isinstance(m["content"], str)
                                              for m in messages)
    if not good:
        raise ValueError(f'{path} holds no conversation: it must be a list of {{"role": "user", "content": "..."}}, with roles {", ".join(ROLES)}')
    return messages


def write_history(path: str, messages: list[dict]) -> None:
    """The file is whole at any time."""
    folder, name = os.path.split(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with open(handle, "w", encoding="utf-8") as f:
            json.dump(messages, f, ensure_ascii=False, indent=1)
            f.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Conversation(Chat):
    """Chat whose oldest turns give way where the context is full, and whose messages are kept in a file."""

    def __init__(self, llm, args):
        super().__init__(llm, args)
        self.path = args.history
        self.messages = read_history(self.path) if self.path else []
        if self.system and self.messages[:1] != self.system:
            self.messages = list(self.system)

    @property
    def n_system(self) -> int:
        return int(self.messages[:1] != [] and self.messages[0]["role"] == "system")

    def reply(self, text):
        """Pieces of the reply; none for a text that does not fit the context alone, which changes nothing."""
        whole, dropped = list(self.messages), 0
        try:
            while True:
                start = len(self.messages)
                try:
                    yield from super().reply(text)
                    break
                except ValueError as error:
                    del self.messages[start:]
                    if "exceed context window" not in str(error):
                        raise
                    if start <= self.n_system:
                        self.messages = whole
                        self.note(f"[this does not fit the context of {self.llm.n_ctx()} tokens, and was not sent]")
                        return
                    del self.messages[self.n_system:self.n_system + 2]
                    dropped += 1
            if dropped:
                self.note(f"\n[the context was full: {dropped} of the oldest turns are forgotten]")
        finally:
            self.keep()

    def keep(self) -> None:
        if self.path:
            write_history(self.path, self.messages)

    def forget(self):
        del self.messages[self.n_system:]
        self.keep()

    def undo(self) -> str | None:
        """Takes the last turn back; what the user had said in it."""
        while len(self.messages) > self.n_system:
            last = self.messages.pop()
            if last["role"] == "user":
                self.keep()
                return last["content"]
        return None

    def command(self, line: str):
        """None: the line is no command. Otherwise what is to be said to the model now, "" for nothing."""
        if not line.startswith("/"):
            return None
        word, *rest = line.split()
        if word == "/again":
            said = self.undo()
            return said if said is not None else self.note("nothing was said yet")
        if word == "/undo":
            said = self.undo()
            return self.note("nothing was said yet" if said is None else f"taken back: {said}")
        if word == "/reset":
            self.forget()
            return self.note("forgotten")
        if word == "/stats":
            return self.note(stats.table(self.llm.offload_stats()))
        if word == "/thresholds":
            try:
                if len(rest) != 2:
                    return self.note("/thresholds takes two numbers, T1 and T2")
                self.llm.thresholds = tuple(map(float, rest))
                return self.note("T1 {:g}, T2 {:g}".format(*self.llm.thresholds))
            except (TypeError, ValueError, RuntimeError) as error:
                return self.note(str(error))
        return self.note(("" if word == "/help" else f"there is no command {word}\n") + COMMANDS)

    @staticmethod
    def note(text: str) -> str:
        print(text, file=sys.stderr)
        return ""


def chat(args) -> int:
    check_sampling(args)
    if args.history:
        read_history(args.history)  # before the model is loaded, which takes long
    with open_model(args, chat_format=args.chat_format) as llm:
        if args.chat_format is None and not has_template(llm):
            raise ValueError(f"{args.model} has no chat template: give --chat-format, or use hobbit run, which continues text")
        talk = Conversation(llm, args)
        if len(talk.messages) > talk.n_system:
            print(f"[{args.history}: {len(talk.messages) - talk.n_system} messages so far]", file=sys.stderr)
        converse(talk, llm)
    return 0
