// GEMM: out[r, n] = sum over k of x[r, k] * w[n, k] for many rows. Integer products of int8 activations and fragments, exact
// within a block of 32 (16 in K6) inputs, scaled in f32, what K4 and K5 have besides in bf16 (lib/gemm_offsets.cuh); or products of f16
// (WEIGHTS f16).
//
// A block takes 128 outputs (8 M-tiles) of TOKENS rows; 8 warps share them. A cp.async pipeline brings stages of 64 inputs,
// several in flight, one or two between barriers. Weights are the A operand, which fragments hold in the order of its
// registers, so a lane takes 16 bytes at a time and nothing is rearranged.
//
// Grid: (row tiles, output tiles * splits). Row tiles run fastest: blocks that run together share weights through L2.
// Split-K: where a shape has too few tiles to fill a card its inputs are split. Every block stores its sums in `partials`, and
// the one that arrives last at a tile's counter adds them in the order of the splits. So results depend on the shape and the
// grid alone.
//
// TERMS 2: a value is the sum of two int8 terms with scales of their own (Int8HiLo in lib/activation.cuh). Rows of x are twice
// as long, and weights go by twice. Requires columns % 64 == 0, so that no stage has both terms.
//
// ROWS `grouped`: grouped GEMM over experts. Row tiles are those of `tiles`, each of one expert, whose rows `sorted` lists
// (kernels/moe/permute.cu).
//
// EPILOGUE `f32`: out[r, n], `out_stride` apart. `geglu_pair`: M-tiles alternate gate and up; gelu(gate) * up in int8.
//
// Bytes: weights once per row tile (from L2 mostly), x once per output tile. Operations: 2 * rows * outputs * columns.
// Requires columns % 32 == 0 (K4 and K5: 256), `arrivals` zero (they are left so), and for geglu_pair whole blocks of 32 products.
#include "lib/batch.cuh"
#include "lib/gemm_offsets.cuh"
#include "lib/gemm_weights.cuh"
#include "lib/reduce.cuh"

struct Tile {
  u32 expert;
  u32 first;  // in `sorted`
  u32 count;
};

struct Params {
  Rows rows;
  const u8* w;
  const u8* x;            // int8 codes, or f16
  const float* x_scales;  // per block; of f16 per row, null for ones
  const float* x_sums;    // per block; K4 and K5
  float* out;
  i8* codes;  // geglu_pair
  float* scales;
  float* sums;
  float* partials;
  u32* arrivals;
  const Tile* tiles;  // grouped
  const u32* tile_count;
  const u32* sorted;
  u32 columns;
  u32 outputs;
  u32 out_stride;
  u32 x_share;  // grouped: routed experts that share a row of x
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/gemm.rs differs");

enum { f32, geglu_pair };
enum { dense, grouped };

constexpr u32 THREADS = 256, TILE_M_TILES = 8;
constexpr u32 NO_ROW = 0xffffffffu;
constexpr u32 K_BLOCK_STAGES = 256 / STAGE_INPUTS;  // of K4 and K5

// The share of each of 8 warps in a tile, and the offsets of a stage's parts in shared memory.
template <int TOKENS>
struct Shape {
  static constexpr int WARP_ROWS = 4;            // of warps, along outputs
  static constexpr int M_TILES = 8 / WARP_ROWS;  // of a warp
  static constexpr int OCTETS = TOKENS / (8 / WARP_ROWS) / 8;
  static constexpr u32 X = TILE_M_TILES * Weights::M_TILE_BYTES;
  static constexpr u32 SCALES = X + TOKENS * Weights::X_BYTES;
  static constexpr u32 STAGE = SCALES + TOKENS * (Weights::TOKEN_SCALES ? 8 : 0);
};

// GELU, tanh approximation, as z * sigmoid(2u): with fast exponentials it is a few instructions, to 1e-6.
__device__ __forceinline__ float quick_gelu(float z) {
  return __fdividef(z, 1.0f + __expf(-1.5957691f * z * (1.0f + 0.044715f * z * z)));
}

// The stage of the weights that goes with a stage of the activations, whose terms come one after another.
__device__ __forceinline__ u32 weight_stage(const Params& p, u32 stage) {
  const u32 term_stages = p.columns / STAGE_INPUTS;
  return TERMS == 2 && stage >= term_stages ? stage - term_stages : stage;
}

// A thread's copies of each stage: 16-byte chunks of tokens, a scale of a token, and its part of its warp's M-tile.
template <int TOKENS>
struct Copies {
  static constexpr u32 CHUNKS = Weights::X_BYTES / 16, ALL = TOKENS * CHUNKS;
  static constexpr u32 EACH = (ALL + THREADS - 1) / THREADS, STRIDE = THREADS / CHUNKS;  // tokens from copy to copy
  u32 x_from[EACH], scale_from;  // offsets
  u32 x_to;                      // of the first chunk
  u32 m_tile, m_tile_rows;       // in 16 bytes; rows from it on

  // `rows` are the tokens' rows of x.
  __device__ __forceinline__ Copies(const Params& p, const u32* rows, u32 m_tile, u32 m_tile_rows)
      : m_tile(m_tile), m_tile_rows(m_tile_rows) {
    const u32 row_bytes = TERMS * p.columns * (Weights::X_BYTES / 32) / 2, token = threadIdx.x / CHUNKS,
              chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) x_from[i] = rows[min(token + i * STRIDE, TOKENS - 1u)] * row_bytes + chunk * 16;
    scale_from = rows[min(threadIdx.x / 2, TOKENS - 1u)] * (TERMS * p.columns / 32) + threadIdx.x % 2;
    x_to = Shape<TOKENS>::X + (Weights::TOKEN_SCALES ? int8_chunk(token, chunk) : f16_chunk(token, chunk));
  }

  __device__ __forceinline__ void start(const Params& p, u8* to, u32 stage) {
    const u32 warp = threadIdx.x / WARP, chunk = threadIdx.x % CHUNKS;
    const u8* w = p.w + u64(m_tile) * 16;
    Weights::copy(to + warp * Weights::M_TILE_BYTES, w, weight_stage(p, stage), threadIdx.x % WARP, p.columns, m_tile_rows);
    // Behind the last input there are zeros.
    const bool inside = stage * STAGE_INPUTS + chunk * (STAGE_INPUTS / CHUNKS) < TERMS * p.columns;
    if (ALL >= THREADS || threadIdx.x < ALL) {
      u8* x = to + x_to;
#pragma unroll
      for (u32 i = 0; i < EACH; i++)
        cp_async_16(x + i * STRIDE * Weights::X_BYTES, p.x + x_from[i] + stage * Weights::X_BYTES, inside);
    }
    if (Weights::TOKEN_SCALES && threadIdx.x < 2 * TOKENS) {
      const bool there = 2 * stage + threadIdx.x % 2 < TERMS * p.columns / 32;
      const u32 at = scale_from + 2 * stage;
      float* scale = (float*)(to + Shape<TOKENS>::SCALES) + threadIdx.x % 2 * TOKENS + threadIdx.x / 2;
      cp_async_4(scale, p.x_scales + at, there);
    }
  }

  // Of the K-block that begins with the stage.
  __device__ __forceinline__ void start_offsets(const Params& p, u8* to, u32 stage) {
    const float* x_sums = p.x_sums + scale_from - threadIdx.x % 2 + 2 * stage;
    Offsets<Weights, TOKENS>::copy(to, p.w + u64(m_tile) * 16, weight_stage(p, stage), x_sums);
  }
};

// Split-K reduction: adds the partials of a tile's splits, in their order. True for the block that arrived last and has the sums.
template <int M_TILES, int OCTETS>
__device__ __forceinline__ bool join_splits(const Params& p, float (&sum)[M_TILES][OCTETS][4], u32 tile, u32 split,
                                            u32 splits) {
  constexpr u32 PART = M_TILES * OCTETS * THREADS;
  __shared__ u32 arrival;
  float4* parts = (float4*)p.partials + u64(tile) * splits * PART + threadIdx.x;
#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
#pragma unroll
    for (int j = 0; j < OCTETS; j++) {
      const float (&s)[4] = sum[m][j];
      parts[split * PART + (m * OCTETS + j) * THREADS] = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrival = atomicAdd(p.arrivals + tile, 1u);
  __syncthreads();
  if (arrival != splits - 1) return false;
  if (threadIdx.x == 0) p.arrivals[tile] = 0;
  __threadfence();
#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
#pragma unroll
    for (int j = 0; j < OCTETS; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) sum[m][j][i] = 0;
    }
  }
  for (u32 s = 0; s < splits; s++) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
      for (int j = 0; j < OCTETS; j++) {
        const float4 part = load_from_blocks(parts + s * PART + (m * OCTETS + j) * THREADS);
        sum[m][j][0] += part.x;
        sum[m][j][1] += part.y;
        sum[m][j][2] += part.z;
        sum[m][j][3] += part.w;
      }
    }
  }
  return true;
}

// `rows` are the output rows of the block's tokens; `column` and `token` those of the warp's first sum.
template <int TOKENS, int M_TILES, int OCTETS>
__device__ __forceinline__ void write_floats(const Params& p, const float (&sum)[M_TILES][OCTETS][4], const u32* rows,
                                             u32 column, u32 token) {
  const u32 group = threadIdx.x % WARP / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < OCTETS; j++) {
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const u32 row = rows[token + 8 * j + 2 * quad + t];
      if (row == NO_ROW) continue;
      float factor = 1 / Weights::FACTOR;
      if (!Weights::TOKEN_SCALES && p.x_scales) factor = p.x_scales[row];
      float* out = p.out + u64(row) * p.out_stride;
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        const u32 n = column + m * M_TILE + group;
        if (n < p.outputs) out[n] = factor * sum[m][j][t];
        if (n + 8 < p.outputs) out[n + 8] = factor * sum[m][j][2 + t];
      }
    }
  }
}

// GeGLU epilogue: products of gates and ups, quantized to int8. 64 outputs (4 M-tiles) are a block of 32 products, shared by two
// warps that exchange maxima and sums through shared memory. Codes go through it, too, to be written 16 bytes
// at a time.
template <int TOKENS, int M_TILES, int OCTETS>
__device__ __forceinline__ void write_products(const Params& p, float (&sum)[M_TILES][OCTETS][4], const u32* rows,
                                               u8* shared, u32 tile_output, u32 warp_row, u32 token) {
  static_assert(M_TILES == 2, "half a block is a warp's own");
  constexpr u32 WARP_ROWS = 8 / M_TILES;
  constexpr float UNIT = 1 / Weights::FACTOR;
  const u32 group = threadIdx.x % WARP / 4, quad = threadIdx.x % 4;
  const u32 products = p.outputs / 2;
  float* largest = (float*)shared;                     // [warp row, token]
  int* code_sums = (int*)shared + WARP_ROWS * TOKENS;  // [warp row, token]
  u8* codes = shared + 2 * WARP_ROWS * TOKENS * 4;     // [token, 64]
  const u32 own = warp_row * TOKENS, other = (warp_row ^ 1) * TOKENS;
  float max[OCTETS][2];  // of a token's block; then its scale
  int totals[OCTETS][2];
#pragma unroll
  for (int j = 0; j < OCTETS; j++) {
#pragma unroll
    for (int t = 0; t < 2; t++) {
      max[j][t] = 0;
#pragma unroll
      for (int m = 0; m < M_TILES; m += 2) {
#pragma unroll
        for (int h = t; h < 4; h += 2) {
          const float product = quick_gelu(UNIT * sum[m][j][h]) * (UNIT * sum[m + 1][j][h]);
          sum[m][j][h] = product;
          max[j][t] = fmaxf(max[j][t], fabsf(product));
        }
      }
#pragma unroll
      for (int mask = 4; mask < 32; mask <<= 1)
        max[j][t] = fmaxf(max[j][t], __shfl_xor_sync(ALL_LANES, max[j][t], mask));
      if (group == 0) largest[own + token + 8 * j + 2 * quad + t] = max[j][t];
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < OCTETS; j++) {
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const u32 at = token + 8 * j + 2 * quad + t;
      max[j][t] = fmaxf(max[j][t], largest[other + at]);
      const float scale = max[j][t] / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
      int code_sum = 0;
#pragma unroll
      for (int m = 0; m < M_TILES; m += 2) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          // Adding 12582912 rounds to a whole number and leaves it in the low bits.
          const int code = __float_as_int(fmaf(sum[m][j][2 * h + t], inverse, 12582912.0f)) - START;
          code_sum += code;
          codes[at * 64 + (warp_row * M_TILES + m) * 8 + 8 * h + group] = u8(code);
        }
      }
#pragma unroll
      for (int mask = 4; mask < 32; mask <<= 1) code_sum += __shfl_xor_sync(ALL_LANES, code_sum, mask);
      if (group == 0) code_sums[own + at] = code_sum;
      max[j][t] = scale;
      totals[j][t] = code_sum;
    }
  }
  __syncthreads();
  // The scale and sum of a block, by the warp that has its first M-tile.
  const u32 block = (tile_output + warp_row * M_TILES * M_TILE) / 64;
  if (group == 0 && warp_row % 2 == 0 && block < products / 32) {
#pragma unroll
    for (int j = 0; j < OCTETS; j++) {
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const u32 at = token + 8 * j + 2 * quad + t, row = rows[at];
        if (row == NO_ROW) continue;
        const u64 out = u64(row) * (products / 32) + block;
        p.scales[out] = max[j][t];
        p.sums[out] = max[j][t] * float(totals[j][t] + code_sums[other + at]);
      }
    }
  }
  for (u32 i = threadIdx.x; i < TOKENS * 4; i += THREADS) {
    const u32 row = rows[i / 4], product = tile_output / 2 + i % 4 * 16;
    if (row == NO_ROW || product >= products) continue;
    *(uint4*)(p.codes + u64(row) * products + product) = *(const uint4*)(codes + 16 * i);
  }
}

template <int TOKENS, int M_TILES, int OCTETS>
__device__ __forceinline__ void finish(const Params& p, float (&sum)[M_TILES][OCTETS][4], const u32* rows, u8* shared,
                                       u32 output_tile, u32 split, u32 splits) {
  if (splits > 1 && !join_splits(p, sum, blockIdx.x + gridDim.x * output_tile, split, splits)) return;
  const u32 warp = threadIdx.x / WARP, warp_row = warp % Shape<TOKENS>::WARP_ROWS,
            token = warp / Shape<TOKENS>::WARP_ROWS * OCTETS * 8;
  const u32 tile_output = output_tile * TILE_M_TILES * M_TILE;
  if (EPILOGUE == geglu_pair) {
    cp_async_wait<0>();
    __syncthreads();  // the stages' memory is free
    write_products<TOKENS>(p, sum, rows, shared, tile_output, warp_row, token);
  } else {
    write_floats<TOKENS>(p, sum, rows, tile_output + warp_row * M_TILES * M_TILE, token);
  }
}

template <int TOKENS, int STAGES>
__device__ __forceinline__ void gemm(const Params& p) {
  typedef Shape<TOKENS> S;
  DYNAMIC_SHARED(shared);
  __shared__ u32 x_rows[TOKENS], out_rows[TOKENS];
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

  const u32 output_tiles = (p.outputs + TILE_M_TILES * M_TILE - 1) / (TILE_M_TILES * M_TILE);
  const u32 output_tile = blockIdx.y % output_tiles, split = blockIdx.y / output_tiles,
            splits = gridDim.y / output_tiles;
  // Splits of K4 and K5 have whole K-blocks.
  constexpr u32 UNIT = Weights::HAS_OFFSETS ? K_BLOCK_STAGES : 1;
  const u32 all_stages = (TERMS * p.columns + STAGE_INPUTS - 1) / STAGE_INPUTS, begin = all_stages / UNIT * split / splits * UNIT;
  // Rarely needed, so kept in shared memory.
  __shared__ u32 output_tile_at, split_at, splits_at, end;
  if (threadIdx.x == 0) {
    output_tile_at = output_tile, split_at = split, splits_at = splits;
    end = all_stages / UNIT * (split + 1) / splits * UNIT;
  }
  u32 matrix = 0;
  // Tokens that are not there read another's row; what comes of it is not written.
  if (ROWS == grouped) {
    if (blockIdx.x >= *p.tile_count) return;
    const Tile tile = p.tiles[blockIdx.x];
    matrix = tile.expert;
    if (threadIdx.x < TOKENS) {
      const bool there = threadIdx.x < tile.count;
      const u32 routed = p.sorted[tile.first + (there ? threadIdx.x : 0)];
      x_rows[threadIdx.x] = routed / p.x_share;
      out_rows[threadIdx.x] = there ? routed : NO_ROW;
    }
  } else {
    const u32 row = blockIdx.x * TOKENS + threadIdx.x, count = *p.rows.count;
    if (blockIdx.x * TOKENS >= count) return;
    if (threadIdx.x < TOKENS) {
      x_rows[threadIdx.x] = min(row, count - 1);
      out_rows[threadIdx.x] = row < count ? row : NO_ROW;
    }
  }
  __syncthreads();
  const u32 m_tiles = (p.outputs + M_TILE - 1) / M_TILE, own_m_tile = min(output_tile * TILE_M_TILES + warp, m_tiles - 1);
  const u32 m_tile = u32((matrix * m_tiles + own_m_tile) * (Weights::m_tile_bytes(p.columns) / 16));
  Copies<TOKENS> copies(p, x_rows, m_tile, p.outputs - own_m_tile * M_TILE);

  // TOGETHER stages go between barriers. Of as many as are on their way, so many begin K-blocks.
  constexpr u32 TOGETHER = STAGES % Weights::TOGETHER ? 1 : Weights::TOGETHER, SLOTS = STAGES / TOGETHER;
  constexpr u32 K_BLOCKS = STAGES > K_BLOCK_STAGES ? 2 : 1;
  static_assert(STAGES <= 2 * K_BLOCK_STAGES && K_BLOCK_STAGES % TOGETHER == 0, "offsets are written over when they have been read");
  auto offsets_of = [&](u32 stage) {
    return shared + STAGES * S::STAGE + stage / K_BLOCK_STAGES % K_BLOCKS * Offsets<Weights, TOKENS>::BYTES;
  };
  auto fetch = [&](u32 stage, u32 slot) {
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) {
      if (stage + i >= end) break;
      copies.start(p, shared + (slot * TOGETHER + i) * S::STAGE, stage + i);
    }
    if (Weights::HAS_OFFSETS && stage % K_BLOCK_STAGES == 0 && stage < end) copies.start_offsets(p, offsets_of(stage), stage);
    cp_async_commit();
  };
#pragma unroll
  for (u32 i = 0; i < SLOTS - 1; i++) fetch(begin + i * TOGETHER, i);

  const u32 warp_row = warp % S::WARP_ROWS, token = warp / S::WARP_ROWS * S::OCTETS * 8;
  float sum[S::M_TILES][S::OCTETS][4];
#pragma unroll
  for (int m = 0; m < S::M_TILES; m++) {
#pragma unroll
    for (int j = 0; j < S::OCTETS; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) sum[m][j][i] = 0;
    }
  }
  auto multiply = [&](u32 in_ring) {
    const u8* here = shared + in_ring * S::STAGE;
    const u8* m_tiles = here + warp_row * S::M_TILES * Weights::M_TILE_BYTES;
    const u8* x = here + S::X + token * Weights::X_BYTES;
    const float* scales = (const float*)(here + S::SCALES) + token;
#pragma unroll
    for (u32 step = 0; step < 2; step++) {
      Weights::Tokens<S::OCTETS> operand;
      operand.load(x, scales, TOKENS, step, lane);
#pragma unroll
      for (int m = 0; m < S::M_TILES; m++)
        Weights::multiply(sum[m], m_tiles + m * Weights::M_TILE_BYTES, step, lane, operand);
    }
  };
  u32 slot = 0;
  for (u32 stage = begin; stage < end; stage += TOGETHER) {
    cp_async_wait<SLOTS - 2>();
    __syncthreads();  // everybody's copies have come, and everybody is done with the slot before this one
    fetch(stage + (SLOTS - 1) * TOGETHER, slot == 0 ? SLOTS - 1 : slot - 1);
    if (Weights::HAS_OFFSETS && stage % K_BLOCK_STAGES == 0) {
      const u8* rows = shared + slot * TOGETHER * S::STAGE + Weights::ROWS_AT;
#pragma unroll
      for (u32 m = 0; m < S::M_TILES; m++) {
        const u32 m_tile = warp_row * S::M_TILES + m;
        Offsets<Weights, TOKENS>::add(sum[m], offsets_of(stage), rows + m_tile * Weights::M_TILE_BYTES, m_tile, token, lane);
      }
    }
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) {
      if (i == 0 || stage + i < end) multiply(slot * TOGETHER + i);
    }
    slot = slot == SLOTS - 1 ? 0 : slot + 1;
  }
  finish<TOKENS>(p, sum, out_rows, shared, output_tile_at, split_at, splits_at);
}

extern "C" __global__ void __launch_bounds__(256, 2) gemm_16(const Params p) { gemm<16, STAGES_16>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) gemm_32(const Params p) { gemm<32, STAGES_32>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) gemm_64(const Params p) { gemm<64, STAGES_64>(p); }
