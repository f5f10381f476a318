// Dot products of one packed weight row with some activation rows, by one warp.
#pragma once
#include "lib/format.cuh"
#include "lib/reduce.cuh"

// `sum[t] = w . x[t]`, in every lane. Each weight is decoded once for all `TILE` rows. Lane `l` takes columns l, l + 32, ...
// in order, so a row's result does not depend on its neighbours or on TILE.
template <int TILE>
__device__ __forceinline__ void dot_rows(const u8* w, const float* const (&x)[TILE], u32 columns, float (&sum)[TILE]) {
#pragma unroll
  for (int t = 0; t < TILE; t++) sum[t] = 0;
#pragma unroll 4
  for (u32 i = threadIdx.x % WARP; i < columns; i += WARP) {
    float value = weight_value(w, i);
#pragma unroll
    for (int t = 0; t < TILE; t++) sum[t] = fmaf(value, x[t][i], sum[t]);
  }
#pragma unroll
  for (int t = 0; t < TILE; t++) sum[t] = warp_sum(sum[t]);
}
