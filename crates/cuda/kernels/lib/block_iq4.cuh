// IQ4_NL and IQ4_XS: 4-bit codes that index a table of unevenly spaced values.
#pragma once
#include "lib/block_legacy.cuh"

__device__ const i8 IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// `d * table[code]`; f16 d, 16 bytes of nibbles.
__device__ __forceinline__ const u8* iq4_nl_block(const u8* row, u32 i) { return row + i / 32 * 18; }
__device__ __forceinline__ int iq4_nl_code(const u8* block, u32 j) { return nibble(block + 2, j); }
__device__ __forceinline__ float iq4_nl_value(const u8* row, u32 i) {
  const u8* block = iq4_nl_block(row, i);
  return mul(load_f16(block), float(IQ4_VALUES[iq4_nl_code(block, i % 32)]));
}

// 8 sub-blocks of 32 with 6-bit scales; f16 d, u16 high scale pairs, 4 bytes of low scale nibbles, 128 bytes of nibbles.
__device__ __forceinline__ int iq4_xs_code(const u8* block, u32 j) { return IQ4_VALUES[nibble(block + 8 + j / 32 * 16, j % 32)]; }
__device__ __forceinline__ u32 iq4_xs_sub_scale(const u8* block, u32 group) {
  u32 sub_block = group / 2;
  u32 low = block[4 + sub_block / 2] >> (4 * (sub_block % 2)) & 15;
  u32 high = block[2 + sub_block / 4] >> (2 * (sub_block % 4)) & 3;
  return (low | high << 4) - 32;
}
__device__ __forceinline__ u16 iq4_xs_d(const u8* block) { return load_u16(block); }
__device__ __forceinline__ float iq4_xs_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 136;
  float d = mul(load_f16(block), float(int(iq4_xs_sub_scale(block, i % 256 / 16))));
  return mul(d, float(iq4_xs_code(block, i % 256)));
}
