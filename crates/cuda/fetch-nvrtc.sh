#!/usr/bin/env bash
# Puts the compiler of the CUDA kernels into target/nvrtc, out of its wheel: with it they compile without a card.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -e target/nvrtc/libnvrtc.so.13 ]; then
  python3 -m venv target/nvrtc-venv
  target/nvrtc-venv/bin/pip install --quiet --disable-pip-version-check nvidia-cuda-nvrtc==13.0.88
  mkdir -p target/nvrtc
  cp target/nvrtc-venv/lib/python3*/site-packages/nvidia/cu13/lib/libnvrtc*.so.13* target/nvrtc/
fi
ls target/nvrtc
