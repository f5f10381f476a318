// GEMM of large batches on Hopper, by wgmma: out[r, n] = sum over k of x[r, k] * w[n, k]. Weights are packed fragments, dequantized in
// registers to f16, the A operand; activations, K-permuted f16 (lib/token_tiles.cuh), are gathered into shared memory, the B operand.
//
// Items of work are 256 outputs (16 M-tiles) of up to 128 or 144 rows. Grid: as many blocks as run at once; item after item, `gridDim.x`
// apart. Warps are specialized. Eight producers copy stages of 64 inputs to a ring that goes on from item to item, and announce them at
// barriers. Two warpgroups multiply, a warp two M-tiles, neighbours: one dequantizes while products of the other run.
//
// ROWS `dense`: tiles of 128 rows. `grouped`: grouped GEMM over experts. Rows are token-expert pairs, those of a tile one expert's
// (kernels/moe/permute.cu); a tile that is not full takes the narrowest products that have room for it.
//
// EPILOGUE `f32`, `f16`: out[r, n], `out_stride` apart. `geglu_pair`: M-tiles alternate gate and up; gelu(gate) * up in K-permuted f16, by way
// of shared memory so that 16 bytes are written at a time. All times `scale`; f16 is cut off at its largest.
//
// Bytes: weights once per row tile, x once per 256 outputs (both from L2 mostly). Operations: 2 * rows * outputs * columns.
// Requires columns % 64 == 0, outputs % 4 == 0 and rows of out aligned to 16 bytes, for geglu_pair whole blocks of 32 products.
#include "lib/batch.cuh"
#include "lib/fragment_wgmma.cuh"
#include "lib/reduce.cuh"
#include "lib/token_tiles.cuh"

struct Tile {
  u32 expert;
  u32 first;  // in `sorted`
  u32 count;
};

struct Params {
  Rows rows;
  const u8* w;
  const u8* x;
  void* out;
  const Tile* tiles;  // grouped, as the next two
  const u32* tile_count;
  const u32* sorted;
  u32 columns;
  u32 outputs;  // rows of a matrix
  u32 m_tiles;  // of a matrix
  u32 out_stride;
  u32 x_share;  // grouped: routed experts that share a row of x
  float scale;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/gemm_packed.rs differs");

enum { f32, f16, geglu_pair };
enum { dense, grouped };

constexpr u32 GROUP_WARPS = 4, CONSUMER_WARPS = 8, CONSUMERS = CONSUMER_WARPS * WARP, PRODUCER_WARPS = 8,
              PRODUCERS = PRODUCER_WARPS * WARP, THREADS = CONSUMERS + PRODUCERS;
constexpr u32 BLOCK_M_TILES = 2 * CONSUMER_WARPS, MAX_TOKENS = ROWS == grouped ? 144 : 128, LINE = 128;
constexpr u32 X_STAGE = MAX_TOKENS * LINE, W_STAGE = BLOCK_M_TILES * Weights::M_TILE_BYTES;
static_assert(STAGE_INPUTS * 2 == LINE, "a stage of a token is a line");
static_assert(X_STAGE + W_STAGE == STAGE_BYTES, "src/kernel/linear/gemm_packed.rs differs");
// Outputs on their way through shared memory, and gaps so that neighbours meet other banks: all products of a token in f16; eight
// tokens of a warp's outputs in f32.
constexpr u32 BLOCK_PRODUCTS = BLOCK_M_TILES * M_TILE / 2, PRODUCTS_LINE = BLOCK_PRODUCTS * 2 + 16;
constexpr u32 WARP_OUTPUTS = 2 * M_TILE, OCTET = 8, FLOATS_LINE = WARP_OUTPUTS + 4;
static_assert((EPILOGUE == geglu_pair ? MAX_TOKENS * PRODUCTS_LINE : CONSUMER_WARPS * OCTET * FLOATS_LINE * 4) == STAGED_BYTES,
              "src/kernel/linear/gemm_packed.rs differs");

struct Shared {
  u8 *x, *w, *staged;
  u64 *full, *empty;
};

// Slot of the ring, and the phase of its barriers.
struct Ring {
  u32 slot = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
};

struct Item {
  u32 expert;
  u32 first;  // row, or index in `sorted`
  u32 count;
  u32 m_tile;  // the first of the block
};

// Calls `each(item)` for those of the block, in order.
template <typename Each>
__device__ __forceinline__ void for_items(const Params& p, Each each) {
  const u32 rows = *p.rows.count, tiles = ROWS == grouped ? *p.tile_count : (rows + MAX_TOKENS - 1) / MAX_TOKENS;
  const u32 blocks = (p.m_tiles + BLOCK_M_TILES - 1) / BLOCK_M_TILES;
#pragma unroll 1
  for (u32 i = blockIdx.x; i < tiles * blocks; i += gridDim.x) {
    // Blocks that run together share what there is more of: rows of one expert, or weights.
    if (ROWS == grouped) {
      const Tile tile = p.tiles[i / blocks];
      each(Item{tile.expert, tile.first, tile.count, i % blocks * BLOCK_M_TILES});
    } else {
      const u32 first = i % tiles * MAX_TOKENS;
      each(Item{0, first, min(MAX_TOKENS, rows - first), i / tiles * BLOCK_M_TILES});
    }
  }
}

__device__ __forceinline__ void produce(const Params& p, const Shared& shared) {
  constexpr u32 CHUNKS = LINE / 16, LINES = PRODUCERS / CHUNKS, PASSES = (MAX_TOKENS + LINES - 1) / LINES,
                OWN_M_TILES = BLOCK_M_TILES / PRODUCER_WARPS;
  const u32 thread = threadIdx.x - CONSUMERS, lane = thread % WARP, warp = thread / WARP, chunk = thread % CHUNKS, line = thread / CHUNKS;
  const u32 stages = p.columns / STAGE_INPUTS;
  const u64 m_tile_bytes = Weights::m_tile_bytes(p.columns);
  const u32 x_to = line * LINE + ((chunk ^ line % 8) << 4);
  Ring ring;
  for_items(p, [&](const Item& item) {
    u32 from[PASSES];  // in chunks
#pragma unroll
    for (u32 i = 0; i < PASSES; i++) {
      // Tokens that are not there read another's row; what comes of it is not written.
      const u32 at = item.first + min(line + i * LINES, item.count - 1);
      const u32 row = ROWS == grouped ? p.sorted[at] / p.x_share : at;
      from[i] = row * (p.columns / 8) + chunk;
    }
    // Passes of this thread: the last may be behind the end of the slot.
    const u32 passes = min((item.count + LINES - 1) / LINES, (MAX_TOKENS - line + LINES - 1) / LINES);
    const u32 own = item.m_tile + warp * OWN_M_TILES, here = own < p.m_tiles ? min(OWN_M_TILES, p.m_tiles - own) : 0;
    const u8* m_tiles = p.w + (u64(item.expert) * p.m_tiles + own) * m_tile_bytes;
#pragma unroll 1
    for (u32 stage = 0; stage < stages; stage++) {
      barrier_wait(shared.empty + ring.slot, ring.phase ^ 1);
      u8* w = shared.w + ring.slot * W_STAGE + warp * OWN_M_TILES * Weights::M_TILE_BYTES;
#pragma unroll
      for (u32 i = 0; i < OWN_M_TILES; i++)
        if (i < here) Weights::copy(w + i * Weights::M_TILE_BYTES, m_tiles + i * m_tile_bytes, stage, lane, 0, 0);
      u8* x = shared.x + ring.slot * X_STAGE + x_to;
#pragma unroll
      for (u32 i = 0; i < PASSES; i++)
        if (i < passes) cp_async_16(x + i * LINES * LINE, p.x + u64(from[i]) * 16), from[i] += CHUNKS;
      barrier_arrive_copied(shared.full + ring.slot);
      ring.advance();
    }
  });
}

// Calls `f(row of the M-tile, token, sum)` for the lane's sums.
template <int SUMS, typename F>
__device__ __forceinline__ void each_sum(u32 lane, F f) {
  u32 token = 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    asm volatile("" : "+r"(token));  // or the addresses of all sums would be computed first, into dozens of registers
#pragma unroll
    for (int j = 0; j < 4; j++) f(lane / 4 + j / 2 * 8, token + j % 2, i + j);
    token += 8;
  }
}

// Rows of out that a warp's tokens have, a lane every 32nd from its own number on: asked for before they are needed, for memory takes long
// to answer.
struct OutRows {
  static constexpr u32 EACH = (MAX_TOKENS + WARP - 1) / WARP;
  u32 rows[EACH];

  __device__ __forceinline__ OutRows(const Params& p, const Item& item, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
      const u32 at = item.first + min(lane + i * WARP, item.count - 1);
      rows[i] = ROWS == grouped ? p.sorted[at] : at;
    }
  }
};

// Eight tokens at a time, of which a warp then writes whole lines.
template <int SUMS>
__device__ __forceinline__ void write_floats(const Params& p, const Item& item, const float (&sum)[2][SUMS], const Shared& shared,
                                             const OutRows& rows, u32 warp, u32 lane) {
  float* staged = (float*)shared.staged + warp * OCTET * FLOATS_LINE;
  float* own = staged + 2 * (lane % 4) * FLOATS_LINE + lane / 4;
  const u32 column = (item.m_tile + 2 * warp) * M_TILE + lane % 8 * 4;
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    const u32 first = 2 * i;
    if (first >= item.count) break;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      own[j % 2 * FLOATS_LINE + j / 2 * 8] = p.scale * sum[0][i + j];
      own[j % 2 * FLOATS_LINE + j / 2 * 8 + M_TILE] = p.scale * sum[1][i + j];
    }
    __syncwarp();
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      const u32 octet = half * 4 + lane / 8, to = __shfl_sync(ALL_LANES, rows.rows[first / WARP], first % WARP + octet);
      if (first + octet >= item.count || column >= p.outputs) continue;
      const float4 out = *(const float4*)(staged + octet * FLOATS_LINE + lane % 8 * 4);
      const u64 at = u64(to) * p.out_stride + column;
      if (EPILOGUE == f16)
        *(uint2*)((u16*)p.out + at) = make_uint2(saturated_f16x2(out.x, out.y), saturated_f16x2(out.z, out.w));
      else
        *(float4*)((float*)p.out + at) = out;
    }
  }
}

template <int SUMS>
__device__ __forceinline__ void write_products(const Params& p, const Item& item, const float (&sum)[2][SUMS], const Shared& shared,
                                               const OutRows& rows, u32 warp, u32 lane) {
  sync_threads_of<1, CONSUMERS>();  // those of the item before have been read
  u8* own = shared.staged + warp / 2 * 64;
  each_sum<SUMS>(lane, [&](u32 row, u32 token, int i) {
    const float product = p.scale * fast_gelu(sum[0][i]) * sum[1][i];
    *(u16*)(own + token * PRODUCTS_LINE + permuted_at(warp % 2 * M_TILE + row)) = u16(saturated_f16x2(product, 0));
  });
  sync_threads_of<1, CONSUMERS>();
  // Sixteen lanes have a token, so that a warp has two: those 16 tokens apart are the next.
  constexpr u32 CHUNKS = BLOCK_PRODUCTS / 8, LINES = CONSUMERS / CHUNKS;
  const u32 chunk = threadIdx.x % CHUNKS, column = item.m_tile * M_TILE / 2 + 8 * chunk;
#pragma unroll
  for (u32 i = 0; i < MAX_TOKENS / LINES; i++) {
    const u32 token = threadIdx.x / CHUNKS + i * LINES;
    const u32 to = __shfl_sync(ALL_LANES, rows.rows[i * LINES / WARP], token % WARP);
    if (token < item.count && column < p.outputs / 2)
      *(uint4*)((u16*)p.out + u64(to) * p.out_stride + column) = *(const uint4*)(shared.staged + token * PRODUCTS_LINE + 16 * chunk);
  }
}

// Starts the products of a stage with so many tokens. The two M-tiles take turns, so that no product waits for the one before.
template <int TOKENS, int SUMS>
__device__ __forceinline__ void start_products(float (&sum)[2][SUMS], const u32 (&a)[2][2][2][4], SmemDescriptor b) {
  wgmma_fence();
#pragma unroll
  for (u32 product = 0; product < 4; product++) {
    wgmma_packed(*(float(*)[TOKENS / 2])sum[0], a[0][product / 2][product % 2], b.at(32 * product));
    wgmma_packed(*(float(*)[TOKENS / 2])sum[1], a[1][product / 2][product % 2], b.at(32 * product));
  }
  wgmma_commit();
}

// An item, by a warpgroup together with the other. One body for all widths: with a loop for each the compiler, which counts the registers of
// all of them, would serialize every product.
__device__ __forceinline__ void multiply(const Params& p, const Shared& shared, Ring& ring, const Item& item) {
  u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  // Or what follows from them would be computed before all items, into dozens of registers.
  asm volatile("" : "+r"(lane), "+r"(warp));
  const u32 stages = p.columns / STAGE_INPUTS;
  // A warpgroup behind the last M-tile only keeps the ring going. Warps behind it multiply whatever they find.
  const bool has_rows = item.m_tile + warp / GROUP_WARPS * GROUP_WARPS * 2 < p.m_tiles;
  float sum[2][MAX_TOKENS / 2];
#pragma unroll
  for (int i = 0; i < MAX_TOKENS / 2; i++) sum[0][i] = sum[1][i] = 0;
  u32 a[2][2][2][4];
  u32 last = 0;
#pragma unroll 1
  for (u32 stage = 0; stage < stages; stage++) {
    barrier_wait(shared.full + ring.slot, ring.phase);
    if (has_rows) {
      fence_proxy_async();  // what cp.async brought
      const u8* m_tiles = shared.w + ring.slot * W_STAGE + 2 * warp * Weights::M_TILE_BYTES;
      const SmemDescriptor b = smem_descriptor(shared.x + ring.slot * X_STAGE, 0, 8 * LINE);
      wgmma_wait<0>();  // registers of `a` have been read
      if (stage > 0 && lane == 0) barrier_arrive(shared.empty + last);
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
#pragma unroll
        for (u32 step = 0; step < 2; step++)
          wgmma_operands(a[half][step], m_tiles + half * Weights::M_TILE_BYTES, step, lane, Weights());
      }
      if (ROWS == dense)
        start_products<MAX_TOKENS>(sum, a, b);
      else if (item.count > 128)
        start_products<MAX_TOKENS>(sum, a, b);
      else if (item.count > 112)
        start_products<128>(sum, a, b);
      else if (item.count > 96)
        start_products<112>(sum, a, b);
      else if (item.count > 80)
        start_products<96>(sum, a, b);
      else if (item.count > 64)
        start_products<80>(sum, a, b);
      else if (item.count > 48)
        start_products<64>(sum, a, b);
      else if (item.count > 32)
        start_products<48>(sum, a, b);
      else if (item.count > 16)
        start_products<32>(sum, a, b);
      else
        start_products<16>(sum, a, b);
    } else if (stage > 0 && lane == 0) {
      barrier_arrive(shared.empty + last);
    }
    last = ring.slot;
    ring.advance();
  }
  wgmma_wait<0>();
  wgmma_results(sum[0]);
  wgmma_results(sum[1]);
  __syncwarp();
  if (lane == 0) barrier_arrive(shared.empty + last);
  const OutRows rows(p, item, lane);
  if (EPILOGUE == geglu_pair) {
    write_products(p, item, sum, shared, rows, warp, lane);
  } else if (has_rows) {
    write_floats(p, item, sum, shared, rows, warp, lane);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_packed_sm90(const Params p) {
  DYNAMIC_SHARED(unaligned);
  __shared__ u64 full[STAGES], empty[STAGES];
  Shared shared;
  shared.x = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  shared.w = shared.x + STAGES * X_STAGE;
  shared.staged = shared.w + STAGES * W_STAGE;
  shared.full = full, shared.empty = empty;
  if (threadIdx.x < STAGES) {
    barrier_init(full + threadIdx.x, PRODUCERS);
    barrier_init(empty + threadIdx.x, CONSUMER_WARPS);
  }
  fence_barriers();
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    give_registers<48>();
    produce(p, shared);
    return;
  }
  take_registers<208>();
  Ring ring;
  for_items(p, [&](const Item& item) {
    multiply(p, shared, ring, item);
  });
}
