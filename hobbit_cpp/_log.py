"""What llama.cpp logged as an error while something was tried, for the exception that says why it failed."""

import contextlib
import ctypes
import threading

from . import bindings  # noqa: F401  before llama_cpp: it makes llama_cpp use our libraries

import llama_cpp.llama_cpp as C

ERROR = 4  # GGML_LOG_LEVEL_ERROR

_here = threading.local()  # .lines: where this thread's error lines go; .show: and to the log as well
_before = C.llama_log_callback()
_before_data = ctypes.c_void_p()


@C.llama_log_callback
def _callback(level, text, user_data):
    lines = getattr(_here, "lines", None)
    if lines is not None:
        if level == ERROR:
            lines.append(text.decode("utf-8", "replace").strip())
        if not _here.show:
            return
    if _before:
        _before(level, text, _before_data)


C.llama_log_get(ctypes.byref(_before), ctypes.byref(_before_data))
C.llama_log_set(_callback, None)


@contextlib.contextmanager
def errors(show):
    """Gather this thread's error lines in the list that it gives. show: everything is logged as ever, else nothing is."""
    outer = getattr(_here, "lines", None), getattr(_here, "show", True)
    _here.lines, _here.show = [], show
    try:
        yield _here.lines
    finally:
        _here.lines, _here.show = outer
