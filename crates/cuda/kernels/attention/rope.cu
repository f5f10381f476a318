// RoPE: rotates pairs (j, j + head_dim / 2) of each head by position * frequency[j].
//
// Grid: (rows, blocks of 256 pairs), one thread per pair.
// Bytes per row: 4 * columns in and out.
#include "lib/batch.cuh"
#include "lib/rope.cuh"

struct Params {
  Rows rows;
  RowRefs row_refs;
  const float* x;
  const float* frequencies;
  float* out;
  u32 columns;
  u32 head_dim;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/rope.rs differs");

extern "C" __global__ void rope(const Params p) {
  const u32 r = blockIdx.x, pair = blockIdx.y * blockDim.x + threadIdx.x;
  if (!p.rows.has(r) || pair >= p.columns / 2) return;
  const u32 half = p.head_dim / 2, j = pair % half;
  const u64 at = u64(r) * p.columns + pair / half * p.head_dim + j;
  float a = p.x[at], b = p.x[at + half];
  rotate(a, b, p.row_refs.position[p.rows.index[r]], p.frequencies[j]);
  p.out[at] = a;
  p.out[at + half] = b;
}
