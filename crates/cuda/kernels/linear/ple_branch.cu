// The branch of per-layer embeddings on Hopper, for 9 to 64 rows: two products with matrices so small that the way to memory and back
// is most of their time. All copies of a block are on their way at once, those of weights before the launch before is over.
//
//   ple_gate  out = gelu(w . x) * slice, f16 `[rows, 256]`
//   ple_proj  out = w . x, f32 `[rows, COLUMNS]`
//
// Grid of `ple_gate`: (8 * 4), a cluster of eight blocks per 64 outputs, each with an eighth of the inputs; they add their sums up, each
// those of eight outputs. Of `ple_proj`: (COLUMNS / 64), a block per 64 outputs. Entries are for tiles of 16, 32, 48 and 64 tokens.
//
// Bytes: weights once; x once per 64 outputs, from L2. Operations: 2 * 256 * COLUMNS per row each.
// Requires weights and x in f16, COLUMNS % 512 == 0, 256 outputs of the gate, no more rows than a tile has tokens.
#include "lib/batch.cuh"
#include "lib/ptx.cuh"
#include "lib/reduce.cuh"

constexpr u32 WIDTH = 256, BLOCKS = 8, THREADS = 128;
constexpr u32 OUTPUTS = 64;                   // of a block, or of a cluster
constexpr u32 ATOM_COLUMNS = 64, LINE = 128;  // columns and bytes of a swizzle atom's row
constexpr u32 GATE_CHUNKS = COLUMNS / BLOCKS / ATOM_COLUMNS, PROJ_CHUNKS = WIDTH / ATOM_COLUMNS;
static_assert(COLUMNS % (BLOCKS * ATOM_COLUMNS) == 0, "blocks have equal parts");
constexpr u32 W_BYTES = OUTPUTS * LINE;  // of a chunk of weights
constexpr u32 X_BOX = 16;                // tokens
// Of sums, in floats from token to token: four pairs of tokens meet all banks.
constexpr u32 SUM_STRIDE = OUTPUTS + 4;

struct Params {
  TensorMap x, w;
  Rows rows;
  const float* slices;  // [rows, slice_columns], of `ple_gate` only
  void* out;
  u32 slice_columns;
  u32 slice_column;  // the first that this layer has
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/ple_branch.rs differs");

// Sums of 64 outputs of all tokens over CHUNKS times 64 inputs; weights begin at `row`, both matrices at `column`. Begins before the
// launch before is over, and returns behind it what was used of shared memory. `count` tokens are there, asked for while copies are on their
// way.
template <u32 TOKENS, u32 CHUNKS>
__device__ __forceinline__ u8* multiply(const Params& p, float (&sum)[TOKENS / 2], u32 row, u32 x_column, u32& count) {
  constexpr u32 X_BYTES = TOKENS * LINE, X_BOXES = TOKENS / X_BOX;
  static_assert(CHUNKS * (W_BYTES + X_BYTES) + 1024 <= SHARED_BYTES && CHUNKS * X_BOXES <= WARP, "src/kernel/linear/ple_branch.rs differs");
  DYNAMIC_SHARED(unaligned);
  __shared__ u64 came[CHUNKS];
  u8* const weights = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  u8* const inputs = weights + CHUNKS * W_BYTES;
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  if (warp == 0) {
    if (lane < CHUNKS) {
      barrier_init(came + lane, 2);
      fence_barriers();
      barrier_expect(came + lane, W_BYTES);
      tensor_copy(weights + lane * W_BYTES, p.w, x_column + lane * ATOM_COLUMNS, row, came + lane);
    }
    __syncwarp();
  }
  __syncthreads();
  griddep_launch_dependents();
  griddep_wait();
  count = *p.rows.count;
  if (warp == 0) {
    if (lane < CHUNKS) barrier_expect(came + lane, X_BYTES);
    __syncwarp();
    if (lane < CHUNKS * X_BOXES) {
      const u32 chunk = lane / X_BOXES, token = lane % X_BOXES * X_BOX;
      tensor_copy(inputs + chunk * X_BYTES + token * LINE, p.x, x_column + chunk * ATOM_COLUMNS, token, came + chunk);
    }
  }
#pragma unroll
  for (u32 i = 0; i < TOKENS / 2; i++) sum[i] = 0;
  // A lane's part of an A operand: a row of 16, and one of two vectors of 8 inputs.
  const u32 own_row = warp * 16 + lane % 16;
#pragma unroll
  for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
    const SmemDescriptor b = smem_descriptor(inputs + chunk * X_BYTES, 16, 1024);
    const u8* const line = weights + chunk * W_BYTES + own_row * LINE;
    u32 a[4][4];
    barrier_wait(came + chunk);
#pragma unroll
    for (u32 step = 0; step < 4; step++) ldmatrix_x4(a[step], line + (2 * step + lane / 16 ^ own_row % 8) * 16);
    wgmma_fence();
#pragma unroll
    for (u32 step = 0; step < 4; step++) wgmma_packed(sum, a[step], b.at(32 * step));
    wgmma_commit();
    wgmma_wait<0>();
  }
  wgmma_results(sum);
  return weights;
}

// Calls `f(output, token, sum)` for the lane's sums.
template <int SUMS, typename F>
__device__ __forceinline__ void each_sum(const float (&sum)[SUMS], F f) {
  const u32 lane = threadIdx.x % WARP, output = threadIdx.x / WARP * 16 + lane / 4, token = 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    f(output, token + 2 * i, sum[i]);
    f(output, token + 2 * i + 1, sum[i + 1]);
    f(output + 8, token + 2 * i, sum[i + 2]);
    f(output + 8, token + 2 * i + 1, sum[i + 3]);
  }
}

template <u32 TOKENS>
__device__ __forceinline__ void gate(const Params& p) {
  const u32 rank = cluster_rank(), first = blockIdx.x / BLOCKS * OUTPUTS;
  float sum[TOKENS / 2];
  u32 count;
  float* const sums = (float*)multiply<TOKENS, GATE_CHUNKS>(p, sum, first, rank * GATE_CHUNKS * ATOM_COLUMNS, count);
  // A thread finishes four outputs of one token.
  constexpr u32 OWN = OUTPUTS / BLOCKS;
  static_assert(TOKENS * OWN / 4 <= THREADS, "one turn");
  const u32 token = threadIdx.x / (OWN / 4), of_cluster = rank * OWN + threadIdx.x % (OWN / 4) * 4, output = first + of_cluster;
  const bool there = token < count;
  float4 slice = make_float4(0, 0, 0, 0);
  if (there) slice = *(const float4*)(p.slices + u64(token) * p.slice_columns + p.slice_column + output);
  __syncthreads();  // sums come where weights were
  each_sum(sum, [&](u32 output, u32 token, float value) { sums[token * SUM_STRIDE + output] = value; });
  cluster_arrive();
  cluster_wait();
  if (there) {
    float4 parts[BLOCKS], total = make_float4(0, 0, 0, 0);
#pragma unroll
    for (u32 block = 0; block < BLOCKS; block++) parts[block] = cluster_load(cluster_address(sums + token * SUM_STRIDE + of_cluster, block));
#pragma unroll
    for (u32 block = 0; block < BLOCKS; block++) {
      const float4 part = parts[block];
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    *(uint2*)((u16*)p.out + token * WIDTH + output) =
        make_uint2(pack_f16x2(fast_gelu(total.x) * slice.x, fast_gelu(total.y) * slice.y),
                   pack_f16x2(fast_gelu(total.z) * slice.z, fast_gelu(total.w) * slice.w));
  }
  // Others read what this block has left.
  cluster_meet();
}

template <u32 TOKENS>
__device__ __forceinline__ void proj(const Params& p) {
  const u32 first = blockIdx.x * OUTPUTS;
  float sum[TOKENS / 2];
  u32 count;
  multiply<TOKENS, PROJ_CHUNKS>(p, sum, first, 0, count);
  each_sum(sum, [&](u32 output, u32 token, float value) {
    if (token < count) ((float*)p.out)[u64(token) * COLUMNS + first + output] = value;
  });
}

extern "C" __global__ void __launch_bounds__(THREADS) ple_gate_16(const __grid_constant__ Params p) { gate<16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) ple_gate_32(const __grid_constant__ Params p) { gate<32>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) ple_gate_48(const __grid_constant__ Params p) { gate<48>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) ple_gate_64(const __grid_constant__ Params p) { gate<64>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) ple_proj_16(const __grid_constant__ Params p) { proj<16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) ple_proj_32(const __grid_constant__ Params p) { proj<32>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) ple_proj_48(const __grid_constant__ Params p) { proj<48>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) ple_proj_64(const __grid_constant__ Params p) { proj<64>(p); }
