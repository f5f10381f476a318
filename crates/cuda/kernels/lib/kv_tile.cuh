// Tiles of keys or values in shared memory as flash_decode.cu multiplies them: rows of positions, in the KV type. Copies from pages,
// rows that a block computes itself, and fragments for m16n8k16.
//
// In Q8_0 a tile has codes and scales as a page does, and fragments become f16 on their way to registers. ldmatrix moves pairs of
// bytes, so a lane gets neighbours that f16 fragments have apart. Products do not mind if both sides agree: elements of a query are
// put in the keys' order (`query_column`), and rows of an output are the elements that `output_element` tells.
#pragma once
#include "lib/kv.cuh"
#include "lib/ptx.cuh"
#include "lib/reduce.cuh"

// Matrices of f16 have rows of HEAD_DIM. 16-byte pieces are swizzled, or rows have one to spare, so that 8 rows of a column lie
// in different banks.
constexpr u32 PITCH = HEAD_DIM % 64 ? HEAD_DIM + 8 : HEAD_DIM;
__device__ __forceinline__ u32 cell(u32 row, u32 element) {
  return row * PITCH + (HEAD_DIM % 64 ? element : ((element / 8 ^ row % 8) * 8 + element % 8));
}

// A lane of the warp that has a head holds pairs of its elements: pair `i` is j = 32 * i + lane and j + HALF.
constexpr u32 HALF = HEAD_DIM / 2;
constexpr int PAIRS = (HALF + WARP - 1) / WARP;
__device__ __forceinline__ u32 pair(int i) { return i * WARP + threadIdx.x % WARP; }
__device__ __forceinline__ bool holds(u32 pair) { return HEAD_DIM % 64 == 0 || pair < HALF; }

// Copies of a thread's pieces, of every AT_ONCE-th row from `first` on; the first goes to `to`. Where cells of those rows are swizzled
// alike, both sides are constants apart. Else it is a loop, with `cell_of` for the others: unrolled, this is most of a kernel's code.
template <u32 AT_ONCE, u32 TO_BYTES, u32 FROM_BYTES, typename Cell>
__device__ __forceinline__ void copy_passes(u8* to, const u8* from, u32 first, u32 rows, const Cell& cell_of) {
  if (AT_ONCE % 8 == 0) {
#pragma unroll
    for (u32 pass = 0; pass < (PAGE_TOKENS + AT_ONCE - 1) / AT_ONCE; pass++)
      if (first + pass * AT_ONCE < rows) cp_async_16(to + pass * AT_ONCE * TO_BYTES, from + pass * AT_ONCE * FROM_BYTES);
  } else {
#pragma unroll 1
    for (u32 row = first; row < rows; row += AT_ONCE) cp_async_16(cell_of(row), from + (row - first) * FROM_BYTES);
  }
}

// Scores are added up in so many sums, of which products need not wait for each other. In Q8_0 each block has sums of its own.
constexpr int SCORE_SUMS = KV_TYPE == KV_Q8_0 ? 1 : 2;

#if KV_TYPE == KV_Q8_0

static_assert(HEAD_DIM % 64 == 0 || HEAD_DIM == 16 || HEAD_DIM == 32, "blocks that pairs fall into");
constexpr u32 KV_BLOCKS = kv_blocks(HEAD_DIM), PAGE_UNITS = Q8Page::bytes(KV_BLOCKS);
// Rows have a piece to spare, not swizzled pieces: then all cells of a lane are constants apart.
constexpr u32 CODE_PITCH = HEAD_DIM + 16, TILE_ROW_BYTES = CODE_PITCH + KV_BLOCKS * 2;
__device__ __forceinline__ u32 code_cell(u32 row, u32 element) { return row * CODE_PITCH + element; }

struct KvTile {
  u8* codes;
  u16* scales;

  __device__ __forceinline__ KvTile(u8* start, u32 rows) : codes(start), scales((u16*)(start + rows * CODE_PITCH)) {}
  __device__ __forceinline__ u8* start() const { return codes; }
};

// Starts copies of the first `rows` rows of a page to rows `to_row` and on.
template <u32 THREADS>
__device__ __forceinline__ void copy_rows(const KvTile& to, u32 to_row, const u8* page, u32 rows) {
  // All threads take some whole rows at once.
  constexpr u32 ROW_PIECES = HEAD_DIM / 16, AT_ONCE = THREADS / ROW_PIECES;
  const u32 first = threadIdx.x / ROW_PIECES, element = threadIdx.x % ROW_PIECES * 16;
  // Pieces of whole blocks are one after another.
  const u32 piece = HEAD_DIM % KV_BLOCK ? first * (KV_BLOCKS * KV_BLOCK) + element : threadIdx.x * 16;
  copy_passes<AT_ONCE, CODE_PITCH, KV_BLOCKS * KV_BLOCK>(
      to.codes + to_row * CODE_PITCH + code_cell(first, element), page + piece, first, rows,
      [&](u32 row) { return to.codes + code_cell(to_row + row, element); });
  // Scales of rows are contiguous on both sides.
  const u8* const scales = page + PAGE_TOKENS * KV_BLOCKS * KV_BLOCK;
  u8* const to_scales = (u8*)(to.scales + to_row * KV_BLOCKS);
  constexpr u32 ROW_BYTES = KV_BLOCKS * 2, PIECE = ROW_BYTES % 16 == 0 ? 16 : ROW_BYTES % 4 == 0 ? 4 : 2;
  constexpr u32 PASSES = (PAGE_TOKENS * ROW_BYTES + THREADS * PIECE - 1) / (THREADS * PIECE);
#pragma unroll
  for (u32 pass = 0; pass < PASSES; pass++) {
    const u32 at = (pass * THREADS + threadIdx.x) * PIECE;
    if (at >= rows * ROW_BYTES) break;
    if (PIECE == 16) cp_async_16(to_scales + at, scales + at);
    if (PIECE == 4) cp_async_4(to_scales + at, scales + at);
    if (PIECE == 2) *(u16*)(to_scales + at) = *(const u16*)(scales + at);
  }
}

// Values behind the last seen have weight 0 and must be numbers.
template <u32 THREADS, u32 ROWS>
__device__ __forceinline__ void clear_behind(const KvTile& values, u32 last_row) {
#pragma unroll 1
  for (u32 i = (last_row + 1) * KV_BLOCKS + threadIdx.x; i < ROWS * KV_BLOCKS; i += THREADS) values.scales[i] = 0;
}

// A cell of a page that a key or value goes to.
struct KvCell {
  i8* codes;
  u16* scales;

  __device__ __forceinline__ KvCell(const Slot& slot, u8* of, u32 run, u32 position, u32 head) {
    const Q8Page page = slot.page_of(of, run, position, head);
    codes = page.codes(position % PAGE_TOKENS), scales = page.scales(position % PAGE_TOKENS);
  }
};

// Pair `i` of a key or value into its tile. By all lanes of a warp, as two blocks or one.
__device__ __forceinline__ void put_pair(const KvTile& tile, u32 row, int i, float low, float high) {
  const u32 j = pair(i);
  const auto put = [&](u32 element, float value, const Q8Scale& scale) {
    tile.codes[code_cell(row, element)] = u8(scale.code(value));
    if (element % KV_BLOCK == 0) tile.scales[row * KV_BLOCKS + element / KV_BLOCK] = scale.bits;
  };
  if (HEAD_DIM % 64 == 0) {
    put(j, low, Q8Scale(warp_max(fabsf(low))));
    put(j + HALF, high, Q8Scale(warp_max(fabsf(high))));
  } else {
    const Q8Scale scale(warp_max(holds(j) ? fmaxf(fabsf(low), fabsf(high)) : 0));
    if (holds(j)) {
      put(j, low, scale);
      put(j + HALF, high, scale);
    }
  }
}

// All pairs of a key or value into its tile and its cell: the same values with less code. Lanes trade maxima, so that each has that of
// one block and divides once.
__device__ __forceinline__ void put_head(const KvTile& tile, u32 row, const float (&low)[PAIRS], const float (&high)[PAIRS],
                                         const KvCell& to) {
  const u32 lane = threadIdx.x % WARP;
  constexpr int LANES = WARP / KV_BLOCKS;  // of a block
  float maxima[KV_BLOCKS];
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    if (HEAD_DIM % 64) {
      maxima[0] = holds(pair(i)) ? fmaxf(fabsf(low[i]), fabsf(high[i])) : 0;
    } else {
      maxima[i] = fabsf(low[i]);
      maxima[(i + PAIRS) % KV_BLOCKS] = fabsf(high[i]);
    }
  }
  trade<KV_BLOCKS / 2>(maxima, [](float kept, float got) { return fmaxf(kept, got); });
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2)
    maxima[0] = fmaxf(maxima[0], __shfl_xor_sync(ALL_LANES, maxima[0], mask));
  Q8Scale scale(maxima[0]);
  if (lane % LANES == 0) {
    tile.scales[row * KV_BLOCKS + lane / LANES] = scale.bits;
    to.scales[lane / LANES] = scale.bits;
  }
  const float inverse = scale.inverse;
#pragma unroll
  for (int i = 0; i < PAIRS; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int block = HEAD_DIM % 64 ? 0 : i + h * PAIRS;
      scale.inverse = __shfl_sync(ALL_LANES, inverse, block * LANES);
      if (holds(pair(i))) {
        const u32 element = pair(i) + h * HALF;
        const int code = scale.code(h ? high[i] : low[i]);
        tile.codes[code_cell(row, element)] = u8(code);
        to.codes[element] = i8(code);
      }
    }
}

// The column that an element of a query has in its matrix.
__device__ __forceinline__ u32 query_column(u32 element) {
  return element / 16 * 16 + element / 2 % 2 * 8 + element / 4 % 4 * 2 + element % 2;
}
// The element, of 16, that a fragment of values has in row `group`, or in row `group + 8`.
__device__ __forceinline__ u32 output_element(u32 group, u32 lower) { return 2 * group + lower; }

// Scores of 16 keys, from row `first_row` on, with queries of which STEPS steps of 16 elements are held, the first being `k_step`, but
// for the first `skipped` of them, a multiple of SKIPS and no more than MOST_SKIPPED. Codes are multiplied as they are, and scales applied
// to sums over blocks: exactly, as far as f32 goes.
template <bool PACKED, int SKIPS, int MOST_SKIPPED, int STEPS, int Q_TILES, int TILES>
__device__ __forceinline__ void add_scores(float (&score)[SCORE_SUMS][TILES][4], const KvTile& tile, u32 first_row, u32 k_step,
                                           const u32 (&query)[STEPS][Q_TILES][2], u32 skipped) {
  const u32 lane = threadIdx.x % WARP;
  // Two steps at once, a block; where there is one in all, so the second is not there.
  constexpr u32 LAST = HEAD_DIM / 16 - 1;
  constexpr bool WHOLE = STEPS % 2 == 0 && HEAD_DIM / 16 % STEPS == 0;
  const u8* const codes_of = tile.codes + code_cell(first_row + lane % 16, 0);
  const u8* const first = codes_of + 16 * (k_step + lane / 16);
  const u16* const scales = tile.scales + (first_row + lane / 4) * KV_BLOCKS + k_step / 2;
#pragma unroll
  for (int i = 0; i < STEPS; i += 2) {
    if (HEAD_DIM / 16 % STEPS && k_step + i >= HEAD_DIM / 16) break;
    if (i < MOST_SKIPPED && u32(i / SKIPS * SKIPS) < skipped) continue;
    u32 codes[4];
    ldmatrix_x4(codes, WHOLE ? first + 16 * i : codes_of + 16 * min(k_step + i + lane / 16, LAST));
    float sums[TILES][4] = {};
#pragma unroll
    for (int j = 0; j < 2 && i + j < STEPS; j++) {
      u32 keys[4];
#pragma unroll
      for (int k = 0; k < 4; k++) keys[k] = codes_as_f16(codes[2 * j + k % 2] ^ 0x80808080u, k < 2 ? 0x4140 : 0x4342);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        mma_f16(sums[t], keys, query[i + j][t]);
        if (!PACKED) mma_f16(sums[t], keys, query[i + j][Q_TILES - TILES + t]);
      }
    }
    const float by[2] = {f16_to_f32(scales[i / 2]), f16_to_f32(scales[8 * KV_BLOCKS + i / 2])};
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int c = 0; c < 4; c++) score[0][t][c] += by[c / 2] * sums[t][c];
  }
}

// Fragments of 16 elements for one step of 16 keys after another.
template <int KEY_STEPS>
struct ValueFragments {
  u32 codes[4];
  u32 scales[KEY_STEPS][2];

  // Before fragments of other elements; neighbours of even and odd `out_tile` share scales.
  __device__ __forceinline__ void load_scales(const KvTile& tile, u32 out_tile) {
    const u16* const at = tile.scales + threadIdx.x % 4 * 2 * KV_BLOCKS + out_tile / 2;
#pragma unroll
    for (int k = 0; k < KEY_STEPS; k++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 key = 16 * k + 8 * h;
        scales[k][h] = at[key * KV_BLOCKS] | u32(at[(key + 1) * KV_BLOCKS]) << 16;
      }
  }

  __device__ __forceinline__ void load(u32 (&values)[4], const KvTile& tile, int k, u32 out_tile) {
    if (k % 2 == 0) {
      ldmatrix_x4_trans(codes, tile.codes + code_cell(16 * k + threadIdx.x % WARP, 16 * out_tile));
#pragma unroll
      for (int j = 0; j < 4; j++) codes[j] ^= 0x80808080u;
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
      values[j] = dequantized(codes[k % 2 * 2 + j / 2], j % 2 ? 0x4341 : 0x4240, scales[k][j / 2]);
  }
};

#else

constexpr u32 PAGE_UNITS = PAGE_TOKENS * HEAD_DIM, TILE_ROW_BYTES = PITCH * 2;

struct KvTile {
  u16* cells;

  __device__ __forceinline__ KvTile(u8* start, u32) : cells((u16*)start) {}
  __device__ __forceinline__ u8* start() const { return (u8*)cells; }
};

// Starts copies of the first `rows` rows of a page to rows `to_row` and on.
template <u32 THREADS>
__device__ __forceinline__ void copy_rows(const KvTile& to, u32 to_row, const u16* page, u32 rows) {
  // All threads take some whole rows at once.
  constexpr u32 ROW_PIECES = HEAD_DIM / 8, AT_ONCE = THREADS / ROW_PIECES;
  const u32 first = threadIdx.x / ROW_PIECES, element = threadIdx.x % ROW_PIECES * 8;
  copy_passes<AT_ONCE, 2 * PITCH, 2 * HEAD_DIM>((u8*)(to.cells + to_row * PITCH + cell(first, element)),
                                                (const u8*)(page + first * HEAD_DIM + element), first, rows,
                                                [&](u32 row) { return (u8*)(to.cells + cell(to_row + row, element)); });
}

// Values behind the last seen have weight 0 and must be numbers.
template <u32 THREADS, u32 ROWS>
__device__ __forceinline__ void clear_behind(const KvTile& values, u32 last_row) {
#pragma unroll 1
  for (u32 piece = (last_row + 1) * (HEAD_DIM / 8) + threadIdx.x; piece < ROWS * (HEAD_DIM / 8); piece += THREADS)
    *(uint4*)(values.cells + cell(piece / (HEAD_DIM / 8), piece % (HEAD_DIM / 8) * 8)) = make_uint4(0, 0, 0, 0);
}

// A cell of a page that a key or value goes to.
struct KvCell {
  u16* start;

  __device__ __forceinline__ KvCell(const Slot& slot, u16* of, u32 run, u32 position, u32 head)
      : start(of + slot.cell(run, position, head)) {}
};

// Pair `i` of a key or value into its tile.
__device__ __forceinline__ void put_pair(const KvTile& tile, u32 row, int i, float low, float high) {
  if (holds(pair(i))) {
    tile.cells[cell(row, pair(i))] = f32_to_f16(low);
    tile.cells[cell(row, pair(i) + HALF)] = f32_to_f16(high);
  }
}

// All pairs of a key or value into its tile and its cell.
__device__ __forceinline__ void put_head(const KvTile& tile, u32 row, const float (&low)[PAIRS], const float (&high)[PAIRS],
                                         const KvCell& to) {
  const auto put = [&](u32 element, float value) {
    const u16 rounded = f32_to_f16(value);
    tile.cells[cell(row, element)] = rounded;
    to.start[element] = rounded;
  };
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    if (holds(pair(i))) {
      put(pair(i), low[i]);
      put(pair(i) + HALF, high[i]);
    }
  }
}

// The column that an element of a query has in its matrix.
__device__ __forceinline__ u32 query_column(u32 element) { return element; }
// The element, of 16, that a fragment of values has in row `group`, or in row `group + 8`.
__device__ __forceinline__ u32 output_element(u32 group, u32 lower) { return group + lower * 8; }

// Scores of 16 keys, from row `first_row` on, with queries of which STEPS steps of 16 elements are held, the first being `k_step`, but
// for the first `skipped` of them, a multiple of SKIPS and no more than MOST_SKIPPED: added to `score`, which has a sum per term of queries
// or, if they share a tile (PACKED), per parity of steps.
template <bool PACKED, int SKIPS, int MOST_SKIPPED, int STEPS, int Q_TILES, int TILES>
__device__ __forceinline__ void add_scores(float (&score)[SCORE_SUMS][TILES][4], const KvTile& tile, u32 first_row, u32 k_step,
                                           const u32 (&query)[STEPS][Q_TILES][2], u32 skipped) {
  const u32 lane = threadIdx.x % WARP;
  // Where steps begin at a whole swizzle of four, the cells of others are that of the first with bits flipped, or constants apart.
  constexpr bool FLIPS = HEAD_DIM % 64 == 0 && STEPS % 4 == 0;
  const u32 first = cell(first_row + lane % 16, 16 * k_step + lane / 16 * 8);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    if (HEAD_DIM / 16 % STEPS && k_step + i >= HEAD_DIM / 16) break;
    if (i < MOST_SKIPPED && u32(i / SKIPS * SKIPS) < skipped) continue;
    u32 keys[4];
    const u32 flipped = (first ^ i % 4 * 16) + i / 4 * 64;
    ldmatrix_x4(keys, tile.cells + (FLIPS ? flipped : cell(first_row + lane % 16, 16 * (k_step + i) + lane / 16 * 8)));
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      mma_f16(score[PACKED ? i % 2 : 0][t], keys, query[i][t]);
      if (!PACKED) mma_f16(score[1][t], keys, query[i][Q_TILES - TILES + t]);
    }
  }
}

// Fragments of 16 elements for one step of 16 keys after another.
template <int KEY_STEPS>
struct ValueFragments {
  __device__ __forceinline__ void load_scales(const KvTile&, u32) {}

  __device__ __forceinline__ void load(u32 (&values)[4], const KvTile& tile, int k, u32 out_tile) {
    const u32 lane = threadIdx.x % WARP;
    ldmatrix_x4_trans(values, tile.cells + cell(16 * k + lane % 8 + lane / 16 * 8, 16 * out_tile + lane / 8 % 2 * 8));
  }
};

#endif
