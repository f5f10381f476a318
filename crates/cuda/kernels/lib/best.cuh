// The best k logits of a row, by one block: chunks with the best maxima, the candidates in them, and their sort.
#pragma once
#include "lib/sample.cuh"

// Indices in a list that grows by one for each lane that has something; of the others they mean nothing. Whole warps call it.
__device__ __forceinline__ u32 next_index(u32& count, bool has) {
  const u32 lanes = __ballot_sync(ALL_LANES, has), lane = threadIdx.x % WARP;
  u32 first = 0;
  if (lanes && lane == 0) first = atomicAdd(&count, u32(__popc(lanes)));
  return __shfl_sync(ALL_LANES, first, 0) + __popc(lanes & ((1u << lane) - 1));
}

// Candidates in no order.
struct List {
  u32 count;  // may be more than there is room for
  u64 keys[MAX_CANDIDATES];

  // Adds what a lane has, if it has something. Whole warps call it.
  __device__ __forceinline__ void add(u64 key, bool has) {
    const u32 at = next_index(count, has);
    if (has && at < MAX_CANDIDATES) keys[at] = key;
  }
};

// Chunks of logits that a warp reads at once: one block waits for memory more than for anything else.
constexpr u32 CHUNKS_AT_ONCE = 4;

// Calls `each(key, token, has)` for the wanted logits of some chunks, `chunk_of(0)` and so on up to `count`, one warp per chunk: whole
// warps at a time, of whose lanes some may have none. Few are wanted, so that these are read again.
template <typename Keys, typename ChunkOf, typename Wanted, typename Each>
__device__ __forceinline__ void for_logits(const Keys& row, u32 count, ChunkOf chunk_of, Wanted wanted, Each each) {
  constexpr u32 WARPS = PICK_THREADS / WARP;
  const u32 lane = threadIdx.x % WARP;
  for (u32 c = threadIdx.x / WARP; c < count; c += CHUNKS_AT_ONCE * WARPS) {
    u32 keys[CHUNKS_AT_ONCE][PER_LANE], starts[CHUNKS_AT_ONCE];
#pragma unroll
    for (u32 j = 0; j < CHUNKS_AT_ONCE; j++) {
      const u32 at = c + j * WARPS;
      starts[j] = (at < count ? chunk_of(at) * CHUNK : MAX_VOCAB) + lane;
#pragma unroll
      for (u32 i = 0; i < PER_LANE; i++) keys[j][i] = row.key(starts[j] + i * WARP);
    }
    u32 found = 0;
#pragma unroll
    for (u32 j = 0; j < CHUNKS_AT_ONCE; j++) {
#pragma unroll
      for (u32 i = 0; i < PER_LANE; i++) found |= u32(keys[j][i] && wanted(keys[j][i], starts[j] + i * WARP)) << (j * PER_LANE + i);
    }
    for (; __any_sync(ALL_LANES, found); found &= found - 1) {
      const u32 number = found ? __ffs(found) - 1 : 0, token = chunk_of(c + number / PER_LANE * WARPS) * CHUNK + lane + number % PER_LANE * WARP;
      each(found ? row.key(token) : 0, token, found != 0);
    }
  }
}

// The chunks that the best k keys at or above `lowest` lie in. `Keys` has `maxima`, `chunks` and `key(token)`.
template <typename Keys>
struct Best {
  const Keys& row;
  u32 k, lowest;
  u32 mine[CHUNKS_PER_THREAD];  // maxima of this thread's chunks

  __device__ __forceinline__ Best(const Keys& row, u32 k, u32 lowest) : row(row), k(k), lowest(lowest) {
#pragma unroll
    for (u32 i = 0; i < CHUNKS_PER_THREAD; i++) {
      const u32 chunk = threadIdx.x + i * PICK_THREADS;
      mine[i] = chunk < row.chunks ? row.maxima[chunk] : 0;
    }
  }

  // A number that k chunks reach, if that many reach the lowest, and that few more do. Bit by bit from the top, as long as
  // there are many more.
  __device__ __forceinline__ u32 threshold() const {
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

// Best first, in the quickest way for so many. They may stay where they are, and hold until the next call.
__device__ __forceinline__ const u64* sorted_best_first(u64* keys, u32 count) {
  if (count == 0) return keys;
  return count <= MAX_COUNTED ? sort_by_counting(keys, count) : sort_by_exchange(keys, count);
}

// The best k keys at or above `lowest`, best first, with their tokens as `scored` joins them. `count` may be more than k. By all
// threads of a block; what it returns holds until the next call.
template <typename Keys>
__device__ __forceinline__ const u64* best_first(const Keys& row, u32 k, u32 lowest, u32& count) {
  __shared__ u16 chosen[MAX_CHUNKS];
  __shared__ u32 chosen_count, tally[2];
  __shared__ List list;
  const u32 thread = threadIdx.x, lane = thread % WARP;
  const Best<Keys> best(row, k, lowest);
  if (thread == 0) chosen_count = list.count = 0;
  const u32 threshold = best.threshold();  // has barriers
  for (u32 i = 0; i < CHUNKS_PER_THREAD; i++)
    if (best.mine[i] >= threshold) chosen[atomicAdd(&chosen_count, 1u)] = (u16)(thread + i * PICK_THREADS);
  __syncthreads();
  const auto chunk_of = [&](u32 i) { return u32(chosen[i]); };
  const auto reaches = [&](u32 key, u32) { return key >= threshold; };
  const auto add = [&](u32 key, u32 token, bool has) { list.add(scored(key, token), has); };
  for_logits(row, chosen_count, chunk_of, reaches, add);
  __syncthreads();
  count = list.count;
  if (count > MAX_CANDIDATES) {
    // Very many ties, or the best crowd together: find the last of the best exactly. Slow, and no model does this.
    u64 last = 0;
    for (u32 round = 0; round < 64; round++) {
      const u64 bit = 1ull << (63 - round);
      u32* sum = &tally[round % 2];  // the other may still be read
      if (thread == 0) *sum = 0;
      __syncthreads();
      u32 reached = 0;
      for_logits(row, chosen_count, chunk_of, reaches, [&](u32 key, u32 token, bool has) {
        reached += has && scored(key, token) >= (last | bit);
      });
      reached = __reduce_add_sync(ALL_LANES, reached);
      if (lane == 0) atomicAdd(sum, reached);
      __syncthreads();
      if (*sum >= k) last |= bit;
    }
    if (thread == 0) list.count = 0;
    __syncthreads();
    const auto is_best = [&](u32 key, u32 token) { return key >= threshold && scored(key, token) >= last; };
    for_logits(row, chosen_count, chunk_of, is_best, add);
    __syncthreads();
    count = list.count;
  }
  return sorted_best_first(list.keys, count);
}
