#!/bin/sh
# Builds the emulated driver, its management library, compiler and matrix products into a folder (default: target/emulator). With that folder in
# front of the loader's path, this crate's device tests run on the processor:
#
#   crates/cuda/emulator/build.sh
#   LD_LIBRARY_PATH=target/emulator GPU_REQUIRED=1 cargo test -p carat-cuda --test conformance --test golden
#
# Slow, and no proof that a card agrees; but wrong indices, missing barriers, shapes and batches show without one.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../../../target/emulator}
mkdir -p "$out"
flags="-std=c++17 -O2 -g -Wall -Wextra -shared -fPIC -I$here"
g++ $flags "$here/driver.cpp" -o "$out/libcuda.so.1"
g++ $flags "$here/management.cpp" -ldl -o "$out/libnvidia-ml.so.1"
g++ $flags -DEMULATOR_DIR="\"$here\"" "$here/compiler.cpp" -o "$out/libnvrtc.so.13"
g++ $flags -mf16c "$here/cublaslt.cpp" -o "$out/libcublasLt.so.13"
echo "$out"
