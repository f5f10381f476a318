// rope(norm(k)) and norm(v), head by head, straight into their pages.
//
// Grid: (rows, KV heads), a block a head; its threads are a function of head_dim alone, as in norm.cu, whose bits it repeats.
// Bytes a row: 8 * columns in, 4 * columns out.
// Requires head_dim <= MOST_HEAD_DIM, and what store_kv.cu requires.
#include "lib/kv.cuh"
#include "lib/norm.cuh"
#include "lib/rope.cuh"

constexpr u32 MOST_HEAD_DIM = 512;

struct Params {
  Rows rows;
  Places places;
  Slot slot;
  const float* k;
  const float* k_weight;  // may be null
  const float* v;
  const float* v_weight;  // may be null
  const float* frequencies;
  u32 columns;
  u32 head_dim;
  float k_eps;
  float v_eps;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/norm_rope_store.rs differs");

extern "C" __global__ void norm_rope_store(const Params p) {
  __shared__ float head[MOST_HEAD_DIM];
  if (!p.rows.has(blockIdx.x)) return;
  const u64 start = u64(blockIdx.x) * p.columns + blockIdx.y * p.head_dim;
  const u32 row = p.rows.index[blockIdx.x];
  const u32 position = p.places.position[row];
  const float* k = p.k + start;
  const float k_scale = rms_scale(k, p.head_dim, p.k_eps);
  for (u32 j = threadIdx.x; j < p.head_dim; j += blockDim.x) head[j] = normed(k, j, k_scale, p.k_weight);
  __syncthreads();
  const u32 half = p.head_dim / 2;
  for (u32 j = threadIdx.x; j < half; j += blockDim.x) turn(head[j], head[j + half], position, p.frequencies[j]);
  __syncthreads();
  const float* v = p.v + start;
  const float v_scale = rms_scale(v, p.head_dim, p.v_eps);
  const u64 to = p.slot.cell(p.places.run[row], position, blockIdx.y);
  for (u32 j = threadIdx.x; j < p.head_dim; j += blockDim.x) {
    p.slot.keys[to + j] = float_to_half(head[j]);
    p.slot.values[to + j] = float_to_half(normed(v, j, v_scale, p.v_weight));
  }
}
