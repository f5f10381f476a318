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

// Run and position of each batch row.
struct RowRefs {
  const u32* position;
  const u32* run;
};

// The rows a kernel works on, by run: run `r` has rows `first[r]` up to `first[r + 1]`, maybe none. Positions are
// consecutive in it.
struct Runs {
  const u32* count;
  const u32* first;
};
