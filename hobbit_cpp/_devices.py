"""What ggml can compute on."""

from __future__ import annotations

import ctypes

GPU, INTEGRATED_GPU = 1, 2  # enum ggml_backend_dev_type


def devices() -> list[dict]:
    """Of each: name, description, gpu, integrated (a GPU that has the CPU's memory), free and total bytes."""
    from . import _libs

    lib = _libs.ensure()
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_get.restype, lib.ggml_backend_dev_get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    for name in ("name", "description"):
        function = getattr(lib, f"ggml_backend_dev_{name}")
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    lib.ggml_backend_dev_type.restype, lib.ggml_backend_dev_type.argtypes = ctypes.c_int, [ctypes.c_void_p]
    lib.ggml_backend_dev_memory.restype = None
    lib.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    found = []
    for i in range(lib.ggml_backend_dev_count()):
        device, free, total = lib.ggml_backend_dev_get(i), ctypes.c_size_t(), ctypes.c_size_t()
        lib.ggml_backend_dev_memory(device, free, total)
        kind = lib.ggml_backend_dev_type(device)
        found.append({"name": lib.ggml_backend_dev_name(device).decode(), "description": lib.ggml_backend_dev_description(device).decode().strip(),
                      "gpu": kind in (GPU, INTEGRATED_GPU), "integrated": kind == INTEGRATED_GPU,
                      "free": free.value, "total": total.value})
    return found
