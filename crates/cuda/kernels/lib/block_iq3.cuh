// IQ3_XXS and IQ3_S: four values at a time from a grid, with signs of eight and scales of 32 apart.
#pragma once
#include "lib/grid.cuh"

#if GRID_IS(iq3_xxs)
// `d * (scale + 1/2) / 2`; f16 d, 64 bytes of grid numbers, then per 32 values a u32: four times seven signs, a 4-bit scale on
// top.
__device__ __forceinline__ int iq3_xxs_code(const u8* block, u32 j) {
  const u32 high = load_u32(block + 66 + j / 32 * 4);
  return even_signed(grid_byte(IQ3_XXS_GRID[block[2 + j / 4]], j % 4), high >> (7 * (j / 8 % 4)), j % 8);
}
__device__ __forceinline__ u32 iq3_xxs_sub_scale(const u8* block, u32 group) { return 2 * (block[66 + group / 2 * 4 + 3] >> 4) + 1; }
__device__ __forceinline__ u16 iq3_xxs_d(const u8* block) { return load_u16(block); }
__device__ __forceinline__ float iq3_xxs_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 98;
  i %= 256;
  const u32 scale = block[66 + i / 32 * 4 + 3] >> 4;
  return mul(mul(mul(load_f16(block), float(scale) + 0.5f), 0.5f), float(iq3_xxs_code(block, i)));
}
#endif

#if GRID_IS(iq3_s)
// `d * (2 * scale + 1)`; f16 d, 64 bytes of grid numbers, 8 bytes of their ninth bits, 32 bytes of signs, 4 bytes of 4-bit
// scales.
__device__ __forceinline__ int iq3_s_code(const u8* block, u32 j) {
  const u32 k = j / 4, number = block[2 + k] | (block[66 + k / 8] >> (k % 8) & 1) << 8;
  return with_sign(grid_byte(IQ3_S_GRID[number], j % 4), block[74 + j / 8] >> (j % 8));
}
__device__ __forceinline__ u32 iq3_s_sub_scale(const u8* block, u32 group) {
  return 2 * (block[106 + group / 4] >> (4 * (group / 2 % 2)) & 15) + 1;
}
__device__ __forceinline__ u16 iq3_s_d(const u8* block) { return load_u16(block); }
__device__ __forceinline__ float iq3_s_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 110;
  i %= 256;
  const u32 scale = block[106 + i / 64] >> (4 * (i / 32 % 2)) & 15;
  return mul(mul(load_f16(block), float(2 * scale + 1)), float(iq3_s_code(block, i)));
}
#endif
