// GEMM of medium batches on Hopper: as gemm_medium.cu, by wgmma. Weights are packed fragments, each read once and dequantized in
// registers to f16, the A operand; activations lie in shared memory, the B operand. WEIGHTS names the weights' format.
//
// Grid: (runs, splits), all blocks resident at once. A block owns a run of slabs (four M-tiles: 64 outputs) and a split of the
// inputs, whose activations it holds in shared memory, copied once, some stages at a time, while it multiplies. Its work is a line
// of units, slab after slab, a unit a stage (64 inputs) of a slab; each of four warpgroups takes an equal piece of the line
// (stream-K), a warp an M-tile of every slab. Warps have cp.async rings of their own that are filled before the launch before is
// over, so no barrier stops the weights.
//
// A slab that one warpgroup has whole is finished from its registers. Of others every warpgroup stores its sums in shared memory,
// and they are added in the order of the warpgroups. Split-K and epilogues are those of gemm_medium.cu.
//
// Bytes: weights once; x once per run (from L2), partials written and read once. Operations: 2 * rows * outputs * columns.
// Requires columns % 64 == 0, x in token tiles, at most MAX_CHUNKS * CHUNK stages of a split, `arrivals` zero (they are left so).
#include "lib/batch.cuh"
#include "lib/fragment_wgmma.cuh"
#include "lib/reduce.cuh"
#include "lib/token_tiles.cuh"

struct Tiling {
  u32 run;           // slabs of a block
  u32 split_stages;  // stages of a split
  u32 whole;         // a warpgroup's piece is whole slabs
};

struct Params {
  Rows rows;
  const u8* w;
  const u8* x;
  void* out;
  float* partials;
  u32* arrivals;
  u32 columns;
  u32 outputs;
  u32 out_stride;
  u32 m_tiles;
  float scale;  // f16_pair
  Tiling tilings[4];  // for 16 and 32 rows; the others are gemm_medium.cu's
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/gemm_medium.rs differs");

enum { f32, f16_pair };

constexpr u32 GROUPS = 4, GROUP_WARPS = 4, WARPS = GROUPS * GROUP_WARPS, THREADS = WARPS * WARP, SLAB_ROWS = GROUP_WARPS * M_TILE;
constexpr u32 RING_BYTES = RING * Weights::M_TILE_BYTES;  // of a warp
// Stages of activations that arrive together, and how many times those.
constexpr u32 CHUNK = 4, MAX_CHUNKS = 32;
static_assert(STAGE_INPUTS == TILE_INPUTS, "a stage is a tile");
// Of sums in shared memory, in floats from token to token: four pairs of tokens meet all banks.
constexpr u32 SLOT_STRIDE = SLAB_ROWS + 4;
static_assert(SLOT_STRIDE * 4 == SLOT_TOKEN_BYTES, "src/kernel/linear/gemm_medium.rs differs");

// The stages of one warp, in order of use.
struct Stream {
  const u8 *m_tile, *last;  // the last M-tile stands for those that a slab lacks
  u64 slab_bytes;
  u32 stage, begin, end;  // of the split
  u32 left;

  // Starts the copy of the next stage, and commits the group whether there is one or not.
  __device__ __forceinline__ void fetch(u8* to, u32 lane) {
    if (left > 0) {
      Weights::copy(to, m_tile, stage, lane, 0, 0);
      left--;
      if (++stage == end) {
        stage = begin;
        m_tile += slab_bytes;
        if (m_tile > last) m_tile = last;
      }
    }
    cp_async_commit();
  }
};

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

// The epilogue of one sum.
__device__ __forceinline__ void write(const Params& p, u32 slab, u32 row, u32 token, float sum) {
  if (EPILOGUE == f16_pair) {
    const u32 features = p.outputs / 2, feature = (2 * slab + row / (2 * M_TILE)) * M_TILE + row % M_TILE;
    u16* out = (u16*)p.out + u64(token) * p.out_stride + row / M_TILE % 2 * features;
    if (feature < features) out[feature] = f32_to_f16(p.scale * sum);
  } else {
    const u32 n = slab * SLAB_ROWS + row;
    if (n < p.outputs) ((float*)p.out)[u64(token) * p.out_stride + n] = sum;
  }
}

template <int ROWS>
__device__ __forceinline__ void gemm_medium(const Params& p) {
  constexpr u32 SLOT = ROWS * SLOT_STRIDE, SLAB_SUMS = ROWS * SLAB_ROWS;
  DYNAMIC_SHARED(unaligned);
  __shared__ u32 arrival;
  __shared__ u64 arrived[MAX_CHUNKS];  // chunks of activations
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = warp / GROUP_WARPS, of_group = warp % GROUP_WARPS;
  const Tiling& tiling = p.tilings[ROWS / 16 - 1];
  const u32 run = tiling.run, split_stages = tiling.split_stages, whole = tiling.whole;
  const u32 all_slabs = (p.m_tiles + GROUP_WARPS - 1) / GROUP_WARPS, first_slab = blockIdx.x * run,
            slabs = min(run, all_slabs - first_slab);
  const u32 all_stages = (p.columns + STAGE_INPUTS - 1) / STAGE_INPUTS, first_stage = blockIdx.y * split_stages,
            stages = min(split_stages, all_stages - first_stage), splits = gridDim.y;
  const u32 units = slabs * stages;
  const auto piece = [&](u32 group) { return whole ? slabs * group / GROUPS * stages : units * group / GROUPS; };
  const u32 begin = piece(group), end = piece(group + 1);

  // Activations, in whose place the last sums of all warpgroups lie in the end, then sums of warpgroups that go on to another
  // slab, then rings.
  u8* const x = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  float* const last = (float*)x;
  const u32 x_bytes = max(ROWS * TILE_LINE * split_stages, whole ? 0 : GROUPS * SLOT * 4), crossings = whole ? 0 : min(run - 1, GROUPS);
  float* const crossing = (float*)(x + x_bytes);
  u8* const ring = x + x_bytes + crossings * SLOT * 4 + warp * RING_BYTES;

  const u64 m_tile_bytes = Weights::m_tile_bytes(p.columns);
  u32 slab = begin / stages, stage = begin - slab * stages;
  Stream stream;
  stream.slab_bytes = GROUP_WARPS * m_tile_bytes;
  stream.last = p.w + (p.m_tiles - 1) * m_tile_bytes;
  stream.m_tile = p.w + u64(min(GROUP_WARPS * (first_slab + slab) + of_group, p.m_tiles - 1)) * m_tile_bytes;
  stream.begin = first_stage, stream.end = first_stage + stages, stream.stage = first_stage + stage;
  stream.left = end - begin;
  if (threadIdx.x < MAX_CHUNKS) barrier_init(arrived + threadIdx.x);
  fence_barriers();
#pragma unroll 1
  for (u32 i = 0; i < RING; i++) stream.fetch(ring + i * Weights::M_TILE_BYTES, lane);
  __syncthreads();
  griddep_launch_dependents();
  griddep_wait();

  // Lines behind the last token have whatever they have: nobody reads their sums.
  if (warp == 0 && lane * CHUNK < stages) {
    const u32 begin = lane * CHUNK, end = min(begin + CHUNK, stages);
    barrier_expect(arrived + lane, (end - begin) * ROWS * TILE_LINE);
#pragma unroll 1
    for (u32 s = begin; s < end; s++)
      bulk_copy(x + s * ROWS * TILE_LINE, p.x + u64(first_stage + s) * TILE_BYTES, ROWS * TILE_LINE, arrived + lane);
  }
  __syncwarp();
  const u32 count = *p.rows.count;

  // Where a sum goes once all of the block's inputs are in it.
  float* const partials = p.partials + u64(blockIdx.x) * splits * run * SLAB_SUMS;
  const auto put = [&](u32 slab, u32 row, u32 token, float sum) {
    if (splits > 1) {
      partials[(blockIdx.y * run + slab) * SLAB_SUMS + token * SLAB_ROWS + row] = sum;
    } else if (token < count) {
      write(p, first_slab + slab, row, token, sum);
    }
  };
  // Sums of a piece of a slab, in shared memory.
  const auto slot_of = [&](u32 slab, u32 group, bool goes_on) {
    return goes_on ? crossing + (run <= GROUPS ? slab : group) * SLOT : last + group * SLOT;
  };

  float sum[ROWS / 2];
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) sum[i] = 0;
  };
  const auto store = [&](float* slot) {
    each_sum(sum, of_group, lane, [&](u32 row, u32 token, float value) { slot[token * SLOT_STRIDE + row] = value; });
  };
  u32 from = 0;  // in the ring
  SmemDescriptor b = smem_descriptor(x + stage * ROWS * TILE_LINE, 0, 8 * TILE_LINE);
  // A stage into `sum`, by way of registers that the product before the last has read.
  const auto multiply = [&](u32 (&a)[2][2][4], u32 stage) {
    if (stage % CHUNK == 0) barrier_wait(arrived + stage / CHUNK);
    cp_async_wait<RING - 1>();
    wgmma_wait<1>();
    __syncwarp();
#pragma unroll
    for (u32 step = 0; step < 2; step++) wgmma_operands(a[step], ring + from, step, lane, Weights());
    __syncwarp();
    stream.fetch(ring + from, lane);
    from += Weights::M_TILE_BYTES;
    if (from == RING_BYTES) from = 0;
    wgmma_fence();
#pragma unroll
    for (u32 product = 0; product < 4; product++) wgmma_packed(sum, a[product / 2][product % 2], b.at(32 * product));
    wgmma_commit();
    b = b.at(ROWS * TILE_LINE);
  };
  u32 unit = begin;
  bool left = begin == end;  // a piece of a slab that is to be added to others, of zeros where there is nothing to add
#pragma unroll 1
  while (unit < end) {
    const u32 here = min(stages - stage, end - unit);
    clear();
    u32 even[2][2][4], odd[2][2][4];
    if (stage % CHUNK) barrier_wait(arrived + stage / CHUNK);
#pragma unroll 1
    for (u32 i = 1; i < here; i += 2) {
      multiply(even, stage + i - 1);
      multiply(odd, stage + i);
    }
    if (here % 2) multiply(even, stage + here - 1);
    wgmma_wait<0>();
    wgmma_results(sum);
    const bool from_start = stage == 0, to_end = stage + here == stages;
    unit += here;
    if (from_start && to_end) {
      each_sum(sum, of_group, lane, [&](u32 row, u32 token, float value) { put(slab, row, token, value); });
    } else if (unit < end) {
      store(slot_of(slab, group, true));
    } else {
      left = true;
      break;
    }
    slab++;
    stage = 0;
    b = smem_descriptor(x, 0, 8 * TILE_LINE);
  }
  if (begin == end) clear();

  if (!whole) {
    __syncthreads();  // nobody reads activations any more
    if (left) store(slot_of(slab, group, false));
    __syncthreads();
    const auto group_of = [&](u32 unit) { return ((unit + 1) * GROUPS - 1) / units; };
#pragma unroll 1
    for (u32 slab = 0; slab < slabs; slab++) {
      const u32 first = group_of(slab * stages), final = group_of((slab + 1) * stages - 1);
      if (first == final) continue;
      const float* tail = slot_of(slab, final, piece(final + 1) > (slab + 1) * stages);
#pragma unroll 1
      for (u32 e = threadIdx.x; e < SLAB_SUMS; e += THREADS) {
        const u32 token = e / SLAB_ROWS, row = e % SLAB_ROWS, at = token * SLOT_STRIDE + row;
        float total = 0;
        for (u32 g = first; g < final; g++) total += last[g * SLOT + at];
        put(slab, row, token, total + tail[at]);
      }
    }
  }

  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrival = atomicAdd(p.arrivals + blockIdx.x, 1u);
  __syncthreads();
  if (arrival != splits - 1) return;
  if (threadIdx.x == 0) p.arrivals[blockIdx.x] = 0;
  __threadfence();
  // Several sums at a time: it is the way to L2 and back that takes long.
  constexpr u32 TOGETHER = 4;
  const u32 quads = slabs * SLAB_SUMS / 4;
#pragma unroll 1
  for (u32 first = threadIdx.x; first < quads; first += TOGETHER * THREADS) {
    float4 total[TOGETHER];
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) total[i] = make_float4(0, 0, 0, 0);
#pragma unroll 2
    for (u32 split = 0; split < splits; split++) {
      float4 part[TOGETHER];
#pragma unroll
      for (u32 i = 0; i < TOGETHER; i++) {
        const u32 quad = min(first + i * THREADS, quads - 1);
        part[i] = load_from_blocks((const float4*)partials + split * (run * SLAB_SUMS / 4) + quad);
      }
#pragma unroll
      for (u32 i = 0; i < TOGETHER; i++)
        total[i].x += part[i].x, total[i].y += part[i].y, total[i].z += part[i].z, total[i].w += part[i].w;
    }
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) {
      const u32 quad = first + i * THREADS, slab = quad / (SLAB_SUMS / 4), token = quad / (SLAB_ROWS / 4) % ROWS,
                row = quad % (SLAB_ROWS / 4) * 4;
      if (quad >= quads || token >= count) continue;
      write(p, first_slab + slab, row, token, total[i].x);
      write(p, first_slab + slab, row + 1, token, total[i].y);
      write(p, first_slab + slab, row + 2, token, total[i].z);
      write(p, first_slab + slab, row + 3, token, total[i].w);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_medium_sm90_16(const Params p) { gemm_medium<16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_medium_sm90_32(const Params p) { gemm_medium<32>(p); }
