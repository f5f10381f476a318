// Products of row-major float matrices with float activations for gemv.cu: one warp, four output rows, 512 bytes of each at a
// time. Products are exact but for the one rounding of each fused multiply-add.
//
// A lane takes 16 bytes of every row, so its activations are read from shared memory once for four rows; they lie there permuted,
// so that a warp's reads have no bank conflicts.
#pragma once
#include "lib/gemv_fragment.cuh"

struct f16_element {
  static constexpr u32 LANE_VALUES = 8;
  static __device__ __forceinline__ float low(u32 pair) { return low_f16(pair); }
  static __device__ __forceinline__ float high(u32 pair) { return high_f16(pair); }
};

struct bf16_element {
  static constexpr u32 LANE_VALUES = 8;
  static __device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
};

struct f32_element {
  static constexpr u32 LANE_VALUES = 4;
};

template <typename Element>
__device__ __forceinline__ void decode(float (&out)[8], const uint4& w) {
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    out[2 * i] = Element::low(word(w, i));
    out[2 * i + 1] = Element::high(word(w, i));
  }
}
template <typename Element>
__device__ __forceinline__ void decode(float (&out)[4], const uint4& w) {
#pragma unroll
  for (u32 i = 0; i < 4; i++) out[i] = __uint_as_float(word(w, i));
}

// Addresses of the activations that a lane reads.
struct FloatInput {
  const u8* values;
  u32 stride;

  __device__ __forceinline__ FloatInput(const Input& in, u32 lane) : values(in.values + 16 * lane), stride(in.stride) {}
};

// Sums of four outputs of every token, over each lane's share of the inputs.
template <int ROWS>
struct FloatSums {
  float c[4 * ROWS] = {};

  // Exchanges half of what is held for half of the partner's, HELD values remaining, until one remains.
  template <int HELD, int MASK>
  __device__ __forceinline__ void fold(u32 lane) {
    if constexpr (MASK > 0) {
      if constexpr (HELD > 0) {
        const bool upper = lane & MASK;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
          const float sent = upper ? c[i] : c[i + HELD], kept = upper ? c[i + HELD] : c[i];
          c[i] = kept + __shfl_xor_sync(ALL_LANES, sent, MASK);
        }
      } else {
        c[0] += __shfl_xor_sync(ALL_LANES, c[0], MASK);
      }
      fold<HELD / 2, MASK / 2>(lane);
    }
  }

  // To `[ROWS, 4]`, summed over lanes. Folding takes fewer exchanges than summing value by value, and pairs lanes in the same
  // order whatever ROWS is.
  __device__ __forceinline__ void store(float* to, u32 lane) {
    fold<2 * ROWS, 16>(lane);
    constexpr u32 SAME = WARP / (4 * ROWS);  // lanes that hold the same sum
    if (lane % SAME == 0) to[lane / SAME] = c[0];
  }
};

template <typename Element>
struct FloatWeights {
  static constexpr u32 M_TILE = 4, STAGE_INPUTS = WARP * Element::LANE_VALUES, STAGE_BYTES = 4 * 512;
  static constexpr u32 STEP = 512;
  static constexpr bool QUANTIZED = false, HAS_MINS = false;
  template <int ROWS>
  using Sums = FloatSums<ROWS>;
  template <int ROWS>
  using LaneOf = FloatInput;

  // Starts the copy of a stage: of `rows` rows that are there, `bytes`. Both addresses are the lane's own.
  static __device__ __forceinline__ void fetch(SharedPlace to, const u8* from, u32 bytes, u32 rows, u32 row_bytes, u32 lane) {
#pragma unroll
    for (u32 row = 0; row < 4; row++) {
      cp_async_16_streamed(to + 512 * row, from, 16 * lane < bytes && row < rows);
      from += row_bytes;
    }
  }

  // Adds a stage whose first input is `first`.
  template <int ROWS>
  static __device__ __forceinline__ void multiply(FloatSums<ROWS>& sums, const u8* slot, const FloatInput& in, u32 first, u32 lane) {
    constexpr u32 QUARTERS = Element::LANE_VALUES / 4;
    float w[4][Element::LANE_VALUES];
#pragma unroll
    for (u32 o = 0; o < 4; o++) decode<Element>(w[o], *(const uint4*)(slot + 512 * o + 16 * lane));
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
      const float4* values = (const float4*)(in.values + row * in.stride + 4 * first);
#pragma unroll
      for (u32 q = 0; q < QUARTERS; q++) {
        const float4 x = values[q * WARP];
#pragma unroll
        for (u32 o = 0; o < 4; o++) {
          float& c = sums.c[4 * row + o];
          c = fmaf(w[o][4 * q], x.x, c);
          c = fmaf(w[o][4 * q + 1], x.y, c);
          c = fmaf(w[o][4 * q + 2], x.z, c);
          c = fmaf(w[o][4 * q + 3], x.w, c);
        }
      }
    }
  }

  // Index of the four activations from input `4 * four` on, in fours: first quarters of all lanes, then second ones.
  static __device__ __forceinline__ u32 permuted(u32 four) {
    if (Element::LANE_VALUES == 4) return four;
    return four / 64 * 64 + four % 2 * 32 + four / 2 % 32;
  }
};

typedef FloatWeights<f16_element> f16_weights;
typedef FloatWeights<bf16_element> bf16_weights;
typedef FloatWeights<f32_element> f32_weights;
