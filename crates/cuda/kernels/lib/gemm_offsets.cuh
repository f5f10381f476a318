// Offsets of K4 and K5 (lib/gemm_weights.cuh) in gemm.cu: those of a K-block times the sums of its eight blocks of activations, a product
// by itself, with as many inputs, in bf16. Most of a weight is in its code, so that the digits that go are as nothing beside those of int8
// activations; where these have two TERMS, so have offsets and sums.
#pragma once
#include "lib/gemm_weights.cuh"

// Two floats as bf16, and what that leaves of them.
struct Bf16Pair {
  u32 rounded, rest;

  __device__ __forceinline__ Bf16Pair(float low, float high) : rounded(pack_bf16x2(low, high)) {
    rest = pack_bf16x2(low - __uint_as_float(rounded << 16), high - __uint_as_float(rounded & 0xffff0000u));
  }
};

// In shared memory a K-block has 32 bytes of sums per token, then the sub-scales and minimums of its 128 rows.
template <typename W, int TOKENS, bool HAS_OFFSETS = W::HAS_OFFSETS>
struct Offsets {
  static constexpr u32 SUB_SCALES_AT = TOKENS * 32, BYTES = SUB_SCALES_AT + 8 * M_TILE * 16;

  // A warp's part, which is that of the M-tile it copies. `x_sums` are those of a thread's token, two threads to each.
  static __device__ __forceinline__ void copy(u8* to, const u8* m_tile, u32 stage, const float* x_sums) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u8* sub_scales = m_tile + stage / W::PARTS * W::BYTES + W::SUB_SCALES;
    if (lane < M_TILE) cp_async_16(to + SUB_SCALES_AT + (warp * M_TILE + lane) * 16, sub_scales + 16 * lane);
    if (threadIdx.x < 2 * TOKENS) cp_async_16(to + 16 * threadIdx.x, x_sums + threadIdx.x % 2 * 4);
  }

  // Adds FACTOR times the products, of an M-tile `m_tile` of eight and tokens from `token` on; `rows` are words of the M-tile's rows.
  template <int OCTETS>
  static __device__ __forceinline__ void add(float (&sum)[OCTETS][4], const u8* from, const u8* rows, u32 m_tile, u32 token, u32 lane) {
    const u32 group = lane / 4, quad = lane % 4;
    u32 a[2], a_rest[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 row = group + 8 * i, bytes = word_at(from + SUB_SCALES_AT + (m_tile * M_TILE + row) * 16 + 4 * quad),
                both = word_at(rows + 8 * row + 4);
      const float d = W::FACTOR * W::MIDDLE * f16_to_f32(u16(both)), min = -W::FACTOR * f16_to_f32(u16(both >> 16));
      const Bf16Pair offsets(times_byte(d, bytes, 0) + times_byte(min, bytes, 1), times_byte(d, bytes, 2) + times_byte(min, bytes, 3));
      a[i] = offsets.rounded;
      a_rest[i] = offsets.rest;
    }
#pragma unroll
    for (int j = 0; j < OCTETS; j++) {
      const float2 pair = *(const float2*)(from + (token + 8 * j + group) * 32 + 8 * quad);
      const Bf16Pair sums(pair.x, pair.y);
      if (TERMS == 2) {
        mma_bf16_k8(sum[j], a_rest, sums.rounded);
        mma_bf16_k8(sum[j], a, sums.rest);
      }
      mma_bf16_k8(sum[j], a, sums.rounded);
    }
  }
};

template <typename W, int TOKENS>
struct Offsets<W, TOKENS, false> {
  static constexpr u32 BYTES = 0;
  static __device__ __forceinline__ void copy(u8*, const u8*, u32, const float*) {}
  template <int OCTETS>
  static __device__ __forceinline__ void add(float (&)[OCTETS][4], const u8*, const u8*, u32, u32, u32) {}
};
