#!/usr/bin/env python3
"""Writes blocks.bin: random blocks of every format and what the `gguf` package (0.19.0) dequantizes them to.

usage: make.py   (needs numpy and gguf)
Layout, little-endian, once per format: u32 type id, u32 bytes, u32 values, the bytes, the values as F32. F16 fields are
random bits of any finite kind: zero, subnormal and negative scales all occur.
"""
import os
import numpy as np
from gguf import GGMLQuantizationType as Q, GGML_QUANT_SIZES, quants

# Format: offsets of the F16 fields of a block.
FORMATS = {
    Q.F32: [], Q.F16: [0], Q.BF16: [], Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0],
    Q.Q2_K: [80, 82], Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_NL: [0], Q.IQ4_XS: [0],
    Q.MXFP4: [],
}
rng = np.random.default_rng(4)
out = b""
for quant, halves in FORMATS.items():
    length, size = GGML_QUANT_SIZES[quant]
    count = 2 if length == 256 else 4 if length == 32 else 32
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    for at in halves:
        bits = rng.integers(0, 0x7c00, count, np.uint16) | rng.integers(0, 2, count, np.uint16) << 15
        blocks[:, at:at + 2] = bits.astype("<u2").view(np.uint8).reshape(count, 2)
    if quant == Q.MXFP4:
        blocks[:, 0] = [0, 1, 2, 131]
    if quant == Q.F32:
        blocks[:, 3] &= 0xbf  # an exponent below the infinities'
    if quant == Q.BF16:
        blocks[:, 1] &= 0xbf
    if quant in (Q.F32, Q.F16, Q.BF16):
        blocks = blocks.reshape(1, -1)
    values = quants.dequantize(blocks, quant).astype("<f4").ravel()
    assert np.isfinite(values).all(), quant
    out += np.array([quant, blocks.size, values.size], "<u4").tobytes() + blocks.tobytes() + values.tobytes()
open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "blocks.bin"), "wb").write(out)
