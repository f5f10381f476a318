// Truncation of the whole vocabulary: the last score that top-k above MAX_TOP_K, or top-p without a top-k, leave of a row. The
// draw itself is sample_pick's (sample.cu).
//
// Grid: (shares, rows), between sample_scan and sample_pick. Each share adds the weights of its tokens, exp of the tempered
// logit, to a histogram over those logits: 32 buckets per unit, so that a bucket holds few tokens of a model. The last share to
// arrive finds the bucket in which the sum is reached, gathers its tokens, sorts them and finds the last one that is kept.
// A bucket with more tokens than there is room for, as high temperatures make them, is split into 1024 first; where even that
// leaves too many, tokens are ties, and the score is found bit by bit. A bucket is a range of keys, found by bisection: one block
// goes over a row several times, and to compare a key takes a tenth of what it takes to divide by the temperature.
// Bytes per row: 4 * vocab in; 12 KiB of histogram; then the chunks whose largest logit reaches the bucket.
//
// Weights are integers, multiples of 2^-39 of the largest: sums then depend on no order, and are off by less than a millionth.
// The reference adds 32-bit floats one after another, which loses more than that over a vocabulary.
#include "lib/best.cuh"
#include "lib/sample.cuh"

constexpr float BUCKETS_PER_UNIT = 32;
constexpr float SPLIT = BUCKETS;             // parts of a bucket
constexpr float WEIGHT_OF_LARGEST = 549755813888.0f;  // 2^39
constexpr float LOWEST_WITH_WEIGHT = -28;    // what is below it weighs less than one
constexpr u32 LOW_BITS = 20;                 // of a weight, so that both halves are added up in 32 bits
constexpr u32 ROUND = 4096;                  // tokens that a block adds up in 32 bits
static_assert(u64(ROUND) << LOW_BITS <= 1ull << 32, "a round's low halves fit");

// The sum over this thread and those before it, for each thread of a block.
__device__ __forceinline__ u64 block_prefix_sum(u64 x) {
  __shared__ u64 sums[PICK_THREADS];
  __syncthreads();  // an earlier one may still be read
  sums[threadIdx.x] = x;
  for (u32 apart = 1; apart < PICK_THREADS; apart *= 2) {
    __syncthreads();
    const u64 before = threadIdx.x >= apart ? sums[threadIdx.x - apart] : 0;
    __syncthreads();
    sums[threadIdx.x] = x += before;
  }
  return x;
}

__device__ __forceinline__ u64 block_sum_of_integers(u64 x) {
  __shared__ u64 sum;
  __syncthreads();  // an earlier one may still be read
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  if (x) atomicAdd(&sum, x);
  __syncthreads();
  return sum;
}

// The first thread whose sum of values, added to those of the threads before it, reaches `needed`; and the sum before it.
struct Crossing {
  u32 at;
  u64 before;

  __device__ __forceinline__ Crossing(u64 value, u64 needed) {
    __shared__ u64 sum_before;
    const u64 end = block_prefix_sum(value);
    at = u32(__syncthreads_count(end < needed));
    if (threadIdx.x == at) sum_before = end - value;
    __syncthreads();
    before = sum_before;
    __syncthreads();
  }

  __device__ __forceinline__ bool is_reached() const { return at < PICK_THREADS; }
};

// Keys from the first to the last.
struct Range {
  u32 first, last;

  __device__ __forceinline__ bool has(u32 key) const { return key >= first && key <= last; }

  // The keys for which `number_of` is `number`. It does not rise with the key.
  template <typename NumberOf>
  __device__ __forceinline__ Range where(u32 number, NumberOf number_of) const {
    const auto first_at_most = [&](u32 bound) {
      u32 low = first, high = last + 1;
      while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (number_of(middle) <= bound)
          high = middle;
        else
          low = middle + 1;
      }
      return low;
    };
    return {first_at_most(number), number ? first_at_most(number - 1) - 1 : last};
  }
};

// The scores that truncation compares, relative to the largest logit.
struct Scores {
  const Row& row;
  u32 largest;

  __device__ __forceinline__ float logit(u32 key) const { return tempered(key, largest, row.setting.temperature); }

  __device__ __forceinline__ float depth(u32 key) const { return -logit(key) * BUCKETS_PER_UNIT; }

  __device__ __forceinline__ u32 bucket(u32 key) const { return u32(fminf(depth(key), BUCKETS - 1)); }

  __device__ __forceinline__ u32 part(u32 key) const {
    return u32(fminf((depth(key) - float(bucket(key))) * SPLIT, BUCKETS - 1));
  }

  __device__ __forceinline__ u64 weight_of(u32 key) const {
    const float x = logit(key);
    return x > LOWEST_WITH_WEIGHT ? u64(mul(weight(x), WEIGHT_OF_LARGEST)) : 0;
  }
};

// Tokens of one bucket, or of a part of it, by one block.
struct Bucket {
  const Scores& scores;
  Range range;
  u16* chosen;
  u32& chosen_count;
  List& list;
  u64* histogram;

  // Turns to another, with the chunks its tokens lie in.
  __device__ __forceinline__ void choose(u32 number) {
    const Range all{ORDERED_MINUS_INFINITY + 1, scores.largest};
    range = all.where(number, [&](u32 key) { return scores.bucket(key); });
    __syncthreads();
    if (threadIdx.x == 0) chosen_count = 0;
    __syncthreads();
    const Row& row = scores.row;
    for (u32 chunk = threadIdx.x; chunk < row.chunks; chunk += PICK_THREADS) {
      if (row.maxima[chunk] >= range.first) chosen[atomicAdd(&chosen_count, 1u)] = u16(chunk);
    }
    __syncthreads();
  }

  template <typename Each>
  __device__ __forceinline__ void for_tokens(Each each) const {
    for_logits(scores.row, chosen, chosen_count, [&](u32 key, u32 token) {
      if (range.has(key)) each(scored(key, token));
    });
  }

  __device__ __forceinline__ void gather() {
    __syncthreads();
    if (threadIdx.x == 0) list.count = 0;
    __syncthreads();
    for_tokens([&](u64 score) { list.add(score); });
    __syncthreads();
  }

  // The score of the first token, best first, with which values add up to `needed`; they do within the bucket.
  template <typename Value>
  __device__ __forceinline__ u64 cut(u64 needed, Value value) {
    gather();
    if (list.count > MAX_CANDIDATES) {
      histogram[threadIdx.x] = 0;
      __syncthreads();
      for_tokens([&](u64 score) { atomicAdd(&histogram[scores.part(u32(score >> 32))], u64(value(score))); });
      __syncthreads();
      const Crossing crossing(histogram[threadIdx.x], needed);
      range = range.where(crossing.at, [&](u32 key) { return scores.part(key); });
      needed -= crossing.before;
      gather();
    }
    const u32 count = list.count;
    if (count <= MAX_CANDIDATES) {
      const u64* sorted = sorted_best_first(list.keys, count);
      // Two neighbours per thread.
      const u32 first = 2 * threadIdx.x;
      const u64 one = first < count ? value(sorted[first]) : 0, other = first + 1 < count ? value(sorted[first + 1]) : 0;
      const u64 end = block_prefix_sum(one + other);
      const u32 below = u32(__syncthreads_count(end - other < needed) + __syncthreads_count(end < needed));
      const u64 last = sorted[min(below, count - 1)];
      __syncthreads();
      return last;
    }
    u64 last = 0;
    for (u64 bit = 1ull << 63; bit; bit >>= 1) {
      u64 reached = 0;
      for_tokens([&](u64 score) {
        if (score >= (last | bit)) reached += value(score);
      });
      if (block_sum_of_integers(reached) >= needed) last |= bit;
    }
    return last;
  }
};

extern "C" __global__ void __launch_bounds__(PICK_THREADS, 1) sample_truncate(const Params p) {
  __shared__ u64 histogram[BUCKETS];
  __shared__ u32 counted[BUCKETS];
  __shared__ u16 chosen[MAX_CHUNKS];
  __shared__ u32 chosen_count;
  __shared__ List list;
  if (!p.rows.has(blockIdx.y)) return;
  const Row row(p, blockIdx.y);
  const Setting& s = row.setting;
  if (!s.truncates_all()) return;
  const u32 thread = threadIdx.x;
  u32 *low = (u32*)histogram, *high = low + BUCKETS;
  histogram[thread] = 0;
  counted[thread] = 0;
  const Scores scores{row, row.largest()};  // has barriers
  const u32 share = (p.vocab + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  const u32 end = min(first + share, p.vocab);
  u64 own = 0;
  for (u32 start = first; start < end; start += ROUND) {
    for (u32 token = start + thread; token < min(start + ROUND, end); token += PICK_THREADS) {
      const u32 key = row.key(token);
      if (key <= ORDERED_MINUS_INFINITY) continue;
      const u32 bucket = scores.bucket(key);
      const u64 weight = scores.weight_of(key);
      if (weight) {
        atomicAdd(low + bucket, u32(weight) & ((1u << LOW_BITS) - 1));
        atomicAdd(high + bucket, u32(weight >> LOW_BITS));
      }
      if (s.top_k) atomicAdd(counted + bucket, 1u);
    }
    __syncthreads();
    own += (u64(high[thread]) << LOW_BITS) + low[thread];
    low[thread] = high[thread] = 0;
    __syncthreads();
  }
  u64* weights = p.weights + u64(row.number) * BUCKETS;
  u32* counts = p.counts + u64(row.number) * BUCKETS;
  if (own) atomicAdd(weights + thread, own);
  if (counted[thread]) atomicAdd(counts + thread, counted[thread]);
  if (!is_last(p.arrived + row.number, gridDim.x)) return;

  const u64 weight = __ldcg(weights + thread);
  const u32 count = __ldcg(counts + thread);
  weights[thread] = 0;
  counts[thread] = 0;
  Bucket bucket{scores, {}, chosen, chosen_count, list, histogram};
  u64 last = 0, total = block_sum_of_integers(weight);
  if (s.top_k) {
    const Crossing crossing(count, s.top_k);
    // What the last bucket holds weighs nothing and is never drawn.
    if (crossing.at < BUCKETS - 1) {
      bucket.choose(crossing.at);
      const Range whole = bucket.range;
      last = bucket.cut(s.top_k - crossing.before, [](u64) { return 1ull; });
      bucket.range = whole;
      u64 kept = thread < crossing.at ? weight : 0;
      bucket.for_tokens([&](u64 score) {
        if (score >= last) kept += scores.weight_of(u32(score >> 32));
      });
      total = block_sum_of_integers(kept);
    }
  }
  if (s.top_p < 1) {
    const double enough = double(s.top_p) * double(total);
    const u64 needed = max(u64(enough) + (double(u64(enough)) < enough), u64(1));
    const Crossing crossing(weight, needed);
    if (crossing.is_reached()) {
      bucket.choose(crossing.at);
      const auto by_weight = [&](u64 score) { return scores.weight_of(u32(score >> 32)); };
      last = larger(last, bucket.cut(needed - crossing.before, by_weight));
    }
  }
  if (thread == 0) p.cuts[row.number] = last;
}
