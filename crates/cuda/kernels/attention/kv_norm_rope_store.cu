// rope(norm(k)) and norm(v), head by head, straight into their pages.
//
// Grid: (rows, KV heads), one block per head; its threads are a function of head_dim alone, as in rms_norm.cu,
// whose bits it repeats.
// Bytes per row: 8 * columns in, 4 * columns out.
// Requires head_dim <= MAX_HEAD_DIM, and what store_kv.cu requires.
#include "lib/kv.cuh"
#include "lib/norm.cuh"
#include "lib/rope.cuh"

constexpr u32 MAX_HEAD_DIM = 512;

struct Params {
  Rows rows;
  RowRefs row_refs;
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
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/kv_norm_rope_store.rs differs");

extern "C" __global__ void kv_norm_rope_store(const Params p) {
  __shared__ float head[MAX_HEAD_DIM];
  if (!p.rows.has(blockIdx.x)) return;
  const u64 start = u64(blockIdx.x) * p.columns + blockIdx.y * p.head_dim;
  const u32 row = p.rows.index[blockIdx.x];
  const u32 position = p.row_refs.position[row];
  const float* k = p.k + start;
  const float k_scale = rms_scale(k, p.head_dim, p.k_eps);
  for (u32 j = threadIdx.x; j < p.head_dim; j += blockDim.x) head[j] = normed(k, j, k_scale, p.k_weight);
  __syncthreads();
  const u32 half = p.head_dim / 2;
  for (u32 j = threadIdx.x; j < half; j += blockDim.x) rotate(head[j], head[j + half], position, p.frequencies[j]);
  __syncthreads();
  const float* v = p.v + start;
  const float v_scale = rms_scale(v, p.head_dim, p.v_eps);
  const u64 to = p.slot.cell(p.row_refs.run[row], position, blockIdx.y);
  for (u32 j = threadIdx.x; j < p.head_dim; j += blockDim.x) {
    p.slot.keys[to + j] = f32_to_f16(head[j]);
    p.slot.values[to + j] = f32_to_f16(normed(v, j, v_scale, p.v_weight));
  }
}
