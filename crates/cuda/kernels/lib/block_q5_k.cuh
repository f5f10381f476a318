// Q5_K: Q4_K with a fifth bit a code.
//
// half d, half dmin, 12 bytes of packed scales and minimums, 32 bytes of fifth bits (bit `s` of byte `l` for value `l` of
// sub-block `s`), 128 bytes of nibbles.
#pragma once
#include "lib/block_q4_k.cuh"

__device__ __forceinline__ float q5_k_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 176;
  i %= 256;
  u32 sub_block = i / 32, l = i % 32;
  u32 low = block[48 + 32 * (sub_block / 2) + l] >> (4 * (sub_block % 2)) & 15;
  u32 high = block[16 + l] >> sub_block & 1;
  return k_value(block, sub_block, low | high << 4);
}
