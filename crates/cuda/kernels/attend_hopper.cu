// As attend_wide.cu, for heads of 256 and 512 on Hopper: products by warpgroups, straight from shared memory.
//
// Grid: (KV heads, tiles), tiles of 64 rows a row group. Entries: `attend_hopper` with two row groups a block for heads of 256, and
// `attend_hopper_few` with one, so that few rows reach more multiprocessors; both do the same to a row, bit by bit.
//
// A warpgroup has 64 rows, 64 of a tile's keys and 256 of the head's columns. For heads of 512 two share their rows: they exchange
// maxima and weights through shared memory. Keys and values come in chunks of 32 KiB through a ring of SLOTS: all columns of
// keys 64 rows long or half of 128, then as many whole values. While a chunk is worked on, the products of the one before may
// still run, and two more are on their way.
//
// Shared memory: SHARED_BYTES or FEW_BYTES. Matrices stand in panels of 64 columns, rows of 128 bytes, whose units of 16 are swizzled by the row.
#include "lib/attend.cuh"

// Two warpgroups a block: beside each other where a head needs both, else one below the other.
constexpr u32 COLUMN_GROUPS = HEAD_DIM / 256, MOST_ROW_GROUPS = 2 / COLUMN_GROUPS;
constexpr u32 KEYS = 64 * COLUMN_GROUPS, PAGES = KEYS / PAGE_TOKENS;
constexpr u32 K_COLUMNS = 256 / COLUMN_GROUPS, V_KEYS = 64 / COLUMN_GROUPS;
constexpr u32 K_CHUNKS = HEAD_DIM / K_COLUMNS, V_CHUNKS = KEYS / V_KEYS, CHUNKS = K_CHUNKS + V_CHUNKS;
constexpr u32 CHUNK_BYTES = 32768, SLOTS = 4, AHEAD = SLOTS - 2, TILES_AHEAD = (CHUNKS - 1 + AHEAD) / CHUNKS;
static_assert(KEYS * K_COLUMNS * 2 == CHUNK_BYTES && V_KEYS * HEAD_DIM * 2 == CHUNK_BYTES, "heads of 256 or 512");
constexpr u32 PANEL = 64, LINE = 128;  // columns and bytes of a panel's row
// Panels, maxima, and what it takes to start at a multiple of 1024.
constexpr u32 bytes(u32 row_groups) {
  return 64 * row_groups * (HEAD_DIM * 2 + KEYS * 2 + COLUMN_GROUPS * 4) + SLOTS * CHUNK_BYTES + 1024;
}
static_assert(bytes(1) == FEW_BYTES && bytes(MOST_ROW_GROUPS) == SHARED_BYTES, "src/kernel/attend_wide.rs differs");

// Where a unit of 8 columns of a row is, in panels of `rows` rows.
__device__ __forceinline__ u32 unit_at(u32 rows, u32 row, u32 unit) {
  return (unit / 8 * rows + row) * LINE + (unit % 8 ^ row % 8) * 16;
}

// Starts copying ROW_COUNT rows of a page, COLUMNS of each from `column`, to rows `to_row ..` of panels of PANEL_ROWS rows.
template <u32 THREADS, u32 ROW_COUNT, u32 COLUMNS, u32 PANEL_ROWS>
__device__ __forceinline__ void copy(const Seen& seen, u8* to, u32 to_row, const u16* from, u32 page, u32 place, u32 column) {
  constexpr u32 UNITS = COLUMNS / 8;
  const u32 rows = seen.rows_from(place * PAGE_TOKENS, page);
  from += seen.page_start(page) + column;
#pragma unroll
  for (u32 i = threadIdx.x; i < ROW_COUNT * UNITS; i += THREADS) {
    const u32 row = i / UNITS, unit = i % UNITS;
    copy_async(to + unit_at(PANEL_ROWS, to_row + row, unit), from + row * HEAD_DIM + unit * 8, row < rows);
  }
}

template <u32 THREADS>
__device__ __forceinline__ void copy_chunk(const Seen& seen, u8* to, u32 chunk, u32 tile, const u32 (&pages)[PAGES]) {
  if (chunk < K_CHUNKS) {
#pragma unroll
    for (u32 i = 0; i < PAGES; i++)
      copy<THREADS, PAGE_TOKENS, K_COLUMNS, KEYS>(seen, to, i * PAGE_TOKENS, seen.slot.keys, pages[i], tile * PAGES + i,
                                                  chunk * K_COLUMNS);
  } else {
#pragma unroll
    for (u32 row = 0; row < V_KEYS; row += PAGE_TOKENS) {
      const u32 i = ((chunk - K_CHUNKS) * V_KEYS + row) / PAGE_TOKENS;
      copy<THREADS, PAGE_TOKENS, HEAD_DIM, V_KEYS>(seen, to, row, seen.slot.values, pages[i], tile * PAGES + i, 0);
    }
  }
}

template <u32 ROW_GROUPS>
__device__ __forceinline__ void attend_tokens(const Params& p, u8* shared, const Tokens& tokens, u32 kv_head, u32 group) {
  constexpr u32 ROWS = 64 * ROW_GROUPS, THREADS = 128 * ROW_GROUPS * COLUMN_GROUPS;
  u8* const q_of = shared;
  u8* const slots = q_of + ROWS * HEAD_DIM * 2;
  u8* const p_of = slots + SLOTS * CHUNK_BYTES;
  float* const statistics = (float*)(p_of + ROWS * KEYS * 2);  // [COLUMN_GROUPS, ROWS]
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, quad = lane % 4;
  const u32 column_group = warp / 4 % COLUMN_GROUPS, group_row = warp / 4 / COLUMN_GROUPS * 64;
  const u32 lane_row = group_row + warp % 4 * 16 + lane / 4;

  const u32 first_position = p.places.position[p.rows.index[tokens.first]];
  const u32 last_position = first_position + tokens.count - 1;
  const u32 first_seen = p.window && first_position + 1 > p.window ? first_position + 1 - p.window : 0;
  const Seen seen = {p.slot, tokens.run, kv_head, first_seen, last_position};
  const u32 last_tile = last_position / KEYS;
  u32 tile = first_seen / KEYS;

  // Row `token * group + head` of the block is that head of that token.
  const u32 rows = tokens.count * group;
  const auto row_start = [&](u32 row) {
    const u32 token = row / group;
    return (u64(tokens.first + token) * p.heads + kv_head * group + row - token * group) * HEAD_DIM;
  };
#pragma unroll 4
  for (u32 i = threadIdx.x; i < ROWS * (HEAD_DIM / 8); i += THREADS) {
    const u32 row = i / (HEAD_DIM / 8), unit = i % (HEAD_DIM / 8);
    const bool there = row < rows;
    copy_async(q_of + unit_at(ROWS, row, unit), p.q + row_start(there ? row : 0) + unit * 8, there);
  }

  u32 pages[TILES_AHEAD + 1][PAGES];
#pragma unroll
  for (u32 i = 0; i <= TILES_AHEAD; i++)
#pragma unroll
    for (u32 j = 0; j < PAGES; j++) pages[i][j] = seen.page((tile + i) * PAGES + j);
  u32 slot = 0;  // of the chunk worked on
  const auto start_copies = [&](u32 chunk, u32 to) {
    if (tile + chunk / CHUNKS <= last_tile)
      copy_chunk<THREADS>(seen, slots + to % SLOTS * CHUNK_BYTES, chunk % CHUNKS, tile + chunk / CHUNKS, pages[chunk / CHUNKS]);
    close_copies();
  };
#pragma unroll
  for (u32 chunk = 0; chunk < AHEAD; chunk++) start_copies(chunk, chunk);
  // Chunk `chunk` of the tile, when it is there. Products of the chunk before the last have been waited for by everyone, so its
  // slot is the next to be filled.
  const auto next_chunk = [&](u32 chunk) {
    wait_for_copies<AHEAD - 1>();
    show_to_products();
    __syncthreads();
    start_copies(chunk + AHEAD, slot + AHEAD);
    const u8* const at = slots + slot * CHUNK_BYTES;
    slot = (slot + 1) % SLOTS;
    return at;
  };

  u32 position[2];
  float base[2], total[2];
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    position[h] = min(first_position + (lane_row + h * 8) / group, last_position);
    base[h] = -INF;
    total[h] = 0;
  }
  float out[128];
#pragma unroll
  for (u32 i = 0; i < 128; i++) out[i] = 0;
  // Rows in steps of 8 lines are 1024 bytes apart; for values, panels of columns stand V_KEYS lines apart.
  const SharedMatrix queries = shared_matrix(q_of + group_row * LINE, 16, 1024);
  const SharedMatrix weights = shared_matrix(p_of + group_row * LINE, 16, 1024);

  for (; tile <= last_tile; tile++) {
    float score[32];
#pragma unroll
    for (u32 chunk = 0; chunk < K_CHUNKS; chunk++) {
      const SharedMatrix keys = shared_matrix(next_chunk(chunk) + column_group * 64 * LINE, 16, 1024);
      open_products();
#pragma unroll
      for (u32 k = 0; k < K_COLUMNS; k += 16) {
        const u32 column = chunk * K_COLUMNS + k;
        multiply_64x64(score, queries.at(column / PANEL * ROWS * LINE + column % PANEL * 2),
                       keys.at(k / PANEL * KEYS * LINE + k % PANEL * 2), column > 0);
      }
      close_products();
      if (chunk + 1 < K_CHUNKS) wait_for_products<1>();
    }
    wait_for_products<0>();
    settle(score);
    settle(out);

    // Only tiles at an edge have keys that some row does not see.
    const u32 tile_first = tile * KEYS;
    if (tile_first + KEYS - 1 > first_position || (p.window && tile_first + p.window <= last_position)) {
#pragma unroll
      for (u32 i = 0; i < 32; i++) {
        const u32 key = tile_first + column_group * 64 + i / 4 * 8 + quad * 2 + i % 2, row = position[i / 2 % 2];
        if (key > row || (p.window && key + p.window <= row)) score[i] = -INF;
      }
    }

    float most[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      most[h] = -INF;
#pragma unroll
      for (u32 j = 0; j < 8; j++) most[h] = fmaxf(most[h], fmaxf(score[j * 4 + 2 * h], score[j * 4 + 2 * h + 1]));
      most[h] = fmaxf(most[h], __shfl_xor_sync(ALL_LANES, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(ALL_LANES, most[h], 2));
      if (COLUMN_GROUPS > 1 && quad == 0) statistics[column_group * ROWS + lane_row + h * 8] = most[h];
    }
    if (COLUMN_GROUPS > 1) {
      __syncthreads();
#pragma unroll
      for (u32 h = 0; h < 2; h++)
        most[h] = fmaxf(most[h], statistics[(COLUMN_GROUPS - 1 - column_group) * ROWS + lane_row + h * 8]);
    }
    bool raised = false;
    float shrink[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      most[h] *= LOG2_E;
      const bool raise = most[h] > base[h] + SLACK;
      shrink[h] = raise ? exp2_near(base[h] - most[h]) : 1;
      base[h] = raise ? most[h] : base[h];
      raised |= raise;
      // A row that has seen nothing yet: all its weights become exp2(-inf).
      const float from = base[h] == -INF ? 0 : base[h];
      float sum = 0;
#pragma unroll
      for (u32 j = 0; j < 8; j++) {
        const float a = exp2_near(score[j * 4 + 2 * h] * LOG2_E - from), b = exp2_near(score[j * 4 + 2 * h + 1] * LOG2_E - from);
        sum += a + b;
        *(u32*)(p_of + unit_at(ROWS, lane_row + h * 8, column_group * 8 + j) + quad * 4) = pack_halves(a, b);
      }
      total[h] = total[h] * shrink[h] + sum;
    }
    if (__any_sync(ALL_LANES, raised)) {
#pragma unroll
      for (u32 i = 0; i < 128; i++) out[i] *= shrink[i / 2 % 2];
    }

#pragma unroll
    for (u32 chunk = 0; chunk < V_CHUNKS; chunk++) {
      const u8* const at = next_chunk(K_CHUNKS + chunk) + column_group * (256 / PANEL) * V_KEYS * LINE;
      const SharedMatrix values = shared_matrix(at, V_KEYS * LINE, 1024);
      open_products();
#pragma unroll
      for (u32 k = 0; k < V_KEYS; k += 16) {
        const u32 key = chunk * V_KEYS + k;
        multiply_64x256(out, weights.at(key / PANEL * ROWS * LINE + key % PANEL * 2), values.at(k * LINE));
      }
      close_products();
      // With several chunks a tile the compiler would see results used too early if the last went on into the next tile.
      if (V_CHUNKS == 1 || chunk + 1 < V_CHUNKS)
        wait_for_products<1>();
      else
        wait_for_products<0>();
    }

#pragma unroll
    for (u32 i = 0; i < TILES_AHEAD; i++)
#pragma unroll
      for (u32 j = 0; j < PAGES; j++) pages[i][j] = pages[i + 1][j];
#pragma unroll
    for (u32 j = 0; j < PAGES; j++) pages[TILES_AHEAD][j] = seen.page((tile + 1 + TILES_AHEAD) * PAGES + j);
  }
  wait_for_products<0>();
  settle(out);

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
  u8* const aligned = (u8*)((u64(shared) + 1023) / 1024 * 1024);  // swizzled panels want it
  const u32 group = p.heads / p.slot.kv_heads;
  for (u32 nth = blockIdx.y;; nth += gridDim.y) {
    const Tokens tokens = find_tile(p.runs, nth, 64 * ROW_GROUPS / group);
    if (tokens.count == 0) return;
    attend_tokens<ROW_GROUPS>(p, aligned, tokens, blockIdx.x, group);
    __syncthreads();  // the next tile's Q and keys go where this one's were
  }
}

extern "C" __global__ void __launch_bounds__(256, 1) attend_hopper(const Params p) {
  DYNAMIC_SHARED(shared);
  attend_tiles<MOST_ROW_GROUPS>(p, shared);
}

extern "C" __global__ void __launch_bounds__(128 * COLUMN_GROUPS, 1) attend_hopper_few(const Params p) {
  DYNAMIC_SHARED(shared);
  attend_tiles<1>(p, shared);
}
