// The MMA-fragment-major layout: sizes and offsets of a K-block, one struct per format. src/kernel/fragment.rs is the definition;
// it has the same numbers and passes what follows from them, to be compared.
//
// M-tiles of 16 rows are cut into K-blocks, K-blocks into parts of 64 inputs. Of a part, lane `4 * group + quad` holds 8 operands
// of 4 codes: operand `o` is row `group + 8 * (o % 2)`, from `operand_input` on (lib/fragment_value.cuh).
//   q8:      one word per operand, 4 operands of 32 inputs at a time: the lane's 16 bytes at 16 * lane, the next 32 inputs
//            LANES_BYTES on
//   others:  the lane's 16 bytes at 16 * lane; word o / 2 has the low four bits, even operands in the low nibbles
//   q5, m5, k5, k6:  the bits above, 1 or 2 per code, from HIGH on: the lane's 4 or 8 bytes
//   k2, t3:  two bits per code as k6 has its high ones; of t3 then the bit above as k5 has its
// Behind them the scales: 16 bytes of sub-scales per row from SUB_SCALES on, the f16 scales of a row from SCALES on (of m4 and m5 a
// scale and a minimum for each 32 inputs); of t4 and t3 the CodeTable of the matrix, from TABLE on.
#pragma once
#include "lib/num.cuh"

constexpr u32 M_TILE = 16, PART_INPUTS = 64, PART_OPERANDS = 8;
constexpr u32 LANES_BYTES = 512;  // 16 bytes of every lane

// The meaning of codes: entry `code` of the table, times f16 scale, FACTOR and sub-scale. A sub-scale is a signed byte where `shift`
// is 0, else a float's bits once it is shifted so far. It lies in every K-block, so that one kernel serves all such formats.
struct CodeTable {
  u32 values[4];  // 16 signed bytes; of t3 the first 8
  float factor;
  u32 shift;
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
  // One scale per 16 inputs, and steps as short: where one f16 has no minimum beside it, and in codes of two bits.
  static constexpr bool SIXTEENS = SCALE_BYTES == 2 || LOW_BITS == 2;
  // Of a part by itself: its codes, its share of the sub-scales, the f16 scales, the table.
  static constexpr u32 PART_BYTES = PART_LOW + PART_HIGH + M_TILE * (SUB_SCALE_BYTES / PARTS + SCALE_BYTES) + TABLE_BYTES;
};
typedef FragmentGeometry<64, 8, 0, 0, 4> q8_fragment;
typedef FragmentGeometry<64, 4, 0, 0, 4> q4_fragment;
typedef FragmentGeometry<64, 4, 1, 0, 4> q5_fragment;
struct n4_fragment : FragmentGeometry<64, 4, 0, 0, 4> {};  // q4's, but another type
typedef FragmentGeometry<64, 4, 0, 0, 8> m4_fragment;
typedef FragmentGeometry<64, 4, 1, 0, 8> m5_fragment;
typedef FragmentGeometry<256, 2, 0, 16, 4> k2_fragment;
typedef FragmentGeometry<256, 4, 0, 16, 4> k4_fragment;
typedef FragmentGeometry<256, 4, 1, 16, 4> k5_fragment;
typedef FragmentGeometry<256, 4, 2, 16, 2> k6_fragment;
typedef FragmentGeometry<256, 4, 0, 16, 2, sizeof(CodeTable)> t4_fragment;
typedef FragmentGeometry<256, 2, 1, 16, 2, sizeof(CodeTable)> t3_fragment;

// Table entries of eight codes: the low nibbles of a word's bytes, and the high ones.
__device__ __forceinline__ void table_nibbles(u32 (&a)[2], u32 codes, const u32 (&values)[4]) {
  // The permutation takes an index of three bits; the fourth chooses between two of them.
  const u32 entries = codes & 0x77777777u, halves = 0x32103210u | (codes & 0x88888888u) >> 1;
  const u32 first = __byte_perm(__byte_perm(values[0], values[1], entries), __byte_perm(values[2], values[3], entries), halves);
  const u32 second =
      __byte_perm(__byte_perm(values[0], values[1], entries >> 16), __byte_perm(values[2], values[3], entries >> 16), halves >> 16);
  a[0] = __byte_perm(first, second, 0x6420);
  a[1] = __byte_perm(first, second, 0x7531);
}

// Table entries of four codes below 8, one per byte.
__device__ __forceinline__ u32 table_bytes(u32 codes, const CodeTable& table) {
  const u32 pairs = codes | codes >> 4;
  return __byte_perm(table.values[0], table.values[1], __byte_perm(pairs, 0, 0x4420));
}

// A sub-scale as a float.
__device__ __forceinline__ float sub_scale_value(u32 byte, u32 shift) {
  return shift ? __uint_as_float(byte << shift) : float(int(i8(byte)));
}

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
// Codes of n4 stand for the 16 values of IQ4_NL (IQ4_VALUES of lib/block_iq4.cuh), four to a word.
template <>
struct SignedCodes<n4_fragment> {
  static constexpr u32 BITS = 8;

  __device__ __forceinline__ void load(const u8*, u32) {}
  __device__ __forceinline__ void bytes(u32 (&rows)[2], u32 word, u32) const {
    const u32 values[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
    table_nibbles(rows, word, values);
  }
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

// Entries of a lane's codes in a part of t4, and of t3 below, in the same way.
template <bool NIBBLES>
struct TableCodes {
  uint4 words;

  __device__ __forceinline__ void load(const u8* low, const u8*, u32 lane) { words = *(const uint4*)(low + 16 * lane); }
  __device__ __forceinline__ void operands(u32 (&a)[2], u32 group, const CodeTable& table) const {
    table_nibbles(a, group == 0 ? words.x : group == 1 ? words.y : group == 2 ? words.z : words.w, table.values);
  }
};
template <>
struct TableCodes<false> {
  TwoBitCodes low;
  u32 ones;

  __device__ __forceinline__ void load(const u8* two_bits, const u8* high, u32 lane) {
    low.load(two_bits, lane);
    ones = *(const u32*)(high + 4 * lane);
  }
  __device__ __forceinline__ void operands(u32 (&a)[2], u32 group, const CodeTable& table) const {
    const u32 one = ones >> (2 * group);
    low.operands(a, group);
    a[0] = table_bytes(a[0] | (one << 2 & 0x04040404u), table);
    a[1] = table_bytes(a[1] | (one << 1 & 0x04040404u), table);
  }
};
