"""Files of the pinned llama.cpp that are not built: from HOBBIT_LLAMA_CPP_SOURCE, or from the source distribution that the
build fetched (and fetches here if it is gone)."""

from __future__ import annotations

import functools
import importlib.util
import os
import tarfile
from pathlib import Path

import engine

REPO = Path(__file__).resolve().parent.parent


class NoSource(Exception):
    """Why there is no source, in one sentence."""


@functools.lru_cache(maxsize=None)
def _prepare():
    spec = importlib.util.spec_from_file_location("prepare_llama_cpp", REPO / "cmake" / "prepare_llama_cpp.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.lru_cache(maxsize=None)
def root(*names: str) -> Path:
    """A folder with these files and folders of llama.cpp, at their places. Raises NoSource."""
    prepare = _prepare()
    version, digest = prepare.read_pin(REPO / "hobbit_cpp" / "_version.py")
    source = Path(os.environ["HOBBIT_LLAMA_CPP_SOURCE"]) if os.environ.get("HOBBIT_LLAMA_CPP_SOURCE") else None
    try:
        if source and source.is_dir():
            return prepare.find_root(source, version)
        if source:
            prepare.check_sdist(source, digest)
        sdist = source or prepare.fetch_sdist(REPO / "build" / "download", version, digest)
    except (prepare.PrepareError, OSError) as error:
        raise NoSource(f"no source of llama.cpp: {error}") from None
    out = engine.cache_dir() / f"llama.cpp-{len(list(engine.cache_dir().iterdir()))}"
    with tarfile.open(sdist) as tar:
        for member in tar:
            name = member.name.partition("/vendor/llama.cpp/")[2]
            if member.isfile() and ".." not in name.split("/") and any(name == n or name.startswith(n + "/") for n in names):
                path = out / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(member).read())
    return out
