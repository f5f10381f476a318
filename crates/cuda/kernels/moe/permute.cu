// Permutes tokens by expert and cuts each expert's into tiles, for the grouped GEMMs (kernels/linear/gemm.cu, gemm_packed_sm90.cu).
//
// Token-expert pair `r * top_k + k` is row r with its k-th routed expert. `sorted` lists pairs by expert, each expert's in their
// own order; `tiles` names expert, first index in `sorted` and count of every tile; `tile_count` says how many there are.
//
// Grid: one block of 32 warps. A warp takes an equal run of pairs: it counts the experts among them, learns from the other
// warps' counts where its own begin, and writes them there. Tiles have 16, 32, 64 or 144 pairs, by entry point.
// Bytes per row: 8 * top_k in, 4 * top_k out. Shared memory: 34 words per expert.
#include "lib/batch.cuh"
#include "lib/reduce.cuh"
#include "lib/ptx.cuh"

struct Tile {
  u32 expert;
  u32 first;
  u32 count;
};

struct Params {
  Rows rows;
  const float* route;
  u32* sorted;
  Tile* tiles;
  u32* tile_count;
  u32 experts;
  u32 top_k;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/moe/permute.rs differs");

constexpr u32 WARPS = 32;
// Loads that a lane has in flight together.
constexpr int TOGETHER = 8;
constexpr u32 NO_EXPERT = 0xffffffffu;

// Calls `each(pair, expert)` for a warp's pairs in order, whole warps at a time; past the end there is no expert.
template <typename Each>
__device__ __forceinline__ void for_pairs(const Params& p, u32 pairs, Each each) {
  const u32 run = (pairs + WARPS * WARP - 1) / (WARPS * WARP) * WARP, warp = threadIdx.x / WARP;
  const u32 end = min((warp + 1) * run, pairs), first = warp * run + threadIdx.x % WARP;
  // Row and number of the next pair, kept up without division.
  const u32 more_rows = WARP / p.top_k, more = WARP % p.top_k;
  u32 row = first / p.top_k, k = first % p.top_k;
  for (u32 start = warp * run; start < end; start += TOGETHER * WARP) {
    u32 experts[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      experts[i] = start + i * WARP + threadIdx.x % WARP < end ? u32(p.route[row * 2 * p.top_k + k]) : NO_EXPERT;
      row += more_rows;
      k += more;
      if (k >= p.top_k) k -= p.top_k, row++;
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) each(start + i * WARP + threadIdx.x % WARP, experts[i]);
  }
}

// The sum over lower lanes, and over all in `total`.
__device__ __forceinline__ u32 sum_before(u32 value, u32& total) {
  const u32 lane = threadIdx.x % WARP;
  u32 sum = value;
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) {
    const u32 other = __shfl_sync(ALL_LANES, sum, int(lane - step) & 31);
    if (lane >= step) sum += other;
  }
  total = __shfl_sync(ALL_LANES, sum, 31);
  return sum - value;
}

template <u32 TILE>
__device__ __forceinline__ void permute(const Params& p) {
  DYNAMIC_SHARED(shared);
  u32* offsets = (u32*)shared;                // [warp, expert]: counts, then where the next pair goes
  u32* totals = offsets + WARPS * p.experts;  // [expert]
  u32* first_tiles = totals + p.experts;      // [expert]
  const u32 pairs = *p.rows.count * p.top_k, lane = threadIdx.x % WARP;
  u32* own = offsets + threadIdx.x / WARP * p.experts;
  for (u32 i = threadIdx.x; i < WARPS * p.experts; i += blockDim.x) offsets[i] = 0;
  __syncthreads();
  for_pairs(p, pairs, [&](u32, u32 expert) {
    if (expert != NO_EXPERT) atomicAdd(own + expert, 1u);
  });
  __syncthreads();
  for (u32 expert = threadIdx.x; expert < p.experts; expert += blockDim.x) {
    u32 total = 0;
    for (u32 warp = 0; warp < WARPS; warp++) {
      const u32 count = offsets[warp * p.experts + expert];
      offsets[warp * p.experts + expert] = total;
      total += count;
    }
    totals[expert] = total;
  }
  __syncthreads();
  if (threadIdx.x < WARP) {
    u32 first = 0, tile = 0;
    for (u32 start = 0; start < p.experts; start += WARP) {
      const u32 expert = start + lane, total = expert < p.experts ? totals[expert] : 0;
      u32 all_pairs, all_tiles;
      const u32 before = sum_before(total, all_pairs), tiles_before = sum_before((total + TILE - 1) / TILE, all_tiles);
      if (expert < p.experts) {
        // The expert's first index replaces its total; the next expert's gives the total back.
        totals[expert] = first + before;
        first_tiles[expert] = tile + tiles_before;
      }
      first += all_pairs;
      tile += all_tiles;
    }
    if (lane == 0) *p.tile_count = tile;
  }
  __syncthreads();
  for (u32 expert = threadIdx.x; expert < p.experts; expert += blockDim.x) {
    const u32 first = totals[expert], end = expert + 1 < p.experts ? totals[expert + 1] : pairs;
    Tile* tiles = p.tiles + first_tiles[expert];
    for (u32 at = first, i = 0; at < end; at += TILE, i++) tiles[i] = Tile{expert, at, min(TILE, end - at)};
  }
  for_pairs(p, pairs, [&](u32 pair, u32 expert) {
    const u32 alike = lanes_alike(expert);
    const u32 rank = __popc(alike & ((1u << lane) - 1));
    const bool there = expert != NO_EXPERT;
    const u32 offset = there ? own[expert] : 0;
    __syncwarp();
    if (there) p.sorted[totals[expert] + offset + rank] = pair;
    if (there && rank == 0) own[expert] = offset + __popc(alike);
    __syncwarp();
  });
}

extern "C" __global__ void __launch_bounds__(1024) permute_16(const Params p) { permute<16>(p); }
extern "C" __global__ void __launch_bounds__(1024) permute_32(const Params p) { permute<32>(p); }
extern "C" __global__ void __launch_bounds__(1024) permute_64(const Params p) { permute<64>(p); }
extern "C" __global__ void __launch_bounds__(1024) permute_144(const Params p) { permute<144>(p); }
