// Q4_K: 8 sub-blocks of 32 values, 4-bit codes, a 6-bit scale and a 6-bit minimum per sub-block.
//
// f16 d, f16 dmin, 12 bytes of packed scales and minimums, 128 bytes of nibbles. Each run of 32 bytes serves two
// sub-blocks: the even one in the low nibbles, the odd one in the high.
#pragma once
#include "lib/num.cuh"

// Scale and minimum of sub-block `j` from the 12 bytes that Q4_K and Q5_K share.
__device__ __forceinline__ void k_scale_min(const u8* packed, u32 j, u32& scale, u32& min) {
  if (j < 4) {
    scale = packed[j] & 63;
    min = packed[j + 4] & 63;
  } else {
    scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    min = packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
  }
}

// `d * scale * code - dmin * min`.
__device__ __forceinline__ float k_value(const u8* block, u32 sub_block, u32 code) {
  u32 scale, min;
  k_scale_min(block + 4, sub_block, scale, min);
  float scaled = mul(mul(load_f16(block), float(scale)), float(code));
  return sub(scaled, mul(load_f16(block + 2), float(min)));
}

__device__ __forceinline__ const u8* q4_k_block(const u8* row, u32 i) { return row + i / 256 * 144; }
__device__ __forceinline__ int q4_k_code(const u8* block, u32 j) {
  u32 sub_block = j / 32;
  return block[16 + 32 * (sub_block / 2) + j % 32] >> (4 * (sub_block % 2)) & 15;
}
__device__ __forceinline__ float q4_k_value(const u8* row, u32 i) {
  const u8* block = q4_k_block(row, i);
  return k_value(block, i % 256 / 32, q4_k_code(block, i % 256));
}
