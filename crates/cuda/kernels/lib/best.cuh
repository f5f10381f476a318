// The best k logits of a row, by one block: chunks with the best maxima, the candidates in them, and their sort.
#pragma once
#include "lib/sample.cuh"

// Candidates in no order.
struct List {
  u32 count;  // may be more than there is room for
  u64 keys[MAX_CANDIDATES];

  __device__ __forceinline__ void add(u64 key) {
    const u32 at = atomicAdd(&count, 1u);
    if (at < MAX_CANDIDATES) keys[at] = key;
  }
};

// A draw among the best k, by one block.
struct Best {
  const Row& row;
  u32 k;
  u32 mine[CHUNKS_PER_THREAD];  // maxima of this thread's chunks

  __device__ __forceinline__ Best(const Row& row) : row(row), k(min(row.setting.top_k, row.p.vocab)) {
#pragma unroll
    for (u32 i = 0; i < CHUNKS_PER_THREAD; i++) {
      const u32 chunk = threadIdx.x + i * PICK_THREADS;
      mine[i] = chunk < row.chunks ? row.maxima[chunk] : 0;
    }
  }

  // A number that k chunks reach, if that many have logits above minus infinity, and that few more do. Bit by bit from the
  // top, as long as there are many more.
  __device__ __forceinline__ u32 threshold() const {
    const u32 lowest = ORDERED_MINUS_INFINITY + 1;
    u32 found = 0;
    for (u32 bit = 1u << 31; bit; bit >>= 1) {
      u32 count = 0;
#pragma unroll
      for (u32 i = 0; i < CHUNKS_PER_THREAD; i++) count += __syncthreads_count(mine[i] >= max(found | bit, lowest));
      if (count < k) continue;
      found |= bit;
      if (count <= k + WARP) break;
    }
    return max(found, lowest);
  }

  // Calls `each(key, token)` for the logits of the chosen chunks, one warp per chunk.
  template <typename Each>
  __device__ __forceinline__ void for_logits(const u16* chosen, u32 count, Each each) const {
    for (u32 c = threadIdx.x / WARP; c < count; c += PICK_THREADS / WARP) {
      const u32 start = chosen[c] * CHUNK + threadIdx.x % WARP;
      u32 keys[PER_LANE];
#pragma unroll
      for (u32 i = 0; i < PER_LANE; i++) keys[i] = row.key(start + i * WARP);
#pragma unroll
      for (u32 i = 0; i < PER_LANE; i++) each(keys[i], start + i * WARP);
    }
  }
};

// Best first, by counting who is better. Threads share the counting for one candidate when there are few: the quickest then.
constexpr u32 MAX_COUNTED = 256;
__device__ __forceinline__ const u64* sort_by_counting(const u64* keys, u32 count) {
  __shared__ u32 rank[MAX_COUNTED];
  __shared__ u64 sorted[MAX_COUNTED];
  if (threadIdx.x < count) rank[threadIdx.x] = 0;
  __syncthreads();
  const u32 wide = (count + WARP - 1) / WARP * WARP, parts = PICK_THREADS / wide, per_part = (count + parts - 1) / parts;
  const u32 i = threadIdx.x % wide, from = threadIdx.x / wide * per_part;
  if (i < count) {
    const u64 key = keys[i];
    u32 better = 0;
    for (u32 j = from; j < min(from + per_part, count); j++) better += keys[j] > key;
    atomicAdd(&rank[i], better);
  }
  __syncthreads();
  if (threadIdx.x < count) sorted[rank[threadIdx.x]] = keys[threadIdx.x];
  __syncthreads();
  return sorted;
}

// Best first, in place, by a bitonic network over the next power of two.
__device__ __forceinline__ const u64* sort_by_exchange(u64* keys, u32 count) {
  u32 size = 1;
  while (size < count) size *= 2;
  for (u32 i = count + threadIdx.x; i < size; i += PICK_THREADS) keys[i] = 0;
  for (u32 run = 2; run <= size; run *= 2)
    for (u32 apart = run / 2; apart > 0; apart /= 2) {
      __syncthreads();
      for (u32 pair = threadIdx.x; pair < size / 2; pair += PICK_THREADS) {
        const u32 i = pair / apart * 2 * apart + pair % apart, j = i + apart;
        const u64 a = keys[i], b = keys[j];
        const bool descending = (i & run) == 0;
        if (descending == (a < b)) {
          keys[i] = b;
          keys[j] = a;
        }
      }
    }
  __syncthreads();
  return keys;
}
