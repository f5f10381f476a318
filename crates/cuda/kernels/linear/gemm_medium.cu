// GEMM of medium batches: out[t, n] = sum over k of x[t, k] * w[n, k] for 9 to 64 rows of f16. Weights are packed fragments, each
// read once and dequantized in registers to f16 for the tensor cores, which sum in f32. WEIGHTS names their format.
//
// Grid: (runs, splits), all blocks resident at once. A block owns a run of M-tile pairs and a split of the inputs, whose
// activations it holds in shared memory, loaded once. Its work is a line of units, pair after pair, a unit a stage (64 inputs) of
// a pair; every warp takes an equal piece of the line (stream-K), through a cp.async ring of its own that is filled before the
// launch before is over, so no barrier stops the weights. Both M-tiles of a pair share the tokens' operands.
//
// A pair that one warp has whole is finished from its registers. Of others every warp stores its sums in shared memory, and they
// are added in the order of the warps. Split-K: where inputs are split, every block stores its sums in `partials`, and the one
// that arrives last at its run's counter adds them in the order of the splits. So results depend on the shape and the bucket
// alone, and not on a row's company.
//
// EPILOGUE `f32`: out[t, n], `out_stride` apart. `f16_pair`: M-tiles alternate gate and up; `scale` times either in f16, all
// gates of a row before all its ups.
//
// Bytes: weights once; x once per run (from L2), partials written and read once. Operations: 2 * rows * outputs * columns.
// Requires columns % 32 == 0, x aligned to 16 bytes, `arrivals` zero (they are left so).
#include "lib/batch.cuh"
#include "lib/fragment_f16.cuh"
#include "lib/reduce.cuh"

struct Tiling {
  u32 run;           // pairs of a block
  u32 split_stages;  // stages of a split
  u32 whole_pairs;   // a warp's piece is whole pairs
};

struct Params {
  Rows rows;
  const u8* w;
  const u16* x;
  void* out;
  float* partials;
  u32* arrivals;
  u32 columns;
  u32 outputs;
  u32 out_stride;
  u32 m_tiles;
  float scale;  // f16_pair
  Tiling tilings[4];  // for 16, 32, 48, 64 rows
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/gemm_medium.rs differs");

enum { f32, f16_pair };

constexpr u32 WARPS = 8, PAIR_ROWS = 2 * M_TILE;
constexpr u32 RING_BYTES = RING * 2 * Weights::M_TILE_BYTES;  // of a warp
// Of sums in shared memory, in floats from token to token: four pairs of tokens meet all banks.
constexpr u32 SLOT_STRIDE = PAIR_ROWS + 4;
static_assert(SLOT_STRIDE * 4 == SLOT_TOKEN_BYTES, "src/kernel/linear/gemm_medium.rs differs");
static_assert(TokenOperands<Weights>::TOKEN_PADDING == TOKEN_PADDING_BYTES, "src/kernel/linear/gemm_medium.rs differs");

// The stages of one warp, in order of use.
struct Stream {
  const u8* pair;
  const u8* odd;  // the last M-tile where it has no other beside it; null otherwise
  u64 m_tile_bytes;
  u32 stage, begin, end;  // of the split
  u32 left;

  // Starts the copy of the next stage, and commits the group whether there is one or not.
  __device__ __forceinline__ void fetch(u8* to, u32 lane) {
    if (left > 0) {
      Weights::copy(to, pair, stage, lane, 0, 0);
      Weights::copy(to + Weights::M_TILE_BYTES, pair == odd ? pair : pair + m_tile_bytes, stage, lane, 0, 0);
      left--;
      if (++stage == end) {
        stage = begin;
        pair += 2 * m_tile_bytes;
      }
    }
    cp_async_commit();
  }
};

// Adds a stage of a pair. `x` is the stage's first input of token 0.
template <int OCTETS>
__device__ __forceinline__ void multiply(float (&sum)[2][OCTETS][4], const u8* stage, const u8* x, u32 token_bytes, u32 lane) {
  const u8* mine = x + lane / 4 * token_bytes;
#pragma unroll
  for (u32 step = 0; step < 2; step++) {
    u32 b[OCTETS][4];
#pragma unroll
    for (int j = 0; j < OCTETS; j++)
      TokenOperands<Weights>::load(b[j], mine + j * 8 * token_bytes + 64 * step, lane % 4);
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
      u32 a[2][4];
      f16_operands(a, stage + m * Weights::M_TILE_BYTES, step, lane, Weights());
#pragma unroll
      for (int j = 0; j < OCTETS; j++) {
        mma_f16(sum[m][j], a[0], {b[j][0], b[j][1]});
        mma_f16(sum[m][j], a[1], {b[j][2], b[j][3]});
      }
    }
  }
}

// Calls `f(row of the pair, token, sum)` for the lane's sums.
template <int OCTETS, typename F>
__device__ __forceinline__ void each_sum(const float (&sum)[2][OCTETS][4], u32 lane, F f) {
  const u32 group = lane / 4, quad = lane % 4;
#pragma unroll
  for (int j = 0; j < OCTETS; j++) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
      for (int i = 0; i < 4; i++) f(m * M_TILE + 8 * (i / 2) + group, 8 * j + 2 * quad + i % 2, sum[m][j][i]);
    }
  }
}

// The epilogue of one sum.
__device__ __forceinline__ void write(const Params& p, u32 pair, u32 row, u32 token, float sum) {
  if (EPILOGUE == f16_pair) {
    const u32 features = p.outputs / 2, feature = pair * M_TILE + row % M_TILE;
    u16* out = (u16*)p.out + u64(token) * p.out_stride + row / M_TILE * features;
    if (feature < features) out[feature] = f32_to_f16(p.scale * sum);
  } else {
    const u32 n = pair * PAIR_ROWS + row;
    if (n < p.outputs) ((float*)p.out)[u64(token) * p.out_stride + n] = sum;
  }
}

template <int ROWS>
__device__ __forceinline__ void gemm_medium(const Params& p) {
  constexpr int OCTETS = ROWS / 8;
  constexpr u32 SLOT = ROWS * SLOT_STRIDE, PAIR_SUMS = ROWS * PAIR_ROWS;
  DYNAMIC_SHARED(shared);
  __shared__ u32 arrival;
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const Tiling& tiling = p.tilings[ROWS / 16 - 1];
  const u32 run = tiling.run, split_stages = tiling.split_stages, whole_pairs = tiling.whole_pairs;
  const u32 all_pairs = (p.m_tiles + 1) / 2, first_pair = blockIdx.x * run, pairs = min(run, all_pairs - first_pair);
  const u32 all_stages = (p.columns + STAGE_INPUTS - 1) / STAGE_INPUTS, first_stage = blockIdx.y * split_stages,
            stages = min(split_stages, all_stages - first_stage), splits = gridDim.y;
  const u32 units = pairs * stages;
  const auto piece = [&](u32 warp) { return whole_pairs ? pairs * warp / WARPS * stages : units * warp / WARPS; };
  const u32 begin = piece(warp), end = piece(warp + 1);

  u8* const ring = shared + warp * RING_BYTES;
  const u64 m_tile_bytes = Weights::m_tile_bytes(p.columns);
  u32 pair = begin / stages, stage = begin - pair * stages;
  Stream stream;
  stream.m_tile_bytes = m_tile_bytes;
  stream.odd = p.m_tiles % 2 ? p.w + (p.m_tiles - 1) * m_tile_bytes : nullptr;
  stream.pair = p.w + 2 * (first_pair + pair) * m_tile_bytes;
  stream.begin = first_stage, stream.end = first_stage + stages, stream.stage = first_stage + stage;
  stream.left = end - begin;
#pragma unroll 1
  for (u32 i = 0; i < RING; i++) stream.fetch(ring + i * 2 * Weights::M_TILE_BYTES, lane);
  griddep_launch_dependents();
  griddep_wait();

  // Sums of warps that go on to another pair, then activations, in whose place the last sums of all warps lie in the end.
  float* const crossing = (float*)(shared + WARPS * RING_BYTES);
  const u32 crossings = whole_pairs ? 0 : min(run - 1, WARPS);
  float* const last = crossing + crossings * SLOT;
  u8* const x = (u8*)last;
  const u32 token_bytes = 2 * STAGE_INPUTS * split_stages + TOKEN_PADDING_BYTES;
  const u32 count = *p.rows.count;
#pragma unroll 1
  for (u32 token = warp; token < ROWS; token += WARPS) {
    const u16* from = p.x + u64(token) * p.columns + first_stage * STAGE_INPUTS;
    const u32 inputs = token < count ? p.columns - first_stage * STAGE_INPUTS : 0;
#pragma unroll 4
    for (u32 chunk = lane; chunk < stages * (STAGE_INPUTS / 8); chunk += WARP)
      cp_async_16(x + token * token_bytes + 16 * chunk, 8 * chunk < inputs ? from + 8 * chunk : p.x, 8 * chunk < inputs);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  // Where a sum goes once all of the block's inputs are in it.
  float* const partials = p.partials + u64(blockIdx.x) * splits * run * PAIR_SUMS;
  const auto put = [&](u32 pair, u32 row, u32 token, float sum) {
    if (splits > 1) {
      partials[(blockIdx.y * run + pair) * PAIR_SUMS + token * PAIR_ROWS + row] = sum;
    } else if (token < count) {
      write(p, first_pair + pair, row, token, sum);
    }
  };
  // Sums of a piece of a pair, in shared memory.
  const auto slot_of = [&](u32 pair, u32 warp, bool goes_on) {
    return goes_on ? crossing + (run <= WARPS ? pair : warp) * SLOT : last + warp * SLOT;
  };

  float sum[2][OCTETS][4];
  const auto clear = [&] {
#pragma unroll
    for (int j = 0; j < OCTETS; j++) {
#pragma unroll
      for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[m][j][i] = 0;
      }
    }
  };
  const auto store = [&](float* slot) {
    each_sum(sum, lane, [&](u32 row, u32 token, float value) { slot[token * SLOT_STRIDE + row] = value; });
  };
  clear();
  const u8* from = ring;
  bool from_start = stage == 0, left = begin == end;  // nothing to add is zeros
#pragma unroll 1
  for (u32 unit = begin; unit < end; unit++) {
    cp_async_wait<RING - 1>();
    __syncwarp();
    multiply(sum, from, x + 2 * STAGE_INPUTS * stage, token_bytes, lane);
    __syncwarp();
    stream.fetch((u8*)from, lane);
    from += 2 * Weights::M_TILE_BYTES;
    if (from == ring + RING_BYTES) from = ring;
    stage++;
    if (stage == stages) {
      if (from_start) {
        each_sum(sum, lane, [&](u32 row, u32 token, float value) { put(pair, row, token, value); });
      } else if (unit + 1 < end) {
        store(slot_of(pair, warp, true));
      } else {
        left = true;
        break;
      }
      clear();
      pair++;
      stage = 0;
      from_start = true;
    } else if (unit + 1 == end) {
      left = true;
    }
  }

  if (!whole_pairs) {
    __syncthreads();  // nobody reads activations any more
    if (left) store(slot_of(pair, warp, false));
    __syncthreads();
    const auto warp_of = [&](u32 unit) { return ((unit + 1) * WARPS - 1) / units; };
#pragma unroll 1
    for (u32 pair = 0; pair < pairs; pair++) {
      const u32 first = warp_of(pair * stages), final = warp_of((pair + 1) * stages - 1);
      if (first == final) continue;
      const float* tail = slot_of(pair, final, piece(final + 1) > (pair + 1) * stages);
#pragma unroll 1
      for (u32 e = threadIdx.x; e < PAIR_SUMS; e += WARPS * WARP) {
        const u32 token = e / PAIR_ROWS, row = e % PAIR_ROWS, at = token * SLOT_STRIDE + row;
        float total = 0;
        for (u32 w = first; w < final; w++) total += last[w * SLOT + at];
        put(pair, row, token, total + tail[at]);
      }
    }
  }

  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrival = atomicAdd(p.arrivals + blockIdx.x, 1u);
  __syncthreads();
  if (arrival != splits - 1) return;
  if (threadIdx.x == 0) p.arrivals[blockIdx.x] = 0;
  __threadfence();
  const u32 split_sums = run * PAIR_SUMS / 4;
  const float4* parts = (const float4*)partials;
#pragma unroll 1
  for (u32 e = threadIdx.x; e < pairs * PAIR_SUMS / 4; e += WARPS * WARP) {
    const u32 pair = e / (PAIR_SUMS / 4), token = e / (PAIR_ROWS / 4) % ROWS, row = e % (PAIR_ROWS / 4) * 4;
    if (token >= count) continue;
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (u32 split = 0; split < splits; split++) {
      const float4 part = load_from_blocks(parts + split * split_sums + e);
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    write(p, first_pair + pair, row, token, total.x);
    write(p, first_pair + pair, row + 1, token, total.y);
    write(p, first_pair + pair, row + 2, token, total.z);
    write(p, first_pair + pair, row + 3, token, total.w);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, 1) gemm_medium_16(const Params p) { gemm_medium<16>(p); }
extern "C" __global__ void __launch_bounds__(WARPS * WARP, 1) gemm_medium_32(const Params p) { gemm_medium<32>(p); }
extern "C" __global__ void __launch_bounds__(WARPS * WARP, 1) gemm_medium_48(const Params p) { gemm_medium<48>(p); }
extern "C" __global__ void __launch_bounds__(WARPS * WARP, 1) gemm_medium_64(const Params p) { gemm_medium<64>(p); }
