// Sums and maxima over warps and blocks. Every order is fixed, so results repeat exactly.
#pragma once
#include "lib/num.cuh"

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) x += __shfl_xor_sync(ALL_LANES, x, mask);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, mask));
  return x;
}

// The sum over all threads of a block, in every thread. Blocks have whole warps, at most 32 of them.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float of_warp[32];
  const u32 warps = blockDim.x / WARP;
  x = warp_sum(x);
  if (warps == 1) return x;
  __syncthreads();  // an earlier sum may still be read
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
  __syncthreads();
  float sum = 0;
  for (u32 warp = 0; warp < warps; warp++) sum += of_warp[warp];
  return sum;
}

// The maximum over all threads of a block, in every thread. Blocks have whole warps, at most 32 of them.
__device__ __forceinline__ float block_max(float x) {
  __shared__ float of_warp[32];
  const u32 warps = blockDim.x / WARP;
  x = warp_max(x);
  __syncthreads();  // an earlier maximum may still be read
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
  __syncthreads();
  return warp_max(threadIdx.x % WARP < warps ? of_warp[threadIdx.x % WARP] : of_warp[0]);
}

// Lanes trade halves of COUNT values each, a power of two, and join what they get with what they keep, until each has one: of the
// value that `lane * COUNT / WARP` counts, over the lanes that differ in the upper bits. Counts are constants, and values are chosen, not
// places to read them from: else they would lie in memory.
template <int HELD, int COUNT, typename Join>
__device__ __forceinline__ void trade(float (&x)[COUNT], const Join& join) {
  if constexpr (HELD > 0) {
    constexpr int MASK = WARP * HELD / COUNT;
    const bool upper = threadIdx.x & MASK;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const float first = x[i], second = x[i + HELD];
      x[i] = join(upper ? second : first, __shfl_xor_sync(ALL_LANES, upper ? first : second, MASK));
    }
    trade<HELD / 2>(x, join);
  }
}

// The result of `block_sum` for COUNT warps whose threads have one value each, from one warp whose lanes hold the values of all
// of them: the same tree and the same order, so the same bits. Lanes trade values, so that each adds up only its share.
template <int COUNT>
__device__ __forceinline__ float sum_of_warps(float (&x)[COUNT]) {
  float sum = 0;
  if (COUNT & (COUNT - 1)) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += warp_sum(x[i]);
    return sum;
  }
  trade<COUNT / 2>(x, [](float kept, float got) { return kept + got; });
#pragma unroll
  for (int mask = 16 / COUNT; mask > 0; mask /= 2) x[0] += __shfl_xor_sync(ALL_LANES, x[0], mask);
#pragma unroll
  for (int i = 0; i < COUNT; i++) sum += __shfl_sync(ALL_LANES, x[0], i * int(WARP) / COUNT);
  return sum;
}
