// Per-layer inputs: out = (norm(context * context_scale) + table[token] * table_scale) * by, over groups of columns, one group
// per layer.
//
// Grid: (rows, groups), one block per group; its threads are a function of the group's width alone, as in rms_norm.cu, so that
// the bits are those of the single steps.
// Bytes per row: 4 * columns in and out, and the packed table row. The table may lie in mapped host memory.
#include "lib/batch.cuh"
#include "lib/format.cuh"
#include "lib/norm.cuh"

struct Params {
  Rows rows;
  const u32* tokens;
  const u8* table;
  u64 row_bytes;
  const float* context;
  const float* weight;  // one value per column of the group; may be null
  float* out;
  u32 columns;
  u32 group;
  float eps;
  float context_scale;
  float table_scale;
  float by;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/embed/ple_inputs.rs differs");

extern "C" __global__ void ple_inputs(const Params p) {
  __shared__ float scaled[MAX_GROUP];
  const u32 r = blockIdx.x, first = blockIdx.y * p.group;
  if (!p.rows.has(r)) return;
  const u64 start = u64(r) * p.columns + first;
  for (u32 j = threadIdx.x; j < p.group; j += blockDim.x) scaled[j] = mul(p.context[start + j], p.context_scale);
  __syncthreads();
  const float scale = rms_scale(scaled, p.group, p.eps);
  const u8* row = p.table + u64(p.tokens[p.rows.index[r]]) * p.row_bytes;
  for (u32 j = threadIdx.x; j < p.group; j += blockDim.x) {
    const float token = mul(weight_value(row, first + j), p.table_scale);
    p.out[start + j] = mul(add(normed(scaled, j, scale, p.weight), token), p.by);
  }
}
