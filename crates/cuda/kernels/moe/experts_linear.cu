// out[r, k, o] = w[route[r, k]][o] . x[r] (or . x[r, k] for the second product): products with each row's routed experts.
// The plain twin of the grouped GEMM.
//
// Grid: (rows * top_k, tiles of 8 outputs), one warp per output of one routed expert.
// Bytes per routed expert: the packed matrix once, 4 * columns in, 4 * outputs out.
#include "lib/batch.cuh"
#include "lib/dot.cuh"

struct Params {
  Rows rows;
  const float* x;
  const float* route;
  const u8* w;
  u64 row_bytes;
  u64 matrix_bytes;
  float* out;
  u32 columns;
  u32 outputs;
  u32 top_k;
  u32 x_per_token;  // rows of `x` per batch row: 1, or top_k
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/moe/experts_linear.rs differs");

extern "C" __global__ void __launch_bounds__(256) experts_linear(const Params p) {
  const u32 output = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
  const u32 r = blockIdx.x / p.top_k, k = blockIdx.x % p.top_k;
  if (output >= p.outputs || !p.rows.has(r)) return;
  const u32 expert = u32(p.route[u64(r) * 2 * p.top_k + k]);
  const u64 x_row = p.x_per_token == 1 ? r : u64(r) * p.top_k + k;
  const float* const x[1] = {p.x + x_row * p.columns};
  float sum[1];
  dot_rows<1>(p.w + expert * p.matrix_bytes + output * p.row_bytes, x, p.columns, sum);
  if (threadIdx.x % WARP == 0) p.out[u64(blockIdx.x) * p.outputs + output] = sum[0];
}
