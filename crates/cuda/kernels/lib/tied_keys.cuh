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
// Rows of made keys have those of both halves, and a piece to spare: then all cells of a lane are constants apart.
constexpr u32 MADE_COLUMNS = 2 * 16 * MADE_STEPS, MADE_PITCH = MADE_COLUMNS + 8;
__device__ __forceinline__ u32 made_cell(u32 row, u32 column) { return row * MADE_PITCH + column; }

// Of `steps` k-steps from `k_step` on, all in one half, the first so many are made.
__device__ __forceinline__ u32 made_steps(u32 k_step, u32 steps) {
  const u32 within = k_step % HALF_STEPS;
  return within + 1 <= MADE_STEPS ? min(steps, MADE_STEPS - within) : 0;
}

// What all numbers of them are multiples of, where parts have so many steps.
__device__ constexpr int made_multiple(int steps) {
  return MADE_STEPS % 4 == 0 && steps % 4 == 0 ? 4 : MADE_STEPS % 2 == 0 && steps % 2 == 0 ? 2 : 1;
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

};

// A thread's entry of it, which is loaded long before there is room for the table.
struct KeyEntry {
  float frequency = 0, low = 1, high = 1;

  __device__ __forceinline__ KeyEntry(const Slot& slot) {
    if (threadIdx.x + 1 <= TURNING_PAIRS) {
      frequency = slot.key_frequencies[threadIdx.x];
      low = slot.key_weight[threadIdx.x], high = slot.key_weight[threadIdx.x + HALF];
    }
  }

  __device__ __forceinline__ void put(KeyTable& table) const {
    if (threadIdx.x + 1 > MADE_PAIRS) return;
    table.frequency[threadIdx.x] = frequency;
    table.low[threadIdx.x] = low, table.high[threadIdx.x] = high;
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

// As rope.cuh's, but for a rounding: made keys are f16.
__device__ __forceinline__ void turn(float& a, float& b, Angle angle) {
  const float x = a;
  a = __fmaf_rn(-b, angle.sin, x * angle.cos);
  b = __fmaf_rn(x, angle.sin, b * angle.cos);
}

// Makes the keys of all rows of a tile, the first of which is at `position`; a thread takes four pairs of some rows. Columns are in the
// order of queries.
template <u32 ROWS, u32 THREADS>
__device__ __forceinline__ void make_keys(u16* made, const KvTile& values, u32 position, const KeyTable& table) {
  constexpr u32 ROW_FOURS = MADE_PAIRS ? MADE_PAIRS / 4 : 1;
  constexpr u32 APART = THREADS / ROW_FOURS, SHARE = (ROWS + APART - 1) / APART;
  // Registers are short, so no address is kept from step to step.
  u32 thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  const u32 first = thread / ROW_FOURS, pair = thread % ROW_FOURS * 4;
  // So that a thread has the same pairs of all its rows.
  if (THREADS % ROW_FOURS && first >= APART) return;
  u16* const to = made + made_cell(first, query_column(pair));
#pragma unroll 2
  for (u32 n = 0; n < SHARE; n++) {
    const u32 row = first + n * APART;
    if (ROWS % APART && row >= ROWS) break;
    const float4 frequency = *(const float4*)(table.frequency + pair);
    float4 a = weighted(four_values(values, row, pair), *(const float4*)(table.low + pair));
    float4 b = weighted(four_values(values, row, pair + HALF), *(const float4*)(table.high + pair));
    const float at = float(position + row);
    turn(a.x, b.x, near_angle(at, frequency.x));
    turn(a.y, b.y, near_angle(at, frequency.y));
    turn(a.z, b.z, near_angle(at, frequency.z));
    turn(a.w, b.w, near_angle(at, frequency.w));
    const auto put = [&](u32 half, float4 key) {
      u16* const cell = to + n * APART * MADE_PITCH + half * MADE_PAIRS;
      const u32 low = pack_f16x2(key.x, key.y), high = pack_f16x2(key.z, key.w);
#if KV_TYPE == KV_Q8_0
      *(u32*)cell = low;
      *(u32*)(cell + 8) = high;
#else
      *(uint2*)cell = make_uint2(low, high);
#endif
    };
    put(0, a);
    put(1, b);
  }
}

// Adds scores of 16 keys with the made ones of the k-steps that queries are held of, as add_scores does with the others.
template <bool PACKED, int SKIPS, int STEPS, int Q_TILES, int TILES>
__device__ __forceinline__ void add_made_scores(float (&score)[SCORE_SUMS][TILES][4], const u16* made, u32 first_row, u32 k_step,
                                                const u32 (&query)[STEPS][Q_TILES][2]) {
  const u32 lane = threadIdx.x % WARP, count = made_steps(k_step, STEPS);
  const u32 column = 16 * (k_step / HALF_STEPS * MADE_STEPS + k_step % HALF_STEPS);
  const u16* const first = made + made_cell(first_row + lane % 16, column + lane / 16 * 8);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    if (i >= MADE_STEPS || u32(i / SKIPS * SKIPS) >= count) break;
    u32 keys[4];
    ldmatrix_x4(keys, first + 16 * i);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      mma_f16(score[PACKED ? i % SCORE_SUMS : 0][t], keys, query[i][t]);
      if (!PACKED) mma_f16(score[SCORE_SUMS - 1][t], keys, query[i][Q_TILES - TILES + t]);
    }
  }
}
