// Keys that a block makes from a tile of values, where pages hold those alone. A key is rope(weight * value), and most pairs of a
// long head never turn: their scores are products of values with queries that have the weight in them. Only k-steps with pairs that do
// turn are made, in f16.
#pragma once
#include "lib/kv_tile.cuh"
#include "lib/rope.cuh"

// Pairs that turn, the first ones of a head; 0 where pages have keys.
#ifndef TURNING_PAIRS
#define TURNING_PAIRS 0
#endif
static_assert(TURNING_PAIRS == 0 || HEAD_DIM % 32 == 0, "k-steps of one half");
constexpr u32 HALF_STEPS = (HALF + 15) / 16;
// K-steps that are made of each half, its first ones: whole blocks of Q8_0.
constexpr u32 MADE_STEPS = (TURNING_PAIRS + 31) / 32 * 2 < HALF_STEPS ? (TURNING_PAIRS + 31) / 32 * 2 : HALF_STEPS;
// Rows of made keys have those of both halves; pieces are swizzled as in other tiles.
constexpr u32 MADE_COLUMNS = 2 * 16 * MADE_STEPS, MADE_PITCH = MADE_COLUMNS % 64 ? MADE_COLUMNS + 8 : MADE_COLUMNS;
__device__ __forceinline__ u32 made_cell(u32 row, u32 column) {
  return row * MADE_PITCH + (MADE_COLUMNS % 64 ? column : ((column / 8 ^ row % 8) * 8 + column % 8));
}

// Of `steps` k-steps from `k_step` on, all in one half, the first so many are made.
__device__ __forceinline__ u32 made_steps(u32 k_step, u32 steps) {
  const u32 within = k_step % HALF_STEPS;
  return within + 1 <= MADE_STEPS ? min(steps, MADE_STEPS - within) : 0;
}

// The angle of rope.cuh to within 1e-6, for what f16 takes: positions up to 2^22.
__device__ __forceinline__ Angle near_angle(float position, float frequency) {
  constexpr float ROUNDS = 12582912.0f;
  const float x = mul(position, frequency);
  const float turns = sub(__fmaf_rn(x, 0.15915494f, ROUNDS), ROUNDS);
  // 2 pi in two terms.
  const float rest = __fmaf_rn(turns, 1.7484556e-7f, __fmaf_rn(turns, -6.2831855f, x));
  Angle angle;
  __sincosf(rest, &angle.sin, &angle.cos);
  return angle;
}

// Pairs that are made, of which those behind TURNING_PAIRS do not turn: their weights are in the query.
constexpr u32 MADE_PAIRS = 16 * MADE_STEPS;

// What keys are made with: radians a position, and the weights of both members, by pair.
struct KeyTable {
  float frequency[MADE_PAIRS ? MADE_PAIRS : 1], low[MADE_PAIRS ? MADE_PAIRS : 1], high[MADE_PAIRS ? MADE_PAIRS : 1];

  __device__ __forceinline__ void put(const Slot& slot) {
    for (u32 j = threadIdx.x; j + 1 <= MADE_PAIRS; j += blockDim.x) {
      const bool turns = j + 1 <= TURNING_PAIRS;
      frequency[j] = turns ? slot.key_frequencies[j] : 0;
      low[j] = turns ? slot.key_weight[j] : 1;
      high[j] = turns ? slot.key_weight[j + HALF] : 1;
    }
  }
};

// Four neighbours of a tile's row, from a multiple of four on, as f16.
__device__ __forceinline__ uint2 four_values(const KvTile& tile, u32 row, u32 element) {
#if KV_TYPE == KV_Q8_0
  const u32 codes = *(const u32*)(tile.codes + code_cell(row, element)) ^ 0x80808080u;
  const u32 scale = tile.scales[row * KV_BLOCKS + element / KV_BLOCK], scales = scale | scale << 16;
  return make_uint2(dequantized(codes, 0x4140, scales), dequantized(codes, 0x4342, scales));
#else
  return *(const uint2*)(tile.cells + cell(row, element));
#endif
}
__device__ __forceinline__ float4 weighted(uint2 f16, float4 by) {
  return make_float4(f16_to_f32(u16(f16.x)) * by.x, f16_to_f32(u16(f16.x >> 16)) * by.y,  //
                     f16_to_f32(u16(f16.y)) * by.z, f16_to_f32(u16(f16.y >> 16)) * by.w);
}

// Makes the keys of all rows of a tile, the first of which is at `position`; a thread takes four pairs at a time. Columns are in the
// order of queries.
template <u32 ROWS, u32 THREADS>
__device__ __forceinline__ void make_keys(u16* made, const KvTile& values, u32 position, const KeyTable& table) {
  constexpr u32 ROW_FOURS = MADE_PAIRS ? MADE_PAIRS / 4 : 1, SHARE = (ROWS * ROW_FOURS + THREADS - 1) / THREADS;
#pragma unroll 2
  for (u32 n = 0; n < SHARE; n++) {
    const u32 i = threadIdx.x + n * THREADS, row = i / ROW_FOURS, j = i % ROW_FOURS * 4;
    if (ROWS * ROW_FOURS % THREADS && row >= ROWS) break;
    const float4 frequency = *(const float4*)(table.frequency + j);
    float4 a = weighted(four_values(values, row, j), *(const float4*)(table.low + j));
    float4 b = weighted(four_values(values, row, j + HALF), *(const float4*)(table.high + j));
    const float at = float(position + row);
    const auto put = [&](u32 half, u32 element, float x, float y) {
      *(u32*)(made + made_cell(row, half * MADE_PAIRS + query_column(element))) = pack_f16x2(x, y);
    };
    rotate(a.x, b.x, near_angle(at, frequency.x));
    rotate(a.y, b.y, near_angle(at, frequency.y));
    put(0, j, a.x, a.y);
    put(1, j, b.x, b.y);
    rotate(a.z, b.z, near_angle(at, frequency.z));
    rotate(a.w, b.w, near_angle(at, frequency.w));
    put(0, j + 2, a.z, a.w);
    put(1, j + 2, b.z, b.w);
  }
}

// Adds scores of 16 keys with the made ones of the k-steps that queries are held of, as add_scores does with the others.
template <bool PACKED, int STEPS, int Q_TILES, int TILES>
__device__ __forceinline__ void add_made_scores(float (&score)[2][TILES][4], const u16* made, u32 first_row, u32 k_step,
                                                const u32 (&query)[STEPS][Q_TILES][2]) {
  // In Q8_0 scores of the others are one sum, and registers are short.
  constexpr int SECOND = KV_TYPE == KV_Q8_0 ? 0 : 1;
  const u32 lane = threadIdx.x % WARP, count = made_steps(k_step, STEPS);
  const u32 column = 16 * (k_step / HALF_STEPS * MADE_STEPS + k_step % HALF_STEPS);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    if (u32(i) >= count) break;
    u32 keys[4];
    ldmatrix_x4(keys, made + made_cell(first_row + lane % 16, column + 16 * i + lane / 16 * 8));
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      mma_f16(score[PACKED ? i % 2 : 0][t], keys, query[i][t]);
      if (!PACKED) mma_f16(score[SECOND][t], keys, query[i][Q_TILES - TILES + t]);
    }
  }
}
