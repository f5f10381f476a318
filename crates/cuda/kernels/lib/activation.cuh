// Formats of activations that matrix products read, written four columns at a time.
//
//   F16       f16 `[rows, columns]`; K-permuted, or in token tiles where there are few rows, if `layout` says so (lib/token_tiles.cuh)
//   Int8      codes `[rows, columns]`, and for each 32 columns a scale (largest magnitude / 127) and the sum of the codes times it
//   Int8HiLo  two-term int8: a row's Int8, and behind it the Int8 of the residual that rounding leaves; rows are twice as long
#pragma once
#include "lib/ptx.cuh"
#include "lib/reduce.cuh"
#include "lib/token_tiles.cuh"

enum F16Layout { ROWS_AS_THEY_ARE, TOKEN_TILES, K_PERMUTED };

struct Activation {
  u16* f16;   // F16, else null
  i8* codes;  // Int8 and Int8HiLo, else null
  float* scales;
  float* sums;
  u64 low_offset;  // Int8HiLo: the columns, which is how far behind a code its low term lies; else 0
  u64 layout;      // of F16

  __device__ __forceinline__ bool any() const { return f16 || codes; }
};

// The largest of eight threads side by side, and their sum.
__device__ __forceinline__ float max_of_8(float x) {
#pragma unroll
  for (int mask = 4; mask > 0; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, mask));
  return x;
}
__device__ __forceinline__ int sum_of_8(int x) {
#pragma unroll
  for (int mask = 4; mask > 0; mask >>= 1) x += __shfl_xor_sync(ALL_LANES, x, mask);
  return x;
}

__device__ __forceinline__ float magnitude(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

__device__ __forceinline__ uint2 as_f16x4(float4 v) {
  return make_uint2(pack_f16x2(v.x, v.y), pack_f16x2(v.z, v.w));
}

// Rounds half to even. The limits matter only where a scale is so small that it has lost digits itself.
__device__ __forceinline__ int q8_code(float x, float scale) { return min(max(__float2int_rn(x / scale), -127), 127); }

// Four columns as int8. Returns the residual: what the codes leave over.
__device__ __forceinline__ float4 store_codes(const Activation& to, u64 at, float4 v, bool inside) {
  const float scale = max_of_8(magnitude(v)) / 127;
  int codes[4] = {0, 0, 0, 0};
  if (scale != 0) {
    codes[0] = q8_code(v.x, scale), codes[1] = q8_code(v.y, scale);
    codes[2] = q8_code(v.z, scale), codes[3] = q8_code(v.w, scale);
  }
  const int sum = sum_of_8(codes[0] + codes[1] + codes[2] + codes[3]);
  if (inside) {
    u32 packed = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) packed |= u32(u8(codes[i])) << 8 * i;
    *(u32*)(to.codes + at) = packed;
    if (threadIdx.x % 8 == 0) {
      to.scales[at / 32] = scale;
      to.sums[at / 32] = scale * float(sum);
    }
  }
  return make_float4(fmaf(-scale, float(codes[0]), v.x), fmaf(-scale, float(codes[1]), v.y),
                     fmaf(-scale, float(codes[2]), v.z), fmaf(-scale, float(codes[3]), v.w));
}

// Writes four columns of one of `rows` rows, from `column` on. Whole warps call it, eight threads side by side with the 32 columns
// of a block; threads without columns say so by `inside`.
// Requires for int8 that rows have whole blocks, for F16 that they have whole fours. Not for Int8HiLo.
__device__ __forceinline__ void store_activation(const Activation& to, u32 rows, u32 row, u32 columns, u32 column, float4 v, bool inside) {
  const u64 at = u64(row) * columns + column;
  if (!to.f16) {
    store_codes(to, at, v, inside);
#if __CUDA_ARCH__ >= 900
    // Of no use elsewhere, and registers are dear.
  } else if (inside && to.layout == K_PERMUTED) {
    store_permuted(to.f16 + u64(row) * columns, column, as_f16x4(v));
  } else if (inside && to.layout == TOKEN_TILES && rows <= TILE_TOKENS) {
    store_in_tiles(to.f16, row, column, as_f16x4(v));
#endif
  } else if (inside) {
    *(uint2*)(to.f16 + at) = as_f16x4(v);
  }
}

// The same for Int8HiLo, of a row whose first element is number `start` of all: codes of the value, then of their residual.
__device__ __forceinline__ void store_hi_lo(const Activation& to, u64 start, u32 column, float4 v, bool inside) {
  const u64 at = 2 * start + column;
  const float4 residual = store_codes(to, at, v, inside);
  store_codes(to, at + to.low_offset, residual, inside);
}
