// Attention without tensor cores, the plain twin of the flash kernels: out = softmax(q . K) . V over the positions a row sees: all
// up to its own, or the last `window` of them and those up to its end. Scale is 1.
//
// Grid: (rows, query heads), a block of 8 warps per head of a row. Pages go to warps round-robin, by their index in the
// sequence, so a row's result does not depend on how its prompt was cut. Each warp keeps a running maximum, sum and output
// (online softmax in f32); shared memory merges the eight, in order. Lane `l` holds elements l * LANE_VALUES .. of the head.
// Bytes per row: 4 * columns in and out, and the seen keys and values once per query head (4 * seen * head_dim in f16).
// Requires head_dim <= 32 * LANE_VALUES and head_dim % LANE_VALUES == 0.
#include "lib/kv.cuh"
#include "lib/reduce.cuh"

struct Params {
  Rows rows;
  RowRefs row_refs;
  Slot slot;
  const float* q;
  float* out;
  u32 heads;
  u32 window;  // 0 sees all
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/attend.rs differs");

constexpr u32 WARPS = 8;
// Keys scored together, to have several loads in flight.
constexpr int KEYS = 4;

// A lane's elements of one cached row, in the widest loads they allow.
template <typename Unit>
struct alignas(LANE_VALUES * sizeof(Unit) < 16 ? LANE_VALUES * sizeof(Unit) : 16) Elements {
  Unit bits[LANE_VALUES];
};

// The same as numbers. In Q8_0 they have one scale: lanes hold parts of blocks.
__device__ __forceinline__ void load(float (&x)[LANE_VALUES], const Slot& slot, u8* page, u32 row, u32 element) {
  const Q8Page of = {page, kv_blocks(slot.head_dim)};
  const auto loaded = *(const Elements<u8>*)(of.codes(row) + element);
  const float scale = f16_to_f32(of.scales(row)[element / KV_BLOCK]);
#pragma unroll
  for (int i = 0; i < LANE_VALUES; i++) x[i] = mul(float(i8(loaded.bits[i])), scale);
}
__device__ __forceinline__ void load(float (&x)[LANE_VALUES], const Slot& slot, u16* page, u32 row, u32 element) {
  const auto loaded = *(const Elements<u16>*)(page + u64(row) * slot.head_dim + element);
#pragma unroll
  for (int i = 0; i < LANE_VALUES; i++) x[i] = f16_to_f32(loaded.bits[i]);
}

// Four blocks per multiprocessor: left alone, the compiler aims at eight and spills. Q8_0 takes some registers more.
constexpr int BLOCKS = KV_TYPE == KV_Q8_0 ? 3 : 4;

extern "C" __global__ void __launch_bounds__(256, BLOCKS) attend(const Params p) {
  __shared__ float max_of[WARPS], total_of[WARPS], out_of[WARPS][WARP * LANE_VALUES];
  if (!p.rows.has(blockIdx.x)) return;
  const u32 head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const u32 head_dim = p.slot.head_dim, kv_head = head / (p.heads / p.slot.kv_heads);
  const u32 row = p.rows.index[blockIdx.x];
  const u32 run = p.row_refs.run[row], position = p.row_refs.position[row];
  const u32 first = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
  const u32 end_seen = p.row_refs.last_seen(row, p.window) + 1;

  const u32 element = lane * LANE_VALUES;
  const bool holds = element < head_dim;
  const u64 at = (u64(blockIdx.x) * p.heads + head) * head_dim;
  float q[LANE_VALUES], out[LANE_VALUES];
#pragma unroll
  for (int i = 0; i < LANE_VALUES; i++) {
    q[i] = holds ? p.q[at + element + i] : 0;
    out[i] = 0;
  }
  float max = -INF, total = 0;

  u32 page_index = first / PAGE_TOKENS;
  page_index += (warp + WARPS - page_index % WARPS) % WARPS;
  for (; page_index * PAGE_TOKENS < end_seen; page_index += WARPS) {
    const u32 page = p.slot.page(run, page_index);
    const u64 keys_start = p.slot.key_page_start(page, kv_head), values_start = p.slot.page_start(page, kv_head);
    const u32 page_first = page_index * PAGE_TOKENS;
    const u32 begin = first > page_first ? first - page_first : 0;
    const u32 end = min(PAGE_TOKENS, end_seen - page_first);
    for (u32 key = begin; key < end; key += KEYS) {
      float score[KEYS];
#pragma unroll
      for (int k = 0; k < KEYS; k++) {
        score[k] = 0;
        if (holds && key + k < end) {
          float keys[LANE_VALUES];
          load(keys, p.slot, p.slot.keys + keys_start, key + k, element);
#pragma unroll
          for (int i = 0; i < LANE_VALUES; i++) score[k] += q[i] * keys[i];
        }
      }
      float best = max;
#pragma unroll
      for (int k = 0; k < KEYS; k++) {
        score[k] = warp_sum(score[k]);
        if (key + k < end) best = fmaxf(best, score[k]);
      }
      const float shrink = expf(max - best);  // 0 the first time, when max is -inf
      total *= shrink;
#pragma unroll
      for (int i = 0; i < LANE_VALUES; i++) out[i] *= shrink;
#pragma unroll
      for (int k = 0; k < KEYS; k++) {
        if (key + k < end) {
          const float weight = expf(score[k] - best);
          total += weight;
          if (holds) {
            float values[LANE_VALUES];
            load(values, p.slot, p.slot.values + values_start, key + k, element);
#pragma unroll
            for (int i = 0; i < LANE_VALUES; i++) out[i] += weight * values[i];
          }
        }
      }
      max = best;
    }
  }

  if (lane == 0) {
    max_of[warp] = max;
    total_of[warp] = total;
  }
#pragma unroll
  for (int i = 0; i < LANE_VALUES; i++) out_of[warp][element + i] = out[i];
  __syncthreads();
  float best = -INF, sum = 0;
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) best = fmaxf(best, max_of[w]);
  float share[WARPS];
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) {
    share[w] = expf(max_of[w] - best);  // 0 for a warp that saw no key; the row's own position is always seen
    sum += share[w] * total_of[w];
  }
  for (u32 j = threadIdx.x; j < head_dim; j += blockDim.x) {
    float merged = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) merged += share[w] * out_of[w][j];
    p.out[at + j] = merged / sum;
  }
}
