// Router scores of large batches: out[r, e] = norm(x[r]) . w[e], products and sums in f32, for near ties between experts must not be
// decided by rounding. WEIGHTS `f32` or `bf16`.
//
// Grid: (row tiles), 16 rows and all experts, 128 of them at a time. Tiles of 32 inputs go through shared memory, the next one on its way
// while one is multiplied. A warp has 4 rows, a lane 4 experts of those, and half of a tile's inputs; the halves are added in the end.
// The norm's factor of a row comes last: its squares are added up as rows are read.
//
// Bytes: weights once per row tile (from L2), x once. Operations: 2 * rows * experts * columns.
// Requires columns % 32 == 0, rows and weights aligned to 16 bytes.
#include "lib/batch.cuh"
#include "lib/norm.cuh"

struct Params {
  Rows rows;
  const float* x;
  const float* norm_weight;  // may be null
  const u8* w;
  float* out;
  u32 columns;
  u32 experts;
  float eps;
  u32 reserved;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/moe/router_scores.rs differs");

enum { f32, bf16 };

constexpr u32 THREADS = 256, ROWS = 16, EXPERTS = 128, INPUTS = 32, QUADS = INPUTS / 4;
// Floats of a row in shared memory, so that the 16-byte loads of neighbours meet all banks.
constexpr u32 LINE = INPUTS + 4;
constexpr u32 W_QUADS = EXPERTS * QUADS / THREADS;  // of a thread
constexpr u32 WARP_ROWS = 4, LANE_EXPERTS = EXPERTS / WARP, HALVES = THREADS / WARP * WARP_ROWS / ROWS;

__device__ __forceinline__ float4 weight_quad(const u8* w, u64 at) {
  if (WEIGHTS == f32) return *(const float4*)((const float*)w + at);
  const uint2 pairs = *(const uint2*)((const u16*)w + at);
  return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u), __uint_as_float(pairs.y << 16),
                     __uint_as_float(pairs.y & 0xffff0000u));
}

// What a thread brings of a tile: a quad of x, if it is one of the first, and some of the weights.
struct Quads {
  float4 x, w[W_QUADS];

  __device__ __forceinline__ void load(const Params& p, u32 row, u32 first_expert, u32 input) {
    const u32 quad = threadIdx.x % QUADS * 4;
    if (threadIdx.x < ROWS * QUADS) x = *(const float4*)(p.x + u64(row) * p.columns + input + quad);
#pragma unroll
    for (u32 i = 0; i < W_QUADS; i++) {
      const u32 expert = min(first_expert + threadIdx.x / QUADS + i * (THREADS / QUADS), p.experts - 1);
      w[i] = weight_quad(p.w, u64(expert) * p.columns + input + quad);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) router_scores(const Params p) {
  __shared__ float4 x_quads[ROWS * LINE / 4], w_quads[EXPERTS * LINE / 4];
  __shared__ float scales[ROWS];
  float *x_tile = (float*)x_quads, *w_tile = (float*)w_quads;
  const u32 count = *p.rows.count, first_row = blockIdx.x * ROWS;
  if (first_row >= count) return;
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, own_row = warp % (ROWS / WARP_ROWS) * WARP_ROWS,
            half = warp / (ROWS / WARP_ROWS);
  // Rows that are not there stand for the last one, and are not written.
  const u32 row = min(first_row + threadIdx.x / QUADS, count - 1);
  float squares = 0;
  for (u32 first_expert = 0; first_expert < p.experts; first_expert += EXPERTS) {
    float sum[WARP_ROWS][LANE_EXPERTS];
#pragma unroll
    for (u32 r = 0; r < WARP_ROWS; r++) {
#pragma unroll
      for (u32 e = 0; e < LANE_EXPERTS; e++) sum[r][e] = 0;
    }
    Quads next;
    next.load(p, row, first_expert, 0);
    for (u32 input = 0; input < p.columns; input += INPUTS) {
      __syncthreads();  // the tile before has been read
      const u32 quad = threadIdx.x % QUADS * 4, line = threadIdx.x / QUADS;
      if (threadIdx.x < ROWS * QUADS) {
        float4 x = next.x;
        if (first_expert == 0) squares = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, squares))));
        if (p.norm_weight) {
          const float4 by = *(const float4*)(p.norm_weight + input + quad);
          x = make_float4(x.x * by.x, x.y * by.y, x.z * by.z, x.w * by.w);
        }
        *(float4*)(x_tile + line * LINE + quad) = x;
      }
#pragma unroll
      for (u32 i = 0; i < W_QUADS; i++) *(float4*)(w_tile + (line + i * (THREADS / QUADS)) * LINE + quad) = next.w[i];
      __syncthreads();
      if (input + INPUTS < p.columns) next.load(p, row, first_expert, input + INPUTS);
#pragma unroll
      for (u32 k = 0; k < INPUTS / HALVES; k += 4) {
        const u32 at = half * (INPUTS / HALVES) + k;
        float4 w[LANE_EXPERTS];
#pragma unroll
        for (u32 e = 0; e < LANE_EXPERTS; e++) w[e] = *(const float4*)(w_tile + (lane + e * WARP) * LINE + at);
#pragma unroll
        for (u32 r = 0; r < WARP_ROWS; r++) {
          const float4 x = *(const float4*)(x_tile + (own_row + r) * LINE + at);
#pragma unroll
          for (u32 e = 0; e < LANE_EXPERTS; e++)
            sum[r][e] = fmaf(x.x, w[e].x, fmaf(x.y, w[e].y, fmaf(x.z, w[e].z, fmaf(x.w, w[e].w, sum[r][e]))));
        }
      }
    }
    if (first_expert == 0) {
      if (threadIdx.x < ROWS * QUADS) {
#pragma unroll
        for (int mask = 1; mask < int(QUADS); mask *= 2) squares += __shfl_xor_sync(ALL_LANES, squares, mask);
        if (threadIdx.x % QUADS == 0) scales[threadIdx.x / QUADS] = rms_scale_of(squares, p.columns, p.eps);
      }
    }
    // The second half of the inputs, by way of the weights' memory.
    static_assert(HALVES == 2 && ROWS * EXPERTS <= EXPERTS * LINE, "sums fit");
    __syncthreads();
#pragma unroll
    for (u32 r = 0; r < WARP_ROWS; r++) {
#pragma unroll
      for (u32 e = 0; e < LANE_EXPERTS; e++)
        if (half == 1) w_tile[(own_row + r) * EXPERTS + lane + e * WARP] = sum[r][e];
    }
    __syncthreads();
    if (half == 0) {
#pragma unroll
      for (u32 r = 0; r < WARP_ROWS; r++) {
#pragma unroll
        for (u32 e = 0; e < LANE_EXPERTS; e++) {
          const u32 to = first_row + own_row + r, expert = first_expert + lane + e * WARP;
          const float total = sum[r][e] + w_tile[(own_row + r) * EXPERTS + lane + e * WARP];
          if (to < count && expert < p.experts) p.out[u64(to) * p.experts + expert] = scales[own_row + r] * total;
        }
      }
    }
  }
}
