"""The one exception type of gguf_tools."""


class GGUFError(ValueError):
    """Something about a GGUF file, said in one sentence that names the file."""
