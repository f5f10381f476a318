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

__device__ __forceinline__ float q3_k_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 110;
  i %= 256;
  u32 half = i / 128, step = i % 128 / 32, byte = i % 32;
  u32 low = block[32 + 32 * half + byte] >> (2 * step) & 3;
  u32 high = block[byte] >> (4 * half + step) & 1;
  int code = int(low) - (high ? 0 : 4);
  return mul(mul(load_f16(block + 108), float(q3_k_scale(block + 96, i / 16))), float(code));
}
