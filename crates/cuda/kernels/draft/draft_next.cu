// The end of a draft step and the start of the next: the token of the largest logit, the lowest of them on ties, and the state
// that this step has left.
//
// Grid: (rows, SHARES): each block has a share of a row's logits and of its state; the one that comes last names the token.
// Bytes per row: 4 * vocab and 4 * width in, 4 * width out.
// Requires `arrived` of 0, and leaves it so.
#include "lib/batch.cuh"
#include "lib/scored.cuh"

struct Params {
  Rows rows;
  const float* logits;  // [rows, vocab]
  const float* left;    // [rows, width]
  float* states;        // [rows, width]
  u32* tokens;          // of the batch: what the next step embeds
  u32* drafted;         // [rows]
  u64* best;            // [rows, SHARES]
  u32* arrived;         // [rows]
  u32 vocab;
  u32 width;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/draft/draft_next.rs differs");

constexpr u32 THREADS = 256;
static_assert(SHARES <= THREADS, "one thread per share");

extern "C" __global__ void __launch_bounds__(THREADS) draft_next(const Params p) {
  const u32 r = blockIdx.x, share = blockIdx.y, thread = threadIdx.x;
  if (!p.rows.has(r)) return;
  const u64 state = u64(r) * p.width;
  for (u32 i = share * THREADS + thread; i < p.width; i += SHARES * THREADS) p.states[state + i] = p.left[state + i];

  const float* const logits = p.logits + u64(r) * p.vocab;
  const u32 held = (p.vocab + SHARES - 1) / SHARES, end = min((share + 1) * held, p.vocab);
  u64 best = 0;
#pragma unroll 8
  for (u32 token = share * held + thread; token < end; token += THREADS)
    best = larger(best, scored(ordered(logits[token]), token));
  best = block_best(best);
  u64* const shares = p.best + u64(r) * SHARES;
  if (thread == 0) shares[share] = best;
  if (!is_last(p.arrived + r, SHARES)) return;
  best = block_best(thread < SHARES ? __ldcg(shares + thread) : 0);
  if (thread == 0) p.tokens[r] = p.drafted[r] = token_of(best);
}
