// The prologue of a matrix-vector product, run by every block for itself: norms and sums of the residual stream, then int8
// codes in blocks of 32 (or plain floats) in shared memory.
//
// A small product takes little more than the latency of this, so loads are issued at once and instructions are few. Which
// columns a thread holds depends on the number of threads alone, so a row's norm does not depend on how many rows there are.
// Several rows go in pairs.
#pragma once
#include "lib/gemv_float.cuh"
#include "lib/prepared_rows.cuh"

// Kinds of prologue. Mirrors `GemvPrologue` in src/kernel/linear/gemv.rs.
constexpr u32 RESIDUAL = 2, RESIDUAL_NORM = 3;

struct Prologue {
  const float* x;
  const float* weight;  // may be null, as the next
  const float* following_weight;
  const float* residual;
  float* sum;
  u32 kind;
  float per_column;  // 1 / columns
  float eps;
  float scale;
  float following_eps;
  u32 reserved;
};

// Eight neighbouring lanes hold a block of 32: its largest magnitude / 127 is the step of its codes.
template <typename Weights, int LAYOUT_ROWS>
__device__ __forceinline__ void put_codes(const Input& in, u32 row, u32 four, const float4& v, bool there) {
  float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
  for (int mask = 4; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
  const CodeScale by(largest);
  const u32 codes = __byte_perm(__byte_perm(by.code(v.x), by.code(v.y), 0x0040), __byte_perm(by.code(v.z), by.code(v.w), 0x0040), 0x5410);
  int sum = 0;
  if (Weights::HAS_MINS) {
    sum = __dp4a(int(codes), 0x01010101, 0);
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
  }
  if (!there) return;
  *(u32*)(in.values + row * in.stride + 4 * four) = codes;
  if (four % 8 != 0) return;
  in.scales[four / 8 * LAYOUT_ROWS + row] = by.scale;
  if (Weights::HAS_MINS) in.sums[four / 8 * LAYOUT_ROWS + row] = mul(by.scale, float(sum));
}

// The same of a value per lane, of a block that a warp has, into prepared rows. Sums are always there.
__device__ __forceinline__ void put_code(const Input& in, u32 row, u32 column, float v) {
  const CodeScale by(warp_max(fabsf(v)));
  const int code = (signed char)by.code(v);
  in.values[row * in.stride + column] = u8(code);
  const int sum = __reduce_add_sync(ALL_LANES, code);
  if (column % 32 != 0) return;
  in.scales[column / 32 * PREPARED_ROWS + row] = by.scale;
  in.sums[column / 32 * PREPARED_ROWS + row] = mul(by.scale, float(sum));
}

// Writes a four to where products read it. Warps come whole; `there` is false behind the padded row.
template <typename Weights, int LAYOUT_ROWS>
__device__ __forceinline__ void put_four(const Input& in, u32 row, u32 four, const float4& v, bool there) {
  if constexpr (Weights::QUANTIZED) {
    put_codes<Weights, LAYOUT_ROWS>(in, row, four, v, there);
  } else {
    if (there) ((float4*)(in.values + row * in.stride))[Weights::permuted(four)] = v;
  }
}

__device__ __forceinline__ float4 load_four(const float* from, u32 four, u32 columns) {
  return 4 * four < columns ? ((const float4*)from)[four] : make_float4(0, 0, 0, 0);
}

__device__ __forceinline__ float4 times(const float4& v, float by) {
  return make_float4(mul(v.x, by), mul(v.y, by), mul(v.z, by), mul(v.w, by));
}

// The input from a row on.
__device__ __forceinline__ Prologue from_row(Prologue p, u32 row, u32 columns) {
  const u64 at = u64(row) * columns;
  p.x += at;
  p.residual += at;
  p.sum += at;
  return p;
}

// An input as it is. Of LAYOUT_ROWS rows that shared memory has room
// for, ALL_ROWS are this block's to prepare.
template <int ALL_ROWS, int LAYOUT_ROWS = ALL_ROWS>
struct PlainInput {
  static constexpr bool READY = false;
  static constexpr u32 ROWS = ALL_ROWS == 1 ? 1 : 2, VALUES = 8 / ROWS;
  float4 x[ROWS][VALUES];

  __device__ __forceinline__ void load(const Prologue& p, u32 row, u32 first, u32 columns) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
      for (u32 i = 0; i < VALUES; i++) {
        x[r][i] = load_four(p.x + u64(row + r) * columns, first + i * blockDim.x + threadIdx.x, columns);
      }
    }
  }

  static __device__ __forceinline__ Prologue at_row(const Prologue& p, u32 row, u32 columns, u32) { return from_row(p, row, columns); }
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void end() {}
  __device__ __forceinline__ void load_weights(const Prologue&, u32) {}
  __device__ __forceinline__ void load_first(const Prologue& p, u32 columns) { load(p, 0, 0, columns); }

  // Calls `fill` once, when the last loads have come.
  template <typename Weights, typename Fill>
  __device__ __forceinline__ void prepare(const Input& in, const Prologue& p, u32 columns, u32 padded, u32, bool, Fill fill) {
    const u32 span = VALUES * blockDim.x;
#pragma unroll 1
    for (u32 row = 0; row < ALL_ROWS; row += ROWS) {
#pragma unroll 1
      for (u32 first = 0; 4 * first < padded; first += span) {
        if (row + first > 0) load(p, row, first, columns);
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) {
          const u32 four = first + i * blockDim.x + threadIdx.x;
          if (4 * (four - threadIdx.x % WARP) < padded) {
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
              put_four<Weights, LAYOUT_ROWS>(in, row + r, four, x[r][i], 4 * four < padded);
            }
          }
          if (i == 0 && row + ROWS >= ALL_ROWS && 4 * (first + span) >= padded) fill();
        }
      }
    }
  }
};

// A norm of x; or the residual stream with x added, perhaps normed again. Of several rows, norms' weights are loaded where they
// are used: registers are short then.
template <int ALL_ROWS, int LAYOUT_ROWS = ALL_ROWS>
struct NormedInput {
  static constexpr bool READY = false;
  static constexpr u32 ROWS = ALL_ROWS == 1 ? 1 : 2, VALUES = 3;
  float4 x[ROWS][VALUES], residual[ROWS][VALUES], weight[VALUES], following_weight[VALUES];

  static __device__ __forceinline__ u32 four(u32 i) { return i * blockDim.x + threadIdx.x; }
  static __device__ __forceinline__ Prologue at_row(const Prologue& p, u32 row, u32 columns, u32) { return from_row(p, row, columns); }

  __device__ __forceinline__ void load(const Prologue& p, u32 row, u32 columns) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
      for (u32 i = 0; i < VALUES; i++) {
        x[r][i] = load_four(p.x + u64(row + r) * columns, four(i), columns);
        if (p.kind >= RESIDUAL) residual[r][i] = load_four(p.residual + u64(row + r) * columns, four(i), columns);
      }
    }
  }

  static __device__ __forceinline__ void load_weight(float4 (&to)[VALUES], const float* from, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) to[i] = from ? load_four(from, four(i), columns) : make_float4(1, 1, 1, 1);
  }

  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void end() {}

  // Norms' weights depend on no launch before.
  __device__ __forceinline__ void load_weights(const Prologue& p, u32 columns) {
    if (ROWS > 1) return;
    load_weight(weight, p.weight, columns);
    if (p.kind == RESIDUAL_NORM) load_weight(following_weight, p.following_weight, columns);
  }

  __device__ __forceinline__ void load_first(const Prologue& p, u32 columns) { load(p, 0, columns); }

  // 1 / sqrt(mean of squares + eps) of each row. `scratch` has 16 floats per row, those without a warp zero.
  __device__ __forceinline__ void rms_scales(float (&scale)[ROWS], float per_column, float eps, float4 (&scratch)[ROWS][4]) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
      float squares = 0;
#pragma unroll
      for (u32 i = 0; i < VALUES; i++) {
        const float4 v = x[r][i];
        squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
      }
      squares = warp_sum(squares);
      if (threadIdx.x % WARP == 0) ((float*)scratch[r])[threadIdx.x / WARP] = squares;
    }
    __syncthreads();
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
      float sum = 0;
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const float4 v = scratch[r][i];
        sum += (v.x + v.y) + (v.z + v.w);
      }
      scale[r] = rsqrtf(sum * per_column + eps);
    }
  }

  __device__ __forceinline__ void norm(const float (&scale)[ROWS], const float4 (&by)[VALUES]) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
      for (u32 i = 0; i < VALUES; i++) {
        const float4 v = times(x[r][i], scale[r]);
        x[r][i] = make_float4(mul(v.x, by[i].x), mul(v.y, by[i].y), mul(v.z, by[i].z), mul(v.w, by[i].w));
      }
    }
  }

  // x becomes the sum; one block writes it, for those who come after this kernel.
  __device__ __forceinline__ void add_to_stream(const Prologue& p, u32 row, u32 columns, u32 count, bool writes) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
      for (u32 i = 0; i < VALUES; i++) {
        const float4 v = x[r][i], with = residual[r][i];
        x[r][i] = times(make_float4(add(with.x, v.x), add(with.y, v.y), add(with.z, v.z), add(with.w, v.w)), p.scale);
      }
    }
    if (!writes) return;
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
      for (u32 i = 0; i < VALUES; i++) {
        if (row + r < count && 4 * four(i) < columns) ((float4*)(p.sum + u64(row + r) * columns))[four(i)] = x[r][i];
      }
    }
  }

  // Calls `fill` once, when the last rows have come.
  template <typename Weights, typename Fill>
  __device__ __forceinline__ void prepare(const Input& in, const Prologue& p, u32 columns, u32 padded, u32 count, bool writes,
                                          Fill fill) {
    // Two sets, used alternately: a slow thread may still read the sums of the rows before.
    __shared__ float4 scratch[2][2][ROWS][4];
    for (u32 i = threadIdx.x; i < 4 * ROWS * 16; i += blockDim.x) {
      if (i % 16 >= blockDim.x / WARP) ((float*)scratch)[i] = 0;
    }
#pragma unroll 1
    for (u32 row = 0; row < ALL_ROWS; row += ROWS) {
      if (row > 0) load(p, row, columns);
      float scale[ROWS];
      rms_scales(scale, p.per_column, p.eps, scratch[row / ROWS % 2][0]);
      if (row + ROWS >= ALL_ROWS) fill();
      if (ROWS > 1) load_weight(weight, p.weight, columns);
      norm(scale, weight);
      if (p.kind >= RESIDUAL) {
        add_to_stream(p, row, columns, count, writes);
        if (p.kind == RESIDUAL_NORM) {
          rms_scales(scale, p.per_column, p.following_eps, scratch[row / ROWS % 2][1]);
          if (ROWS > 1) load_weight(following_weight, p.following_weight, columns);
          norm(scale, following_weight);
        }
      }
#pragma unroll
      for (u32 i = 0; i < VALUES; i++) {
        if (4 * (four(i) - threadIdx.x % WARP) >= padded) break;
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) put_four<Weights, LAYOUT_ROWS>(in, row + r, four(i), x[r][i], 4 * four(i) < padded);
      }
    }
  }
};

// Codes that a launch before wrote: `x` are those, in rows of `padded` bytes, `weight` and `following_weight` are scales and sums,
// `[blocks of 32, PREPARED_ROWS]`.
template <int ALL_ROWS, int LAYOUT_ROWS = ALL_ROWS>
struct ReadyInput {
  static constexpr bool READY = true;

  static __device__ __forceinline__ Prologue at_row(Prologue p, u32 row, u32, u32 padded) {
    p.x = (const float*)((const u8*)p.x + u64(row) * padded);
    p.weight += row;
    p.following_weight += row;
    return p;
  }
  __device__ __forceinline__ void load_weights(const Prologue&, u32) {}
  __device__ __forceinline__ void load_first(const Prologue&, u32) {}

  static __device__ __forceinline__ void copy_blocks(float* to, const float* from, u32 blocks) {
    constexpr u32 WIDTH = ALL_ROWS < 4 ? ALL_ROWS : 4, PIECES = ALL_ROWS / WIDTH;
    struct alignas(4 * WIDTH) Piece {
      float of[WIDTH];
    };
#pragma unroll 1
    for (u32 i = threadIdx.x; i < blocks * PIECES; i += blockDim.x) {
      const u32 block = i / PIECES, first = i % PIECES * WIDTH;
      *(Piece*)(to + block * LAYOUT_ROWS + first) = *(const Piece*)(from + block * PREPARED_ROWS + first);
    }
  }

  // Calls `fill` once, when all has been asked for.
  template <typename Weights, typename Fill>
  __device__ __forceinline__ void prepare(const Input& in, const Prologue& p, u32, u32 padded, u32, bool, Fill fill) {
    start_copy(in, p, padded);
    copy_blocks(in.scales, p.weight, padded / 32);
    if (Weights::HAS_MINS) copy_blocks(in.sums, p.following_weight, padded / 32);
    fill();
  }

#if __CUDA_ARCH__ >= 900
  // The memory system copies codes by itself, a row at a time.
  static __device__ __forceinline__ u64* arrived() {
    __shared__ u64 barrier;
    return &barrier;
  }
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      barrier_init(arrived());
      fence_barriers();
    }
  }
  static __device__ __forceinline__ void start_copy(const Input& in, const Prologue& p, u32 padded) {
    if (threadIdx.x != 0) return;
    barrier_expect(arrived(), ALL_ROWS * padded);
#pragma unroll
    for (u32 row = 0; row < ALL_ROWS; row++) bulk_copy(in.values + row * in.stride, (const u8*)p.x + row * padded, padded, arrived());
  }
  __device__ __forceinline__ void end() { barrier_wait(arrived()); }
#else
  // As many loads at once as registers allow: each round takes as long as the way to L2 and back.
  __device__ __forceinline__ void begin() {}
  static __device__ __forceinline__ void start_copy(const Input& in, const Prologue& p, u32 padded) {
    constexpr u32 AT_ONCE = 8;
    const u32 row_pieces = padded / 16, pieces = ALL_ROWS * row_pieces;
#pragma unroll 1
    for (u32 first = threadIdx.x; first < pieces; first += AT_ONCE * blockDim.x) {
      uint4 held[AT_ONCE];
#pragma unroll
      for (u32 i = 0; i < AT_ONCE; i++) held[i] = ((const uint4*)p.x)[min(first + i * blockDim.x, pieces - 1)];
#pragma unroll
      for (u32 i = 0; i < AT_ONCE; i++) {
        const u32 piece = first + i * blockDim.x, row = piece / row_pieces;
        if (piece < pieces) *(uint4*)(in.values + row * in.stride + 16 * (piece - row * row_pieces)) = held[i];
      }
    }
  }
  __device__ __forceinline__ void end() {}
#endif
};

#if CLUSTER
// Sends the rows that this block prepared, an equal share of ROWS, to the SIZE blocks of its cluster.
template <typename Weights, int ROWS, int SIZE>
__device__ __forceinline__ void share_rows(const Input& in, u32 rank, u32 padded) {
  const u32 pieces = padded * (Weights::QUANTIZED ? 1 : 4) / 16;
#pragma unroll 1
  for (u32 own = rank * (ROWS / SIZE); own < (rank + 1) * (ROWS / SIZE); own++) {
    const uint4* row = (const uint4*)(in.values + own * in.stride);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < pieces; i += blockDim.x) {
      const uint4 piece = row[i];
#pragma unroll
      for (u32 peer = 1; peer < SIZE; peer++) cluster_store(cluster_address(row + i, (rank + peer) % SIZE), piece);
    }
    if constexpr (Weights::QUANTIZED) {
#pragma unroll 1
      for (u32 i = threadIdx.x; i < padded / 32; i += blockDim.x) {
        const u32 at = i * ROWS + own;
#pragma unroll
        for (u32 peer = 1; peer < SIZE; peer++) {
          cluster_store(cluster_address(in.scales + at, (rank + peer) % SIZE), in.scales[at]);
          if (Weights::HAS_MINS) cluster_store(cluster_address(in.sums + at, (rank + peer) % SIZE), in.sums[at]);
        }
      }
    }
  }
}
#endif
