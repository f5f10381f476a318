// NVFP4: 64 four-bit floats (E2M1) under an unsigned 8-bit float (E4M3) per 16; 4 scales, then per 16 values 8 bytes of nibbles:
// the low ones, then the high ones.
#pragma once
#include "lib/block_mxfp4.cuh"

// Half of the scale, for the codes' values are doubled. The sign bit is left out, and the code of "no number" is 0.
__device__ __forceinline__ float nvfp4_scale(u32 e4m3) {
  const u32 exponent = e4m3 >> 3 & 15, fraction = e4m3 & 7;
  if (e4m3 == 0x7f) return 0;
  // 2^-10, and 2^(exponent - 11).
  return exponent ? mul(float(8 + fraction), __uint_as_float((exponent + 116) << 23)) : mul(float(fraction), 0.0009765625f);
}

__device__ __forceinline__ int nvfp4_code(const u8* block, u32 j) {
  return MXFP4_VALUES[block[4 + j / 16 * 8 + j % 8] >> (j / 8 % 2 * 4) & 15];
}
// The scale's bits without those that do not count; the block itself has none.
__device__ __forceinline__ u32 nvfp4_sub_scale(const u8* block, u32 group) { return block[group] == 0x7f ? 0 : block[group] & 0x7f; }
__device__ __forceinline__ u16 nvfp4_d(const u8*) { return 0x3c00; }
__device__ __forceinline__ float nvfp4_value(const u8* row, u32 i) {
  const u8* block = row + i / 64 * 36;
  return mul(nvfp4_scale(block[i % 64 / 16]), float(nvfp4_code(block, i % 64)));
}
