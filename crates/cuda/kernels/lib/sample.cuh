// Parameters, rows and scores of the sampler, as sample/sample.cu explains them.
#pragma once
#include "lib/batch.cuh"
#include "lib/reduce.cuh"
#include "lib/scored.cuh"

constexpr u32 CHUNK = 128;
constexpr u32 PER_LANE = CHUNK / WARP;
constexpr u32 SCAN_THREADS = 256;
constexpr u32 CHUNKS_PER_WARP = 2;
constexpr u32 SCAN_CHUNKS = SCAN_THREADS / WARP * CHUNKS_PER_WARP;  // chunks
constexpr u32 PICK_THREADS = 1024;
constexpr u32 MAX_VOCAB = 262144;
constexpr u32 MAX_CHUNKS = MAX_VOCAB / CHUNK;
constexpr u32 CHUNKS_PER_THREAD = MAX_CHUNKS / PICK_THREADS;
constexpr u32 MAX_TOP_K = 1024;  // above it the whole vocabulary is truncated
constexpr u32 BUCKETS = 4 * PICK_THREADS;  // of the histogram that truncates the whole vocabulary
constexpr u32 MAX_LOGPROBS = 20;
constexpr u32 NONE = 0xffffffffu;
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
  u32 mask;      // its mask among those of the batch; NONE: every token may be drawn
  u32 logprobs;  // likeliest tokens to report beside the drawn one; NONE: no log-probabilities

  // Whether top-k and top-p cut the whole vocabulary, not the best MAX_TOP_K.
  __device__ __forceinline__ bool truncates_all() const {
    return temperature > 0 && (top_k > MAX_TOP_K || (top_k == 0 && top_p < 1));
  }
};

// A change of one logit. They are sorted by token, and those of one token are applied in order.
struct Change {
  u32 token;
  u32 seen;  // whether the token was seen recently: then the repeat penalty applies and `by` is subtracted, else added
  float by;
  float original;  // the logit before the first change of its token, kept for log-probabilities
};

// Log-probabilities of a row under the model itself: before mask, penalties, temperature and truncation.
struct Report {
  float logprob;  // of the drawn token
  u32 count;
  u32 tokens[MAX_LOGPROBS];  // the likeliest, best first
  float logprobs[MAX_LOGPROBS];
};

struct Params {
  Rows rows;
  float* logits;
  const Setting* settings;
  u32* words;       // of the batch
  const u32* masks;  // [2, max_rows, words per mask], one bit per token
  u32* maxima;       // [rows, chunks], as ordered integers
  u64* best;         // [rows, shares]
  u64* weights;      // [rows, buckets], 0 between launches
  u32* counts;       // [rows, buckets], 0 between launches
  u64* cuts;         // [rows]: the last score of a truncated vocabulary
  double* sums;      // [rows, shares], of exponentials
  float* norms;      // [rows], logarithms of those sums
  u32* arrived;      // [rows], 0 between launches
  u32* samples;      // [rows]
  u32* results;      // [2, max_rows], in host memory
  Report* reports;   // [2, max_rows], in host memory
  const u32* in_flight;  // which of the two: the batch's slot in flight
  u32 vocab;
  u32 max_rows;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/sample.rs differs");

constexpr u32 ORDERED_MINUS_INFINITY = 0x007fffffu;
constexpr float FLOAT_MAX = 3.4028235e38f;

__device__ __forceinline__ float unordered(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

struct Row {
  const Params& p;
  const Setting setting;
  u32 number;
  float* logits;
  const u32* mask;  // null: every token may be drawn
  u32* maxima;
  u32 chunks;

  __device__ __forceinline__ Row(const Params& p, u32 number)
      : p(p),
        setting(p.settings[number]),
        number(number),
        logits(p.logits + u64(number) * p.vocab),
        mask(setting.mask == NONE ? nullptr : p.masks + (u64(*p.in_flight) * p.max_rows + setting.mask) * ((p.vocab + 31) / 32)),
        maxima(p.maxima + u64(number) * ((p.vocab + CHUNK - 1) / CHUNK)),
        chunks((p.vocab + CHUNK - 1) / CHUNK) {}

  __device__ __forceinline__ bool is_allowed(u32 token) const {
    return token < p.vocab && (!mask || mask[token / 32] >> token % 32 & 1);
  }

  // A token's logit as an ordered integer; 0 behind the vocabulary or where it is masked.
  __device__ __forceinline__ u32 key(u32 token) const { return is_allowed(token) ? ordered(logits[token]) : 0; }

  // The largest of all keys. By all threads of a block.
  __device__ __forceinline__ u32 largest() const {
    u64 best = 0;
    for (u32 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) best = larger(best, maxima[chunk]);
    return u32(block_best(best));
  }

  // A token's logit before it was changed.
  __device__ __forceinline__ float original(u32 token) const {
    const Change* changes = (const Change*)(p.words + setting.changes);
    u32 first = 0, end = setting.change_count;
    while (first < end) {
      const u32 middle = (first + end) / 2;
      if (changes[middle].token < token)
        first = middle + 1;
      else
        end = middle;
    }
    const bool is_changed = first < setting.change_count && changes[first].token == token;
    return __ldcg(is_changed ? &changes[first].original : logits + token);
  }

  __device__ __forceinline__ void report(u32 token) const {
    if (threadIdx.x != 0) return;
    const u32 at = *p.in_flight * p.max_rows + number;
    p.samples[number] = token;
    p.results[at] = token;
    if (setting.logprobs != NONE) p.reports[at].logprob = sub(original(token), p.norms[number]);
  }

  // The largest logit, the lowest token on ties; the lowest that may be drawn if none is a number. By all threads of a block.
  __device__ __forceinline__ u32 arg_max() const {
    u64 best = 0;
    for (u32 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) best = larger(best, scored(__ldcg(maxima + chunk), chunk));
    const u32 chunk = token_of(block_best(best));
    best = 0;
    // Logits past L1, too: another block may have changed them.
    for (u32 token = chunk * CHUNK + threadIdx.x; token < min((chunk + 1) * CHUNK, p.vocab); token += blockDim.x)
      best = larger(best, scored(is_allowed(token) ? ordered(__ldcg(logits + token)) : 0, token));
    return token_of(block_best(best));
  }

  // Applies the changes of tokens `first` up to `end`.
  __device__ __forceinline__ void change(u32 first, u32 end) const {
    if (setting.change_count == 0) return;
    Change* changes = (Change*)(p.words + setting.changes);
    for (u32 i = threadIdx.x; i < setting.change_count; i += blockDim.x) {
      const u32 token = changes[i].token;
      if (token < first || token >= end || (i > 0 && changes[i - 1].token == token)) continue;
      float logit = logits[token];
      changes[i].original = logit;
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

// The 24 random bits that a token's noise is made of.
__device__ __forceinline__ u32 noise_bits(const Setting& setting, u32 token) {
  return u32(random_bits(setting.seed, setting.position, token) >> 40);
}

// The noise to within QUICK_ERROR, in single precision, which is far less work.
constexpr float QUICK_ERROR = 1e-4f;
__device__ __forceinline__ float quick_gumbel(u32 bits) {
  // Near one, its distance from one is what the logarithm is accurate for.
  const float u = (float(bits) + 0.5f) * 0x1p-24f, rest = (float(0xffffffu - bits) + 0.5f) * 0x1p-24f;
  return -logf(bits >> 23 ? -log1pf(-rest) : -logf(u));
}

// More than the noise, by counting: -ln(-ln(u)) is less than -ln(1 - u), and that is at most ln 2 for each of 1 - u's leading zeros and
// one more.
__device__ __forceinline__ float gumbel_bound(u32 bits) {
  constexpr float LN_2 = 0.69314724f;  // rounded up
  return LN_2 * float(__clz(0xffffffu - bits) - 7);
}

// A logit's weight before it is normalised: that of the reference, rounded from double precision for the same reason.
__device__ __forceinline__ float weight(float tempered) { return float(exp(double(tempered))); }

__device__ __forceinline__ float tempered(u32 key, u32 largest, float temperature) {
  return __fdiv_rn(sub(unordered(key), unordered(largest)), temperature);
}
