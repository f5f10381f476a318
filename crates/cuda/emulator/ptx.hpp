// The instructions of `kernels/lib/ptx.cuh` in plain C++. compiler.cpp substitutes it for that file.
#pragma once

#define DYNAMIC_SHARED(name) u8* const name = (u8*)emulation->dynamic_shared

inline u32 pick_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// `count` words of every lane, by lane.
struct AllLanes {
  unsigned words[32][8];
};
inline AllLanes gather(const u32* words, unsigned count) {
  AllLanes all;
  emulation->gather(words, count, &all.words[0][0]);
  return all;
}

template <typename A, int K>
inline void emulated_mma_int8(int (&c)[4], const u32* a, const u32* b) {
  constexpr int K16S = K / 16;
  u32 own[6];
  for (int i = 0; i < 2 * K16S; i++) own[i] = a[i];
  for (int i = 0; i < K16S; i++) own[4 + i] = b[i];
  const AllLanes all = gather(own, 6);
  const unsigned lane = emulation->thread.x % 32;
  for (int i = 0; i < 4; i++) {
    const unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    int sum = c[i];
    for (int k = 0; k < K; k++) {
      const unsigned quad = k % 16 / 4, half = k / 16, byte = k % 4;
      const u32 wa = all.words[row % 8 * 4 + quad][2 * half + row / 8], wb = all.words[column * 4 + quad][4 + half];
      sum += int(A(wa >> 8 * byte)) * int(i8(wb >> 8 * byte));
    }
    c[i] = sum;
  }
}

inline void mma_s8(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { emulated_mma_int8<i8, 32>(c, a, b); }
inline void mma_u8s8(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { emulated_mma_int8<u8, 32>(c, a, b); }
inline void mma_s8_k16(int (&c)[4], const u32 (&a)[2], u32 b) { emulated_mma_int8<i8, 16>(c, a, &b); }
inline void mma_s8(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const int (&c)[4]) {
  std::memcpy(d, c, sizeof d);
  mma_s8(d, a, b);
}
inline void mma_s8_k16(int (&d)[4], const u32 (&a)[2], u32 b, const int (&c)[4]) {
  std::memcpy(d, c, sizeof d);
  mma_s8_k16(d, a, b);
}

inline void mma_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  const u32 own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const AllLanes all = gather(own, 6);
  const unsigned lane = emulation->thread.x % 32;
  for (int i = 0; i < 4; i++) {
    const unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      const unsigned quad = k % 8 / 2, half = k / 8, shift = k % 2 * 16;
      const u32 wa = all.words[row % 8 * 4 + quad][2 * half + row / 8], wb = all.words[column * 4 + quad][4 + half];
      sum += emulated_half_to_float(u16(wa >> shift)) * emulated_half_to_float(u16(wb >> shift));
    }
    c[i] += sum;
  }
}

inline void mma_bf16_k8(float (&c)[4], const u32 (&a)[2], u32 b) {
  const u32 own[3] = {a[0], a[1], b};
  const AllLanes all = gather(own, 3);
  const unsigned lane = emulation->thread.x % 32;
  for (int i = 0; i < 4; i++) {
    const unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    float sum = 0;
    for (int k = 0; k < 8; k++) {
      const u32 wa = all.words[row % 8 * 4 + k / 2][row / 8], wb = all.words[column * 4 + k / 2][2];
      const u32 high = 0xffff0000u, shift = k % 2 ? 0 : 16;
      sum += __uint_as_float(wa << shift & high) * __uint_as_float(wb << shift & high);
    }
    c[i] += sum;
  }
}

inline void emulated_load_matrices(u32 (&d)[4], const void* row, bool transposed) {
  const u64 at = (u64)row;
  const u32 own[2] = {u32(at), u32(at >> 32)};
  const AllLanes all = gather(own, 2);
  const unsigned lane = emulation->thread.x % 32;
  for (unsigned m = 0; m < 4; m++) {
    u16 pair[2];
    for (unsigned j = 0; j < 2; j++) {
      const unsigned r = transposed ? 2 * (lane % 4) + j : lane / 4, c = transposed ? lane / 4 : 2 * (lane % 4) + j;
      const u32* words = all.words[m * 8 + r];
      pair[j] = ((const u16*)(u64(words[0]) | u64(words[1]) << 32))[c];
    }
    d[m] = pair[0] | u32(pair[1]) << 16;
  }
  gather(own, 1);  // nobody writes there before all have read
}
inline void ldmatrix_x4(u32 (&d)[4], const void* row) { emulated_load_matrices(d, row, false); }
inline void ldmatrix_x4_trans(u32 (&d)[4], const void* row) { emulated_load_matrices(d, row, true); }

inline void cp_async_16(void* shared, const void* global, bool there = true) {
  there ? (void)std::memcpy(shared, global, 16) : (void)std::memset(shared, 0, 16);
}
typedef u8* SharedPlace;
inline SharedPlace shared_place(void* shared) { return (u8*)shared; }
inline void cp_async_16_streamed(SharedPlace to, const void* global, bool there = true) { cp_async_16(to, global, there); }
inline void cp_async_4(void* shared, const void* global, bool there = true) {
  there ? (void)std::memcpy(shared, global, 4) : (void)std::memset(shared, 0, 4);
}
inline void cp_async_commit() {}
template <int UNDER_WAY>
inline void cp_async_wait() {}
inline uint4 load_streamed(const void* at) { return *(const uint4*)at; }
inline uint2 load_written(const void* at) { return *(const uint2*)at; }
inline u32 pack_f16x2(float low, float high) {
  return emulated_float_to_half(low) | u32(emulated_float_to_half(high)) << 16;
}
// Rounds half to even; what is no number is not expected.
inline u32 emulated_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16x2(float low, float high) { return emulated_bf16(low) | emulated_bf16(high) << 16; }
template <typename F>
inline u32 of_each_half(F f) {
  return emulated_float_to_half(f(0)) | u32(emulated_float_to_half(f(16))) << 16;
}
inline float emulated_half_of(u32 pair, int shift) { return emulated_half_to_float(u16(pair >> shift)); }
inline u32 sub_f16x2(u32 a, u32 b) {
  return of_each_half([=](int i) { return emulated_half_of(a, i) - emulated_half_of(b, i); });
}
inline u32 mul_f16x2(u32 a, u32 b) {
  return of_each_half([=](int i) { return emulated_half_of(a, i) * emulated_half_of(b, i); });
}
inline u32 fma_f16x2(u32 a, u32 b, u32 c) {
  return of_each_half([=](int i) { return emulated_half_of(a, i) * emulated_half_of(b, i) + emulated_half_of(c, i); });
}
inline float exp2_near(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline u32 load_acquire(const u32* at) { return *at; }
inline void griddep_launch_dependents() {}
inline void griddep_wait() {}
inline u32 add_and_order(u32* at, u32 by) { return atomicAdd(at, by); }
inline float4 load_from_blocks(const float4* at) { return *at; }
inline u32 lanes_alike(u32 value) {
  const AllLanes all = gather(&value, 1);
  u32 lanes = 0;
  for (unsigned i = 0; i < 32; i++) lanes |= u32(all.words[i][0] == value) << i;
  return lanes;
}

struct SmemDescriptor {
  const u8* start;
  u32 leading, stride;

  SmemDescriptor at(u32 bytes) const { return {start + bytes, leading, stride}; }
  float get(u64 offset) const {
    const u64 at = (u64)start + offset;
    return emulated_half_to_float(*(const u16*)(at ^ (at >> 7 & 7) << 4));
  }
  float along_k(unsigned row, unsigned k) const { return get(row / 8 * stride + row % 8 * 128 + k * 2); }
  float along_columns(unsigned k, unsigned column) const {
    return get(column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2);
  }
};
inline SmemDescriptor smem_descriptor(const void* start, u32 leading, u32 stride) {
  return {(const u8*)start, leading, stride};
}
inline void fence_proxy_async() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int UNDER_WAY>
inline void wgmma_wait() {}
template <int N>
inline void wgmma_results(float (&)[N]) {}
template <int N, typename B>
inline void emulated_multiply(float (&c)[N], const SmemDescriptor& a, B b, bool add) {
  const unsigned lane = emulation->thread.x % 32, warp = emulation->thread.x / 32 % 4;
  for (int i = 0; i < N; i++) {
    const unsigned row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = 0;
    for (unsigned k = 0; k < 16; k++) sum += a.along_k(row, k) * b(k, column);
    c[i] = add ? c[i] + sum : sum;
  }
}
inline void wgmma_m64n64k16(float (&c)[32], const SmemDescriptor& a, const SmemDescriptor& b, bool add) {
  emulated_multiply(c, a, [&](unsigned k, unsigned column) { return b.along_k(column, k); }, add);
}
inline void wgmma_m64n256k16(float (&c)[128], const SmemDescriptor& a, const SmemDescriptor& b) {
  emulated_multiply(c, a, [&](unsigned k, unsigned column) { return b.along_columns(k, column); }, true);
}
// The host's threads are real here, too.
inline void store_release_system(u32* at, u32 value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline u32 load_acquire_system(const u32* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void pause_nanoseconds(u32) { std::this_thread::yield(); }
