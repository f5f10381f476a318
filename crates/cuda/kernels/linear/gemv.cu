// GEMV: out[r] = W . f(x[r]) for up to 8 rows, the product of decoding. The prologue f is nothing, a norm, or the residual add with
// the norm that follows; the epilogue may be GELU. WEIGHTS names the matrix's format, INPUT is plain or normed.
//
// Grid: (blocks), all of them resident at once; a block owns a run of M-tiles (16 output rows of fragments, 4 of floats) and all
// their inputs. `split` warps are a team that shares an M-tile, each taking every split-th stage (about 2 KB) of it; a team's
// sums are reduced in shared memory, in order. Every warp streams its stages through a cp.async ring of its own, RING stages
// deep, begun before the prologue and filled when its input has come, so that the memory is busy from the start and no barrier
// stops it.
// With CLUSTER, as many blocks as there are rows are a cluster: each prepares one row and sends it to the others.
// Grid y: rows that do not fit shared memory together, the entry's number of rows at a time.
// The entries `gemv_routed_*` take the matrix from a route: grid (blocks, rows * top_k). Of the rows that are routed to one expert
// the first has its blocks multiply for all of them, so that each expert is read once; blocks of the others leave.
//
// Bytes: the matrix once; the input (4 * columns per row, twice with a residual) once per block, from L2.
// Sums do not depend on the number of rows, nor on the grid.
// Small products are as fast as their longest chain of instructions: what the host can compute, it does.
// Requires columns % 8 == 0; of norms, columns <= 12 * threads; values with room for as many rows as the entry has; no output
// that is also an input.
#include "lib/batch.cuh"
#include "lib/gemv_input.cuh"

using Weights = JOIN(WEIGHTS, _weights);
static_assert(Weights::STAGE_BYTES == M_TILE_STAGE_BYTES, "src/kernel/linear/gemv.rs differs");
template <int ROWS, int LAYOUT_ROWS>
using plain_input = PlainInput<ROWS, LAYOUT_ROWS>;
template <int ROWS, int LAYOUT_ROWS>
using normed_input = NormedInput<ROWS, LAYOUT_ROWS>;

// Kinds of epilogue. Mirrors `GemvEpilogue` in src/kernel/linear/gemv.rs; 0 leaves sums as they are.
constexpr u32 GEGLU = 1, GELU_MUL_SLICE = 2;

// How a launch overlaps the one before it. Mirrors `Overlap` in src/kernel/linear/gemv.rs.
//   PDL            it starts before the launch before is over
//   LATE_TRIGGER   the launch behind it starts when the launch before it is over, not sooner
//   EARLY_INPUT    its input was there before the launch before it started
//   EARLY_ROUTE    so was its route
constexpr u32 PDL = 1, LATE_TRIGGER = 2, EARLY_INPUT = 4, EARLY_ROUTE = 8;

// Output rows `first` on of a joined matrix are a value of their own.
struct Part {
  float* out;
  u32 first;
  u32 rows;
};

// In order of first use: every line of params is fetched once per block.
struct Params {
  Prologue input;
  const u8* w;
  const u8* up;     // of float matrices in a pair; M-tiles of gate and up alternate in `w`
  u32 a_block[4];   // M-tiles of a block, for 1, 2, 4, 8 rows
  u32 columns;      // of a matrix
  u32 padded;       // columns of the whole input, up to the end of the last stage
  u32 team_of;      // warp * team_of / 2^16 is the warp's team
  u32 split;
  u32 teams;
  u32 m_tiles;
  u32 m_tile_bytes;  // of floats: of a row
  u32 stages;       // of an M-tile
  u32 outputs;      // rows of the joined matrix, without padding; of one matrix of a pair of floats
  u32 epilogue;
  u32 other_columns;
  u32 other_column;
  u32 top_k;
  u32 input_per_expert;  // of routed experts: an input per row and expert, not per row
  u32 pdl;               // PDL_* below
  u32 reserved;
  Rows rows;
  Part parts[3];
  const float* other;  // of GELU_MUL_SLICE, in rows of `other_columns`
  const float* route;  // of `gemv_routed_*`
  u64 matrix_bytes;    // from one matrix of a stack to the next
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/gemv.rs differs");

constexpr u32 MAX_WARPS = 16;

// M-tiles that a team sums up before the block reduces them.
template <int ROWS>
constexpr u32 BATCH = ROWS <= 2 ? 8 : ROWS == 4 ? 4 : 2;

// The stages of one warp, in order of use.
struct Stream {
  const Params& p;
  const u8 *matrix, *next;
  u32 m_tile, end, stage, share, lane;

  __device__ __forceinline__ Stream(const Params& p, u32 m_tile, u32 end, u32 share, u32 lane)
      : p(p), m_tile(m_tile), end(end), stage(share), share(share), lane(lane) {
    start(0);
  }

  // Begins at another matrix of a stack.
  __device__ __forceinline__ void start(u64 offset) {
    matrix = p.w + offset;
    next = m_tile_start();
  }

  __device__ __forceinline__ const u8* m_tile_start() const {
    const u32 mine = share * Weights::STEP + 16 * lane;
    if (Weights::QUANTIZED) return matrix + u64(m_tile) * p.m_tile_bytes + mine;
    const bool pair = p.epilogue == GEGLU;
    return (pair && m_tile % 2 ? p.up : matrix) + u64((pair ? m_tile / 2 : m_tile) * Weights::M_TILE) * p.m_tile_bytes + mine;
  }

  // Starts the next copy, to the lane's own address, and commits the group whether there is one or not.
  __device__ __forceinline__ void fetch(u8* to) {
    if (m_tile < end) {
      const u32 row = (p.epilogue == GEGLU ? m_tile / 2 : m_tile) * Weights::M_TILE;
      Weights::fetch(to, next, p.m_tile_bytes - stage * Weights::STEP, p.outputs - row, p.m_tile_bytes, lane);
      stage += p.split;
      next += p.split * Weights::STEP;
      if (stage >= p.stages) {
        stage = share;
        m_tile += p.teams;
        next = m_tile_start();
      }
    }
    cp_async_commit();
  }
};

// Finds the rows that a slot's expert is routed from, as slots (row * top_k + place): their number, or none if an earlier row has
// the expert, too. Whole warps call it, and all of them find the same.
template <int ROWS>
__device__ __forceinline__ u32 gather(const Params& p, u32 slot, u32 lane, u32 (&slots)[ROWS]) {
  const u32 row = slot / p.top_k, rows = *p.rows.count;
  const float expert = p.route[u64(row) * 2 * p.top_k + slot % p.top_k];
  u32 found = 0;
  bool first = true;
#pragma unroll
  for (u32 r = 0; r < ROWS; r++) {
    u32 place = p.top_k;
    for (u32 k = lane; r < rows && k < p.top_k; k += WARP) {
      if (p.route[u64(r) * 2 * p.top_k + k] == expert) place = k;
    }
    place = __reduce_min_sync(ALL_LANES, place);
    if (place == p.top_k) continue;
    first = first && r >= row;
    if (lane == 0 && threadIdx.x == 0) slots[found] = r * p.top_k + place;
    found++;
  }
  return first ? found : 0;
}

// GELU, tanh approximation, as z / (1 + e^-2u): a few instructions, within 1e-6.
__device__ __forceinline__ float quick_gelu(float z) {
  const float u = 0.7978846f * z * (1.0f + 0.044715f * z * z);
  return __fdividef(z, 1.0f + __expf(-2.0f * u));
}

// The sum over a team's warps, in their order.
__device__ __forceinline__ float team_sum(const float* partial, u32 split, u32 stride) {
  float sum = 0;
#pragma unroll
  for (u32 i = 0; i < MAX_WARPS; i++) {
    if (i < split) sum += partial[i * stride];
  }
  return sum;
}

// The epilogue: sums of `m_tiles` M-tiles from `first` on become outputs of the rows from `out_row` on, or of `slots`.
template <int ROWS, bool ROUTED>
__device__ __forceinline__ void finish(const Params& p, const float* partial, u32 first, u32 m_tiles, u32 out_row, const u32* slots,
                                       u32 count) {
  constexpr u32 M_TILE = Weights::M_TILE, STRIDE = ROWS * M_TILE;
  const u32 each = p.epilogue == GEGLU ? 2 : 1;
#pragma unroll 1
  for (u32 e = threadIdx.x; e < m_tiles / each * STRIDE; e += blockDim.x) {
    const u32 token = e / M_TILE % ROWS, local = e / STRIDE * each, m_tile = first + local;
    if (token >= count) continue;
    const float* from = partial + local * p.split * STRIDE + e % STRIDE;
    float sum = team_sum(from, p.split, STRIDE);
    u32 row = m_tile / each * M_TILE + e % M_TILE;
    const Part& part = row >= p.parts[2].first ? p.parts[2] : row >= p.parts[1].first ? p.parts[1] : p.parts[0];
    row -= part.first;
    if (row >= part.rows) continue;
    const u64 out = ROUTED ? slots[token] : out_row + token;
    if (p.epilogue == GEGLU) sum = quick_gelu(sum) * team_sum(from + p.split * STRIDE, p.split, STRIDE);
    if (p.epilogue == GELU_MUL_SLICE) sum = quick_gelu(sum) * p.other[out * p.other_columns + p.other_column + row];
    part.out[out * part.rows + row] = sum;
  }
}

template <int ROWS, bool ROUTED>
__device__ __forceinline__ void gemv(const Params& p) {
  DYNAMIC_SHARED(shared);
  constexpr u32 BUCKET = ROWS == 1 ? 0 : ROWS == 2 ? 1 : ROWS == 4 ? 2 : 3;
  constexpr bool SHARES = CLUSTER && !ROUTED && ROWS > 1;
  constexpr u32 OWN_ROWS = SHARES || ROUTED ? 1 : ROWS;
#if CLUSTER
  const u32 rank = SHARES ? cluster_rank() : 0;
  // Nobody writes into a block that has not begun.
  if (SHARES) cluster_arrive();
#else
  const u32 rank = 0;
#endif
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  const u32 team = warp * p.team_of >> 16, share = warp - team * p.split;
  const u32 a_block = p.a_block[BUCKET];
  const u32 begin = blockIdx.x * a_block, end = min(begin + a_block, p.m_tiles);

  JOIN(INPUT, _input)<OWN_ROWS, ROWS> prologue;
  u8* const ring = shared + warp * RING * Weights::STAGE_BYTES;
  Stream stream(p, begin + team, end, share, lane);
  u32 filled = 0;
  const auto fill = [&] {
#pragma unroll 1
    for (; filled < RING; filled++) stream.fetch(ring + filled * Weights::STAGE_BYTES + 16 * lane);
  };
  // After what starts the memory: little is computed before that.
  const u32 batch = min(BATCH<ROWS> * p.teams, a_block);
  const u32 half = batch * p.split * ROWS * Weights::M_TILE;
  float* partial = (float*)(shared + warps * RING * Weights::STAGE_BYTES);
  Input in;
  const auto lay_out = [&] {
    in.scales = partial + 2 * half;
    in.sums = in.scales + (Weights::QUANTIZED ? p.padded / 32 * ROWS : 0);
    in.values = (u8*)(in.sums + (Weights::HAS_MINS ? p.padded / 32 * ROWS : 0));
    in.stride = Weights::QUANTIZED ? p.padded + 32 : 4 * p.padded;
  };
  // Rows that do not fit shared memory together have blocks of their own.
  const u32 first_row = ROUTED ? 0 : blockIdx.y * ROWS;
  __shared__ u32 slots[ROWS];
  u32 count = 0;
  if constexpr (ROUTED) {
    const u32 slot = blockIdx.y;
    const bool there = p.rows.has(slot / p.top_k);
    lay_out();
    const auto prepare = [&](u32 slot, u32 column) {
      Prologue input = p.input;
      input.x += u64(p.input_per_expert ? slot : slot / p.top_k) * p.columns;
      Input own = in;
      own.values += column * in.stride;
      own.scales += column;
      own.sums += column;
      prologue.load_first(input, p.columns);
      // The input was asked for first: memory that has much to give delays it.
      if (filled < RING && count) fill();
      prologue.template prepare<Weights>(own, input, p.columns, p.padded, 1, false, [] {});
    };
    const auto find = [&] {
      count = there ? gather<ROWS>(p, slot, lane, slots) : 0;
      if (count == 0) return;
      stream.start(u64(p.route[u64(slot / p.top_k) * 2 * p.top_k + slot % p.top_k]) * p.matrix_bytes);
    };
    const u32 early = p.pdl & (EARLY_INPUT | EARLY_ROUTE);
    if (early == EARLY_INPUT && there) prepare(slot, 0);
    if (early == EARLY_ROUTE) {
      find();
      if (count) fill();
    }
    if (!(p.pdl & LATE_TRIGGER)) griddep_launch_dependents();
    griddep_wait();
    if (p.pdl & LATE_TRIGGER) griddep_launch_dependents();
    if (early != EARLY_ROUTE) find();
    if (count == 0) return;
    if (early == EARLY_INPUT) {
      fill();
    } else {
      prepare(slot, 0);
    }
#pragma unroll 1
    for (u32 m = 1; ROWS > 1 && m < count; m++) {
      __syncthreads();  // slots are known; sums of the row before may still be read
      prepare(slots[m], m);
    }
  } else {
    Prologue input = p.input;
    const u64 own_row = u64(first_row + rank) * p.columns;
    input.x += own_row;
    input.residual += own_row;
    input.sum += own_row;
    if (p.pdl & PDL) {
      // The launch before is still running. Time to fetch weights, which depend on nothing.
      fill();
      if (!(p.pdl & LATE_TRIGGER)) griddep_launch_dependents();
      if (!(p.pdl & EARLY_INPUT)) griddep_wait();
      if (p.pdl & LATE_TRIGGER) griddep_launch_dependents();
      prologue.load_first(input, p.columns);
    } else {
      // One stage at first: memory that is asked for much more than it can give at once delays the input, too.
      prologue.load_first(input, p.columns);
      stream.fetch(ring + 16 * lane);
      filled = 1;
    }
    Input own = in;
    own.values += rank * in.stride;
    own.scales += rank;
    own.sums += rank;
    count = *p.rows.count - min(*p.rows.count, first_row);
    lay_out();
    const u32 own_count = SHARES ? u32(rank < count) : count;
    prologue.template prepare<Weights>(own, input, p.columns, p.padded, own_count, blockIdx.x / (SHARES ? ROWS : 1) == 0, fill);
    if (p.pdl & EARLY_INPUT) griddep_wait();
  }
  __syncthreads();
#if CLUSTER
  if (SHARES) {
    cluster_wait();
    share_row<Weights, ROWS>(in, rank, p.padded);
    cluster_arrive();
    cluster_wait();
  }
#endif

  const typename Weights::template LaneOf<ROWS> mine(in, lane);
  u8* from = ring;
  u8* const ring_end = ring + RING * Weights::STAGE_BYTES;
  int other_half = int(half);
#pragma unroll 1
  for (u32 first = begin; first < end; first += batch) {
    const u32 last = min(first + batch, end);
#pragma unroll 1
    for (u32 m_tile = first + team; m_tile < last; m_tile += p.teams) {
      typename Weights::template Sums<ROWS> sums;
#pragma unroll 1
      for (u32 stage = share; stage < p.stages; stage += p.split) {
        cp_async_wait<RING - 1>();
        __syncwarp();
        Weights::template multiply<ROWS>(sums, from, mine, stage * Weights::STAGE_INPUTS, lane);
        __syncwarp();
        stream.fetch(from + 16 * lane);
        from += Weights::STAGE_BYTES;
        if (from == ring_end) from = ring;
      }
      sums.store(partial + ((m_tile - first) * p.split + share) * ROWS * Weights::M_TILE, lane);
    }
    __syncthreads();
    finish<ROWS, ROUTED>(p, partial, first, last - first, first_row, slots, count);
    // The other half of `partial` was read before the last barrier, so it is free.
    partial += other_half;
    other_half = -other_half;
  }
}

// Mirrors `registers` in src/kernel/linear/gemv.rs: 96 let two blocks of 10 warps share a multiprocessor.
constexpr int FEW_REGISTERS = 96, REGISTERS = Weights::QUANTIZED && CLUSTER ? 96 : 128;
constexpr int ROUTED_REGISTERS = Weights::QUANTIZED ? 96 : 128;

extern "C" __global__ void __maxnreg__(FEW_REGISTERS) gemv_1(const Params p) { gemv<1, false>(p); }
extern "C" __global__ void __maxnreg__(REGISTERS) gemv_2(const Params p) { gemv<2, false>(p); }
extern "C" __global__ void __maxnreg__(REGISTERS) gemv_4(const Params p) { gemv<4, false>(p); }
extern "C" __global__ void __maxnreg__(REGISTERS) gemv_8(const Params p) { gemv<8, false>(p); }
extern "C" __global__ void __maxnreg__(ROUTED_REGISTERS) gemv_routed_1(const Params p) { gemv<1, true>(p); }
extern "C" __global__ void __maxnreg__(ROUTED_REGISTERS) gemv_routed_2(const Params p) { gemv<2, true>(p); }
extern "C" __global__ void __maxnreg__(ROUTED_REGISTERS) gemv_routed_4(const Params p) { gemv<4, true>(p); }
extern "C" __global__ void __maxnreg__(ROUTED_REGISTERS) gemv_routed_8(const Params p) { gemv<8, true>(p); }
