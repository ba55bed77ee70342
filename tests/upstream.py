"""A pytest plugin under which llama-cpp-python's own tests run here: see test_upstream.py.

HOBBIT_UPSTREAM_MODELS is a JSON file: {"llama": "stock" or "hobbit", "models": {repository: path or null}}. llama_cpp.Llama
becomes hobbit_cpp's where it says so (all high, half of the experts in memory), and a download becomes that file, or a
skip where there is none.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import types

import pytest

import hobbit_cpp.llama

import llama_cpp

PLAN = json.loads(pathlib.Path(os.environ["HOBBIT_UPSTREAM_MODELS"]).read_text(encoding="utf-8"))


class Llama(hobbit_cpp.llama.Llama):
    def __init__(self, model_path, **kwargs):
        if str(model_path) in PLAN["offloaded"]:
            kwargs = {"t1": 1.0, "cache_bytes": "50%", **kwargs}
        super().__init__(model_path, **kwargs)
        assert self.is_offloaded == (str(model_path) in PLAN["offloaded"])


if PLAN["llama"] == "hobbit":
    llama_cpp.Llama = Llama


def hf_hub_download(repo_id, filename):
    path = PLAN["models"].get(repo_id)
    if path is None:
        pytest.skip(f"expects what {repo_id} says")
    return path


# what the tests import at their top: the first they call, of the second they use nothing
sys.modules["huggingface_hub"] = types.SimpleNamespace(hf_hub_download=hf_hub_download)
sys.modules["scipy"] = types.ModuleType("scipy")
sys.modules["scipy.special"] = types.SimpleNamespace(log_softmax=None)
