// The input of a matrix-vector product, made by every block for itself: norms and sums of the residual stream, then int8
// codes in blocks of 32 (or plain floats) in shared memory.
//
// A thread holds up to VALUES fours of a row at a time; which ones depends on the number of threads alone, so a row's norm
// does not depend on how many rows there are. Rows go in pairs, for the latency of their loads.
#pragma once
#include "lib/gemv_float.cuh"

// What is done to x before the product. Mirrors `Prologue` in src/kernel/gemv.rs.
constexpr u32 NONE = 0, NORM = 1, NORM_ADD = 2, NORM_ADD_NORM = 3;
constexpr int VALUES = 3;

struct Prologue {
  const float* x;
  const float* weight;  // may be null, as the next
  const float* next_weight;
  const float* a;
  float* sum;
  u32 kind;
  float eps;
  float by;
  float next_eps;
};

template <int ROWS>
using RowValues = float4[ROWS][VALUES];

__device__ __forceinline__ float4 load_four(const float* from, u32 four, u32 columns) {
  if (4 * four >= columns) return make_float4(0, 0, 0, 0);
  return ((const float4*)from)[four];
}

// Fours `first + threadIdx.x`, `+ blockDim.x`, ... of rows `row` on.
template <int ROWS>
__device__ __forceinline__ void load_values(RowValues<ROWS>& values, const float* from, u32 row, u32 first, u32 columns) {
#pragma unroll
  for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) {
      values[r][i] = load_four(from + u64(row + r) * columns, first + i * blockDim.x + threadIdx.x, columns);
    }
  }
}

// 1 / sqrt(mean of squares + eps) of each row. `scratch` has room for ROWS * 32 floats that nobody else uses meanwhile.
template <int ROWS>
__device__ __forceinline__ void rms_scales(float (&scale)[ROWS], const RowValues<ROWS>& values, u32 columns, float eps,
                                           float* scratch) {
  const u32 warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
#pragma unroll
  for (u32 r = 0; r < ROWS; r++) {
    float squares = 0;
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) {
      const float4 v = values[r][i];
      squares += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % WARP == 0) scratch[r * 32 + warp] = squares;
  }
  __syncthreads();
#pragma unroll
  for (u32 r = 0; r < ROWS; r++) {
    float sum = 0;
    for (u32 w = 0; w < warps; w++) sum += scratch[r * 32 + w];
    scale[r] = 1.0f / sqrtf(sum / float(columns) + eps);
  }
}

__device__ __forceinline__ float4 scaled(const float4& v, float scale, const float4& weight) {
  return make_float4(mul(mul(v.x, scale), weight.x), mul(mul(v.y, scale), weight.y), mul(mul(v.z, scale), weight.z),
                     mul(mul(v.w, scale), weight.w));
}

// A norm's weight, or ones.
__device__ __forceinline__ void load_weight(float4 (&to)[VALUES], const float* from, u32 columns) {
#pragma unroll
  for (u32 i = 0; i < VALUES; i++) {
    to[i] = from ? load_four(from, i * blockDim.x + threadIdx.x, columns) : make_float4(1, 1, 1, 1);
  }
}

template <int ROWS>
__device__ __forceinline__ void norm_values(RowValues<ROWS>& values, const float (&scale)[ROWS], const float4 (&weight)[VALUES]) {
#pragma unroll
  for (u32 i = 0; i < VALUES; i++) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) values[r][i] = scaled(values[r][i], scale[r], weight[i]);
  }
}

template <int ROWS>
__device__ __forceinline__ void add_values(RowValues<ROWS>& values, const RowValues<ROWS>& a, float by) {
#pragma unroll
  for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) {
      float4& v = values[r][i];
      const float4 with = a[r][i];
      v = make_float4(mul(add(with.x, v.x), by), mul(add(with.y, v.y), by), mul(add(with.z, v.z), by), mul(add(with.w, v.w), by));
    }
  }
}

// Eight lanes that stand side by side hold a block of 32: its largest magnitude / 127 is the unit of its codes.
template <bool HAS_MINS, int ALL_ROWS>
__device__ __forceinline__ void put_codes(const Input& in, u32 row, u32 four, const float4& v, bool there) {
  float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
  for (int mask = 4; mask > 0; mask /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, mask));
  const float scale = most / 127.0f, per = scale > 0 ? 1.0f / scale : 0;
  // Adding 1.5 * 2^23 rounds to an integer, ties to even, whose low byte is the code.
  const float magic = 12582912.0f;
  const u32 c0 = __float_as_uint(fmaf(v.x, per, magic)), c1 = __float_as_uint(fmaf(v.y, per, magic));
  const u32 c2 = __float_as_uint(fmaf(v.z, per, magic)), c3 = __float_as_uint(fmaf(v.w, per, magic));
  const u32 codes = __byte_perm(__byte_perm(c0, c1, 0x0040), __byte_perm(c2, c3, 0x0040), 0x5410);
  int sum = 0;
  if (HAS_MINS) {
    sum = __dp4a(int(codes), 0x01010101, 0);
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
  }
  if (!there) return;
  *(u32*)(in.values + row * in.stride + 4 * four) = codes;
  if (four % 8 != 0) return;
  in.scales[four / 8 * ALL_ROWS + row] = scale;
  if (HAS_MINS) in.sums[four / 8 * ALL_ROWS + row] = mul(scale, float(sum));
}

// Leaves values where products find them; `padded` columns, those behind the row's end as zeros.
template <typename Weights, int ALL_ROWS, int ROWS>
__device__ __forceinline__ void put_values(const Input& in, const RowValues<ROWS>& values, u32 row, u32 first, u32 padded) {
#pragma unroll
  for (u32 i = 0; i < VALUES; i++) {
    const u32 four = first + i * blockDim.x + threadIdx.x;
    if (four - threadIdx.x % WARP >= padded / 4) break;  // warps stay whole
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
      if constexpr (Weights::QUANTIZED) {
        put_codes<Weights::HAS_MINS, ALL_ROWS>(in, row + r, four, values[r][i], four < padded / 4);
      } else if (four < padded / 4) {
        ((float4*)(in.values + (row + r) * in.stride))[Weights::place(four)] = values[r][i];
      }
    }
  }
}

// Rows of the sum, for those who come after this kernel.
template <int ROWS>
__device__ __forceinline__ void write_sum(const Prologue& p, const RowValues<ROWS>& values, u32 row, u32 count, u32 columns) {
#pragma unroll
  for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) {
      const u32 four = i * blockDim.x + threadIdx.x;
      if (row + r < count && 4 * four < columns) ((float4*)(p.sum + u64(row + r) * columns))[four] = values[r][i];
    }
  }
}

// What a thread holds of the input while it is made. Of several rows, norms' weights are loaded where they are used: registers
// are short then, and all rows but the first find them in the first cache.
template <int ROWS>
struct Held {
  RowValues<ROWS> x, a;
  float4 weight[VALUES], next_weight[VALUES];

  // Loads of rows `row` on; those from `first` on where there is no norm.
  __device__ __forceinline__ void load_rows(const Prologue& p, u32 row, u32 first, u32 columns) {
    load_values<ROWS>(x, p.x, row, first, columns);
    if (p.kind >= NORM_ADD) load_values<ROWS>(a, p.a, row, first, columns);
  }

  __device__ __forceinline__ void load(const Prologue& p, u32 columns) {
    load_rows(p, 0, 0, columns);
    if (ROWS > 1) return;
    if (p.kind >= NORM) load_weight(weight, p.weight, columns);
    if (p.kind == NORM_ADD_NORM) load_weight(next_weight, p.next_weight, columns);
  }

  // Multiplies what was loaded from `first` on: a factor for every `columns_each` columns.
  __device__ __forceinline__ void multiply(const float* factors, u32 columns_each, u32 first, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) {
      const u32 column = 4 * (first + i * blockDim.x + threadIdx.x);
      const float by = column < columns ? factors[column / columns_each] : 0;
#pragma unroll
      for (u32 r = 0; r < ROWS; r++) {
        float4& v = x[r][i];
        v = make_float4(mul(v.x, by), mul(v.y, by), mul(v.z, by), mul(v.w, by));
      }
    }
  }
};

// The whole input, of ALL_ROWS rows of which `count` are there, into shared memory; `held` has the first loads. A barrier must
// follow. `factors` may be null, and is for inputs without a norm.
template <typename Weights, int ALL_ROWS, int ROWS>
__device__ __forceinline__ void prepare(const Input& in, const Prologue& p, Held<ROWS>& held, const float* factors, u32 columns_each,
                                        u32 columns, u32 padded, u32 count) {
  __shared__ float scratch[2][2][ROWS * 32];
#pragma unroll 1
  for (u32 row = 0; row < ALL_ROWS; row += ROWS) {
    if (p.kind == NONE) {
#pragma unroll 1
      for (u32 first = 0; 4 * first < padded; first += VALUES * blockDim.x) {
        if (row + first > 0) held.load_rows(p, row, first, columns);
        if (factors) held.multiply(factors, columns_each, first, columns);
        put_values<Weights, ALL_ROWS, ROWS>(in, held.x, row, first, padded);
      }
      continue;
    }
    if (row > 0) held.load_rows(p, row, 0, columns);
    float* of_rows = scratch[row / ROWS % 2][0];
    float* of_next = scratch[row / ROWS % 2][1];
    float scale[ROWS];
    rms_scales<ROWS>(scale, held.x, columns, p.eps, of_rows);
    if (ROWS > 1) load_weight(held.weight, p.weight, columns);
    norm_values<ROWS>(held.x, scale, held.weight);
    if (p.kind >= NORM_ADD) {
      add_values<ROWS>(held.x, held.a, p.by);
      if (blockIdx.x == 0) write_sum<ROWS>(p, held.x, row, count, columns);
    }
    if (p.kind == NORM_ADD_NORM) {
      rms_scales<ROWS>(scale, held.x, columns, p.next_eps, of_next);
      if (ROWS > 1) load_weight(held.next_weight, p.next_weight, columns);
      norm_values<ROWS>(held.x, scale, held.next_weight);
    }
    put_values<Weights, ALL_ROWS, ROWS>(in, held.x, row, 0, padded);
  }
}
