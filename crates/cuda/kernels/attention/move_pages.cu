// Copies pages of one KV group between the device and host memory, both ways the same: a page lies on the device in segments, the
// keys and the values of each slot, and in host memory in one piece.
//
// Grid: few blocks, which go through all segments of all moves: enough to fill the bus, and most multiprocessors are left to the
// batches beside it. Bytes per move: a page in and out. Requires segments of whole 16 bytes.
#include "lib/batch.cuh"

struct Segment {
  uint4* pages;  // page 0 on the device
  u64 bytes;     // of it in each page
  u64 offset;    // within a page in host memory
};

struct Params {
  const Segment* segments;
  u8* host;
  u64 page_bytes;  // in host memory
  u32 segment_count;
  u32 move_count;
  u32 is_load;  // else pages are saved
  u32 padding;
  u32 pages[MAX_MOVES];   // on the device
  u32 places[MAX_MOVES];  // in host memory
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/move_pages.rs differs");

extern "C" __global__ void move_pages(const Params p) {
  for (u32 i = blockIdx.x; i < p.segment_count * p.move_count; i += gridDim.x) {
    const u32 move = i / p.segment_count;
    const Segment segment = p.segments[i % p.segment_count];
    const u64 vectors = segment.bytes / sizeof(uint4);
    uint4* const device = segment.pages + p.pages[move] * vectors;
    uint4* const host = (uint4*)(p.host + p.places[move] * p.page_bytes + segment.offset);
    const uint4* const from = p.is_load ? host : device;
    uint4* const to = p.is_load ? device : host;
    // Several loads in flight: the bus is far.
#pragma unroll 4
    for (u64 v = threadIdx.x; v < vectors; v += blockDim.x) to[v] = from[v];
  }
}
