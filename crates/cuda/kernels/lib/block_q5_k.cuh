// Q5_K: Q4_K with a fifth bit per code.
//
// f16 d, f16 dmin, 12 bytes of packed scales and minimums, 32 bytes of fifth bits (bit `s` of byte `l` for value `l` of
// sub-block `s`), 128 bytes of nibbles.
#pragma once
#include "lib/block_q4_k.cuh"

__device__ __forceinline__ const u8* q5_k_block(const u8* row, u32 i) { return row + i / 256 * 176; }
__device__ __forceinline__ int q5_k_code(const u8* block, u32 j) {
  u32 sub_block = j / 32, l = j % 32;
  u32 low = block[48 + 32 * (sub_block / 2) + l] >> (4 * (sub_block % 2)) & 15;
  u32 high = block[16 + l] >> sub_block & 1;
  return low | high << 4;
}
__device__ __forceinline__ float q5_k_value(const u8* row, u32 i) {
  const u8* block = q5_k_block(row, i);
  return k_value(block, i % 256 / 32, q5_k_code(block, i % 256));
}
