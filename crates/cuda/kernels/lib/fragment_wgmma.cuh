// Fragments to A operands of wgmma in f16: as lib/fragment_f16.cuh, with fewer instructions. Of every four codes, one per byte of a
// word, the first and third are a pair, then the second and fourth: they lie 16 bits apart as they are, and one instruction puts
// both behind 1024's exponent. lib/token_tiles.cuh has the tokens' inputs in the same order.
#pragma once
#include "lib/fragment_f16.cuh"
#include "lib/reduce.cuh"

// (word & MASK) ^ EXPONENT, in one instruction.
template <u32 MASK, u32 EXPONENT>
__device__ __forceinline__ u32 masked(u32 word) {
  u32 found;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(found) : "r"(word), "n"(MASK), "r"(EXPONENT));
  return found;
}

// Codes of 8 bits whose centre is CENTRE (of both halves, 1024 included).
template <u32 CENTRE>
__device__ __forceinline__ void byte_pairs(u32& even, u32& odd, u32 codes) {
  even = sub_f16x2(masked<0x00ff00ffu, CENTRE>(codes), CENTRE);
  odd = sub_f16x2(masked<0x00ff00ffu, CENTRE>(codes >> 8), CENTRE);
}

// Codes of 4 bits, in the low nibbles and in the high ones, with SIGN times 8 added and taken away again: signed nibbles, or those
// that are less by 8. High ones are 16 times as much until a multiplication, which is exact.
template <u32 SIGN>
__device__ __forceinline__ void nibble_pairs(u32 (&low)[2], u32 (&high)[2], u32 codes) {
  constexpr u32 LOW = 0x64006400u | SIGN * 0x00080008u, HIGH = 0x64006400u | SIGN * 0x00800080u;
  constexpr u32 SIXTEENTH = 0x2c002c00u, MINUS_72 = 0xd480d480u;
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    const u32 word = i ? codes >> 8 : codes;
    low[i] = sub_f16x2(masked<0x000f000fu, LOW>(word), 0x64086408u);
    high[i] = fma_f16x2(masked<0x00f000f0u, HIGH>(word), SIXTEENTH, MINUS_72);
  }
}

// A lane's words of a step, of the four it has in a stage: as one load for both steps, which meets all banks.
__device__ __forceinline__ uint2 step_words(const u8* m_tile, u32 lane, u32 step) {
  const uint4 both = *(const uint4*)(m_tile + 16 * lane);
  return step ? make_uint2(both.z, both.w) : make_uint2(both.x, both.y);
}

// Lanes of a quad multiply the same two rows, `group` and `group + 8`: what they all need of both, such as scales, a lane works out for one
// and asks its neighbours for the others'. Here of two steps ..
struct StepOfQuad {
  u32 own;

  template <typename F>
  __device__ __forceinline__ StepOfQuad(u32 lane, F f) : own(f(lane / 4 + lane % 4 / 2 * 8, lane % 2)) {}
  __device__ __forceinline__ u32 of(u32 lane, u32 row, u32 step) const { return __shfl_sync(ALL_LANES, own, (lane & ~3u) + 2 * row + step); }
};
// .. and here of the blocks of 16 inputs, of which the first two lanes have one and the last two the other.
struct BlockOfQuad {
  u32 of[2];

  template <typename F>
  __device__ __forceinline__ BlockOfQuad(u32 lane, F f) {
    const u32 own = f(lane / 4 + lane % 2 * 8, lane % 4 / 2);
#pragma unroll
    for (u32 row = 0; row < 2; row++) of[row] = __shfl_sync(ALL_LANES, own, (lane & ~1u) + row);
  }
};

// Operands of a step of 32 inputs: two products of 16.
__device__ __forceinline__ void wgmma_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_q8) {
  const u32 group = lane / 4;
  const uint4 codes = *(const uint4*)(m_tile + LANES_BYTES * step + 16 * lane);
  const u32 low = step_scale(m_tile + Weights_q8::ROWS_AT, group, step),
            high = step_scale(m_tile + Weights_q8::ROWS_AT, group + 8, step);
  // Bytes of the other sign bit are codes + 128.
  constexpr u32 CENTRE = 0x64806480u;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u32 pairs[4];
    byte_pairs<CENTRE>(pairs[0], pairs[2], half ? codes.z : codes.x);
    byte_pairs<CENTRE>(pairs[1], pairs[3], half ? codes.w : codes.y);
#pragma unroll
    for (u32 i = 0; i < 4; i++) a[half][i] = mul_f16x2(pairs[i], i % 2 ? high : low);
  }
}

template <typename Fragment>
__device__ __forceinline__ void wgmma_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, SignedStage<Fragment>) {
  typedef SignedStage<Fragment> Stage;
  typedef typename Stage::Codes Codes;
  const u32 group = lane / 4;
  const uint2 words = step_words(m_tile, lane, step);
  const u8* rows = m_tile + Stage::ROWS_AT;
  Codes codes;
  codes.load(m_tile + Stage::HIGH_AT, lane);
  u32 scales[2], middles[2];
  const StepOfQuad quad(lane, [&](u32 row, u32 of_step) { return Fragment::F16_MINS ? scale_and_middle<Stage>(rows + 8 * row, of_step) : 0; });
#pragma unroll
  for (u32 row = 0; row < 2; row++) {
    if (Fragment::F16_MINS) {
      const u32 both = quad.of(lane, row, step);
      scales[row] = both_halves(both, 0);
      middles[row] = both_halves(both, 1);
    } else {
      scales[row] = step_scale(rows, group + 8 * row, step);
    }
  }
  // Codes of the other sign bit are as much more as half their range.
  constexpr u32 CENTRE = 0x64006400u | (1 << (Codes::BITS - 1)) * 0x00010001u;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 word = half ? words.y : words.x;
    u32 pairs[2][2];  // of rows `group` and `group + 8`
    if (Codes::BITS == 4) {
      nibble_pairs<1>(pairs[0], pairs[1], word);
    } else {
      u32 bytes[2];
      codes.bytes(bytes, word, 2 * step + half);
      byte_pairs<CENTRE>(pairs[0][0], pairs[0][1], bytes[0]);
      byte_pairs<CENTRE>(pairs[1][0], pairs[1][1], bytes[1]);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 row = i % 2, codes_of = pairs[row][i / 2];
      a[half][i] = Fragment::F16_MINS ? fma_f16x2(codes_of, scales[row], middles[row]) : mul_f16x2(codes_of, scales[row]);
    }
  }
}

__device__ __forceinline__ void wgmma_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_k4) {
  const uint2 codes = step_words(m_tile, lane, step);
  const StepOfQuad quad(lane, [&](u32 row, u32 of_step) { return scale_and_centre<8>(m_tile + Weights_k4::ROWS_AT + 8 * row, of_step); });
  const u32 low_row = quad.of(lane, 0, step), high_row = quad.of(lane, 1, step);
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u32 low[2], high[2];
    nibble_pairs<0>(low, high, half ? codes.y : codes.x);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      a[half][2 * i] = fma_f16x2(low[i], both_halves(low_row, 0), both_halves(low_row, 1));
      a[half][2 * i + 1] = fma_f16x2(high[i], both_halves(high_row, 0), both_halves(high_row, 1));
    }
  }
}

__device__ __forceinline__ void wgmma_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_k5) {
  const uint2 codes = step_words(m_tile, lane, step);
  const u32 fifths = word_at(m_tile + Weights_k5::HIGH_AT + 4 * lane) >> 4 * step;
  const StepOfQuad quad(lane, [&](u32 row, u32 of_step) { return scale_and_centre<16>(m_tile + Weights_k5::ROWS_AT + 8 * row, of_step); });
  const u32 of_rows[2] = {quad.of(lane, 0, step), quad.of(lane, 1, step)};
  constexpr u32 NIBBLES = 0x0f0f0f0fu, FIFTHS = 0x10101010u;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 nibbles = half ? codes.y : codes.x;
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
      const u32 fives = (nibbles >> 4 * row & NIBBLES) | (fifths << (4 - 2 * half - row) & FIFTHS);
      // Less by 16, with no sign to turn.
      const u32 even = sub_f16x2(masked<0x00ff00ffu, 0x64006400u>(fives), 0x64106410u),
                odd = sub_f16x2(masked<0x00ff00ffu, 0x64006400u>(fives >> 8), 0x64106410u);
      a[half][row] = fma_f16x2(even, both_halves(of_rows[row], 0), both_halves(of_rows[row], 1));
      a[half][row + 2] = fma_f16x2(odd, both_halves(of_rows[row], 0), both_halves(of_rows[row], 1));
    }
  }
}

// Fragments of K6 have 16 neighbours together, not 32: a lane reads the codes that are its own in the others' order. Of its step's two
// scales it needs one.
__device__ __forceinline__ void wgmma_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_k6) {
  const u32 group = lane / 4, quad = lane % 4, block = quad / 2;
  // Of both steps, so that the other one finds it worked out.
  const BlockOfQuad of_rows(lane, [&](u32 row, u32 of_block) {
    const u32 words = word_at(m_tile + Weights_k6::ROWS_AT + 4 * row) ^ 0x80808080u;
    const float d = f16_to_f32(*(const u16*)(m_tile + Weights_k6::SCALES_AT + 2 * row));
    return pack_f16x2(d * signed_byte_value(words, of_block), d * signed_byte_value(words, 2 + of_block));
  });
  // Codes of the other sign bit are codes + 32.
  constexpr u32 NIBBLES = 0x0f0f0f0fu, TOPS = 0x30303030u, CENTRE = 0x64206420u;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 owner = 4 * group + (2 * quad + half) % 4;
    const u32 nibbles = word_at(m_tile + 16 * owner + 8 * step + 4 * block);
    const u32 top = word_at(m_tile + Weights_k6::HIGH_AT + 8 * owner + 4 * step) >> 4 * block;
    u32 pairs[4];
    byte_pairs<CENTRE>(pairs[0], pairs[2], (nibbles & NIBBLES) | (top << 4 & TOPS));
    byte_pairs<CENTRE>(pairs[1], pairs[3], (nibbles >> 4 & NIBBLES) | (top << 2 & TOPS));
#pragma unroll
    for (u32 i = 0; i < 4; i++) a[half][i] = mul_f16x2(pairs[i], both_halves(of_rows.of[i % 2], step));
  }
}

// K2 lies as K6 does.
__device__ __forceinline__ void wgmma_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_k2) {
  const u32 group = lane / 4, quad = lane % 4, sixteen = 2 * step + quad / 2;
  const BlockOfQuad of_rows(lane, [&](u32 row, u32 block) {
    return k2_scale_and_centre(word_at(m_tile + Weights_k2::SCALES_AT + 4 * row), m_tile[Weights_k2::ROWS_AT + 4 * row + 2 * step + block]);
  });
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    TwoBitCodes codes;
    codes.load(m_tile, 4 * group + (2 * quad + half) % 4);
    u32 bytes[2];
    codes.operands(bytes, sixteen);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 row = i % 2, word = i / 2 ? bytes[row] >> 8 : bytes[row];
      // Less by 2, with no sign to turn.
      const u32 centred = sub_f16x2(masked<0x00ff00ffu, 0x64006400u>(word), 0x64026402u);
      a[half][i] = fma_f16x2(centred, both_halves(of_rows.of[row], 0), both_halves(of_rows.of[row], 1));
    }
  }
}

// T4, F4, T3, T2 and T1 have their entries of the table as signed bytes: of rows `group` and `group + 8`, to be scaled.
__device__ __forceinline__ void entry_operands(u32 (&a)[4], const u32 (&entries)[2], u32 low, u32 high) {
  u32 pairs[4];
  byte_pairs<ENTRY_CENTRE>(pairs[0], pairs[2], entries[0]);
  byte_pairs<ENTRY_CENTRE>(pairs[1], pairs[3], entries[1]);
#pragma unroll
  for (u32 i = 0; i < 4; i++) a[i] = mul_f16x2(pairs[i], i % 2 ? high : low);
}

__device__ __forceinline__ void wgmma_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, Weights_t4) {
  const CodeTable& table = *(const CodeTable*)(m_tile + Weights_t4::TABLE_AT);
  const uint2 words = step_words(m_tile, lane, step);
  const StepOfQuad quad(lane, [&](u32 row, u32 of_step) { return t4_scale(m_tile, of_step, row); });
  const u32 low = quad.of(lane, 0, step), high = quad.of(lane, 1, step);
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u32 entries[2];
    table_nibbles(entries, half ? words.y : words.x, table.values);
    entry_operands(a[half], entries, low, high);
  }
}

// F4, T3, T2 and T1 lie as K6 does.
template <typename Fragment>
__device__ __forceinline__ void wgmma_operands(u32 (&a)[2][4], const u8* m_tile, u32 step, u32 lane, TableStage<Fragment>) {
  typedef TableStage<Fragment> Stage;
  const u32 group = lane / 4, quad = lane % 4, sixteen = 2 * step + quad / 2;
  const CodeTable& table = *(const CodeTable*)(m_tile + Stage::TABLE_AT);
  const BlockOfQuad scales(lane, [&](u32 row, u32 block) { return table_scale<Stage>(m_tile, 2 * step + block, row); });
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    typename Stage::Codes codes;
    codes.load(m_tile, m_tile + Stage::HIGH_AT, 4 * group + (2 * quad + half) % 4);
    u32 entries[2];
    codes.operands(entries, sixteen, table);
    entry_operands(a[half], entries, scales.of[0], scales.of[1]);
  }
}
