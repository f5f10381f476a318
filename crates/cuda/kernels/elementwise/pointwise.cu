// Steps that take each value by itself: add, GELU times a second value, scale, softcap. The plain twins of what larger kernels
// fuse.
//
// Grid: (rows, blocks of 256 columns), one thread per value.
// Bytes per row: 4 * columns out, 4 * columns in for each input.
#include "lib/batch.cuh"

struct Params {
  Rows rows;
  const float* a;
  const float* b;  // `add` and `gelu_mul`; else null
  float* out;
  u32 columns;
  u32 b_columns;  // of a row of `b`
  u32 b_column;   // first column of `b` that is used
  float factor;   // `scale`: by; `softcap`: cap
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/elementwise/pointwise.rs differs");

template <typename Function>
__device__ __forceinline__ void each_value(const Params& p, Function function) {
  const u32 r = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  if (!p.rows.has(r) || column >= p.columns) return;
  const u64 at = u64(r) * p.columns + column;
  const float b = p.b ? p.b[u64(r) * p.b_columns + p.b_column + column] : 0;
  p.out[at] = function(p.a[at], b);
}

extern "C" __global__ void add_values(const Params p) {
  each_value(p, [](float a, float b) { return add(a, b); });
}

// gelu(gate) * up, where `up` may be a slice of a wider value.
extern "C" __global__ void gelu_mul(const Params p) {
  each_value(p, [](float gate, float up) { return gelu(gate) * up; });
}

extern "C" __global__ void scale(const Params p) {
  const float by = p.factor;
  each_value(p, [by](float a, float) { return mul(a, by); });
}

// cap * tanh(x / cap)
extern "C" __global__ void softcap(const Params p) {
  const float cap = p.factor;
  each_value(p, [cap](float a, float) { return cap * tanhf(a / cap); });
}
