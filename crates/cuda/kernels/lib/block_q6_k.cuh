// Q6_K: 16 groups of 16 values, 6-bit codes in a 4-bit and a 2-bit plane, signed 8-bit scales.
//
// 128 bytes of low nibbles, 64 bytes of high pairs, 16 scales, f16 d. Each 128-value half uses 64 low bytes and 32 high
// bytes: quarter `k` of it takes nibble `k / 2` of low byte `l + 32 * (k % 2)` and pair `k` of high byte `l`.
#pragma once
#include "lib/num.cuh"

__device__ __forceinline__ const u8* q6_k_block(const u8* row, u32 i) { return row + i / 256 * 210; }
__device__ __forceinline__ int q6_k_code(const u8* block, u32 j) {
  u32 half = j / 128, quarter = j % 128 / 32, l = j % 32;
  u32 low = block[64 * half + 32 * (quarter % 2) + l] >> (4 * (quarter / 2)) & 15;
  u32 high = block[128 + 32 * half + l] >> (2 * quarter) & 3;
  return int(low | high << 4) - 32;
}
__device__ __forceinline__ float q6_k_value(const u8* row, u32 i) {
  const u8* block = q6_k_block(row, i);
  float scale = mul(load_f16(block + 208), float(i8(block[192 + i % 256 / 16])));
  return mul(scale, float(q6_k_code(block, i % 256)));
}
