// TQ1_0 and TQ2_0: values of -1, 0 or 1 under one scale per 256. Q1_0: values of -1 or 1 under one per 128.
#pragma once
#include "lib/num.cuh"

// 48 bytes of five digits each, 4 bytes of four, f16 d. A byte is a fraction of 256: three times it, and what is beyond the byte
// is its first digit. The first 32 bytes hold the first digit of 32 values, then the second of the next 32; 16 bytes and 4
// bytes follow alike.
__device__ __forceinline__ int tq1_0_code(const u8* block, u32 j) {
  u32 byte, digit;
  if (j < 160) {
    byte = block[j % 32], digit = j / 32;
  } else if (j < 240) {
    byte = block[32 + j % 16], digit = (j - 160) / 16;
  } else {
    byte = block[48 + j % 4], digit = (j - 240) / 4;
  }
  for (u32 k = 0; k < digit; k++) byte = byte * 3 & 255;
  return int(byte * 3 >> 8) - 1;
}
__device__ __forceinline__ u32 tq1_0_sub_scale(const u8*, u32) { return 1; }
__device__ __forceinline__ u16 tq1_0_d(const u8* block) { return load_u16(block + 52); }
__device__ __forceinline__ float tq1_0_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 54;
  return mul(load_f16(block + 52), float(tq1_0_code(block, i % 256)));
}

// 64 bytes of four 2-bit codes, f16 d. Two halves of 128 values; step `k` of a half reads the bits at shift `2k` of its 32 bytes.
__device__ __forceinline__ int tq2_0_code(const u8* block, u32 j) {
  return int(block[j / 128 * 32 + j % 32] >> (2 * (j % 128 / 32)) & 3) - 1;
}
__device__ __forceinline__ u32 tq2_0_sub_scale(const u8*, u32) { return 1; }
__device__ __forceinline__ u16 tq2_0_d(const u8* block) { return load_u16(block + 64); }
__device__ __forceinline__ float tq2_0_value(const u8* row, u32 i) {
  const u8* block = row + i / 256 * 66;
  return mul(load_f16(block + 64), float(tq2_0_code(block, i % 256)));
}

// f16 d, 16 bytes; a set bit is a 1.
__device__ __forceinline__ int q1_0_code(const u8* block, u32 j) { return block[2 + j / 8] >> (j % 8) & 1 ? 1 : -1; }
__device__ __forceinline__ u32 q1_0_sub_scale(const u8*, u32) { return 1; }
__device__ __forceinline__ u16 q1_0_d(const u8* block) { return load_u16(block); }
__device__ __forceinline__ float q1_0_value(const u8* row, u32 i) {
  const u8* block = row + i / 128 * 18;
  return mul(load_f16(block), float(q1_0_code(block, i % 128)));
}
