// A branch rejoins the residual stream: sum = (a + norm(x)) * by, and perhaps next = norm(sum) for the branch that follows.
// One read of the branch and the stream and one write of the stream, where single steps read and write it up to four times.
//
// Grid: (rows), a block a row; its threads are a function of the row's width alone, as in norm.cu, whose bits it repeats.
// Bytes a row: 8 * columns in, 4 * columns out, and 4 * columns more for `next`.
#include "lib/batch.cuh"
#include "lib/norm.cuh"

struct Params {
  Rows rows;
  const float* x;
  const float* weight;  // of the branch; may be null
  const float* a;
  float* sum;
  const float* next_weight;  // may be null
  float* next;
  u32 columns;
  float eps;
  float by;
  float next_eps;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/norm_add.rs differs");

__device__ __forceinline__ void add_normed(const Params& p, u64 start) {
  const float scale = rms_scale(p.x + start, p.columns, p.eps);
  for (u32 j = threadIdx.x; j < p.columns; j += blockDim.x) {
    float sum = add(p.a[start + j], normed(p.x + start, j, scale, p.weight));
    p.sum[start + j] = mul(sum, p.by);
  }
}

extern "C" __global__ void norm_add(const Params p) {
  if (p.rows.has(blockIdx.x)) add_normed(p, u64(blockIdx.x) * p.columns);
}

extern "C" __global__ void norm_add_norm(const Params p) {
  if (!p.rows.has(blockIdx.x)) return;
  const u64 start = u64(blockIdx.x) * p.columns;
  add_normed(p, start);
  // Each thread reads back only what it wrote itself: both loops take the same columns.
  const float* sum = p.sum + start;
  const float scale = rms_scale(sum, p.columns, p.next_eps);
  for (u32 j = threadIdx.x; j < p.columns; j += blockDim.x) {
    p.next[start + j] = normed(sum, j, scale, p.next_weight);
  }
}
