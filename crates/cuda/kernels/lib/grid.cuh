// Grids of the IQ1, IQ2 and IQ3 families: short vectors of magnitudes that a code names by their number. The tables are
// written out from `carat-gguf`'s by src/jit/grids.rs, and only those of the kernel's own FORMAT are compiled.
#pragma once
#include "lib/num.cuh"

#define GRID_OF(a, b) GRID_##a##_##b
#define GRID_PAIR(a, b) GRID_OF(a, b)
// True where FORMAT is this format.
#define GRID_IS(name) GRID_PAIR(FORMAT, name)
#include "lib/grid_tables.cuh"

__device__ __forceinline__ int grid_byte(u64 vector, u32 j) { return i8(vector >> (8 * j)); }
__device__ __forceinline__ u32 load_u32(const u8* at) { return load_u16(at) | u32(load_u16(at + 2)) << 16; }

// The magnitude, negated where the lowest bit is set.
__device__ __forceinline__ int with_sign(int magnitude, u32 sign) { return sign & 1 ? -magnitude : magnitude; }

// Signs of eight values, of which seven are stored: there is an even number of them.
__device__ __forceinline__ int even_signed(int magnitude, u32 signs, u32 j) {
  return with_sign(magnitude, j < 7 ? signs >> j : u32(__popc(signs & 127)));
}
