// IQ2_XXS, IQ2_XS and IQ2_S: eight values at a time from a grid, with signs and scales apart. A value is
// `d * (scale + 1/2) / 4` times a magnitude of the grid. `_code` is the signed magnitude, `_sub_scale`
// twice the scale and one.
#pragma once
#include "lib/grid.cuh"

__device__ __forceinline__ float iq2_scale(const u8* block, u32 number) {
  return mul(mul(load_f16(block), float(number) + 0.5f), 0.25f);
}
// Scales of 16 values, two in a byte.
__device__ __forceinline__ u32 nibble_at(const u8* nibbles, u32 i) { return nibbles[i / 2] >> (4 * (i % 2)) & 15; }

#if GRID_IS(iq2_xxs)
// f16 d, then per 32 values four bytes of grid numbers and a u32: four times seven signs, a 4-bit scale on top.
__device__ __forceinline__ int iq2_xxs_code(const u8* block, u32 j) {
  const u8* sub = block + 2 + j / 32 * 8;
  return even_signed(grid_byte(IQ2_XXS_GRID[sub[j / 8 % 4]], j % 8), load_u32(sub + 4) >> (7 * (j / 8 % 4)), j % 8);
}
__device__ __forceinline__ u32 iq2_xxs_sub_scale(const u8* block, u32 group) { return 2 * (block[2 + group / 2 * 8 + 7] >> 4) + 1; }
__device__ __forceinline__ u16 iq2_xxs_d(const u8* block) { return load_u16(block); }
__device__ __forceinline__ float iq2_xxs_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 66;
  i %= 256;
  return mul(iq2_scale(block, block[2 + i / 32 * 8 + 7] >> 4), float(iq2_xxs_code(block, i)));
}
#endif

#if GRID_IS(iq2_xs)
// f16 d, 32 u16 (9 bits of grid number, seven signs), 8 bytes of 4-bit scales.
__device__ __forceinline__ int iq2_xs_code(const u8* block, u32 j) {
  const u32 number = load_u16(block + 2 + j / 8 * 2);
  return even_signed(grid_byte(IQ2_XS_GRID[number & 511], j % 8), number >> 9, j % 8);
}
__device__ __forceinline__ u32 iq2_xs_sub_scale(const u8* block, u32 group) { return 2 * nibble_at(block + 66, group) + 1; }
__device__ __forceinline__ u16 iq2_xs_d(const u8* block) { return load_u16(block); }
__device__ __forceinline__ float iq2_xs_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 74;
  i %= 256;
  return mul(iq2_scale(block, nibble_at(block + 66, i / 16)), float(iq2_xs_code(block, i)));
}
#endif

#if GRID_IS(iq2_s)
// f16 d, 32 bytes of grid numbers, 32 bytes of signs, 8 bytes of the numbers' upper two bits, 8 bytes of 4-bit scales.
__device__ __forceinline__ int iq2_s_code(const u8* block, u32 j) {
  const u32 k = j / 8, number = block[2 + k] | (block[66 + k / 4] >> (2 * (k % 4)) & 3) << 8;
  return with_sign(grid_byte(IQ2_S_GRID[number], j % 8), block[34 + k] >> (j % 8));
}
__device__ __forceinline__ u32 iq2_s_sub_scale(const u8* block, u32 group) { return 2 * nibble_at(block + 74, group) + 1; }
__device__ __forceinline__ u16 iq2_s_d(const u8* block) { return load_u16(block); }
__device__ __forceinline__ float iq2_s_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 82;
  i %= 256;
  return mul(iq2_scale(block, nibble_at(block + 74, i / 16)), float(iq2_s_code(block, i)));
}
#endif
