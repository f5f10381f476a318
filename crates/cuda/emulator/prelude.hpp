// The CUDA C++ that our kernels use, for an ordinary compiler: put before a kernel's text by compiler.cpp.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <thread>

#include "runtime.hpp"

extern "C" {
Emulation* emulation;
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
// Blocks run one after another, so what a block shares is a variable that all its threads see.
#define __shared__ static
#define threadIdx (emulation->thread)
#define blockIdx (emulation->block)
#define blockDim (emulation->block_size)
#define gridDim (emulation->grid_size)
#define __syncthreads() emulation->sync_block()
#define __align__(n) alignas(n)
#define __restrict__
#define __constant__ static const
#define __host__
#define __noinline__

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits of another size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  unsigned lane = emulation->thread.x % 32;
  return bits_as<T>(emulation->exchange(bits_as<unsigned>(value), lane ^ unsigned(mask)));
}

template <typename T>
inline T __shfl_sync(unsigned, T value, int from) {
  return bits_as<T>(emulation->exchange(bits_as<unsigned>(value), unsigned(from) % 32));
}
template <typename T>
inline T __shfl_down_sync(unsigned, T value, unsigned by) {
  unsigned lane = emulation->thread.x % 32;
  return bits_as<T>(emulation->exchange(bits_as<unsigned>(value), lane + by < 32 ? lane + by : lane));
}
inline void __syncwarp(unsigned = 0xffffffffu) { emulation->exchange(0, 0); }
inline unsigned __ballot_sync(unsigned, bool holds) {
  unsigned all[32][8], own = holds, bits = 0;
  emulation->gather(&own, 1, &all[0][0]);
  for (unsigned i = 0; i < 32; i++) bits |= (all[i][0] & 1) << i;
  return bits;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  unsigned all[32][8], most = 0;
  emulation->gather(&value, 1, &all[0][0]);
  for (unsigned i = 0; i < 32; i++) most = most < all[i][0] ? all[i][0] : most;
  return most;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) { return ~__reduce_max_sync(mask, ~value); }
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  unsigned all[32][8], sum = 0;
  emulation->gather(&value, 1, &all[0][0]);
  for (unsigned i = 0; i < 32; i++) sum += all[i][0];
  return sum;
}
inline int __syncthreads_count(bool holds) {
  static int count;
  emulation->sync_block();  // an earlier count may still be read
  count = 0;
  emulation->sync_block();
  count += holds;
  emulation->sync_block();
  return count;
}
inline bool __any_sync(unsigned mask, bool holds) { return __ballot_sync(mask, holds) != 0; }
// Blocks run one after another and fibers give way only where they wait, so these are what they say.
template <typename T>
inline T atomicAdd(T* at, T by) {
  T was = *at;
  *at = was + by;
  return was;
}
template <typename T>
inline T atomicMax(T* at, T with) {
  T was = *at;
  *at = was < with ? with : was;
  return was;
}
template <typename T>
inline T atomicExch(T* at, T with) {
  T was = *at;
  *at = with;
  return was;
}
inline void __threadfence() {}
template <typename T>
inline T __ldg(const T* at) {
  return *at;
}
template <typename T>
inline T __ldcg(const T* at) {
  return *at;
}
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline int __float2int_rn(float value) { return int(std::nearbyintf(value)); }
inline unsigned __popc(unsigned bits) { return unsigned(__builtin_popcount(bits)); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline void __sincosf(float x, float* sin, float* cos) { *sin = std::sin(x), *cos = std::cos(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += int((signed char)(a >> 8 * i)) * int((signed char)(b >> 8 * i));
  return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = a | (unsigned long long)b << 32;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline float emulated_half_to_float(unsigned short bits) { return _cvtsh_ss(bits); }
inline unsigned short emulated_float_to_half(float value) { return _cvtss_sh(value, 0); }

template <typename T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
