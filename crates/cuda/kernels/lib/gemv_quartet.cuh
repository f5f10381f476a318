// Products of fragments whose scales are unpacked or codes looked up with int8 activations (lib/gemv_fragment.cuh), four steps of 32 inputs
// at a time: decode waits for their instructions.
//
// The tensor core has eight columns. One or two tokens leave room for four steps side by side, four tokens for two: the activations
// of each step lie in columns of their own, with zeros in all others, and products of all of them add up in the same registers. So
// every lane ends up with the sums of one step, and what floats cost is divided by as many. Steps go by fours, quartets, whose places
// have sums of their own until the end: a row has the same bits however many tokens there are.
//
// Columns without a token repeat the last one's activations; nobody reads their sums.
#pragma once
#include "lib/gemv_step.cuh"

constexpr u32 QUARTET = 4, QUARTET_INPUTS = 32 * QUARTET;

// The activations of a lane. A quartet takes TURNS, each with ABREAST of its steps.
template <int ROWS>
struct QuartetInput {
  static constexpr u32 ABREAST = ROWS <= 2 ? 4 : ROWS == 4 ? 2 : 1, TURNS = QUARTET / ABREAST;
  const u8* codes;
  const float *scales, *sums;
  // Of a turn's steps: the one whose activations the lane has in its column, and the one whose sums it holds.
  u32 given, held;
  u32 x[ABREAST][2];  // zeros but in `given`

  __device__ __forceinline__ QuartetInput(const Input& in, u32 lane) {
    constexpr u32 COLUMNS = 8 / ABREAST, PAIRS = COLUMNS / 2;
    const u32 group = lane / 4, quad = lane % 4;
    given = group / COLUMNS;
    held = quad / PAIRS;
    codes = in.values + min(group % COLUMNS, u32(ROWS - 1)) * in.stride;
    const u32 of_held = held * ROWS + (ROWS == 1 ? 0 : 2 * (quad % PAIRS));
    scales = in.scales + of_held;
    sums = in.sums + of_held;
#pragma unroll
    for (u32 step = 0; step < ABREAST; step++) x[step][0] = x[step][1] = 0;
  }

  // Of the two columns whose sums this lane holds, in its step of a turn that starts at `step`.
  static __device__ __forceinline__ float2 pair(const float* steps, u32 step) {
    if (ROWS == 1) return make_float2(steps[step], 0);
    return *(const float2*)(steps + step * ROWS);
  }

  // Calls `product(step, x)` with the activations of each step of a turn; `mine` are the lane's of the quartet's first step, of which it
  // has 8 bytes, or 4 bytes of each SIXTEEN.
  template <bool SIXTEENS, typename Product>
  __device__ __forceinline__ void each_step(u32 turn, const u8* mine, Product product) {
#pragma unroll
    for (u32 i = 0; i < ABREAST; i++) {
      const u32 step = ABREAST * turn + i;
      if (ABREAST == 1 || i == given) {
        const u8* from = mine + 32 * step;
        const uint2 both = SIXTEENS ? make_uint2(*(const u32*)from, *(const u32*)(from + 16)) : *(const uint2*)from;
        x[i][0] = both.x;
        x[i][1] = both.y;
      }
      product(step, x[i]);
    }
  }
};

// Sums of a warp over an M-tile: rows group and group + 8 of the columns and steps that QuartetInput says.
template <int ROWS>
struct QuartetSums {
  static constexpr u32 ABREAST = QuartetInput<ROWS>::ABREAST, TURNS = QuartetInput<ROWS>::TURNS;
  float c[TURNS][4] = {};

  __device__ __forceinline__ void add(u32 turn, const int (&d)[4], float low, float high, float2 scale) {
    float(&sum)[4] = c[turn];
    sum[0] = fmaf(float(d[0]), low * scale.x, sum[0]);
    sum[2] = fmaf(float(d[2]), high * scale.x, sum[2]);
    if (ROWS == 1) return;
    sum[1] = fmaf(float(d[1]), low * scale.y, sum[1]);
    sum[3] = fmaf(float(d[3]), high * scale.y, sum[3]);
  }

  __device__ __forceinline__ void subtract(u32 turn, float low, float high, float2 value) {
    float(&sum)[4] = c[turn];
    sum[0] = fmaf(-low, value.x, sum[0]);
    sum[2] = fmaf(-high, value.x, sum[2]);
    if (ROWS == 1) return;
    sum[1] = fmaf(-low, value.y, sum[1]);
    sum[3] = fmaf(-high, value.y, sum[3]);
  }

  // (first + second) + (third + fourth) of a quartet's places.
  __device__ __forceinline__ float of_places(u32 i) const {
    if (ABREAST == 1) return (c[0][i] + c[1 % TURNS][i]) + (c[2 % TURNS][i] + c[3 % TURNS][i]);
    if (ABREAST == 2) {
      const float even = c[0][i] + __shfl_xor_sync(ALL_LANES, c[0][i], 2);
      return even + (c[1 % TURNS][i] + __shfl_xor_sync(ALL_LANES, c[1 % TURNS][i], 2));
    }
    const float pair = c[0][i] + __shfl_xor_sync(ALL_LANES, c[0][i], 1);
    return pair + __shfl_xor_sync(ALL_LANES, pair, 2);
  }

  // To `[ROWS, 16]`.
  __device__ __forceinline__ void store(float* to, u32 lane) const {
    const float first[2] = {of_places(0), of_places(2)}, second[2] = {ROWS == 1 ? 0 : of_places(1), ROWS == 1 ? 0 : of_places(3)};
    const u32 group = lane / 4, column = 2 * (lane % 4);
    if (column >= ROWS) return;
    to += column * 16 + group;
    to[0] = first[0];
    to[8] = first[1];
    if (ROWS == 1) return;
    to[16] = second[0];
    to[24] = second[1];
  }
};

__device__ __forceinline__ float f16_at(const u8* at) { return f16_to_f32(*(const u16*)at); }

// Word `i` of four, for unrolled loops.
__device__ __forceinline__ u32 word(const uint4& v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ u32 byte_of(const uint4& v, u32 i) { return word(v, i / 4) >> 8 * (i % 4) & 255; }

// Two bytes of a row's sub-scales in a K-block of 256 inputs: those of the lane's step.
template <int ROWS>
struct HeldBytes {
  uint4 all;
  const u8* held;

  __device__ __forceinline__ HeldBytes(const u8* row, const QuartetInput<ROWS>& in) : all(), held(row + 2 * in.held) {
    if (in.ABREAST == 1) all = *(const uint4*)row;
  }
  __device__ __forceinline__ u32 operator()(u32 quartet, u32 turn) const {
    const u32 at = 2 * QUARTET * quartet + 2 * QuartetInput<ROWS>::ABREAST * turn;
    return QuartetInput<ROWS>::ABREAST == 1 ? word(all, at / 4) >> 8 * (at % 4) : *(const u16*)(held + at);
  }
};

// The same, or ones where a K-block has no sub-scales.
template <typename Fragment, int ROWS, bool HAS_SUB_SCALES = Fragment::HAS_SUB_SCALES>
struct HeldSubScales : HeldBytes<ROWS> {
  using HeldBytes<ROWS>::HeldBytes;
};
template <typename Fragment, int ROWS>
struct HeldSubScales<Fragment, ROWS, false> {
  __device__ __forceinline__ HeldSubScales(const u8*, const QuartetInput<ROWS>&) {}
  __device__ __forceinline__ u32 operator()(u32, u32) const { return 0x0101; }
};

// What formats of these products have in common.
template <typename Fragment>
struct Quartets : Fragment {
  template <int ROWS>
  using Lane = QuartetInput<ROWS>;
  template <int ROWS>
  using Sums = QuartetSums<ROWS>;
  static constexpr u32 K_BLOCKS_PER_STAGE = 1;
};

// Q4_K, and Q5_K with its fifth bits.
template <typename Fragment>
struct k45_mma : Quartets<Fragment> {
  static constexpr bool HAS_MINS = true, FIFTH = Fragment::HIGH_BITS == 1;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(QuartetSums<ROWS>& sums, const u8* k_block, QuartetInput<ROWS>& in, u32 first, u32 lane) {
    const u8* rows = k_block + Fragment::SUB_SCALES + 16 * (lane / 4);
    const HeldBytes<ROWS> low(rows, in), high(rows + 128, in);
    const u8* scales = k_block + Fragment::SCALES + lane / 4 * 4;
    const u32 low_d = *(const u32*)scales, high_d = *(const u32*)(scales + 32);
    const float d_low = low_f16(low_d), d_high = low_f16(high_d), min_low = high_f16(low_d), min_high = high_f16(high_d);
#pragma unroll
    for (u32 quartet = 0; quartet < 2; quartet++) {
      const u8* x = in.codes + first + QUARTET_INPUTS * quartet + 8 * (lane % 4);
#pragma unroll
      for (u32 turn = 0; turn < in.TURNS; turn++) {
        int d[4] = {0, 0, 0, 0};
        in.template each_step<false>(turn, x, [&](u32 step, const u32 (&b)[2]) {
          const u32 part = 2 * quartet + step / 2, of = step % 2;
          const uint4 codes = *(const uint4*)(k_block + Fragment::PART_LOW * part + 16 * lane);
          const u32 w[2] = {of ? codes.z : codes.x, of ? codes.w : codes.y};
          u32 a[4] = {w[0] & 0x0f0f0f0fu, w[0] >> 4 & 0x0f0f0f0fu, w[1] & 0x0f0f0f0fu, w[1] >> 4 & 0x0f0f0f0fu};
          if (FIFTH) {
            const u32 fifth = *(const u32*)(k_block + Fragment::HIGH + Fragment::PART_HIGH * part + 4 * lane);
#pragma unroll
            for (u32 i = 0; i < 4; i++) a[i] |= (fifth >> (4 * of + i) & 0x01010101u) << 4;
          }
          mma_u8s8(d, a, b);
        });
        const u32 low_bytes = low(quartet, turn), high_bytes = high(quartet, turn), at = first / 32 + QUARTET * quartet + in.ABREAST * turn;
        sums.add(turn, d, d_low * float(low_bytes & 255), d_high * float(high_bytes & 255), in.pair(in.scales, at));
        sums.subtract(turn, min_low * float(low_bytes >> 8 & 255), min_high * float(high_bytes >> 8 & 255), in.pair(in.sums, at));
      }
    }
  }
};

// Operands of 16 inputs and of the next 16, which lie so that they are those of 32.
__device__ __forceinline__ void mma_s8_halves(int (&d)[4], const u32 (&a)[2][2], const u32 (&b)[2]) {
  const u32 both[4] = {a[0][0], a[0][1], a[1][0], a[1][1]};
  mma_s8(d, both, b);
}

// Q2_K has a scale and a minimum of four bits per 16 inputs: a code times its scale is a byte still. Minimums are multiplied as codes; where
// a lane holds one step of several it is less work to multiply them by sums of activations, which the tensor core adds up. Both are exact.
struct k2_mma : Quartets<k2_fragment> {
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(QuartetSums<ROWS>& sums, const u8* k_block, QuartetInput<ROWS>& in, u32 first, u32 lane) {
    constexpr bool BY_SUMS = QuartetInput<ROWS>::ABREAST > 1;
    const u8* rows = k_block + SUB_SCALES + 16 * (lane / 4);
    const uint4 low = *(const uint4*)rows, high = *(const uint4*)(rows + 128);
    const HeldBytes<ROWS> low_held(rows, in), high_held(rows + 128, in);
    const u8* scales = k_block + SCALES + lane / 4 * 4;
    const u32 low_d = *(const u32*)scales, high_d = *(const u32*)(scales + 32);
#pragma unroll
    for (u32 quartet = 0; quartet < 2; quartet++) {
      const u8* x = in.codes + first + QUARTET_INPUTS * quartet + 4 * (lane % 4);
#pragma unroll
      for (u32 turn = 0; turn < in.TURNS; turn++) {
        int scaled[4] = {0, 0, 0, 0}, least[4] = {0, 0, 0, 0}, whole[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        in.template each_step<true>(turn, x, [&](u32 step, const u32 (&b)[2]) {
          const u32 part = 2 * quartet + step / 2;
          TwoBitCodes codes;
          codes.load(k_block + PART_LOW * part, lane);
          const u32 ones[2] = {0x01010101u, 0x01010101u};
          u32 a[2][2], mins[2][2];
#pragma unroll
          for (u32 half = 0; half < 2; half++) {
            const u32 group = step % 2 * 2 + half, low_byte = byte_of(low, 4 * part + group), high_byte = byte_of(high, 4 * part + group);
            codes.operands(a[half], group);
            a[half][0] *= low_byte & 15;
            a[half][1] *= high_byte & 15;
            mins[half][0] = (low_byte >> 4) * 0x01010101u;
            mins[half][1] = (high_byte >> 4) * 0x01010101u;
            if (BY_SUMS) mma_s8_k16(whole[half], ones, b[half]);
          }
          mma_s8_halves(scaled, a, b);
          if (!BY_SUMS) mma_s8_halves(least, mins, b);
        });
        if (BY_SUMS) {
          const u32 low_bytes = low_held(quartet, turn), high_bytes = high_held(quartet, turn);
#pragma unroll
          for (u32 i = 0; i < 4; i++) {
            const u32 bytes = i < 2 ? low_bytes : high_bytes;
            least[i] = whole[0][i] * int(bytes >> 4 & 15) + whole[1][i] * int(bytes >> 12 & 15);
          }
        }
        const float2 scale = in.pair(in.scales, first / 32 + QUARTET * quartet + in.ABREAST * turn);
        sums.add(turn, scaled, low_f16(low_d), low_f16(high_d), scale);
        sums.add(turn, least, -high_f16(low_d), -high_f16(high_d), scale);
      }
    }
  }
};

// Operands of 16 inputs of T3, T2 and T1, and of K6 below; `factor` times as much is what codes stand for.
template <typename Fragment>
struct SixteensCodes {
  CodeTable table;

  __device__ __forceinline__ explicit SixteensCodes(const u8* k_block) : table(*(const CodeTable*)(k_block + Fragment::TABLE)) {}
  __device__ __forceinline__ float factor() const { return table.factor; }
  __device__ __forceinline__ void operands(u32 (&a)[2], const u8* k_block, u32 part, u32 group, u32 lane) const {
    TableCodes<Fragment> codes;
    codes.load(k_block + Fragment::PART_LOW * part, k_block + Fragment::HIGH + Fragment::PART_HIGH * part, lane);
    codes.operands(a, group, table);
  }
};
template <>
struct SixteensCodes<k6_fragment> {
  __device__ __forceinline__ explicit SixteensCodes(const u8*) {}
  __device__ __forceinline__ float factor() const { return 0.25f; }
  __device__ __forceinline__ void operands(u32 (&a)[2], const u8* k_block, u32 part, u32 group, u32 lane) const {
    const uint4 nibbles = *(const uint4*)(k_block + k6_fragment::PART_LOW * part + 16 * lane);
    const uint2 pairs = *(const uint2*)(k_block + k6_fragment::HIGH + k6_fragment::PART_HIGH * part + 8 * lane);
    const u32 w = word(nibbles, group), top = group < 2 ? pairs.x : pairs.y, shift = 4 * (group % 2);
    a[0] = (w << 2 & 0x3c3c3c3cu) | (top << (6 - shift) & 0xc0c0c0c0u);
    a[1] = (w >> 2 & 0x3c3c3c3cu) | (top << (4 - shift) & 0xc0c0c0c0u);
  }
};

// K6 and T3, and T2 and T1, whose sub-scales are ones: codes of 16 inputs with a signed scale. Two of them share an activation scale:
// their sums, times their own scales, join as integers.
template <typename Fragment>
struct sixteens_mma : Quartets<Fragment> {
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(QuartetSums<ROWS>& sums, const u8* k_block, QuartetInput<ROWS>& in, u32 first, u32 lane) {
    const SixteensCodes<Fragment> codes(k_block);
    const u8* rows = k_block + Fragment::SUB_SCALES + 16 * (lane / 4);
    const HeldSubScales<Fragment, ROWS> low(rows, in), high(rows + 128, in);
#pragma unroll
    for (u32 quartet = 0; quartet < 2; quartet++) {
      const u8* scales = scales_of_part<Fragment>(k_block, 2 * quartet) + lane / 4 * 2;
      const float d_low = codes.factor() * f16_at(scales), d_high = codes.factor() * f16_at(scales + 16);
      const u8* x = in.codes + first + QUARTET_INPUTS * quartet + 4 * (lane % 4);
#pragma unroll
      for (u32 turn = 0; turn < in.TURNS; turn++) {
        int d[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, sum[4];
        in.template each_step<true>(turn, x, [&](u32 step, const u32 (&b)[2]) {
#pragma unroll
          for (u32 half = 0; half < 2; half++) {
            u32 a[2];
            codes.operands(a, k_block, 2 * quartet + step / 2, step % 2 * 2 + half, lane);
            mma_s8_k16(d[half], a, b[half]);
          }
        });
        const u32 low_bytes = low(quartet, turn), high_bytes = high(quartet, turn);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
          const u32 bytes = i < 2 ? low_bytes : high_bytes;
          sum[i] = d[0][i] * i8(bytes) + d[1][i] * i8(bytes >> 8);
        }
        sums.add(turn, sum, d_low, d_high, in.pair(in.scales, first / 32 + QUARTET * quartet + in.ABREAST * turn));
      }
    }
  }
};

// T4: codes index the matrix's table, and a signed scale per 32 inputs.
struct t4_mma : Quartets<t4_fragment> {
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(QuartetSums<ROWS>& sums, const u8* k_block, QuartetInput<ROWS>& in, u32 first, u32 lane) {
    const CodeTable table = *(const CodeTable*)(k_block + TABLE);
    const u8 *sub_scales = k_block + SUB_SCALES + lane / 4 * 2, *scales = k_block + SCALES + lane / 4 * 2;
    const float d_low = table.factor * f16_at(scales), d_high = table.factor * f16_at(scales + 16);
#pragma unroll
    for (u32 quartet = 0; quartet < 2; quartet++) {
      const u8* x = in.codes + first + QUARTET_INPUTS * quartet + 8 * (lane % 4);
#pragma unroll
      for (u32 turn = 0; turn < in.TURNS; turn++) {
        int d[4] = {0, 0, 0, 0};
        in.template each_step<false>(turn, x, [&](u32 step, const u32 (&b)[2]) {
          const uint4 words = *(const uint4*)(k_block + PART_LOW * (2 * quartet + step / 2) + 16 * lane);
          u32 even[2], odd[2];
          table_nibbles(even, step % 2 ? words.z : words.x, table.values);
          table_nibbles(odd, step % 2 ? words.w : words.y, table.values);
          const u32 a[4] = {even[0], even[1], odd[0], odd[1]};
          mma_s8(d, a, b);
        });
        const u32 step = in.ABREAST * turn + in.held;
        const i8* held = (const i8*)(sub_scales + 2 * M_TILE * (2 * quartet + step / 2) + step % 2);
        sums.add(turn, d, d_low * float(int(held[0])), d_high * float(int(held[M_TILE])),
                 in.pair(in.scales, first / 32 + QUARTET * quartet + in.ABREAST * turn));
      }
    }
  }
};

// F4: nibbles that are small floats, and floats of eight bits as scales of 16 inputs.
struct f4_mma : Quartets<f4_fragment> {
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(QuartetSums<ROWS>& sums, const u8* k_block, QuartetInput<ROWS>& in, u32 first, u32 lane) {
    const CodeTable table = *(const CodeTable*)(k_block + TABLE);
    const u8 *rows = k_block + SUB_SCALES + 16 * (lane / 4), *scales = k_block + SCALES + lane / 4 * 2;
    const HeldBytes<ROWS> low(rows, in), high(rows + 128, in);
    const float d_low = table.factor * f16_at(scales), d_high = table.factor * f16_at(scales + 16);
#pragma unroll
    for (u32 quartet = 0; quartet < 2; quartet++) {
      const u8* x = in.codes + first + QUARTET_INPUTS * quartet + 4 * (lane % 4);
#pragma unroll
      for (u32 turn = 0; turn < in.TURNS; turn++) {
        int d[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        in.template each_step<true>(turn, x, [&](u32 step, const u32 (&b)[2]) {
          TableCodes<f4_fragment> codes;
          codes.load(k_block + PART_LOW * (2 * quartet + step / 2), nullptr, lane);
#pragma unroll
          for (u32 half = 0; half < 2; half++) {
            u32 a[2];
            codes.operands(a, step % 2 * 2 + half, table);
            mma_s8_k16(d[half], a, b[half]);
          }
        });
        const u32 low_bytes = low(quartet, turn), high_bytes = high(quartet, turn);
        const float2 scale = in.pair(in.scales, first / 32 + QUARTET * quartet + in.ABREAST * turn);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          sums.add(turn, d[half], d_low * float_sub_scale(low_bytes >> 8 * half & 255, table.shift),
                   d_high * float_sub_scale(high_bytes >> 8 * half & 255, table.shift), scale);
        }
      }
    }
  }
};
