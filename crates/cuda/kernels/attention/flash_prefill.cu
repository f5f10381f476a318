// Flash attention for large batches (prefill), on the tensor cores of any card: out = softmax(q . K) . V over the positions a
// row sees: all up to its own, or the last `window` of them and those up to its end. Online softmax; scale is 1.
//
// Grid: (KV heads, tiles), blocks of WARPS warps. A tile is up to ROWS / group consecutive tokens of one run, `group`
// being the query heads of a KV head: all of them share the keys and values that pass through shared memory. Blocks
// take the tiles of all runs from the last to the first, so those that see most start first; a grid with fewer blocks
// than tiles goes round.
//
// Keys are walked in tiles of KEYS, cut at multiples of KEYS and in increasing order, and a tile in which a row sees
// nothing changes nothing of that row. So a row's result has the same bits whichever prompt chunk it came in.
//
// Warps stand in ROW_WARPS x COLUMN_WARPS. For the scores a warp has 16 * ROW_STEPS rows and its share of the tile's
// keys; for the output the same rows and its share of the head's columns. Warps of a row exchange maxima and weights
// through shared memory. Keys and values come in chunks through a cp.async pipeline of SLOTS stages: K_COLUMNS columns of all
// keys of a tile, then V_KEYS whole values. In Q8_0 a chunk comes through registers instead, where it becomes f16: it is loaded
// before the products of the chunk worked on and stored after them.
//
// Work: 4 * seen * head_dim flops per row and head. Bytes: q and out once, the seen keys and values once per tile of tokens
// (from L2). Shared memory: SHARED_BYTES, given by the launch. Requires: rows of a run have consecutive positions; keys
// and values of all rows are stored; group <= ROWS; head_dim % 16 == 0; for OUT == OUT_INT8 also head_dim % 32 == 0, or
// 16 with an even group.
#include "lib/attention.cuh"

static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/flash_prefill.rs differs");

constexpr u32 THREADS = WARPS * WARP;
constexpr u32 ROW_WARPS = ROWS / (16 * ROW_STEPS), COLUMN_WARPS = WARPS / ROW_WARPS;
constexpr u32 WARP_KEYS = KEYS / COLUMN_WARPS, KEY_STEPS = WARP_KEYS / 8;
constexpr u32 WARP_COLUMNS = (HEAD_DIM / 16 + COLUMN_WARPS - 1) / COLUMN_WARPS * 16, COLUMN_STEPS = WARP_COLUMNS / 8;
constexpr u32 K_CHUNKS = HEAD_DIM / K_COLUMNS, V_CHUNKS = KEYS / V_KEYS, CHUNKS = K_CHUNKS + V_CHUNKS;
// Chunks in flight while one is worked on, and how many tiles of keys they reach ahead.
constexpr u32 AHEAD = SLOTS - 1, TILES_AHEAD = (CHUNKS - 1 + AHEAD) / CHUNKS;
constexpr u32 PAGES = KEYS / PAGE_TOKENS;

// Rows in shared memory are 16 bytes longer than what they hold: eight rows of any matrix then start in different
// banks.
constexpr u32 Q_STRIDE = HEAD_DIM + 8, K_STRIDE = K_COLUMNS + 8, V_STRIDE = HEAD_DIM + 8, P_STRIDE = KEYS + 8;
constexpr u32 K_CHUNK = KEYS * K_STRIDE, V_CHUNK = V_KEYS * V_STRIDE, SLOT = K_CHUNK > V_CHUNK ? K_CHUNK : V_CHUNK;
constexpr u32 SLOTS_AT = ROWS * Q_STRIDE, P_AT = SLOTS_AT + SLOTS * SLOT, STATISTICS_AT = P_AT + ROWS * P_STRIDE;
static_assert((STATISTICS_AT + ROWS * COLUMN_WARPS * 2) * 2 == SHARED_BYTES, "src/kernel/attention/flash_prefill.rs differs");
static_assert(WARP_KEYS % 16 == 0 && KEYS % PAGE_TOKENS == 0 && V_KEYS % 16 == 0 && K_COLUMNS % 16 == 0,
              "whole fragments");
static_assert(K_CHUNKS * K_COLUMNS == HEAD_DIM && V_CHUNKS * V_KEYS == KEYS, "whole chunks");
static_assert((V_KEYS < PAGE_TOKENS ? PAGE_TOKENS % V_KEYS : V_KEYS % PAGE_TOKENS) == 0, "pages and chunks that fit");

constexpr u32 PAGE_ROWS = V_KEYS < PAGE_TOKENS ? V_KEYS : PAGE_TOKENS;  // of a page in a chunk of values
constexpr u32 V_PARTS = V_KEYS / PAGE_ROWS;

// A thread's share of a chunk in Q8_0: eights of values, page by page.
#if KV_TYPE == KV_Q8_0
__device__ __forceinline__ constexpr u32 share(u32 rows, u32 columns) { return (rows * (columns / 8) + THREADS - 1) / THREADS; }
constexpr u32 K_SHARE = share(PAGE_TOKENS, K_COLUMNS), V_SHARE = share(PAGE_ROWS, HEAD_DIM);
struct Chunk {
#if KEY_TYPE == KV_Q8_0
  Q8Eight keys[PAGES][K_SHARE];
#endif
  Q8Eight values[V_PARTS][V_SHARE];
};

// Loads a share of ROW_COUNT rows of a page, the table's entry `index`, from `row`; `COLUMNS` of each from `column`.
template <u32 ROW_COUNT, u32 COLUMNS, u32 SHARE>
__device__ __forceinline__ void load(Q8Eight (&eights)[SHARE], const Seen& seen, u8* from, u32 page, u32 index, u32 row,
                                     u32 column) {
  constexpr u32 VECTORS = COLUMNS / 8;
  const u32 rows = min(seen.rows_from(index * PAGE_TOKENS + row, page), ROW_COUNT);
  const Q8Page at = seen.q8_page(from, page);
#pragma unroll
  for (u32 n = 0; n < SHARE; n++) {
    const u32 i = threadIdx.x + n * THREADS, r = i / VECTORS;
    eights[n].load(at, row + r, column + i % VECTORS * 8, r < rows);
  }
}

template <u32 ROW_COUNT, u32 COLUMNS, u32 STRIDE, u32 SHARE>
__device__ __forceinline__ void store(const Q8Eight (&eights)[SHARE], u16* to) {
  constexpr u32 VECTORS = COLUMNS / 8;
#pragma unroll
  for (u32 n = 0; n < SHARE; n++) {
    const u32 i = threadIdx.x + n * THREADS, r = i / VECTORS;
    if (ROW_COUNT * VECTORS % THREADS == 0 || r < ROW_COUNT)
      *(uint4*)(to + r * STRIDE + i % VECTORS * 8) = eights[n].as_f16();
  }
}
#else
struct Chunk {};
#endif

#if KEY_TYPE == KV_F16
// Starts copying ROW_COUNT rows of a page, the table's entry `index`, from `row`; `COLUMNS` of each from `column`.
template <u32 ROW_COUNT, u32 COLUMNS, u32 STRIDE>
__device__ __forceinline__ void copy(const Seen& seen, u16* to, const u16* from, u32 page, u32 index, u32 row,
                                     u32 column) {
  constexpr u32 VECTORS = COLUMNS / 8;
  const u32 rows = seen.rows_from(index * PAGE_TOKENS + row, page);
  from += seen.key_page_start(page) + row * HEAD_DIM + column;
#pragma unroll
  for (u32 i = threadIdx.x; i < ROW_COUNT * VECTORS; i += THREADS) {
    const u32 r = i / VECTORS, vector = i % VECTORS;
    cp_async_16(to + r * STRIDE + vector * 8, from + r * HEAD_DIM + vector * 8, r < rows);
  }
}
#endif

// Starts copying chunk `chunk` of a tile to where it goes, or, of what is kept in Q8_0, loads it.
__device__ __forceinline__ void start_chunk(Chunk& on_its_way, u16* to, const Seen& seen, u32 chunk, u32 tile,
                                            const u32 (&pages)[PAGES]) {
  if (chunk < K_CHUNKS) {
#pragma unroll
    for (u32 i = 0; i < PAGES; i++)
#if KEY_TYPE == KV_Q8_0
      load<PAGE_TOKENS, K_COLUMNS>(on_its_way.keys[i], seen, seen.slot.keys, pages[i], tile * PAGES + i, 0, chunk * K_COLUMNS);
#else
      copy<PAGE_TOKENS, K_COLUMNS, K_STRIDE>(seen, to + i * PAGE_TOKENS * K_STRIDE, seen.slot.keys, pages[i],
                                             tile * PAGES + i, 0, chunk * K_COLUMNS);
#endif
  } else {
#pragma unroll
    for (u32 part = 0; part < V_PARTS; part++) {
      const u32 in_tile = (chunk - K_CHUNKS) * V_KEYS + part * PAGE_ROWS, i = in_tile / PAGE_TOKENS;
#if KV_TYPE == KV_Q8_0
      load<PAGE_ROWS, HEAD_DIM>(on_its_way.values[part], seen, seen.slot.values, pages[i], tile * PAGES + i, in_tile % PAGE_TOKENS, 0);
#else
      copy<PAGE_ROWS, HEAD_DIM, V_STRIDE>(seen, to + part * PAGE_ROWS * V_STRIDE, seen.slot.values, pages[i], tile * PAGES + i,
                                          in_tile % PAGE_TOKENS, 0);
#endif
    }
  }
}

// Stores what start_chunk has loaded.
__device__ __forceinline__ void end_chunk_of(const Chunk& on_its_way, u16* to, u32 chunk) {
#if KEY_TYPE == KV_Q8_0
  if (chunk < K_CHUNKS) {
#pragma unroll
    for (u32 i = 0; i < PAGES; i++)
      store<PAGE_TOKENS, K_COLUMNS, K_STRIDE>(on_its_way.keys[i], to + i * PAGE_TOKENS * K_STRIDE);
  }
#endif
#if KV_TYPE == KV_Q8_0
  if (chunk >= K_CHUNKS) {
#pragma unroll
    for (u32 part = 0; part < V_PARTS; part++)
      store<PAGE_ROWS, HEAD_DIM, V_STRIDE>(on_its_way.values[part], to + part * PAGE_ROWS * V_STRIDE);
  }
#endif
}

__device__ __forceinline__ void attend_tokens(const Params& p, u8* shared, const Tokens& tokens, u32 kv_head,
                                              u32 group) {
  u16* const q_of = (u16*)shared;
  u16* const slots = q_of + SLOTS_AT;
  u16* const p_of = q_of + P_AT;
  float* const statistics = (float*)(q_of + STATISTICS_AT);  // [COLUMN_WARPS, ROWS]
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, quad = lane % 4;
  const u32 column_warp = warp % COLUMN_WARPS;
  const u32 warp_row = warp / COLUMN_WARPS * 16 * ROW_STEPS, warp_key = column_warp * WARP_KEYS;
  const u32 warp_column = column_warp * WARP_COLUMNS;

  const u32 first_position = p.row_refs.position[p.rows.index[tokens.first]];
  const u32 last_position = first_position + tokens.count - 1;
  const u32 first_seen = p.window && first_position + 1 > p.window ? first_position + 1 - p.window : 0;
  const u32 last_seen = last_seen_by(p, tokens);
  const Seen seen = {p.slot, tokens.run, kv_head, first_seen, last_seen};
  const u32 last_tile = last_seen / KEYS;
  u32 tile = first_seen / KEYS;

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
    cp_async_16(q_of + row * Q_STRIDE + vector * 8, p.q + row_start(there ? row : 0) + vector * 8, there);
  }

  u32 pages[TILES_AHEAD + 1][PAGES];
#pragma unroll
  for (u32 i = 0; i <= TILES_AHEAD; i++)
#pragma unroll
    for (u32 j = 0; j < PAGES; j++) pages[i][j] = seen.page((tile + i) * PAGES + j);
  // The slot of the chunk worked on. The one before it is the next to be filled: everyone is done with it after the
  // barrier.
  u32 slot = 0;
  Chunk on_its_way;
  const auto start_copies = [&](u32 chunk, u32 to) {
    const u32 after = chunk / CHUNKS;
    if (tile + after <= last_tile)
      start_chunk(on_its_way, slots + to * SLOT, seen, chunk % CHUNKS, tile + after, pages[after]);
    cp_async_commit();
  };
  const auto end_copies = [&](u32 chunk, u32 to) {
    if (tile + chunk / CHUNKS <= last_tile) end_chunk_of(on_its_way, slots + to * SLOT, chunk % CHUNKS);
  };
#pragma unroll
  for (u32 chunk = 0; chunk < AHEAD; chunk++) {
    start_copies(chunk, chunk);
    end_copies(chunk, chunk);
  }
  // Chunk `chunk` of the tile, when it is there.
  const auto next_chunk = [&](u32 chunk) {
    cp_async_wait<AHEAD - 1>();
    __syncthreads();
    start_copies(chunk + AHEAD, slot == 0 ? SLOTS - 1 : slot - 1);
    u16* const at = slots + slot * SLOT;
    slot = slot == SLOTS - 1 ? 0 : slot + 1;
    return at;
  };
  // After the products of chunk `chunk`, when `slot` is the one behind it.
  const auto end_chunk = [&](u32 chunk) { end_copies(chunk + AHEAD, slot < 2 ? slot + SLOTS - 2 : slot - 2); };

  u32 position[ROW_STEPS][2], last[ROW_STEPS][2];  // of each row: its own, and the last it sees
  float base[ROW_STEPS][2], total[ROW_STEPS][2];
  float out[ROW_STEPS][COLUMN_STEPS][4];
#pragma unroll
  for (u32 m = 0; m < ROW_STEPS; m++) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 token = min((warp_row + m * 16 + h * 8 + lane / 4) / group, tokens.count - 1);
      position[m][h] = first_position + token;
      last[m][h] = p.row_refs.last_seen(p.rows.index[tokens.first + token], p.window);
      base[m][h] = -INF;
      total[m][h] = 0;
    }
#pragma unroll
    for (u32 j = 0; j < COLUMN_STEPS; j++)
#pragma unroll
      for (u32 i = 0; i < 4; i++) out[m][j][i] = 0;
  }
  // Start of this lane's row of matrices: A operands (Q and the weights), K, V.
  const u16* const q_row = q_of + (warp_row + lane % 16) * Q_STRIDE + lane / 16 * 8;
  const u16* const p_row = p_of + (warp_row + lane % 16) * P_STRIDE + lane / 16 * 8;
  const u32 k_row = (warp_key + lane / 16 * 8 + lane % 8) * K_STRIDE + lane / 8 % 2 * 8;
  const u32 v_row = lane % 16 * V_STRIDE + warp_column + lane / 16 * 8;

  for (; tile <= last_tile; tile++) {
    float score[ROW_STEPS][KEY_STEPS][4];
#pragma unroll
    for (u32 m = 0; m < ROW_STEPS; m++)
#pragma unroll
      for (u32 j = 0; j < KEY_STEPS; j++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) score[m][j][i] = 0;
#pragma unroll
    for (u32 chunk = 0; chunk < K_CHUNKS; chunk++) {
      const u16* const keys = next_chunk(chunk) + k_row;
#pragma unroll
      for (u32 k = 0; k < K_COLUMNS; k += 16) {
        u32 a[ROW_STEPS][4];
#pragma unroll
        for (u32 m = 0; m < ROW_STEPS; m++) ldmatrix_x4(a[m], q_row + m * 16 * Q_STRIDE + chunk * K_COLUMNS + k);
#pragma unroll
        for (u32 j = 0; j < KEY_STEPS; j += 2) {
          u32 both[4];
          ldmatrix_x4(both, keys + j * 8 * K_STRIDE + k);
          const u32 low[2] = {both[0], both[1]}, high[2] = {both[2], both[3]};
#pragma unroll
          for (u32 m = 0; m < ROW_STEPS; m++) {
            mma_f16(score[m][j], a[m], low);
            mma_f16(score[m][j + 1], a[m], high);
          }
        }
      }
      end_chunk(chunk);
    }

    // Only tiles at an edge have keys that some row does not see.
    const u32 tile_first = tile * KEYS;
    if (tile_first + KEYS - 1 > first_position || (p.window && tile_first + p.window <= last_position)) {
#pragma unroll
      for (u32 m = 0; m < ROW_STEPS; m++)
#pragma unroll
        for (u32 j = 0; j < KEY_STEPS; j++)
#pragma unroll
          for (u32 i = 0; i < 4; i++) {
            const u32 key = tile_first + warp_key + j * 8 + quad * 2 + i % 2, row = position[m][i / 2];
            if (key > last[m][i / 2] || (p.window && key + p.window <= row)) score[m][j][i] = -INF;
          }
    }

#pragma unroll
    for (u32 m = 0; m < ROW_STEPS; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float max = -INF;
#pragma unroll
        for (u32 j = 0; j < KEY_STEPS; j++) max = fmaxf(max, fmaxf(score[m][j][2 * h], score[m][j][2 * h + 1]));
        max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 1));
        max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 2));
        if (quad == 0) statistics[column_warp * ROWS + warp_row + m * 16 + h * 8 + lane / 4] = max;
      }
    __syncthreads();
    bool raised = false;
    float shrink[ROW_STEPS][2];
#pragma unroll
    for (u32 m = 0; m < ROW_STEPS; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float max = -INF;
#pragma unroll
        for (u32 c = 0; c < COLUMN_WARPS; c++)
          max = fmaxf(max, statistics[c * ROWS + warp_row + m * 16 + h * 8 + lane / 4]);
        max *= LOG2_E;
        const bool raise = max > base[m][h] + SLACK;
        shrink[m][h] = raise ? exp2_near(base[m][h] - max) : 1;
        base[m][h] = raise ? max : base[m][h];
        raised |= raise;
        // A row that has seen nothing yet: all its weights become exp2(-inf).
        const float from = base[m][h] == -INF ? 0 : base[m][h];
        float sum = 0;
#pragma unroll
        for (u32 j = 0; j < KEY_STEPS; j++) {
          const float a = exp2_near(score[m][j][2 * h] * LOG2_E - from);
          const float b = exp2_near(score[m][j][2 * h + 1] * LOG2_E - from);
          sum += a + b;
          const u32 at = (warp_row + m * 16 + h * 8 + lane / 4) * P_STRIDE + warp_key + j * 8 + quad * 2;
          *(u32*)(p_of + at) = pack_f16x2(a, b);
        }
        total[m][h] = total[m][h] * shrink[m][h] + sum;
      }
    if (__any_sync(ALL_LANES, raised)) {
#pragma unroll
      for (u32 m = 0; m < ROW_STEPS; m++)
#pragma unroll
        for (u32 j = 0; j < COLUMN_STEPS; j++)
#pragma unroll
          for (u32 i = 0; i < 4; i++) out[m][j][i] *= shrink[m][i / 2];
    }

#pragma unroll
    for (u32 chunk = 0; chunk < V_CHUNKS; chunk++) {
      const u16* const values = next_chunk(K_CHUNKS + chunk) + v_row;
#pragma unroll
      for (u32 k = 0; k < V_KEYS; k += 16) {
        u32 a[ROW_STEPS][4];
#pragma unroll
        for (u32 m = 0; m < ROW_STEPS; m++) ldmatrix_x4(a[m], p_row + m * 16 * P_STRIDE + chunk * V_KEYS + k);
#pragma unroll
        for (u32 j = 0; j < COLUMN_STEPS; j += 2) {
          if (WARP_COLUMNS * COLUMN_WARPS != HEAD_DIM && warp_column + j * 8 >= HEAD_DIM) break;
          u32 both[4];
          ldmatrix_x4_trans(both, values + k * V_STRIDE + j * 8);
          const u32 low[2] = {both[0], both[1]}, high[2] = {both[2], both[3]};
#pragma unroll
          for (u32 m = 0; m < ROW_STEPS; m++) {
            mma_f16(out[m][j], a[m], low);
            mma_f16(out[m][j + 1], a[m], high);
          }
        }
      }
      end_chunk(K_CHUNKS + chunk);
    }

#pragma unroll
    for (u32 i = 0; i < TILES_AHEAD; i++)
#pragma unroll
      for (u32 j = 0; j < PAGES; j++) pages[i][j] = pages[i + 1][j];
#pragma unroll
    for (u32 j = 0; j < PAGES; j++) pages[TILES_AHEAD][j] = seen.page((tile + 1 + TILES_AHEAD) * PAGES + j);
  }

#pragma unroll
  for (u32 m = 0; m < ROW_STEPS; m++)
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      float sum = total[m][h];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      if (quad == 0) statistics[column_warp * ROWS + warp_row + m * 16 + h * 8 + lane / 4] = sum;
    }
  __syncthreads();
#pragma unroll
  for (u32 m = 0; m < ROW_STEPS; m++)
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 row = warp_row + m * 16 + h * 8 + lane / 4;
      float sum = 0;
#pragma unroll
      for (u32 c = 0; c < COLUMN_WARPS; c++) sum += statistics[c * ROWS + row];
      const float inverse = 1 / sum;
      float values[COLUMN_STEPS][2];
#pragma unroll
      for (u32 j = 0; j < COLUMN_STEPS; j++) {
        values[j][0] = out[m][j][2 * h] * inverse;
        values[j][1] = out[m][j][2 * h + 1] * inverse;
      }
      write_row(p, row < rows, row_start(row), warp_column, values);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_prefill(const Params p) {
  DYNAMIC_SHARED(shared);
  const u32 group = p.heads / p.slot.kv_heads;
  for (u32 number = blockIdx.y;; number += gridDim.y) {
    const Tokens tokens = find_tile(p.runs, number, ROWS / group);
    if (tokens.count == 0) return;
    attend_tokens(p, shared, tokens, blockIdx.x, group);
    __syncthreads();  // the next tile's Q and keys go where this one's were
  }
}
