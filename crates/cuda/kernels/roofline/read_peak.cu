// Peak of memory reads: reads everything once and adds it up.
//
// Grid: as many blocks as fill the card, each striding over the whole. 16 bytes per load, eight of them in flight per thread.
// Bytes: all of `data`, once; nothing to speak of is written. `fill` puts noise there first: zeros are read faster. As
// f16 it is numbers between 1/8 and 2, of either sign, so it can be multiplied, too.
#include "lib/ptx.cuh"

struct Params {
  uint4* data;
  u32* sums;  // one per thread
  u64 count;  // of 16-byte pieces, a multiple of 8 * threads
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/roofline.rs differs");

extern "C" __global__ void __launch_bounds__(512) fill(const Params p) {
  const u64 threads = u64(gridDim.x) * blockDim.x, thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  u32 state = u32(thread) * 2654435761u | 1;
  const auto next = [&] {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return (state & 0x8fff8fffu) | 0x30003000u;
  };
  for (u64 i = thread; i < p.count; i += threads) {
    const u32 x = next(), y = next(), z = next(), w = next();
    p.data[i] = make_uint4(x, y, z, w);
  }
}

extern "C" __global__ void __launch_bounds__(512) read_peak(const Params p) {
  constexpr int AT_ONCE = 8;
  const u64 threads = u64(gridDim.x) * blockDim.x, thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  u32 sum = 0;
  for (u64 i = thread; i < p.count; i += AT_ONCE * threads) {
    uint4 piece[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) piece[j] = load_streamed(p.data + i + j * threads);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) sum += piece[j].x ^ piece[j].y ^ piece[j].z ^ piece[j].w;
  }
  p.sums[thread] = sum;
}
