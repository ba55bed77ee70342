#!/bin/sh
# A Jetson Orin, or another small board, in one command: build, convert, run, measure; everything into one JSON.
#
#   benchmarks/board.sh FOLDER [OPTIONS OF board.py]     FOLDER: on the disk that will hold the models (NVMe)
#
# With CUDA's compiler in PATH or in /usr/local/cuda the build is for the board's GPU. docs/jetson.md explains the rest.
set -eu
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,6p' "$0" | cut -c3-; exit 2; }
case $1 in -*) sed -n '2,6p' "$0" | cut -c3-; exit 2;; esac
dir=$1; shift
PATH=$PATH:/usr/local/cuda/bin
export PATH
if [ -z "${CMAKE_ARGS+set}" ] && command -v nvcc > /dev/null; then
    CMAKE_ARGS="-DGGML_CUDA=ON"
    # Jetson Orin; elsewhere the GPU that is there
    if tr '\0' '\n' < /proc/device-tree/compatible 2> /dev/null | grep -q tegra234; then
        CMAKE_ARGS="$CMAKE_ARGS -DCMAKE_CUDA_ARCHITECTURES=87"
    fi
    export CMAKE_ARGS
fi
make setup
exec .venv/bin/python benchmarks/board.py --dir "$dir" "$@"
