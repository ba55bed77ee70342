#!/usr/bin/env bash
# The whole package for 64-bit ARM, cross-compiled here and run under qemu-user: C++ core tests, converter, demo, bit-identity.
#
#   make test-aarch64      needs root (for debootstrap) and: apt install g++-aarch64-linux-gnu qemu-user-static debootstrap
#
# Everything lies in build/aarch64; the second run builds what changed. HOBBIT_LLAMA_CPP_SOURCE as for make.
set -euo pipefail
trap 'echo "failed; what the build printed is in build/aarch64/build.log" >&2' ERR
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
jobs=${JOBS:-$(nproc)}
work=build/aarch64
root=$work/root
site=$work/site
log=$work/build.log
mkdir -p $work
emulator="$(command -v qemu-aarch64-static || command -v qemu-aarch64)"
for program in aarch64-linux-gnu-g++ debootstrap dpkg-deb; do
    command -v $program > /dev/null || { echo "error: $program is not installed (see the head of $0)" >&2; exit 1; }
done
target=(-DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake" -DCMAKE_BUILD_TYPE=Release)

echo "== libraries"
cmake -S . -B $work/libraries "${target[@]}" -DHOBBIT_PYTHON="$(command -v "$python")" \
    -DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod -DCMAKE_INSTALL_PREFIX="$PWD/$work/package" > $log
cmake --build $work/libraries --parallel "$jobs" >> $log
cmake --install $work/libraries > /dev/null
cp -r hobbit_cpp/*.py hobbit_cpp/data $work/package/hobbit_cpp/
cp -r gguf_tools $work/package/
cat $work/package/hobbit_cpp/lib/hobbit_build.json

echo "== Python for the target"
if [ ! -e $root/made ]; then
    rm -rf $root
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1,libstdc++6 bookworm $root > /dev/null
    for package in $root/var/cache/apt/archives/*.deb; do # nothing of the target's runs: no binfmt_misc is needed
        dpkg-deb --fsys-tarfile "$package" | tar -x -C $root --keep-directory-symlink
    done
    touch $root/made
fi
if [ ! -e $site/made ]; then
    pin="$(sed -n 's/^LLAMA_CPP_PYTHON_VERSION = "\(.*\)"$/\1/p' hobbit_cpp/_version.py)"
    rm -rf $site
    "$python" -m pip install --quiet --disable-pip-version-check --target $site --platform manylinux2014_aarch64 --python-version 3.11 --only-binary=:all: \
        numpy gguf==0.19.0 diskcache jinja2 typing_extensions
    # llama-cpp-python's modules alone: pure Python
    source="${HOBBIT_LLAMA_CPP_SOURCE:-$("$python" cmake/prepare_llama_cpp.py --sdist --pin hobbit_cpp/_version.py --download build/download)}"
    tar -xf "$source" -C $site --strip-components=1 "llama_cpp_python-$pin/llama_cpp"
    touch $site/made
fi
on_target() { PYTHONPATH="$PWD/$work/package:$PWD/$site" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=2 "$emulator" -L $root $root/usr/bin/python3.11 "$@"; }

echo "== core tests"
cmake -S . -B $work/core-tests "${target[@]}" -DHOBBIT_CORE_TESTS=ON > $log
cmake --build $work/core-tests --parallel "$jobs" >> $log
"$emulator" -L $root $work/core-tests/hobbit-core-tests

echo "== demo"
on_target -P -m hobbit_cpp demo --threads 2

echo "== bit-identity, by the logits of stock llama.cpp and of T1 = 1 in the smallest budget"
model=hobbit_cpp/data/books-8x2-small-q8_0.gguf
on_target -P -m hobbit_cpp convert $model -o $work/dual.gguf --high keep --low q2_k --force
on_target tests/aarch64_identity.py $model $work/dual.gguf 2> $work/identity.log # llama.cpp's log
