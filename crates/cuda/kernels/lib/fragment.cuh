// The MMA-fragment-major layout: sizes and offsets of a K-block, one struct per format. src/kernel/fragment.rs is the definition;
// it has the same numbers and passes what follows from them, to be compared.
//
// M-tiles of 16 rows are cut into K-blocks, K-blocks into parts of 64 inputs. Of a part, lane `4 * group + quad` holds 8 operands
// of 4 codes: operand `o` is row `group + 8 * (o % 2)`, from `operand_input` on (lib/fragment_value.cuh).
//   q8:      one word per operand, 4 operands of 32 inputs at a time: the lane's 16 bytes at 16 * lane, the next 32 inputs
//            LANES_BYTES on
//   others:  the lane's 16 bytes at 16 * lane; word o / 2 has the low four bits, even operands in the low nibbles
//   q5, m5, k5, k6:  the bits above, 1 or 2 per code, from HIGH on: the lane's 4 or 8 bytes
//   k2:  two bits per code as k6 has its high ones
//   n4, t4, f4:  codes are looked up, by instructions that take four nibbles as numbers of entries: word o / 2 has the codes of its even
//            operand in the low half, those of the odd one in the high half
//   t3:  the same of three bits. Word o / 4 has two bits of each nibble's code, those of operands o % 4 >= 2 above the others; then the
//            bit above from HIGH on, where the lane has one word and bit o / 2 of each nibble
//   t2, t1:  the two bits of t3 alone, and its one bit alone
// Behind them the scales: 16 bytes of sub-scales per row from SUB_SCALES on (of t4 2 bytes per row, part after part), the f16 scales of a
// row from SCALES on (of m4 and m5 a scale and a minimum for each 32 inputs; of t1 those of all rows for 128 inputs, then those for the
// next); of t4, f4, t3, t2 and t1 the CodeTable of the matrix, from TABLE on.
#pragma once
#include "lib/num.cuh"
#include "lib/ptx.cuh"

constexpr u32 M_TILE = 16, PART_INPUTS = 64, PART_OPERANDS = 8;
constexpr u32 LANES_BYTES = 512;  // 16 bytes of every lane

// The meaning of codes: entry `code` of the table, times f16 scale, `factor` and sub-scale. A sub-scale is a signed byte; of f4 a float's
// bits once it is shifted by `shift`. It lies in every K-block, so that one kernel serves all such formats.
struct CodeTable {
  u32 values[4];  // 16 signed bytes; of t3 the first 8, of t2 and t1 the first 4
  float factor;
  u32 shift;      // of f4
  u32 unused[2];
};

// Of a row in a K-block: SUB_SCALE_BYTES of 8-bit scales (and minimums), then SCALE_BYTES of f16.
template <u32 K_BLOCK_INPUTS, u32 LOW, u32 ABOVE, u32 SUB_SCALE_BYTES, u32 SCALE_BYTES, u32 TABLE_BYTES = 0>
struct FragmentGeometry {
  static constexpr u32 INPUTS = K_BLOCK_INPUTS, LOW_BITS = LOW, HIGH_BITS = ABOVE, PARTS = INPUTS / PART_INPUTS;
  // Bytes of a part's low and high bits.
  static constexpr u32 PART_LOW = M_TILE * PART_INPUTS * LOW_BITS / 8, PART_HIGH = M_TILE * PART_INPUTS * HIGH_BITS / 8;
  static constexpr u32 HIGH = PARTS * PART_LOW, SUB_SCALES = HIGH + PARTS * PART_HIGH;
  static constexpr u32 SCALES = SUB_SCALES + M_TILE * SUB_SCALE_BYTES, TABLE = SCALES + M_TILE * SCALE_BYTES;
  static constexpr u32 BYTES = TABLE + TABLE_BYTES;
  static constexpr bool HAS_SUB_SCALES = SUB_SCALE_BYTES > 0, HAS_TABLE = TABLE_BYTES > 0;
  // Each 32 inputs have an f16 minimum beside their scale.
  static constexpr bool F16_MINS = SCALE_BYTES == 8;
  // One scale per 16 inputs, and steps as short; those without sub-scales lie alike.
  static constexpr bool SIXTEENS = SUB_SCALE_BYTES == 16 ? SCALE_BYTES == 2 || LOW_BITS == 2 : HAS_TABLE && !HAS_SUB_SCALES;
  // Scales of a row in a K-block, where codes are looked up.
  static constexpr u32 SCALES_OF_ROW = SCALE_BYTES / 2;
  static constexpr u32 PART_SUB_SCALES = M_TILE * SUB_SCALE_BYTES / PARTS;
  // Four codes of an operand lie side by side, each in a nibble.
  static constexpr bool LOOKED_UP = HAS_TABLE;
  // Of a part by itself: its codes, its share of the sub-scales, the f16 scales (of t1 those of its inputs), the table.
  static constexpr u32 STAGE_SCALE_BYTES = HAS_TABLE ? 2 : SCALE_BYTES;
  static constexpr u32 PART_BYTES = PART_LOW + PART_HIGH + PART_SUB_SCALES + M_TILE * STAGE_SCALE_BYTES + TABLE_BYTES;
};
typedef FragmentGeometry<64, 8, 0, 0, 4> q8_fragment;
typedef FragmentGeometry<64, 4, 0, 0, 4> q4_fragment;
typedef FragmentGeometry<64, 4, 1, 0, 4> q5_fragment;
struct n4_fragment : FragmentGeometry<64, 4, 0, 0, 4> {
  static constexpr bool LOOKED_UP = true;  // in the table of IQ4_NL
};
typedef FragmentGeometry<64, 4, 0, 0, 8> m4_fragment;
typedef FragmentGeometry<64, 4, 1, 0, 8> m5_fragment;
typedef FragmentGeometry<256, 2, 0, 16, 4> k2_fragment;
typedef FragmentGeometry<256, 4, 0, 16, 4> k4_fragment;
typedef FragmentGeometry<256, 4, 1, 16, 4> k5_fragment;
typedef FragmentGeometry<256, 4, 2, 16, 2> k6_fragment;
typedef FragmentGeometry<256, 4, 0, 8, 2, sizeof(CodeTable)> t4_fragment;
typedef FragmentGeometry<256, 4, 0, 16, 2, sizeof(CodeTable)> f4_fragment;
typedef FragmentGeometry<256, 2, 1, 16, 2, sizeof(CodeTable)> t3_fragment;
typedef FragmentGeometry<256, 2, 0, 0, 2, sizeof(CodeTable)> t2_fragment;
typedef FragmentGeometry<256, 1, 0, 0, 4, sizeof(CodeTable)> t1_fragment;

// The f16 scales of all rows for the inputs of a part, where codes are looked up.
template <typename Fragment>
__device__ __forceinline__ const u8* scales_of_part(const u8* k_block, u32 part) {
  return k_block + Fragment::SCALES + 2 * M_TILE * (part * Fragment::SCALES_OF_ROW / Fragment::PARTS);
}

// Table entries of the codes in a word's nibbles: those of its low half, and of its high half.
__device__ __forceinline__ void table_nibbles(u32 (&a)[2], u32 codes, const u32 (&values)[4]) {
  // The permutation takes an index of three bits; the fourth chooses between two of them.
  const u32 entries = codes & 0x77777777u, halves = 0x32103210u | (codes >> 1 & 0x44444444u);
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    const u32 of = entries >> 16 * i;
    a[i] = pick_bytes(pick_bytes(values[0], values[1], of), pick_bytes(values[2], values[3], of), halves >> 16 * i);
  }
}

// A sub-scale of f4.
__device__ __forceinline__ float float_sub_scale(u32 byte, u32 shift) { return __uint_as_float(byte << shift); }

// Signed codes of q4, q5, m4, m5 and n4, 32 inputs of which share a scale: a lane's words of a part, each two operands.
template <typename Fragment>
struct SignedCodes {
  static constexpr u32 BITS = Fragment::LOW_BITS + Fragment::HIGH_BITS;
  u32 fifths;

  __device__ __forceinline__ void load(const u8* high, u32 lane) { fifths = BITS == 5 ? *(const u32*)(high + 4 * lane) : 0; }

  // Codes of rows `group` and `group + 8` in word `i`, one per byte and of BITS bits.
  __device__ __forceinline__ void bytes(u32 (&rows)[2], u32 word, u32 i) const {
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
      rows[row] = word >> 4 * row & 0x0f0f0f0fu;
      if (BITS == 5) rows[row] |= (fifths >> (2 * i + row) & 0x01010101u) << 4;
    }
  }

  // The same in the topmost bits: 2^(8 - BITS) times as much, with a sign.
  __device__ __forceinline__ void operands(u32 (&a)[2], u32 word, u32 i) const {
    if (BITS == 4) {
      a[0] = word << 4 & 0xf0f0f0f0u;
      a[1] = word & 0xf0f0f0f0u;
    } else {
      a[0] = (word << 3 & 0x78787878u) | (fifths << (7 - 2 * i) & 0x80808080u);
      a[1] = (word >> 1 & 0x78787878u) | (fifths << (6 - 2 * i) & 0x80808080u);
    }
  }
};
// Codes of n4 stand for the 16 values of IQ4_NL (IQ4_VALUES of lib/block_iq4.cuh), four to a word. Literals would be moved to a register
// for each use.
__constant__ u32 N4_VALUES[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
template <>
struct SignedCodes<n4_fragment> {
  static constexpr u32 BITS = 8;
  u32 values[4];

  __device__ __forceinline__ void load(const u8*, u32) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) values[i] = N4_VALUES[i];
  }
  __device__ __forceinline__ void bytes(u32 (&rows)[2], u32 word, u32) const { table_nibbles(rows, word, values); }
  __device__ __forceinline__ void operands(u32 (&a)[2], u32 word, u32 i) const { bytes(a, word, i); }
};

// The two bits per code of a lane in a part: operands of rows `group` and `group + 8`, a group of 16 inputs at a time.
struct TwoBitCodes {
  uint2 pairs;

  __device__ __forceinline__ void load(const u8* low, u32 lane) { pairs = *(const uint2*)(low + 8 * lane); }
  __device__ __forceinline__ void operands(u32 (&a)[2], u32 group) const {
    const u32 two = (group < 2 ? pairs.x : pairs.y) >> (4 * (group % 2));
    a[0] = two & 0x03030303u;
    a[1] = two >> 2 & 0x03030303u;
  }
};

// Entries of a lane's codes in a part of f4, and of t3, t2 and t1 below: operands of rows `group` and `group + 8`, a group of 16 inputs at a time.
template <typename Fragment>
struct TableCodes {
  uint4 words;

  __device__ __forceinline__ void load(const u8* low, const u8*, u32 lane) { words = *(const uint4*)(low + 16 * lane); }
  __device__ __forceinline__ void operands(u32 (&a)[2], u32 group, const CodeTable& table) const {
    table_nibbles(a, group == 0 ? words.x : group == 1 ? words.y : group == 2 ? words.z : words.w, table.values);
  }
};
template <>
struct TableCodes<t3_fragment> {
  uint2 pairs;
  u32 ones;

  __device__ __forceinline__ void load(const u8* low, const u8* high, u32 lane) {
    pairs = *(const uint2*)(low + 8 * lane);
    ones = *(const u32*)(high + 4 * lane);
  }
  __device__ __forceinline__ void operands(u32 (&a)[2], u32 group, const CodeTable& table) const {
    const u32 two = (group < 2 ? pairs.x : pairs.y) >> 2 * (group % 2), one = group < 2 ? ones << (2 - group) : ones >> (group - 2);
    const u32 codes = (two & 0x33333333u) | (one & 0x44444444u);
    a[0] = pick_bytes(table.values[0], table.values[1], codes);
    a[1] = pick_bytes(table.values[0], table.values[1], codes >> 16);
  }
};
template <>
struct TableCodes<t2_fragment> {
  uint2 pairs;

  __device__ __forceinline__ void load(const u8* low, const u8*, u32 lane) { pairs = *(const uint2*)(low + 8 * lane); }
  __device__ __forceinline__ void operands(u32 (&a)[2], u32 group, const CodeTable& table) const {
    const u32 codes = (group < 2 ? pairs.x : pairs.y) >> 2 * (group % 2) & 0x33333333u;
    a[0] = pick_bytes(table.values[0], 0, codes);
    a[1] = pick_bytes(table.values[0], 0, codes >> 16);
  }
};
template <>
struct TableCodes<t1_fragment> {
  u32 ones;

  __device__ __forceinline__ void load(const u8* low, const u8*, u32 lane) { ones = *(const u32*)(low + 4 * lane); }
  __device__ __forceinline__ void operands(u32 (&a)[2], u32 group, const CodeTable& table) const {
    const u32 codes = ones >> group & 0x11111111u;
    a[0] = pick_bytes(table.values[0], 0, codes);
    a[1] = pick_bytes(table.values[0], 0, codes >> 16);
  }
};
