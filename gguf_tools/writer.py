"""StreamWriter: writes a GGUF piece by piece, so that no whole tensor is ever in memory.

    with StreamWriter("OUT.gguf", "llama", alignment=32, overwrite=False) as w:
        w.add("llama.block_count", 2)                    # type by the value; or say it:
        w.add("hobbit.format_version", 1, "u32")
        w.add("my.offsets", [1, 2, 3], "u64")            # a list is an array of that type
        w.copy_metadata(reader, drop=("split.",))        # byte for byte, from a gguf_tools.reader.Reader
        w.add_tensor("a.weight", (256, 8), "q4_0")       # shape as in ggml: row length first
        w.add_tensor("b.weight", (256,), "f32")
        w.begin_data()                                   # header written; from here on, data only
        w.write("b.weight", 0, np.zeros(256, np.float32))
        w.write("a.weight", 0, block)                    # any order, any pieces, from any thread

Leaving the `with` normally checks that every byte was written, syncs, and renames the file to its
final name. Leaving it by any exception, Ctrl-C and SIGTERM included, removes it. Until then the file
is called `.OUT.gguf.tmp`, in the same folder, and is locked: a second writer to the same name is
refused, and what a killed process left behind is overwritten by the next run.

Header, metadata and tensor infos are laid out by gguf.GGUFWriter.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import threading
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType as V

from . import ggml
from .errors import GGUFError
from .reader import MAX_NAME

_VALUE_TYPES = {
    "u8": V.UINT8, "i8": V.INT8, "u16": V.UINT16, "i16": V.INT16, "u32": V.UINT32, "i32": V.INT32,
    "u64": V.UINT64, "i64": V.INT64, "f32": V.FLOAT32, "f64": V.FLOAT64, "bool": V.BOOL, "str": V.STRING,
}


class _Raw(bytes):
    """A packed metadata value, its type in front: written as it is."""


class _Writer(gguf.GGUFWriter):
    """gguf.GGUFWriter that can also write packed values (it refuses empty arrays, for one)."""

    def _pack_val(self, val, vtype, add_vtype, sub_type=None):
        return bytes(val) if isinstance(val, _Raw) else super()._pack_val(val, vtype, add_vtype, sub_type)


def _value_type(value: Any) -> V:
    if isinstance(value, (bool, np.bool_)):
        return V.BOOL
    if isinstance(value, (int, np.integer)):
        return V.INT32 if value < 0 else V.UINT32
    if isinstance(value, (float, np.floating)):
        return V.FLOAT32
    if isinstance(value, (str, bytes)):
        return V.STRING
    raise GGUFError(f"no GGUF type for a metadata value of type {type(value).__name__}")


class StreamWriter:
    """Writes one GGUF file; see the module's text for its use.

    path       final name
    arch       general.architecture; None if copy_metadata() brings it
    alignment  of the tensor data, bytes, a power of two; written as general.alignment unless 32
    overwrite  whether a file that has the final name already may be replaced

    Raises GGUFError for wrong use and for a name that is taken or being written, OSError as the
    operating system gives it (no space, no permission).
    """

    def __init__(self, path, arch: str | None, alignment: int = 32, overwrite: bool = False):
        self.path = os.fspath(path)
        self.overwrite = overwrite
        if alignment <= 0 or alignment & (alignment - 1):
            raise GGUFError(f"alignment {alignment} is not a power of two")
        self.alignment = alignment
        folder, name = os.path.split(self.path)
        self.temporary = os.path.join(folder, f".{name}.tmp")
        self.data_offset = 0                       # of the tensor data in the file, once begin_data() was called
        self._reserved: dict[str, int] = {}        # key -> offset of its value in the file
        self._tensors: dict[str, list[int]] = {}   # name -> [offset in the data, bytes, bytes written]
        self._data_size = 0
        self._fd = -1
        self.published = False                     # has the file its final name?
        self._state = "new"  # new -> header -> data -> sealed -> done
        self._lock = threading.Lock()
        self._old_sigterm = None
        self._gguf = _Writer(None, arch or "")
        if alignment != 32:
            self._gguf.add_custom_alignment(alignment)

    # --- life ---

    def __enter__(self) -> "StreamWriter":
        self._check_free()
        self._catch_sigterm()
        try:
            self._open()
        except BaseException:
            self.discard()
            self._release_sigterm()
            raise
        self._state = "header"
        return self

    def __exit__(self, kind, value, trace) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            self.discard()  # nothing, if it was published
            self._release_sigterm()

    def seal(self) -> None:
        """Check that all data was written and bring it to the disk; the name stays the temporary one."""
        if self._state != "data":
            raise GGUFError(f"{self.path}: begin_data() was not called")
        for name, (_, size, written) in self._tensors.items():
            if written != size:
                raise GGUFError(f"{self.path}: {written} of {size} bytes of {name} were written")
        os.fsync(self._fd)
        size = os.fstat(self._fd).st_size
        if size != self.data_offset + self._data_size:
            raise GGUFError(f"{self.path}: the file has {size} bytes instead of {self.data_offset + self._data_size}")
        self._state = "sealed"

    def publish(self, sync: bool = True) -> None:
        """Give the file its final name; seals it first if that was not done.

        sync=False leaves syncing the folder to the publish() of another file in it.
        """
        if self._state == "done":
            return
        if self._state != "sealed":
            self.seal()
        self._check_free()
        os.replace(self.temporary, self.path)
        self.published = True
        self._state = "done"
        self._close()
        if sync:
            with contextlib.suppress(OSError):  # some file systems cannot sync a folder; the file itself is synced
                folder = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)

    def discard(self) -> None:
        """Remove the file. Does nothing after publish()."""
        if self._state != "done" and self._fd >= 0:
            try:
                os.unlink(self.temporary)
            except OSError:
                pass
        self._state = "done"
        self._close()

    # --- header ---

    def add(self, key: str, value: Any, vtype: str | None = None) -> None:
        """Add a metadata value. vtype: u8 ... i64, f32, f64, bool, str; for a list, of its elements.

        Without vtype: str, bool, f32 for floats, u32 for integers (i32 if negative).
        """
        self._in("header")
        if vtype is not None and vtype not in _VALUE_TYPES:
            raise GGUFError(f"{key}: unknown value type {vtype!r}")
        is_array = isinstance(value, (list, tuple, np.ndarray))
        items = list(value) if is_array else [value]
        if vtype is None and not items:
            raise GGUFError(f"{key}: say the type of an empty array")
        kind = _VALUE_TYPES[vtype] if vtype else min((_value_type(v) for v in items), key=lambda k: k != V.INT32)
        pack = self._gguf._pack_val
        try:
            packed = b"".join(pack(v, kind, False) for v in items)
        except (struct.error, TypeError, AttributeError):
            raise GGUFError(f"{key}: a value does not fit the type {kind.name.lower()}") from None
        head = struct.pack("<IIQ", V.ARRAY, kind, len(items)) if is_array else struct.pack("<I", kind)
        self._set(key, head + packed)

    def reserve(self, key: str, n: int | None = None) -> None:
        """Add an array of n u32, or one u32, whose value fill() gives when the data is known."""
        self.add(key, 0 if n is None else np.zeros(n, np.uint32), "u32")
        self._reserved[key] = -1

    def copy_metadata(self, reader, drop: tuple[str, ...] = ()) -> None:
        """Copy all metadata of a Reader byte for byte, but keys that start with one of `drop`.

        general.alignment is copied only where it is this file's alignment.
        """
        self._in("header")
        for key, field in reader.fields.items():
            if key.startswith(tuple(drop)) or (key == "general.alignment" and field.value() != self.alignment):
                continue
            self._set(key, field.raw)

    def add_tensor(self, name: str, shape, ggml_type) -> None:
        """Announce a tensor. shape: as in ggml, row length first; ggml_type: name, id or TypeInfo."""
        self._in("header")
        t = ggml.type_info(ggml_type)
        shape = [int(n) for n in shape]
        if name in self._tensors:
            raise GGUFError(f"{self.path}: two tensors are called {name}")
        if len(name.encode()) > MAX_NAME:
            raise GGUFError(f"{self.path}: the tensor name {name} is longer than {MAX_NAME} bytes")
        if not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise GGUFError(f"{self.path}: bad shape {shape} for {name}")
        size = t.row_bytes(shape[0])
        for n in shape[1:]:
            size *= n
        # any type but uint8 makes GGUFWriter take the shape as it is
        self._gguf.add_tensor_info(name, shape[::-1], np.dtype(np.float32), size, raw_dtype=t.id)
        self._tensors[name] = [self._data_size, size, 0]
        self._data_size += -(-size // self.alignment) * self.alignment

    def begin_data(self) -> None:
        """Write the header; the file gets its full length."""
        self._in("header")
        w = self._gguf
        w.write_header_to_file(path=self.temporary)
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        w.close()
        header = os.fstat(self._fd).st_size
        self.data_offset = -(-header // self.alignment) * self.alignment
        os.ftruncate(self._fd, self.data_offset + self._data_size)
        self._locate_reserved()
        self._state = "data"

    # --- data ---

    def fill(self, key: str, value) -> None:
        """The value of a reserved key: an integer, or as many as were reserved."""
        self._in("data")
        self._write_at(self._reserved[key], memoryview(np.atleast_1d(np.asarray(value, "<u4")).tobytes()))

    def header(self) -> bytes:
        """What lies before the tensor data, as it is in the file now."""
        self._in("data")
        head = b""
        while len(head) < self.data_offset:
            head += os.pread(self._fd, self.data_offset - len(head), len(head))
        return head

    def reserved_at(self, key: str) -> int:
        return self._reserved[key]

    @property
    def data_size(self) -> int:
        """Bytes of all tensors announced so far, padding included."""
        return self._data_size

    def tensor_offset(self, name: str) -> int:
        """Absolute offset of a tensor's data in the file; after begin_data()."""
        return self.data_offset + self._tensors[name][0]

    def write(self, name: str, offset: int, data) -> None:
        """Write bytes (any C-contiguous buffer) at an offset, in bytes, into a tensor. Thread-safe.

        Every byte must be written exactly once.
        """
        self._in("data")
        view = memoryview(data).cast("B")
        start, size, _ = tensor = self._tensors[name]
        if offset < 0 or offset + len(view) > size:
            raise GGUFError(f"{self.path}: bytes {offset} to {offset + len(view)} are outside {name}, which has {size}")
        self._write_at(self.data_offset + start + offset, view)
        with self._lock:
            tensor[2] += len(view)

    # --- inside ---

    def _write_at(self, at: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], at + done)

    def _in(self, state: str) -> None:
        if self._state != state:
            raise GGUFError(f"{self.path}: writer is in state '{self._state}', not '{state}'")

    def _set(self, key: str, packed: bytes) -> None:
        self._gguf.kv_data[0][key] = gguf.gguf_writer.GGUFValue(_Raw(packed), V.UINT8)

    def _locate_reserved(self) -> None:
        at = 24  # magic, version, counts
        for key, value in self._gguf.kv_data[0].items():
            packed = self._gguf._pack_val(value.value, value.type, add_vtype=True, sub_type=value.sub_type)
            at += 8 + len(key.encode())
            if key in self._reserved:
                self._reserved[key] = at + (16 if packed[:4] == struct.pack("<I", V.ARRAY) else 4)
            at += len(packed)

    def _check_free(self) -> None:
        if os.path.isdir(self.path):
            raise GGUFError(f"{self.path} is a folder")
        if not self.overwrite and os.path.lexists(self.path):
            raise GGUFError(f"{self.path} exists already")

    def _open(self) -> None:
        """Create or take over the temporary file; the lock on it is held until it has its final name."""
        while True:
            fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise GGUFError(f"{self.path} is being written by another process") from None
            except OSError:  # a file system without locks: a name that no other process uses must do
                os.close(fd)
                self.temporary += f"-{os.getpid()}"
                self._fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                break
            self._fd = fd
            try:
                if os.path.samestat(os.fstat(fd), os.stat(self.temporary)):
                    break
            except FileNotFoundError:
                pass
            self._fd = -1
            os.close(fd)  # renamed or removed between open and flock: this is no longer the temporary file
        os.ftruncate(self._fd, 0)

    def _close(self) -> None:
        self._gguf.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _release_sigterm(self) -> None:
        if self._old_sigterm is not None:
            signal.signal(signal.SIGTERM, self._old_sigterm)
            self._old_sigterm = None

    def _catch_sigterm(self) -> None:
        # only where nobody else handles it; the exception then unwinds through __exit__
        if (threading.current_thread() is threading.main_thread()
                and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
            self._old_sigterm = signal.signal(signal.SIGTERM, raise_exit)


def raise_exit(signum, frame):
    """Signal handler: the process ends, and everything on the way is closed."""
    raise SystemExit(128 + signum)
