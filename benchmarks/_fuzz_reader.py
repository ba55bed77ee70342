"""The atheris target of fuzz.py: gguf_tools' reader and what goes over its values."""

import os
import pathlib
import sys

import atheris

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
with atheris.instrument_imports(include=["gguf_tools", "hobbit_cpp.verify", "hobbit_cpp._convert_plan"]):
    from gguf_tools import ggml, info, reader
    from hobbit_cpp import _convert_plan, verify
from gguf_tools.errors import GGUFError

HOLE = 1 << 20
PATH = f"fuzzed-{os.getpid()}.gguf"


def one(data: bytes) -> None:
    with open(PATH, "wb") as f:
        f.write(data)
        f.truncate(len(data) + HOLE)
    for call in (info.describe, info.summary, verify.verify, plan):
        try:
            call(PATH)
        except (GGUFError, ggml.GGMLError, _convert_plan.ConvertError) as error:
            if "\n" in str(error):
                raise RuntimeError("an error that is no sentence") from error


def plan(path: str) -> None:
    with reader.Reader(path) as r:
        _convert_plan.check_source(r)
        experts = _convert_plan.find_experts(r)
        _convert_plan.choose_types(r, experts, "<=q8_0", "q2_k", False, True)
        _convert_plan.describe(r, experts)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
