// The middle of a feed-forward network in f16: out = gelu(gate) * up, gate and up side by side in a row. Products may leave the
// range of f16, so each row is stored with a factor, a power of two that brings its largest value below 2^14.
//
// Grid: (rows), one block per row; every thread holds HOLD times eight products, so a row is read once. Of few rows a cluster of HOLD
// blocks has each (`geglu_spread`), and every thread eight products of it: there are multiprocessors enough, and blocks with few
// registers find room beside the launch before.
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

// The largest magnitude of a row that so many blocks have, a cluster. `cluster_arrive` has been called: nobody writes into a block that
// has not begun.
template <u32 BLOCKS>
__device__ __forceinline__ float row_max(float largest) {
  largest = block_max(largest);
#if SPREAD
  if constexpr (BLOCKS > 1) {
    __shared__ float of_block[BLOCKS];
    cluster_wait();
    if (threadIdx.x < BLOCKS) cluster_store(cluster_address(of_block + cluster_rank(), threadIdx.x), largest);
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (u32 block = 0; block < BLOCKS; block++) largest = fmaxf(largest, of_block[block]);
  }
#endif
  return largest;
}

template <u32 BLOCKS>
__device__ __forceinline__ void row_geglu(const Params& p, u32 row, u32 block) {
  constexpr u32 EACH = HOLD / BLOCKS;
  griddep_launch_dependents();
  griddep_wait();
  const u16* gate = p.x + u64(row) * 2 * p.columns;
  const u16* up = gate + p.columns;
  const u32 first = 8 * (threadIdx.x + block * EACH * blockDim.x);
  uint4 gates[EACH], ups[EACH];
#pragma unroll
  for (u32 k = 0; k < EACH; k++) {
    const u32 column = first + 8 * k * blockDim.x;
    const bool inside = column < p.columns;
    gates[k] = inside ? *(const uint4*)(gate + column) : make_uint4(0, 0, 0, 0);
    ups[k] = inside ? *(const uint4*)(up + column) : make_uint4(0, 0, 0, 0);
  }
  // Asked only now, so that the loads do not wait for the answer.
  const u32 rows = *p.rows.count;
  float products[EACH][8], largest = 0;
#pragma unroll
  for (u32 k = 0; k < EACH; k++) {
    gelu_mul_f16x2(products[k], gates[k].x, ups[k].x, p.x_scale);
    gelu_mul_f16x2(products[k] + 2, gates[k].y, ups[k].y, p.x_scale);
    gelu_mul_f16x2(products[k] + 4, gates[k].z, ups[k].z, p.x_scale);
    gelu_mul_f16x2(products[k] + 6, gates[k].w, ups[k].w, p.x_scale);
#pragma unroll
    for (u32 i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(products[k][i]));
  }
  const float factor = factor_for(row_max<BLOCKS>(largest)), inverse = 1.0f / factor;
  if (row >= rows) return;
  u16* out = p.out + u64(row) * p.columns;
#pragma unroll
  for (u32 k = 0; k < EACH; k++) {
    const u32 column = first + 8 * k * blockDim.x;
    if (column >= p.columns) break;
    const float* v = products[k];
    const uint4 packed =
        make_uint4(pack_f16x2(v[0] * inverse, v[1] * inverse), pack_f16x2(v[2] * inverse, v[3] * inverse),
                   pack_f16x2(v[4] * inverse, v[5] * inverse), pack_f16x2(v[6] * inverse, v[7] * inverse));
    if (p.tiles && rows <= TILE_TOKENS) {
      store_in_tiles(p.out, row, column, make_uint2(packed.x, packed.y));
      store_in_tiles(p.out, row, column + 4, make_uint2(packed.z, packed.w));
    } else {
      *(uint4*)(out + column) = packed;
    }
  }
  if (block == 0 && threadIdx.x == 0) p.factor[row] = factor;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) geglu(const Params p) { row_geglu<1>(p, blockIdx.x, 0); }
#if SPREAD
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2) geglu_spread(const Params p) {
  cluster_arrive();
  row_geglu<HOLD>(p, cluster_number(), cluster_rank());
}
#endif
