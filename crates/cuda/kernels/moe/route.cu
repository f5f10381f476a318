// Top-k routing: the softmax of router scores over all experts, the `top_k` largest renormalised, times each expert's scale.
// out[r] holds `top_k` expert numbers, then their weights. On ties the lower expert wins.
//
// Grid: (rows), one warp per row.
// Bytes per row: 4 * experts in, 8 * top_k out.
// Requires experts <= MAX_EXPERTS and top_k <= experts.
#include "lib/batch.cuh"
#include "lib/reduce.cuh"

constexpr u32 MAX_EXPERTS = 1024;
// Keeps the renormalisation finite when the top-k share underflows.
constexpr float MIN_SHARE = 6.103515625e-5f;

struct Params {
  Rows rows;
  const float* scores;
  const float* expert_scale;  // may be null
  float* out;
  u32 experts;
  u32 top_k;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/moe/route.rs differs");

extern "C" __global__ void route(const Params p) {
  __shared__ float left[MAX_EXPERTS];  // scores of experts not yet taken
  if (!p.rows.has(blockIdx.x)) return;
  const u32 lane = threadIdx.x;
  const float* scores = p.scores + u64(blockIdx.x) * p.experts;
  float* out = p.out + u64(blockIdx.x) * 2 * p.top_k;
  float max = -INF;
  for (u32 e = lane; e < p.experts; e += WARP) {
    left[e] = scores[e];
    max = fmaxf(max, scores[e]);
  }
  max = warp_max(max);
  float total = 0;
  for (u32 e = lane; e < p.experts; e += WARP) total += expf(scores[e] - max);
  total = warp_sum(total);

  float share = 0;
  for (u32 k = 0; k < p.top_k; k++) {
    float best = -INF;
    u32 expert = p.experts;
    for (u32 e = lane; e < p.experts; e += WARP) {
      if (left[e] > best) {
        best = left[e];
        expert = e;
      }
    }
    for (int mask = 16; mask > 0; mask >>= 1) {
      const float other = __shfl_xor_sync(ALL_LANES, best, mask);
      const u32 other_expert = __shfl_xor_sync(ALL_LANES, expert, mask);
      if (other > best || (other == best && other_expert < expert)) {
        best = other;
        expert = other_expert;
      }
    }
    expert = min(expert, p.experts - 1);  // rows whose scores are not numbers are routed, too
    if (lane == expert % WARP) left[expert] = -INF;
    const float probability = expf(best - max) / total;
    share += probability;
    if (lane == 0) {
      out[k] = float(expert);
      out[p.top_k + k] = probability;
    }
  }
  share = fmaxf(share, MIN_SHARE);
  if (lane != 0) return;
  for (u32 k = 0; k < p.top_k; k++) {
    const float weight = out[p.top_k + k] / share;
    out[p.top_k + k] = p.expert_scale ? weight * p.expert_scale[u32(out[k])] : weight;
  }
}
