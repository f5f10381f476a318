// The CUDA C++ that our kernels use, for an ordinary compiler: put before a kernel's text by compiler.cpp.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "runtime.hpp"

extern "C" {
Emulation* emulation;
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Blocks run one after another, so what a block shares is a variable that all its threads see.
#define __shared__ static
#define threadIdx (emulation->thread)
#define blockIdx (emulation->block)
#define blockDim (emulation->block_size)
#define gridDim (emulation->grid_size)
#define __syncthreads() emulation->sync_block()

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

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
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
