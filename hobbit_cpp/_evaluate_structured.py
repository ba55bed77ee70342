"""Does structured output survive a setting? Two checks: JSON under a grammar, and the structure of tool calls without one.

JSON under a grammar must parse whatever the model is: the grammar admits nothing else, and its texts have a greatest
length, so a text that does not parse is an error in the program. How well the model does is another number: in how many
places its own first choice was what the grammar let it write.

Tool calls without a grammar are not written but read: the model gets a text with calls, and what counts is whether it
expects each token that the shape forces (braces, quotes, keys, tags; not names and values). The first call of each
tool is an example and does not count. So a model that could not think up a call still has a score to lose, and a
setting that breaks the form loses it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from ._evaluate_stats import Value, blocks, exponential, log_softmax, mean, share

# --- JSON under a grammar ---

MAX_CHARS, MAX_ITEMS, MAX_DIGITS = 12, 2, 6  # of a string, a list, a number
RULES = rf'''
string ::= "\"" char{{1,{MAX_CHARS}}} "\""
char ::= [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{{4}})
integer ::= "-"? ("0" | [1-9] [0-9]{{0,{MAX_DIGITS - 1}}})
boolean ::= "true" | "false"
list ::= "[" (string (", " string){{0,{MAX_ITEMS - 1}}})? "]"
'''
LONGEST = {"string": 2 + 6 * MAX_CHARS, "integer": 1 + MAX_DIGITS, "boolean": 5, "list": 2 + MAX_ITEMS * (4 + 6 * MAX_CHARS)}  # bytes; \uXXXX is 6
TYPES = {"string": str, "integer": int, "boolean": bool, "list": list}

RECORDS = (  # (prompt, {key: kind, or the fields of an object in it})
    ("A person as a JSON object with name, age, married and hobbies:\n", {"name": "string", "age": "integer", "married": "boolean", "hobbies": "list"}),
    ("A book as a JSON object with title, author, pages and in_print:\n", {"title": "string", "author": "string", "pages": "integer", "in_print": "boolean"}),
    ("A journey as a JSON object with from, to, days and return:\n", {"from": "string", "to": "string", "days": "integer", "return": "boolean"}),
    ("An order as a JSON object with id, customer (name, member) and items:\n",
     {"id": "integer", "customer": {"name": "string", "member": "boolean"}, "items": "list"}),
)


def grammar_of(fields: dict) -> str:
    """GBNF of an object with these keys, in this order, and bounded values."""
    return f"root ::= {_object(fields)}{RULES}"


def _object(fields: dict) -> str:
    parts = []
    for i, (key, kind) in enumerate(fields.items()):
        before = ("{" if i == 0 else ", ") + json.dumps(key) + ": "
        parts += [json.dumps(before), _object(kind) if isinstance(kind, dict) else kind]
    return " ".join([*parts, '"}"'])


def longest(fields: dict) -> int:
    """Bytes of the longest text of grammar_of(fields), so at least its tokens."""
    return 2 + sum(len(json.dumps(key)) + 4 + (longest(kind) if isinstance(kind, dict) else LONGEST[kind]) for key, kind in fields.items())


def fits(value, fields: dict) -> bool:
    """Is a parsed value an object with these fields, of these kinds?"""
    return isinstance(value, dict) and list(value) == list(fields) and all(
        fits(value[key], kind) if isinstance(kind, dict) else type(value[key]) is TYPES[kind] for key, kind in fields.items())


def parses(text: bytes, fields: dict) -> bool:
    try:
        return fits(json.loads(text), fields)
    except ValueError:
        return False


@dataclass(frozen=True)
class JsonScores:
    """n texts, so many of which parsed as JSON with the right fields; first_choice: share of the tokens that the model would
    have written without the grammar, too. texts: what was written."""
    n: int
    parsed: int
    first_choice: Value
    texts: tuple[str, ...]


def write_json(runner) -> JsonScores:
    from llama_cpp import LlamaGrammar

    texts, parsed, free = [], 0, []
    for prompt, fields in RECORDS:
        grammar = LlamaGrammar.from_string(grammar_of(fields), verbose=False)
        written = list(runner.greedy(runner.tokens(prompt), grammar, longest(fields)))
        text = b"".join(runner.piece(token) for token, _ in written)
        parsed += parses(text, fields)
        free += [token == choice for token, choice in written]
        texts.append(text.decode("utf-8", "replace"))
    return JsonScores(len(RECORDS), parsed, share(np.array(free)), tuple(texts))


# --- tool calls ---

TOOLS = {  # name -> (request, keys, values of each request)
    "get_weather": ("What will the weather be in {} for {} days?", ("city", "days"), [("Paris", 3), ("London", 5), ("Rome", 2)]),
    "send_message": ("Tell {} that {}.", ("to", "text"), [("Mary", "we are late"), ("John", "the door is open"), ("Anna", "dinner is ready")]),
    "find_book": ("Find a book about {} by {}.", ("subject", "author"), [("history", "Gibbon"), ("the sea", "Conrad"), ("war", "Homer")]),
    "set_alarm": ("Wake me at {} and say {}.", ("hour", "text"), [(7, "good morning"), (6, "time to go"), (9, "the train")]),
}
DOCUMENTS = (("get_weather", "send_message"), ("find_book", "set_alarm"), ("send_message", "find_book"), ("set_alarm", "get_weather"))


def document(tools) -> list[tuple[str, int | None]]:
    """A text as pieces (text, number of the call whose structure it is, or None for what does not count)."""
    parts: list[tuple[str, int | None]] = [("Answer each request with a call of one of these tools.\n", None)]
    parts += [(f"{name}({', '.join(TOOLS[name][1])})\n", None) for name in tools]
    n = 0
    for turn in range(len(TOOLS[tools[0]][2])):
        for name in tools:
            request, keys, rows = TOOLS[name]
            call = n if turn else None  # the first of each tool is an example
            n += call is not None
            parts.append((f"\nUser: {request.format(*rows[turn])}\n", None))
            parts += [('<tool_call>\n{"name": "', call), (name, None), ('", "arguments": {', call)]
            for i, (key, value) in enumerate(zip(keys, rows[turn])):
                quote = '"' if isinstance(value, str) else ""
                parts += [(f'{", " if i else ""}"{key}": {quote}', call), (str(value), None), (quote, call)]
            parts.append(("}}\n</tool_call>\n", call))
    return parts


def label(runner, parts) -> tuple[list[int], np.ndarray]:
    """(tokens with the prefix, for each token the call whose structure it is wholly part of, or -1).

    ValueError where the tokens do not spell the text: then nothing can be said about its places.
    """
    text = "".join(t for t, _ in parts).encode("utf-8")
    calls = np.concatenate([np.full(len(t.encode("utf-8")), -1 if call is None else call) for t, call in parts])
    tokens = runner.tokens(text.decode("utf-8"))
    pieces = [runner.piece(t) for t in tokens[1:]]
    spelled = b"".join(pieces)
    if not spelled.endswith(text):
        raise ValueError(f"{runner.llm.model_path}: the tokenizer does not give the tool calls' text back, so their structure cannot be found in it")
    of_token, at = [-1], len(text) - len(spelled)  # some tokenizers put a space before the text
    for piece in pieces:
        here = set(calls[max(at, 0):at + len(piece)].tolist())
        of_token.append(here.pop() if len(here) == 1 else -1)
        at += len(piece)
    return tokens, np.array(of_token)


@dataclass(frozen=True)
class ToolScores:
    """right: share of the structural tokens that were the model's first choice; whole_calls: share of the calls of which all
    were; perplexity: of the structural tokens. Against the reference, None without one: kept, share of what it had right that
    is still right, and ln_ratio, ln(perplexity / the reference's)."""
    n_tokens: int
    n_calls: int
    right: Value
    whole_calls: Value
    perplexity: Value
    kept: Value | None = None
    ln_ratio: Value | None = None


@dataclass(frozen=True)
class Structure:
    """Of each structural token: its call, whether it was the first choice, its negative log probability."""
    call: np.ndarray
    right: np.ndarray
    nll: np.ndarray


def read_calls(runner, labelled) -> Structure:
    """labelled: what label() gave for each document."""
    call, right, nll, before = [], [], [], 0
    for tokens, of_token in labelled:
        at = 1
        for logits in runner.logits(tokens):
            for s in blocks(*logits.shape):
                log_p = log_softmax(logits[s])
                for row in log_p:
                    if of_token[at] >= 0:
                        call.append(before + of_token[at])
                        right.append(row.argmax() == tokens[at])
                        nll.append(-row[tokens[at]])
                    at += 1
        before += of_token.max() + 1
    return Structure(np.array(call), np.array(right), np.array(nll))


def score_calls(found: Structure, reference: Structure | None) -> ToolScores:
    whole = np.array([found.right[found.call == c].all() for c in np.unique(found.call)])
    kept = ratio = None
    if reference is not None:
        kept = share(found.right[reference.right]) if reference.right.any() else None
        ratio = mean(found.nll - reference.nll)
    return ToolScores(len(found.nll), len(whole), share(found.right), share(whole), exponential(mean(found.nll)), kept, ratio)
