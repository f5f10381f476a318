// Sampling: a token for each sampled row, as crates/model/src/sampling.rs defines it, from logits that are final (softcap
// included).
//
// sample_scan, grid (blocks of 2048 logits, rows), chunks of 128 logits, two chunks per warp: applies penalties and
// biases to the logits, in place, and leaves the largest logit of each chunk. A row without a temperature ends here: the
// last of its blocks to arrive takes the largest. Bytes per row: 4 * vocab in, vocab / 32 out.
//
// sample_pick, grid (shares, rows): rows with a temperature. With a top-k the first share does it all: the k best logits lie
// in the k chunks with the best maxima, so it reads those alone, sorts, truncates by top-p and min-p, and draws. Without a
// top-k each share draws among its part of the vocabulary, and the last to arrive takes the best.
// Bytes per row: vocab / 32 in and 512 for each of k chunks; 4 * vocab without a top-k.
//
// Requires vocab <= MAX_VOCAB, top_k <= MAX_TOP_K, and top_p = 1 where top_k = 0 (src/run/sample.rs keeps others away).
//
// Scores are compared as integers that are ordered like the numbers, with the complement of the token below them: the
// largest then is the best score and, on ties, the lowest token. Only integers are added atomically, so nothing depends on
// who comes first.
#include "lib/batch.cuh"
#include "lib/reduce.cuh"

constexpr u32 CHUNK = 128;
constexpr u32 PER_LANE = CHUNK / WARP;
constexpr u32 SCAN_THREADS = 256;
constexpr u32 CHUNKS_PER_WARP = 2;
constexpr u32 SCAN_CHUNKS = SCAN_THREADS / WARP * CHUNKS_PER_WARP;  // chunks
constexpr u32 PICK_THREADS = 1024;
constexpr u32 MAX_VOCAB = 262144;
constexpr u32 MAX_CHUNKS = MAX_VOCAB / CHUNK;
constexpr u32 CHUNKS_PER_THREAD = MAX_CHUNKS / PICK_THREADS;
constexpr u32 MAX_TOP_K = 1024;
constexpr u32 MAX_CANDIDATES = 2048;
static_assert(MAX_TOP_K <= PICK_THREADS, "one thread per survivor");

struct Setting {
  float temperature;  // 0: the largest
  u32 top_k;          // 0: all
  float top_p;
  float floor;  // the logarithm of min-p
  float repeat_penalty;
  u32 position;
  u64 seed;
  u32 changes;  // start of the row's changes, in words of the batch
  u32 change_count;
};

// A change of one logit. They are sorted by token, and those of one token are applied in order.
struct Change {
  u32 token;
  u32 seen;  // whether the token was seen recently: then the repeat penalty applies and `by` is subtracted, else added
  float by;
};

struct Params {
  Rows rows;
  float* logits;
  const Setting* settings;
  const u32* words;  // of the batch
  u32* maxima;       // [rows, chunks], as ordered integers
  u64* best;         // [rows, shares]
  u32* arrived;      // [rows], 0 between launches
  u32* samples;      // [rows]
  u32* results;      // [2, most_rows], in host memory
  const u32* in_flight;  // which of the two: the batch's slot in flight
  u32 vocab;
  u32 most_rows;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/sample.rs differs");

// Ordered like the numbers; both zeros are one number, and what is not a number is below them all.
__device__ __forceinline__ u32 ordered(float x) {
  if (x != x) return 0;
  const u32 bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
constexpr u32 ORDERED_MINUS_INFINITY = 0x007fffffu;

__device__ __forceinline__ float unordered(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ u64 scored(u32 score, u32 token) { return u64(score) << 32 | u32(~token); }
__device__ __forceinline__ u32 token_of(u64 key) { return ~u32(key); }

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

__device__ __forceinline__ u64 warp_best(u64 x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    const u32 low = __shfl_xor_sync(ALL_LANES, u32(x), mask), high = __shfl_xor_sync(ALL_LANES, u32(x >> 32), mask);
    x = larger(x, u64(high) << 32 | low);
  }
  return x;
}

// The largest over all threads of a block, in every thread.
__device__ __forceinline__ u64 block_best(u64 x) {
  __shared__ u64 of_warp[32];
  x = warp_best(x);
  __syncthreads();  // an earlier one may still be read
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
  __syncthreads();
  const u32 lane = threadIdx.x % WARP;
  return warp_best(lane < blockDim.x / WARP ? of_warp[lane] : 0);
}

// Whether this block is the last of `blocks` to arrive; what the others wrote before can then be read past L1.
__device__ __forceinline__ bool is_last(u32* arrived, u32 blocks) {
  __shared__ u32 others;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) others = atomicAdd(arrived, 1u);
  __syncthreads();
  __threadfence();
  if (others + 1 < blocks) return false;
  if (threadIdx.x == 0) *arrived = 0;
  return true;
}

struct Row {
  const Params& p;
  const Setting setting;
  u32 number;
  float* logits;
  u32* maxima;
  u32 chunks;

  __device__ __forceinline__ Row(const Params& p, u32 number)
      : p(p),
        setting(p.settings[number]),
        number(number),
        logits(p.logits + u64(number) * p.vocab),
        maxima(p.maxima + u64(number) * ((p.vocab + CHUNK - 1) / CHUNK)),
        chunks((p.vocab + CHUNK - 1) / CHUNK) {}

  // A token's logit as an ordered integer; behind the vocabulary, no number.
  __device__ __forceinline__ u32 key(u32 token) const { return token < p.vocab ? ordered(logits[token]) : 0; }

  __device__ __forceinline__ void report(u32 token) const {
    if (threadIdx.x != 0) return;
    p.samples[number] = token;
    p.results[*p.in_flight * p.most_rows + number] = token;
  }

  // The largest logit, the lowest token on ties, 0 if there is no number at all. By all threads of a block.
  __device__ __forceinline__ u32 arg_max() const {
    u64 best = 0;
    for (u32 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) best = larger(best, scored(__ldcg(maxima + chunk), chunk));
    const u32 chunk = token_of(block_best(best));
    best = 0;
    // Logits past L1, too: another block may have changed them.
    for (u32 token = chunk * CHUNK + threadIdx.x; token < min((chunk + 1) * CHUNK, p.vocab); token += blockDim.x)
      best = larger(best, scored(ordered(__ldcg(logits + token)), token));
    return token_of(block_best(best));
  }

  // Applies the changes of tokens `first` up to `end`.
  __device__ __forceinline__ void change(u32 first, u32 end) const {
    if (setting.change_count == 0) return;
    const Change* changes = (const Change*)(p.words + setting.changes);
    for (u32 i = threadIdx.x; i < setting.change_count; i += blockDim.x) {
      const u32 token = changes[i].token;
      if (token < first || token >= end || (i > 0 && changes[i - 1].token == token)) continue;
      float logit = logits[token];
      for (u32 j = i; j < setting.change_count && changes[j].token == token; j++) {
        const float by = changes[j].by;
        if (changes[j].seen) {
          logit = logit > 0 ? __fdiv_rn(logit, setting.repeat_penalty) : mul(logit, setting.repeat_penalty);
          logit = sub(logit, by);
        } else {
          logit = add(logit, by);
        }
      }
      logits[token] = logit;
    }
    __syncthreads();
  }
};

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

// 64 well-mixed bits from (seed, position, token).
__device__ __forceinline__ u64 mix(u64 z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}
__device__ __forceinline__ u64 random_bits(u64 seed, u64 position, u32 token) {
  constexpr u64 GOLDEN = 0x9e3779b97f4a7c15ull;
  const u64 a = mix(seed + GOLDEN), b = mix(a ^ (position * GOLDEN + GOLDEN));
  return mix(b ^ (token * GOLDEN + GOLDEN));
}

// Standard Gumbel noise. In double precision, so that the rounded result hardly ever differs from another library's.
__device__ __forceinline__ float gumbel(const Setting& setting, u32 token) {
  const double bits = double(random_bits(setting.seed, setting.position, token) >> 40);
  return float(-log(-log((bits + 0.5) / 16777216.0)));
}

// A logit's weight before it is normalised: that of the reference, rounded from double precision for the same reason.
__device__ __forceinline__ float weight(float tempered) { return float(exp(double(tempered))); }

__device__ __forceinline__ float tempered(u32 key, u32 largest, float temperature) {
  return __fdiv_rn(sub(unordered(key), unordered(largest)), temperature);
}

// A draw without top-k: each share among its tokens, the last share among those.
__device__ __forceinline__ void draw_from_all(const Row& row) {
  const Setting& s = row.setting;
  u64 best = 0;
  for (u32 chunk = threadIdx.x; chunk < row.chunks; chunk += blockDim.x) best = larger(best, row.maxima[chunk]);
  const u32 largest = u32(block_best(best));
  best = 0;
  const u32 share = (row.p.vocab + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  for (u32 token = first + threadIdx.x; token < min(first + share, row.p.vocab); token += blockDim.x) {
    const u32 key = row.key(token);
    if (key <= ORDERED_MINUS_INFINITY) continue;
    const float logit = tempered(key, largest, s.temperature);
    if (logit >= s.floor) best = larger(best, scored(ordered(add(logit, gumbel(s, token))), token));
  }
  best = block_best(best);
  u64* bests = row.p.best + u64(row.number) * gridDim.x;
  if (threadIdx.x == 0) bests[blockIdx.x] = best;
  if (!is_last(row.p.arrived + row.number, gridDim.x)) return;
  best = 0;
  for (u32 i = threadIdx.x; i < gridDim.x; i += blockDim.x) best = larger(best, __ldcg(bests + i));
  best = block_best(best);
  row.report(best ? token_of(best) : row.arg_max());
}

// Candidates in no order.
struct List {
  u32 count;  // may be more than there is room for
  u64 keys[MAX_CANDIDATES];

  __device__ __forceinline__ void add(u64 key) {
    const u32 at = atomicAdd(&count, 1u);
    if (at < MAX_CANDIDATES) keys[at] = key;
  }
};

// A draw among the best k, by one block.
struct Best {
  const Row& row;
  u32 k;
  u32 mine[CHUNKS_PER_THREAD];  // maxima of this thread's chunks

  __device__ __forceinline__ Best(const Row& row) : row(row), k(min(row.setting.top_k, row.p.vocab)) {
#pragma unroll
    for (u32 i = 0; i < CHUNKS_PER_THREAD; i++) {
      const u32 chunk = threadIdx.x + i * PICK_THREADS;
      mine[i] = chunk < row.chunks ? row.maxima[chunk] : 0;
    }
  }

  // A number that k chunks reach, if that many have logits above minus infinity, and that few more do. Bit by bit from the
  // top, as long as there are many more.
  __device__ __forceinline__ u32 threshold() const {
    const u32 lowest = ORDERED_MINUS_INFINITY + 1;
    u32 found = 0;
    for (u32 bit = 1u << 31; bit; bit >>= 1) {
      u32 count = 0;
#pragma unroll
      for (u32 i = 0; i < CHUNKS_PER_THREAD; i++) count += __syncthreads_count(mine[i] >= max(found | bit, lowest));
      if (count < k) continue;
      found |= bit;
      if (count <= k + WARP) break;
    }
    return max(found, lowest);
  }

  // Calls `each(key, token)` for the logits of the chosen chunks, one warp per chunk.
  template <typename Each>
  __device__ __forceinline__ void for_logits(const u16* chosen, u32 count, Each each) const {
    for (u32 c = threadIdx.x / WARP; c < count; c += PICK_THREADS / WARP) {
      const u32 start = chosen[c] * CHUNK + threadIdx.x % WARP;
      u32 keys[PER_LANE];
#pragma unroll
      for (u32 i = 0; i < PER_LANE; i++) keys[i] = row.key(start + i * WARP);
#pragma unroll
      for (u32 i = 0; i < PER_LANE; i++) each(keys[i], start + i * WARP);
    }
  }
};

// Best first, by counting who is better. Threads share the counting for one candidate when there are few: the quickest then.
constexpr u32 MAX_COUNTED = 256;
__device__ __forceinline__ const u64* sort_by_counting(const u64* keys, u32 count) {
  __shared__ u32 rank[MAX_COUNTED];
  __shared__ u64 sorted[MAX_COUNTED];
  if (threadIdx.x < count) rank[threadIdx.x] = 0;
  __syncthreads();
  const u32 wide = (count + WARP - 1) / WARP * WARP, parts = PICK_THREADS / wide, per_part = (count + parts - 1) / parts;
  const u32 i = threadIdx.x % wide, from = threadIdx.x / wide * per_part;
  if (i < count) {
    const u64 key = keys[i];
    u32 better = 0;
    for (u32 j = from; j < min(from + per_part, count); j++) better += keys[j] > key;
    atomicAdd(&rank[i], better);
  }
  __syncthreads();
  if (threadIdx.x < count) sorted[rank[threadIdx.x]] = keys[threadIdx.x];
  __syncthreads();
  return sorted;
}

// Best first, in place, by a bitonic network over the next power of two.
__device__ __forceinline__ const u64* sort_by_exchange(u64* keys, u32 count) {
  u32 size = 1;
  while (size < count) size *= 2;
  for (u32 i = count + threadIdx.x; i < size; i += PICK_THREADS) keys[i] = 0;
  for (u32 run = 2; run <= size; run *= 2)
    for (u32 apart = run / 2; apart > 0; apart /= 2) {
      __syncthreads();
      for (u32 pair = threadIdx.x; pair < size / 2; pair += PICK_THREADS) {
        const u32 i = pair / apart * 2 * apart + pair % apart, j = i + apart;
        const u64 a = keys[i], b = keys[j];
        const bool descending = (i & run) == 0;
        if (descending == (a < b)) {
          keys[i] = b;
          keys[j] = a;
        }
      }
    }
  __syncthreads();
  return keys;
}

__device__ __forceinline__ void draw_from_best(const Row& row) {
  __shared__ u16 chosen[MAX_CHUNKS];
  __shared__ u32 chosen_count, tally[2];
  __shared__ List list;
  __shared__ float sums[MAX_TOP_K];
  const Setting& s = row.setting;
  const u32 thread = threadIdx.x, lane = thread % WARP;
  const Best best(row);
  if (thread == 0) chosen_count = list.count = 0;
  const u32 threshold = best.threshold();  // has barriers
  for (u32 i = 0; i < CHUNKS_PER_THREAD; i++)
    if (best.mine[i] >= threshold) chosen[atomicAdd(&chosen_count, 1u)] = (u16)(thread + i * PICK_THREADS);
  __syncthreads();
  best.for_logits(chosen, chosen_count, [&](u32 key, u32 token) {
    if (key >= threshold) list.add(scored(key, token));
  });
  __syncthreads();
  u32 count = list.count;
  if (count > MAX_CANDIDATES) {
    // Very many ties, or the best crowd together: find the last of the best exactly. Slow, and no model does this.
    u64 last = 0;
    for (u32 round = 0; round < 64; round++) {
      const u64 bit = 1ull << (63 - round);
      u32* sum = &tally[round % 2];  // the other may still be read
      if (thread == 0) *sum = 0;
      __syncthreads();
      u32 reached = 0;
      best.for_logits(chosen, chosen_count, [&](u32 key, u32 token) {
        reached += key >= threshold && scored(key, token) >= (last | bit);
      });
      reached = __reduce_add_sync(ALL_LANES, reached);
      if (lane == 0) atomicAdd(sum, reached);
      __syncthreads();
      if (*sum >= best.k) last |= bit;
    }
    if (thread == 0) list.count = 0;
    __syncthreads();
    best.for_logits(chosen, chosen_count, [&](u32 key, u32 token) {
      if (key >= threshold && scored(key, token) >= last) list.add(scored(key, token));
    });
    __syncthreads();
    count = list.count;
  }
  if (count == 0) return row.report(row.arg_max());

  const u64* sorted = count <= MAX_COUNTED ? sort_by_counting(list.keys, count) : sort_by_exchange(list.keys, count);

  // One thread per survivor, best first.
  u32 kept = min(count, best.k);
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
  if (row.setting.top_k == 0)
    draw_from_all(row);
  else if (blockIdx.x == 0)
    draw_from_best(row);
}
