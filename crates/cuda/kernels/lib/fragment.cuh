// The MMA-fragment-major layout: sizes and offsets of a K-block, one struct per format. src/kernel/fragment.rs is the definition;
// it has the same numbers and passes what follows from them, to be compared.
//
// M-tiles of 16 rows are cut into K-blocks, K-blocks into parts of 64 inputs. Of a part, lane `4 * group + quad` holds 8 operands
// of 4 codes: operand `o` is row `group + 8 * (o % 2)`, from `operand_input` on (lib/fragment_value.cuh).
//   q8:      one word per operand, 4 operands of 32 inputs at a time: the lane's 16 bytes at 16 * lane, the next 32 inputs
//            LANES_BYTES on
//   others:  the lane's 16 bytes at 16 * lane; word o / 2 has the low four bits, even operands in the low nibbles
//   k5, k6:  the bits above, 1 or 2 per code, from HIGH on: the lane's 4 or 8 bytes
// Behind them the scales: 16 bytes of sub-scales per row from SUB_SCALES on, the f16 scales of a row from SCALES on.
#pragma once
#include "lib/num.cuh"

constexpr u32 M_TILE = 16, PART_INPUTS = 64, PART_OPERANDS = 8;
constexpr u32 LANES_BYTES = 512;  // 16 bytes of every lane

// Of a row in a K-block: SUB_SCALE_BYTES of 8-bit scales (and minimums), then SCALE_BYTES of f16.
template <u32 K_BLOCK_INPUTS, u32 LOW, u32 ABOVE, u32 SUB_SCALE_BYTES, u32 SCALE_BYTES>
struct FragmentGeometry {
  static constexpr u32 INPUTS = K_BLOCK_INPUTS, LOW_BITS = LOW, HIGH_BITS = ABOVE, PARTS = INPUTS / PART_INPUTS;
  // Bytes of a part's low and high bits.
  static constexpr u32 PART_LOW = M_TILE * PART_INPUTS * LOW_BITS / 8, PART_HIGH = M_TILE * PART_INPUTS * HIGH_BITS / 8;
  static constexpr u32 HIGH = PARTS * PART_LOW, SUB_SCALES = HIGH + PARTS * PART_HIGH;
  static constexpr u32 SCALES = SUB_SCALES + M_TILE * SUB_SCALE_BYTES, BYTES = SCALES + M_TILE * SCALE_BYTES;
  static constexpr bool HAS_SUB_SCALES = SUB_SCALE_BYTES > 0;
  // Of a part by itself: its codes, its share of the sub-scales, and the f16 scales.
  static constexpr u32 PART_BYTES = PART_LOW + PART_HIGH + M_TILE * (SUB_SCALE_BYTES / PARTS + SCALE_BYTES);
};
typedef FragmentGeometry<64, 8, 0, 0, 4> q8_fragment;
typedef FragmentGeometry<64, 4, 0, 0, 4> q4_fragment;
typedef FragmentGeometry<256, 4, 0, 16, 4> k4_fragment;
typedef FragmentGeometry<256, 4, 1, 16, 4> k5_fragment;
typedef FragmentGeometry<256, 4, 2, 16, 2> k6_fragment;
