// Logits of the tokens in chosen clusters, as a dense head would give them in f32; negative infinity for all others.
//
// Grid: (rows, blocks of 8 warps), a warp per 32 tokens: it finds those that are chosen and multiplies their rows one by one.
// Bytes per row: 4 * vocab in and out, and the packed rows of the chosen tokens.
#include "lib/batch.cuh"
#include "lib/dot.cuh"

struct Params {
  Rows rows;
  const float* x;
  const u8* w;
  u64 row_bytes;
  const u32* cluster_of;  // [vocab]
  const u32* chosen;      // [rows, clusters / 32, rounded up], a bit each
  float* out;
  u32 columns;
  u32 vocab;
  u32 clusters;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/draft/cluster_logits.rs differs");

extern "C" __global__ void __launch_bounds__(256) cluster_logits(const Params p) {
  const u32 r = blockIdx.x, lane = threadIdx.x % WARP;
  const u32 first = (blockIdx.y * blockDim.x + threadIdx.x) / WARP * WARP, token = first + lane;
  if (!p.rows.has(r) || first >= p.vocab) return;
  bool is_chosen = false;
  if (token < p.vocab) {
    const u32 cluster = p.cluster_of[token], words = (p.clusters + WARP - 1) / WARP;
    is_chosen = p.chosen[u64(r) * words + cluster / WARP] >> cluster % WARP & 1;
  }
  const float* const x[1] = {p.x + u64(r) * p.columns};
  float logit = -INF;
  for (u32 left = __ballot_sync(ALL_LANES, is_chosen); left; left &= left - 1) {
    const u32 at = __ffs(left) - 1;
    float sum[1];
    dot_rows<1>(p.w + u64(first + at) * p.row_bytes, x, p.columns, sum);
    if (lane == at) logit = sum[0];
  }
  if (token < p.vocab) p.out[u64(r) * p.vocab + token] = logit;
}
