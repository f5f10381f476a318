// Packs rows of the file into fragments, once, when a quantized matrix is loaded.
//
// Grid: (M-tiles, runs of 1024 inputs), 8 warps that share the parts of 64 inputs, then all threads the scales. A lane
// gathers 32 codes byte by byte, which L1 turns into whole sectors, and writes 16 bytes at a time.
// Bytes: the packed rows in, about as many out. Copying the rows to the device takes far longer.
// Requires a format that has fragments. M-tiles are written whole, with zeros where there is no row or column. From one
// M-tile to the next are `m_tile_bytes`, so that M-tiles of several matrices can be interleaved.
#include "lib/format.cuh"
#include "lib/fragment_value.cuh"
#include "lib/reduce.cuh"

struct Params {
  const u8* from;
  u64 row_bytes;
  u8* fragments;
  u64 m_tile_bytes;
  u32 rows;
  u32 columns;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/load/pack.rs differs");

constexpr u32 RUN_INPUTS = 1024;

#ifdef TABLE_0
// What codes stand for, as src/kernel/fragment/code_table.rs has it.
__device__ __forceinline__ const u8* table_block(const u8* row, u32 i) { return row + i / BLOCK_LEN * BLOCK_BYTES; }
__device__ __forceinline__ u32 table_word(u32 word) {
  const u32 words[8] = {TABLE_0, TABLE_1, TABLE_2, TABLE_3, TABLE_FACTOR, TABLE_SHIFT, 0, 0};
  return words[word];
}
// The number of a value in the table, where it surely is.
__device__ __forceinline__ u32 table_code(const u8* block, u32 j) {
  const int value = weight_code(block, j);
  u32 code = 0;
  while (code < 15 && i8(table_word(code / 4) >> (8 * (code % 4))) != value) code++;
  return code;
}
#define block_of table_block
#define code_of table_code
// One copy: the search in all of a lane's codes would be most of the kernel.
#define ONCE __noinline__
#else
constexpr bool SUPER_BLOCKS = Fragment::HAS_SUB_SCALES;
constexpr u32 BLOCK_LEN = SUPER_BLOCKS ? 256 : 32;
#define block_of weight_block
#define code_of weight_code
#define ONCE __forceinline__
#endif

// Null where there is no such row or column.
__device__ __forceinline__ const u8* block_at(const Params& p, u32 row, u32 column) {
  return row < p.rows && column < p.columns ? block_of(p.from + row * p.row_bytes, column) : nullptr;
}

// 4 codes of a row, one per byte, cut to their bits.
__device__ ONCE u32 four_codes(const Params& p, u32 row, u32 column) {
  const u8* block = block_at(p, row, column);
  if (!block) return 0;
  constexpr u32 MASK = (1u << (Fragment::LOW_BITS + Fragment::HIGH_BITS)) - 1;
  u32 codes = 0;
#pragma unroll
  for (u32 b = 0; b < 4; b++) codes |= (u32(code_of(block, column % BLOCK_LEN + b)) & MASK) << (8 * b);
  return codes;
}

// The same where four codes of an operand lie side by side, each in a nibble.
__device__ __forceinline__ void pack_lookups(const u32 (&codes)[PART_OPERANDS], u32* low, u32* high, u32 lane) {
  u32 words[4] = {0, 0, 0, 0}, ones = 0;
#pragma unroll
  for (u32 o = 0; o < PART_OPERANDS; o++) {
    // Bytes to nibbles.
    const u32 pairs = codes[o] | codes[o] >> 4, four = __byte_perm(pairs, 0, 0x4420), nibbles = four << (16 * (o % 2));
    if (Fragment::LOW_BITS == 4) words[o / 2] |= nibbles;
    if (Fragment::LOW_BITS == 2) words[o / 4] |= (nibbles & 0x33333333u) << (2 * (o / 2 % 2));
    // The bit above two, or the only one.
    if (Fragment::LOW_BITS < 4) ones |= (nibbles >> (Fragment::LOW_BITS == 2 ? 2 : 0) & 0x11111111u) << (o / 2);
  }
  if (Fragment::LOW_BITS == 1) {
    low[lane] = ones;
  } else if (Fragment::LOW_BITS == 2) {
    ((uint2*)low)[lane] = make_uint2(words[0], words[1]);
    if (Fragment::HIGH_BITS == 1) high[lane] = ones;
  } else {
    ((uint4*)low)[lane] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The codes that one lane holds of a part: all of it but the scales.
__device__ __forceinline__ void pack_codes(const Params& p, u32 row, u32 column, u8* k_block, u32 lane) {
  u32 codes[PART_OPERANDS];
#pragma unroll
  for (u32 o = 0; o < PART_OPERANDS; o++) {
    codes[o] = four_codes(p, row + lane / 4 + 8 * (o % 2), column + operand_input(lane, o));
  }
  const u32 part = column % Fragment::INPUTS / PART_INPUTS;
  uint4* low = (uint4*)(k_block + Fragment::PART_LOW * part) + lane;
  u32 nibbles[4], high[2] = {0, 0};
#pragma unroll
  for (u32 j = 0; j < 4; j++) nibbles[j] = (codes[2 * j] & 0x0f0f0f0f) | (codes[2 * j + 1] & 0x0f0f0f0f) << 4;
  if (Fragment::LOOKED_UP) {
    pack_lookups(codes, (u32*)(k_block + Fragment::PART_LOW * part), (u32*)(k_block + Fragment::HIGH + Fragment::PART_HIGH * part), lane);
    return;
  }
  if (Fragment::LOW_BITS == 8) {
    low[0] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    low[32] = make_uint4(codes[4], codes[5], codes[6], codes[7]);
  } else if (Fragment::LOW_BITS == 2) {
    u32 pairs[2] = {0, 0};
#pragma unroll
    for (u32 o = 0; o < PART_OPERANDS; o++) pairs[o / 4] |= (codes[o] & 0x03030303) << (2 * (o % 4));
    ((uint2*)(k_block + Fragment::PART_LOW * part))[lane] = make_uint2(pairs[0], pairs[1]);
  } else {
    low[0] = make_uint4(nibbles[0], nibbles[1], nibbles[2], nibbles[3]);
  }
#pragma unroll
  for (u32 o = 0; o < PART_OPERANDS; o++) {
    if (Fragment::HIGH_BITS == 1) high[0] |= (codes[o] >> Fragment::LOW_BITS & 0x01010101) << o;
    if (Fragment::HIGH_BITS == 2) high[o / 4] |= (codes[o] >> 4 & 0x03030303) << (2 * (o % 4));
  }
  u32* to = (u32*)(k_block + Fragment::HIGH) + (32 * part + lane) * Fragment::HIGH_BITS;
  if (Fragment::HIGH_BITS >= 1) to[0] = high[0];
  if (Fragment::HIGH_BITS == 2) to[1] = high[1];
}

// Word `word` of the scales of a K-block, sub-scales first.
#ifdef TABLE_0
__device__ __forceinline__ u32 scale_word(const Params& p, u32 row, u32 column, u32 word) {
  const bool sixteens = Fragment::SIXTEENS;
  const u32 sub_words = (Fragment::SCALES - Fragment::SUB_SCALES) / 4, scale_words = (Fragment::TABLE - Fragment::SCALES) / 4;
  u32 held = 0;
  // Signed: there may be none.
  if (int(word) < int(sub_words)) {
    for (u32 b = 0; b < 4; b++) {
      // A word has a row's sub-scales of a part, or those of two rows.
      const u32 of_row = sixteens ? word / 4 : word % 8 * 2 + b / 2;
      const u32 at = column + (sixteens ? 64 * (word % 4) + 16 * b : 64 * (word / 8) + 32 * (b % 2));
      const u8* block = block_at(p, row + of_row, at);
      if (block) held |= (weight_sub_scale(block, at % BLOCK_LEN / 16) & 255) << (8 * b);
    }
    return held;
  }
  word -= sub_words;
  if (word >= scale_words) return table_word(word - scale_words);
  // Those of all rows for a block of inputs, then those for the next.
  const u32 at = column + word / (M_TILE / 2) * BLOCK_LEN;
  for (u32 b = 0; b < 2; b++) {
    const u8* block = block_at(p, row + 2 * word % M_TILE + b, at);
    if (block) held |= u32(weight_d(block)) << (16 * b);
  }
  return held;
}
#else
__device__ __forceinline__ u32 u16_or_zero(const u8* block, u32 at) { return block ? load_u16(block + at) : 0; }

__device__ __forceinline__ u32 scale_word(const Params& p, u32 row, u32 column, u32 word) {
  if (Fragment::F16_MINS) {
    // A block starts with its scale and its minimum.
    const u8* block = block_at(p, row + word / 2, column + word % 2 * 32);
    return u16_or_zero(block, 0) | u16_or_zero(block, 2) << 16;
  }
  if (!SUPER_BLOCKS) {
    // A row's two blocks start with their scales.
    row += word;
    return u16_or_zero(block_at(p, row, column), 0) | u16_or_zero(block_at(p, row, column + 32), 0) << 16;
  }
  const u32 sub_words = 4 * M_TILE;
  const bool centred = Fragment::HIGH_BITS == 2;  // the one of them that has no minimums
  const bool sixteens = Fragment::SIXTEENS;
  // Signed: there may be none.
  if (int(word) < int(sub_words)) {
    const u8* block = block_at(p, row + word / 4, column);
    if (!block) return 0;
    const u32 first = word % 4, at = centred ? 192 : 0;
    if (sixteens) return load_u16(block + at + 4 * first) | u32(load_u16(block + at + 2 + 4 * first)) << 16;
    u32 scales[2], mins[2];
    k_scale_min(block + 4, 2 * first, scales[0], mins[0]);
    k_scale_min(block + 4, 2 * first + 1, scales[1], mins[1]);
    return scales[0] | mins[0] << 8 | scales[1] << 16 | mins[1] << 24;
  }
  word -= sub_words;
  if (!centred) {
    const u8* block = block_at(p, row + word, column);
    const u32 at = sixteens ? 80 : 0;
    return u16_or_zero(block, at) | u16_or_zero(block, at + 2) << 16;
  }
  row += 2 * word;
  return u16_or_zero(block_at(p, row, column), 208) | u16_or_zero(block_at(p, row + 1, column), 208) << 16;
}
#endif

extern "C" __global__ void __launch_bounds__(256) pack(const Params p) {
  const u32 row = blockIdx.x * M_TILE, first = blockIdx.y * RUN_INPUTS;
  const u32 padded = (p.columns + Fragment::INPUTS - 1) / Fragment::INPUTS * Fragment::INPUTS;
  const u32 end = min(first + RUN_INPUTS, padded);
  u8* const m_tile = p.fragments + blockIdx.x * p.m_tile_bytes;
  for (u32 part = threadIdx.x / WARP; part < (end - first) / PART_INPUTS; part += blockDim.x / WARP) {
    const u32 column = first + part * PART_INPUTS;
    u8* k_block = m_tile + u64(column / Fragment::INPUTS) * Fragment::BYTES;
    pack_codes(p, row, column, k_block, threadIdx.x % WARP);
  }
  constexpr u32 SCALES = Fragment::SUB_SCALES, SCALE_WORDS = (Fragment::BYTES - SCALES) / 4;
  for (u32 i = threadIdx.x; i < (end - first) / Fragment::INPUTS * SCALE_WORDS; i += blockDim.x) {
    const u32 column = first + i / SCALE_WORDS * Fragment::INPUTS, word = i % SCALE_WORDS;
    u8* k_block = m_tile + u64(column / Fragment::INPUTS) * Fragment::BYTES;
    ((u32*)(k_block + SCALES))[word] = scale_word(p, row, column, word);
  }
}
