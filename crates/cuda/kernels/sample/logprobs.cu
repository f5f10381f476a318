// Log-probabilities of the likeliest tokens of a row, and the logarithm of its sum of exponentials, by which the drawn token's is
// reported later: crates/model/src/sampling.rs, `logprobs`. Of the logits as they are, so before sample_scan changes them.
//
// logprobs_scan, grid (blocks of 2048 logits, rows): the largest logit of each chunk. Bytes per row: 4 * vocab in.
//
// logprobs_pick, grid (shares, rows): each share adds up the exponentials of its part, in a fixed order and double precision; the
// last to arrive adds the shares, and reads the chunks with the best maxima for the likeliest tokens. Bytes per row: 4 * vocab in.
//
// Requires at most MAX_LOGPROBS tokens per row (src/run/sample.rs keeps others away).
#include "lib/best.cuh"
#include "lib/sample.cuh"

// A row's logits without mask and changes; -0 is below 0 here.
struct Logits {
  const float* logits;
  u32* maxima;
  u32 chunks, vocab;

  __device__ __forceinline__ u32 key(u32 token) const {
    if (token >= vocab) return 0;
    const float x = logits[token];
    const u32 bits = __float_as_uint(x);
    return x != x ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
  }
};

extern "C" __global__ void __launch_bounds__(SCAN_THREADS) logprobs_scan(const Params p) {
  if (!p.rows.has(blockIdx.y) || p.settings[blockIdx.y].logprobs == NONE) return;
  const Row row(p, blockIdx.y);
  const Logits logits{row.logits, row.maxima, row.chunks, p.vocab};
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  for (u32 c = 0; c < CHUNKS_PER_WARP; c++) {
    const u32 chunk = blockIdx.x * SCAN_CHUNKS + warp * CHUNKS_PER_WARP + c;
    u32 key = 0;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) key = max(key, logits.key(chunk * CHUNK + lane + i * WARP));
    key = __reduce_max_sync(ALL_LANES, key);
    if (lane == 0 && chunk < row.chunks) row.maxima[chunk] = key;
  }
}

// The sum over all threads of a block, in every thread.
__device__ __forceinline__ double block_sum_of_doubles(double x) {
  __shared__ double sums[PICK_THREADS];
  sums[threadIdx.x] = x;
  for (u32 half = PICK_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

extern "C" __global__ void __launch_bounds__(PICK_THREADS, 1) logprobs_pick(const Params p) {
  if (!p.rows.has(blockIdx.y) || p.settings[blockIdx.y].logprobs == NONE) return;
  const Row row(p, blockIdx.y);
  const Logits logits{row.logits, row.maxima, row.chunks, p.vocab};
  // Without any number it is minus infinity, as of an empty list.
  const float largest = unordered(max(row.largest(), ORDERED_MINUS_INFINITY));
  const u32 share = (p.vocab + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  double sum = 0;
  for (u32 token = first + threadIdx.x; token < min(first + share, p.vocab); token += PICK_THREADS)
    sum += double(expf(sub(logits.logits[token], largest)));
  sum = block_sum_of_doubles(sum);
  double* sums = p.sums + u64(row.number) * gridDim.x;
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
  if (!is_last(p.arrived + row.number, gridDim.x)) return;

  sum = 0;
  for (u32 i = 0; i < gridDim.x; i++) sum += __ldcg(sums + i);
  const float norm = add(largest, float(log(sum)));
  Report& report = p.reports[*p.in_flight * p.max_rows + row.number];
  const u32 wanted = min(row.setting.logprobs, p.vocab);
  u32 count = 0;
  if (wanted > 0) {
    const u64* sorted = best_first(logits, wanted, ORDERED_MINUS_INFINITY, count);
    count = min(count, wanted);
    if (threadIdx.x < count) {
      report.tokens[threadIdx.x] = token_of(sorted[threadIdx.x]);
      report.logprobs[threadIdx.x] = sub(unordered(u32(sorted[threadIdx.x] >> 32)), norm);
    }
  }
  if (threadIdx.x == 0) {
    p.norms[row.number] = norm;
    report.count = count;
  }
}
