// Rows of a product's input as int8 codes in blocks of 32, as a launch before the product writes them: codes `[PREPARED_ROWS, columns]`,
// then of each block a scale and the sum of its codes times that, `[blocks, PREPARED_ROWS]` each. Columns go up to the end of the
// product's last stage. Mirrors `PreparedRows` in src/kernel/linear/prepare_rows.rs.
#pragma once
#include "lib/num.cuh"

constexpr u32 PREPARED_ROWS = 8;

// Bytes of all of it. More rows than that are several of these, one after the other.
__device__ __forceinline__ u32 prepared_bytes(u32 columns) { return PREPARED_ROWS * (columns + columns / 32 * 8); }

// The step of a block's codes, and its reciprocal. A block of next to nothing is zeros.
struct CodeScale {
  float scale, per;

  __device__ __forceinline__ explicit CodeScale(float largest) {
    scale = largest > 1e-30f ? mul(largest, 1.0f / 127) : 0, per = largest > 1e-30f ? reciprocal(scale) : 0;
  }
  // Adding 1.5 * 2^23 rounds to an integer, ties to even, whose low byte is the code.
  __device__ __forceinline__ u32 code(float v) const { return __float_as_uint(fmaf(v, per, 12582912.0f)); }
};
