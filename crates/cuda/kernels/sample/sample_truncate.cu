// Truncation of the whole vocabulary: the last score that top-k above MAX_TOP_K, or top-p without a top-k, leave of a row. The
// draw itself is sample_pick's (sample.cu).
//
// Grid: (shares, rows), between sample_scan and sample_pick. Each share adds the weights of its tokens, exp of the tempered
// logit, to a histogram over those logits: 128 buckets per unit, so that a bucket holds few tokens of a model. The last share to
// arrive finds the bucket in which the sum is reached, gathers its tokens, sorts them and finds the last one that is kept.
// A bucket with more tokens than there is room for, as high temperatures make them, is split into 1024 first; where even that
// leaves too many, tokens are ties, and the score is found bit by bit. A bucket is a range of keys, found by bisection.
// Bytes per row: 4 * vocab in; 48 KiB of histogram; then the chunks whose largest logit reaches the bucket.
//
// The weights of a bucket are all but the same. So a token adds what its weight is of the bucket's largest, a multiple of 2^-20, and sums
// depend on no order; they are off by a millionth at most. The reference adds 32-bit floats one after another, which loses more than
// that over a vocabulary. Sums of buckets are multiples of 2^-39 of the largest weight.
#include "lib/best.cuh"
#include "lib/sample.cuh"

constexpr float BUCKETS_PER_UNIT = 128;
constexpr u32 OWN_BUCKETS = BUCKETS / PICK_THREADS;  // of a thread
constexpr u32 PARTS = PICK_THREADS;                  // of a bucket
constexpr float WHOLE = 1048575;                     // the largest weight of a bucket
constexpr double LARGEST_BUCKET = 524288;            // what WHOLE counts for in the first bucket, 2^39, of its units
constexpr u32 ROUND = 4096;                          // tokens that a block adds up in 32 bits
static_assert(u64(ROUND) * u64(WHOLE) < 1ull << 32, "a round's weights fit");

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

__device__ __forceinline__ u64 warp_sum_of_integers(u64 x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    const u32 low = __shfl_xor_sync(ALL_LANES, u32(x), mask), high = __shfl_xor_sync(ALL_LANES, u32(x >> 32), mask);
    x += u64(high) << 32 | low;
  }
  return x;
}

__device__ __forceinline__ u64 block_sum_of_integers(u64 x) {
  __shared__ u64 of_warp[PICK_THREADS / WARP];
  x = warp_sum_of_integers(x);
  __syncthreads();  // an earlier one may still be read
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
  __syncthreads();
  return warp_sum_of_integers(of_warp[threadIdx.x % WARP]);
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

  float per_logit;  // buckets

  __device__ __forceinline__ Scores(const Row& row)
      : row(row), largest(row.largest()), per_logit(fminf(BUCKETS_PER_UNIT / row.setting.temperature, FLOAT_MAX)) {}

  __device__ __forceinline__ float depth(u32 key) const { return mul(sub(unordered(largest), unordered(key)), per_logit); }

  __device__ __forceinline__ u32 bucket(u32 key) const { return u32(fminf(depth(key), BUCKETS - 1)); }

  // Where a key lies in its bucket, from 0 on.
  __device__ __forceinline__ float rest(u32 key) const { return sub(depth(key), float(bucket(key))); }

  __device__ __forceinline__ u32 part(u32 key) const { return u32(fminf(rest(key) * PARTS, PARTS - 1)); }

  // Of WHOLE. What the last bucket holds weighs nothing and is never drawn.
  __device__ __forceinline__ u32 weight_in_bucket(u32 key) const {
    const float y = rest(key) / BUCKETS_PER_UNIT;
    // exp(-y) of less than a hundredth.
    const float weight = fmaf(y, fmaf(y, fmaf(y, -1.0f / 6, 0.5f), -1.0f), 1.0f);
    return bucket(key) < BUCKETS - 1 ? u32(weight * WHOLE) : 0;
  }

  // The weight of a bucket, or of some of its tokens, from what they weigh in it.
  __device__ __forceinline__ u64 weight_of(u32 bucket, u64 in_bucket) const {
    return u64(double(in_bucket) * (LARGEST_BUCKET * exp(-double(bucket) / BUCKETS_PER_UNIT)));
  }
};

// Tokens of one bucket, or of a part of it, by one block.
struct Bucket {
  const Scores& scores;
  Range range;
  u32 number;
  u16* chosen;
  u32& chosen_count;
  List& list;
  u64* histogram;

  // Turns to another, with the chunks its tokens lie in.
  __device__ __forceinline__ void choose(u32 bucket) {
    number = bucket;
    const Range all{ORDERED_MINUS_INFINITY + 1, scores.largest};
    range = all.where(number, [&](u32 key) { return scores.bucket(key); });
    __syncthreads();
    if (threadIdx.x == 0) chosen_count = 0;
    __syncthreads();
    const Row& row = scores.row;
    for (u32 first = 0; first < row.chunks; first += PICK_THREADS) {
      const u32 chunk = first + threadIdx.x;
      const bool reaches = chunk < row.chunks && row.maxima[chunk] >= range.first;
      const u32 at = next_index(chosen_count, reaches);
      if (reaches) chosen[at] = u16(chunk);
    }
    __syncthreads();
  }

  // Calls `each(score, has)` for its tokens, whole warps at a time, of whose lanes some may have none.
  template <typename Each>
  __device__ __forceinline__ void for_warps(Each each) const {
    for_logits(
        scores.row, chosen_count, [&](u32 i) { return u32(chosen[i]); }, [&](u32 key, u32) { return range.has(key); },
        [&](u32 key, u32 token, bool has) { each(scored(key, token), has); });
  }

  template <typename Each>
  __device__ __forceinline__ void for_tokens(Each each) const {
    for_warps([&](u64 score, bool has) {
      if (has) each(score);
    });
  }

  __device__ __forceinline__ void gather() {
    __syncthreads();
    if (threadIdx.x == 0) list.count = 0;
    __syncthreads();
    for_warps([&](u64 score, bool has) { list.add(score, has); });
    __syncthreads();
  }

  // The score of the first token, best first, with which values add up to `needed`; they do within the bucket.
  template <typename Value>
  __device__ __forceinline__ u64 cut(u64 needed, Value value) {
    gather();
    if (list.count > MAX_CANDIDATES) {
      histogram[threadIdx.x] = 0;
      __syncthreads();
      for_tokens([&](u64 score) { atomicAdd(&histogram[scores.part(u32(score >> 32))], value(score)); });
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

// The first bucket with which values add up to `needed`, and the sum before it. Each thread has those of its own buckets.
struct BucketCrossing {
  u32 bucket;
  u64 before;
  bool is_reached;

  __device__ __forceinline__ BucketCrossing(const u64 (&values)[OWN_BUCKETS], u64 needed) {
    __shared__ u32 found;
    __shared__ u64 sum_before;
    u64 own = 0;
#pragma unroll
    for (u32 i = 0; i < OWN_BUCKETS; i++) own += values[i];
    const Crossing crossing(own, needed);
    is_reached = crossing.is_reached();
    if (threadIdx.x == crossing.at) {
      u64 sum = crossing.before;
      u32 i = 0;
      while (i < OWN_BUCKETS - 1 && sum + values[i] < needed) sum += values[i++];
      found = OWN_BUCKETS * threadIdx.x + i;
      sum_before = sum;
    }
    __syncthreads();
    bucket = found;
    before = sum_before;
    __syncthreads();
  }
};

extern "C" __global__ void __launch_bounds__(PICK_THREADS, 1) sample_truncate(const Params p) {
  __shared__ u64 sums[BUCKETS / 2];  // of weights, 32 bits per bucket; later of parts
  __shared__ u16 chosen[MAX_CHUNKS];
  __shared__ u32 chosen_count;
  __shared__ List list;
  static_assert(sizeof(list.keys) == BUCKETS * 4 && PARTS <= BUCKETS / 2, "memory is used twice");
  if (!p.rows.has(blockIdx.y)) return;
  const Row row(p, blockIdx.y);
  const Setting& s = row.setting;
  if (!s.truncates_all()) return;
  const u32 thread = threadIdx.x;
  u32 *weighed = (u32*)sums, *counted = (u32*)list.keys;
  for (u32 i = thread; i < BUCKETS; i += PICK_THREADS) weighed[i] = counted[i] = 0;
  const Scores scores(row);  // has barriers
  const u32 share = (p.vocab + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  const u32 end = min(first + share, p.vocab);
  u64* weights = p.weights + u64(row.number) * BUCKETS;
  u32* counts = p.counts + u64(row.number) * BUCKETS;
  u64 own[OWN_BUCKETS] = {};
  for (u32 start = first; start < end; start += ROUND) {
    u32 keys[ROUND / PICK_THREADS];
#pragma unroll
    for (u32 i = 0; i < ROUND / PICK_THREADS; i++) {
      const u32 token = start + thread + i * PICK_THREADS;
      keys[i] = token < end ? row.key(token) : 0;
    }
#pragma unroll
    for (u32 key : keys) {
      if (key <= ORDERED_MINUS_INFINITY) continue;
      const u32 bucket = scores.bucket(key), weight = scores.weight_in_bucket(key);
      if (weight) atomicAdd(weighed + bucket, weight);
      if (s.top_k) atomicAdd(counted + bucket, 1u);
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < OWN_BUCKETS; i++) {
      own[i] += weighed[thread + i * PICK_THREADS];
      weighed[thread + i * PICK_THREADS] = 0;
    }
    __syncthreads();
  }
#pragma unroll
  for (u32 i = 0; i < OWN_BUCKETS; i++) {
    const u32 bucket = thread + i * PICK_THREADS;
    if (own[i]) atomicAdd(weights + bucket, own[i]);
    if (counted[bucket]) atomicAdd(counts + bucket, counted[bucket]);
  }
  if (!is_last(p.arrived + row.number, gridDim.x)) return;

  u64 weight[OWN_BUCKETS], all = 0;
#pragma unroll
  for (u32 i = 0; i < OWN_BUCKETS; i++) {
    const u32 bucket = OWN_BUCKETS * thread + i;
    weight[i] = scores.weight_of(bucket, __ldcg(weights + bucket));
    weights[bucket] = 0;
    all += weight[i];
  }
  Bucket bucket{scores, {}, 0, chosen, chosen_count, list, sums};
  const auto weight_of = [&](u64 score) { return scores.weight_of(bucket.number, scores.weight_in_bucket(u32(score >> 32))); };
  u64 last = 0, total = block_sum_of_integers(all);
  if (s.top_k) {
    u64 count[OWN_BUCKETS];
#pragma unroll
    for (u32 i = 0; i < OWN_BUCKETS; i++) {
      count[i] = __ldcg(counts + OWN_BUCKETS * thread + i);
      counts[OWN_BUCKETS * thread + i] = 0;
    }
    const BucketCrossing crossing(count, s.top_k);
    if (crossing.is_reached && crossing.bucket < BUCKETS - 1) {
      bucket.choose(crossing.bucket);
      const Range whole = bucket.range;
      last = bucket.cut(s.top_k - crossing.before, [](u64) { return 1ull; });
      bucket.range = whole;
      u64 kept = 0;
#pragma unroll
      for (u32 i = 0; i < OWN_BUCKETS; i++) kept += OWN_BUCKETS * thread + i < crossing.bucket ? weight[i] : 0;
      bucket.for_tokens([&](u64 score) {
        if (score >= last) kept += weight_of(score);
      });
      total = block_sum_of_integers(kept);
    }
  }
  if (s.top_p < 1) {
    const double enough = double(s.top_p) * double(total);
    const u64 needed = max(u64(enough) + (double(u64(enough)) < enough), u64(1));
    const BucketCrossing crossing(weight, needed);
    if (crossing.is_reached) {
      bucket.choose(crossing.bucket);
      last = larger(last, bucket.cut(needed - crossing.before, weight_of));
    }
  }
  if (thread == 0) p.cuts[row.number] = last;
}
