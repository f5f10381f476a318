// rope(norm(k)) and norm(v), head by head, straight into their pages; norm(v) alone where keys follow from values.
//
// Grid: (rows, KV heads), one block per head; its threads are a function of head_dim alone, as in rms_norm.cu,
// whose bits it repeats.
// Bytes per row: 8 * columns in, and out what the KV type takes.
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
#if KV_TYPE == KV_Q8_0
  const Q8Page keys = p.slot.page_of(p.slot.keys, p.row_refs.run[row], position, blockIdx.y);
  const Q8Page values = p.slot.page_of(p.slot.values, p.row_refs.run[row], position, blockIdx.y);
  const u32 cell = position % PAGE_TOKENS;
  // Whole warps, and a warp has a block.
  for (u32 j = threadIdx.x; j < keys.blocks * KV_BLOCK; j += blockDim.x) {
    const bool there = j < p.head_dim;
    const float key = there ? head[j] : 0, value = there ? normed(v, j, v_scale, p.v_weight) : 0;
    const Q8Scale key_scale(warp_max(fabsf(key))), value_scale(warp_max(fabsf(value)));
    if (there) values.codes(cell)[j] = i8(value_scale.code(value));
    if (j % KV_BLOCK == 0) values.scales(cell)[j / KV_BLOCK] = value_scale.bits;
    if (p.slot.key_weight) continue;
    if (there) keys.codes(cell)[j] = i8(key_scale.code(key));
    if (j % KV_BLOCK == 0) keys.scales(cell)[j / KV_BLOCK] = key_scale.bits;
  }
#else
  const u64 to = p.slot.cell(p.row_refs.run[row], position, blockIdx.y);
  for (u32 j = threadIdx.x; j < p.head_dim; j += blockDim.x) {
    if (!p.slot.key_weight) p.slot.keys[to + j] = f32_to_f16(head[j]);
    p.slot.values[to + j] = f32_to_f16(normed(v, j, v_scale, p.v_weight));
  }
#endif
}
