"""Reading, writing, quantizing and making GGUF files; each module is usable on its own.

    ggml    ggml's quantization through ctypes
    reader  single and split files, checked before data is read
    writer  files written piece by piece, under their name only when complete
    info    python -m gguf_tools.info FILE: what a file or a dual GGUF holds
    synth   python -m gguf_tools.synth: models with random weights
"""
