"""Checkpoint folders of Hugging Face: llama.cpp's own converter makes a GGUF of them, which the rest of the conversion reads.

The converter is that of the pinned llama.cpp; the build puts it beside the libraries (lib/convert_hf).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Iterator

from gguf_tools.writer import raise_exit

from . import _libs
from ._convert_plan import ConvertError
from ._progress import Progress

NEEDED = ("torch", "transformers", "sentencepiece")  # what the converter imports; the extra "hf" of pyproject.toml
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def missing() -> list[str]:
    """Python packages that the converter needs and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def _converter() -> Path:
    path = _libs.lib_dir() / "convert_hf" / "convert_hf_to_gguf.py"
    if not path.is_file():
        raise ConvertError(f"this build lacks llama.cpp's converter of checkpoints ({path}): build hobbit-cpp again, or make a GGUF elsewhere")
    lacking = missing()
    if lacking:
        raise ConvertError(f"a checkpoint folder needs the Python package{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}: "
                           "pip install '.[hf]' in hobbit-cpp's folder, or give a GGUF")
    return path


def weight_bytes(folder: str) -> int:
    """Size of a checkpoint's weights; raises ConvertError if the folder is none."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ConvertError(f"{folder} is a folder without config.json: give a GGUF, or the folder of a Hugging Face checkpoint")
    sizes = [p.stat().st_size for pattern in WEIGHTS for p in Path(folder).glob(pattern)]
    if not sizes:
        raise ConvertError(f"{folder} holds no weights ({' or '.join(WEIGHTS)})")
    return sum(sizes)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends the process by an exception, unless somebody handles it already: nothing must be left behind."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def as_gguf(folder: str, beside: str, progress: bool) -> Iterator[str]:
    """Path of a GGUF of the checkpoint, in 16 bits a weight (or as the checkpoint has it), in a temporary folder of `beside`
    that is gone afterwards. Raises ConvertError with the converter's reason."""
    script, total = _converter(), weight_bytes(folder)
    with _sigterm_unwinds(), tempfile.TemporaryDirectory(prefix=".hobbit-hf-", dir=beside or ".") as temporary, tempfile.TemporaryFile() as log:
        out = os.path.join(temporary, os.path.basename(os.path.realpath(folder)) + ".gguf")
        meter = Progress(total, progress, label="checkpoint")
        child = subprocess.Popen([sys.executable, str(script), folder, "--outfile", out], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
        try:
            while True:
                try:
                    child.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    size = os.path.getsize(out) if os.path.exists(out) else 0
                    meter.add(max(0, min(size, total) - meter.done))
        finally:
            meter.clear()
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode != 0 or not os.path.exists(out):
            log.seek(0)
            lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
            raise ConvertError(f"llama.cpp's converter does not take {folder}: {lines[-1] if lines else f'it ended with status {child.returncode}'}")
        yield out
