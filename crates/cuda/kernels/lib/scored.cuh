// Scores as integers of the same order, joined with the token they are of; the best of a block and the last block of a row.
#pragma once
#include "lib/reduce.cuh"

// The order of all bit patterns: negative zero below zero, and what is not a number beyond the infinities.
__device__ __forceinline__ u32 total_order(float x) {
  const u32 bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Ordered like the numbers; both zeros are one number, and what is not a number is below them all. 0 is left for tokens that
// are masked.
__device__ __forceinline__ u32 ordered(float x) { return x != x ? 1 : total_order(x + 0.0f); }

__device__ __forceinline__ u64 scored(u32 score, u32 token) { return u64(score) << 32 | u32(~token); }
__device__ __forceinline__ u32 token_of(u64 key) { return ~u32(key); }

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

__device__ __forceinline__ u64 warp_best(u64 x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    const u32 low = __shfl_xor_sync(ALL_LANES, u32(x), mask), high = __shfl_xor_sync(ALL_LANES, u32(x >> 32), mask);
    x = larger(x, u64(high) << 32 | low);
  }
  return x;
}

// The largest over all threads of a block, in every thread.
__device__ __forceinline__ u64 block_best(u64 x) {
  __shared__ u64 of_warp[32];
  x = warp_best(x);
  __syncthreads();  // an earlier one may still be read
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
  __syncthreads();
  const u32 lane = threadIdx.x % WARP;
  return warp_best(lane < blockDim.x / WARP ? of_warp[lane] : 0);
}

// Whether this block is the last of `blocks` to arrive; what the others wrote before can then be read past L1.
__device__ __forceinline__ bool is_last(u32* arrived, u32 blocks) {
  __shared__ u32 others;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) others = atomicAdd(arrived, 1u);
  __syncthreads();
  __threadfence();
  if (others + 1 < blocks) return false;
  if (threadIdx.x == 0) *arrived = 0;
  return true;
}
