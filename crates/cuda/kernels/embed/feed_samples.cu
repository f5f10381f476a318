// tokens[r] = samples[tokens[r] - FROM_SAMPLE] for the rows that are fed what the batch before them sampled.
//
// Grid: blocks of 256 batch rows. Bytes per row: 4 in, 8 more for each such row. Rows may take any samples, in any order.
// Requires samples that are there, which `Batch::check` has established.
#include "lib/batch.cuh"

struct Params {
  Rows rows;
  u32* tokens;
  const u32* samples;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/embed/feed_samples.rs differs");

extern "C" __global__ void feed_samples(const Params p) {
  const u32 r = blockIdx.x * blockDim.x + threadIdx.x;
  if (!p.rows.has(r)) return;
  const u32 token = p.tokens[r];
  if (token >= FROM_SAMPLE) p.tokens[r] = p.samples[token - FROM_SAMPLE];
}
