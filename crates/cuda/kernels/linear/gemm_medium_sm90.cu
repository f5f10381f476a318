// GEMM of medium batches on Hopper: as gemm_medium.cu, by wgmma. Weights are packed fragments, each read once and dequantized in
// registers to f16, the A operand; activations lie in shared memory, the B operand. WEIGHTS names the weights' format.
//
// Grid: (runs * splits), all blocks resident at once; the splits of a run are a cluster. A block takes some M-tiles at a time, one per
// warp: `m_groups` warpgroups have four each (a slab: 64 outputs), and where warpgroups are left, all those M-tiles' stages (128 inputs)
// go around among `k_groups` of them. Other warps bring stages, weights and activations, into a ring in shared memory, and begin
// with weights before the launch before is over.
//
// Sums that one warpgroup has alone are finished from its registers, while stages of the next M-tiles come. Of others every
// warpgroup leaves its own in shared memory, and blocks of a cluster add them up, each for some of the tokens, in order of splits.
//
// Bytes: weights once; x once per block and M-tiles at a time, from L2. Operations: 2 * rows * outputs * columns.
// Requires columns % 64 == 0, x in token tiles; of f16_pair, outputs % 4 == 0 and rows of out aligned to 4 bytes.
#include "lib/batch.cuh"
#include "lib/fragment_wgmma.cuh"
#include "lib/reduce.cuh"
#include "lib/token_tiles.cuh"

// What a block would have to divide for, the host computes: a launch waits for the first instructions of its blocks.
struct Tiling {
  u32 run;  // M-tiles of a block at a time
  u32 m_groups, k_groups;
  u32 splits;        // of the inputs: blocks of a cluster
  u32 split_stages;  // stages of a split
  u32 runs;          // there are at a time
  u32 rounds;        // runs that each of them is; the first `longer` are one more
  u32 longer;
  u32 slots, slot_bytes;  // of the ring
};

struct Params {
  Rows rows;
  const u8* w;
  const u8* x;
  void* out;
  u32 columns;
  u32 outputs;
  u32 out_stride;
  u32 m_tiles;
  float scale;  // f16_pair
  Tiling tilings[4];  // for 16, 32, 48 and 64 rows
  u32 reserved;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/gemm_medium/warpgroups.rs differs");

enum { f32, f16_pair };

constexpr u32 GROUPS = 4, GROUP_WARPS = 4, MULTIPLIERS = GROUPS * GROUP_WARPS * WARP, BRINGING_WARPS = 8,
              THREADS = MULTIPLIERS + BRINGING_WARPS * WARP, SLAB_ROWS = GROUP_WARPS * M_TILE;
// Registers of a thread at the launch, and then of those that multiply and of those that bring. What a block leaves is room for those of a
// small launch behind it, which are there when it ends.
template <int ROWS>
constexpr u32 REGISTERS = ROWS <= 32 ? 64 : 72;
template <int ROWS>
constexpr u32 MULTIPLIERS_REGISTERS = ROWS <= 32 ? 80 : 96;
constexpr u32 BRINGERS_REGISTERS = 24;
template <int ROWS>
constexpr bool ARE_ENOUGH =
    MULTIPLIERS * MULTIPLIERS_REGISTERS<ROWS> + (THREADS - MULTIPLIERS) * BRINGERS_REGISTERS <= THREADS * REGISTERS<ROWS>;
static_assert(ARE_ENOUGH<16> && ARE_ENOUGH<64>, "who asks for more waits forever");
// A stage here is two parts of 64 inputs; the last of a matrix may be one.
constexpr u32 STAGE_BYTES = 2 * Weights::M_TILE_BYTES;  // of an M-tile
static_assert(STAGE_INPUTS == TILE_INPUTS, "a part is a tile");
// Parts lie in memory as they do here, one behind the other.
constexpr bool CONTIGUOUS = Weights::PARTS == 1;
// Of sums in shared memory, in floats from token to token: four pairs of tokens meet all banks.
constexpr u32 SUM_STRIDE = SLAB_ROWS + 4;
static_assert(SUM_STRIDE * 4 == SLOT_TOKEN_BYTES, "src/kernel/linear/gemm_medium.rs differs");
// Memory that has much to give delays the activations, so that many stages of weights are asked for before they have come.
constexpr u32 STAGES_BEFORE = 2;

// A block's share of the work.
struct Share {
  u32 run, m_groups, k_groups;
  u32 splits, rank;         // of the cluster
  u32 parts;                // of the matrix
  u32 first_stage, stages;  // of the split
  u32 first_m_tile, m_tiles_apart, rounds;
  u32 slots, slot_bytes;  // of the ring

  __device__ __forceinline__ Share(const Params& p, const Tiling& tiling) {
    run = tiling.run, m_groups = tiling.m_groups, k_groups = tiling.k_groups;
    parts = p.columns / STAGE_INPUTS;
    const u32 all_stages = (parts + 1) / 2, number = cluster_number();
    splits = tiling.splits, rank = cluster_rank();
    first_stage = rank * tiling.split_stages, stages = min(tiling.split_stages, all_stages - first_stage);
    first_m_tile = number * run, m_tiles_apart = tiling.runs * run;
    rounds = tiling.rounds + (number < tiling.longer);
    slots = tiling.slots, slot_bytes = tiling.slot_bytes;
  }

  __device__ __forceinline__ bool finishes() const { return k_groups * splits == 1; }  // from registers
};

// A place in the ring of stages.
struct Slot {
  u32 number = 0, at = 0, phase = 0;  // `at`: bytes from the ring's start

  __device__ __forceinline__ void skip(const Share& share, u32 slots) {
    number += slots, at += slots * share.slot_bytes;
    if (number >= share.slots) {
      number -= share.slots, at -= share.slots * share.slot_bytes;
      phase ^= 1;
    }
  }
};

// A stage of a block, in order of use.
struct Cursor {
  u32 part, m_tile, left;

  __device__ __forceinline__ explicit Cursor(const Share& share)
      : part(2 * share.first_stage), m_tile(share.first_m_tile), left(share.rounds * share.stages) {}
  __device__ __forceinline__ void next(const Share& share) {
    part += 2, left--;
    if (part < 2 * (share.first_stage + share.stages)) return;
    part = 2 * share.first_stage;
    m_tile += share.m_tiles_apart;
  }
};

template <int ROWS>
constexpr u32 PART_BYTES = ROWS * TILE_LINE;  // of activations

// Brings all stages of a block, as places become free. Of a slot, activations lie before weights.
template <int ROWS>
__device__ __forceinline__ void bring(const Params& p, const Share& share, u8* ring, u64* came, u64* freed, u32 warp, u32 lane) {
  const u64 m_tile_bytes = Weights::m_tile_bytes(p.columns);
  // A second part that lacks is the first again: it is multiplied by zeros, and must be numbers.
  const auto weights = [&](u8* to, const Cursor& from, u64* barrier) {
    const u32 first = from.m_tile + warp, end = min(from.m_tile + share.run, p.m_tiles);
    const bool both = from.part + 1 < share.parts;
    to += 2 * PART_BYTES<ROWS> + warp * STAGE_BYTES;
    if constexpr (CONTIGUOUS) {
      if (lane == 0) {
        barrier_expect(barrier, first < end ? (end - first + BRINGING_WARPS - 1) / BRINGING_WARPS * STAGE_BYTES : 0);
#pragma unroll 1
        for (u32 m_tile = first; m_tile < end; m_tile += BRINGING_WARPS, to += BRINGING_WARPS * STAGE_BYTES) {
          const u8* w = p.w + m_tile * m_tile_bytes + u64(from.part) * Weights::BYTES;
          bulk_copy(to, w, both ? STAGE_BYTES : Weights::BYTES, barrier);
          if (!both) bulk_copy(to + Weights::BYTES, w, Weights::BYTES, barrier);
        }
      }
      __syncwarp();
    } else {
#pragma unroll 1
      for (u32 m_tile = first; m_tile < end; m_tile += BRINGING_WARPS, to += BRINGING_WARPS * STAGE_BYTES) {
        const u8* w = p.w + m_tile * m_tile_bytes;
        // Registers are few here: one part after the other, and nothing of the lane's places is kept for the next.
#pragma unroll 1
        for (u32 i = 0; i < 2; i++) {
          u32 own = lane;
          asm volatile("" : "+r"(own));
          Weights::copy(to + i * Weights::M_TILE_BYTES, w, from.part + (both ? i : 0), own, 0, 0);
        }
      }
      barrier_arrive_copied(barrier);
    }
  };
  // The last warp has the fewest M-tiles. Lines behind the last token have whatever they have: nobody reads their sums.
  const auto activations = [&](u8* to, const Cursor& from, u64* barrier) {
    if (warp == BRINGING_WARPS - 1 && lane == 0) {
      const u32 parts = min(2u, share.parts - from.part);
      barrier_expect(barrier, parts * PART_BYTES<ROWS>);
#pragma unroll 1
      for (u32 i = 0; i < parts; i++)
        bulk_copy(to + i * PART_BYTES<ROWS>, p.x + u64(from.part + i) * TILE_BYTES, PART_BYTES<ROWS>, barrier);
    }
    __syncwarp();
  };
  Cursor ahead(share), here(share);
  Slot to, slot;
  u32 early = 0;
#pragma unroll 1
  for (; early < STAGES_BEFORE && ahead.left > 0; early++) {
    weights(ring + to.at, ahead, came + to.number);
    to.skip(share, 1);
    ahead.next(share);
  }
  if (warp == 0 && lane == 0) griddep_launch_dependents();
  griddep_wait();
#pragma unroll 1
  for (; early > 0; early--) {
    activations(ring + slot.at, here, came + slot.number);
    slot.skip(share, 1);
    here.next(share);
  }
  // From here on a stage's activations are asked for behind its weights, not stages later.
#pragma unroll 1
  while (ahead.left > 0) {
    barrier_wait(freed + to.number, to.phase ^ 1);  // the phase before the first is over
    weights(ring + to.at, ahead, came + to.number);
    activations(ring + to.at, ahead, came + to.number);
    to.skip(share, 1);
    ahead.next(share);
  }
}

// Calls `f(row of the slab, token, sum)` for the lane's sums.
template <int SUMS, typename F>
__device__ __forceinline__ void each_sum(const float (&sum)[SUMS], u32 of_group, u32 lane, F f) {
  const u32 row = of_group * M_TILE + lane / 4;
  u32 token = 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    asm volatile("" : "+r"(token));  // or the addresses of all sums would be computed first, into dozens of registers
    f(row, token, sum[i]);
    f(row, token + 1, sum[i + 1]);
    f(row + 8, token, sum[i + 2]);
    f(row + 8, token + 1, sum[i + 3]);
    token += 8;
  }
}

// The epilogue of one sum, of a row of M-tiles from the first on.
__device__ __forceinline__ void write(const Params& p, u32 row, u32 token, float sum) {
  if (EPILOGUE == f16_pair) {
    const u32 features = p.outputs / 2, feature = row / (2 * M_TILE) * M_TILE + row % M_TILE;
    u16* out = (u16*)p.out + u64(token) * p.out_stride + row / M_TILE % 2 * features;
    if (feature < features) out[feature] = f32_to_f16(p.scale * sum);
  } else {
    if (row < p.outputs) ((float*)p.out)[u64(token) * p.out_stride + row] = sum;
  }
}

// The epilogue of an M-tile's sums in f16, of a warp that has them all: transposed, so that a lane has two outputs of a token.
template <int SUMS>
__device__ __forceinline__ void write_pairs(const Params& p, const float (&sum)[SUMS], u32 m_tile, u32 count, u32 lane) {
  const u32 features = p.outputs / 2, feature = m_tile / 2 * M_TILE + lane % 4 * 2;
  u16* out = (u16*)p.out + u64(lane / 4) * p.out_stride + m_tile % 2 * features + feature;
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    const u32 low = transposed(pack_f16x2(p.scale * sum[i], p.scale * sum[i + 1])),
              high = transposed(pack_f16x2(p.scale * sum[i + 2], p.scale * sum[i + 3]));
    if (2 * i + lane / 4 < count) {
      if (feature < features) *(u32*)out = low;
      if (feature + 8 < features) *(u32*)(out + 8) = high;
    }
    out += 8 * p.out_stride;
  }
}

// Multiplies the stages of a warpgroup, and finishes sums if nobody else has a part of them.
template <int ROWS>
__device__ __forceinline__ void multiply_stages(const Params& p, const Share& share, float (&sum)[ROWS / 2], const u8* ring, const u8* zeros,
                                                u64* came, u64* freed, u32 group, u32 of_group, u32 lane, u32 count) {
  const u32 of_stages = share.m_groups == 1 ? group : share.m_groups == 2 ? group / 2 : 0;
  const u32 own = (group - of_stages * share.m_groups) * GROUP_WARPS + of_group;
  const u32 stages = (share.stages + share.k_groups - 1 - of_stages) / share.k_groups;
  // Warps without an M-tile multiply another's: nobody reads their sums.
  const u8* const weights = ring + 2 * PART_BYTES<ROWS> + min(own, share.run - 1) * STAGE_BYTES;
  const auto operands = [&](u32 (&a)[2][2][4], const u8* m_tile) {
#pragma unroll
    for (u32 step = 0; step < 2; step++) wgmma_operands(a[step], m_tile, step, lane, Weights());
  };
  const auto multiply = [&](const u32 (&a)[2][2][4], SmemDescriptor b) {
    wgmma_fence();
#pragma unroll
    for (u32 product = 0; product < 4; product++) wgmma_packed(sum, a[product / 2][product % 2], b.at(32 * product));
    wgmma_commit();
  };
  const SmemDescriptor first = smem_descriptor(ring, 0, 8 * TILE_LINE), none = smem_descriptor(zeros, 0, 8 * TILE_LINE);
  Slot slot;
  slot.skip(share, of_stages);
  u32 m_tile = share.first_m_tile + own;
#pragma unroll 1
  for (u32 round = 0; round < share.rounds; round++) {
    u32 even[2][2][4], odd[2][2][4];
    u32 last = 0, part = 2 * (share.first_stage + of_stages);
#pragma unroll 1
    for (u32 stage = 0; stage < stages; stage++) {
      barrier_wait(came + slot.number, slot.phase);
      wgmma_wait<1>();
      const u8* w = weights + slot.at;
      operands(even, w);
      const SmemDescriptor b = first.at(slot.at);
      multiply(even, b);
      wgmma_wait<1>();
      // The stage before is over, for all lanes.
      __syncwarp();
      if (lane == 0 && stage > 0) barrier_arrive(freed + last);
      last = slot.number;
      operands(odd, w + Weights::M_TILE_BYTES);
      // Where a second part lacks it is multiplied by zeros: a branch around products would make the compiler wait for each.
      multiply(odd, part + 1 < share.parts ? b.at(PART_BYTES<ROWS>) : none);
      slot.skip(share, share.k_groups);
      part += 2 * share.k_groups;
    }
    wgmma_wait<0>();
    wgmma_results(sum);
    __syncwarp();
    if (lane == 0 && stages > 0) barrier_arrive(freed + last);
    if (!share.finishes()) return;
    const u32 row = (m_tile - of_group) * M_TILE;
    if (own < share.run && EPILOGUE == f16_pair) {
      write_pairs(p, sum, m_tile, count, lane);
    } else if (own < share.run) {
      each_sum(sum, of_group, lane, [&](u32 of_slab, u32 token, float value) {
        if (token < count) write(p, row + of_slab, token, value);
      });
    }
    m_tile += share.m_tiles_apart;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) sum[i] = 0;
  }
}

template <int ROWS>
__device__ __forceinline__ void gemm_medium(const Params& p) {
  constexpr u32 GROUP_SUMS = ROWS * SUM_STRIDE, TOGETHER = 8;
  DYNAMIC_SHARED(unaligned);
  __shared__ u64 came[MAX_SLOTS], freed[MAX_SLOTS];
  u32 lane = threadIdx.x % WARP;
  asm volatile("" : "+r"(lane));  // or it would be computed again in every stage
  // All lanes know the same: what follows from it is computed once for the warp.
  const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), group = warp / GROUP_WARPS, of_group = warp % GROUP_WARPS;
  const Share share(p, p.tilings[ROWS / 16 - 1]);
  u8* const zeros = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  u8* const ring = zeros + PART_BYTES<ROWS>;
  // In the place of all the rest, once nobody needs it.
  float* const sums = (float*)zeros;
  if (threadIdx.x < MAX_SLOTS) {
    barrier_init(came + threadIdx.x, 1 + BRINGING_WARPS * (CONTIGUOUS ? 1 : WARP));
    barrier_init(freed + threadIdx.x, share.m_groups * GROUP_WARPS);
  }
  fence_barriers();
  if (share.parts % 2) {
    for (u32 i = threadIdx.x; i < PART_BYTES<ROWS> / 16; i += THREADS) ((uint4*)zeros)[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
  }
  __syncthreads();
  if (group >= GROUPS) {
    give_registers<BRINGERS_REGISTERS>();
    bring<ROWS>(p, share, ring, came, freed, warp - GROUPS * GROUP_WARPS, lane);
    if (share.finishes()) return;
    __syncthreads();
    cluster_arrive();
    cluster_wait();
    cluster_meet();
    return;
  }
  take_registers<MULTIPLIERS_REGISTERS<ROWS>>();
  float sum[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sum[i] = 0;
  // Asked for while the first stage is on its way: at the end memory that is busy would take its time to answer.
  griddep_wait();
  const u32 count = *p.rows.count;
  if (group < share.m_groups * share.k_groups) {
    multiply_stages<ROWS>(p, share, sum, ring, zeros, came, freed, group, of_group, lane, count);
  }
  if (share.finishes()) return;

  __syncthreads();  // nobody reads activations or weights any more
  each_sum(sum, of_group, lane, [&](u32 row, u32 token, float value) { sums[group * GROUP_SUMS + token * SUM_STRIDE + row] = value; });
  cluster_arrive();
  cluster_wait();
  const u32 quads = share.m_groups * ROWS * (SLAB_ROWS / 4);
#pragma unroll 1
  for (u32 quad = share.rank * MULTIPLIERS + threadIdx.x; quad < quads; quad += share.splits * MULTIPLIERS) {
    const u32 row = quad % (SLAB_ROWS / 4) * 4, token = quad / (SLAB_ROWS / 4) % ROWS, slab = quad / (SLAB_ROWS / 4 * ROWS);
    const float* const first = sums + slab * GROUP_SUMS + token * SUM_STRIDE + row;
    float4 total = make_float4(0, 0, 0, 0);
    // Several at a time: it is the way to another multiprocessor that takes long.
    const u32 all = share.splits * share.k_groups;
#pragma unroll 1
    for (u32 i = 0; i < all; i += TOGETHER) {
      float4 parts[TOGETHER];
#pragma unroll
      for (u32 j = 0; j < TOGETHER; j++) {
        const u32 of = min(i + j, all - 1), split = of >> share.k_groups / 2, k_group = of & (share.k_groups - 1);  // of 1, 2 or 4
        parts[j] = cluster_load(cluster_address(first + k_group * share.m_groups * GROUP_SUMS, split));
      }
#pragma unroll
      for (u32 j = 0; j < TOGETHER; j++) {
        if (i + j >= all) break;
        total.x += parts[j].x, total.y += parts[j].y, total.z += parts[j].z, total.w += parts[j].w;
      }
    }
    const u32 of_run = slab * SLAB_ROWS + row;
    if (token >= count || of_run >= share.run * M_TILE) continue;
    const u32 n = share.first_m_tile * M_TILE + of_run;
    write(p, n, token, total.x);
    write(p, n + 1, token, total.y);
    write(p, n + 2, token, total.z);
    write(p, n + 3, token, total.w);
  }
  // Others read what this block has left.
  cluster_meet();
}

extern "C" __global__ void __maxnreg__(REGISTERS<16>) gemm_medium_sm90_16(const Params p) { gemm_medium<16>(p); }
extern "C" __global__ void __maxnreg__(REGISTERS<32>) gemm_medium_sm90_32(const Params p) { gemm_medium<32>(p); }
extern "C" __global__ void __maxnreg__(REGISTERS<48>) gemm_medium_sm90_48(const Params p) { gemm_medium<48>(p); }
extern "C" __global__ void __maxnreg__(REGISTERS<64>) gemm_medium_sm90_64(const Params p) { gemm_medium<64>(p); }
