// Keys of all positions that runs see, made from their values where pages hold those alone: rope(weight * value), head by head, in f16.
// They go to the place that all slots of the group have for keys, so that attention finds them there, one layer after another.
//
// Grid: any number of blocks of 8 warps; pages of runs and heads go round among them, a warp per position.
// Bytes per position and KV head: a value in, a key out.
// Requires KEY_TYPE == KV_F16; values of all positions that are seen. Runs that share a page write the same bits to it.
#include "lib/kv.cuh"
#include "lib/reduce.cuh"
#include "lib/rope.cuh"

constexpr u32 WARPS = 8;

struct Params {
  Rows rows;
  RowRefs row_refs;
  Runs runs;
  Slot slot;
  u32 turning_pairs;  // those behind them stay as they are
  u32 window;         // as attention has it
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/keys_from_values.rs differs");

// The value of one head at one position of a page.
__device__ __forceinline__ float value_of(const Slot& slot, u64 page, u32 row, u32 element) {
#if KV_TYPE == KV_Q8_0
  const Q8Page values = {slot.values + page, kv_blocks(slot.head_dim)};
  return float(values.codes(row)[element]) * f16_to_f32(values.scales(row)[element / KV_BLOCK]);
#else
  return f16_to_f32(slot.values[page + row * slot.head_dim + element]);
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, 4) keys_from_values(const Params p) {
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, half = p.slot.head_dim / 2;
  u32 item = blockIdx.x;  // page and head, counted from the first of the run
  for (u32 run = 0; run < *p.runs.count; run++) {
    const u32 end_row = p.runs.first[run + 1];
    if (end_row == p.runs.first[run]) continue;
    const u32 last = p.row_refs.last_seen(p.rows.index[end_row - 1], p.window);
    const u32 items = (last / PAGE_TOKENS + 1) * p.slot.kv_heads;
    for (; item < items; item += gridDim.x) {
      const u32 index = item / p.slot.kv_heads;
      const u32 page = p.slot.page(run, index), head = item % p.slot.kv_heads;
      const u64 values = p.slot.page_start(page, head);
      u16* const keys = p.slot.keys + p.slot.key_page_start(page, head);
      for (u32 row = warp; row < PAGE_TOKENS && index * PAGE_TOKENS + row <= last; row += WARPS) {
        for (u32 j = lane; j < half; j += WARP) {
          float a = mul(p.slot.key_weight[j], value_of(p.slot, values, row, j));
          float b = mul(p.slot.key_weight[j + half], value_of(p.slot, values, row, j + half));
          if (j < p.turning_pairs) rotate(a, b, index * PAGE_TOKENS + row, p.slot.key_frequencies[j]);
          keys[row * p.slot.head_dim + j] = f32_to_f16(a);
          keys[row * p.slot.head_dim + j + half] = f32_to_f16(b);
        }
      }
    }
    item -= items;
  }
}
