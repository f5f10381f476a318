// Numbers: sized integers and 16-bit floats held as their bits. No toolkit header is included anywhere, so a driver and
// NVRTC are all a machine needs.
//
// `mul`, `add` and `sub` round each operation by itself. Plain operators may be contracted to fused multiply-adds, which is
// what dot products want and what values defined elsewhere bit by bit (dequantized weights, angles) must not have.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A bit pattern, because the name in C needs a header.
#define INF __int_as_float(0x7f800000)

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }

__device__ __forceinline__ float f16_to_f32(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ u16 f32_to_f16(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

#define JOIN_NAMES(a, b) a##b
#define JOIN(a, b) JOIN_NAMES(a, b)

// Two bytes that need not be aligned: rows of blocks are packed.
__device__ __forceinline__ u16 load_u16(const u8* at) { return u16(at[0] | at[1] << 8); }
__device__ __forceinline__ float load_f16(const u8* at) { return f16_to_f32(load_u16(at)); }

// GELU, tanh approximation.
__device__ __forceinline__ float gelu(float z) {
  return 0.5f * z * (1.0f + tanhf(0.7978846f * z * (1.0f + 0.044715f * z * z)));
}

// The same by the hardware's exponential, a fifth of the instructions: off by a few millionths.
__device__ __forceinline__ float fast_gelu(float z) {
  return __fdividef(z, 1.0f + __expf(-1.5957691f * z * (1.0f + 0.044715f * z * z)));
}
