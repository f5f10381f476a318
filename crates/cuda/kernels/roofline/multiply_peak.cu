// Peak of int8 products: multiplies on tensor cores with nothing else around it. The roofline of the native GEMM.
//
// Grid: two blocks per multiprocessor of 8 warps; every warp has 8 independent sums, so that none waits for another.
// Operations: 2 * 16 * 8 * 32 per product; `rounds` * 8 products per warp. Nothing to speak of is read or written.
#include "lib/ptx.cuh"

struct Params {
  int* sums;  // one per thread
  u32 rounds;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/roofline.rs differs");

extern "C" __global__ void __launch_bounds__(256) multiply_peak(const Params p) {
  constexpr int SUMS = 8;
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 noise = thread * 2654435761u | 0x01010101u;
  const u32 a[4] = {noise, noise * 3, noise * 5, noise * 7};
  const u32 b[2] = {noise * 9, noise * 11};
  int sums[SUMS][4] = {};
  for (u32 round = 0; round < p.rounds; round++) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) mma_s8(sums[i], a, b);
  }
  int sum = 0;
#pragma unroll
  for (int i = 0; i < SUMS; i++) sum += sums[i][0] ^ sums[i][1] ^ sums[i][2] ^ sums[i][3];
  p.sums[thread] = sum;
}
