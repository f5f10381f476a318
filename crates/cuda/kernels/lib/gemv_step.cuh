// Products of fragments whose scales are f16 with int8 activations (lib/gemv_fragment.cuh), a step of 32 inputs after the other: they
// need few instructions, and wait for results of each other rather than for their turn (lib/gemv_quartet.cuh).
//
// Integer sums of a step are exact, and become floats once per step: c += weight scale * activation scale * sum. Columns without a token
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
  template <int ROWS>
  using Lane = LaneInput<ROWS>;
  template <int ROWS>
  using Sums = FragmentSums<ROWS>;
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
  template <int ROWS>
  using Lane = LaneInput<ROWS>;
  template <int ROWS>
  using Sums = FragmentSums<ROWS>;
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
