// The 32-value formats Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: an f16 scale, perhaps an f16 minimum, and codes.
//
// Byte `j` of the nibbles holds value `j` low and value `j + 16` high. Q5's fifth bits are a u32, bit `j` for value `j`.
#pragma once
#include "lib/num.cuh"

__device__ __forceinline__ u32 nibble(const u8* codes, u32 j) { return codes[j % 16] >> (j / 16 * 4) & 15; }
__device__ __forceinline__ u32 five_bits(const u8* high, const u8* codes, u32 j) {
  return nibble(codes, j) | (high[j / 8] >> (j % 8) & 1) << 4;
}

// `d * (code - 8)`; f16 d, 16 bytes of nibbles.
__device__ __forceinline__ const u8* q4_0_block(const u8* row, u32 i) { return row + i / 32 * 18; }
__device__ __forceinline__ int q4_0_code(const u8* block, u32 j) { return int(nibble(block + 2, j)) - 8; }
__device__ __forceinline__ float q4_0_value(const u8* row, u32 i) {
  const u8* block = q4_0_block(row, i);
  return mul(load_f16(block), float(q4_0_code(block, i % 32)));
}

// `d * code + m`; f16 d, f16 m, 16 bytes of nibbles. `q4_1_code` is less by 8, which fragments store.
__device__ __forceinline__ const u8* q4_1_block(const u8* row, u32 i) { return row + i / 32 * 20; }
__device__ __forceinline__ int q4_1_code(const u8* block, u32 j) { return int(nibble(block + 4, j)) - 8; }
__device__ __forceinline__ float q4_1_value(const u8* row, u32 i) {
  const u8* block = q4_1_block(row, i);
  return add(mul(load_f16(block), float(q4_1_code(block, i % 32) + 8)), load_f16(block + 2));
}

// `d * (code - 16)`; f16 d, u32 fifth bits, 16 bytes of nibbles.
__device__ __forceinline__ const u8* q5_0_block(const u8* row, u32 i) { return row + i / 32 * 22; }
__device__ __forceinline__ int q5_0_code(const u8* block, u32 j) {
  return int(five_bits(block + 2, block + 6, j)) - 16;
}
__device__ __forceinline__ float q5_0_value(const u8* row, u32 i) {
  const u8* block = q5_0_block(row, i);
  return mul(load_f16(block), float(q5_0_code(block, i % 32)));
}

// `d * code + m`; f16 d, f16 m, u32 fifth bits, 16 bytes of nibbles. `q5_1_code` is less by 16.
__device__ __forceinline__ const u8* q5_1_block(const u8* row, u32 i) { return row + i / 32 * 24; }
__device__ __forceinline__ int q5_1_code(const u8* block, u32 j) { return int(five_bits(block + 4, block + 8, j)) - 16; }
__device__ __forceinline__ float q5_1_value(const u8* row, u32 i) {
  const u8* block = q5_1_block(row, i);
  return add(mul(load_f16(block), float(q5_1_code(block, i % 32) + 16)), load_f16(block + 2));
}

// `d * code`; f16 d, 32 signed 8-bit codes.
__device__ __forceinline__ const u8* q8_0_block(const u8* row, u32 i) { return row + i / 32 * 34; }
__device__ __forceinline__ int q8_0_code(const u8* block, u32 j) { return i8(block[2 + j]); }
__device__ __forceinline__ float q8_0_value(const u8* row, u32 i) {
  const u8* block = q8_0_block(row, i);
  return mul(load_f16(block), float(q8_0_code(block, i % 32)));
}
