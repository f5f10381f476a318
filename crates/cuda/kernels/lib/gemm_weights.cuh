// Weight operands of gemm.cu, one struct per format: the cp.async copy of a stage of 64 inputs of an M-tile to shared memory, and
// a warp's product of it with its tokens. WEIGHTS is the format's name; `src/kernel/fragment.rs` defines fragments.
//
// A stage of an M-tile has M_TILE_BYTES in shared memory, a stage of a token X_BYTES. `Tokens` is what a warp holds of its
// tokens for a step of 32 inputs. `Offsets` adds what blocks have besides (HAS_OFFSETS). TOGETHER stages may go between
// barriers. `copy` is told how many columns there are and how many rows from the M-tile's first on; fragments are padded and need
// neither. `multiply` adds to `sum` FACTOR times the product.
//
// Integer sums start at START, whose bits as a float are 12582912: the sums of a block stay below 2^22, so the result's
// bits are the float 12582912 + sum, exactly, and no conversion makes a float of it: times a scale, less 12582912 times the scale, is
// one instruction. It is exact but for the rounding of its result, for scales have so few bits that three times as much is a float, too.
#pragma once
#include "lib/fragment.cuh"
#include "lib/ptx.cuh"

constexpr u32 STAGE_INPUTS = PART_INPUTS;
constexpr int START = 0x4b400000;

// The scale of a row in a block of inputs: at most 22 significant bits.
struct RowScale {
  float scale, of_start;

  __device__ __forceinline__ explicit RowScale(float scale) : scale(scale), of_start(-12582912.0f * scale) {}
  __device__ __forceinline__ float times(int sum) const { return fmaf(__int_as_float(sum), scale, of_start); }
};

// Byte `i` of a word as a float, by the same trick.
__device__ __forceinline__ float byte_value(u32 word, u32 i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - 8388608.0f;
}

// The same times what was an f16, exactly.
__device__ __forceinline__ float times_byte(float by, u32 word, u32 i) {
  return fmaf(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)), by, -8388608.0f * by);
}

// The value of a byte with a sign, given its word ^ 0x80808080.
__device__ __forceinline__ float signed_byte_value(u32 word, u32 i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - 8388736.0f;
}

__device__ __forceinline__ u32 word_at(const u8* at) { return *(const u32*)at; }

// Codes of a token lie in 16-byte chunks, swizzled: chunk pairs of every second couple of tokens change places, so that the
// 8-byte loads of four neighbours meet all banks.
__device__ __forceinline__ u32 int8_chunk(u32 token, u32 chunk) { return token * 64 + ((chunk ^ (token & 2)) << 4); }

// Tokens in int8: `OCTETS` times 8 of them, of which a lane multiplies number `group` and scales 2 * quad and the next.
template <int OCTETS>
struct Int8Tokens {
  u32 codes[OCTETS][2];
  float2 scale[OCTETS];

  // `x` and `scales` are the warp's first token; a step's scales are `tokens` after each other.
  __device__ __forceinline__ void load(const u8* x, const float* scales, u32 tokens, u32 step, u32 lane) {
    const u32 group = lane / 4, quad = lane % 4;
    const u8* mine = x + int8_chunk(group, 2 * step) + 8 * quad;
#pragma unroll
    for (int j = 0; j < OCTETS; j++) {
      const uint2 pair = *(const uint2*)(mine + 512 * j);
      codes[j][0] = pair.x;
      codes[j][1] = pair.y;
    }
    load_scales(scales, tokens, step, quad);
  }

  __device__ __forceinline__ void load_scales(const float* scales, u32 tokens, u32 step, u32 quad) {
#pragma unroll
    for (int j = 0; j < OCTETS; j++) scale[j] = *(const float2*)(scales + step * tokens + 8 * j + 2 * quad);
  }
};

// sum += scale of the row * scale of the token * integer sum
__device__ __forceinline__ void add_scaled(float (&sum)[4], const int (&whole)[4], float2 token, const RowScale& low,
                                           const RowScale& high) {
  sum[0] = fmaf(low.times(whole[0]), token.x, sum[0]);
  sum[1] = fmaf(low.times(whole[1]), token.y, sum[1]);
  sum[2] = fmaf(high.times(whole[2]), token.x, sum[2]);
  sum[3] = fmaf(high.times(whole[3]), token.y, sum[3]);
}

// The product of 32 inputs whose codes have one scale per row, of rows `group` and `group + 8`.
template <int OCTETS>
__device__ __forceinline__ void multiply_block(float (&sum)[OCTETS][4], const u32 (&a)[4], const RowScale& low, const RowScale& high,
                                               const Int8Tokens<OCTETS>& x) {
  const int start[4] = {START, START, START, START};
  int whole[OCTETS][4];
#pragma unroll
  for (int j = 0; j < OCTETS; j++) mma_s8(whole[j], a, x.codes[j], start);
#pragma unroll
  for (int j = 0; j < OCTETS; j++) add_scaled(sum[j], whole[j], x.scale[j], low, high);
}

// Q8, Q4, Q5 and N4: one f16 scale per row and 32 inputs.
template <int OCTETS>
__device__ __forceinline__ void multiply_signed(float (&sum)[OCTETS][4], const u32 (&a)[4], const u8* scales, u32 step,
                                                u32 lane, const Int8Tokens<OCTETS>& x) {
  const u8* mine = scales + 4 * (lane / 4);
  const u32 low = word_at(mine), high = word_at(mine + 32);
  multiply_block(sum, a, RowScale(f16_to_f32(u16(low >> 16 * step))), RowScale(f16_to_f32(u16(high >> 16 * step))), x);
}

// Common part of the fragment formats.
template <typename Fragment>
struct FragmentStage : Fragment {
  static constexpr u32 M_TILE_BYTES = Fragment::PART_BYTES, X_BYTES = 64;
  // A stage in shared memory: low bits, high bits, scales.
  static constexpr u32 HIGH_AT = Fragment::PART_LOW, ROWS_AT = HIGH_AT + Fragment::PART_HIGH;

  static __device__ __forceinline__ u64 m_tile_bytes(u32 columns) {
    return u64((columns + Fragment::INPUTS - 1) / Fragment::INPUTS) * Fragment::BYTES;
  }
};

struct Weights_q8 : FragmentStage<q8_fragment> {
  static constexpr int TOGETHER = 2;
  static constexpr bool TOKEN_SCALES = true, HAS_OFFSETS = false;
  static constexpr float FACTOR = 1;
  template <int OCTETS>
  using Tokens = Int8Tokens<OCTETS>;

  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, u32 lane, u32, u32) {
    const u8* from = m_tile + stage * BYTES + 16 * lane;
    to += 16 * lane;
    cp_async_16(to, from);
    cp_async_16(to + LANES_BYTES, from + LANES_BYTES);
    if (lane < 4) cp_async_16(to + ROWS_AT, from + SCALES);
  }

  template <int OCTETS>
  static __device__ __forceinline__ void multiply(float (&sum)[OCTETS][4], const u8* m_tile, u32 step, u32 lane,
                                                  const Tokens<OCTETS>& x) {
    const uint4 codes = *(const uint4*)(m_tile + LANES_BYTES * step + 16 * lane);
    const u32 a[4] = {codes.x, codes.y, codes.z, codes.w};
    multiply_signed(sum, a, m_tile + ROWS_AT, step, lane, x);
  }
};

// Q4, Q5 and N4; M4 and M5, which have a value at the codes' middle besides.
template <int OCTETS>
struct SummedTokens : Int8Tokens<OCTETS> {
  float2 sum[OCTETS];  // scale * sum of codes

  __device__ __forceinline__ void load(const u8* x, const float* scales, u32 tokens, u32 step, u32 lane) {
    Int8Tokens<OCTETS>::load(x, scales, tokens, step, lane);
    const u32 ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
    const int start[4] = {START, START, START, START};
#pragma unroll
    for (int j = 0; j < OCTETS; j++) {
      int whole[4];
      mma_s8(whole, ones, this->codes[j], start);
      sum[j] = make_float2((__int_as_float(whole[0]) - 12582912.0f) * this->scale[j].x,
                           (__int_as_float(whole[1]) - 12582912.0f) * this->scale[j].y);
    }
  }
};
template <bool F16_MINS, int OCTETS>
struct SignedTokens {
  typedef Int8Tokens<OCTETS> Tokens;
};
template <int OCTETS>
struct SignedTokens<true, OCTETS> {
  typedef SummedTokens<OCTETS> Tokens;
};

template <typename Fragment>
struct SignedStage : FragmentStage<Fragment> {
  typedef FragmentStage<Fragment> Stage;
  typedef SignedCodes<Fragment> Codes;
  static constexpr int TOGETHER = 2;
  static constexpr bool TOKEN_SCALES = true, HAS_OFFSETS = false;
  static constexpr float FACTOR = 1 << (8 - Codes::BITS), MIDDLE = 1 << (Codes::BITS - 1);
  template <int OCTETS>
  using Tokens = typename SignedTokens<Fragment::F16_MINS, OCTETS>::Tokens;

  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, u32 lane, u32, u32) {
    const u8* from = m_tile + stage * Fragment::BYTES;
    if (Fragment::HIGH_BITS == 1) cp_async_4(to + Stage::HIGH_AT + 4 * lane, from + Fragment::HIGH + 4 * lane);
    from += 16 * lane;
    to += 16 * lane;
    cp_async_16(to, from);
    if (lane < (Fragment::F16_MINS ? 8 : 4)) cp_async_16(to + Stage::ROWS_AT, from + Fragment::SCALES);
  }

  template <int OCTETS>
  static __device__ __forceinline__ void multiply(float (&sum)[OCTETS][4], const u8* m_tile, u32 step, u32 lane,
                                                  const Tokens<OCTETS>& x) {
    const uint2 words = *(const uint2*)(m_tile + 16 * lane + 8 * step);
    Codes codes;
    codes.load(m_tile + Stage::HIGH_AT, lane);
    u32 first[2], second[2];
    codes.operands(first, words.x, 2 * step);
    codes.operands(second, words.y, 2 * step + 1);
    const u32 a[4] = {first[0], first[1], second[0], second[1]};
    multiply_rows(sum, a, m_tile + Stage::ROWS_AT, step, lane, x);
  }

 private:
  template <int OCTETS>
  static __device__ __forceinline__ void multiply_rows(float (&sum)[OCTETS][4], const u32 (&a)[4], const u8* rows, u32 step, u32 lane,
                                                       const Int8Tokens<OCTETS>& x) {
    multiply_signed(sum, a, rows, step, lane, x);
  }
  template <int OCTETS>
  static __device__ __forceinline__ void multiply_rows(float (&sum)[OCTETS][4], const u32 (&a)[4], const u8* rows, u32 step, u32 lane,
                                                       const SummedTokens<OCTETS>& x) {
    const u8* mine = rows + 8 * (lane / 4) + 4 * step;
    const u32 low = word_at(mine), high = word_at(mine + 64);
    const float low_d = f16_to_f32(u16(low)), high_d = f16_to_f32(u16(high));
    multiply_block(sum, a, RowScale(low_d), RowScale(high_d), x);
    const float low_middle = FACTOR * fmaf(MIDDLE, low_d, f16_to_f32(u16(low >> 16))),
                high_middle = FACTOR * fmaf(MIDDLE, high_d, f16_to_f32(u16(high >> 16)));
#pragma unroll
    for (int j = 0; j < OCTETS; j++) {
      sum[j][0] = fmaf(low_middle, x.sum[j].x, sum[j][0]);
      sum[j][1] = fmaf(low_middle, x.sum[j].y, sum[j][1]);
      sum[j][2] = fmaf(high_middle, x.sum[j].x, sum[j][2]);
      sum[j][3] = fmaf(high_middle, x.sum[j].y, sum[j][3]);
    }
  }
};
struct Weights_q4 : SignedStage<q4_fragment> {};
struct Weights_q5 : SignedStage<q5_fragment> {};
struct Weights_n4 : SignedStage<n4_fragment> {};
struct Weights_m4 : SignedStage<m4_fragment> {};
struct Weights_m5 : SignedStage<m5_fragment> {};

// K4 and K5. A weight is d * scale * code - dmin * minimum. Codes are multiplied as numbers with a sign, as far from the middle of
// their range: what is left is the same for all 32 inputs of a block, its offset, and is multiplied by the token's sum of them.
//
// A row's scales and minimums of the stage, then d and dmin, come as two words.
__device__ __forceinline__ void copy_row_words(u8* to, const u8* sub_scales, const u8* scales, u32 lane) {
  const u32 row = lane % 16;
  cp_async_4(to + 8 * row + (lane < 16 ? 0 : 4), lane < 16 ? sub_scales + 16 * row : scales + 4 * row);
}

template <int OCTETS>
__device__ __forceinline__ void multiply_centered(float (&sum)[OCTETS][4], const u32 (&a)[4], const u8* rows, u32 step,
                                                  u32 lane, const Int8Tokens<OCTETS>& x) {
  const uint2 low = *(const uint2*)(rows + 8 * (lane / 4)), high = *(const uint2*)(rows + 8 * (lane / 4) + 64);
  multiply_block(sum, a, RowScale(times_byte(f16_to_f32(u16(low.y)), low.x, 2 * step)),
                 RowScale(times_byte(f16_to_f32(u16(high.y)), high.x, 2 * step)), x);
}

struct Weights_k4 : FragmentStage<k4_fragment> {
  static constexpr int TOGETHER = 2;
  static constexpr bool TOKEN_SCALES = true, HAS_OFFSETS = true;
  static constexpr float FACTOR = 16, MIDDLE = 8;
  template <int OCTETS>
  using Tokens = Int8Tokens<OCTETS>;

  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, u32 lane, u32, u32) {
    const u8* k_block = m_tile + stage / PARTS * BYTES;
    const u32 part = stage % PARTS;
    cp_async_16(to + 16 * lane, k_block + PART_LOW * part + 16 * lane);
    copy_row_words(to + ROWS_AT, k_block + SUB_SCALES + 4 * part, k_block + SCALES, lane);
  }

  template <int OCTETS>
  static __device__ __forceinline__ void multiply(float (&sum)[OCTETS][4], const u8* m_tile, u32 step, u32 lane,
                                                  const Tokens<OCTETS>& x) {
    const uint2 codes = *(const uint2*)(m_tile + 16 * lane + 8 * step);
    u32 x0 = codes.x ^ 0x88888888, x1 = codes.y ^ 0x88888888;
    asm volatile("" : "+r"(x0), "+r"(x1));  // or each operand would take a step more
    const u32 a[4] = {x0 << 4 & 0xf0f0f0f0, x0 & 0xf0f0f0f0, x1 << 4 & 0xf0f0f0f0, x1 & 0xf0f0f0f0};
    multiply_centered(sum, a, m_tile + ROWS_AT, step, lane, x);
  }
};

struct Weights_k5 : FragmentStage<k5_fragment> {
  static constexpr int TOGETHER = 2;
  static constexpr bool TOKEN_SCALES = true, HAS_OFFSETS = true;
  static constexpr float FACTOR = 8, MIDDLE = 16;
  template <int OCTETS>
  using Tokens = Int8Tokens<OCTETS>;

  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, u32 lane, u32, u32) {
    const u8* k_block = m_tile + stage / PARTS * BYTES;
    const u32 part = stage % PARTS;
    cp_async_16(to + 16 * lane, k_block + PART_LOW * part + 16 * lane);
    cp_async_4(to + HIGH_AT + 4 * lane, k_block + HIGH + PART_HIGH * part + 4 * lane);
    copy_row_words(to + ROWS_AT, k_block + SUB_SCALES + 4 * part, k_block + SCALES, lane);
  }

  template <int OCTETS>
  static __device__ __forceinline__ void multiply(float (&sum)[OCTETS][4], const u8* m_tile, u32 step, u32 lane,
                                                  const Tokens<OCTETS>& x) {
    const uint2 codes = *(const uint2*)(m_tile + 16 * lane + 8 * step);
    const u32 no_fifths = ~word_at(m_tile + HIGH_AT + 4 * lane) >> 4 * step;
    const u32 a[4] = {
        (codes.x << 3 & 0x78787878) | (no_fifths << 7 & 0x80808080), (codes.x >> 1 & 0x78787878) | (no_fifths << 6 & 0x80808080),
        (codes.y << 3 & 0x78787878) | (no_fifths << 5 & 0x80808080), (codes.y >> 1 & 0x78787878) | (no_fifths << 4 & 0x80808080)};
    multiply_centered(sum, a, m_tile + ROWS_AT, step, lane, x);
  }
};

// K6 goes by 16 inputs, each with a signed scale of its own.
template <int OCTETS>
struct SixteenTokens : Int8Tokens<OCTETS> {
  __device__ __forceinline__ void load(const u8* x, const float* scales, u32 tokens, u32 step, u32 lane) {
    const u32 group = lane / 4, quad = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u8* mine = x + int8_chunk(group, 2 * step + half) + 4 * quad;
#pragma unroll
      for (int j = 0; j < OCTETS; j++) this->codes[j][half] = word_at(mine + 512 * j);
    }
    this->load_scales(scales, tokens, step, quad);
  }
};

struct Weights_k6 : FragmentStage<k6_fragment> {
  static constexpr u32 SCALES_AT = ROWS_AT + 4 * M_TILE;  // behind four sub-scales per row
  static constexpr int TOGETHER = 2;
  static constexpr bool TOKEN_SCALES = true, HAS_OFFSETS = false;
  static constexpr float FACTOR = 4;
  template <int OCTETS>
  using Tokens = SixteenTokens<OCTETS>;

  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, u32 lane, u32, u32) {
    const u8* k_block = m_tile + stage / PARTS * BYTES;
    const u32 part = stage % PARTS;
    cp_async_16(to + 16 * lane, k_block + PART_LOW * part + 16 * lane);
    if (lane < 16) {
      cp_async_16(to + HIGH_AT + 16 * lane, k_block + HIGH + PART_HIGH * part + 16 * lane);
      cp_async_4(to + ROWS_AT + 4 * lane, k_block + SUB_SCALES + 16 * lane + 4 * part);
    } else if (lane < 24) {
      cp_async_4(to + SCALES_AT + 4 * (lane - 16), k_block + SCALES + 4 * (lane - 16));
    }
  }

  template <int OCTETS>
  static __device__ __forceinline__ void multiply(float (&sum)[OCTETS][4], const u8* m_tile, u32 step, u32 lane,
                                                  const Tokens<OCTETS>& x) {
    const u32 group = lane / 4;
    const uint2 codes = *(const uint2*)(m_tile + 16 * lane + 8 * step);
    const u32 pairs = word_at(m_tile + HIGH_AT + 8 * lane + 4 * step);
    const u32 low_scales = word_at(m_tile + ROWS_AT + 4 * group) ^ 0x80808080,
              high_scales = word_at(m_tile + ROWS_AT + 32 + 4 * group) ^ 0x80808080;
    const float low_d = f16_to_f32(*(const u16*)(m_tile + SCALES_AT + 2 * group));
    const float high_d = f16_to_f32(*(const u16*)(m_tile + SCALES_AT + 16 + 2 * group));
    const int start[4] = {START, START, START, START};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 nibbles = half ? codes.y : codes.x, high = pairs >> 4 * half;
      const u32 a[2] = {(nibbles << 2 & 0x3c3c3c3c) | (high << 6 & 0xc0c0c0c0),
                        (nibbles >> 2 & 0x3c3c3c3c) | (high << 4 & 0xc0c0c0c0)};
      const RowScale low(low_d * signed_byte_value(low_scales, 2 * step + half));
      const RowScale up(high_d * signed_byte_value(high_scales, 2 * step + half));
      int whole[OCTETS][4];
#pragma unroll
      for (int j = 0; j < OCTETS; j++) mma_s8_k16(whole[j], a, x.codes[j][half], start);
#pragma unroll
      for (int j = 0; j < OCTETS; j++) add_scaled(sum[j], whole[j], x.scale[j], low, up);
    }
  }
};

// K2 has a scale and a minimum of four bits for each 16 inputs. A code times its scale is a byte still, and minimums are multiplied as
// codes: both sums of 32 inputs have one scale.
struct Weights_k2 : FragmentStage<k2_fragment> {
  static constexpr u32 SCALES_AT = ROWS_AT + 4 * M_TILE;  // behind four sub-scales per row
  static constexpr int TOGETHER = 1;  // two would take registers
  static constexpr bool TOKEN_SCALES = true, HAS_OFFSETS = false;
  static constexpr float FACTOR = 1;
  template <int OCTETS>
  using Tokens = SixteenTokens<OCTETS>;

  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, u32 lane, u32, u32) {
    const u8* k_block = m_tile + stage / PARTS * BYTES;
    const u32 part = stage % PARTS;
    if (lane < 16) {
      cp_async_16(to + 16 * lane, k_block + PART_LOW * part + 16 * lane);
      cp_async_4(to + ROWS_AT + 4 * lane, k_block + SUB_SCALES + 16 * lane + 4 * part);
    } else {
      cp_async_4(to + SCALES_AT + 4 * (lane - 16), k_block + SCALES + 4 * (lane - 16));
    }
  }

  template <int OCTETS>
  static __device__ __forceinline__ void multiply(float (&sum)[OCTETS][4], const u8* m_tile, u32 step, u32 lane,
                                                  const Tokens<OCTETS>& x) {
    const u32 group = lane / 4;
    const u32 codes = word_at(m_tile + 8 * lane + 4 * step);
    const u8 *rows = m_tile + ROWS_AT + 4 * group, *scales = m_tile + SCALES_AT + 4 * group;
    u32 low_scales = *(const u16*)(rows + 2 * step), high_scales = *(const u16*)(rows + 32 + 2 * step);
    u32 low_d = *(const u16*)scales, high_d = *(const u16*)(scales + 32);
    u32 a[2][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      a[half][0] = (codes >> 4 * half & 0x03030303u) * (low_scales >> 8 * half & 15);
      a[half][1] = (codes >> (4 * half + 2) & 0x03030303u) * (high_scales >> 8 * half & 15);
    }
    multiply_halves(sum, a, RowScale(f16_to_f32(u16(low_d))), RowScale(f16_to_f32(u16(high_d))), x);
    // Nothing of the second product before the first is done: there are no registers for both.
    asm volatile("" : "+r"(low_scales), "+r"(high_scales));
    low_d = *(const volatile u16*)(scales + 2), high_d = *(const volatile u16*)(scales + 34);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      a[half][0] = (low_scales >> (8 * half + 4) & 15) * 0x01010101u;
      a[half][1] = (high_scales >> (8 * half + 4) & 15) * 0x01010101u;
    }
    multiply_halves(sum, a, RowScale(-f16_to_f32(u16(low_d))), RowScale(-f16_to_f32(u16(high_d))), x);
  }

 private:
  template <int OCTETS>
  static __device__ __forceinline__ void multiply_halves(float (&sum)[OCTETS][4], const u32 (&a)[2][2], const RowScale& low,
                                                         const RowScale& high, const Tokens<OCTETS>& x) {
    const int start[4] = {START, START, START, START};
    constexpr int PAIR = OCTETS % 2 ? 1 : 2;  // more at a time would take registers
#pragma unroll
    for (int first = 0; first < OCTETS; first += PAIR) {
      int whole[PAIR][4];
#pragma unroll
      for (int j = 0; j < PAIR; j++) mma_s8_k16(whole[j], a[0], x.codes[first + j][0], start);
#pragma unroll
      for (int j = 0; j < PAIR; j++) mma_s8_k16(whole[j], a[1], x.codes[first + j][1]);
#pragma unroll
      for (int j = 0; j < PAIR; j++) add_scaled(sum[first + j], whole[j], x.scale[first + j], low, high);
    }
  }
};

// Scales of rows `group` and `group + 8` of formats with a table, times its factor: f16, and the table right behind.
__device__ __forceinline__ float row_scale(const u8* scales, const CodeTable& table, u32 row) {
  return table.factor * f16_to_f32(*(const u16*)(scales + 2 * row));
}
struct TableScales {
  float low, high;

  __device__ __forceinline__ TableScales(const u8* scales, const CodeTable& table, u32 group)
      : low(row_scale(scales, table, group)), high(row_scale(scales, table, group + 8)) {}
};

// T4: codes that index the matrix's table, and a signed scale per 32 inputs.
struct Weights_t4 : FragmentStage<t4_fragment> {
  static constexpr u32 SCALES_AT = ROWS_AT + 2 * M_TILE;  // behind two sub-scales per row
  static constexpr u32 TABLE_AT = SCALES_AT + 2 * M_TILE;
  static constexpr int TOGETHER = 2;
  static constexpr bool TOKEN_SCALES = true, HAS_OFFSETS = false;
  static constexpr float FACTOR = 1;
  template <int OCTETS>
  using Tokens = Int8Tokens<OCTETS>;

  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, u32 lane, u32, u32) {
    const u8* k_block = m_tile + stage / PARTS * BYTES;
    const u32 part = stage % PARTS;
    cp_async_16(to + 16 * lane, k_block + PART_LOW * part + 16 * lane);
    if (lane < 2) {
      cp_async_16(to + ROWS_AT + 16 * lane, k_block + SUB_SCALES + 2 * M_TILE * part + 16 * lane);
    } else if (lane < 6) {
      // The scales, and right behind them the table.
      cp_async_16(to + SCALES_AT + 16 * (lane - 2), k_block + SCALES + 16 * (lane - 2));
    }
  }

  template <int OCTETS>
  static __device__ __forceinline__ void multiply(float (&sum)[OCTETS][4], const u8* m_tile, u32 step, u32 lane,
                                                  const Tokens<OCTETS>& x) {
    const u32 group = lane / 4;
    const CodeTable& table = *(const CodeTable*)(m_tile + TABLE_AT);
    const uint2 words = *(const uint2*)(m_tile + 16 * lane + 8 * step);
    const TableScales d(m_tile + SCALES_AT, table, group);
    const i8* sub_scales = (const i8*)(m_tile + ROWS_AT + 2 * group + step);
    u32 first[2], second[2];
    table_nibbles(first, words.x, table.values);
    table_nibbles(second, words.y, table.values);
    const u32 a[4] = {first[0], first[1], second[0], second[1]};
    multiply_block(sum, a, RowScale(d.low * float(int(sub_scales[0]))), RowScale(d.high * float(int(sub_scales[16]))), x);
  }
};

// F4, T3, T2 and T1: the same by 16 inputs, as K6.
template <typename Fragment>
struct TableStage : FragmentStage<Fragment> {
  typedef FragmentStage<Fragment> Stage;
  static constexpr u32 SCALES_AT = Stage::ROWS_AT + Fragment::PART_SUB_SCALES, TABLE_AT = SCALES_AT + 2 * M_TILE;
  static constexpr int TOGETHER = 2;
  static constexpr bool TOKEN_SCALES = true, HAS_OFFSETS = false;
  static constexpr float FACTOR = 1;
  typedef TableCodes<Fragment> Codes;
  template <int OCTETS>
  using Tokens = SixteenTokens<OCTETS>;

  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, u32 lane, u32, u32) {
    const u8* k_block = m_tile + stage / Fragment::PARTS * Fragment::BYTES;
    const u32 part = stage % Fragment::PARTS;
    if (16 * lane < Fragment::PART_LOW) cp_async_16(to + 16 * lane, k_block + Fragment::PART_LOW * part + 16 * lane);
    if (Fragment::HIGH_BITS == 1) {
      cp_async_4(to + Stage::HIGH_AT + 4 * lane, k_block + Fragment::HIGH + Fragment::PART_HIGH * part + 4 * lane);
    }
    if (lane < 16) {
      if (Fragment::HAS_SUB_SCALES) cp_async_4(to + Stage::ROWS_AT + 4 * lane, k_block + Fragment::SUB_SCALES + 16 * lane + 4 * part);
    } else {
      // The scales, and right behind them the table; of two scales per row those of the part.
      const u8* from = k_block + Fragment::SCALES + 4 * (lane - 16);
      if (Fragment::SCALES_OF_ROW == 2) from += lane < 24 ? 2 * M_TILE * (part / 2) : 2 * M_TILE;
      cp_async_4(to + SCALES_AT + 4 * (lane - 16), from);
    }
  }

  // A row's sub-scales of a stage, if there are any.
  static __device__ __forceinline__ u32 sub_scales(const u8* m_tile, u32 row) {
    return Fragment::HAS_SUB_SCALES ? word_at(m_tile + Stage::ROWS_AT + 4 * row) : 0;
  }

  // Sub-scale `i` of them.
  static __device__ __forceinline__ float sub_scale(u32 word, u32 i, const CodeTable& table) {
    if (!Fragment::HAS_SUB_SCALES) return 1;
    const u32 byte = word >> 8 * i & 255;
    return Fragment::LOW_BITS == 4 ? float_sub_scale(byte, table.shift) : float(int(i8(byte)));
  }

  template <int OCTETS>
  static __device__ __forceinline__ void multiply(float (&sum)[OCTETS][4], const u8* m_tile, u32 step, u32 lane,
                                                  const Tokens<OCTETS>& x) {
    const u32 group = lane / 4;
    const CodeTable& table = *(const CodeTable*)(m_tile + TABLE_AT);
    Codes codes;
    codes.load(m_tile, m_tile + Stage::HIGH_AT, lane);
    const u32 low_scales = sub_scales(m_tile, group), high_scales = sub_scales(m_tile, group + 8);
    const TableScales d(m_tile + SCALES_AT, table, group);
    const int start[4] = {START, START, START, START};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 a[2];
      codes.operands(a, 2 * step + half, table);
      const RowScale low(d.low * sub_scale(low_scales, 2 * step + half, table)), up(d.high * sub_scale(high_scales, 2 * step + half, table));
      int whole[OCTETS][4];
#pragma unroll
      for (int j = 0; j < OCTETS; j++) mma_s8_k16(whole[j], a, x.codes[j][half], start);
#pragma unroll
      for (int j = 0; j < OCTETS; j++) add_scaled(sum[j], whole[j], x.scale[j], low, up);
    }
  }
};
struct Weights_f4 : TableStage<f4_fragment> {};
struct Weights_t3 : TableStage<t3_fragment> {};
struct Weights_t2 : TableStage<t2_fragment> {
  static constexpr int TOGETHER = 1;  // two would take registers
};
struct Weights_t1 : TableStage<t1_fragment> {};

// F16, row after row, swizzled for ldmatrix: eight rows meet all banks.
__device__ __forceinline__ u32 f16_chunk(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

template <int OCTETS>
struct F16Tokens {
  u32 pairs[OCTETS][4];

  __device__ __forceinline__ void load(const u8* x, const float*, u32, u32 step, u32 lane) {
    const u8* mine = x + f16_chunk(lane % 8, 4 * step + lane / 8);
#pragma unroll
    for (int j = 0; j < OCTETS; j++) ldmatrix_x4(pairs[j], mine + 1024 * j);
  }
};

struct Weights_f16 {
  static constexpr u32 M_TILE_BYTES = M_TILE * STAGE_INPUTS * 2, ROWS_AT = 0, X_BYTES = 128;
  static constexpr int TOGETHER = 1;
  static constexpr bool TOKEN_SCALES = false, HAS_OFFSETS = false;
  static constexpr float FACTOR = 1;
  template <int OCTETS>
  using Tokens = F16Tokens<OCTETS>;

  static __device__ __forceinline__ u64 m_tile_bytes(u32 columns) { return u64(columns) * 32; }

  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, u32 lane, u32 columns, u32 rows) {
    const u32 chunk = lane % 8;
    const bool inside = stage * STAGE_INPUTS + 8 * chunk < columns;
#pragma unroll
    for (u32 row = lane / 8; row < 16; row += 4) {
      const u32 from = row * columns * 2 + stage * 128 + chunk * 16;
      cp_async_16(to + f16_chunk(row, chunk), m_tile + from, inside && row < rows);
    }
  }

  template <int OCTETS>
  static __device__ __forceinline__ void multiply(float (&sum)[OCTETS][4], const u8* m_tile, u32 step, u32 lane,
                                                  const Tokens<OCTETS>& x) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 a[4];
      ldmatrix_x4(a, m_tile + f16_chunk(lane % 16, 4 * step + 2 * half + lane / 16));
#pragma unroll
      for (int j = 0; j < OCTETS; j++) mma_f16(sum[j], a, {x.pairs[j][2 * half], x.pairs[j][2 * half + 1]});
    }
  }
};

typedef JOIN(Weights_, WEIGHTS) Weights;
static_assert(Weights::M_TILE_BYTES == M_TILE_STAGE_BYTES, "src/kernel/linear/gemm.rs differs");
