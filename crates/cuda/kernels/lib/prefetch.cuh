// Weights that a later launch reads, asked for while the memory has little else to do (src/kernel/prefetch.rs).
#pragma once
#include "lib/num.cuh"

constexpr u32 PIECE = 2048;

struct Prefetch {
  const u8* start;
  u32 chunks;       // runs of bytes, one for each block of that launch
  u32 chunk_bytes;  // from one to the next
  u32 bytes;        // of each, whole pieces
  u32 reserved;
};

// The whole grid's threads share the pieces; those of the first blocks of all runs come first.
__device__ __forceinline__ void prefetch_weights(const Prefetch& f) {
#if __CUDA_ARCH__ >= 900
  const u32 blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
  const u32 pieces = f.bytes / PIECE * f.chunks;
  for (u32 i = threadIdx.x * blocks + block; i < pieces; i += blocks * blockDim.x) {
    const u8* from = f.start + u64(i % f.chunks) * f.chunk_bytes + i / f.chunks * PIECE;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(PIECE) : "memory");
  }
#endif
}
