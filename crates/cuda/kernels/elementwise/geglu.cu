// The middle of a feed-forward network in f16: out = gelu(gate) * up, gate and up side by side in a row. Products may leave the
// range of f16, so each row is stored with a factor, a power of two that brings its largest value below 2^14.
//
// Grid: (rows), one block per row; every thread holds HOLD times eight products, so a row is read once.
// Bytes per row: 4 * columns in, 2 * columns out.
// Requires memory for every row of the grid; columns % 8 == 0, columns <= 8 * HOLD * threads, threads <= MAX_THREADS; rows
// aligned to 16 bytes.
#include "lib/batch.cuh"
#include "lib/ptx.cuh"
#include "lib/reduce.cuh"
#include "lib/token_tiles.cuh"

constexpr u32 HOLD = 4;
constexpr u32 MAX_THREADS = 768;

struct Params {
  Rows rows;
  const u16* x;   // `[rows, 2 * columns]`: gate, then up
  u16* out;       // `[rows, columns]`; token tiles of few rows, if `tiles`
  float* factor;  // `[rows]`: a value is its f16 times this
  u32 columns;
  float x_scale;  // a value of `x` is its f16 times this
  u32 tiles;
  u32 reserved;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/elementwise/geglu.rs differs");

// The power of two that brings a magnitude into 2^13 .. 2^14. Magnitudes that hardly count get the same as 2^-87.
__device__ __forceinline__ float factor_for(float largest) {
  const u32 exponent = max(__float_as_uint(largest) >> 23, 40u) - 13;
  return __uint_as_float(exponent << 23);
}

__device__ __forceinline__ void gelu_mul_f16x2(float* out, u32 gate, u32 up, float scale) {
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    const float g = f16_to_f32(u16(gate >> 16 * i)) * scale, u = f16_to_f32(u16(up >> 16 * i)) * scale;
    out[i] = fast_gelu(g) * u;
  }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) geglu(const Params p) {
  griddep_launch_dependents();
  griddep_wait();
  const u16* gate = p.x + u64(blockIdx.x) * 2 * p.columns;
  const u16* up = gate + p.columns;
  uint4 gates[HOLD], ups[HOLD];
#pragma unroll
  for (u32 k = 0; k < HOLD; k++) {
    const u32 column = 8 * (threadIdx.x + k * blockDim.x);
    const bool inside = column < p.columns;
    gates[k] = inside ? *(const uint4*)(gate + column) : make_uint4(0, 0, 0, 0);
    ups[k] = inside ? *(const uint4*)(up + column) : make_uint4(0, 0, 0, 0);
  }
  // Asked only now, so that the loads do not wait for the answer.
  if (!p.rows.has(blockIdx.x)) return;
  float products[HOLD][8], largest = 0;
#pragma unroll
  for (u32 k = 0; k < HOLD; k++) {
    gelu_mul_f16x2(products[k], gates[k].x, ups[k].x, p.x_scale);
    gelu_mul_f16x2(products[k] + 2, gates[k].y, ups[k].y, p.x_scale);
    gelu_mul_f16x2(products[k] + 4, gates[k].z, ups[k].z, p.x_scale);
    gelu_mul_f16x2(products[k] + 6, gates[k].w, ups[k].w, p.x_scale);
#pragma unroll
    for (u32 i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(products[k][i]));
  }
  const float factor = factor_for(block_max(largest)), inverse = 1.0f / factor;
  u16* out = p.out + u64(blockIdx.x) * p.columns;
#pragma unroll
  for (u32 k = 0; k < HOLD; k++) {
    const u32 column = 8 * (threadIdx.x + k * blockDim.x);
    if (column >= p.columns) break;
    const float* v = products[k];
    const uint4 packed =
        make_uint4(pack_f16x2(v[0] * inverse, v[1] * inverse), pack_f16x2(v[2] * inverse, v[3] * inverse),
                   pack_f16x2(v[4] * inverse, v[5] * inverse), pack_f16x2(v[6] * inverse, v[7] * inverse));
    if (p.tiles && *p.rows.count <= TILE_TOKENS) {
      store_in_tiles(p.out, blockIdx.x, column, make_uint2(packed.x, packed.y));
      store_in_tiles(p.out, blockIdx.x, column + 4, make_uint2(packed.z, packed.w));
    } else {
      *(uint4*)(out + column) = packed;
    }
  }
  if (threadIdx.x == 0) p.factor[blockIdx.x] = factor;
}
