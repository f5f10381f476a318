// tables[at ..] = pages that a batch brings, for every table that has changed: they stay on the device from batch to batch.
//
// Grid: a block per update. Bytes per page: 4 in, 4 out. No two updates of a batch meet.
#include "lib/batch.cuh"

struct Update {
  u32 at;     // into the tables
  u32 from;   // into the batch's words
  u32 count;
};

struct Params {
  const u32* words;
  const Update* updates;
  u32* tables;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/update_tables.rs differs");

extern "C" __global__ void update_tables(const Params p) {
  const Update update = p.updates[blockIdx.x];
  for (u32 i = threadIdx.x; i < update.count; i += blockDim.x) p.tables[update.at + i] = p.words[update.from + i];
}
