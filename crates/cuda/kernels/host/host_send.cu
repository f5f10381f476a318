// Asks the host for a step: copies the step's input to host memory, then says so.
//
// Grid: one block. Bytes: what is copied, in and out, the latter over the bus. Requires inputs of whole 16 bytes per row.
#include "lib/batch.cuh"
#include "lib/host.cuh"

struct Params {
  Rows rows;
  const float4* x;
  const float* route;  // null if there is none
  float4* x_to;
  float* route_to;
  HostWords* words;
  u32* number;       // of the last request
  u32 row_fours;     // of x
  u32 route_columns;
  u32 network;
  u32 stage;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/host/host_send.rs differs");

extern "C" __global__ void __launch_bounds__(1024) host_send(const Params p) {
  const u32 rows = *p.rows.count;
  for (u32 i = threadIdx.x; i < rows * p.row_fours; i += blockDim.x) p.x_to[i] = p.x[i];
  if (p.route)
    for (u32 i = threadIdx.x; i < rows * p.route_columns; i += blockDim.x) p.route_to[i] = p.route[i];
  __syncthreads();
  if (threadIdx.x) return;
  const u32 number = *p.number + 1;
  *p.number = number;
  HostRequest& request = p.words->requests[number % 2];
  request.rows = rows;
  request.network = p.network;
  request.stage = p.stage;
  store_release_system(&p.words->asked, number);
}
