// Head norms, RoPE and KV store of large batches. Raw queries, keys and values lie side by side in a row of `x`: queries are
// normed, rotated and stored as f16; keys are normed, rotated and stored in their page; values are normed, without a weight, and
// stored in theirs. Where keys follow from values, none are stored.
// Queries may be absent, and so may keys and values together; values may be the same columns as keys.
//
// Grid: (rows), a block of four warps per row, one warp per head. A lane has HEAD_DIM / 128 fours of columns, 128 apart, so that in
// heads of 256 and more both members of a pair are its own; in smaller ones the partner is another lane. The angles are computed
// once per row. The bits are those of rms_norm.cu and rope.cu: a lane stands for four of their threads (lib/quads.cuh).
// Bytes per row: 4 * columns in, 2 * columns out; in Q8_0 keys and values are about half of that.
// Requires memory for every row of the grid; HEAD_DIM a power of two from 8 to 512; columns, stride % 4 == 0; rows and weights
// aligned to 16 bytes; for the store, what store_kv.cu requires.
#include "lib/activation.cuh"
#include "lib/kv.cuh"
#include "lib/quads.cuh"
#include "lib/rope.cuh"

constexpr u32 WARPS = 4;
constexpr u32 HALF = HEAD_DIM / 2;
constexpr u32 QUADS = HEAD_DIM < 128 ? 1 : HEAD_DIM / 128;
// Lanes with columns, and warps of rms_norm.cu's block.
constexpr u32 LANES = HEAD_DIM < 128 ? HEAD_DIM / 4 : WARP;
constexpr u32 NORM_WARPS = (HEAD_DIM + WARP - 1) / WARP;

struct Params {
  Rows rows;
  RowRefs row_refs;
  Slot slot;  // unused without keys and values
  const float* x;
  const float* q_weight;  // may be null
  const float* k_weight;  // may be null
  const float* frequencies;
  u16* q;      // `[rows, q_heads * HEAD_DIM]`
  u32 stride;  // of a row of `x`
  u32 q_column;
  u32 k_column;
  u32 v_column;
  u32 q_heads;   // may be 0
  u32 kv_heads;  // may be 0
  float q_eps;
  float k_eps;
  float v_eps;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/qkv_norm_rope.rs differs");

struct Head {
  float4 quads[QUADS];
};

__device__ __forceinline__ u32 lane() { return threadIdx.x % WARP; }

__device__ __forceinline__ float rms_scale(const Head& head, float eps) {
  float sum = 0;
#pragma unroll
  for (u32 k = 0; k < QUADS; k++) {
    float4 squares = no_quad();
    add_squares(squares, head.quads[k]);
    const float warp_squares = quads_sum(squares);
#pragma unroll
    for (u32 eight = 0; eight < 4 && 4 * k + eight < NORM_WARPS; eight++) {
      sum += __shfl_sync(ALL_LANES, warp_squares, 8 * eight);
    }
  }
  return scale_of_squares(sum, HEAD_DIM, eps);
}

__device__ __forceinline__ void norm(Head& head, float eps, const float* weight) {
  const float scale = rms_scale(head, eps);
#pragma unroll
  for (u32 k = 0; k < QUADS; k++) {
    const bool weighted = weight && lane() < LANES;
    const float4 w = weighted ? *(const float4*)(weight + 4 * lane() + 128 * k) : no_quad();
    head.quads[k] = normed_quad(head.quads[k], scale, weight, w);
  }
}

__device__ __forceinline__ float4 from_lane(float4 x, u32 mask) {
  return make_float4(__shfl_xor_sync(ALL_LANES, x.x, mask), __shfl_xor_sync(ALL_LANES, x.y, mask),
                     __shfl_xor_sync(ALL_LANES, x.z, mask), __shfl_xor_sync(ALL_LANES, x.w, mask));
}

__device__ __forceinline__ void rotate_quads(float4& a, float4& b, float4 sin, float4 cos) {
  rotate(a.x, b.x, Angle{sin.x, cos.x});
  rotate(a.y, b.y, Angle{sin.y, cos.y});
  rotate(a.z, b.z, Angle{sin.z, cos.z});
  rotate(a.w, b.w, Angle{sin.w, cos.w});
}

__device__ __forceinline__ void rotate_head(Head& head, const float4* sines, const float4* cosines) {
  if constexpr (QUADS > 1) {
#pragma unroll
    for (u32 k = 0; k + QUADS / 2 < QUADS; k++) {
      const u32 at = lane() + WARP * k;
      rotate_quads(head.quads[k], head.quads[k + QUADS / 2], sines[at], cosines[at]);
    }
  } else {
    // Both partners rotate the pair; each keeps its own.
    const u32 at = lane() % (HALF / 4);
    const bool second = lane() >= HALF / 4;
    const float4 own = head.quads[0], other = from_lane(own, HALF / 4);
    float4 a = second ? other : own, b = second ? own : other;
    rotate_quads(a, b, sines[at], cosines[at]);
    head.quads[0] = second ? b : a;
  }
}

__device__ __forceinline__ void store(const Head& head, u16* to) {
#pragma unroll
  for (u32 k = 0; k < QUADS; k++) {
    if (lane() < LANES) *(uint2*)(to + 4 * lane() + 128 * k) = as_f16x4(head.quads[k]);
  }
}

#if KV_TYPE == KV_Q8_0
// Into a page's row. A block of 32 is eight lanes' quads.
__device__ __forceinline__ void store(const Head& head, const Q8Page& page, u32 row) {
#pragma unroll
  for (u32 k = 0; k < QUADS; k++) {
    const float4 x = head.quads[k];
    float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
    const Q8Scale scale(largest);
    const u32 codes = u32(scale.code(x.x) & 255) | u32(scale.code(x.y) & 255) << 8 | u32(scale.code(x.z) & 255) << 16 |
                      u32(scale.code(x.w)) << 24;
    if (lane() < LANES) {
      *(u32*)(page.codes(row) + 4 * lane() + 128 * k) = codes;
      if (lane() % 8 == 0) page.scales(row)[lane() / 8 + 4 * k] = scale.bits;
    }
  }
}
#endif

// Into the page of a position, of the slot's keys or values.
__device__ __forceinline__ void store_cached(const Head& head, const Slot& slot, KvUnit* of, u32 run, u32 position,
                                             u32 kv_head) {
#if KV_TYPE == KV_Q8_0
  store(head, slot.page_of(of, run, position, kv_head), position % PAGE_TOKENS);
#else
  store(head, of + slot.cell(run, position, kv_head));
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) qkv_norm_rope(const Params p) {
  griddep_launch_dependents();
  griddep_wait();
  __shared__ float4 sines[HALF / 4], cosines[HALF / 4];
  const float* x = p.x + u64(blockIdx.x) * p.stride;
  const u32 rotated = p.q_heads + (p.slot.key_weight ? 0 : p.kv_heads), heads = rotated + p.kv_heads;

  auto load = [&](u32 h) {
    Head head;
    const u32 column = h < p.q_heads ? p.q_column + h * HEAD_DIM
                       : h < rotated  ? p.k_column + (h - p.q_heads) * HEAD_DIM
                                     : p.v_column + (h - rotated) * HEAD_DIM;
#pragma unroll
    for (u32 k = 0; k < QUADS; k++) {
      const bool inside = h < heads && lane() < LANES;
      head.quads[k] = inside ? *(const float4*)(x + column + 4 * lane() + 128 * k) : no_quad();
    }
    return head;
  };

  // The next head's loads are in flight while one is worked on, the first's while it is found out whether there is a row, and where.
  u32 h = threadIdx.x / WARP;
  Head next = load(h);
  if (!p.rows.has(blockIdx.x)) return;
  const u32 row = p.rows.index[blockIdx.x];
  const u32 position = p.row_refs.position[row];
  for (u32 j = threadIdx.x; j < HALF; j += blockDim.x) {
    const Angle by = angle(position, p.frequencies[j]);
    ((float*)sines)[j] = by.sin;
    ((float*)cosines)[j] = by.cos;
  }
  __syncthreads();
  for (; h < heads; h += WARPS) {
    Head head = next;
    next = load(h + WARPS);
    if (h < p.q_heads) {
      norm(head, p.q_eps, p.q_weight);
      rotate_head(head, sines, cosines);
      store(head, p.q + (u64(blockIdx.x) * p.q_heads + h) * HEAD_DIM);
    } else if (h < rotated) {
      norm(head, p.k_eps, p.k_weight);
      rotate_head(head, sines, cosines);
      store_cached(head, p.slot, p.slot.keys, p.row_refs.run[row], position, h - p.q_heads);
    } else {
      norm(head, p.v_eps, nullptr);
      store_cached(head, p.slot, p.slot.values, p.row_refs.run[row], position, h - rotated);
    }
  }
}
