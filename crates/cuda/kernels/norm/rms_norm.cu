// out = x / sqrt(mean(x^2) + eps) * weight, over each group of columns: a whole row, or a head of it.
//
// Grid: (rows, groups of a row), one block per group; its threads are a function of the group's width alone.
// Bytes per row: 4 * columns in, twice through L1, and 4 * columns out.
#include "lib/batch.cuh"
#include "lib/norm.cuh"

struct Params {
  Rows rows;
  const float* x;
  const float* weight;  // one value per column of the group; may be null
  float* out;
  u32 columns;
  u32 group;
  float eps;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/norm/rms_norm.rs differs");

extern "C" __global__ void rms_norm(const Params p) {
  if (!p.rows.has(blockIdx.x)) return;
  const u64 start = u64(blockIdx.x) * p.columns + blockIdx.y * p.group;
  const float* x = p.x + start;
  const float scale = rms_scale(x, p.group, p.eps);
  for (u32 j = threadIdx.x; j < p.group; j += blockDim.x) p.out[start + j] = normed(x, j, scale, p.weight);
}
