"""Convert a model of gguf_tools.synth, whose experts are row rotations of one matrix, in a fraction of the time.

    python benchmarks/_pair.py SRC.gguf OUT.gguf q2_k

Gives the very bytes of `python -m hobbit_cpp.convert SRC.gguf -o OUT.gguf --high keep --low q2_k`: headers come from
there, and ggml quantizes row by row, so the low copy of a rotated expert is the rotated low copy. An expert that is no
rotation of its tensor's first one is quantized in the ordinary way.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from gguf_tools import ggml  # noqa: E402
from hobbit_cpp import _convert_run, convert  # noqa: E402

PIECE = 64 << 20


def write_pair(reader, experts, main, sidecar, *, link, imatrix, threads, progress, warn, checksums=None):
    """In the place of hobbit_cpp._convert_run.write_pair(), with the same arguments but no error sums."""
    offloaded = {c.tensor.name for c in experts}

    def write(writer, name, offset, data):
        writer.write(name, offset, data)
        if checksums and name in checksums.slabs:
            checksums.add(name, data)

    for t in reader.tensors.values():
        if t.name not in offloaded:
            for offset in range(0, t.nbytes, PIECE):
                write(main, t.name, offset, reader.read(t, offset, min(PIECE, t.nbytes - offset)))
    with ThreadPoolExecutor(threads) as pool:
        def quantize(c, rows):
            blocks = [rows[i:i + 128] for i in range(0, len(rows), 128)]
            done = pool.map(lambda b: ggml.quantize(c.low, ggml.dequantize(c.tensor.type, b.tobytes(), c.n_in)), blocks)
            return np.concatenate(list(done))

        for c in experts:
            t, row = c.tensor, c.tensor.row_bytes
            first = first_low = None
            for e in range(c.n_expert):
                rows = np.frombuffer(reader.read(t, e * c.n_out * row, c.n_out * row), np.uint8).reshape(c.n_out, row)
                write(sidecar, t.name + ".high", e * c.n_out * row, rows)
                low = None
                if first is not None:
                    for r in np.flatnonzero((first[:, :8] == rows[0, :8]).all(axis=1)):
                        if np.array_equal(rows[:c.n_out - r], first[r:]) and np.array_equal(rows[c.n_out - r:], first[:r]):
                            low = np.concatenate([first_low[r:], first_low[:r]])
                            break
                if low is None:
                    low = quantize(c, rows)
                if first is None:
                    first, first_low = rows, low
                write(sidecar, t.name + ".low", e * low.nbytes, low)
    return {c.tensor.name: _convert_run.Errors(1.0, 1.0, 0.0, 0.0) for c in experts}


def main():
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    src, out, low = sys.argv[1:]
    convert.write_pair = write_pair
    try:
        convert.convert(src, out, high="keep", low=low, force=True)
    except convert.ConvertError as e:
        print(f"pair: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
