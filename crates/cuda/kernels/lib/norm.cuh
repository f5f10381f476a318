// The RMS norm of one group by one block or one warp, shared by every kernel that norms, so that all of them agree bit for bit.
#pragma once
#include "lib/reduce.cuh"

__device__ __forceinline__ float rms_scale_of(float squares, u32 group, float eps) {
  return 1.0f / sqrtf(squares / float(group) + eps);
}

// `1 / sqrt(mean(x^2) + eps)` over `group` values, in every thread. The number of threads is a function of `group`
// alone.
__device__ __forceinline__ float rms_scale(const float* x, u32 group, float eps) {
  float squares = 0;
  for (u32 j = threadIdx.x; j < group; j += blockDim.x) squares += x[j] * x[j];
  return rms_scale_of(block_sum(squares), group, eps);
}

// Value `j` of the normed group; `weight` may be null.
__device__ __forceinline__ float normed(const float* x, u32 j, float scale, const float* weight) {
  float y = mul(x[j], scale);
  return weight ? mul(y, weight[j]) : y;
}
