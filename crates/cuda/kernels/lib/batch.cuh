// The part of a batch that varies, read from device memory at fixed addresses; src/run/batch.rs writes it in one copy.
//
// Grids cover as many rows as their bucket has; kernels ask `count` and leave the other rows alone. So one captured launch
// serves every batch of its bucket.
#pragma once
#include "lib/num.cuh"

// The rows a kernel works on: all of the batch, or the sampled ones.
struct Rows {
  const u32* count;
  const u32* index;  // the batch row of each of them

  __device__ __forceinline__ bool has(u32 row) const { return row < *count; }
};

// Run and position of each batch row, and the position behind the last that it sees in sliding-window layers.
struct RowRefs {
  const u32* position;
  const u32* run;
  const u32* sliding_end;

  // The last position that a batch row sees, in a layer with this window or, where it is 0, without one.
  __device__ __forceinline__ u32 last_seen(u32 row, u32 window) const {
    return window ? sliding_end[row] - 1 : position[row];
  }
};

// Embeddings that batch rows are fed in place of tokens.
struct Inputs {
  const u32* index;  // the number of a batch row's embedding, or NO_INPUT; null for tables that nothing is fed in place of
  const float* const* start;

  // A batch row's embedding of so many columns; null if it is fed a token.
  __device__ __forceinline__ const float* row(u32 row, u32 columns) const {
    constexpr u32 NO_INPUT = 0xffffffffu;
    const u32 number = index ? index[row] : NO_INPUT;
    return number == NO_INPUT ? nullptr : *start + u64(number) * columns;
  }
};

// The rows a kernel works on, by run: run `r` has rows `first[r]` up to `first[r + 1]`, maybe none. Positions are
// consecutive in it.
struct Runs {
  const u32* count;
  const u32* first;
};
