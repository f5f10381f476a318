// out[r] = sum over k of weight[r, k] * x[r, k]: the weighted sum over a row's routed experts, in
// their order.
//
// Grid: (rows, blocks of 256 columns), one thread per value.
// Bytes per row: 4 * columns * top_k in, 4 * columns out.
#include "lib/batch.cuh"

struct Params {
  Rows rows;
  const float* x;
  const float* route;
  float* out;
  u32 columns;
  u32 top_k;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/moe/experts_sum.rs differs");

extern "C" __global__ void experts_sum(const Params p) {
  const u32 r = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  if (!p.rows.has(r) || column >= p.columns) return;
  const float* weights = p.route + u64(r) * 2 * p.top_k + p.top_k;
  float sum = 0;
  for (u32 k = 0; k < p.top_k; k++) sum += weights[k] * p.x[(u64(r) * p.top_k + k) * p.columns + column];
  p.out[u64(r) * p.columns + column] = sum;
}
