// Every instruction that C++ has no word for, as a function: tensor cores, asynchronous copies, packed halves.
//
// The emulator puts its own versions in place of this file, so nothing else may hold inline PTX.
//
// Fragments, with `group = lane / 4` and `quad = lane % 4`:
//   A of m16n8k32 (bytes):  a[0] row group, k 4*quad..; a[1] row group + 8; a[2], a[3] the same rows, k 16 + 4*quad..
//   B of m16n8k32 (bytes):  b[0] column group, k 4*quad..; b[1] the same column, k 16 + 4*quad..
//   A of m16n8k16 (bytes):  a[0] row group, k 4*quad..; a[1] row group + 8.   B: b column group, k 4*quad..
//   A of m16n8k16 (halves): a[0] row group, k 2*quad..; a[1] row group + 8; a[2], a[3] the same rows, k 8 + 2*quad..
//   B of m16n8k16 (halves): b[0] column group, k 2*quad..; b[1] the same column, k 8 + 2*quad..
//   C of all of them:       c[0], c[1] row group, columns 2*quad, 2*quad + 1; c[2], c[3] row group + 8
#pragma once
#include "lib/num.cuh"

// Shared memory whose size the launch gives, as bytes, aligned to 128.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

__device__ __forceinline__ u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

// c += a . b, signed bytes.
__device__ __forceinline__ void mma_s8(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += a . b, a unsigned bytes, b signed.
__device__ __forceinline__ void mma_u8s8(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d = c + a . b: as above, where the start stays as it is.
__device__ __forceinline__ void mma_s8(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const int (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void mma_u8s8(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const int (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void mma_s8_k16(int (&d)[4], const u32 (&a)[2], u32 b, const int (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// c += a . b over 16 signed bytes.
__device__ __forceinline__ void mma_s8_k16(int (&c)[4], const u32 (&a)[2], u32 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// c += a . b, halves into floats.
__device__ __forceinline__ void mma_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of halves from shared memory. Lane `l` gives the address of row `l % 8` of matrix `l / 8` and gets, of each
// matrix, row `l / 4`, columns 2 * (l % 4) and the next.
__device__ __forceinline__ void load_matrices(u32 (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}

// Starts a copy of 16 bytes to shared memory, or of zeros. Both ends are aligned to 16.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool there = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}

// The same for 4 bytes, aligned to 4.
__device__ __forceinline__ void copy_async_word(void* shared, const void* global, bool there = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(there ? 4 : 0)
               : "memory");
}

// Closes a group of copies; `wait_for_copies<N>` waits until at most N groups of this thread are under way.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int UNDER_WAY>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(UNDER_WAY) : "memory");
}

// 16 bytes that are read once: not kept in the first cache, first to leave the second.
__device__ __forceinline__ uint4 load_streamed(const void* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// 8 bytes that another block may have written in this launch: past the first cache, which need not know of it.
__device__ __forceinline__ uint2 load_written(const void* at) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
  return v;
}

// Two floats as halves, `low` in the lower bits.
__device__ __forceinline__ u32 pack_halves(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^x to two units in the last place; 0 for -inf.
__device__ __forceinline__ float exp2_near(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// A load that sees what other blocks wrote before they raised a flag.
__device__ __forceinline__ u32 load_acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// 16 bytes that other blocks wrote during this launch: past the first cache, which may hold what was there before.
__device__ __forceinline__ float4 load_from_blocks(const float4* at) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
  return v;
}

// The lanes whose value is this lane's, as bits. All lanes take part.
__device__ __forceinline__ u32 lanes_alike(u32 value) {
  u32 lanes;
  asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(lanes) : "r"(value));
  return lanes;
}
