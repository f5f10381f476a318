// Values into the format that a product reads, where no kernel before could write it.
//
//   convert_values    out = a
//   convert_gelu_mul  out = gelu(a) * b, where `b` is a slice of a wider value
//
// Grid: (fours of all rows, in blocks of 2 * 256), two fours per thread.
// Bytes per row: 4 * columns in for each input; 2 (F16) or 1.25 (Int8) * columns out.
// Requires columns % 32 == 0, b_column % 4 == 0, b_columns % 4 == 0; rows aligned to 16 bytes.
#include "lib/batch.cuh"
#include "lib/activation.cuh"

constexpr u32 THREADS = 256;
constexpr u32 PER_THREAD = 2;

struct Params {
  Rows rows;
  const float* a;
  const float* b;  // `convert_gelu_mul`; else null
  Activation out;
  u32 columns;
  u32 b_columns;  // of a row of `b`
  u32 b_column;   // first column of `b` that is used
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/elementwise/convert.rs differs");

template <typename Function>
__device__ __forceinline__ void each_quad(const Params& p, Function function) {
  griddep_launch_dependents();
  griddep_wait();
  const u32 row_quads = p.columns / 4, quads = *p.rows.count * row_quads;
  float4 a[PER_THREAD], b[PER_THREAD];
#pragma unroll
  for (u32 i = 0; i < PER_THREAD; i++) {
    const u32 quad = (blockIdx.x * PER_THREAD + i) * THREADS + threadIdx.x;
    a[i] = b[i] = make_float4(0, 0, 0, 0);
    if (quad >= quads) continue;
    a[i] = *(const float4*)(p.a + u64(quad) * 4);
    const u64 row = quad / row_quads;
    const u32 column = quad % row_quads * 4;
    if (p.b) b[i] = *(const float4*)(p.b + row * p.b_columns + p.b_column + column);
  }
#pragma unroll
  for (u32 i = 0; i < PER_THREAD; i++) {
    const u32 quad = (blockIdx.x * PER_THREAD + i) * THREADS + threadIdx.x;
    store_activation(p.out, *p.rows.count, quad / row_quads, p.columns, quad % row_quads * 4, function(a[i], b[i]), quad < quads);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) convert_values(const Params p) {
  each_quad(p, [](float4 a, float4) { return a; });
}

extern "C" __global__ void __launch_bounds__(THREADS) convert_gelu_mul(const Params p) {
  each_quad(p, [](float4 a, float4 b) {
    return make_float4(fast_gelu(a.x) * b.x, fast_gelu(a.y) * b.y, fast_gelu(a.z) * b.z, fast_gelu(a.w) * b.w);
  });
}
