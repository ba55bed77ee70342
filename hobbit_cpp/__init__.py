"""hobbit-cpp: mixture-of-experts models that do not fit into memory, with llama.cpp.

    from hobbit_cpp import Llama
    llm = Llama("mixtral.gguf", cache_bytes="8GiB")     # a dual GGUF, made with: hobbit convert
    print(llm("Once upon a time", max_tokens=64)["choices"][0]["text"])
    print(llm.offload_stats()["totals"])

Importing the package itself is cheap; llama_cpp and the libraries are loaded at the first use of Llama
or bindings. Use hobbit_cpp before importing llama_cpp yourself: llama_cpp looks for its libraries once.
"""

import importlib

from ._version import __version__
from .errors import Cancelled, HobbitError

__all__ = ["Cancelled", "HobbitError", "Llama", "__version__", "parse_bytes"]

_WHERE = {"Llama": "llama", "parse_bytes": "memory"}


def __getattr__(name):
    if name in _WHERE:
        return getattr(importlib.import_module("." + _WHERE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
