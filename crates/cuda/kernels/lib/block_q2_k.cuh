// Q2_K: 16 groups of 16 values, 2-bit codes, a 4-bit scale and a 4-bit minimum per group.
//
// 16 bytes of (minimum << 4 | scale), 64 bytes of codes, f16 d, f16 dmin. The two 128-value halves each use 32 bytes of
// codes; step `k` of a half reads the bits at shift `2k` of all 32.
#pragma once
#include "lib/num.cuh"

__device__ __forceinline__ float q2_k_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 84;
  i %= 256;
  u32 code = block[16 + 32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3;
  u32 scale = block[i / 16];
  float scaled = mul(mul(load_f16(block + 80), float(scale & 15)), float(code));
  return sub(scaled, mul(load_f16(block + 82), float(scale >> 4)));
}
