"""Writing the synthetic models: quantizing pieces on all cores, one layer's matrix at a time."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from . import ggml
from ._synth_routing import SynthError
from .writer import StreamWriter


def check_types(tensors):
    """Refuse types that ggml cannot make from these rows; done before anything is written."""
    for t in tensors:
        if t.type == "f32":
            continue
        if not ggml.can_quantize(t.type):
            raise SynthError(f"ggml cannot quantize to {t.type}")
        if not ggml.type_info(t.type).fits(t.shape[0]):
            raise SynthError(f"rows of {t.name} have {t.shape[0]} elements, which is not a multiple of "
                             f"the block of {ggml.type_info(t.type).block} of {t.type}")


def write(path, arch, metadata, tensors, overwrite=False, progress=None):
    """Write the file. Memory: a float32 slice of 64 MiB and one quantized expert matrix.

    progress: called with (bytes done, bytes in all).
    """
    threads = os.cpu_count() or 1
    with StreamWriter(path, arch, overwrite=overwrite) as w, ThreadPoolExecutor(threads) as pool:
        for key, kind, value in metadata:
            w.add(key, value, kind)
        for t in tensors:
            w.add_tensor(t.name, t.shape, t.type)
        w.begin_data()
        done = 0

        def put(name, offset, data):
            nonlocal done
            w.write(name, offset, data)
            done += data.nbytes
            if progress:
                progress(done, w.data_size)

        for t in tensors:
            def quantize(rows):
                if t.type == "f32":
                    return np.ascontiguousarray(rows, np.float32)
                weights = np.ones(t.shape[0], np.float32) if ggml.requires_imatrix(t.type) else None
                parts = np.array_split(rows, min(threads, len(rows)))
                return np.concatenate(list(pool.map(lambda p: ggml.quantize(t.type, p, weights), parts)))

            at = 0
            if t.rotations is None:
                for rows in t.pieces():
                    data = quantize(rows)
                    put(t.name, at, data)
                    at += data.nbytes
                continue
            matrix = np.concatenate([quantize(rows) for rows in t.pieces()])
            for r in t.rotations:
                for data in (matrix[r:], matrix[:r]):
                    if len(data):
                        put(t.name, at, data)
                        at += data.nbytes
