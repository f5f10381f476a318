// The clusters of largest score, the lower one on ties: one bit per cluster.
//
// Grid: rows, one block each; a thread holds KEYS clusters, THREADS apart. The least key of those taken is found bit by bit, from
// the top, by counting who reaches it; keys differ, so that ends with exactly `top` of them.
// Bytes per row: 4 * clusters in, clusters / 8 out.
// Requires top <= clusters <= KEYS * THREADS.
#include "lib/batch.cuh"
#include "lib/scored.cuh"

struct Params {
  Rows rows;
  const float* scores;  // [rows, clusters]
  u32* chosen;          // [rows, clusters / 32, rounded up]
  u32 clusters;
  u32 top;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/draft/nearest_clusters.rs differs");

constexpr u32 THREADS = 1024;

extern "C" __global__ void __launch_bounds__(THREADS) nearest_clusters(const Params p) {
  const u32 r = blockIdx.x, thread = threadIdx.x;
  if (!p.rows.has(r)) return;
  u64 keys[KEYS];
#pragma unroll
  for (u32 i = 0; i < KEYS; i++) {
    const u32 cluster = i * THREADS + thread;
    keys[i] = cluster < p.clusters ? scored(total_order(p.scores[u64(r) * p.clusters + cluster]), cluster) : 0;
  }
  u64 least = 0;
  for (u64 bit = 1ull << 63; bit; bit >>= 1) {
    u32 count = 0;
#pragma unroll
    for (u32 i = 0; i < KEYS; i++) count += __syncthreads_count(keys[i] >= (least | bit));
    if (count >= p.top) least |= bit;
    if (count == p.top) break;
  }
  const u32 words = (p.clusters + WARP - 1) / WARP;
#pragma unroll
  for (u32 i = 0; i < KEYS; i++) {
    const u32 chosen = __ballot_sync(ALL_LANES, keys[i] >= least), word = (i * THREADS + thread) / WARP;
    if (thread % WARP == 0 && word < words) p.chosen[u64(r) * words + word] = chosen;
  }
}
