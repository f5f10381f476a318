// Flash attention for large batches as in flash_prefill.cu, for heads of 512 with keys and values in f16, on Hopper: the two blocks of
// a cluster have neighbouring rows and share every chunk of keys and values, which the memory system brings to both (TMA multicast).
//
// Grid: (2 * tiles * KV heads), a cluster of two blocks per tile and KV head; a block has 64 rows, half of a tile. A producer warp
// starts copies, half of each chunk per block. Two consumer warpgroups share the rows: each has 64 of a tile's 128 keys and 256 of
// the head's columns; they exchange maxima and weights through shared memory. A tile is four chunks of keys (128 columns of each), then
// four of values (32 whole ones). Its values are multiplied after the next tile's keys, and that tile's weights are computed
// meanwhile. A row's result has the bits that flash_prefill_sm90.cu gives it.
//
// Alone, a block does 64 flops per byte from L2, which is what it waits for; two together do 128.
// Requirements are those of flash_prefill.cu; the tensor maps' boxes are 64 columns of one head's page.
#include "lib/attention.cuh"

constexpr u32 BLOCKS = 2, ROWS = 64, KEYS = 128, K_COLUMNS = 128, V_KEYS = PAGE_TOKENS;
constexpr u32 K_CHUNKS = HEAD_DIM / K_COLUMNS, V_CHUNKS = KEYS / V_KEYS, TILE_PAGES = KEYS / PAGE_TOKENS;
constexpr u32 CHUNK_BYTES = 32768, SLOTS = 4;
static_assert(HEAD_DIM == 512 && PAGE_TOKENS == 32, "chunks of 32 KiB");
static_assert(KV_TYPE == KV_F16 && KEY_TYPE == KV_F16, "copies are as they are");
static_assert(K_CHUNKS == SLOTS && V_CHUNKS == SLOTS, "slots are given back in this order");
constexpr u32 ATOM_COLUMNS = 64, LINE = 128;  // columns and bytes of a swizzle atom's row
constexpr u32 BOX_BYTES = PAGE_TOKENS * LINE;
constexpr u32 Q_BYTES = ROWS * HEAD_DIM * 2, P_BYTES = ROWS * KEYS * 2;
static_assert(Q_BYTES + SLOTS * CHUNK_BYTES + 2 * P_BYTES + 2 * ROWS * 4 + 1024 == SHARED_BYTES,
              "src/kernel/attention/flash_prefill.rs differs");
constexpr u32 GROUP_THREADS = 128, CONSUMERS = 2 * GROUP_THREADS, THREADS = CONSUMERS + GROUP_THREADS;
constexpr u32 CONSUMERS_REGISTERS = 232, PRODUCERS_REGISTERS = 40;
// Barriers of the consumers: weights of a tile, and maxima of its scores, are in shared memory.
constexpr u32 WEIGHTS_THERE = 1, MAXIMA_THERE = 2;

struct MulticastParams {
  TensorMap keys, values;
  Params attention;
};
static_assert(sizeof(MulticastParams) == PARAMS_BYTES, "src/kernel/attention/flash_prefill.rs differs");

// Offset of a vector of 8 columns of a row, in swizzle atoms of `rows` rows.
__device__ __forceinline__ u32 swizzled_at(u32 rows, u32 row, u32 vector) {
  return (vector / 8 * rows + row) * LINE + (vector % 8 ^ row % 8) * 16;
}

// A place in the ring of chunks, which goes on from tile to tile.
struct Place {
  u32 slot = 0, phase = 0;

  __device__ __forceinline__ void next() {
    slot = (slot + 1) % SLOTS;
    if (slot == 0) phase ^= 1;
  }
};

struct Ring {
  u8* slots;
  u64 *came, *freed;  // [SLOTS]
};

// The rows of a cluster, and what they see.
struct Work {
  Tokens tokens;
  u32 kv_head;
  u32 first_seen, last_seen;

  __device__ __forceinline__ Work(const Params& p, u32 number, u32 group) {
    kv_head = number % p.slot.kv_heads;
    tokens = find_tile(p.runs, number / p.slot.kv_heads, BLOCKS * (ROWS / group));
    if (tokens.count == 0) return;
    const u32 first = p.row_refs.position[p.rows.index[tokens.first]];
    first_seen = p.window && first + 1 > p.window ? first + 1 - p.window : 0;
    last_seen = last_seen_by(p, tokens);
  }
};

// Starts all copies of some rows: of each chunk this block's half, to both blocks.
__device__ __forceinline__ void bring(const MulticastParams& p, const Work& work, const Ring& ring, Place& to, u32 rank, u32 lane) {
  const Params& attention = p.attention;
  const u32 first_page = work.first_seen / PAGE_TOKENS, last_page = work.last_seen / PAGE_TOKENS;
  // A page of each tile per lane, as row of the tensor. Pages without a position that is seen are others that are.
  const auto rows_of = [&](u32 tile) {
    const u32 index = min(max(tile * TILE_PAGES + lane % TILE_PAGES, first_page), last_page);
    return (attention.slot.page(work.tokens.run, index) * attention.slot.kv_heads + work.kv_head) * PAGE_TOKENS;
  };
  const auto copy_chunk = [&](const TensorMap& from, u32 at, u32 column, u32 row) {
    barrier_wait(ring.freed + to.slot, to.phase ^ 1);  // the phase before the first is over
    if (lane == 0) barrier_expect(ring.came + to.slot, CHUNK_BYTES);
    __syncwarp();
    if (lane < CHUNK_BYTES / BLOCKS / BOX_BYTES)
      tensor_copy_multicast(ring.slots + to.slot * CHUNK_BYTES + at, from, column, row, ring.came + to.slot, (1 << BLOCKS) - 1);
    to.next();
  };
  const auto copy_keys = [&](u32 rows) {
    // A lane has one of two atoms of one of the block's two pages.
    const u32 page = rank * (TILE_PAGES / BLOCKS) + lane / 2 % 2, atom = lane % 2;
    const u32 row = __shfl_sync(ALL_LANES, rows, int(page));
#pragma unroll 1
    for (u32 chunk = 0; chunk < K_CHUNKS; chunk++)
      copy_chunk(p.keys, atom * KEYS * LINE + page * BOX_BYTES, chunk * K_COLUMNS + atom * ATOM_COLUMNS, row);
  };
  const auto copy_values = [&](u32 rows) {
    // A lane has one of the block's four atoms.
    const u32 atom = rank * (HEAD_DIM / ATOM_COLUMNS / BLOCKS) + lane % 4;
#pragma unroll 1
    for (u32 chunk = 0; chunk < V_CHUNKS; chunk++)
      copy_chunk(p.values, atom * V_KEYS * LINE, atom * ATOM_COLUMNS, __shfl_sync(ALL_LANES, rows, int(chunk)));
  };
  const u32 last_tile = work.last_seen / KEYS;
  u32 tile = work.first_seen / KEYS, rows = rows_of(tile);
  copy_keys(rows);
#pragma unroll 1
  for (; tile < last_tile; tile++) {
    const u32 next = rows_of(tile + 1);
    copy_keys(next);
    copy_values(rows);
    rows = next;
  }
  copy_values(rows);
}

// The consumers' part of some rows.
__device__ __forceinline__ void attend(const Params& p, const Work& work, u8* shared, const Ring& ring, Place& from, u32 rank, u32 group) {
  u8* const q_of = shared;
  u8* const p_of = ring.slots + SLOTS * CHUNK_BYTES;       // weights of this tile and the next
  float* const statistics = (float*)(p_of + 2 * P_BYTES);  // [2, ROWS]
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, quad = lane % 4;
  const u32 half = warp / 4, lane_row = warp % 4 * 16 + lane / 4;  // half of a tile's keys, and of columns

  // This block's tokens, of which there may be none.
  const u32 most = ROWS / group, skipped = min(rank * most, work.tokens.count);
  const u32 count = min(most, work.tokens.count - skipped), first_row = work.tokens.first + (count ? skipped : 0);
  const u32 first_position = p.row_refs.position[p.rows.index[first_row]], last_position = first_position + max(count, 1u) - 1;
  const u32 last_tile = work.last_seen / KEYS;
  u32 tile = work.first_seen / KEYS;  // whose values are next

  // Row `token * group + head` of the block is that head of that token.
  const u32 rows = count * group;
  const auto row_start = [&](u32 row) {
    const u32 token = row / group;
    return (u64(first_row + token) * p.heads + work.kv_head * group + row - token * group) * HEAD_DIM;
  };
  sync_threads_of<WEIGHTS_THERE, CONSUMERS>();  // queries of the rows before have been used
#pragma unroll 4
  for (u32 i = threadIdx.x; i < ROWS * (HEAD_DIM / 8); i += CONSUMERS) {
    const u32 row = i / (HEAD_DIM / 8), vector = i % (HEAD_DIM / 8);
    const bool there = row < rows;
    cp_async_16(q_of + swizzled_at(ROWS, row, vector), p.q + row_start(there ? row : 0) + vector * 8, there);
  }
  cp_async_commit();

  u32 position[2], last[2];  // of each row: its own, and the last it sees
  float base[2], total[2];
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const u32 token = min((lane_row + h * 8) / group, max(count, 1u) - 1);
    position[h] = first_position + token;
    last[h] = p.row_refs.last_seen(p.rows.index[first_row + token], p.window);
    base[h] = -INF;
    total[h] = 0;
  }
  float out[128];
#pragma unroll
  for (u32 i = 0; i < 128; i++) out[i] = 0;
  cp_async_wait<0>();
  fence_proxy_async();
  sync_threads_of<WEIGHTS_THERE, CONSUMERS>();

  u32 given_back = from.slot;
  const auto next_chunk = [&] {
    barrier_wait(ring.came + from.slot, from.phase);
    u8* const chunk = ring.slots + from.slot * CHUNK_BYTES;
    from.next();
    return chunk;
  };
  // Gives the oldest slot back to the producers of both blocks: its products are over.
  const auto give_back = [&] {
    if (threadIdx.x % GROUP_THREADS == 0) {
#pragma unroll
      for (u32 block = 0; block < BLOCKS; block++) cluster_barrier_arrive(cluster_address(ring.freed + given_back, block));
    }
    given_back = (given_back + 1) % SLOTS;
  };

  float score[32], shrink[2];
  const auto multiply_keys = [&](u32 chunk) {
    const SmemDescriptor keys = smem_descriptor(next_chunk() + half * 64 * LINE, 16, 1024);
    const SmemDescriptor queries = smem_descriptor(q_of, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < K_COLUMNS; k += 16) {
      const u32 column = chunk * K_COLUMNS + k;
      wgmma_m64n64k16(score, queries.at(column / ATOM_COLUMNS * ROWS * LINE + column % ATOM_COLUMNS * 2),
                      keys.at(k / ATOM_COLUMNS * KEYS * LINE + k % ATOM_COLUMNS * 2), column > 0);
    }
    wgmma_commit();
  };
  // The scores of a tile; all but the last chunk are given back.
  const auto multiply_all_keys = [&] {
#pragma unroll
    for (u32 chunk = 0; chunk < K_CHUNKS; chunk++) {
      multiply_keys(chunk);
      if (chunk == 0) continue;
      wgmma_wait<1>();
      give_back();
    }
  };
  const auto multiply_values = [&](u32 chunk, const u8* at) {
    const SmemDescriptor values = smem_descriptor(at + half * (256 / ATOM_COLUMNS) * V_KEYS * LINE, V_KEYS * LINE, 1024);
    const SmemDescriptor weights = smem_descriptor(p_of + tile % 2 * P_BYTES, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < V_KEYS; k += 16) {
      const u32 key = chunk * V_KEYS + k;
      wgmma_m64n256k16(out, weights.at(key / ATOM_COLUMNS * ROWS * LINE + key % ATOM_COLUMNS * 2), values.at(k * LINE));
    }
    wgmma_commit();
  };

  // Online softmax. First what the weights of a tile are relative to: `shrink` is what results so far are to be multiplied by. True if
  // some of it is not 1.
  const auto raise = [&](u32 of) {
    // Only tiles at an edge have keys that some row does not see.
    const u32 tile_first = of * KEYS;
    if (tile_first + KEYS - 1 > first_position || (p.window && tile_first + p.window <= last_position)) {
#pragma unroll
      for (u32 i = 0; i < 32; i++) {
        const u32 key = tile_first + half * 64 + i / 4 * 8 + quad * 2 + i % 2, row = position[i / 2 % 2];
        if (key > last[i / 2 % 2] || (p.window && key + p.window <= row)) score[i] = -INF;
      }
    }
    float max[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      max[h] = -INF;
#pragma unroll
      for (u32 j = 0; j < 8; j++) max[h] = fmaxf(max[h], fmaxf(score[j * 4 + 2 * h], score[j * 4 + 2 * h + 1]));
      max[h] = fmaxf(max[h], __shfl_xor_sync(ALL_LANES, max[h], 1));
      max[h] = fmaxf(max[h], __shfl_xor_sync(ALL_LANES, max[h], 2));
      if (quad == 0) statistics[half * ROWS + lane_row + h * 8] = max[h];
    }
    sync_threads_of<MAXIMA_THERE, CONSUMERS>();
    bool raised = false;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      max[h] = fmaxf(max[h], statistics[(1 - half) * ROWS + lane_row + h * 8]) * LOG2_E;
      const bool higher = max[h] > base[h] + SLACK;
      shrink[h] = higher ? exp2_near(base[h] - max[h]) : 1;
      base[h] = higher ? max[h] : base[h];
      raised |= higher;
    }
    return __any_sync(ALL_LANES, raised) != 0;
  };
  // Then a row's weights.
  const auto weigh = [&](u32 h, u32 of) {
    // A row that has seen nothing yet: all its weights become exp2(-inf).
    const float from = base[h] == -INF ? 0 : base[h];
    float sum = 0;
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      const float a = exp2_near(score[j * 4 + 2 * h] * LOG2_E - from);
      const float b = exp2_near(score[j * 4 + 2 * h + 1] * LOG2_E - from);
      sum += a + b;
      *(u32*)(p_of + of % 2 * P_BYTES + swizzled_at(ROWS, lane_row + h * 8, half * 8 + j) + quad * 4) = pack_f16x2(a, b);
    }
    total[h] = total[h] * shrink[h] + sum;
  };

  multiply_all_keys();
  wgmma_wait<0>();
  give_back();
  wgmma_results(score);
  raise(tile);
  weigh(0, tile);
  weigh(1, tile);
  fence_proxy_async();
#pragma unroll 1
  for (; tile < last_tile; tile++) {
    multiply_all_keys();
    sync_threads_of<WEIGHTS_THERE, CONSUMERS>();
    multiply_values(0, next_chunk());
    wgmma_wait<1>();
    give_back();
    wgmma_results(score);
    multiply_values(1, next_chunk());
    multiply_values(2, next_chunk());
    const bool raised = raise(tile + 1);
    multiply_values(3, next_chunk());
    wgmma_wait<3>();
    give_back();
    weigh(0, tile + 1);
    wgmma_wait<2>();
    give_back();
    weigh(1, tile + 1);
    fence_proxy_async();
    wgmma_wait<1>();
    give_back();
    wgmma_wait<0>();
    give_back();
    wgmma_results(out);
    if (raised) {
#pragma unroll
      for (u32 i = 0; i < 128; i++) out[i] *= shrink[i / 2 % 2];
    }
  }
  sync_threads_of<WEIGHTS_THERE, CONSUMERS>();
#pragma unroll
  for (u32 chunk = 0; chunk < V_CHUNKS; chunk++) {
    u8* const at = next_chunk();
    // What lies behind the last position must not meet a weight of zero if it is not a number.
    const u32 first = tile * KEYS + chunk * V_KEYS, seen = work.last_seen + 1 - min(first, work.last_seen + 1);
    if (seen < V_KEYS) {
      for (u32 i = threadIdx.x; i < (V_KEYS - seen) * (HEAD_DIM / 8); i += CONSUMERS) {
        const u32 row = seen + i / (HEAD_DIM / 8), vector = i % (HEAD_DIM / 8);
        *(uint4*)(at + swizzled_at(V_KEYS, row, vector)) = make_uint4(0, 0, 0, 0);
      }
      fence_proxy_async();
      sync_threads_of<WEIGHTS_THERE, CONSUMERS>();
    }
    multiply_values(chunk, at);
    wgmma_wait<0>();
    give_back();
  }
  wgmma_results(out);

#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    total[h] += __shfl_xor_sync(ALL_LANES, total[h], 1);
    total[h] += __shfl_xor_sync(ALL_LANES, total[h], 2);
    if (quad == 0) statistics[half * ROWS + lane_row + h * 8] = total[h];
  }
  sync_threads_of<MAXIMA_THERE, CONSUMERS>();
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const u32 row = lane_row + h * 8;
    const float inverse = 1 / (statistics[row] + statistics[ROWS + row]);
    float values[32][2];
#pragma unroll
    for (u32 j = 0; j < 32; j++) {
      values[j][0] = out[j * 4 + 2 * h] * inverse;
      values[j][1] = out[j * 4 + 2 * h + 1] * inverse;
    }
    write_row(p, row < rows, row_start(row), half * 256, values);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_prefill_multicast(const __grid_constant__ MulticastParams p) {
  DYNAMIC_SHARED(unaligned);
  __shared__ u64 came[SLOTS], freed[SLOTS];
  u8* const shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;  // swizzle atoms want it
  const Ring ring = {shared + Q_BYTES, came, freed};
  if (threadIdx.x < SLOTS) {
    barrier_init(came + threadIdx.x);
    barrier_init(freed + threadIdx.x, BLOCKS * 2);
  }
  fence_barriers();
  __syncthreads();
  // Nobody copies to a block, or arrives at its barriers, that has not begun.
  cluster_arrive();
  cluster_wait();
  const u32 rank = cluster_rank(), group = p.attention.heads / p.attention.slot.kv_heads;
  const u32 clusters = gridDim.x / BLOCKS, of_group = threadIdx.x % GROUP_THREADS;
  Place place;
  if (threadIdx.x >= CONSUMERS) {
    give_registers<PRODUCERS_REGISTERS>();
    if (of_group < WARP) {
      for (u32 number = blockIdx.x / BLOCKS;; number += clusters) {
        const Work work(p.attention, number, group);
        if (work.tokens.count == 0) break;
        bring(p, work, ring, place, rank, of_group);
      }
    }
  } else {
    take_registers<CONSUMERS_REGISTERS>();
    for (u32 number = blockIdx.x / BLOCKS;; number += clusters) {
      const Work work(p.attention, number, group);
      if (work.tokens.count == 0) break;
      attend(p.attention, work, shared, ring, place, rank, group);
    }
  }
  // Nor to one that has ended.
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}
