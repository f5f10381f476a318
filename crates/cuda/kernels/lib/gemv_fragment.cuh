// Products of fragments (src/kernel/fragment.rs) with int8 activations for gemv.cu: one warp, one M-tile, one stage at a time.
//
// The M-tile's 16 rows are the rows of the tensor core's A, the tokens columns of its B. How inputs go through it is in
// lib/gemv_step.cuh and lib/gemv_quartet.cuh, a struct per format: its K-blocks of a stage, a lane's input, sums, and the product.
#pragma once
#include "lib/gemv_quartet.cuh"

// A matrix of fragments, streamed stage by stage through shared memory. Behind an M-tile's end a stage is zeros.
template <typename Mma>
struct FragmentWeights {
  static constexpr u32 M_TILE = ::M_TILE, K_BLOCKS = Mma::K_BLOCKS_PER_STAGE;
  static constexpr u32 STAGE_INPUTS = Mma::INPUTS * K_BLOCKS, STAGE_BYTES = Mma::BYTES * K_BLOCKS;
  static constexpr u32 STEP = STAGE_BYTES;  // from one stage of an M-tile to the next
  static constexpr bool QUANTIZED = true, HAS_MINS = Mma::HAS_MINS;
  template <int ROWS>
  using Sums = typename Mma::template Sums<ROWS>;
  template <int ROWS>
  using LaneOf = typename Mma::template Lane<ROWS>;

  // Starts the copy of a stage, of which `bytes` are there. Both addresses are the lane's own.
  static __device__ __forceinline__ void fetch(SharedPlace to, const u8* from, u32 bytes, u32, u32, u32 lane) {
#pragma unroll
    for (u32 at = 0; at < STAGE_BYTES; at += 512) {
      const u32 mine = at + 16 * lane;
      if (at + 512 <= STAGE_BYTES || mine < STAGE_BYTES) cp_async_16_streamed(to + at, from + at, mine < bytes);
    }
  }

  // Adds a stage whose first input is `first`.
  template <int ROWS>
  static __device__ __forceinline__ void multiply(Sums<ROWS>& sums, const u8* slot, LaneOf<ROWS>& in, u32 first, u32 lane) {
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
typedef FragmentWeights<sixteens_mma<k6_fragment>> k6_weights;
typedef FragmentWeights<t4_mma> t4_weights;
typedef FragmentWeights<f4_mma> f4_weights;
typedef FragmentWeights<sixteens_mma<t3_fragment>> t3_weights;
typedef FragmentWeights<sixteens_mma<t2_fragment>> t2_weights;
typedef FragmentWeights<sixteens_mma<t1_fragment>> t1_weights;
