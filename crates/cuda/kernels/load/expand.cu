// Rows as they are in the file to halves, or to the upper halves of floats: matrices that are multiplied as floats.
//
// Grid: (rows, strips of 256 columns), a thread a value. Bytes: the packed rows in, 2 * columns a row out.
// Half: any format, rounded to nearest. A value beyond the largest half becomes infinite; no weight of a model is.
// Bf16: F32 whose lower halves are zero, which src/weights.rs has looked for, so nothing is lost.
#include "lib/format.cuh"

struct Params {
  const u8* from;
  u64 row_bytes;
  u16* to;
  u32 columns;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/expand.rs differs");

__device__ __forceinline__ u16 half_of(float value) { return float_to_half(value); }
__device__ __forceinline__ u16 bf16_of(float value) { return u16(__float_as_uint(value) >> 16); }
#define narrowed JOIN(TO, _of)

extern "C" __global__ void __launch_bounds__(256) expand(const Params p) {
  const u32 row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= p.columns) return;
  p.to[u64(row) * p.columns + column] = narrowed(weight_value(p.from + row * p.row_bytes, column));
}
