// Keys and values in Q8_0: a page's layout, rounding to it, and values as f16 again.
#pragma once
#include "lib/ptx.cuh"

// Values of a head that share a scale in Q8_0.
constexpr u32 KV_BLOCK = 32;

__device__ __forceinline__ constexpr u32 kv_blocks(u32 head_dim) { return (head_dim + KV_BLOCK - 1) / KV_BLOCK; }

// Positions of a page.
constexpr u32 PAGE_TOKENS = 32;

// One head's share of a page in Q8_0: `[PAGE_TOKENS, blocks, KV_BLOCK]` int8, then `[PAGE_TOKENS, blocks]` f16.
struct Q8Page {
  u8* start;
  u32 blocks;  // of a head

  __device__ __forceinline__ static constexpr u32 bytes(u32 blocks) { return PAGE_TOKENS * blocks * (KV_BLOCK + 2); }
  __device__ __forceinline__ i8* codes(u32 row) const { return (i8*)start + row * (blocks * KV_BLOCK); }
  __device__ __forceinline__ u16* scales(u32 row) const {
    return (u16*)(start + PAGE_TOKENS * blocks * KV_BLOCK) + row * blocks;
  }
};

// The scale of a block in Q8_0, a 127th of its largest magnitude as f16; and a value's code, the nearest multiple of the scale
// (ties to even). The bits are those of the CPU backend.
struct Q8Scale {
  u16 bits;
  float inverse;

  __device__ __forceinline__ explicit Q8Scale(float largest) {
    bits = f32_to_f16(__fdiv_rn(largest, 127.0f));
    const float scale = f16_to_f32(bits);
    inverse = scale > 0 ? __fdiv_rn(1.0f, scale) : 0;
  }
  // Numbers so small that their scale has few bits may come to more than 127 of it.
  __device__ __forceinline__ int code(float x) const { return max(-127, min(127, __float2int_rn(mul(x, inverse)))); }
};

// Two of four codes as f16. They are offset by 128, so that they are the last bits of numbers from 1024 on; `selector` has 4 in its
// odd places and the numbers of the two in the others.
__device__ __forceinline__ u32 codes_as_f16(u32 codes, u32 selector) {
  return sub_f16x2(__byte_perm(codes, 0x64646464, selector), 0x64806480);
}
// The same, times their scales.
__device__ __forceinline__ u32 dequantized(u32 codes, u32 selector, u32 scales) {
  return mul_f16x2(codes_as_f16(codes, selector), scales);
}

__device__ __forceinline__ uint4 eight_as_f16(u32 first, u32 second, u32 scale) {
  const u32 low = first ^ 0x80808080u, high = second ^ 0x80808080u, scales = scale | scale << 16;
  return make_uint4(dequantized(low, 0x4140, scales), dequantized(low, 0x4342, scales),  //
                    dequantized(high, 0x4140, scales), dequantized(high, 0x4342, scales));
}

// Eight values of a page's row.
struct Q8Eight {
  uint2 codes;
  u32 scale;

  // Zeros unless they are there.
  __device__ __forceinline__ void load(const Q8Page& page, u32 row, u32 column, bool there) {
    codes = there ? *(const uint2*)(page.codes(row) + column) : make_uint2(0, 0);
    scale = there ? page.scales(row)[column / KV_BLOCK] : 0;
  }
  __device__ __forceinline__ uint4 as_f16() const { return eight_as_f16(codes.x, codes.y, scale); }
};

// Sixteen of them.
struct Q8Sixteen {
  uint4 codes;
  u32 scale;

  // Zeros unless they are there.
  __device__ __forceinline__ void load(const Q8Page& page, u32 row, u32 column, bool there) {
    codes = there ? *(const uint4*)(page.codes(row) + column) : make_uint4(0, 0, 0, 0);
    scale = there ? page.scales(row)[column / KV_BLOCK] : 0;
  }
  // The first or the second half.
  __device__ __forceinline__ uint4 as_f16(u32 half) const {
    return eight_as_f16(half ? codes.z : codes.x, half ? codes.w : codes.y, scale);
  }
};
