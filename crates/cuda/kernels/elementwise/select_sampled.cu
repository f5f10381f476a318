// out[r] = x[batch row of sampled row r]: keeps the rows that will be sampled.
//
// Grid: (sampled rows, blocks of 256 columns), one thread per value.
// Bytes per row: 4 * columns in and out.
#include "lib/batch.cuh"

struct Params {
  Rows rows;
  const float* x;
  float* out;
  u32 columns;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/elementwise/select_sampled.rs differs");

extern "C" __global__ void select_sampled(const Params p) {
  const u32 r = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  if (!p.rows.has(r) || column >= p.columns) return;
  p.out[u64(r) * p.columns + column] = p.x[u64(p.rows.index[r]) * p.columns + column];
}
