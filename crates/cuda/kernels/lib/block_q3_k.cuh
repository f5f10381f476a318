// Q3_K: 16 groups of 16 values, 2 low bits in the order of Q2_K, a high bit apart, 6-bit scales.
//
// 32 bytes of high bits, 64 bytes of low bits, 12 bytes of packed scales, f16 d. A clear high bit subtracts 4.
#pragma once
#include "lib/num.cuh"

__device__ __forceinline__ int q3_k_scale(const u8* packed, u32 group) {
  u32 low = packed[group % 8] >> (group / 8 * 4) & 15;
  u32 high = packed[8 + group % 4] >> (2 * (group / 4)) & 3;
  return int(low | high << 4) - 32;
}

__device__ __forceinline__ int q3_k_code(const u8* block, u32 j) {
  u32 half = j / 128, step = j % 128 / 32, byte = j % 32;
  u32 low = block[32 + 32 * half + byte] >> (2 * step) & 3;
  u32 high = block[byte] >> (4 * half + step) & 1;
  return int(low) - (high ? 0 : 4);
}
__device__ __forceinline__ u32 q3_k_sub_scale(const u8* block, u32 group) { return q3_k_scale(block + 96, group); }
__device__ __forceinline__ u16 q3_k_d(const u8* block) { return load_u16(block + 108); }
__device__ __forceinline__ float q3_k_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 110;
  i %= 256;
  return mul(mul(load_f16(block + 108), float(q3_k_scale(block + 96, i / 16))), float(q3_k_code(block, i)));
}
