// Top-k routing: the softmax of scaled router scores over all experts, the `top_k` largest renormalised, times each expert's scale.
// out[r] holds `top_k` expert numbers, then their weights. On ties the lower expert wins. Scores may come in parts that are added up
// here, [rows, parts, experts], with the sums of squares, [rows, parts], that their norm's factor follows from (`router_scores`).
//
// Grid: (rows), one warp per row.
// Bytes per row: 4 * parts * experts in, 8 * top_k out.
// Requires experts <= MAX_EXPERTS and top_k <= experts.
#include "lib/batch.cuh"
#include "lib/norm.cuh"
#include "lib/ptx.cuh"
#include "lib/reduce.cuh"

constexpr u32 MAX_EXPERTS = 1024;
// Keeps the renormalisation finite when the top-k share underflows.
constexpr float MIN_SHARE = 6.103515625e-5f;

struct Params {
  Rows rows;
  const float* scores;
  const float* squares;       // null where scores are whole and normed
  const float* expert_scale;  // may be null
  float* out;
  u32 experts;
  u32 top_k;
  float scale;  // of scores
  u32 parts;
  u32 columns;  // of the norm
  float eps;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/moe/route.rs differs");

// Order of floats as that of unsigned integers.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

extern "C" __global__ void route(const Params p) {
  __shared__ float left[MAX_EXPERTS];   // scores of experts not yet taken
  __shared__ float taken[MAX_EXPERTS];  // of each expert taken, its probability
  __shared__ u32 order[MAX_EXPERTS];    // experts in the order they were taken
  griddep_launch_dependents();
  griddep_wait();
  if (!p.rows.has(blockIdx.x)) return;
  const u32 lane = threadIdx.x;
  const float* scores = p.scores + u64(blockIdx.x) * p.parts * p.experts;
  float* out = p.out + u64(blockIdx.x) * 2 * p.top_k;
  float max = -INF;
  const auto take = [&](u32 e, float score) {
    left[e] = score;
    max = fmaxf(max, score);
  };
  if (p.squares) {
    float squares = 0;
    for (u32 part = 0; part < p.parts; part++) squares += p.squares[u64(blockIdx.x) * p.parts + part];
    const float norm = rms_scale_of(squares, p.columns, p.eps);
    for (u32 e = lane; e < p.experts; e += WARP) {
      float sum = 0;
#pragma unroll 8
      for (u32 part = 0; part < p.parts; part++) sum += scores[part * p.experts + e];
      take(e, mul(mul(sum, norm), p.scale));
    }
  } else {
    // One token waits for this: loads of several scores are on their way at once.
#pragma unroll 4
    for (u32 e = lane; e < p.experts; e += WARP) take(e, mul(scores[e], p.scale));
  }
  max = warp_max(max);
  float total = 0;
  for (u32 e = lane; e < p.experts; e += WARP) total += expf(left[e] - max);
  total = warp_sum(total);

  float share = 0;
  for (u32 k = 0; k < p.top_k; k++) {
    u32 best = 0, expert = p.experts;  // of this lane
    for (u32 e = lane; e < p.experts; e += WARP) {
      const u32 key = ordered(left[e]);
      if (key > best) {
        best = key;
        expert = e;
      }
    }
    const u32 best_of_all = __reduce_max_sync(ALL_LANES, best);
    expert = __reduce_min_sync(ALL_LANES, best == best_of_all ? expert : p.experts);
    expert = min(expert, p.experts - 1);  // rows whose scores are not numbers are routed, too
    if (lane == expert % WARP) left[expert] = -INF;
    const float probability = expf(unordered(best_of_all) - max) / total;
    share += probability;
    if (lane == 0) {
      order[k] = expert;
      taken[k] = probability;
    }
  }
  share = fmaxf(share, MIN_SHARE);
  __syncwarp();
  for (u32 k = lane; k < p.top_k; k += WARP) {
    const u32 expert = order[k];
    const float weight = taken[k] / share;
    out[k] = float(expert);
    out[p.top_k + k] = p.expert_scale ? weight * p.expert_scale[expert] : weight;
  }
}
