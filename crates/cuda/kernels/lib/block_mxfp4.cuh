// MXFP4: 32 four-bit floats (E2M1) under one power-of-two scale (E8M0); u8 exponent, 16 bytes of nibbles.
#pragma once
#include "lib/block_legacy.cuh"

// Twice the value of each code, so that all are integers; the scale is halved to match.
__device__ const i8 MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// `2^(e - 128)`, subnormal for the two smallest exponents.
__device__ __forceinline__ float mxfp4_scale(u32 e) {
  return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

__device__ __forceinline__ int mxfp4_code(const u8* block, u32 j) { return MXFP4_VALUES[nibble(block + 1, j)]; }
__device__ __forceinline__ u32 mxfp4_sub_scale(const u8* block, u32) { return block[0]; }
__device__ __forceinline__ u16 mxfp4_d(const u8*) { return 0x3c00; }
__device__ __forceinline__ float mxfp4_value(const u8* row, u32 i) {
  const u8* block = row + i / 32 * 17;
  return mul(mxfp4_scale(block[0]), float(mxfp4_code(block, i % 32)));
}
