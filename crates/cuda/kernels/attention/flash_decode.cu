// Flash attention for small and medium batches (split-KV), one launch from raw projections to outputs. For each row:
//   q = rope(norm(q)), head by head; k = rope(norm(k)), v = norm(v) without weight, in the KV type into their page cell,
//   unless the slot's keys and values come from an earlier layer; out = softmax(q . K) . V over the positions the row
//   sees: all up to its own, or the last `window` of them and, where the slot holds the keys of all rows already, those ahead that
//   the batch lets it see. Scale is 1.
//
// Grid: (rows * kv heads, splits), a block of 8 warps (16 for more than 8 heads) for all GROUP query heads of a KV head, so keys and
// values are read once. The positions a row sees are cut into splits of whole steps (STEP positions); how many steps a split has follows
// from the row's own length and the grid's height (its bucket's); blocks without a share leave at once. Blocks of low splits
// come first in launch order.
//
// Where keys follow from values (TURNING_PAIRS), pages hold values alone: keys are made from a step's values (lib/tied_keys.cuh), and
// both tiles are of values, so that those of the next step are loaded while one is used, and its keys made while outputs are added up.
//
// A step: scores = K . q^T by tensor cores, keys as rows and heads as columns, the head's elements cut into PARTS, one per
// group of warps, that shared memory adds up; online softmax in f32, each warp for itself; out += V^T . weights, each warp for
// its own elements. A query is a sum of two f16 terms, so that scores do not suffer from its rounding.
// Steps go backwards, so the newest keys, which this launch computes, are in the first of them, while loads of the others are
// in flight. K and V have a tile of shared memory each; one is loaded while the other is used, and two or three blocks share a
// multiprocessor.
//
// Split-KV reduction: partials are merged by the block that arrives last: of all, or (past ONE_MERGE splits) first of FAN
// neighbours, then of all groups. Each reads partials in the order of their splits, so it does not matter who is last. Arrival
// counters return to 0.
//
// A row of the same batch and run may be seen by later rows. Its keys and values are on their way to their page, so
// whoever needs them computes them again from the raw rows; norms add up in the order of kv_norm_rope_store.cu, whose bits
// they are.
//
// Bytes per row: keys and values seen once per KV head (4 * seen * HEAD_DIM in f16; half of it for values alone), PARTIAL_BYTES out
// and in per split.
// Code is kept small: in decode each launch runs most of it once, from a cold instruction cache.
//
// Requires HEAD_DIM % 16 == 0, HEAD_DIM <= 512, GROUP <= 16; keys and values aligned to 16; for its own k and v that
// the rows are the whole batch in order, rows of a run one after another; q, k, v and row_refs for all rows of the
// grid; arrivals of 0; at most FAN * ONE_MERGE splits; with TURNING_PAIRS rows that see all from
// position 0 on, and k-steps of a part in one half of the head.
#include "lib/kv_tile.cuh"
#include "lib/norm.cuh"
#include "lib/prepared_rows.cuh"
#include "lib/ptx.cuh"
#include "lib/rope.cuh"
#include "lib/tied_keys.cuh"
#include "lib/token_tiles.cuh"

// Steps of two pages also for long heads: where shared memory and registers allow it.
#ifndef WIDE_STEPS
#define WIDE_STEPS 0
#endif

struct Params {
  Rows rows;
  RowRefs row_refs;
  Slot slot;
  const float* q;
  const float* q_weight;  // may be null
  const float* k;         // null if the slot holds keys and values of all rows already
  const float* k_weight;  // may be null
  const float* v;
  const float* frequencies;
  u8* partials;   // [rows, kv heads, splits, PARTIAL_BYTES]
  u32* arrivals;  // [rows, kv heads, 1 + splits / FAN, rounded up]
  void* out;
  u32 q_stride;  // from row to row, in elements
  u32 k_stride;
  u32 v_stride;
  u32 window;  // 0 sees all
  float q_eps;
  float k_eps;
  float v_eps;
  u32 out_kind;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/flash_decode.rs differs");

// What outputs are written as. Mirrors `DecodeOut` in src/kernel/attention/flash_decode.rs.
enum : u32 { AS_F32, AS_F16, AS_TOKEN_TILES, AS_PREPARED_ROWS };

constexpr u32 WARPS = GROUP > 8 ? 16 : 8, THREADS = WARPS * WARP;
constexpr bool TIED = TURNING_PAIRS > 0;
// Heads of keys and values that a block prepares for itself.
constexpr u32 OWN = TIED ? 1 : 2;
constexpr bool ONE_EACH = GROUP + OWN <= WARPS;
static_assert(GROUP + OWN <= 2 * WARPS, "at most two heads of a warp");
// A value that is the same in all lanes, said so that the compiler sees it, too, and that a warp stays together.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(ALL_LANES, x, 0); }
__device__ __forceinline__ u32 own_warp() { return uniform(threadIdx.x / WARP); }
// Past 8 heads, a block has the threads of two; before Hopper 8 of them with long heads and codes to unpack take their registers.
#if KV_TYPE == KV_Q8_0 && __CUDA_ARCH__ < 900
constexpr bool DEAR_KEYS = HEAD_DIM > 256 && GROUP > 4;
#else
constexpr bool DEAR_KEYS = false;
#endif
constexpr int BLOCKS = WARPS > 8 || DEAR_KEYS ? 1 : 2;
constexpr u32 STEP_PAGES = HEAD_DIM <= 256 || WIDE_STEPS ? 2 : 1, STEP = STEP_PAGES * PAGE_TOKENS;
// Columns of 8 heads, and heads that a warp weighs. Where they fit, both terms of queries share a column.
constexpr int TILES = (GROUP + 7) / 8, WARP_HEADS = (GROUP + WARPS - 1) / WARPS;
constexpr bool PACKED = GROUP <= 4;
constexpr int Q_TILES = PACKED ? 1 : 2 * TILES;
constexpr u32 LOW_COLUMN = PACKED ? 4 : 8 * TILES;
constexpr int KEY_TILES = STEP / 16, PARTS = WARPS / KEY_TILES;
constexpr int K_STEPS = HEAD_DIM / 16, K_SHARE = (K_STEPS + PARTS - 1) / PARTS;
constexpr int OUT_TILES = HEAD_DIM / 16, OUT_SHARE = (OUT_TILES + WARPS - 1) / WARPS;
constexpr int CHUNKS = (HEAD_DIM + WARP - 1) / WARP;
// Whether a warp's outputs are whole blocks of 32 elements.
constexpr bool HAS_BLOCKS = OUT_TILES % WARPS == 0 && OUT_SHARE % 2 == 0;
static_assert(HALF <= THREADS, "an angle per thread");

// A partial: outputs of a split in f16, as threads hold them; then maximum and total per head.
constexpr u32 QUADS = TILES > 1 ? 4 : (GROUP + 1) / 2;
constexpr u32 OUT_TILE_BYTES = THREADS / 4 * QUADS * 8, STATE_START = OUT_SHARE * TILES * OUT_TILE_BYTES;
// Small partials are better merged all at once. The others' groups are as many as 132 splits have.
constexpr u32 FAN = 8, ONE_MERGE = STATE_START > 4096 ? 17 : 32;
static_assert(STATE_START + 16 * 8 == PARTIAL_BYTES, "src/kernel/attention/flash_decode.rs differs");

constexpr u32 KV_BYTES = STEP * TILE_ROW_BYTES, Q_BYTES = 8 * Q_TILES * PITCH * 2;
__device__ constexpr u32 larger(u32 a, u32 b) { return a > b ? a : b; }
// A tile of keys and one of values, or two of values. Where steps are wide, at least FAN partials, which are merged there.
constexpr u32 TILES_BYTES = larger(2 * KV_BYTES, WIDE_STEPS ? FAN * STATE_START : 0);
// Scores: columns of heads are on different banks.
constexpr u32 SCORE_PITCH = STEP + 4, SCORE_BYTES = PARTS * TILES * 8 * SCORE_PITCH * 4;
// Weights: a row of f16 per head, on different banks.
constexpr u32 WEIGHT_PITCH = STEP + 8, WEIGHT_BYTES = TILES * 8 * WEIGHT_PITCH * 2;
constexpr u32 MADE_BYTES = TIED ? STEP * MADE_PITCH * 2 + sizeof(KeyTable) : 0;
constexpr u32 SHARES_BYTES = 32 * 16 * 4, STATES_BYTES = 3 * 16 * 4;
constexpr u32 COMMON_BYTES = larger(larger(Q_BYTES, SCORE_BYTES + WEIGHT_BYTES + MADE_BYTES), SHARES_BYTES);
static_assert(TILES_BYTES + HALF * 8 + COMMON_BYTES + STATES_BYTES == SHARED_BYTES, "src/kernel/attention/flash_decode.rs differs");

// The tile of keys, and that of the values of a block's first, second, ... step.
constexpr u32 KEYS = 0;
__device__ __forceinline__ u32 values_of(u32 turn) { return TIED ? turn % 2 : 1; }

struct Shared {
  u8* tiles;
  Angle* angles;
  // One after another: queries until they are in registers; scores `[part, head, key]`, weights, made keys and what makes them; shares
  // of partials `[partial, head]`.
  u16* q;
  float* scores;
  u16* weights;
  u16* made;
  KeyTable* key_table;
  float* shares;
  // Of heads: the factor by which the last step rescaled earlier ones; maximum and total in the end.
  float* shrinks;
  float* maxima;
  float* totals;

  // By number: a choice between two tiles would take their addresses, and they would live in memory.
  __device__ __forceinline__ KvTile tile(u32 number) const { return KvTile(tiles + number * KV_BYTES, STEP); }
};

// ---- Heads: norm and RoPE, one warp per head ------------------------------------------------------------------

struct Raw {
  const float* x;
  const float* weight;  // may be null
  float eps;
};

// By pairs of a lane.
struct Head {
  float low[PAIRS], high[PAIRS], low_weight[PAIRS], high_weight[PAIRS];
};

__device__ __forceinline__ void load(Head& head, Raw raw) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const u32 j = pair(i);
    head.low[i] = holds(j) ? raw.x[j] : 0;
    head.high[i] = holds(j) ? raw.x[j + HALF] : 0;
  }
}

__device__ __forceinline__ void load_weights(Head& head, Raw raw) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const u32 j = pair(i);
    head.low_weight[i] = raw.weight && holds(j) ? raw.weight[j] : 1;
    head.high_weight[i] = raw.weight && holds(j) ? raw.weight[j + HALF] : 1;
  }
}

__device__ __forceinline__ void norm(Head& head, Raw raw) {
  float squares[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    // Where half a head is whole warps, the lane has the value already.
    float value = i < PAIRS ? head.low[i % PAIRS] : head.high[i % PAIRS];
    if (HEAD_DIM % 64) value = pair(i) < HEAD_DIM ? raw.x[pair(i)] : 0;
    squares[i] = mul(value, value);
  }
  const float scale = rms_scale_of(sum_of_warps(squares), HEAD_DIM, raw.eps);
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    head.low[i] = mul(head.low[i], scale);
    head.high[i] = mul(head.high[i], scale);
    head.low[i] = mul(head.low[i], head.low_weight[i]);
    head.high[i] = mul(head.high[i], head.high_weight[i]);
  }
}

__device__ __forceinline__ void rotate_all(Head& head, const Angle* angles) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++)
    if (holds(pair(i))) rotate(head.low[i], head.high[i], angles[pair(i)]);
}

// Where the product of a query with values is the score, it has the weight of the keys, too. There it does not turn, so its own
// weight takes that in.
__device__ __forceinline__ void weigh_as_keys(Head& head, const float* key_weight) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const u32 j = pair(i);
    if (holds(j) && j + 1 > TURNING_PAIRS) {
      head.low_weight[i] *= key_weight[j];
      head.high_weight[i] *= key_weight[j + HALF];
    }
  }
}

// A query into its two columns.
__device__ __forceinline__ void put_query(const Head& head, u16* q, u32 column) {
  auto put = [&](u32 element, float value) {
    const u16 rounded = f32_to_f16(value);
    q[cell(column, query_column(element))] = rounded;
    q[cell(column + LOW_COLUMN, query_column(element))] = f32_to_f16(value - f16_to_f32(rounded));
  };
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const u32 j = pair(i);
    if (holds(j)) {
      put(j, head.low[i]);
      put(j + HALF, head.high[i]);
    }
  }
}

// ---- A block's work --------------------------------------------------------------------------------

struct Work {
  u32 r;  // row of values; `row` is that of the batch
  u32 row, run, position, kv_head;
  u32 last;     // the last position seen: the row's own where it is computed here
  u32 first;    // the first position seen
  u32 fresh;    // positions from here on are computed here; those before are in pages
  u32 start;    // of all steps: a page's first position
  const u32* table;  // page of the first step's first position
};

struct Ids {
  u32 page[STEP_PAGES];
};

// Of a step whose pages are all there, or (LAST) of the row's last one.
template <bool LAST>
__device__ __forceinline__ Ids page_ids(const Slot& slot, const Work& work, u32 step) {
  Ids ids;
  const u32* const entries = work.table + step * STEP_PAGES;
#pragma unroll
  for (u32 i = 0; i < STEP_PAGES; i++)
    ids.page[i] = !LAST || work.start + (step * STEP_PAGES + i) * PAGE_TOKENS <= work.last ? slot.named(entries[i]) : 0;
  return ids;
}

// Starts copies of a step's keys or values, as far as they are in pages. Rows before the first seen one are copied,
// too: they are numbers, and their weight is 0.
__device__ __forceinline__ void copy_step(const Work& work, const KvUnit* from, const KvTile& to, Ids ids, u32 step) {
  const u32 rows = work.fresh - min(work.start + step * STEP, work.fresh);
#pragma unroll
  for (u32 i = 0; i < STEP_PAGES; i++) {
    const u32 page_first = i * PAGE_TOKENS, end = min(rows - min(rows, page_first), PAGE_TOKENS);
    const KvUnit* page = from + work.kv_head * PAGE_UNITS + u64(ids.page[i]) * (KV_HEADS * PAGE_UNITS);
    copy_rows<THREADS>(to, page_first, page, end);
  }
  cp_async_commit();
}

// Heads that the block prepares for itself: its queries; the row's own key, unless it is made; and its value.
__device__ __forceinline__ Raw raw_head(const Params& p, const Work& work, u32 head) {
  if (head < GROUP) {
    const float* q = p.q + u64(work.r) * p.q_stride + work.kv_head * (GROUP * HEAD_DIM);
    return {q + head * HEAD_DIM, p.q_weight, p.q_eps};
  }
  if (!TIED && head == GROUP)
    return {p.k + u64(work.r) * p.k_stride + work.kv_head * HEAD_DIM, p.k_weight, p.k_eps};
  return {p.v + u64(work.r) * p.v_stride + work.kv_head * HEAD_DIM, nullptr, p.v_eps};
}

// A step's keys and values of earlier rows of this batch and run: usually none, so this is small rather than fast.
__device__ __forceinline__ void make_earlier(const Params& p, const Work& work, const Shared& shared, u32 turn, u32 step) {
  const u32 warp = own_warp(), lane = threadIdx.x % WARP, begin = work.start + step * STEP;
  const u32 from = max(begin, work.fresh), to = min(begin + STEP, work.position);
  for (u32 task = OWN * from + warp; task < OWN * to; task += WARPS) {
    const u32 at = task / OWN;
    const bool is_key = !TIED && task % 2 == 0;
    const u64 row = work.r - (work.position - at);
    const float* x = (is_key ? p.k + row * p.k_stride : p.v + row * p.v_stride) + work.kv_head * HEAD_DIM;
    const float* weight = is_key ? p.k_weight : nullptr;
    float squares = 0;
#pragma unroll 1
    for (u32 j = lane; j < CHUNKS * WARP; j += WARP) squares += warp_sum(j < HEAD_DIM ? mul(x[j], x[j]) : 0);
    const float scale = rms_scale_of(squares, HEAD_DIM, is_key ? p.k_eps : p.v_eps);
    const KvTile tile = shared.tile(is_key ? KEYS : values_of(turn));
#pragma unroll 1
    for (int i = 0; i < PAIRS; i++) {
      const u32 j = pair(i);
      float a = 0, b = 0;
      if (holds(j)) {
        a = normed(x, j, scale, weight), b = normed(x, j + HALF, scale, weight);
        if (is_key) rotate(a, b, at, p.frequencies[j]);
      }
      put_pair(tile, at - begin, i, a, b);
    }
  }
}

// ---- Split-KV reduction ----------------------------------------------------------------------------------------

typedef float Outputs[OUT_SHARE][TILES][4];

// Offset of a thread's part of a tile; threads without one read another's.
__device__ __forceinline__ u32 part_of_tile() {
  return (threadIdx.x / 4 * QUADS + min(threadIdx.x % 4, QUADS - 1)) * 8;
}

// Outputs, and the maxima and totals that `shared` has.
__device__ __forceinline__ void store(u8* partial, const Shared& shared, const Outputs& out) {
  if (threadIdx.x % 4 < QUADS) {
#pragma unroll
    for (int i = 0; i < OUT_SHARE * TILES; i++) {
      const float(&o)[4] = out[i / TILES][i % TILES];
      const uint2 packed = make_uint2(pack_f16x2(o[0], o[1]), pack_f16x2(o[2], o[3]));
      *(uint2*)(partial + part_of_tile() + i * OUT_TILE_BYTES) = packed;
    }
  }
  if (threadIdx.x < GROUP)
    *(float2*)(partial + STATE_START + threadIdx.x * 8) =
        make_float2(shared.maxima[threadIdx.x], shared.totals[threadIdx.x]);
}

// Whether this block is the last of `members` to come here, in every thread; it then sees what the others stored.
__device__ __forceinline__ bool comes_last(u32* arrival, u32 members) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = add_and_order(arrival, 1) == members - 1;
    if (last) *arrival = 0;
  }
  __syncthreads();
  return last;
}

// Merges up to 32 partials, `stride` bytes apart. They go through the tiles, so that all are loaded at once by little code.
__device__ __forceinline__ void merge(u8* partials, u32 stride, u32 members, const Shared& shared, Outputs& out) {
  constexpr u32 PIECES = STATE_START / 16, AT_ONCE = TILES_BYTES / STATE_START;
  u8* const tiles = shared.tiles;
  const u32 lane = threadIdx.x % WARP, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < OUT_SHARE * TILES; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) out[i / TILES][i % TILES][c] = 0;
#pragma unroll 1
  for (u32 from = 0; from < members; from += AT_ONCE) {
    const u32 count = min(members - from, AT_ONCE);
    if (from) __syncthreads();
#pragma unroll 1
    for (u32 piece = threadIdx.x; piece < count * PIECES; piece += THREADS)
      cp_async_16(tiles + piece * 16, partials + (from + piece / PIECES) * stride + piece % PIECES * 16);
    cp_async_commit();
    if (from == 0) {
#pragma unroll 1
      for (u32 head = own_warp(); head < GROUP; head += WARPS) {
        float max = -INF, total = 0;
        if (lane < members) {
          const uint2 state = load_written(partials + lane * stride + STATE_START + head * 8);
          max = __uint_as_float(state.x), total = __uint_as_float(state.y);
        }
        const float best = warp_max(max), share = total * __expf(max - best), sum = warp_sum(share);
        shared.shares[lane * 16 + head] = __fdividef(share, sum);
        shared.maxima[head] = best;
        shared.totals[head] = sum;
      }
    }
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (u32 m = 0; m < count; m++) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const float2 share = *(const float2*)(shared.shares + (from + m) * 16 + 8 * tile + 2 * quad);
#pragma unroll
        for (int i = 0; i < OUT_SHARE; i++) {
          const u32 at = m * STATE_START + (i * TILES + tile) * OUT_TILE_BYTES + part_of_tile();
          const uint2 packed = *(const uint2*)(tiles + at);
          float(&o)[4] = out[i][tile];
          o[0] += share.x * f16_to_f32(u16(packed.x));
          o[1] += share.y * f16_to_f32(u16(packed.x >> 16));
          o[2] += share.x * f16_to_f32(u16(packed.y));
          o[3] += share.y * f16_to_f32(u16(packed.y >> 16));
        }
      }
    }
  }
}

// As rows of the product that reads them, with the bits that prepare_rows.cu makes of floats: a warp's two neighbouring tiles have a block
// of a head, whose elements are in the eight lanes of a quad's number.
__device__ __forceinline__ void put_prepared(const Params& p, const Outputs& out) {
  constexpr u32 COLUMNS = KV_HEADS * GROUP * HEAD_DIM;
  const u32 warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, quad = threadIdx.x % 4, row = blockIdx.x / KV_HEADS;
  u8* const codes = (u8*)p.out + row * COLUMNS;
  float* const scales = (float*)((u8*)p.out + PREPARED_ROWS * COLUMNS) + row;
  float* const sums = scales + PREPARED_ROWS * (COLUMNS / 32);
#pragma unroll
  for (int i = 0; i + 1 < OUT_SHARE; i += 2)
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const u32 head = 8 * tile + 2 * quad + odd;
        const u32 column = (blockIdx.x % KV_HEADS * GROUP + head) * HEAD_DIM + 16 * (warp * OUT_SHARE + i);
        const float of_block[4] = {out[i][tile][odd], out[i][tile][odd + 2], out[i + 1][tile][odd], out[i + 1][tile][odd + 2]};
        float largest = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) largest = fmaxf(largest, fabsf(of_block[j]));
#pragma unroll
        for (int mask = 4; mask < WARP; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
        const CodeScale by(largest);
        int sum = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int code = (signed char)by.code(of_block[j]);
          sum += code;
          if (head < GROUP) codes[column + 16 * (j / 2) + output_element(group, j % 2)] = u8(code);
        }
#pragma unroll
        for (int mask = 4; mask < WARP; mask *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
        if (head >= GROUP || group != 0) continue;
        scales[column / 32 * PREPARED_ROWS] = by.scale;
        sums[column / 32 * PREPARED_ROWS] = mul(by.scale, float(sum));
      }
}

__device__ __forceinline__ void put_out(const Params& p, const Outputs& out) {
  if (HAS_BLOCKS && p.out_kind == AS_PREPARED_ROWS) return put_prepared(p, out);
  const u32 warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, quad = threadIdx.x % 4;
  const u32 row = blockIdx.x / KV_HEADS, first = blockIdx.x % KV_HEADS * (GROUP * HEAD_DIM);
#pragma unroll
  for (int i = 0; i < OUT_SHARE; i++) {
    const u32 out_tile = warp * OUT_SHARE + i;
    if (OUT_TILES % WARPS && out_tile >= OUT_TILES) break;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const u32 head = 8 * tile + 2 * quad + c % 2;
        const u32 column = first + head * HEAD_DIM + 16 * out_tile + output_element(group, c / 2);
        const u64 at = u64(row) * (KV_HEADS * GROUP * HEAD_DIM) + column;
        if (head >= GROUP) continue;
        if (p.out_kind == AS_F32) {
          ((float*)p.out)[at] = out[i][tile][c];
        } else {
          u16* const to = p.out_kind == AS_F16 ? (u16*)p.out + at : (u16*)((u8*)p.out + token_tile_at(row, column));
          *to = f32_to_f16(out[i][tile][c]);
        }
      }
  }
}

// ---- The kernel -------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_decode(const Params p) {
  DYNAMIC_SHARED(memory);
  u8* const common = memory + TILES_BYTES + HALF * 8;
  float* const states = (float*)(common + COMMON_BYTES);
  const Shared shared = {memory,
                         (Angle*)(memory + TILES_BYTES),
                         (u16*)common,
                         (float*)common,
                         (u16*)(common + SCORE_BYTES),
                         (u16*)(common + SCORE_BYTES + WEIGHT_BYTES),
                         (KeyTable*)(common + SCORE_BYTES + WEIGHT_BYTES + STEP * MADE_PITCH * 2),
                         (float*)common,
                         states,
                         states + 16,
                         states + 32};
  const u32 warp = own_warp(), lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;

  Work work;
  work.r = blockIdx.x / KV_HEADS;
  work.kv_head = blockIdx.x % KV_HEADS;
  // Look-ups wait for each other, so they start first; what waits for none of them, and arithmetic, goes between. Only what products
  // before this launch computed waits for it: batch and weights are there, and so are pages, unless a launch of this batch fills them.
  work.row = p.k ? work.r : p.rows.index[work.r];
  work.run = p.row_refs.run[work.row];
  work.position = p.row_refs.position[work.row];
  work.last = p.k ? work.position : p.row_refs.last_seen(work.row, p.window);
  const u32 count = *p.rows.count;
  const float frequency = p.frequencies[threadIdx.x % HALF];
  const KeyEntry key_entry(p.slot);
  griddep_launch_dependents();
  // A warp's first head, and the second where there is one more than warps.
  Head head, next;
  const u32 most_heads = p.k ? GROUP + OWN : GROUP;
  if (warp < most_heads) load_weights(head, raw_head(p, work, warp));
  if (!ONE_EACH && warp + WARPS < most_heads) load_weights(next, raw_head(p, work, warp + WARPS));
  if (TIED && warp < GROUP) weigh_as_keys(head, p.slot.key_weight);
  if (work.r >= count) return;
  work.run = uniform(work.run);
  work.position = uniform(work.position);
  work.last = uniform(work.last);
  work.first = !TIED && p.window && work.position + 1 > p.window ? work.position + 1 - p.window : 0;
  work.start = work.first / PAGE_TOKENS * PAGE_TOKENS;
  const u32 all_steps = (work.last - work.start) / STEP + 1;
  u32 steps = 1, splits = all_steps;
  if (all_steps > gridDim.y) {
    steps = (all_steps + gridDim.y - 1) / gridDim.y;
    splits = (all_steps + steps - 1) / steps;
  }
  const u32 split = blockIdx.y, begin = split * steps, end = min(begin + steps, all_steps);
  if (split >= splits) return;
  work.table = p.slot.tables.pages + p.slot.tables.base[work.run] + int(work.start / PAGE_TOKENS);
  u32 step = end - 1;
  Ids ids = page_ids<true>(p.slot, work, step);
  work.fresh = work.last + 1;
  if (p.k) {
    // Rows of the same run before this one: usually none.
    u32 earlier = 0, found = WARP;
    while (found == WARP) {
      const u32 back = earlier + lane + 1;
      const u32 same = __ballot_sync(ALL_LANES, back <= work.row && p.row_refs.run[work.row - back] == work.run);
      found = same == ALL_LANES ? WARP : __ffs(~same) - 1;
      earlier += found;
    }
    work.fresh = work.position - earlier;
  }
  if (threadIdx.x < HALF) shared.angles[threadIdx.x] = angle(work.position, frequency);
  const u32 own_heads = p.k && split == splits - 1 ? GROUP + OWN : GROUP;
  const auto load_heads = [&] {
    griddep_wait();
    if (warp < own_heads) load(head, raw_head(p, work, warp));
    if (!ONE_EACH && warp + WARPS < own_heads) load(next, raw_head(p, work, warp + WARPS));
  };
  if (!p.k) load_heads();
  if (!TIED) copy_step(work, p.slot.keys, shared.tile(KEYS), ids, step);
  copy_step(work, p.slot.values, shared.tile(values_of(0)), ids, step);
  const u32 last_row = work.last - work.start - step * STEP;  // the row's own, if it is computed here
  if (split == splits - 1) clear_behind<THREADS, STEP>(shared.tile(values_of(0)), last_row);
  if (step > begin) ids = page_ids<false>(p.slot, work, step - 1);
  if (p.k) load_heads();
  if (ONE_EACH && warp < own_heads) norm(head, raw_head(p, work, warp));
  __syncthreads();
#pragma unroll 1
  for (u32 h = warp; h < own_heads; h += WARPS) {
    if (!ONE_EACH) norm(head, raw_head(p, work, h));
    const bool is_key = !TIED && h == GROUP;
    if (h < GROUP || is_key) rotate_all(head, shared.angles);
    if (h < GROUP) {
      put_query(head, shared.q, h);
    } else {
      const KvCell to(p.slot, is_key ? p.slot.keys : p.slot.values, work.run, work.position, work.kv_head);
      put_head(shared.tile(is_key ? KEYS : values_of(0)), last_row, head.low, head.high, to);
    }
    if (!ONE_EACH) head = next;
  }
  __syncthreads();

  // Keys are cut into 16 per warp, the head's elements into parts.
  const u32 key_tile = warp % KEY_TILES, part = warp / KEY_TILES;
  u32 query[K_SHARE][Q_TILES][2];
#pragma unroll
  for (int tile = 0; tile < Q_TILES; tile++)
#pragma unroll
    for (int i = 0; i < K_SHARE; i += 2) {
      // Two steps at once; the second may be one too many.
      const u32 k_step = min(part * K_SHARE + i + lane / 16, u32(K_STEPS - 1));
      u32 both[4];
      ldmatrix_x4(both, shared.q + cell(8 * tile + lane % 8, 16 * k_step + lane / 8 % 2 * 8));
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (i + j / 2 < K_SHARE) query[i + j / 2][tile][j % 2] = both[j];
    }

  if (TIED) {
    // Where queries were.
    __syncthreads();
    key_entry.put(*shared.key_table);
  }

  // Of the heads from `warp` on that a warp weighs; totals are of this lane's keys.
  float best[WARP_HEADS], total[WARP_HEADS];
#pragma unroll
  for (int h = 0; h < WARP_HEADS; h++) best[h] = -INF, total[h] = 0;
  Outputs out;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int i = 0; i < OUT_SHARE; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) out[i][tile][c] = 0;

  // Of a step whose values are there: what this launch computes of it, and keys that are made.
  const auto prepare = [&](u32 step) {
    const u32 turn = end - 1 - step;
    if (work.fresh < min(work.start + (step + 1) * STEP, work.position)) {
      make_earlier(p, work, shared, turn, step);
      __syncthreads();
    }
    if (TIED) make_keys<STEP, THREADS>(shared.made, shared.tile(values_of(turn)), work.start + step * STEP, *shared.key_table);
  };
  if (TIED) {
    cp_async_wait<0>();
    __syncthreads();
    prepare(step);
  }

  for (;; step--) {
    const u32 turn = end - 1 - step;
    const bool more = step > begin;
    if (!TIED && turn == 0) {
      cp_async_wait<1>();
    } else if (!TIED) {
      cp_async_wait<0>();
    }
    __syncthreads();
    if (TIED ? more : turn > 0) {
      const u32 copied = TIED ? step - 1 : step;
      copy_step(work, p.slot.values, shared.tile(values_of(end - 1 - copied)), ids, copied);
      if (copied > begin) ids = page_ids<false>(p.slot, work, copied - 1);
    }
    if (!TIED) prepare(step);

    const KvTile values = shared.tile(values_of(turn));
    float score[SCORE_SUMS][TILES][4] = {};
    const bool has_part = K_STEPS % PARTS == 0 || part * K_SHARE < K_STEPS;
    if (TIED) {
      const u32 skipped = made_steps(part * K_SHARE, K_SHARE);
      constexpr int SKIPS = made_multiple(K_SHARE);
      if (has_part) {
        add_scores<PACKED, SKIPS, MADE_STEPS>(score, values, 16 * key_tile, part * K_SHARE, query, skipped);
        add_made_scores<PACKED, SKIPS>(score, shared.made, 16 * key_tile, part * K_SHARE, query);
      }
    } else if (has_part) {
      add_scores<PACKED, 1, 0>(score, shared.tile(KEYS), 16 * key_tile, part * K_SHARE, query, 0);
    }
    // From one address on: the compiler adds up no others then.
    float* const own_scores = shared.scores + (part * TILES * 8 + 2 * quad) * SCORE_PITCH + 16 * key_tile + group;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float sum = score[0][tile][c];
        if (SCORE_SUMS > 1) sum += score[SCORE_SUMS - 1][tile][c];
        if (PACKED) sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (8 * tile + 2 * quad + c % 2 < GROUP) own_scores[(8 * tile + c % 2) * SCORE_PITCH + c / 2 * 8] = sum;
      }
    }
    __syncthreads();
    if (!TIED && more) copy_step(work, p.slot.keys, shared.tile(KEYS), ids, step - 1);

    // One warp per head, one lane per key or two.
#pragma unroll
    for (int h = 0; h < WARP_HEADS; h++) {
      const u32 column = h * WARPS + warp;
      if (column >= GROUP) break;
      constexpr int LANE_KEYS = STEP / WARP;
      float seen[LANE_KEYS], max = best[h];
      u16* const of_weights = shared.weights + column * WEIGHT_PITCH + lane;
      const float* const of_head = shared.scores + column * SCORE_PITCH + lane;
#pragma unroll
      for (int i = 0; i < LANE_KEYS; i++) {
        const u32 key = i * WARP + lane, at = work.start + step * STEP + key;
        float sum = 0;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
          sum += of_head[part * TILES * 8 * SCORE_PITCH + i * WARP];
        seen[i] = at >= work.first && at <= work.last ? sum : -INF;
        max = fmaxf(max, seen[i]);
      }
      // A step has a key that is seen, so the maximum is a number.
      max = warp_max(max);
      const float shrink = __expf(best[h] - max);
      best[h] = max;
      total[h] *= shrink;
#pragma unroll
      for (int i = 0; i < LANE_KEYS; i++) {
        const float weight = __expf(seen[i] - best[h]);
        total[h] += weight;
        of_weights[i * WARP] = f32_to_f16(weight);
      }
      if (lane == 0) shared.shrinks[column] = shrink;
    }

    if (!TIED && more) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    float2 by[TILES];
    u32 weights[TILES][KEY_TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      by[tile] = *(const float2*)(shared.shrinks + 8 * tile + 2 * quad);
#pragma unroll
      for (int k = 0; k < KEY_TILES; k += 2) {
        u32 both[4];
        ldmatrix_x4(both, shared.weights + (8 * tile + lane % 8) * WEIGHT_PITCH + 16 * k + lane / 8 * 8);
        weights[tile][k][0] = both[0], weights[tile][k][1] = both[1];
        weights[tile][k + 1][0] = both[2], weights[tile][k + 1][1] = both[3];
      }
    }
    ValueFragments<KEY_TILES> value_fragments;
#pragma unroll
    for (int i = 0; i < OUT_SHARE; i++) {
      const u32 out_tile = warp * OUT_SHARE + i;
      if (OUT_TILES % WARPS && out_tile >= OUT_TILES) break;
      if (i % 2 == 0 || OUT_SHARE % 2) value_fragments.load_scales(values, out_tile);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int c = 0; c < 4; c++) out[i][tile][c] *= c % 2 ? by[tile].y : by[tile].x;
#pragma unroll
      for (int k = 0; k < KEY_TILES; k++) {
        u32 fragment[4];
        value_fragments.load(fragment, values, k, out_tile);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) mma_f16(out[i][tile], fragment, weights[tile][k]);
      }
    }
    if (!more) break;
    // While tensor cores work.
    if (TIED) prepare(step - 1);
  }

#pragma unroll
  for (int h = 0; h < WARP_HEADS; h++) {
    const u32 column = h * WARPS + warp;
    if (column >= GROUP) break;
    total[h] = warp_sum(total[h]);
    shared.maxima[column] = best[h];
    shared.totals[column] = total[h];
  }
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const float2 of = *(const float2*)(shared.totals + 8 * tile + 2 * quad);
    const float by[2] = {__fdividef(1.0f, of.x), __fdividef(1.0f, of.y)};
#pragma unroll
    for (int i = 0; i < OUT_SHARE; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) out[i][tile][c] *= by[c % 2];
  }
  if (splits > 1) {
    u8* const partials = p.partials + u64(blockIdx.x) * gridDim.y * PARTIAL_BYTES;
    u32* const arrivals = p.arrivals + blockIdx.x * (1 + (gridDim.y + FAN - 1) / FAN);
    // The first partial of neighbours takes their result: every thread has read what it then writes over.
    u32 left = splits, index = split, stride = PARTIAL_BYTES;
#pragma unroll 1
    for (;;) {
      store(partials + index * stride, shared, out);
      const bool all = left <= ONE_MERGE;
      const u32 neighbours = all ? 0 : index / FAN, members = all ? left : min(FAN, left - neighbours * FAN);
      if (!comes_last(all ? arrivals : arrivals + 1 + neighbours, members)) return;
      merge(partials + neighbours * FAN * stride, stride, members, shared, out);
      if (all) break;
      left = (left + FAN - 1) / FAN;
      index = neighbours;
      stride *= FAN;
    }
  }
  put_out(p, out);
}
