// out[r, o] = w[o] . x[r], any format, activations and sums in f32: the plain twin of every faster product.
//
// Grid: (row tiles, tiles of 8 outputs), one warp per output and tile of rows: 1 row in `linear_plain_1`, 8 in `linear_plain_8`. The
// warps of a block share the row tile's activations through L1; neighbouring blocks share the output tile's weights through L2.
// Bytes: the packed weights once per row tile; 4 * columns in and 4 * outputs out per row.
#include "lib/batch.cuh"
#include "lib/dot.cuh"

struct Params {
  Rows rows;
  const float* x;
  const u8* w;
  u64 row_bytes;
  float* out;
  u32 columns;
  u32 outputs;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/linear_plain.rs differs");

template <int TILE>
__device__ __forceinline__ void linear_tile(const Params& p) {
  const u32 output = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
  const u32 first = blockIdx.x * TILE, count = *p.rows.count;
  if (output >= p.outputs || first >= count) return;
  const float* x[TILE];
  float sum[TILE];
  // Past the end the last row stands in; its result is not written.
#pragma unroll
  for (int t = 0; t < TILE; t++) x[t] = p.x + u64(min(first + t, count - 1)) * p.columns;
  dot_rows<TILE>(p.w + u64(output) * p.row_bytes, x, p.columns, sum);
  if (threadIdx.x % WARP != 0) return;
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    if (first + t < count) p.out[u64(first + t) * p.outputs + output] = sum[t];
  }
}

extern "C" __global__ void __launch_bounds__(256) linear_plain_1(const Params p) { linear_tile<1>(p); }
extern "C" __global__ void __launch_bounds__(256) linear_plain_8(const Params p) { linear_tile<8>(p); }
