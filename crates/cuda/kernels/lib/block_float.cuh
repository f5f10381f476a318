// F32, F16 and BF16: a "block" is one value.
#pragma once
#include "lib/num.cuh"

__device__ __forceinline__ float f32_value(const u8* row, u32 i) { return ((const float*)row)[i]; }
__device__ __forceinline__ float f16_value(const u8* row, u32 i) { return f16_to_f32(((const u16*)row)[i]); }
__device__ __forceinline__ float bf16_value(const u8* row, u32 i) {
  return __uint_as_float(u32(((const u16*)row)[i]) << 16);
}
