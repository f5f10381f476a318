// Fragments to A operands of m16n8k16 in f16: a stage (64 inputs) of an M-tile as `Weights::copy` of lib/gemm_weights.cuh leaves it
// in shared memory.
//
// `f16_operands` has a step of 32 inputs in two products of 16. Inputs are permuted so that a lane's own codes are what it
// multiplies: product `s` takes inputs 8 * quad + 4 * s .. of the step (of k2, k6, f4, t3, t2 and t1: 16 * s + 4 * quad ..), as the tokens' side
// must, too.
//
// A code becomes f16 by its place behind 1024's exponent (0x6400 | code is 1024 + code, exactly), less what centres it; then one
// rounding by the scale. Formats of f16 scales without minimums are so the f16 nearest to the value, what dequantized weights are. The
// scale of others is rounded first; a minimum goes along as the value at the codes' centre, which is small, so that little of it is lost.
#pragma once
#include "lib/gemm_weights.cuh"

// Four codes, one per byte, as f16, less `centre` (1024 included) in both halves.
__device__ __forceinline__ void f16_codes(u32 (&pairs)[2], u32 codes, u32 centre) {
  pairs[0] = sub_f16x2(__byte_perm(codes, 0x64646464u, 0x4140), centre);
  pairs[1] = sub_f16x2(__byte_perm(codes, 0x64646464u, 0x4342), centre);
}

// Operands of rows `group` (low) and `group + 8` (high), from their codes.
__device__ __forceinline__ void scaled_operands(u32 (&a)[4], u32 low, u32 high, u32 centre, u32 low_scale, u32 high_scale) {
  u32 pairs[2];
  f16_codes(pairs, low, centre);
  a[0] = mul_f16x2(pairs[0], low_scale);
  a[2] = mul_f16x2(pairs[1], low_scale);
  f16_codes(pairs, high, centre);
  a[1] = mul_f16x2(pairs[0], high_scale);
  a[3] = mul_f16x2(pairs[1], high_scale);
}

// The same plus the value at the centre: of a row, its scale and that value.
__device__ __forceinline__ void shifted_operands(u32 (&a)[4], u32 low, u32 high, u32 centre, u32 low_row,
                                                 u32 high_row) {
  u32 pairs[2];
  f16_codes(pairs, low, centre);
  a[0] = fma_f16x2(pairs[0], both_halves(low_row, 0), both_halves(low_row, 1));
  a[2] = fma_f16x2(pairs[1], both_halves(low_row, 0), both_halves(low_row, 1));
  f16_codes(pairs, high, centre);
  a[1] = fma_f16x2(pairs[0], both_halves(high_row, 0), both_halves(high_row, 1));
  a[3] = fma_f16x2(pairs[1], both_halves(high_row, 0), both_halves(high_row, 1));
}

// Q8, Q4, Q5 and N4: the f16 scale of a step, twice; a row's word has those of both steps.
__device__ __forceinline__ u32 step_scale(const u8* rows, u32 row, u32 step) {
  return both_halves(word_at(rows + 4 * row), step);
}

// K4 and K5: a row's scale of a step and its value where the code is CENTRE.
template <u32 CENTRE>
__device__ __forceinline__ u32 scale_and_centre(const u8* words, u32 step) {
  const uint2 held = *(const uint2*)words;
  const float scale = f16_to_f32(u16(held.y)) * byte_value(held.x, 2 * step);
  const float least = f16_to_f32(u16(held.y >> 16)) * byte_value(held.x, 2 * step + 1);
  return pack_f16x2(scale, fmaf(float(CENTRE), scale, -least));
}

// Operands of a step of 32 inputs.
__device__ __forceinline__ void f16_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_q8) {
  const u32 group = lane / 4;
  const uint4 codes = *(const uint4*)(m_tile + LANES_BYTES * step + 16 * lane);
  const u32 low = step_scale(m_tile + Weights_q8::ROWS_AT, group, step),
            high = step_scale(m_tile + Weights_q8::ROWS_AT, group + 8, step);
  // Bytes of the other sign bit are codes + 128.
  constexpr u32 SIGNS = 0x80808080u, CENTRE = 0x64806480u;
  scaled_operands(a[0], codes.x ^ SIGNS, codes.y ^ SIGNS, CENTRE, low, high);
  scaled_operands(a[1], codes.z ^ SIGNS, codes.w ^ SIGNS, CENTRE, low, high);
}

// M4 and M5: the same, and the value at the codes' middle.
template <typename Stage>
__device__ __forceinline__ u32 scale_and_middle(const u8* rows, u32 step) {
  const u32 both = word_at(rows + 4 * step);
  const float scale = f16_to_f32(u16(both));
  return pack_f16x2(scale, fmaf(Stage::MIDDLE, scale, f16_to_f32(u16(both >> 16))));
}

template <typename Fragment>
__device__ __forceinline__ void f16_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, SignedStage<Fragment>) {
  typedef SignedStage<Fragment> Stage;
  typedef typename Stage::Codes Codes;
  const u32 group = lane / 4;
  const uint2 words = *(const uint2*)(m_tile + 16 * lane + 8 * step);
  const u8* rows = m_tile + Stage::ROWS_AT;
  Codes codes;
  codes.load(m_tile + Stage::HIGH_AT, lane);
  // Codes of the other sign bit are as much more as half their range.
  constexpr u32 HALF = 1 << (Codes::BITS - 1), SIGNS = HALF * 0x01010101u, CENTRE = 0x64006400u | HALF * 0x00010001u;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u32 bytes[2];
    codes.bytes(bytes, half ? words.y : words.x, 2 * step + half);
    if (Fragment::F16_MINS) {
      const u32 low = scale_and_middle<Stage>(rows + 8 * group, step), high = scale_and_middle<Stage>(rows + 8 * group + 64, step);
      shifted_operands(a[half], bytes[0] ^ SIGNS, bytes[1] ^ SIGNS, CENTRE, low, high);
    } else {
      scaled_operands(a[half], bytes[0] ^ SIGNS, bytes[1] ^ SIGNS, CENTRE, step_scale(rows, group, step), step_scale(rows, group + 8, step));
    }
  }
}

__device__ __forceinline__ void f16_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_k4) {
  const u32 group = lane / 4;
  const uint2 codes = *(const uint2*)(m_tile + 16 * lane + 8 * step);
  const u32 low = scale_and_centre<8>(m_tile + Weights_k4::ROWS_AT + 8 * group, step),
            high = scale_and_centre<8>(m_tile + Weights_k4::ROWS_AT + 8 * group + 64, step);
  constexpr u32 NIBBLES = 0x0f0f0f0fu, CENTRE = 0x64086408u;
  shifted_operands(a[0], codes.x & NIBBLES, codes.x >> 4 & NIBBLES, CENTRE, low, high);
  shifted_operands(a[1], codes.y & NIBBLES, codes.y >> 4 & NIBBLES, CENTRE, low, high);
}

__device__ __forceinline__ void f16_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_k5) {
  const u32 group = lane / 4;
  const uint2 codes = *(const uint2*)(m_tile + 16 * lane + 8 * step);
  const u32 fifths = word_at(m_tile + Weights_k5::HIGH_AT + 4 * lane) >> 4 * step;
  const u32 low = scale_and_centre<16>(m_tile + Weights_k5::ROWS_AT + 8 * group, step),
            high = scale_and_centre<16>(m_tile + Weights_k5::ROWS_AT + 8 * group + 64, step);
  constexpr u32 NIBBLES = 0x0f0f0f0fu, FIFTHS = 0x10101010u, CENTRE = 0x64106410u;
  shifted_operands(a[0], (codes.x & NIBBLES) | (fifths << 4 & FIFTHS), (codes.x >> 4 & NIBBLES) | (fifths << 3 & FIFTHS),
                   CENTRE, low, high);
  shifted_operands(a[1], (codes.y & NIBBLES) | (fifths << 2 & FIFTHS), (codes.y >> 4 & NIBBLES) | (fifths << 1 & FIFTHS),
                   CENTRE, low, high);
}

// K6 has a scale per 16 inputs, so each product its own.
__device__ __forceinline__ void f16_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_k6) {
  const u32 group = lane / 4;
  const uint2 codes = *(const uint2*)(m_tile + 16 * lane + 8 * step);
  const u32 tops = word_at(m_tile + Weights_k6::HIGH_AT + 8 * lane + 4 * step);
  const u8* rows = m_tile + Weights_k6::ROWS_AT + 4 * group;
  const u8* scales = m_tile + Weights_k6::SCALES_AT + 2 * group;
  const u32 low_scales = word_at(rows) ^ 0x80808080u, high_scales = word_at(rows + 32) ^ 0x80808080u;
  const float low_d = f16_to_f32(*(const u16*)scales), high_d = f16_to_f32(*(const u16*)(scales + 16));
  // Codes of the other sign bit are codes + 32.
  constexpr u32 NIBBLES = 0x0f0f0f0fu, TOPS = 0x30303030u, SIGNS = 0x20202020u, CENTRE = 0x64206420u;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 nibbles = half ? codes.y : codes.x, top = tops >> 4 * half;
    const float low = low_d * signed_byte_value(low_scales, 2 * step + half);
    const float high = high_d * signed_byte_value(high_scales, 2 * step + half);
    scaled_operands(a[half], ((nibbles & NIBBLES) | (top << 4 & TOPS)) ^ SIGNS,
                    ((nibbles >> 4 & NIBBLES) | (top << 2 & TOPS)) ^ SIGNS, CENTRE, pack_f16x2(low, low), pack_f16x2(high, high));
  }
}

// K2: a row's scale of 16 inputs and its value where the code is 2.
__device__ __forceinline__ u32 k2_scale_and_centre(u32 d, u32 byte) {
  const float scale = f16_to_f32(u16(d)) * float(byte & 15), least = f16_to_f32(u16(d >> 16)) * float(byte >> 4);
  return pack_f16x2(scale, fmaf(2.0f, scale, -least));
}
__device__ __forceinline__ void f16_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_k2) {
  const u32 group = lane / 4;
  TwoBitCodes codes;
  codes.load(m_tile, lane);
  const u8* rows = m_tile + Weights_k2::ROWS_AT + 4 * group + 2 * step;
  const u8* scales = m_tile + Weights_k2::SCALES_AT + 4 * group;
  constexpr u32 CENTRE = 0x64026402u;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u32 bytes[2];
    codes.operands(bytes, 2 * step + half);
    shifted_operands(a[half], bytes[0], bytes[1], CENTRE, k2_scale_and_centre(word_at(scales), rows[half]),
                     k2_scale_and_centre(word_at(scales + 32), rows[32 + half]));
  }
}

// T4, F4, T3, T2 and T1 have their entries of the table as signed bytes. Bytes of the other sign bit are entries + 128.
constexpr u32 ENTRY_SIGNS = 0x80808080u, ENTRY_CENTRE = 0x64806480u;

// A row's scale in f16, twice.
__device__ __forceinline__ u32 t4_scale(const u8* m_tile, u32 step, u32 row) {
  const CodeTable& table = *(const CodeTable*)(m_tile + Weights_t4::TABLE_AT);
  const float scale = row_scale(m_tile + Weights_t4::SCALES_AT, table, row) * float(int(i8(m_tile[Weights_t4::ROWS_AT + 2 * row + step])));
  return pack_f16x2(scale, scale);
}
__device__ __forceinline__ void f16_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_t4) {
  const CodeTable& table = *(const CodeTable*)(m_tile + Weights_t4::TABLE_AT);
  const uint2 words = *(const uint2*)(m_tile + 16 * lane + 8 * step);
  const u32 low = t4_scale(m_tile, step, lane / 4), high = t4_scale(m_tile, step, lane / 4 + 8);
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u32 entries[2];
    table_nibbles(entries, half ? words.y : words.x, table.values);
    scaled_operands(a[half], entries[0] ^ ENTRY_SIGNS, entries[1] ^ ENTRY_SIGNS, ENTRY_CENTRE, low, high);
  }
}

// Of F4, T3, T2 and T1, of 16 inputs.
template <typename Stage>
__device__ __forceinline__ u32 table_scale(const u8* m_tile, u32 sixteen, u32 row) {
  const CodeTable& table = *(const CodeTable*)(m_tile + Stage::TABLE_AT);
  const float scale =
      row_scale(m_tile + Stage::SCALES_AT, table, row) * Stage::sub_scale(Stage::sub_scales(m_tile, row), sixteen, table);
  return pack_f16x2(scale, scale);
}
template <typename Fragment>
__device__ __forceinline__ void f16_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, TableStage<Fragment>) {
  typedef TableStage<Fragment> Stage;
  const CodeTable& table = *(const CodeTable*)(m_tile + Stage::TABLE_AT);
  typename Stage::Codes codes;
  codes.load(m_tile, m_tile + Stage::HIGH_AT, lane);
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 low = table_scale<Stage>(m_tile, 2 * step + half, lane / 4), high = table_scale<Stage>(m_tile, 2 * step + half, lane / 4 + 8);
    u32 entries[2];
    codes.operands(entries, 2 * step + half, table);
    scaled_operands(a[half], entries[0] ^ ENTRY_SIGNS, entries[1] ^ ENTRY_SIGNS, ENTRY_CENTRE, low, high);
  }
}

// B operands of the same inputs, of the token whose row in shared memory this is: one vector, or two halves of one where products
// are of 16 neighbours. Rows lie so that neighbours meet all banks: TOKEN_PADDING bytes behind a multiple of 128.
template <typename Format>
struct TokenOperands {
  static constexpr u32 TOKEN_PADDING = 64;
  static __device__ __forceinline__ void load(u32 (&b)[4], const u8* inputs, u32 quad) {
    const uint4 held = *(const uint4*)(inputs + 16 * quad);
    b[0] = held.x, b[1] = held.y, b[2] = held.z, b[3] = held.w;
  }
};
struct SixteenOperands {
  static constexpr u32 TOKEN_PADDING = 32;
  static __device__ __forceinline__ void load(u32 (&b)[4], const u8* inputs, u32 quad) {
    const uint2 first = *(const uint2*)(inputs + 8 * quad), second = *(const uint2*)(inputs + 32 + 8 * quad);
    b[0] = first.x, b[1] = first.y, b[2] = second.x, b[3] = second.y;
  }
};
template <>
struct TokenOperands<Weights_k2> : SixteenOperands {};
template <>
struct TokenOperands<Weights_k6> : SixteenOperands {};
template <>
struct TokenOperands<Weights_f4> : SixteenOperands {};
template <>
struct TokenOperands<Weights_t3> : SixteenOperands {};
template <>
struct TokenOperands<Weights_t2> : SixteenOperands {};
template <>
struct TokenOperands<Weights_t1> : SixteenOperands {};
