// Products of fragments (src/kernel/fragment.rs) with int8 activations for gemv.cu: one warp, one M-tile, one K-block at a time.
//
// The M-tile's 16 rows are the rows of the tensor core's A, the tokens the columns of its B; integer sums of a block of 32
// inputs are exact, and become floats once per block: c += weight scale * activation scale * sum. Columns without a token
// repeat the last one's activations; nobody reads their sums.
#pragma once
#include "lib/fragment.cuh"
#include "lib/ptx.cuh"
#include "lib/reduce.cuh"

// Activations in shared memory, as gemv_input.cuh leaves them.
struct Input {
  u8* values;     // [rows, stride]: int8 codes, or floats
  float* scales;  // [blocks of 32, rows]
  float* sums;    // the same: scale * sum of codes
  u32 stride;     // bytes
};

// Addresses of the activations that a lane reads.
template <int ROWS>
struct LaneInput {
  const u8* codes;
  const float *scales, *sums;

  __device__ __forceinline__ LaneInput(const Input& in, u32 lane) {
    const u32 group = lane / 4, quad = lane % 4;
    codes = in.values + min(group, u32(ROWS - 1)) * in.stride;
    const u32 column = ROWS == 1 ? 0 : min(2 * quad, u32(ROWS - 2));
    scales = in.scales + column;
    sums = in.sums + column;
  }

  // Of the two columns whose sums this lane holds.
  static __device__ __forceinline__ float2 pair(const float* blocks, u32 block) {
    if (ROWS == 1) return make_float2(blocks[block], 0);
    return *(const float2*)(blocks + block * ROWS);
  }
};

// Sums of a warp over an M-tile: rows group and group + 8, columns 2 * quad and the next.
template <int ROWS>
struct FragmentSums {
  float c[4] = {0, 0, 0, 0};

  __device__ __forceinline__ void add(const int (&d)[4], float low, float high, float2 scale) {
    c[0] = fmaf(float(d[0]), low * scale.x, c[0]);
    c[2] = fmaf(float(d[2]), high * scale.x, c[2]);
    if (ROWS == 1) return;
    c[1] = fmaf(float(d[1]), low * scale.y, c[1]);
    c[3] = fmaf(float(d[3]), high * scale.y, c[3]);
  }

  __device__ __forceinline__ void subtract(float low, float high, float2 sum) {
    c[0] = fmaf(-low, sum.x, c[0]);
    c[2] = fmaf(-high, sum.x, c[2]);
    if (ROWS == 1) return;
    c[1] = fmaf(-low, sum.y, c[1]);
    c[3] = fmaf(-high, sum.y, c[3]);
  }

  // To `[ROWS, 16]`.
  __device__ __forceinline__ void store(float* to, u32 lane) const {
    const u32 group = lane / 4, column = 2 * (lane % 4);
    if (column >= ROWS) return;
    to += column * 16 + group;
    to[0] = c[0];
    to[8] = c[2];
    if (ROWS == 1) return;
    to[16] = c[1];
    to[24] = c[3];
  }
};

__device__ __forceinline__ float low_f16(u32 pair) { return f16_to_f32(u16(pair)); }
__device__ __forceinline__ float high_f16(u32 pair) { return f16_to_f32(u16(pair >> 16)); }

struct q8_mma : q8_fragment {
  static constexpr u32 K_BLOCKS_PER_STAGE = 2;
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(FragmentSums<ROWS>& sums, const u8* k_block, const LaneInput<ROWS>& in, u32 first,
                                                  u32 lane) {
    const u8* scales = k_block + SCALES + lane / 4 * 4;
    const u32 low = *(const u32*)scales, high = *(const u32*)(scales + 32);
#pragma unroll
    for (u32 step = 0; step < 2; step++) {
      const uint4 w = *(const uint4*)(k_block + LANES_BYTES * step + 16 * lane);
      const uint2 x = *(const uint2*)(in.codes + first + 32 * step + 8 * (lane % 4));
      const u32 a[4] = {w.x, w.y, w.z, w.w}, b[2] = {x.x, x.y};
      int d[4] = {0, 0, 0, 0};
      mma_s8(d, a, b);
      sums.add(d, step ? high_f16(low) : low_f16(low), step ? high_f16(high) : low_f16(high),
               in.pair(in.scales, first / 32 + step));
    }
  }
};

// Q4, Q5 and N4: codes with a sign, and a scale per 32 inputs. Of M4 and M5 the rest is what a weight is at the codes' middle, times the
// sum of activations, which the tensor core adds up, too.
template <typename Fragment>
struct signed_mma : Fragment {
  static constexpr u32 K_BLOCKS_PER_STAGE = 4;
  static constexpr bool HAS_MINS = false;
  typedef SignedCodes<Fragment> Codes;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(FragmentSums<ROWS>& sums, const u8* k_block, const LaneInput<ROWS>& in, u32 first,
                                                  u32 lane) {
    constexpr u32 ROW_BYTES = Fragment::F16_MINS ? 8 : 4;
    const u8* scales = k_block + Fragment::SCALES + lane / 4 * ROW_BYTES;
    // Both steps' scales of rows `group` and `group + 8`.
    const u32 low = Fragment::F16_MINS ? 0 : *(const u32*)scales, high = Fragment::F16_MINS ? 0 : *(const u32*)(scales + 32);
    const uint4 words = *(const uint4*)(k_block + 16 * lane);
    Codes codes;
    codes.load(k_block + Fragment::HIGH, lane);
#pragma unroll
    for (u32 step = 0; step < 2; step++) {
      const uint2 x = *(const uint2*)(in.codes + first + 32 * step + 8 * (lane % 4));
      const u32 b[2] = {x.x, x.y};
      const float2 scale = in.pair(in.scales, first / 32 + step);
      float low_scale = step ? high_f16(low) : low_f16(low), high_scale = step ? high_f16(high) : low_f16(high);
      if (Fragment::F16_MINS) {
        const u32 low_pair = *(const u32*)(scales + 4 * step), high_pair = *(const u32*)(scales + 64 + 4 * step);
        const u32 ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
        int whole[4] = {0, 0, 0, 0};
        mma_s8(whole, ones, b);
        constexpr float MIDDLE = 1 << (Codes::BITS - 1);
        low_scale = low_f16(low_pair), high_scale = low_f16(high_pair);
        sums.add(whole, fmaf(MIDDLE, low_scale, high_f16(low_pair)), fmaf(MIDDLE, high_scale, high_f16(high_pair)), scale);
      }
      u32 even[2], odd[2];
      codes.operands(even, step ? words.z : words.x, 2 * step);
      codes.operands(odd, step ? words.w : words.y, 2 * step + 1);
      const u32 a[4] = {even[0], even[1], odd[0], odd[1]};
      int d[4] = {0, 0, 0, 0};
      mma_s8(d, a, b);
      constexpr float UNIT = 1.0f / (1 << (8 - Codes::BITS));
      sums.add(d, low_scale, high_scale, make_float2(scale.x * UNIT, scale.y * UNIT));
    }
  }
};

// Word `i` of four, for unrolled loops.
__device__ __forceinline__ u32 word(const uint4& v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ u32 byte_of(const uint4& v, u32 i) { return word(v, i / 4) >> 8 * (i % 4) & 255; }

// Q4_K, and Q5_K with its fifth bits.
template <typename Fragment>
struct k45_mma : Fragment {
  static constexpr u32 K_BLOCKS_PER_STAGE = 1;
  static constexpr bool HAS_MINS = true, FIFTH = Fragment::HIGH_BITS == 1;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(FragmentSums<ROWS>& sums, const u8* k_block, const LaneInput<ROWS>& in, u32 first,
                                                  u32 lane) {
    const u8* rows = k_block + Fragment::SUB_SCALES + 16 * (lane / 4);
    const uint4 low = *(const uint4*)rows, high = *(const uint4*)(rows + 128);
    const u8* scales = k_block + Fragment::SCALES + lane / 4 * 4;
    const u32 low_d = *(const u32*)scales, high_d = *(const u32*)(scales + 32);
    const float d_low = low_f16(low_d), d_high = low_f16(high_d), min_low = high_f16(low_d), min_high = high_f16(high_d);
#pragma unroll
    for (u32 part = 0; part < 4; part++) {
      const uint4 codes = *(const uint4*)(k_block + Fragment::PART_LOW * part + 16 * lane);
      const u32 fifth = FIFTH ? *(const u32*)(k_block + Fragment::HIGH + Fragment::PART_HIGH * part + 4 * lane) : 0;
#pragma unroll
      for (u32 step = 0; step < 2; step++) {
        const u32 w[2] = {step ? codes.z : codes.x, step ? codes.w : codes.y};
        const u32 block = 2 * part + step;
        const uint2 x = *(const uint2*)(in.codes + first + 32 * block + 8 * (lane % 4));
        u32 a[4] = {w[0] & 0x0f0f0f0fu, w[0] >> 4 & 0x0f0f0f0fu, w[1] & 0x0f0f0f0fu, w[1] >> 4 & 0x0f0f0f0fu};
        if (FIFTH) {
#pragma unroll
          for (u32 i = 0; i < 4; i++) a[i] |= (fifth >> (4 * step + i) & 0x01010101u) << 4;
        }
        const u32 b[2] = {x.x, x.y};
        int d[4] = {0, 0, 0, 0};
        mma_u8s8(d, a, b);
        const u32 at = first / 32 + block;
        sums.add(d, d_low * float(byte_of(low, 2 * block)), d_high * float(byte_of(high, 2 * block)), in.pair(in.scales, at));
        sums.subtract(min_low * float(byte_of(low, 2 * block + 1)), min_high * float(byte_of(high, 2 * block + 1)),
                      in.pair(in.sums, at));
      }
    }
  }
};

// Q2_K has a scale and a minimum of four bits per 16 inputs: a code times its scale is a byte still, and minimums are multiplied as codes.
struct k2_mma : k2_fragment {
  static constexpr u32 K_BLOCKS_PER_STAGE = 1;
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(FragmentSums<ROWS>& sums, const u8* k_block, const LaneInput<ROWS>& in, u32 first,
                                                  u32 lane) {
    const u8* rows = k_block + SUB_SCALES + 16 * (lane / 4);
    const uint4 low = *(const uint4*)rows, high = *(const uint4*)(rows + 128);
    const u8* scales = k_block + SCALES + lane / 4 * 4;
    const u32 low_d = *(const u32*)scales, high_d = *(const u32*)(scales + 32);
#pragma unroll
    for (u32 part = 0; part < 4; part++) {
      TwoBitCodes codes;
      codes.load(k_block + PART_LOW * part, lane);
#pragma unroll
      for (u32 block = 0; block < 2; block++) {
        int scaled[4] = {0, 0, 0, 0}, least[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          const u32 group = 2 * block + half, low_byte = byte_of(low, 4 * part + group), high_byte = byte_of(high, 4 * part + group);
          u32 a[2];
          codes.operands(a, group);
          a[0] *= low_byte & 15;
          a[1] *= high_byte & 15;
          const u32 mins[2] = {(low_byte >> 4) * 0x01010101u, (high_byte >> 4) * 0x01010101u};
          const u32 b = *(const u32*)(in.codes + first + 64 * part + 16 * group + 4 * (lane % 4));
          mma_s8_k16(scaled, a, b);
          mma_s8_k16(least, mins, b);
        }
        const float2 x_scale = in.pair(in.scales, first / 32 + 2 * part + block);
        sums.add(scaled, low_f16(low_d), low_f16(high_d), x_scale);
        sums.add(least, -high_f16(low_d), -high_f16(high_d), x_scale);
      }
    }
  }
};

// Sums of 16 inputs times the scales of rows `group` and `group + 8`.
__device__ __forceinline__ void add_times(int (&sum)[4], const int (&d)[4], int low, int high) {
  sum[0] += d[0] * low;
  sum[1] += d[1] * low;
  sum[2] += d[2] * high;
  sum[3] += d[3] * high;
}

struct k6_mma : k6_fragment {
  static constexpr u32 K_BLOCKS_PER_STAGE = 1;
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(FragmentSums<ROWS>& sums, const u8* k_block, const LaneInput<ROWS>& in, u32 first,
                                                  u32 lane) {
    const u8* rows = k_block + SUB_SCALES + 16 * (lane / 4);
    const uint4 low = *(const uint4*)rows, high = *(const uint4*)(rows + 128);
    // The operands are 4 times the codes.
    const float d_low = 0.25f * f16_to_f32(*(const u16*)(k_block + SCALES + lane / 4 * 2));
    const float d_high = 0.25f * f16_to_f32(*(const u16*)(k_block + SCALES + 16 + lane / 4 * 2));
#pragma unroll
    for (u32 part = 0; part < 4; part++) {
      const uint4 codes = *(const uint4*)(k_block + PART_LOW * part + 16 * lane);
      const uint2 pairs = *(const uint2*)(k_block + HIGH + PART_HIGH * part + 8 * lane);
#pragma unroll
      for (u32 block = 0; block < 2; block++) {
        // Two groups of 16 share an activation scale: their sums, times their own scales, join as integers.
        int sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          const u32 group = 2 * block + half;
          const u32 w = word(codes, group), top = group < 2 ? pairs.x : pairs.y;
          const u32 shift = 4 * (group % 2);
          const u32 a[2] = {(w << 2 & 0x3c3c3c3cu) | (top << (6 - shift) & 0xc0c0c0c0u),
                            (w >> 2 & 0x3c3c3c3cu) | (top << (4 - shift) & 0xc0c0c0c0u)};
          const u32 b = *(const u32*)(in.codes + first + 64 * part + 16 * group + 4 * (lane % 4));
          int d[4] = {0, 0, 0, 0};
          mma_s8_k16(d, a, b);
          add_times(sum, d, i8(byte_of(low, 4 * part + group)), i8(byte_of(high, 4 * part + group)));
        }
        sums.add(sum, d_low, d_high, in.pair(in.scales, first / 32 + 2 * part + block));
      }
    }
  }
};

// T4: codes index the matrix's table, and a signed scale per 32 inputs.
struct t4_mma : t4_fragment {
  static constexpr u32 K_BLOCKS_PER_STAGE = 1;
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(FragmentSums<ROWS>& sums, const u8* k_block, const LaneInput<ROWS>& in, u32 first,
                                                  u32 lane) {
    const CodeTable table = *(const CodeTable*)(k_block + TABLE);
    const u8 *sub_scales = k_block + SUB_SCALES + lane / 4 * 2, *scales = k_block + SCALES + lane / 4 * 2;
    const float d_low = table.factor * f16_to_f32(*(const u16*)scales), d_high = table.factor * f16_to_f32(*(const u16*)(scales + 16));
#pragma unroll
    for (u32 part = 0; part < 4; part++) {
      const uint4 words = *(const uint4*)(k_block + PART_LOW * part + 16 * lane);
      const i8 *low = (const i8*)(sub_scales + 2 * M_TILE * part), *high = low + M_TILE;
#pragma unroll
      for (u32 step = 0; step < 2; step++) {
        u32 even[2], odd[2];
        table_nibbles(even, step ? words.z : words.x, table.values);
        table_nibbles(odd, step ? words.w : words.y, table.values);
        const uint2 x = *(const uint2*)(in.codes + first + 64 * part + 32 * step + 8 * (lane % 4));
        const u32 a[4] = {even[0], even[1], odd[0], odd[1]}, b[2] = {x.x, x.y};
        int d[4] = {0, 0, 0, 0};
        mma_s8(d, a, b);
        sums.add(d, d_low * float(int(low[step])), d_high * float(int(high[step])), in.pair(in.scales, first / 32 + 2 * part + step));
      }
    }
  }
};

// T3: the same, and a scale per 16 inputs; two of them share an activation scale, as in K6.
struct t3_mma : t3_fragment {
  static constexpr u32 K_BLOCKS_PER_STAGE = 1;
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(FragmentSums<ROWS>& sums, const u8* k_block, const LaneInput<ROWS>& in, u32 first,
                                                  u32 lane) {
    const CodeTable table = *(const CodeTable*)(k_block + TABLE);
    const u8* rows = k_block + SUB_SCALES + 16 * (lane / 4);
    const uint4 low = *(const uint4*)rows, high = *(const uint4*)(rows + 128);
    const u8* scales = k_block + SCALES + lane / 4 * 2;
    const float d_low = table.factor * f16_to_f32(*(const u16*)scales), d_high = table.factor * f16_to_f32(*(const u16*)(scales + 16));
#pragma unroll
    for (u32 part = 0; part < 4; part++) {
      TableCodes<t3_fragment> codes;
      codes.load(k_block + PART_LOW * part, k_block + HIGH + PART_HIGH * part, lane);
#pragma unroll
      for (u32 block = 0; block < 2; block++) {
        int sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          const u32 group = 2 * block + half;
          u32 a[2];
          codes.operands(a, group, table);
          const u32 b = *(const u32*)(in.codes + first + 64 * part + 16 * group + 4 * (lane % 4));
          int d[4] = {0, 0, 0, 0};
          mma_s8_k16(d, a, b);
          add_times(sum, d, i8(byte_of(low, 4 * part + group)), i8(byte_of(high, 4 * part + group)));
        }
        sums.add(sum, d_low, d_high, in.pair(in.scales, first / 32 + 2 * part + block));
      }
    }
  }
};

// F4: nibbles that are small floats, and floats of eight bits as scales of 16 inputs.
struct f4_mma : f4_fragment {
  static constexpr u32 K_BLOCKS_PER_STAGE = 1;
  static constexpr bool HAS_MINS = false;

  template <int ROWS>
  static __device__ __forceinline__ void multiply(FragmentSums<ROWS>& sums, const u8* k_block, const LaneInput<ROWS>& in, u32 first,
                                                  u32 lane) {
    const CodeTable table = *(const CodeTable*)(k_block + TABLE);
    const u8* rows = k_block + SUB_SCALES + 16 * (lane / 4);
    const uint4 low = *(const uint4*)rows, high = *(const uint4*)(rows + 128);
    const float d_low = table.factor * f16_to_f32(*(const u16*)(k_block + SCALES + lane / 4 * 2));
    const float d_high = table.factor * f16_to_f32(*(const u16*)(k_block + SCALES + 16 + lane / 4 * 2));
#pragma unroll
    for (u32 part = 0; part < 4; part++) {
      TableCodes<f4_fragment> codes;
      codes.load(k_block + PART_LOW * part, nullptr, lane);
#pragma unroll
      for (u32 group = 0; group < 4; group++) {
        u32 a[2];
        codes.operands(a, group, table);
        const u32 b = *(const u32*)(in.codes + first + 64 * part + 16 * group + 4 * (lane % 4));
        int d[4] = {0, 0, 0, 0};
        mma_s8_k16(d, a, b);
        sums.add(d, d_low * float_sub_scale(byte_of(low, 4 * part + group), table.shift),
                 d_high * float_sub_scale(byte_of(high, 4 * part + group), table.shift),
                 in.pair(in.scales, first / 32 + 2 * part + group / 2));
      }
    }
  }
};

// A matrix of fragments, streamed stage by stage through shared memory. Behind an M-tile's end a stage is zeros.
template <typename Mma>
struct FragmentWeights {
  static constexpr u32 M_TILE = ::M_TILE, K_BLOCKS = Mma::K_BLOCKS_PER_STAGE;
  static constexpr u32 STAGE_INPUTS = Mma::INPUTS * K_BLOCKS, STAGE_BYTES = Mma::BYTES * K_BLOCKS;
  static constexpr u32 STEP = STAGE_BYTES;  // from one stage of an M-tile to the next
  static constexpr bool QUANTIZED = true, HAS_MINS = Mma::HAS_MINS;
  template <int ROWS>
  using Sums = FragmentSums<ROWS>;
  template <int ROWS>
  using LaneOf = LaneInput<ROWS>;

  // Starts the copy of a stage, of which `bytes` are there. Both addresses are the lane's own.
  static __device__ __forceinline__ void fetch(u8* to, const u8* from, u32 bytes, u32, u32, u32 lane) {
#pragma unroll
    for (u32 at = 0; at < STAGE_BYTES; at += 512) {
      const u32 mine = at + 16 * lane;
      if (at + 512 <= STAGE_BYTES || mine < STAGE_BYTES) cp_async_16(to + at, from + at, mine < bytes);
    }
  }

  // Adds a stage whose first input is `first`.
  template <int ROWS>
  static __device__ __forceinline__ void multiply(FragmentSums<ROWS>& sums, const u8* slot, const LaneInput<ROWS>& in, u32 first, u32 lane) {
#pragma unroll
    for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) {
      Mma::template multiply<ROWS>(sums, slot + k_block * Mma::BYTES, in, first + k_block * Mma::INPUTS, lane);
    }
  }
};

typedef FragmentWeights<q8_mma> q8_weights;
typedef FragmentWeights<signed_mma<q4_fragment>> q4_weights;
typedef FragmentWeights<signed_mma<q5_fragment>> q5_weights;
typedef FragmentWeights<signed_mma<n4_fragment>> n4_weights;
typedef FragmentWeights<signed_mma<m4_fragment>> m4_weights;
typedef FragmentWeights<signed_mma<m5_fragment>> m5_weights;
typedef FragmentWeights<k2_mma> k2_weights;
typedef FragmentWeights<k45_mma<k4_fragment>> k4_weights;
typedef FragmentWeights<k45_mma<k5_fragment>> k5_weights;
typedef FragmentWeights<k6_mma> k6_weights;
typedef FragmentWeights<t4_mma> t4_weights;
typedef FragmentWeights<f4_mma> f4_weights;
typedef FragmentWeights<t3_mma> t3_weights;
