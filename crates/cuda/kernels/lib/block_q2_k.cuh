// Q2_K: 16 groups of 16 values, 2-bit codes, a 4-bit scale and a 4-bit minimum per group.
//
// 16 bytes of (minimum << 4 | scale), 64 bytes of codes, f16 d, f16 dmin. The two 128-value halves each use 32 bytes of
// codes; step `k` of a half reads the bits at shift `2k` of all 32.
#pragma once
#include "lib/num.cuh"

__device__ __forceinline__ const u8* q2_k_block(const u8* row, u32 i) { return row + i / 256 * 84; }
__device__ __forceinline__ int q2_k_code(const u8* block, u32 j) {
  return block[16 + 32 * (j / 128) + j % 32] >> (2 * (j % 128 / 32)) & 3;
}
__device__ __forceinline__ float q2_k_value(const u8* row, u32 i) {
  const u8* block = q2_k_block(row, i);
  i %= 256;
  u32 scale = block[i / 16];
  float scaled = mul(mul(load_f16(block + 80), float(scale & 15)), float(q2_k_code(block, i)));
  return sub(scaled, mul(load_f16(block + 82), float(scale >> 4)));
}
