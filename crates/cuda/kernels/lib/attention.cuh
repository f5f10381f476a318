// The parts that flash_prefill.cu, flash_prefill_sm90.cu and flash_prefill_multicast.cu share: params, tiles of tokens, the positions a
// tile sees, and writing results.
#pragma once
#include "lib/kv.cuh"
#include "lib/ptx.cuh"
#include "lib/reduce.cuh"

#define OUT_F32 0
#define OUT_F16 1
#define OUT_INT8 2

struct Params {
  Rows rows;
  RowRefs row_refs;
  Runs runs;
  Slot slot;
  const u16* q;   // f16, [rows, heads * head_dim]
  void* out;      // f32, f16 or int8 codes, [rows, heads * head_dim]
  float* scales;  // of codes, [rows, heads * head_dim / 32]
  float* sums;
  u32 heads;
  u32 window;  // 0 sees all
};

constexpr float LOG2_E = 1.44269504f;
// Online softmax with lazy rescaling: weights are taken relative to a maximum that is raised only when it is this far behind,
// in powers of two. Weights stay below 2^8, well inside f16, and output is rarely rescaled.
constexpr float SLACK = 8;
constexpr u32 NO_PAGE = 0xffffffffu;

// Some consecutive tokens of one run.
struct Tokens {
  u32 run;
  u32 first;  // row
  u32 count;  // 0: there is no such tile
};

// Tile `number` of all runs, counted from the end; tiles have up to `max_tokens`. One lane per run.
__device__ __forceinline__ Tokens find_tile(const Runs& runs, u32 number, u32 max_tokens) {
  const u32 lane = threadIdx.x % WARP;
  for (u32 end = *runs.count;; end -= WARP) {
    const u32 run = lane < end ? end - 1 - lane : 0;
    const u32 first = runs.first[run], rows = lane < end ? runs.first[run + 1] - first : 0;
    const u32 tiles = (rows + max_tokens - 1) / max_tokens;
    u32 up_to = tiles;
#pragma unroll
    for (u32 by = 1; by < WARP; by *= 2) {
      const u32 before = __shfl_sync(ALL_LANES, up_to, int(lane - by));
      if (lane >= by) up_to += before;
    }
    const u32 found = __ballot_sync(ALL_LANES, number < up_to);
    if (found) {
      const int of = __ffs(int(found)) - 1;
      const u32 tile = __shfl_sync(ALL_LANES, up_to, of) - 1 - number, skipped = tile * max_tokens;
      const u32 length = __shfl_sync(ALL_LANES, rows, of);
      return {end - 1 - u32(of), __shfl_sync(ALL_LANES, first, of) + skipped, min(max_tokens, length - skipped)};
    }
    number -= __shfl_sync(ALL_LANES, up_to, 31);
    if (end <= WARP) return {0, 0, 0};
  }
}

// The last position that some row of a tile sees; its rows are fed one after another. By all lanes of a warp.
__device__ __forceinline__ u32 last_seen_by(const Params& p, const Tokens& tokens) {
  u32 last = 0;
  for (u32 i = threadIdx.x % WARP; i < tokens.count; i += WARP)
    last = max(last, p.row_refs.last_seen(p.rows.index[tokens.first + i], p.window));
  return __reduce_max_sync(ALL_LANES, last);
}

// Positions that a block reads: `first ..= last` of one head of a run.
struct Seen {
  const Slot& slot;
  u32 run, kv_head;
  u32 first, last;

  // The page of a table's entry; none where there is nothing to be seen, and where the table may have no entry.
  __device__ __forceinline__ u32 page(u32 index) const {
    const bool seen = index >= first / PAGE_TOKENS && index <= last / PAGE_TOKENS;
    return seen ? slot.page(run, index) : NO_PAGE;
  }

  // Number of positions from this one on that are seen. The others become zeros in shared memory: whatever is there must not
  // meet a weight of zero if it is not a number.
  __device__ __forceinline__ u32 rows_from(u32 position, u32 page) const {
    return page == NO_PAGE || position > last ? 0 : last - position + 1;
  }

  __device__ __forceinline__ u64 page_start(u32 page) const {
    return slot.page_start(page == NO_PAGE ? 0 : page, kv_head);
  }
  __device__ __forceinline__ u64 key_page_start(u32 page) const {
    return slot.key_page_start(page == NO_PAGE ? 0 : page, kv_head);
  }
#if KV_TYPE == KV_Q8_0
  __device__ __forceinline__ Q8Page q8_page(u8* of, u32 page) const { return {of + page_start(page), kv_blocks(HEAD_DIM)}; }
#endif
};

// Writes columns of one row, from `column` on: a lane has two columns each of COLUMN_STEPS steps of 8. The row starts
// at `at`.
template <u32 COLUMN_STEPS>
__device__ __forceinline__ void write_row(const Params& p, bool there, u64 at, u32 column,
                                          const float (&x)[COLUMN_STEPS][2]) {
  const u32 lane = threadIdx.x % WARP, quad = lane % 4;
  const bool odd = quad % 2;
  (void)odd;
#if OUT == OUT_F32
#pragma unroll
  for (u32 j = 0; j < COLUMN_STEPS; j++)
    if (there && column + j * 8 < HEAD_DIM)
      *(float2*)((float*)p.out + at + column + j * 8 + quad * 2) = make_float2(x[j][0], x[j][1]);
#elif OUT == OUT_F16
  // Lanes pair up to write four columns each: 32 bytes of a row at a time.
#pragma unroll
  for (u32 j = 0; j < COLUMN_STEPS; j += 2) {
    const u32 low = pack_f16x2(x[j][0], x[j][1]), high = pack_f16x2(x[j + 1][0], x[j + 1][1]);
    const u32 other = __shfl_xor_sync(ALL_LANES, odd ? low : high, 1);
    if (there && column + j * 8 < HEAD_DIM)
      *(uint2*)((u16*)p.out + at + column + j * 8 + (odd ? 8 : 0) + quad / 2 * 4) =
          odd ? make_uint2(other, high) : make_uint2(low, other);
  }
#else
  // A block of 32 is four steps of a row; of a head of 16 two steps of this row and two of the next head's, 4 lanes on.
  constexpr u32 STEPS = HEAD_DIM == 16 ? 2 : 4;
#pragma unroll
  for (u32 j = 0; j < COLUMN_STEPS; j += STEPS) {
    float largest = 0;
#pragma unroll
    for (u32 i = 0; i < STEPS; i++) largest = fmaxf(largest, fmaxf(fabsf(x[j + i][0]), fabsf(x[j + i][1])));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
    if (STEPS == 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 4));
    const float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
    int sum = 0;
    u32 codes[4] = {};  // two codes per step
#pragma unroll
    for (u32 i = 0; i < STEPS; i++) {
      const int a = __float2int_rn(x[j + i][0] * inverse), b = __float2int_rn(x[j + i][1] * inverse);
      sum += a + b;
      codes[i] = u32(a & 255) | u32(b & 255) << 8;
    }
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    if (STEPS == 2) sum += __shfl_xor_sync(ALL_LANES, sum, 4);
    // The quad's lanes trade codes until each has eight of one step: lanes 0, 1 of steps 0, 1, lanes 2, 3 of steps 2, 3.
    const u32 front = codes[0] | codes[1] << 16, back = codes[2] | codes[3] << 16;
    const bool second = quad / 2;
    const u32 mine = second ? back : front, theirs = __shfl_xor_sync(ALL_LANES, second ? front : back, 2);
    const u32 left = second ? theirs : mine, right = second ? mine : theirs;  // of lanes quad % 2 and quad % 2 + 2
    const u32 even_step = __byte_perm(left, right, 0x5410), odd_step = __byte_perm(left, right, 0x7632);
    const u32 keep = odd ? odd_step : even_step;
    const u32 got = __shfl_xor_sync(ALL_LANES, odd ? even_step : odd_step, 1);
    // Codes of lanes 0 and 2 here, 1 and 3 there, or the reverse.
    const u32 a = odd ? got : keep, b = odd ? keep : got;
    const uint2 eight = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    const u64 start = at + column + j * 8;
    if (there && column + j * 8 < HEAD_DIM) {
      if (quad < STEPS) *(uint2*)((u8*)p.out + start + quad * 8) = eight;
      if (quad == 0 && start % 32 == 0) {
        p.scales[start / 32] = scale;
        p.sums[start / 32] = scale * float(sum);
      }
    }
  }
#endif
}
