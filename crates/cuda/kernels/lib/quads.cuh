// Four neighbouring columns per thread, and the sums of lib/reduce.cuh and lib/norm.cuh in that arrangement, bit for bit.
//
// Thread t stands for the threads 4t .. 4t+3 there, so eight threads stand for a warp. Additions are the same ones in the same
// order (which of two operands comes first changes nothing).
#pragma once
#include "lib/reduce.cuh"

__device__ __forceinline__ float4 no_quad() { return make_float4(0, 0, 0, 0); }

// `warp_sum` of the 32 values of eight threads side by side, in all of them. Its first steps add values of different threads,
// and every thread keeps only the part of the sums that it goes on with: six exchanges instead of twelve.
__device__ __forceinline__ float quads_sum(float4 x) {
  const bool upper = threadIdx.x & 4, odd = threadIdx.x & 2;
  float a = upper ? x.z : x.x, b = upper ? x.w : x.y;
  a += __shfl_xor_sync(ALL_LANES, upper ? x.x : x.z, 4);
  b += __shfl_xor_sync(ALL_LANES, upper ? x.y : x.w, 4);
  float sum = odd ? b : a;
  sum += __shfl_xor_sync(ALL_LANES, odd ? a : b, 2);
  sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  sum += __shfl_xor_sync(ALL_LANES, sum, 4);
  sum += __shfl_xor_sync(ALL_LANES, sum, 2);
  return sum;
}

__device__ __forceinline__ void add_squares(float4& sum, float4 x) {
  sum.x += x.x * x.x;
  sum.y += x.y * x.y;
  sum.z += x.z * x.z;
  sum.w += x.w * x.w;
}

// `rms_scale` from the sum of squares.
__device__ __forceinline__ float scale_of_squares(float squares, u32 group, float eps) {
  return 1.0f / sqrtf(squares / float(group) + eps);
}

// `normed` of four columns; without a weight, where `weight` is null, `w` does not count.
__device__ __forceinline__ float4 normed_quad(float4 x, float scale, const float* weight, float4 w) {
  const float4 y = make_float4(mul(x.x, scale), mul(x.y, scale), mul(x.z, scale), mul(x.w, scale));
  return weight ? make_float4(mul(y.x, w.x), mul(y.y, w.y), mul(y.z, w.z), mul(y.w, w.w)) : y;
}
