// Norms of large batches, with residual add, into the format that the next product reads.
//
//   fused_norm           following = norm(x)
//   fused_residual_norm  sum = (residual + norm(x)) * scale, perhaps as a product's activation, too; perhaps following = norm(sum)
//   fused_branches_norm  the same with norm(x) + norm(branch) in place of x; the branch may be the sum of routed experts' outputs by
//                        weight, [rows, top_k, columns]. `_many` is for more rows than there is room for at once; `_f16` the same for
//                        outputs in f16
//
// Grid: (rows), one block per row. 128 threads (fewer for rows under 512 columns) hold the row, HOLD fours each, so everything is
// read once. The bits are those of rms_norm.cu and pointwise.cu: thread t stands for four of theirs (lib/quads.cuh).
// Bytes per row: 4 * columns for each of x and residual in, for sum out; 2 (F16), 1.25 (Int8) or 2.5 (Int8HiLo) * columns per
// activation. Loads are in flight before anybody waits: those of the row before it is known whether there is one, those of
// weights before the sum they wait for.
// Requires memory for every row of the grid; columns % 4 == 0 and columns <= 512 * HOLD; for int8 columns % 32 == 0; rows and
// weights aligned to 16 bytes.
#include "lib/batch.cuh"
#include "lib/activation.cuh"
#include "lib/ptx.cuh"
#include "lib/quads.cuh"

constexpr u32 MAX_THREADS = 128;

struct Params {
  Rows rows;
  const float* x;
  const float* factor;    // of a row of `x`, a power of two; may be null
  const float* weight;    // may be null
  const void* branch;          // `fused_branches_norm` only, as the next three
  const float* route;          // of routed experts: [rows, 2 * top_k], weights behind their numbers; may be null
  const float* x_weight;       // of x by itself; may be null, as the next
  const float* branch_weight;
  const float* residual;  // not of `fused_norm`, as everything about `sum`
  float* sum;
  Activation sum_activation;        // may be none; not Int8HiLo
  const float* following_weight;    // may be null
  float* following;                 // may be null
  Activation following_activation;  // may be none
  u32 columns;
  float eps;
  float scale;
  float following_eps;
  float x_eps;
  float branch_eps;
  u32 top_k;          // of routed experts
  float each_factor;  // of their outputs, a power of two
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/norm/fused_norm.rs differs");

__device__ __forceinline__ u32 column_of(u32 k) { return 4 * (threadIdx.x + k * blockDim.x); }

__device__ __forceinline__ float4 load_quad(const float* at) { return *(const float4*)at; }
__device__ __forceinline__ float4 load_quad(const u16* at) {
  const uint2 v = *(const uint2*)at;
  return make_float4(f16_to_f32(u16(v.x)), f16_to_f32(u16(v.x >> 16)), f16_to_f32(u16(v.y)), f16_to_f32(u16(v.y >> 16)));
}

// A thread's part of a row, zeros behind its end.
struct Row {
  float4 quads[HOLD];

  __device__ __forceinline__ void load(const float* row, u32 columns) {
#pragma unroll
    for (u32 k = 0; k < HOLD; k++) {
      quads[k] = column_of(k) < columns ? *(const float4*)(row + column_of(k)) : no_quad();
    }
  }

  // The sum of routed experts' rows by weight, in their order, as experts_sum.cu adds them up.
  template <typename T>
  __device__ __forceinline__ void load_experts(const T* rows, const float* weights, float factor, u32 top_k, u32 columns) {
#pragma unroll
    for (u32 k = 0; k < HOLD; k++) quads[k] = no_quad();
    // Equal bytes on their way in either format.
#pragma unroll (8 / sizeof(T))
    for (u32 expert = 0; expert < top_k; expert++) {
      const float weight = mul(weights[expert], factor);
#pragma unroll
      for (u32 k = 0; k < HOLD; k++) {
        if (column_of(k) >= columns) continue;
        const float4 x = load_quad(rows + u64(expert) * columns + column_of(k));
        float4& sum = quads[k];
        sum = make_float4(fmaf(weight, x.x, sum.x), fmaf(weight, x.y, sum.y), fmaf(weight, x.z, sum.z), fmaf(weight, x.w, sum.w));
      }
    }
  }

  __device__ __forceinline__ void multiply(float by) {
#pragma unroll
    for (u32 k = 0; k < HOLD; k++) {
      float4& x = quads[k];
      x = make_float4(mul(x.x, by), mul(x.y, by), mul(x.z, by), mul(x.w, by));
    }
  }

  __device__ __forceinline__ void load_weights(const float* weight, u32 columns) {
    if (weight) load(weight, columns);
  }

  __device__ __forceinline__ float rms_scale(u32 columns, float eps) const {
    __shared__ float of_warp[MAX_THREADS / 8];
    float4 squares = no_quad();
#pragma unroll
    for (u32 k = 0; k < HOLD; k++) add_squares(squares, quads[k]);
    const float warp_squares = quads_sum(squares);
    __syncthreads();  // an earlier sum may still be read
    if (threadIdx.x % 8 == 0) of_warp[threadIdx.x / 8] = warp_squares;
    if (threadIdx.x < MAX_THREADS / 8 && threadIdx.x >= blockDim.x / 8) of_warp[threadIdx.x] = 0;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (u32 warp = 0; warp < MAX_THREADS / 8; warp++) sum += of_warp[warp];
    return scale_of_squares(sum, columns, eps);
  }
};

// Calls `f(column, four, whether they are there)`.
template <typename F>
__device__ __forceinline__ void each_quad(const Row& row, u32 columns, F f) {
#pragma unroll
  for (u32 k = 0; k < HOLD; k++) f(column_of(k), row.quads[k], column_of(k) < columns);
}

// A row as a product's activation. What it is stored as is decided once, and each kind has a loop of its own: code comes from a cold
// cache, and with it all that lies between the lines that a launch takes.
template <bool TWO_TERMS>
__device__ __forceinline__ void store_row(const Activation& to, u32 rows, const Row& row, u64 start, u32 columns) {
  if (TWO_TERMS && to.low_offset) {
    each_quad(row, columns, [&](u32 column, float4 v, bool inside) { store_hi_lo(to, start, column, v, inside); });
  } else if (!to.f16) {
    each_quad(row, columns, [&](u32 column, float4 v, bool inside) { store_codes(to, start + column, v, inside); });
#if __CUDA_ARCH__ >= 900
  } else if (to.layout == K_PERMUTED) {
    each_quad(row, columns, [&](u32 column, float4 v, bool inside) {
      if (inside) store_permuted(to.f16 + start, column, as_f16x4(v));
    });
  } else if (to.layout == TOKEN_TILES && rows <= TILE_TOKENS) {
    each_quad(row, columns, [&](u32 column, float4 v, bool inside) {
      if (inside) store_in_tiles(to.f16, blockIdx.x, column, as_f16x4(v));
    });
#endif
  } else {
    each_quad(row, columns, [&](u32 column, float4 v, bool inside) {
      if (inside) *(uint2*)(to.f16 + start + column) = as_f16x4(v);
    });
  }
}

// following = norm(row), which the row becomes.
__device__ __forceinline__ void store_following(const Params& p, Row& row, u64 start, const float* weight, float eps) {
  Row weights;
  weights.load_weights(weight, p.columns);
  const float scale = row.rms_scale(p.columns, eps);
#pragma unroll
  for (u32 k = 0; k < HOLD; k++) {
    row.quads[k] = normed_quad(row.quads[k], scale, weight, weights.quads[k]);
    if (p.following && column_of(k) < p.columns) *(float4*)(p.following + start + column_of(k)) = row.quads[k];
  }
  if (p.following_activation.any()) store_row<true>(p.following_activation, *p.rows.count, row, start, p.columns);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) fused_norm(const Params p) {
  griddep_launch_dependents();
  griddep_wait();
  const u64 start = u64(blockIdx.x) * p.columns;
  Row row;
  row.load(p.x + start, p.columns);
  if (!p.rows.has(blockIdx.x)) return;
  if (p.factor) row.multiply(p.factor[blockIdx.x]);
  store_following(p, row, start, p.weight, p.eps);
}

// Weights of branches are loaded early where there are registers for them. With many rows what counts is how many are on their way,
// for the outputs of eight experts are most of what is read: then weights, which are in the cache, come late, and registers are left for
// other blocks.
constexpr bool CAN_BE_EARLY = HOLD <= 6;
constexpr u32 MANY_BLOCKS = HOLD <= 6 ? 4 : 1;

// row = norm(row) + norm(branch)
template <bool EARLY>
__device__ __forceinline__ void add_branch(const Params& p, Row& row, const Row& branch, Row& x_weights, Row& branch_weights) {
  if (!EARLY) {
    x_weights.load_weights(p.x_weight, p.columns);
    branch_weights.load_weights(p.branch_weight, p.columns);
  }
  const float x_scale = row.rms_scale(p.columns, p.x_eps), branch_scale = branch.rms_scale(p.columns, p.branch_eps);
#pragma unroll
  for (u32 k = 0; k < HOLD; k++) {
    const float4 a = normed_quad(row.quads[k], x_scale, p.x_weight, x_weights.quads[k]);
    const float4 b = normed_quad(branch.quads[k], branch_scale, p.branch_weight, branch_weights.quads[k]);
    row.quads[k] = make_float4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
    if (column_of(k) >= p.columns) row.quads[k] = no_quad();
  }
}

// `Each` is the type of routed experts' outputs.
template <bool BRANCHES, bool EARLY, typename Each = float>
__device__ __forceinline__ void residual_norm(const Params& p) {
  const u64 start = u64(blockIdx.x) * p.columns;
  Row row, residual, weights, branch, x_weights, branch_weights;
  // Weights depend on no launch.
  if (EARLY) weights.load_weights(p.weight, p.columns);
  if (BRANCHES && EARLY) {
    x_weights.load_weights(p.x_weight, p.columns);
    branch_weights.load_weights(p.branch_weight, p.columns);
  }
  griddep_launch_dependents();
  griddep_wait();
  row.load(p.x + start, p.columns);
  if (BRANCHES && p.route) {
    const float* weights = p.route + (2 * u64(blockIdx.x) + 1) * p.top_k;
    if (p.rows.has(blockIdx.x))
      branch.load_experts((const Each*)p.branch + start * p.top_k, weights, p.each_factor, p.top_k, p.columns);
  } else if (BRANCHES) {
    branch.load((const float*)p.branch + start, p.columns);
  }
  if (EARLY) residual.load(p.residual + start, p.columns);
  if (!p.rows.has(blockIdx.x)) return;
  if (p.factor) row.multiply(p.factor[blockIdx.x]);
  if (BRANCHES) {
    add_branch<EARLY>(p, row, branch, x_weights, branch_weights);
  }
  if (!EARLY) {
    residual.load(p.residual + start, p.columns);
    weights.load_weights(p.weight, p.columns);
  }
  const float scale = row.rms_scale(p.columns, p.eps);
#pragma unroll
  for (u32 k = 0; k < HOLD; k++) {
    const u32 column = column_of(k);
    const bool inside = column < p.columns;
    float4 sum = no_quad();
    if (inside) {
      const float4 y = normed_quad(row.quads[k], scale, p.weight, weights.quads[k]), b = residual.quads[k];
      sum = make_float4(mul(add(b.x, y.x), p.scale), mul(add(b.y, y.y), p.scale), mul(add(b.z, y.z), p.scale),
                        mul(add(b.w, y.w), p.scale));
      *(float4*)(p.sum + start + column) = sum;
    }
    row.quads[k] = sum;
  }
  if (p.sum_activation.any()) store_row<false>(p.sum_activation, *p.rows.count, row, start, p.columns);
  if (p.following || p.following_activation.any()) store_following(p, row, start, p.following_weight, p.following_eps);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) fused_residual_norm(const Params p) { residual_norm<false, true>(p); }
extern "C" __global__ void __launch_bounds__(MAX_THREADS) fused_branches_norm(const Params p) { residual_norm<true, CAN_BE_EARLY>(p); }
extern "C" __global__ void __launch_bounds__(MAX_THREADS, MANY_BLOCKS) fused_branches_norm_many(const Params p) {
  residual_norm<true, false>(p);
}
extern "C" __global__ void __launch_bounds__(MAX_THREADS, MANY_BLOCKS) fused_branches_norm_f16(const Params p) {
  residual_norm<true, false, u16>(p);
}
