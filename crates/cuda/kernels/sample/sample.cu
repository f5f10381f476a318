// Sampling: a token for each sampled row, as crates/model/src/sampling.rs defines it, from logits that are final (softcap
// included).
//
// sample_scan, grid (blocks of 2048 logits, rows), chunks of 128 logits, two chunks per warp: applies penalties and
// biases to the logits, in place, and leaves the largest allowed logit of each chunk. A row without a temperature ends here: the
// last of its blocks to arrive takes the largest. Bytes per row: 4 * vocab in, vocab / 32 out; vocab / 8 in with a mask.
//
// sample_pick, grid (shares, rows): rows with a temperature. With a top-k of at most MAX_TOP_K the first share does it all: the
// k best logits lie in the k chunks with the best maxima, so it reads those alone, sorts, truncates by top-p and min-p, and
// draws. Otherwise each share draws among its part of the vocabulary, from the score on that sample_truncate.cu left, and the
// last to arrive takes the best. Bytes per row: vocab / 32 in and 512 for each of k chunks; up to 4 * vocab without a top-k.
//
// A mask comes before everything else: a masked token has the key 0, which nothing ever chooses.
//
// Requires vocab <= MAX_VOCAB (src/run/sample.rs keeps others away).
//
// Scores are compared as integers that are ordered like the numbers, with the complement of the token below them: the
// largest then is the best score and, on ties, the lowest token. Only integers are added atomically, so nothing depends on
// who comes first.
#include "lib/best.cuh"
#include "lib/sample.cuh"

extern "C" __global__ void __launch_bounds__(SCAN_THREADS) sample_scan(const Params p) {
  if (!p.rows.has(blockIdx.y)) return;
  const Row row(p, blockIdx.y);
  const u32 first = blockIdx.x * SCAN_CHUNKS, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  row.change(first * CHUNK, min((first + SCAN_CHUNKS) * CHUNK, p.vocab));

  u32 keys[CHUNKS_PER_WARP];
#pragma unroll
  for (u32 c = 0; c < CHUNKS_PER_WARP; c++) {
    const u32 start = (first + warp * CHUNKS_PER_WARP + c) * CHUNK + lane;
    keys[c] = 0;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) keys[c] = max(keys[c], row.key(start + i * WARP));
  }
#pragma unroll
  for (u32 c = 0; c < CHUNKS_PER_WARP; c++) {
    const u32 chunk = first + warp * CHUNKS_PER_WARP + c, largest = __reduce_max_sync(ALL_LANES, keys[c]);
    if (lane == 0 && chunk < row.chunks) row.maxima[chunk] = largest;
  }
  if (row.setting.temperature > 0) return;
  if (is_last(p.arrived + blockIdx.y, gridDim.x)) row.report(row.arg_max());
}

// More than the difference of two draws of noise, which are between -2.9 and 17.4.
constexpr float NOISE_REACH = 21;
// More than what a bound of a score may be off by, where scores count.
constexpr float BOUND_ERROR = 1e-3f;

// Tokens of a block's share that may be drawn.
struct Share {
  const Row& row;
  u32 largest;
  float floor;
  u64 cut;

  __device__ __forceinline__ bool has(u32 key, u32 token) const {
    return key > ORDERED_MINUS_INFINITY && scored(key, token) >= cut;
  }

  // Its first chunk, and how many there are: none behind the vocabulary.
  __device__ __forceinline__ u32 size() const { return (row.chunks + gridDim.x - 1) / gridDim.x; }
  __device__ __forceinline__ u32 first() const { return min(blockIdx.x * size(), row.chunks); }
  __device__ __forceinline__ u32 count() const { return min(size(), row.chunks - first()); }

  // Calls `each(key, token)` for those that are wanted.
  template <typename Wanted, typename Each>
  __device__ __forceinline__ void for_tokens(Wanted wanted, Each each) const {
    for_logits(
        row, count(), [&](u32 i) { return first() + i; },
        [&](u32 key, u32 token) { return has(key, token) && wanted(key, token); },
        [&](u32 key, u32 token, bool has) {
          if (has) each(key, token);
        });
  }

  // Calls `each(logit, bits)` for a token, unless it is below the floor.
  template <typename Each>
  __device__ __forceinline__ void with_logit(u32 key, u32 bits, Each each) const {
    const float logit = tempered(key, largest, row.setting.temperature);
    if (logit >= floor) each(logit, bits);
  }
};

// A draw from the vocabulary, or from what sample_truncate left of it: each share among its tokens, the last share among those. Noise is
// exact only for tokens that come near the best of the share by quick noise; of thousands that is one or two. And even quick noise is
// computed only where its bound reaches the best of one token per thread: of the others one in a thousand.
__device__ __forceinline__ void draw_from_all(const Row& row) {
  const Setting& s = row.setting;
  const u32 largest = row.largest();
  // What is further below the largest than the noise reaches cannot be drawn.
  const float floor = unordered(largest) < INF ? fmaxf(s.floor, -NOISE_REACH) : s.floor;
  const Share share{row, largest, floor, s.truncates_all() ? row.p.cuts[row.number] : 0};
  float reach = -INF;
  const auto draw = [&](float logit, u32 bits) { reach = fmaxf(reach, logit + quick_gumbel(bits)); };
  const u32 warp = threadIdx.x / WARP, first = (share.first() + warp) * CHUNK + threadIdx.x % WARP;
  const u32 first_key = warp < share.count() ? row.key(first) : 0;
  if (share.has(first_key, first)) share.with_logit(first_key, noise_bits(s, first), draw);
  // Of logits that are multiplied by the inverse of the temperature, not divided by it: nearly the same.
  const float inverse = fminf(1 / s.temperature, FLOAT_MAX), seen = unordered(u32(block_best(ordered(reach)))) - BOUND_ERROR;
  share.for_tokens(
      [&](u32 key, u32 token) {
        return !((unordered(key) - unordered(largest)) * inverse + gumbel_bound(noise_bits(s, token)) < seen);
      },
      [&](u32 key, u32 token) { share.with_logit(key, noise_bits(s, token), draw); });
  const float near = unordered(u32(block_best(ordered(reach)))) - 3 * QUICK_ERROR;
  u64 best = 0;
  if (__any_sync(ALL_LANES, reach >= near))
    share.for_tokens([&](u32, u32) { return reach >= near; },
                     [&](u32 key, u32 token) {
                       share.with_logit(key, noise_bits(s, token), [&](float logit, u32 bits) {
                         if (logit + quick_gumbel(bits) >= near) best = larger(best, scored(ordered(add(logit, gumbel(s, token))), token));
                       });
                     });
  best = block_best(best);
  u64* bests = row.p.best + u64(row.number) * gridDim.x;
  if (threadIdx.x == 0) bests[blockIdx.x] = best;
  if (!is_last(row.p.arrived + row.number, gridDim.x)) return;
  best = 0;
  for (u32 i = threadIdx.x; i < gridDim.x; i += blockDim.x) best = larger(best, __ldcg(bests + i));
  best = block_best(best);
  row.report(best ? token_of(best) : row.arg_max());
}

__device__ __forceinline__ void draw_from_best(const Row& row) {
  __shared__ float sums[MAX_TOP_K];
  const Setting& s = row.setting;
  const u32 thread = threadIdx.x, lane = thread % WARP, k = min(s.top_k, row.p.vocab);
  u32 count;
  const u64* sorted = best_first(row, k, ORDERED_MINUS_INFINITY + 1, count);
  if (count == 0) return row.report(row.arg_max());

  // One thread per survivor, best first.
  u32 kept = min(count, k);
  const u32 largest = u32(sorted[0] >> 32);
  const u64 key = thread < kept ? sorted[thread] : 0;
  const float logit = thread < kept ? tempered(u32(key >> 32), largest, s.temperature) : -INF;
  if (s.top_p < 1) {
    if (thread < kept) sums[thread] = weight(logit);
    __syncthreads();
    if (thread < WARP) {
      // One after another, as the reference adds them.
      float sum = 0;
      for (u32 first = 0; first < kept; first += WARP) {
        const float own = first + lane < kept ? sums[first + lane] : 0;
        float mine = 0;
#pragma unroll
        for (u32 i = 0; i < WARP; i++) {
          sum = add(sum, __shfl_sync(ALL_LANES, own, i));
          if (lane == i) mine = sum;
        }
        if (first + lane < kept) sums[first + lane] = mine;
      }
    }
    __syncthreads();
    const float enough = mul(s.top_p, sums[kept - 1]);
    const u32 below = __syncthreads_count(thread < kept && sums[thread] < enough);
    kept = min(kept, below + 1);
  }
  const bool survives = thread < kept && (thread == 0 || logit >= s.floor);
  const u64 drawn = block_best(survives ? scored(ordered(add(logit, gumbel(s, token_of(key)))), token_of(key)) : 0);
  row.report(token_of(drawn));
}

extern "C" __global__ void __launch_bounds__(PICK_THREADS, 1) sample_pick(const Params p) {
  if (!p.rows.has(blockIdx.y)) return;
  const Row row(p, blockIdx.y);
  if (!(row.setting.temperature > 0)) return;
  if (row.setting.top_k == 0 || row.setting.top_k > MAX_TOP_K)
    draw_from_all(row);
  else if (blockIdx.x == 0)
    draw_from_best(row);
}
