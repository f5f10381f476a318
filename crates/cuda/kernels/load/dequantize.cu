// Rows of the file to f16 or bf16: matrices that are multiplied as floats.
//
// Grid: (rows, blocks of 256 columns), one thread per value. Bytes: the packed rows in, 2 * columns per row out.
// F16: any format, rounded to nearest. A value beyond the largest f16 becomes infinite; no weight of a model is.
// Bf16: f32 whose lower 16 bits are zero, which `Weights::is_exact_bf16` has looked for, so nothing is lost.
#include "lib/format.cuh"

struct Params {
  const u8* from;
  u64 row_bytes;
  u16* to;
  u32 columns;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/load/dequantize.rs differs");

__device__ __forceinline__ u16 f16_of(float value) { return f32_to_f16(value); }
__device__ __forceinline__ u16 bf16_of(float value) { return u16(__float_as_uint(value) >> 16); }
#define rounded JOIN(TO, _of)

extern "C" __global__ void __launch_bounds__(256) dequantize(const Params p) {
  const u32 row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= p.columns) return;
  p.to[u64(row) * p.columns + column] = rounded(weight_value(p.from + row * p.row_bytes, column));
}
