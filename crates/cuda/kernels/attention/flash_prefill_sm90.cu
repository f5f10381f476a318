// Flash attention for large batches as in flash_prefill.cu, for heads of 256 and 512 on Hopper: wgmma, straight from shared memory.
//
// Grid: (KV heads, tiles), tiles of 64 rows per row group. Entries: `flash_prefill_sm90` with two row groups per block for heads
// of 256, and `flash_prefill_sm90_few` with one, so that few rows reach more multiprocessors; both do the same to a row, bit
// by bit.
//
// A warpgroup has 64 rows, 64 of a tile's keys and 256 of the head's columns. For heads of 512 two share their rows:
// they exchange maxima and weights through shared memory. Keys and values come in chunks of 32 KiB through a cp.async
// pipeline of SLOTS stages: 256 columns of 64 keys or 128 columns of 128, then as many whole values. A tile's values are
// multiplied after the next tile's keys, so softmax weights are computed while the tensor cores work on values. Two chunks are
// in flight while one is worked on. In Q8_0 a chunk comes through registers instead, where it becomes f16, while the tensor cores
// work.
//
// Work, bytes and requirements are those of flash_prefill.cu; 64 rows per block (heads of 512) do 64 flops per byte from L2.
// Shared memory: SHARED_BYTES or FEW_BYTES. Matrices lie in swizzle atoms of 64 columns: lines of 128 bytes, whose 16-byte
// vectors are swizzled by the line, as wgmma wants them.
#include "lib/attention.cuh"

static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/flash_prefill.rs differs");

// Two warpgroups per block: side by side where a head needs both, else one below the other.
constexpr u32 COLUMN_GROUPS = HEAD_DIM / 256, MAX_ROW_GROUPS = 2 / COLUMN_GROUPS;
constexpr u32 KEYS = 64 * COLUMN_GROUPS;
constexpr u32 K_COLUMNS = 256 / COLUMN_GROUPS, V_KEYS = 64 / COLUMN_GROUPS;
constexpr u32 K_CHUNKS = HEAD_DIM / K_COLUMNS, V_CHUNKS = KEYS / V_KEYS, CHUNKS = K_CHUNKS + V_CHUNKS;
constexpr u32 CHUNK_BYTES = 32768, SLOTS = 4, AHEAD = SLOTS - 2;
static_assert(KEYS * K_COLUMNS * 2 == CHUNK_BYTES && V_KEYS * HEAD_DIM * 2 == CHUNK_BYTES, "heads of 256 or 512");
constexpr u32 SWIZZLE_COLUMNS = 64, LINE = 128;  // columns and bytes of a swizzle atom's row
// Bytes of Q, weights and maxima per row group; the pipeline, and what it takes to start at a multiple of 1024.
constexpr u32 GROUP_BYTES = 64 * (HEAD_DIM * 2 + 2 * KEYS * 2 + COLUMN_GROUPS * 4);
constexpr u32 TILE_PAGES = KEYS / PAGE_TOKENS, PAGE_RING = 4 * TILE_PAGES;
constexpr u32 RING_BYTES = SLOTS * CHUNK_BYTES + 1024 + 64;
static_assert(PAGE_RING * 4 <= 64, "pages of four tiles");
static_assert(GROUP_BYTES + RING_BYTES == FEW_BYTES, "src/kernel/attention/flash_prefill.rs differs");
static_assert(MAX_ROW_GROUPS * GROUP_BYTES + RING_BYTES == SHARED_BYTES, "src/kernel/attention/flash_prefill.rs differs");

// Offset of a vector of 8 columns of a row, in swizzle atoms of `rows` rows.
__device__ __forceinline__ u32 swizzled_at(u32 rows, u32 row, u32 vector) {
  return (vector / 8 * rows + row) * LINE + (vector % 8 ^ row % 8) * 16;
}

// Positions that a block reads, with the pages of some tiles at hand: looked up in global memory for each chunk of keys and values
// instead, by the warps that multiply, they cost 4 % of a prompt of 131,072 tokens.
struct Ahead : Seen {
  u32* ring;  // in shared memory, by entry of the table

  __device__ __forceinline__ u32 page(u32 index) const { return ring[index % PAGE_RING]; }
};

#if KV_TYPE == KV_Q8_0
// A thread's share of some pages of a chunk on its way through registers: as much as there are registers for.
constexpr u32 MAX_SHARE = 4, MAX_PAGES = 2;
struct Share {
  Q8Sixteen sixteens[MAX_SHARE];
};

// A chunk of COLUMNS columns of ROWS_OF_ALL keys or values, which THREADS threads take in PARTS parts of PAGES pages.
template <u32 THREADS, u32 ROWS_OF_ALL, u32 COLUMNS>
struct ChunkShape {
  static constexpr u32 VECTORS = COLUMNS / 16, PAGE_SHARE = PAGE_TOKENS * VECTORS / THREADS;
  static constexpr u32 ALL_PAGES = ROWS_OF_ALL / PAGE_TOKENS;
  static constexpr u32 PAGES = ALL_PAGES > 1 && PAGE_SHARE * MAX_PAGES <= MAX_SHARE ? MAX_PAGES : 1;
  static constexpr u32 PARTS = ALL_PAGES / PAGES, SHARE = PAGES * PAGE_SHARE;
  static_assert(PAGE_SHARE > 0 && SHARE <= MAX_SHARE, "registers for a page");

  // Loads part `part`; keys or values begin at the table's entry `index`.
  __device__ __forceinline__ static void load(Share& share, const Ahead& seen, u8* from, u32 part, u32 index, u32 column) {
#pragma unroll
    for (u32 i = 0; i < PAGES; i++) {
      const u32 entry = index + part * PAGES + i;
      const u32 page = seen.page(entry), rows = seen.rows_from(entry * PAGE_TOKENS, page);
      const Q8Page at = seen.q8_page(from, page);
#pragma unroll
      for (u32 n = 0; n < PAGE_SHARE; n++) {
        const u32 vector = threadIdx.x + n * THREADS, row = vector / VECTORS;
        share.sixteens[i * PAGE_SHARE + n].load(at, row, column + vector % VECTORS * 16, row < rows);
      }
    }
  }

  // Stores it as f16.
  __device__ __forceinline__ static void store(const Share& share, u8* to, u32 part) {
#pragma unroll
    for (u32 i = 0; i < SHARE; i++) {
      const u32 vector = threadIdx.x + i % PAGE_SHARE * THREADS;
      const u32 row = (part * PAGES + i / PAGE_SHARE) * PAGE_TOKENS + vector / VECTORS;
#pragma unroll
      for (u32 h = 0; h < 2; h++)
        *(uint4*)(to + swizzled_at(ROWS_OF_ALL, row, vector % VECTORS * 2 + h)) = share.sixteens[i].as_f16(h);
    }
  }
};

template <typename Shape>
__device__ __forceinline__ void copy_parts(const Ahead& seen, u8* to, u8* from, u32 index, u32 column) {
#pragma unroll 1
  for (u32 part = 0; part < Shape::PARTS; part++) {
    Share share;
    Shape::load(share, seen, from, part, index, column);
    Shape::store(share, to, part);
  }
}
#endif

#if KEY_TYPE == KV_F16
// Starts copying COLUMNS of the page of the table's entry `index`, from `column`, to rows `to_row ..` of swizzle atoms of
// ATOM_ROWS rows.
template <u32 THREADS, u32 COLUMNS, u32 ATOM_ROWS>
__device__ __forceinline__ void copy(const Ahead& seen, u8* to, u32 to_row, const u16* from, u32 index, u32 column) {
  constexpr u32 VECTORS = COLUMNS / 8;
  const u32 page = seen.page(index), rows = seen.rows_from(index * PAGE_TOKENS, page);
  from += seen.key_page_start(page) + column;
#pragma unroll
  for (u32 i = threadIdx.x; i < PAGE_TOKENS * VECTORS; i += THREADS) {
    const u32 row = i / VECTORS, vector = i % VECTORS;
    cp_async_16(to + swizzled_at(ATOM_ROWS, to_row + row, vector), from + row * HEAD_DIM + vector * 8, row < rows);
  }
}
#endif

template <u32 THREADS>
__device__ __forceinline__ void copy_chunk(const Ahead& seen, u8* to, u32 chunk, u32 tile) {
  const u32 key = tile * KEYS + (chunk < K_CHUNKS ? 0 : (chunk - K_CHUNKS) * V_KEYS);
  if (chunk < K_CHUNKS) {
#if KEY_TYPE == KV_Q8_0
    copy_parts<ChunkShape<THREADS, KEYS, K_COLUMNS>>(seen, to, seen.slot.keys, key / PAGE_TOKENS, chunk * K_COLUMNS);
#else
#pragma unroll 1
    for (u32 row = 0; row < KEYS; row += PAGE_TOKENS)
      copy<THREADS, K_COLUMNS, KEYS>(seen, to, row, seen.slot.keys, (key + row) / PAGE_TOKENS, chunk * K_COLUMNS);
#endif
  } else {
#if KV_TYPE == KV_Q8_0
    copy_parts<ChunkShape<THREADS, V_KEYS, HEAD_DIM>>(seen, to, seen.slot.values, key / PAGE_TOKENS, 0);
#else
#pragma unroll
    for (u32 row = 0; row < V_KEYS; row += PAGE_TOKENS)
      copy<THREADS, HEAD_DIM, V_KEYS>(seen, to, row, seen.slot.values, (key + row) / PAGE_TOKENS, 0);
#endif
  }
}

template <u32 ROW_GROUPS>
__device__ __forceinline__ void attend_tokens(const Params& p, u8* shared, const Tokens& tokens, u32 kv_head,
                                              u32 group) {
  constexpr u32 ROWS = 64 * ROW_GROUPS, THREADS = 128 * ROW_GROUPS * COLUMN_GROUPS, P_BYTES = ROWS * KEYS * 2;
  u8* const q_of = shared;
  u8* const slots = q_of + ROWS * HEAD_DIM * 2;
  u8* const p_of = slots + SLOTS * CHUNK_BYTES;                // weights of this tile and the next
  float* const statistics = (float*)(p_of + 2 * P_BYTES);  // [COLUMN_GROUPS, ROWS]
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, quad = lane % 4;
  const u32 column_group = warp / 4 % COLUMN_GROUPS, group_row = warp / 4 / COLUMN_GROUPS * 64;
  const u32 lane_row = group_row + warp % 4 * 16 + lane / 4;

  const u32 first_position = p.row_refs.position[p.rows.index[tokens.first]];
  const u32 last_position = first_position + tokens.count - 1;
  const u32 first_seen = p.window && first_position + 1 > p.window ? first_position + 1 - p.window : 0;
  const u32 last_seen = last_seen_by(p, tokens);
  const Ahead seen = {{p.slot, tokens.run, kv_head, first_seen, last_seen}, (u32*)(statistics + COLUMN_GROUPS * ROWS)};
  const u32 last_tile = last_seen / KEYS;
  u32 tile = first_seen / KEYS;  // whose weights are next
  // Chunks of up to two tiles behind this one are on their way.
  if (threadIdx.x < 3 * TILE_PAGES) {
    const u32 index = tile * TILE_PAGES + threadIdx.x;
    seen.ring[index % PAGE_RING] = seen.Seen::page(index);
  }

  // Row `token * group + head` of the block is that head of that token.
  const u32 rows = tokens.count * group;
  const auto row_start = [&](u32 row) {
    const u32 token = row / group;
    return (u64(tokens.first + token) * p.heads + kv_head * group + row - token * group) * HEAD_DIM;
  };
#pragma unroll 4
  for (u32 i = threadIdx.x; i < ROWS * (HEAD_DIM / 8); i += THREADS) {
    const u32 row = i / (HEAD_DIM / 8), vector = i % (HEAD_DIM / 8);
    const bool there = row < rows;
    cp_async_16(q_of + swizzled_at(ROWS, row, vector), p.q + row_start(there ? row : 0) + vector * 8, there);
  }

  // Chunks come in rounds: all of the next tile's keys, then all of this tile's values. The first tile's keys precede
  // them.
  u32 slot = 0;  // of the chunk worked on
  const auto start_copies = [&](u32 chunk, u32 to) {
    const u32 in_round = chunk % CHUNKS, after = chunk / CHUNKS + (in_round < K_CHUNKS ? 1 : 0);
    if (tile + after <= last_tile)
      copy_chunk<THREADS>(seen, slots + to % SLOTS * CHUNK_BYTES, in_round, tile + after);
    cp_async_commit();
  };
  const auto start_first_copies = [&](u32 chunk) {
    if (chunk >= K_CHUNKS) return start_copies(chunk - K_CHUNKS, chunk);
    copy_chunk<THREADS>(seen, slots + chunk * CHUNK_BYTES, chunk, tile);
    cp_async_commit();
  };
  // Waits until the next chunk is there. Products of the chunk before the last have been waited for by everyone, so its slot
  // is the next to be filled.
  const auto wait_for_chunk = [&] {
    cp_async_wait<AHEAD - 1>();
    fence_proxy_async();
    __syncthreads();
  };
  const auto chunk_at = [&] { return slots + slot * CHUNK_BYTES; };
  // Starts the copies after chunk `chunk`, now that its products are in flight, and waits for those before.
  const auto end_chunk = [&](u32 chunk) {
    wgmma_commit();
    start_copies(chunk + AHEAD, slot + AHEAD);
    slot = (slot + 1) % SLOTS;
    wgmma_wait<1>();
  };

  u32 position[2], last[2];  // of each row: its own, and the last it sees
  float base[2], total[2];
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const u32 token = min((lane_row + h * 8) / group, tokens.count - 1);
    position[h] = first_position + token;
    last[h] = p.row_refs.last_seen(p.rows.index[tokens.first + token], p.window);
    base[h] = -INF;
    total[h] = 0;
  }
  float out[128];
#pragma unroll
  for (u32 i = 0; i < 128; i++) out[i] = 0;

  // The scores of a tile, from one chunk of its keys.
  const auto multiply_keys = [&](float (&score)[32], u32 chunk, const u8* at) {
    const SmemDescriptor queries = smem_descriptor(q_of + group_row * LINE, 16, 1024);
    const SmemDescriptor keys = smem_descriptor(at + column_group * 64 * LINE, 16, 1024);
#pragma unroll
    for (u32 k = 0; k < K_COLUMNS; k += 16) {
      const u32 column = chunk * K_COLUMNS + k;
      wgmma_m64n64k16(score, queries.at(column / SWIZZLE_COLUMNS * ROWS * LINE + column % SWIZZLE_COLUMNS * 2),
                     keys.at(k / SWIZZLE_COLUMNS * KEYS * LINE + k % SWIZZLE_COLUMNS * 2), column > 0);
    }
  };

  // Online softmax: a tile's scores become weights; results so far are to be multiplied by `shrink`. True if some of it is not 1.
  const auto weigh = [&](float (&score)[32], float (&shrink)[2], u32 of) {
    // Only tiles at an edge have keys that some row does not see.
    const u32 tile_first = of * KEYS;
    if (tile_first + KEYS - 1 > first_position || (p.window && tile_first + p.window <= last_position)) {
#pragma unroll
      for (u32 i = 0; i < 32; i++) {
        const u32 key = tile_first + column_group * 64 + i / 4 * 8 + quad * 2 + i % 2, row = position[i / 2 % 2];
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
      if (COLUMN_GROUPS > 1 && quad == 0) statistics[column_group * ROWS + lane_row + h * 8] = max[h];
    }
    if (COLUMN_GROUPS > 1) {
      __syncthreads();
#pragma unroll
      for (u32 h = 0; h < 2; h++)
        max[h] = fmaxf(max[h], statistics[(COLUMN_GROUPS - 1 - column_group) * ROWS + lane_row + h * 8]);
    }
    bool raised = false;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      max[h] *= LOG2_E;
      const bool raise = max[h] > base[h] + SLACK;
      shrink[h] = raise ? exp2_near(base[h] - max[h]) : 1;
      base[h] = raise ? max[h] : base[h];
      raised |= raise;
      // A row that has seen nothing yet: all its weights become exp2(-inf).
      const float from = base[h] == -INF ? 0 : base[h];
      float sum = 0;
#pragma unroll
      for (u32 j = 0; j < 8; j++) {
        const float a = exp2_near(score[j * 4 + 2 * h] * LOG2_E - from);
        const float b = exp2_near(score[j * 4 + 2 * h + 1] * LOG2_E - from);
        sum += a + b;
        const u32 at = swizzled_at(ROWS, lane_row + h * 8, column_group * 8 + j) + quad * 4;
        *(u32*)(p_of + of % 2 * P_BYTES + at) = pack_f16x2(a, b);
      }
      total[h] = total[h] * shrink[h] + sum;
    }
    return __any_sync(ALL_LANES, raised);
  };

  const auto multiply_values = [&](u32 chunk) {
    const u8* const at = chunk_at() + column_group * (256 / SWIZZLE_COLUMNS) * V_KEYS * LINE;
    const SmemDescriptor values = smem_descriptor(at, V_KEYS * LINE, 1024);
    const SmemDescriptor weights = smem_descriptor(p_of + tile % 2 * P_BYTES + group_row * LINE, 16, 1024);
#pragma unroll
    for (u32 k = 0; k < V_KEYS; k += 16) {
      const u32 key = chunk * V_KEYS + k;
      wgmma_m64n256k16(out, weights.at(key / SWIZZLE_COLUMNS * ROWS * LINE + key % SWIZZLE_COLUMNS * 2), values.at(k * LINE));
    }
  };

  float score[32], shrink[2];
  __syncthreads();
#pragma unroll
  for (u32 chunk = 0; chunk < AHEAD; chunk++) start_first_copies(chunk);
#pragma unroll
  for (u32 chunk = 0; chunk < K_CHUNKS; chunk++) {
    wait_for_chunk();
    wgmma_fence();
    multiply_keys(score, chunk, slots + chunk * CHUNK_BYTES);
    wgmma_commit();
    start_first_copies(chunk + AHEAD);
    wgmma_wait<1>();
  }
  slot = K_CHUNKS % SLOTS;
  wgmma_wait<0>();
  wgmma_results(score);
  weigh(score, shrink, tile);
  // The next tile's scores, this tile's values; the next tile's weights while the values are multiplied.
  for (; tile < last_tile; tile++) {
    // Looked up now and put down behind the keys, when everybody is done with those of the tile before.
    const u32 coming = (tile + 3) * TILE_PAGES + threadIdx.x;
    const u32 page = threadIdx.x < TILE_PAGES ? seen.Seen::page(coming) : NO_PAGE;
#pragma unroll
    for (u32 chunk = 0; chunk < K_CHUNKS; chunk++) {
      wait_for_chunk();
      wgmma_fence();
      multiply_keys(score, chunk, chunk_at());
      end_chunk(chunk);
    }
    if (threadIdx.x < TILE_PAGES) seen.ring[coming % PAGE_RING] = page;
#pragma unroll
    for (u32 chunk = 0; chunk < V_CHUNKS; chunk++) {
      wait_for_chunk();
      wgmma_fence();
      multiply_values(chunk);
      end_chunk(K_CHUNKS + chunk);
    }
    wgmma_results(score);
    const bool raised = weigh(score, shrink, tile + 1);
    wgmma_wait<0>();
    wgmma_results(out);
    if (raised) {
#pragma unroll
      for (u32 i = 0; i < 128; i++) out[i] *= shrink[i / 2 % 2];
    }
  }
#pragma unroll
  for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
    wait_for_chunk();
    wgmma_fence();
    if (chunk >= K_CHUNKS) multiply_values(chunk - K_CHUNKS);
    end_chunk(chunk);
  }
  wgmma_wait<0>();
  wgmma_results(out);

#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    total[h] += __shfl_xor_sync(ALL_LANES, total[h], 1);
    total[h] += __shfl_xor_sync(ALL_LANES, total[h], 2);
    if (COLUMN_GROUPS > 1 && quad == 0) statistics[column_group * ROWS + lane_row + h * 8] = total[h];
  }
  if (COLUMN_GROUPS > 1) __syncthreads();
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const u32 row = lane_row + h * 8;
    const float inverse = 1 / (COLUMN_GROUPS > 1 ? statistics[row] + statistics[ROWS + row] : total[h]);
    float values[32][2];
#pragma unroll
    for (u32 j = 0; j < 32; j++) {
      values[j][0] = out[j * 4 + 2 * h] * inverse;
      values[j][1] = out[j * 4 + 2 * h + 1] * inverse;
    }
    write_row(p, row < rows, row_start(row), column_group * 256, values);
  }
}

template <u32 ROW_GROUPS>
__device__ __forceinline__ void attend_tiles(const Params& p, u8* shared) {
  u8* const aligned = (u8*)((u64(shared) + 1023) / 1024 * 1024);  // swizzle atoms want it
  const u32 group = p.heads / p.slot.kv_heads;
  for (u32 number = blockIdx.y;; number += gridDim.y) {
    const Tokens tokens = find_tile(p.runs, number, 64 * ROW_GROUPS / group);
    if (tokens.count == 0) return;
    attend_tokens<ROW_GROUPS>(p, aligned, tokens, blockIdx.x, group);
    __syncthreads();  // the next tile's Q and keys go where this one's were
  }
}

extern "C" __global__ void __launch_bounds__(256, 1) flash_prefill_sm90(const Params p) {
  DYNAMIC_SHARED(shared);
  attend_tiles<MAX_ROW_GROUPS>(p, shared);
}

extern "C" __global__ void __launch_bounds__(128 * COLUMN_GROUPS, 1) flash_prefill_sm90_few(const Params p) {
  DYNAMIC_SHARED(shared);
  attend_tiles<1>(p, shared);
}
