// IQ1_S and IQ1_M: eight values of -1, 0 or 1 at a time from a grid, all moved up or down by an eighth. Codes are eight times
// that, and scales an eighth of `d * (2 * scale + 1)`.
#pragma once
#include "lib/grid.cuh"

__device__ __forceinline__ float iq1_scale(float d, u32 number) { return mul(mul(d, float(2 * (number & 7) + 1)), 0.125f); }

#if GRID_IS(iq1_s)
// f16 d, 32 bytes of grid numbers, then per 32 values a u16: four times the numbers' upper three bits, a 3-bit scale, the
// direction on top.
__device__ __forceinline__ int iq1_s_code(const u8* block, u32 j) {
  const u32 high = load_u16(block + 34 + j / 32 * 2), number = block[2 + j / 8] | (high >> (3 * (j / 8 % 4)) & 7) << 8;
  return grid_byte(IQ1_GRID[number], j % 8) + (high >> 15 ? -1 : 1);
}
__device__ __forceinline__ u32 iq1_s_sub_scale(const u8* block, u32 group) {
  return 2 * (load_u16(block + 34 + group / 2 * 2) >> 12 & 7) + 1;
}
__device__ __forceinline__ u16 iq1_s_d(const u8* block) { return load_u16(block); }
__device__ __forceinline__ float iq1_s_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 50;
  i %= 256;
  return mul(iq1_scale(load_f16(block), load_u16(block + 34 + i / 32 * 2) >> 12), float(iq1_s_code(block, i)));
}
#endif

#if GRID_IS(iq1_m)
// 32 bytes of grid numbers, 16 bytes with a nibble per number (its upper three bits, the direction), four u16 with four 3-bit
// scales of 16 values each and a nibble of f16 d on top.
__device__ __forceinline__ int iq1_m_code(const u8* block, u32 j) {
  const u32 k = j / 8, high = block[32 + k / 2] >> (4 * (k % 2)), number = block[k] | (high & 7) << 8;
  return grid_byte(IQ1_GRID[number], j % 8) + (high & 8 ? -1 : 1);
}
__device__ __forceinline__ u16 iq1_m_d(const u8* block) {
  return u16(block[49] >> 4 | block[51] >> 4 << 4 | block[53] >> 4 << 8 | block[55] >> 4 << 12);
}
__device__ __forceinline__ u32 iq1_m_sub_scale(const u8* block, u32 group) {
  return 2 * (load_u16(block + 48 + group / 4 * 2) >> (3 * (group % 4)) & 7) + 1;
}
__device__ __forceinline__ float iq1_m_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 56;
  i %= 256;
  const u32 number = load_u16(block + 48 + i / 64 * 2) >> (3 * (i / 16 % 4));
  return mul(iq1_scale(f16_to_f32(iq1_m_d(block)), number), float(iq1_m_code(block, i)));
}
#endif
