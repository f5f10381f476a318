// out[r] = own[r] | host[r]: the columns that the card has computed, then those of the host, when it has answered.
//
// Grid: (rows, 1). Bytes per row: 4 * columns in, the host's over the bus, and as many out. Requires both parts to be whole 16
// bytes. A thread of each block polls host memory; the host always answers (src/run/host_worker.rs), if only to say it failed.
#include "lib/batch.cuh"
#include "lib/host.cuh"

struct Params {
  Rows rows;
  const float4* own;
  const float4* host;
  float4* out;
  const HostWords* words;
  const u32* number;  // of the last request
  u32 own_fours;
  u32 host_fours;
  u32 each;    // such pairs of parts of a row
  u32 behind;  // requests that were sent after the one that is waited for
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/host/host_receive.rs differs");

extern "C" __global__ void __launch_bounds__(1024) host_receive(const Params p) {
  const u32 r = blockIdx.x;
  if (!p.rows.has(r)) return;
  if (threadIdx.x == 0) {
    const u32 number = *p.number - p.behind;
    while (int(load_acquire_system(&p.words->answered) - number) < 0) pause_nanoseconds(100);
  }
  __syncthreads();
  const u32 columns = p.own_fours + p.host_fours;
  for (u32 i = threadIdx.x; i < p.each * columns; i += blockDim.x) {
    const u64 pair = u64(r) * p.each + i / columns;
    const u32 column = i % columns;
    p.out[pair * columns + column] = column < p.own_fours ? p.own[pair * p.own_fours + column]
                                                          : p.host[pair * p.host_fours + column - p.own_fours];
  }
}
