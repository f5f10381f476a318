#!/usr/bin/env python3
"""Writes what the `gguf` package (0.19.0) dequantizes blocks to: blocks.bin, random ones of every format, and grids.txt, sums
over all vectors of the grids.

usage: make.py   (needs numpy and gguf)
Layout of blocks.bin, little-endian, once per format: u32 type id, u32 bytes, u32 values, the bytes, the values as F32. F16 fields are
random bits of any finite kind: zero, subnormal and negative scales all occur.
"""
import os
import numpy as np
from gguf import GGMLQuantizationType as Q, GGML_QUANT_SIZES, quants

# Format: offsets of the F16 fields of a block.
FORMATS = {
    Q.F32: [], Q.F16: [0], Q.BF16: [], Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0],
    Q.Q2_K: [80, 82], Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_NL: [0], Q.IQ4_XS: [0],
    Q.MXFP4: [], Q.NVFP4: [], Q.IQ2_XXS: [0], Q.IQ2_XS: [0], Q.IQ2_S: [0], Q.IQ3_XXS: [0], Q.IQ3_S: [0], Q.IQ1_S: [0],
    Q.IQ1_M: [None], Q.TQ1_0: [52], Q.TQ2_0: [64], Q.Q1_0: [0],
}
# Formats that name vectors of a grid: offset of the F16 field.
GRIDS = {Q.IQ2_XXS: 0, Q.IQ2_XS: 0, Q.IQ2_S: 0, Q.IQ3_XXS: 0, Q.IQ3_S: 0, Q.IQ1_S: 0, Q.IQ1_M: None}
HERE = os.path.dirname(os.path.abspath(__file__))


def put_half(blocks, at, bits):
    """F16 `bits` of each block, which IQ1_M keeps in the upper nibbles of its last four u16."""
    if at is not None:
        blocks[:, at:at + 2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
    else:
        for k in range(4):
            nibble = (bits >> (4 * k) & 15).astype(np.uint8)
            blocks[:, 49 + 2 * k] = blocks[:, 49 + 2 * k] & 15 | nibble << 4


def dequantize(blocks, quant):
    """The package's, and Q1_0's, of which the package has the sizes alone: a scale, then a bit per sign."""
    if quant != Q.Q1_0:
        return quants.dequantize(blocks, quant)
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
    return blocks[:, :2].copy().view("<f2").astype(np.float32) * signs


rng = np.random.default_rng(4)
out = b""
for quant, halves in FORMATS.items():
    length, size = GGML_QUANT_SIZES[quant]
    compact = quant in GRIDS or quant in (Q.TQ1_0, Q.TQ2_0)
    count = 1 if compact else 2 if length == 256 else 4 if length in (32, 64) else 1 if length == 128 else 32
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    for at in halves:
        bits = rng.integers(0, 0x7c00, count, np.uint16) | rng.integers(0, 2, count, np.uint16) << 15
        put_half(blocks, at, bits)
    if quant == Q.NVFP4:
        blocks[0, :4] = [0, 1, 7, 8]  # zero, subnormals, the smallest normal
        blocks[1, :4] = [0x7e, 0x7f, 0xff, 0x80]  # the largest, no number, a sign bit
    if quant == Q.MXFP4:
        blocks[:, 0] = [0, 1, 2, 131]
    if quant == Q.F32:
        blocks[:, 3] &= 0xbf  # an exponent below the infinities'
    if quant == Q.BF16:
        blocks[:, 1] &= 0xbf
    if quant in (Q.F32, Q.F16, Q.BF16):
        blocks = blocks.reshape(1, -1)
    values = dequantize(blocks, quant).astype("<f4").ravel()
    assert np.isfinite(values).all(), quant
    out += np.array([quant, blocks.size, values.size], "<u4").tobytes() + blocks.tobytes() + values.tobytes()
open(os.path.join(HERE, "blocks.bin"), "wb").write(out)

# Every vector of a grid: SplitMix64 from 0 fills 1024 blocks per format, whose F16 is set to 1; what is kept is a sum of the
# values' bits, each times an odd number of its own.
out = ""
for quant, at in GRIDS.items():
    length, size = GGML_QUANT_SIZES[quant]
    with np.errstate(over="ignore"):
        z = np.arange(1, 1024 * size // 8 + 1, dtype=np.uint64) * np.uint64(0x9e3779b97f4a7c15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xbf58476d1ce4e5b9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94d049bb133111eb)
        blocks = (z ^ z >> np.uint64(31)).astype("<u8").view(np.uint8).reshape(1024, size).copy()
        put_half(blocks, at, np.full(1024, 0x3c00, np.uint16))
        bits = quants.dequantize(blocks, quant).astype("<f4").ravel().view("<u4").astype(np.uint64)
        total = (bits * (2 * np.arange(bits.size, dtype=np.uint64) + np.uint64(1))).sum()
    out += f"{quant.name} {int(total):016x}\n"
open(os.path.join(HERE, "grids.txt"), "w").write(out)
