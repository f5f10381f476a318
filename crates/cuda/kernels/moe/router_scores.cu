// Router scores of large batches in parts: part s of out[r, s, e] is the sum of x[r, k] * norm[k] * w[e, k] over its slice of the
// inputs, and squares[r, s] that of x[r, k]^2; whoever reads them adds up the parts and applies the norm's factor (`route`). Products and
// sums are in f32, for near ties between experts must not be decided by rounding. WEIGHTS `f32` or `bf16`.
//
// Grid: (row tiles, PARTS), 64 rows and all experts, 128 of them at a time. Slices make blocks enough for every multiprocessor, where
// one block per row tile would wait for memory most of its time. Tiles of 32 inputs go through shared memory, the next one on its way while
// one is multiplied. A warp has 8 rows, a lane 4 experts of those: fewer rows would wait for shared memory.
//
// Bytes: weights once per row tile (from L2), x once. Operations: 2 * rows * experts * columns.
// Requires columns % 32 == 0, rows and weights aligned to 16 bytes.
#include "lib/batch.cuh"
#include "lib/reduce.cuh"

struct Params {
  Rows rows;
  const float* x;
  const float* norm_weight;  // may be null
  const u8* w;
  float* out;
  float* squares;
  u32 columns;
  u32 experts;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/moe/router_scores.rs differs");

enum { f32, bf16 };

constexpr u32 THREADS = 256, ROWS = 64, EXPERTS = 128, INPUTS = 32, QUADS = INPUTS / 4;
// Floats of a row in shared memory, so that the 16-byte loads of neighbours meet all banks.
constexpr u32 LINE = INPUTS + 4;
constexpr u32 X_QUADS = ROWS * QUADS / THREADS, W_QUADS = EXPERTS * QUADS / THREADS;  // of a thread
constexpr u32 LINES = THREADS / QUADS;                                                // that threads side by side bring at once
constexpr u32 WARP_ROWS = ROWS / (THREADS / WARP), LANE_EXPERTS = EXPERTS / WARP;

__device__ __forceinline__ float4 weight_quad(const u8* w, u64 at) {
  if (WEIGHTS == f32) return *(const float4*)((const float*)w + at);
  const uint2 pairs = *(const uint2*)((const u16*)w + at);
  return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u), __uint_as_float(pairs.y << 16),
                     __uint_as_float(pairs.y & 0xffff0000u));
}

// What a thread brings of a tile. Rows that are not there stand for the last one, and are not written.
struct Quads {
  float4 x[X_QUADS], w[W_QUADS];

  __device__ __forceinline__ void load(const Params& p, u32 count, u32 first_row, u32 first_expert, u32 input) {
    const u32 quad = threadIdx.x % QUADS * 4, line = threadIdx.x / QUADS;
#pragma unroll
    for (u32 i = 0; i < X_QUADS; i++) {
      const u32 row = min(first_row + line + i * LINES, count - 1);
      x[i] = *(const float4*)(p.x + u64(row) * p.columns + input + quad);
    }
#pragma unroll
    for (u32 i = 0; i < W_QUADS; i++) {
      const u32 expert = min(first_expert + line + i * LINES, p.experts - 1);
      w[i] = weight_quad(p.w, u64(expert) * p.columns + input + quad);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) router_scores(const Params p) {
  __shared__ float4 x_quads[ROWS * LINE / 4], w_quads[EXPERTS * LINE / 4];
  float *x_tile = (float*)x_quads, *w_tile = (float*)w_quads;
  const u32 count = *p.rows.count, first_row = blockIdx.x * ROWS;
  if (first_row >= count) return;
  const u32 part = blockIdx.y, slice = (p.columns / INPUTS + PARTS - 1) / PARTS * INPUTS;
  const u32 begin = min(part * slice, p.columns), end = min(begin + slice, p.columns);
  const u32 lane = threadIdx.x % WARP, own_row = threadIdx.x / WARP * WARP_ROWS;
  const u32 quad = threadIdx.x % QUADS * 4, line = threadIdx.x / QUADS;
  float squares[X_QUADS] = {};
  for (u32 first_expert = 0; first_expert < p.experts; first_expert += EXPERTS) {
    float sum[WARP_ROWS][LANE_EXPERTS];
#pragma unroll
    for (u32 r = 0; r < WARP_ROWS; r++) {
#pragma unroll
      for (u32 e = 0; e < LANE_EXPERTS; e++) sum[r][e] = 0;
    }
    Quads next;
    if (begin < end) next.load(p, count, first_row, first_expert, begin);
    for (u32 input = begin; input < end; input += INPUTS) {
      __syncthreads();  // the tile before has been read
      const float4 by = p.norm_weight ? *(const float4*)(p.norm_weight + input + quad) : make_float4(1, 1, 1, 1);
#pragma unroll
      for (u32 i = 0; i < X_QUADS; i++) {
        const float4 x = next.x[i];
        if (first_expert == 0) squares[i] = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, squares[i]))));
        *(float4*)(x_tile + (line + i * LINES) * LINE + quad) = make_float4(x.x * by.x, x.y * by.y, x.z * by.z, x.w * by.w);
      }
#pragma unroll
      for (u32 i = 0; i < W_QUADS; i++) *(float4*)(w_tile + (line + i * LINES) * LINE + quad) = next.w[i];
      __syncthreads();
      if (input + INPUTS < end) next.load(p, count, first_row, first_expert, input + INPUTS);
#pragma unroll 2
      for (u32 k = 0; k < INPUTS; k += 4) {
        float4 w[LANE_EXPERTS];
#pragma unroll
        for (u32 e = 0; e < LANE_EXPERTS; e++) w[e] = *(const float4*)(w_tile + (lane + e * WARP) * LINE + k);
#pragma unroll
        for (u32 r = 0; r < WARP_ROWS; r++) {
          const float4 x = *(const float4*)(x_tile + (own_row + r) * LINE + k);
#pragma unroll
          for (u32 e = 0; e < LANE_EXPERTS; e++)
            sum[r][e] = fmaf(x.x, w[e].x, fmaf(x.y, w[e].y, fmaf(x.z, w[e].z, fmaf(x.w, w[e].w, sum[r][e]))));
        }
      }
    }
#pragma unroll
    for (u32 r = 0; r < WARP_ROWS; r++) {
      const u32 to = first_row + own_row + r;
#pragma unroll
      for (u32 e = 0; e < LANE_EXPERTS; e++) {
        const u32 expert = first_expert + lane + e * WARP;
        if (to < count && expert < p.experts) p.out[(u64(to) * PARTS + part) * p.experts + expert] = sum[r][e];
      }
    }
  }
#pragma unroll
  for (u32 i = 0; i < X_QUADS; i++) {
    const u32 row = first_row + line + i * LINES;
#pragma unroll
    for (int mask = 1; mask < int(QUADS); mask *= 2) squares[i] += __shfl_xor_sync(ALL_LANES, squares[i], mask);
    if (quad == 0 && row < count) p.squares[u64(row) * PARTS + part] = squares[i];
  }
}
