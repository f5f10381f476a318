// out[r] = W . f(x[r]) for up to 8 rows: the product of decoding. f is nothing, a norm, or a branch that rejoins the residual
// stream and is normed again; what comes out may pass through GELU. WEIGHTS names the matrix's form.
//
// Grid: (blocks), all of them resident at once; a block owns a run of strips (16 output rows of panels, 4 of floats) and all
// their inputs. `split` warps are a team that shares a strip, each taking every split-th stage (about 2 KB) of it; sums of a
// team join in shared memory, in order. Every warp streams its stages through a ring of its own, filled before the input is
// made, so that the memory is busy from the first instruction and no barrier stops it. Blocks are unequally spread over
// multiprocessors; that is well, because bandwidth follows the bytes in flight.
// The entry `gemv_chosen` takes the matrix from a route: grid (blocks, rows * top_k), or (blocks, rows) with the choices'
// products summed by weight; a choice is a row by itself.
//
// Bytes: the matrix once; the input (4 * columns a row, twice with a norm_add) once a block, from L2.
// Sums do not depend on the number of rows, nor on the grid.
// Requires columns % 8 == 0; of norms, columns <= 12 * threads; values with room for as many rows as the entry has; no output
// that is also an input.
#include "lib/batch.cuh"
#include "lib/gemv_input.cuh"

#define JOIN_NAMES(a, b) a##b
#define JOIN(a, b) JOIN_NAMES(a, b)
using Weights = JOIN(WEIGHTS, _weights);

// Mirrors `Epilogue` in src/kernel/gemv.rs; 0 leaves sums as they are.
constexpr u32 GELU_PAIR = 1, GELU_SLICE = 2;

// Output rows `first` on of a joined matrix are a value of their own.
struct Part {
  float* out;
  u32 first;
  u32 rows;
};

struct Params {
  Rows rows;
  Prologue input;
  const u8* w;
  const u8* up;  // of float matrices in a pair; panels of gate and up lie strip by strip in `w`
  Part parts[3];
  const float* other;  // of GELU_SLICE, in rows of `other_columns`
  const float* route;  // of `gemv_chosen`
  u64 matrix_bytes;    // from one matrix of a stack to the next
  u32 columns;
  u32 outputs;         // rows of the joined matrix, without padding; of one matrix of a pair of floats
  u32 strips;
  u32 strip_bytes;     // of floats: of a row
  u32 split;
  u32 epilogue;
  u32 other_columns;
  u32 other_column;
  u32 top_k;
  u32 choices_summed;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/gemv.rs differs");

// Strips that a team sums up before the block joins what it has.
template <int ROWS>
constexpr u32 BATCH = ROWS <= 2 ? 8 : ROWS == 4 ? 4 : 2;

// Starts the copy of a stage of the matrix at `w`.
__device__ __forceinline__ void fetch(const Params& p, u8* to, const u8* w, u32 strip, u32 stage, u32 lane) {
  if (Weights::QUANTIZED) {
    Weights::fetch(to, w + u64(strip) * p.strip_bytes, p.strip_bytes, Weights::STRIP, stage, lane);
  } else {
    const bool pair = p.epilogue == GELU_PAIR;
    const u32 row = (pair ? strip / 2 : strip) * Weights::STRIP;
    const u8* matrix = pair && strip % 2 ? p.up + (w - p.w) : w;
    Weights::fetch(to, matrix + u64(row) * p.strip_bytes, p.strip_bytes, p.outputs - row, stage, lane);
  }
}

// A team's sums, in the order of its warps.
__device__ __forceinline__ float joined(const float* partial, u32 split, u32 stride) {
  float sum = 0;
  for (u32 i = 0; i < split; i++) sum += partial[i * stride];
  return sum;
}

// Sums of `strips` strips from `first` on become outputs of the rows from `out_row` on.
template <int ROWS>
__device__ __forceinline__ void finish(const Params& p, const float* partial, u32 first, u32 strips, u32 out_row, u32 count) {
  constexpr u32 STRIP = Weights::STRIP, STRIDE = ROWS * STRIP;
  const u32 each = p.epilogue == GELU_PAIR ? 2 : 1;
  for (u32 e = threadIdx.x; e < strips / each * STRIDE; e += blockDim.x) {
    const u32 token = e / STRIP % ROWS, nth = e / STRIDE * each, strip = first + nth;
    if (token >= count) continue;
    const float* from = partial + u64(nth) * p.split * STRIDE + e % STRIDE;
    float sum = joined(from, p.split, STRIDE);
    u32 row = strip / each * STRIP + e % STRIP;
    const Part& part = row >= p.parts[2].first ? p.parts[2] : row >= p.parts[1].first ? p.parts[1] : p.parts[0];
    row -= part.first;
    if (row >= part.rows) continue;
    const u64 out = out_row + token;
    if (p.epilogue == GELU_PAIR) sum = gelu(sum) * joined(from + p.split * STRIDE, p.split, STRIDE);
    if (p.epilogue == GELU_SLICE) sum = gelu(sum) * p.other[out * p.other_columns + p.other_column + row];
    part.out[out * part.rows + row] = sum;
  }
}

template <int ROWS, bool CHOSEN>
__device__ __forceinline__ void gemv(const Params& p) {
  DYNAMIC_SHARED(shared);
  constexpr int TOGETHER = ROWS == 1 ? 1 : 2;
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  const u32 share = warp % p.split, team = warp / p.split, teams = warps / p.split;
  const u32 granule = p.epilogue == GELU_PAIR ? 2 : 1, granules = p.strips / granule;
  const u32 begin = u32(u64(granules) * blockIdx.x / gridDim.x) * granule;
  const u32 end = u32(u64(granules) * (blockIdx.x + 1) / gridDim.x) * granule;
  const u32 most = (granules + gridDim.x - 1) / gridDim.x * granule;  // strips of a block
  const u32 batch = min(BATCH<ROWS> * teams, most);

  // Choices: which matrices, and whose row.
  const u32 segments = CHOSEN && p.choices_summed ? p.top_k : 1;
  const u32 segment_stages = (p.columns + Weights::STAGE_INPUTS - 1) / Weights::STAGE_INPUTS, stages = segments * segment_stages;
  const u32 columns = segments * p.columns;
  const u32 padded = (columns + Weights::PADDING - 1) / Weights::PADDING * Weights::PADDING;
  const float* choices = nullptr;
  Prologue input = p.input;
  if (CHOSEN) {
    const u32 row = p.choices_summed ? blockIdx.y : blockIdx.y / p.top_k;
    if (!p.rows.has(row)) return;
    choices = p.route + u64(row) * 2 * p.top_k + (p.choices_summed ? 0 : blockIdx.y % p.top_k);
    input.x += u64(row) * columns;
  }
  const u32 count = CHOSEN ? 1 : *p.rows.count;

  u8* const ring = shared + warp * RING * Weights::STAGE_BYTES;
  float* const partials = (float*)(shared + warps * RING * Weights::STAGE_BYTES);
  Input in;
  in.scales = partials + 2 * batch * p.split * ROWS * Weights::STRIP;
  in.sums = in.scales + (Weights::QUANTIZED ? padded / 32 * ROWS : 0);
  in.values = (u8*)(in.sums + (Weights::HAS_MINS ? padded / 32 * ROWS : 0));
  in.stride = Weights::QUANTIZED ? padded + 32 : 4 * padded;

  Held<TOGETHER> held;
#if INPUT_FIRST
  held.load(input, columns);
#endif

  u32 next_strip = begin + team, next_stage = share;
  const auto fetch_next = [&](u8* to) {
    if (next_strip < end) {
      const u8* w = p.w;
      u32 stage = next_stage;
      if (CHOSEN) {
        const u32 segment = stage / segment_stages;
        stage -= segment * segment_stages;
        w += u64(choices[segment]) * p.matrix_bytes;
      }
      fetch(p, to, w, next_strip, stage, lane);
      next_stage += p.split;
      if (next_stage >= stages) {
        next_stage = share;
        next_strip += teams;
      }
    }
    close_copies();
  };
#pragma unroll
  for (u32 slot = 0; slot < RING; slot++) fetch_next(ring + slot * Weights::STAGE_BYTES);

#if !INPUT_FIRST
  held.load(input, columns);
#endif
  prepare<Weights, ROWS, TOGETHER>(in, input, held, segments > 1 ? choices + p.top_k : nullptr, p.columns, columns, padded, count);
  __syncthreads();

  const typename Weights::template LaneOf<ROWS> mine(in, lane);
  u32 slot = 0, buffer = 0;
  for (u32 first = begin; first < end; first += batch) {
    const u32 last = min(first + batch, end);
    float* const partial = partials + buffer * batch * p.split * ROWS * Weights::STRIP;
    for (u32 strip = first + team; strip < last; strip += teams) {
      typename Weights::template Sums<ROWS> sums;
      for (u32 stage = share; stage < stages; stage += p.split) {
        u8* const from = ring + slot * Weights::STAGE_BYTES;
        wait_for_copies<RING - 1>();
        __syncwarp();
        const u32 segment = CHOSEN ? stage / segment_stages : 0;
        Weights::template multiply<ROWS>(sums, from, mine, segment * p.columns, stage - segment * segment_stages, p.columns, lane);
        __syncwarp();
        fetch_next(from);
        slot = slot + 1 == RING ? 0 : slot + 1;
      }
      sums.store(partial + ((strip - first) * p.split + share) * ROWS * Weights::STRIP, lane);
    }
    __syncthreads();
    finish<ROWS>(p, partial, first, last - first, CHOSEN ? blockIdx.y : 0, count);
    // The other half is free: everybody has passed this barrier, and so has read what was written before the one before it.
    buffer ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) gemv_1(const Params p) { gemv<1, false>(p); }
extern "C" __global__ void __launch_bounds__(512, 1) gemv_2(const Params p) { gemv<2, false>(p); }
extern "C" __global__ void __launch_bounds__(512, 1) gemv_4(const Params p) { gemv<4, false>(p); }
extern "C" __global__ void __launch_bounds__(512, 1) gemv_8(const Params p) { gemv<8, false>(p); }
extern "C" __global__ void __launch_bounds__(512, 1) gemv_chosen(const Params p) { gemv<1, true>(p); }
