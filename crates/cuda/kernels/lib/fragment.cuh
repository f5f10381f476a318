// Panels: quantized matrices in the order in which tensor cores take them. src/kernel/fragment.rs is the definition.
//
// FRAGMENT is a layout's name: q8, q4, k4, k5 or k6. Strips of 16 rows are cut into K-blocks, K-blocks into parts of 64 inputs.
// Of a part, lane `4 * group + quad` holds 8 operands of 4 codes: operand `o` is row `group + 8 * (o % 2)`, from
// `operand_input` on.
//   q8:      one word per operand, a step of 4 operands at a time: lane's 16 bytes at 16 * lane, the next step 512 on
//   others:  lane's 16 bytes at 16 * lane; word o / 2 has the low four bits, even operands in the low nibbles
//   k5, k6:  the bits above, 1 or 2 a code, from HIGH on: lane's 4 or 8 bytes
// Behind them the scales: 16 bytes of sub-scales per row from SUB_SCALES on, the halves of a row from SCALES on.
#pragma once
#include "lib/num.cuh"

constexpr u32 M_TILE = 16, PART_INPUTS = 64, PART_OPERANDS = 8;

struct q8_fragment {
  static constexpr u32 INPUTS = 64, BYTES = 1088, LOW_BITS = 8, HIGH_BITS = 0;
  static constexpr u32 HIGH = 0, SUB_SCALES = 0, SCALES = 1024;
};
struct q4_fragment {
  static constexpr u32 INPUTS = 64, BYTES = 576, LOW_BITS = 4, HIGH_BITS = 0;
  static constexpr u32 HIGH = 0, SUB_SCALES = 0, SCALES = 512;
};
struct k4_fragment {
  static constexpr u32 INPUTS = 256, BYTES = 2368, LOW_BITS = 4, HIGH_BITS = 0;
  static constexpr u32 HIGH = 0, SUB_SCALES = 2048, SCALES = 2304;
};
struct k5_fragment {
  static constexpr u32 INPUTS = 256, BYTES = 2880, LOW_BITS = 4, HIGH_BITS = 1;
  static constexpr u32 HIGH = 2048, SUB_SCALES = 2560, SCALES = 2816;
};
struct k6_fragment {
  static constexpr u32 INPUTS = 256, BYTES = 3360, LOW_BITS = 4, HIGH_BITS = 2;
  static constexpr u32 HIGH = 2048, SUB_SCALES = 3072, SCALES = 3328;
};
typedef JOIN(FRAGMENT, _fragment) Fragment;

// First input of a lane's operand within its part. k6 has one scale per 16 inputs, hence shorter steps than the others.
__device__ __forceinline__ u32 operand_input(u32 lane, u32 operand) {
  const u32 quad = lane % 4;
  if (Fragment::HIGH_BITS == 2) return 16 * (operand / 2) + 4 * quad;
  return 32 * (operand / 4) + 8 * quad + 4 * (operand / 2 % 2);
}

// The bits of one code.
__device__ __forceinline__ u32 fragment_code(const u8* k_block, u32 row, u32 input) {
  const u32 part = input / PART_INPUTS, byte = input % 4;
  const bool short_steps = Fragment::HIGH_BITS == 2;
  const u32 quad = short_steps ? input / 4 % 4 : input / 8 % 4, lane = row % 8 * 4 + quad;
  const u32 operand = row / 8 + 2 * (short_steps ? input / 16 % 4 : input / 32 % 2 * 2 + input / 4 % 2);
  if (Fragment::LOW_BITS == 8) return k_block[operand / 4 * 512 + 16 * lane + operand % 4 * 4 + byte];
  u32 code = k_block[512 * part + 16 * lane + operand / 2 * 4 + byte] >> (4 * (operand % 2)) & 15;
  if (Fragment::HIGH_BITS == 1) code |= (k_block[Fragment::HIGH + 128 * part + 4 * lane + byte] >> operand & 1) << 4;
  if (Fragment::HIGH_BITS == 2) {
    code |= (k_block[Fragment::HIGH + 256 * part + 8 * lane + operand / 4 * 4 + byte] >> (2 * (operand % 4)) & 3) << 4;
  }
  return code;
}

__device__ __forceinline__ float fragment_f16(const u8* at) { return f16_to_f32(*(const u16*)at); }

// One value of a packed matrix, exactly as `carat-gguf` defines it. `m_tile_bytes` is from one M-tile to the next.
__device__ __forceinline__ float fragment_value(const u8* fragments, u64 m_tile_bytes, u32 row, u32 column) {
  const u8* k_block = fragments + row / M_TILE * m_tile_bytes + u64(column / Fragment::INPUTS) * Fragment::BYTES;
  row %= M_TILE;
  const u32 input = column % Fragment::INPUTS, code = fragment_code(k_block, row, input);
  const u8* scales = k_block + Fragment::SCALES;
  const u8* sub_scales = k_block + Fragment::SUB_SCALES + 16 * row;
  // Signed codes are moved to the top of a word and back.
  constexpr u32 UNUSED = 32 - Fragment::LOW_BITS - Fragment::HIGH_BITS;
  const float centred = float(int(code << UNUSED) >> UNUSED);
  if (Fragment::SUB_SCALES == 0) return mul(fragment_f16(scales + 4 * row + input / 32 * 2), centred);
  if (Fragment::HIGH_BITS == 2) {
    return mul(mul(fragment_f16(scales + 2 * row), float(i8(sub_scales[input / 16]))), centred);
  }
  const float scaled = mul(mul(fragment_f16(scales + 4 * row), float(sub_scales[input / 32 * 2])), float(code));
  return sub(scaled, mul(fragment_f16(scales + 4 * row + 2), float(sub_scales[input / 32 * 2 + 1])));
}
