"""What is wrong with a file's name is told before long work."""

from __future__ import annotations

import os


def check_folder(path) -> None:
    """ValueError where a file of that name could not be made, because its folder is not there."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"the folder {folder} does not exist")


def check_text(path) -> None:
    """OSError where it cannot be read, ValueError where it holds no text."""
    with open(path, "rb") as f:
        if b"\0" in f.read(1 << 16):
            raise ValueError(f"{os.fspath(path)} is no text: it has null characters")
