// F16 activations for products by wgmma with packed weights. Of 32 inputs, chunk `c` of 16 bytes has inputs
// 8 * i + 4 * (c / 2) + {0, 2} + c % 2, for i of 0 to 3: a lane multiplies what lies in its own registers (lib/fragment_wgmma.cuh).
//
// K-permuted rows (gemm_packed_sm90.cu): rows as ever, but every 32 inputs in that order.
//
// Token tiles (gemm_medium_sm90.cu): up to 64 rows as they lie in shared memory, so that they are copied there as they are.
// src/kernel/activation.rs knows their size. A tile is 64 tokens by 64 inputs: a line of 128 bytes per token. Tiles follow each other
// along the inputs. A line has 8 chunks, swizzled by the token as wgmma wants them.
#pragma once
#include "lib/num.cuh"

constexpr u32 TILE_TOKENS = 64, TILE_INPUTS = 64, TILE_LINE = 128, TILE_BYTES = TILE_TOKENS * TILE_LINE;

// Bytes from the start of 32 inputs to one of them.
__device__ __forceinline__ u32 permuted_at(u32 input) {
  return (input / 4 % 2 * 2 + input % 2) * 16 + input / 8 % 4 * 4 + input / 2 % 2 * 2;
}

// Stores four neighbours of a row, the first a multiple of 4.
__device__ __forceinline__ void store_permuted(void* row, u32 input, uint2 four) {
  u8* even = (u8*)row + input / 32 * 64 + permuted_at(input);
  *(u32*)even = __byte_perm(four.x, four.y, 0x5410);
  *(u32*)(even + 16) = __byte_perm(four.x, four.y, 0x7632);
}

// Bytes to a token's input.
__device__ __forceinline__ u32 token_tile_at(u32 token, u32 input) {
  const u32 chunk = input / 32 % 2 * 4 + input / 4 % 2 * 2 + input % 2;
  return (input / TILE_INPUTS * TILE_TOKENS + token) * TILE_LINE + ((chunk ^ token % 8) << 4) + input / 8 % 4 * 4 + input / 2 % 2 * 2;
}

// Stores four neighbours, the first a multiple of 4.
__device__ __forceinline__ void store_in_tiles(void* tiles, u32 token, u32 input, uint2 four) {
  u8* even = (u8*)tiles + token_tile_at(token, input);
  u8* odd = (u8*)tiles + token_tile_at(token, input + 1);
  *(u32*)even = __byte_perm(four.x, four.y, 0x5410);
  *(u32*)odd = __byte_perm(four.x, four.y, 0x7632);
}
