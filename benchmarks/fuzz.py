"""Fuzz what reads files. Coverage-guided where the tools are there: libFuzzer (clang) for the C++ reader of sidecars, atheris
for the Python reader. Without clang the C++ target runs its own mutations under the sanitizers of the compiler that is there.

    make fuzz                                    both, ten minutes each
    python benchmarks/fuzz.py sidecar --minutes 60
    python benchmarks/fuzz.py reader --minutes 60           (pip install atheris)

benchmarks/fuzz-corpus/ has small inputs to start from; what is found is written to build/fuzz/. How long it ran, and what was
found: docs/reliability.md.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

REPO = pathlib.Path(__file__).resolve().parent.parent
CORPUS = REPO / "benchmarks" / "fuzz-corpus"
SANITIZE = "address,undefined"


def llama_source() -> pathlib.Path:
    """The pinned llama.cpp's folder; from the build, or prepared as the build does it."""
    folder = pathlib.Path(os.environ.get("HOBBIT_LLAMA_DIR") or REPO / "build" / "llama.cpp")
    if not (folder / "ggml" / "src" / "gguf.cpp").is_file():
        source = ["--source", os.environ["HOBBIT_LLAMA_CPP_SOURCE"]] if os.environ.get("HOBBIT_LLAMA_CPP_SOURCE") else []
        subprocess.run([sys.executable, REPO / "cmake" / "prepare_llama_cpp.py", "--pin", REPO / "hobbit_cpp" / "_version.py", "--patches",
                        REPO / "csrc" / "patches", "--download", REPO / "build" / "download", "--out", folder, *source], check=True, stdout=sys.stderr)
    return folder


def build_sidecar(out: pathlib.Path, compiler: str, fuzzer: bool, llama: pathlib.Path, optimize: str = "-O1") -> pathlib.Path:
    """The target with sanitizers: our reader and ggml's gguf.cpp are compiled, the rest is the built libggml-base."""
    lib = REPO / "hobbit_cpp" / "lib"
    # enum: ggml reads a type's number into an enum before it looks whether there is such a type; compilers make nothing of that
    flags = [f"-fsanitize={SANITIZE}" + (",fuzzer" if fuzzer else ""), "-fno-sanitize-recover=all", "-fno-sanitize=enum", "-g1", optimize, "-std=c++17",
             *([] if fuzzer else ["-DHOBBIT_FUZZ_MAIN"])]
    include = [f"-I{p}" for p in (REPO / "csrc/include", REPO / "csrc/core", REPO / "csrc/llama", llama / "ggml/include", llama / "ggml/src")]
    sources = [REPO / "csrc/tests/fuzz_sidecar.cpp", REPO / "csrc/llama/hobbit-sidecar.cpp", REPO / "csrc/core/checksum.cpp", llama / "ggml/src/gguf.cpp"]
    out.parent.mkdir(parents=True, exist_ok=True)
    objects = [out.with_name(f"{source.stem}.o") for source in sources]
    compilers = [subprocess.Popen([compiler, *flags, *include, "-DGGML_VERSION=\"\"", "-DGGML_COMMIT=\"\"", "-c", source, "-o", to])
                 for source, to in zip(sources, objects)]
    if any([p.wait() for p in compilers]):
        raise RuntimeError("the target does not compile")
    subprocess.run([compiler, *flags, *objects, "-o", out, f"-L{lib}", "-lggml-base", f"-Wl,-rpath,{lib}", "-lpthread"], check=True)
    return out


def make_seeds(folder: pathlib.Path) -> None:
    """Headers of small sidecars, as the converter writes them; and the source of the linked one."""
    sys.path[:0] = [str(REPO), str(REPO / "tests")]
    import hobbit_cpp  # noqa: F401
    from gguf_tools.reader import Reader
    from hobbit_cpp.convert import convert
    from makers import make_model

    folder.mkdir(parents=True, exist_ok=True)
    work = folder.parent / "made"
    work.mkdir(exist_ok=True)
    source = make_model(work / "source.gguf", n_layer=1, n_expert=2, d=64, ff=64)
    for name, options in (("plain", {}), ("linked", {"link": True}), ("without", {"checksums": False}), ("parts", {"split_max_bytes": (1 << 20) + 40000})):
        convert(source, work / f"{name}.gguf", "keep", "q4_0", force=True, **options)
        path = next(iter(sorted(work.glob(f"{name}.experts*.gguf"))))
        with Reader(path) as r:
            (folder / name).write_bytes(r.files[0].head)


def fuzz_sidecar(minutes: float, out: pathlib.Path) -> int:
    work = out / "sidecar"
    work.mkdir(parents=True, exist_ok=True)
    clang = os.environ.get("CLANGXX") or shutil.which("clang++")
    llama = llama_source()
    corpus = work / "corpus"
    corpus.mkdir(exist_ok=True)
    make_seeds(work / "seeds")
    shutil.copy(work / "made" / "source.gguf", work / "source.gguf")
    if clang:
        program = build_sidecar(work / "libfuzzer" / "fuzz-sidecar", clang, True, llama)
        return subprocess.run([program, f"-max_total_time={int(minutes * 60)}", "-max_len=16384", "-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1",
                               corpus, CORPUS / "sidecar", work / "seeds"], cwd=work).returncode
    print("no clang++: mutations without coverage", file=sys.stderr)
    program = build_sidecar(work / "gcc" / "fuzz-sidecar", os.environ.get("CXX") or "g++", False, llama)
    files = [p for folder in (CORPUS / "sidecar", work / "seeds") for p in sorted(folder.glob("*"))]
    return subprocess.run([program, "--runs", str(int(minutes * 60 * 4000 / len(files))), *files], cwd=work).returncode


def fuzz_reader(minutes: float, out: pathlib.Path) -> int:
    work = out / "reader"
    (work / "corpus").mkdir(parents=True, exist_ok=True)
    make_seeds(out / "sidecar" / "seeds")
    return subprocess.run([sys.executable, REPO / "benchmarks" / "_fuzz_reader.py", f"-max_total_time={int(minutes * 60)}", "-max_len=16384", "-timeout=20",
                           "-rss_limit_mb=3072", "-print_final_stats=1", work / "corpus", CORPUS / "sidecar", out / "sidecar" / "seeds"], cwd=work).returncode


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("target", choices=["sidecar", "reader", "all"])
    p.add_argument("--minutes", type=float, default=10)
    p.add_argument("--out", type=pathlib.Path, default=REPO / "build" / "fuzz")
    args = p.parse_args()
    status = 0
    for name, run in (("sidecar", fuzz_sidecar), ("reader", fuzz_reader)):
        if args.target in (name, "all"):
            status = run(args.minutes, args.out.resolve()) or status
    return status


if __name__ == "__main__":
    sys.exit(main())
