// Queries: out = rope(norm(x)), head by head. Keys and values: rope(norm(k)) and norm(v) straight into their page.
//
// Grid: (rows, heads), a block a head; its threads are a function of head_dim alone, as in norm.cu, whose bits it repeats.
// Bytes a row: `norm_rope` 4 * columns in and out; `norm_rope_store` 8 * columns in, 4 * columns out.
// Requires head_dim <= MOST_HEAD_DIM; for the store, what store_kv.cu requires.
#include "lib/kv.cuh"
#include "lib/norm.cuh"
#include "lib/rope.cuh"

constexpr u32 MOST_HEAD_DIM = 512;

struct Params {
  Rows rows;
  Places places;
  Slot slot;  // `norm_rope_store` only
  const float* x;
  const float* weight;  // may be null
  const float* v;
  const float* v_weight;  // may be null
  const float* frequencies;
  float* out;  // `norm_rope` only
  u32 columns;
  u32 head_dim;
  float eps;
  float v_eps;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/norm_rope.rs differs");

// Leaves the normed, turned head in `head`.
__device__ __forceinline__ void norm_and_turn(const Params& p, const float* x, u32 position, float* head) {
  const float scale = rms_scale(x, p.head_dim, p.eps);
  for (u32 j = threadIdx.x; j < p.head_dim; j += blockDim.x) head[j] = normed(x, j, scale, p.weight);
  __syncthreads();
  const u32 half = p.head_dim / 2;
  for (u32 j = threadIdx.x; j < half; j += blockDim.x) turn(head[j], head[j + half], position, p.frequencies[j]);
  __syncthreads();
}

extern "C" __global__ void norm_rope(const Params p) {
  __shared__ float head[MOST_HEAD_DIM];
  if (!p.rows.has(blockIdx.x)) return;
  const u64 start = u64(blockIdx.x) * p.columns + blockIdx.y * p.head_dim;
  norm_and_turn(p, p.x + start, p.places.position[p.rows.index[blockIdx.x]], head);
  for (u32 j = threadIdx.x; j < p.head_dim; j += blockDim.x) p.out[start + j] = head[j];
}

extern "C" __global__ void norm_rope_store(const Params p) {
  __shared__ float head[MOST_HEAD_DIM];
  if (!p.rows.has(blockIdx.x)) return;
  const u64 start = u64(blockIdx.x) * p.columns + blockIdx.y * p.head_dim;
  const u32 row = p.rows.index[blockIdx.x];
  const u32 position = p.places.position[row];
  norm_and_turn(p, p.x + start, position, head);
  const float* v = p.v + start;
  const float v_scale = rms_scale(v, p.head_dim, p.v_eps);
  const u64 to = p.slot.cell(p.places.run[row], position, blockIdx.y);
  for (u32 j = threadIdx.x; j < p.head_dim; j += blockDim.x) {
    p.slot.keys[to + j] = float_to_half(head[j]);
    p.slot.values[to + j] = float_to_half(normed(v, j, v_scale, p.v_weight));
  }
}
