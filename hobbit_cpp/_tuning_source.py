"""The ordinary GGUF behind a converted model: the file it links to, or its main file and high copies put together again."""

from __future__ import annotations

import os

from gguf_tools.errors import GGUFError
from gguf_tools.reader import Reader
from gguf_tools.writer import StreamWriter

from ._convert_run import COPY_BYTES


def original(model: str, folder: str, say=lambda text: None) -> str:
    """Path of an ordinary GGUF with the experts of `model`: itself if it is ordinary, else the source that its sidecar links
    to, else a file in `folder` (kept from an earlier run, or written now). GGUFError, OSError."""
    with Reader(model) as main:
        role = main.get("hobbit.role")
        if role is None:
            return model
        if role != "main":
            raise GGUFError(f"{model} is the sidecar of a converted model: name its main file")
        sidecar = os.path.join(os.path.dirname(model), main.get("hobbit.sidecar", kind=str))
        with Reader(sidecar) as experts:
            if experts.get("hobbit.pair_id") != main.get("hobbit.pair_id"):
                raise GGUFError(f"{model} and {sidecar} are halves of different pairs")
            if experts.get("hobbit.link"):
                return os.path.join(os.path.dirname(os.path.realpath(sidecar)), experts.get("hobbit.link.files")[0])
            return _joined(main, experts, folder, say)


def _joined(main: Reader, experts: Reader, folder: str, say) -> str:
    name = os.path.basename(main.path).removesuffix(".gguf")
    out, pair = os.path.join(folder, f"{name}.high.gguf"), main.get("hobbit.pair_id")
    try:
        with Reader(out) as old:
            if old.get("tuning.pair_id") == pair and os.stat(out).st_mtime >= os.stat(experts.path).st_mtime:
                return out
    except (GGUFError, OSError):
        pass
    say(f"making {out}: the high copies as an ordinary GGUF")
    high = [(t.name.removesuffix(".high"), experts, t) for t in experts.tensors.values() if t.name.endswith(".high")]
    parts = [(t.name, main, t) for t in main.tensors.values()] + high
    with StreamWriter(out, main.get("general.architecture"), main.alignment, overwrite=True) as w:
        w.copy_metadata(main, drop=("hobbit.",))
        w.add("tuning.pair_id", pair)
        for name, _, t in parts:
            w.add_tensor(name, t.shape, t.type)
        w.begin_data()
        for name, reader, t in parts:
            for offset in range(0, t.nbytes, COPY_BYTES):
                w.write(name, offset, reader.read(t, offset, min(COPY_BYTES, t.nbytes - offset)))
    return out
