// One code, one value of a matrix in the fragment format that FRAGMENT names. For kernels that go value by value; products take whole
// operands (lib/gemv_step.cuh, lib/gemv_quartet.cuh, lib/gemm_weights.cuh).
#pragma once
#include "lib/block_iq4.cuh"
#include "lib/fragment.cuh"

typedef JOIN(FRAGMENT, _fragment) Fragment;
static_assert(Fragment::BYTES == K_BLOCK_BYTES, "src/kernel/fragment.rs differs");

template <typename>
constexpr bool is_n4 = false;
template <>
constexpr bool is_n4<n4_fragment> = true;
constexpr bool IS_N4 = is_n4<Fragment>;

// First input of a lane's operand within its part. One scale per 16 inputs means shorter steps.
__device__ __forceinline__ u32 operand_input(u32 lane, u32 operand) {
  const u32 quad = lane % 4;
  if (Fragment::SIXTEENS) return 16 * (operand / 2) + 4 * quad;
  return 32 * (operand / 4) + 8 * quad + 4 * (operand / 2 % 2);
}

// The bits of one code.
__device__ __forceinline__ u32 fragment_code(const u8* k_block, u32 row, u32 input) {
  const u32 part = input / PART_INPUTS, byte = input % 4;
  const bool short_steps = Fragment::SIXTEENS;
  const u32 quad = short_steps ? input / 4 % 4 : input / 8 % 4, lane = row % 8 * 4 + quad;
  const u32 operand = row / 8 + 2 * (short_steps ? input / 16 % 4 : input / 32 % 2 * 2 + input / 4 % 2);
  if (Fragment::LOW_BITS == 8) return k_block[operand / 4 * LANES_BYTES + 16 * lane + operand % 4 * 4 + byte];
  const u8* low = k_block + Fragment::PART_LOW * part;
  if (Fragment::LOOKED_UP) {
    const u32 nibble = operand % 2 * 4 + byte, shift = nibble % 2 * 4;
    if (Fragment::LOW_BITS == 4) return low[16 * lane + operand / 2 * 4 + nibble / 2] >> shift & 15;
    if (Fragment::LOW_BITS == 1) return low[4 * lane + nibble / 2] >> (shift + operand / 2) & 1;
    const u32 two = low[8 * lane + operand / 4 * 4 + nibble / 2] >> (shift + operand / 2 % 2 * 2) & 3;
    if (Fragment::HIGH_BITS == 0) return two;
    const u8* ones = k_block + Fragment::HIGH + Fragment::PART_HIGH * part;
    return two | (ones[4 * lane + nibble / 2] >> (shift + operand / 2) & 1) << 2;
  }
  u32 code = Fragment::LOW_BITS == 2 ? low[8 * lane + operand / 4 * 4 + byte] >> (2 * (operand % 4)) & 3
                                     : low[16 * lane + operand / 2 * 4 + byte] >> (4 * (operand % 2)) & 15;
  const u32 high = Fragment::HIGH + Fragment::PART_HIGH * part;
  if (Fragment::HIGH_BITS == 1) code |= (k_block[high + 4 * lane + byte] >> operand & 1) << Fragment::LOW_BITS;
  if (Fragment::HIGH_BITS == 2) {
    code |= (k_block[high + 8 * lane + operand / 4 * 4 + byte] >> (2 * (operand % 4)) & 3) << 4;
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
  if (Fragment::HAS_TABLE) {
    const CodeTable& table = *(const CodeTable*)(k_block + Fragment::TABLE);
    const u32 byte = !Fragment::HAS_SUB_SCALES ? 1
                     : Fragment::SIXTEENS      ? sub_scales[input / 16]
                                               : k_block[Fragment::SUB_SCALES + input / 64 * 2 * M_TILE + 2 * row + input / 32 % 2];
    const bool floats = Fragment::SIXTEENS && Fragment::LOW_BITS == 4;
    const float sub_scale = mul(floats ? float_sub_scale(byte, table.shift) : float(int(i8(byte))), table.factor);
    const int entry = i8(table.values[code / 4] >> (8 * (code % 4)));
    return mul(mul(fragment_f16(scales_of_part<Fragment>(k_block, input / PART_INPUTS) + 2 * row), sub_scale), float(entry));
  }
  // Signed codes are moved to the top of a word and back.
  constexpr u32 UNUSED = 32 - Fragment::LOW_BITS - Fragment::HIGH_BITS;
  const float centred = float(int(code << UNUSED) >> UNUSED);
  if (Fragment::F16_MINS) {
    constexpr int MIDDLE = 1 << (31 - UNUSED);
    const u8* both = scales + 8 * row + input / 32 * 4;
    return add(mul(fragment_f16(both), centred + float(MIDDLE)), fragment_f16(both + 2));
  }
  if (IS_N4) return mul(fragment_f16(scales + 4 * row + input / 32 * 2), float(IQ4_VALUES[code]));
  if (!Fragment::HAS_SUB_SCALES) return mul(fragment_f16(scales + 4 * row + input / 32 * 2), centred);
  if (Fragment::LOW_BITS == 2) {
    const u32 both = sub_scales[input / 16];
    const float scaled = mul(mul(fragment_f16(scales + 4 * row), float(both & 15)), float(code));
    return sub(scaled, mul(fragment_f16(scales + 4 * row + 2), float(both >> 4)));
  }
  if (Fragment::SIXTEENS) {
    return mul(mul(fragment_f16(scales + 2 * row), float(i8(sub_scales[input / 16]))), centred);
  }
  const float scaled = mul(mul(fragment_f16(scales + 4 * row), float(sub_scales[input / 32 * 2])), float(code));
  return sub(scaled, mul(fragment_f16(scales + 4 * row + 2), float(sub_scales[input / 32 * 2 + 1])));
}
