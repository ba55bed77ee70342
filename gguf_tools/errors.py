"""The one exception type of gguf_tools."""

LONGEST = 1000  # characters of a message


def printable(text: str) -> str:
    """One line without control characters, which names in a stranger's file may have: a terminal would obey them."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST // 2]} ... {text[-LONGEST // 3:]}"


class GGUFError(ValueError):
    """Something about a GGUF file, said in one sentence that names the file."""

    def __init__(self, text: str):
        super().__init__(printable(text))
