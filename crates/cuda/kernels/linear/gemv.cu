// GEMV: out[r] = W . f(x[r]) for up to 8 rows, the product of decoding. The prologue f is nothing, a norm, or the residual add with
// the norm that follows; the epilogue may be GELU. WEIGHTS names the matrix's format, INPUT is plain or normed, or ready where
// a launch before has done the prologue. With CODES outputs are GEGLU's alone, as prepared rows of the product that follows.
//
// Grid: (blocks), all of them resident at once; a block owns a run of M-tiles (16 output rows of fragments, 4 of floats) and all
// their inputs. `split` warps are a team that shares an M-tile, each taking every split-th stage (about 2 KB) of it; a team's
// sums are reduced in shared memory, in order. Every warp streams its stages through a cp.async ring of its own, begun before the
// prologue and filled when its input has come, so that the memory is busy from the start and no barrier stops it.
// With CLUSTER, up to so many blocks are a cluster, as many as there are rows at the most: each prepares its share of the rows and
// sends it to the others.
// Grid y: rows that do not fit shared memory together, the entry's number of rows at a time.
// The entries `gemv_routed_*` take the matrix from a route: grid (blocks, rows * top_k). Of the rows that are routed to one expert
// the first has its blocks multiply for all of them, so that each expert is read once; blocks of the others leave.
// `gemv_grouped` does the same for more rows: grid (blocks), which share the M-tiles of all touched experts equally, so that a block may have the
// end of one expert and the beginning of the next. Eight rows of an expert go together.
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
template <int ROWS, int LAYOUT_ROWS>
using ready_input = ReadyInput<ROWS, LAYOUT_ROWS>;

// Whether the module is for `gemv_grouped` alone.
#ifndef GROUPED
#define GROUPED 0
#define GROUPED_REGISTERS 96
#endif
constexpr bool READY = JOIN(INPUT, _input)<1, 1>::READY;

// Stages of a ring. One row has more of them where its blocks are ALONE on their multiprocessors, with shares that differ by a granule.
template <int ROWS>
constexpr u32 STAGES = ROWS == 1 ? RING_1 : RING;
constexpr bool ALONE = RING_1 > RING;

// With PDL, stages that are asked for before the input; without it one. Memory that is asked for much more than it can give at once delays
// the input, too; how much is best was measured.
template <int ROWS>
constexpr u32 STAGES_BEFORE = ROWS == 1 ? (ALONE ? 3 : 2) : READY ? 1 : Weights::QUANTIZED ? 2 : RING;

// Kinds of epilogue. Mirrors `GemvEpilogue` in src/kernel/linear/gemv.rs; 0 leaves sums as they are.
constexpr u32 GEGLU = 1, GELU_MUL_SLICE = 2;

// How a launch overlaps the one before it. Mirrors `Overlap` in src/kernel/linear/gemv.rs.
//   PDL            it starts before the launch before is over
//   LATE_TRIGGER   the launch behind it starts when the launch before it is over, not sooner
//   LAST_TRIGGER   it starts when the last weights have been asked for, also with one row
//   EARLY_INPUT    its input was there before the launch before it started
//   EARLY_ROUTE    so was its route
enum : u32 { PDL = 1, LATE_TRIGGER = 2, EARLY_INPUT = 4, EARLY_ROUTE = 8, LAST_TRIGGER = 16 };

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
  u32 other_columns;  // with CODES: of a prepared row
  u32 other_column;
  u32 top_k;
  u32 input_per_expert;  // of routed experts: an input per row and expert, not per row
  u32 pdl;               // PDL_* below
  u32 alone;             // with ALONE: blocks that have all of a block's M-tiles, and 2^16 times how many fewer the others have
  Rows rows;
  Part parts[3];
  const float* other;  // of GELU_MUL_SLICE, in rows of `other_columns`
  const float* route;  // of `gemv_routed_*`
  u64 matrix_bytes;    // from one matrix of a stack to the next
  u32 granule;         // of `gemv_grouped`: M-tiles that stay together
  u32 reserved;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/gemv.rs differs");

constexpr u32 MAX_WARPS = 16;

// M-tiles that a team sums up before the block reduces them.
template <int ROWS>
constexpr u32 BATCH = ROWS <= 2 ? 8 : ROWS == 4 ? 4 : 2;

// Whether the launch behind starts when the last weights have been asked for. Nothing happens without PDL.
template <int ROWS>
__device__ __forceinline__ bool triggers_at_last(const Params& p) {
  return ROWS > 1 || p.pdl & LAST_TRIGGER;
}

// The stages of one warp, in order of use.
struct Stream {
  const Params& p;
  const u8 *matrix, *next;
  SharedPlace place;  // of the lane's part of the ring
  u32 m_tile, end, stage, share, lane;

  __device__ __forceinline__ Stream(const Params& p, u8* ring, u32 m_tile, u32 end, u32 share, u32 lane)
      : p(p), place(shared_place(ring + 16 * lane)), m_tile(m_tile), end(end), stage(share), share(share), lane(lane) {
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

  // Starts the next copy, so many bytes behind the ring's start, and commits the group whether there is one or not. If there is none
  // and it is asked to, it lets the launch behind start.
  __device__ __forceinline__ void fetch(u32 at, bool triggers) {
    if (m_tile < end) {
      const u32 row = (p.epilogue == GEGLU ? m_tile / 2 : m_tile) * Weights::M_TILE;
      Weights::fetch(place + at, next, p.m_tile_bytes - stage * Weights::STEP, p.outputs - row, p.m_tile_bytes, lane);
      stage += p.split;
      next += p.split * Weights::STEP;
      if (stage >= p.stages) {
        stage = share;
        m_tile += p.teams;
        next = m_tile_start();
      }
    } else if (triggers) {
      griddep_launch_dependents();
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

// The same where outputs are the rows of a product that follows, prepared as prepare_rows.cu does it and laid out as `PreparedRows` in
// src/kernel/linear/prepare_rows.rs says: a warp takes a block of 32, which is two pairs of M-tiles.
template <int ROWS>
__device__ __forceinline__ void finish_codes(const Params& p, const float* partial, u32 first, u32 m_tiles, u32 out_row, u32 count) {
  constexpr u32 STRIDE = ROWS * 16;
  const u32 lane = threadIdx.x % WARP, padded = p.other_columns;
  u8* const codes = (u8*)p.parts[0].out;
  const Input out = {codes, (float*)(codes + PREPARED_ROWS * padded), (float*)(codes + PREPARED_ROWS * padded) + PREPARED_ROWS * (padded / 32),
                     padded};
#pragma unroll 1
  for (u32 unit = threadIdx.x / WARP; unit < m_tiles / 4 * ROWS; unit += blockDim.x / WARP) {
    const u32 token = unit % ROWS, local = unit / ROWS * 4;
    if (token >= count) continue;
    const float* from = partial + (local + lane / 16 * 2) * p.split * STRIDE + token * 16 + lane % 16;
    const float gate = team_sum(from, p.split, STRIDE);
    put_code(out, out_row + token, (first + local) * 8 + lane, quick_gelu(gate) * team_sum(from + p.split * STRIDE, p.split, STRIDE));
  }
}

// A block's share of the work: warps in teams, and a run of M-tiles.
struct Share {
  u32 lane, warp, team, of_team, a_block, begin, end;

  __device__ __forceinline__ Share(const Params& p, u32 bucket) {
    lane = threadIdx.x % WARP;
    warp = threadIdx.x / WARP;
    team = warp * p.team_of >> 16;
    of_team = warp - team * p.split;
    a_block = p.a_block[bucket];
    begin = blockIdx.x * a_block;
    end = min(begin + a_block, p.m_tiles);
    if (ALONE && bucket == 0) {
      const u32 full = p.alone & 0xffff, fewer = p.alone >> 16;
      begin -= (blockIdx.x - min(blockIdx.x, full)) * fewer;
      end = begin + a_block - (blockIdx.x < full ? 0 : fewer);
    }
  }
};

template <int ROWS>
constexpr u32 BUCKET = ROWS == 1 ? 0 : ROWS == 2 ? 1 : ROWS == 4 ? 2 : 3;

// Shared memory behind the rings: partial sums, then the input.
template <int ROWS>
struct Layout {
  u32 batch, half;
  float* partial;
  Input in;

  __device__ __forceinline__ Layout(const Params& p, const Share& share, u8* shared) {
    batch = min(BATCH<ROWS> * p.teams, share.a_block);
    half = batch * p.split * ROWS * Weights::M_TILE;
    partial = (float*)(shared + blockDim.x / WARP * STAGES<ROWS> * Weights::STAGE_BYTES);
    in.scales = partial + 2 * half;
    in.sums = in.scales + (Weights::QUANTIZED ? p.padded / 32 * ROWS : 0);
    in.values = (u8*)(in.sums + (Weights::HAS_MINS ? p.padded / 32 * ROWS : 0));
    in.stride = Weights::QUANTIZED ? p.padded + 32 : 4 * p.padded;
  }

  // The input from a column on.
  __device__ __forceinline__ Input column(u32 column) const {
    Input own = in;
    own.values += column * in.stride;
    own.scales += column;
    own.sums += column;
    return own;
  }
};

// Multiplies all M-tiles of a block with the input that all its warps have prepared.
template <int ROWS, bool ROUTED>
__device__ __forceinline__ void multiply(const Params& p, const Share& share, const Layout<ROWS>& layout, Stream& stream, u8* ring,
                                         u32 first_row, const u32* slots, u32 count) {
  typename Weights::template LaneOf<ROWS> mine(layout.in, share.lane);
  float* partial = layout.partial;
  u8* from = ring;
  u8* const ring_end = ring + STAGES<ROWS> * Weights::STAGE_BYTES;
  int other_half = int(layout.half);
#pragma unroll 1
  for (u32 first = share.begin; first < share.end; first += layout.batch) {
    const u32 last = min(first + layout.batch, share.end);
#pragma unroll 1
    for (u32 m_tile = first + share.team; m_tile < last; m_tile += p.teams) {
      typename Weights::template Sums<ROWS> sums;
#pragma unroll 1
      for (u32 stage = share.of_team; stage < p.stages; stage += p.split) {
        cp_async_wait<STAGES<ROWS> - 1>();
        __syncwarp();
        Weights::template multiply<ROWS>(sums, from, mine, stage * Weights::STAGE_INPUTS, share.lane);
        __syncwarp();
        stream.fetch(u32(from - ring), !ROUTED && triggers_at_last<ROWS>(p));
        from += Weights::STAGE_BYTES;
        if (from == ring_end) from = ring;
      }
      sums.store(partial + ((m_tile - first) * p.split + share.of_team) * ROWS * Weights::M_TILE, share.lane);
    }
    __syncthreads();
    if constexpr (CODES && !ROUTED) {
      finish_codes<ROWS>(p, partial, first, last - first, first_row, count);
    } else {
      finish<ROWS, ROUTED>(p, partial, first, last - first, first_row, slots, count);
    }
    // The other half of `partial` was read before the last barrier, so it is free.
    partial += other_half;
    other_half = -other_half;
  }
}

template <int ROWS>
__device__ __forceinline__ void gemv(const Params& p) {
  if constexpr (GROUPED) return;
  DYNAMIC_SHARED(shared);
  constexpr u32 SIZE = CLUSTER == 0 ? 1 : ROWS < CLUSTER ? ROWS : CLUSTER, OWN_ROWS = ROWS / SIZE;
#if CLUSTER
  const u32 rank = SIZE > 1 ? cluster_rank() : 0;
  // Nobody writes into a block that has not begun.
  if (SIZE > 1) cluster_arrive();
#else
  const u32 rank = 0;
#endif
  const Share share(p, BUCKET<ROWS>);
  // Rows that do not fit shared memory together have blocks of their own.
  const u32 first_row = blockIdx.y * ROWS;
  const u32 own = rank * OWN_ROWS;
  JOIN(INPUT, _input)<OWN_ROWS, ROWS> prologue;
  const Prologue input = prologue.at_row(p.input, first_row + own, p.columns, p.padded);
  u8* const ring = shared + share.warp * STAGES<ROWS> * Weights::STAGE_BYTES;
  Stream stream(p, ring, share.begin + share.team, share.end, share.of_team, share.lane);
  u32 filled = 0;
  const auto fill_to = [&](u32 stages, bool triggers) {
#pragma unroll 1
    for (; filled < stages; filled++) stream.fetch(filled * Weights::STAGE_BYTES, triggers);
  };
  prologue.begin();
  if (p.pdl & PDL) {
    // The launch before is still running. Time to fetch weights, which depend on nothing.
    fill_to(STAGES_BEFORE<ROWS>, false);
    prologue.load_weights(input, p.columns);
    const bool at_last = triggers_at_last<ROWS>(p);
    if (!at_last && !(p.pdl & LATE_TRIGGER)) griddep_launch_dependents();
    if (!(p.pdl & EARLY_INPUT)) griddep_wait();
    if (!at_last && p.pdl & LATE_TRIGGER) griddep_launch_dependents();
    prologue.load_first(input, p.columns);
  } else {
    prologue.load_first(input, p.columns);
    prologue.load_weights(input, p.columns);
    fill_to(1, false);
  }
  const u32 count = *p.rows.count - min(*p.rows.count, first_row);
  const Layout<ROWS> layout(p, share, shared);
  const u32 own_count = count - min(count, own);
  const bool writes_sum = blockIdx.x / SIZE == 0;
  prologue.template prepare<Weights>(layout.column(own), input, p.columns, p.padded, own_count, writes_sum,
                                      [&] { fill_to(STAGES<ROWS>, triggers_at_last<ROWS>(p)); });
  if (p.pdl & EARLY_INPUT) griddep_wait();
  __syncthreads();
  prologue.end();
#if CLUSTER
  if (SIZE > 1) {
    cluster_wait();
    share_rows<Weights, ROWS, SIZE>(layout.in, rank, p.padded);
    cluster_arrive();
    cluster_wait();
  }
#endif
  multiply<ROWS, false>(p, share, layout, stream, ring, first_row, nullptr, count);
}

template <int ROWS>
__device__ __forceinline__ void routed_gemv(const Params& p) {
  DYNAMIC_SHARED(shared);
  __shared__ u32 slots[ROWS];
  const Share share(p, BUCKET<ROWS>);
  const Layout<ROWS> layout(p, share, shared);
  const u32 slot = blockIdx.y;
  const bool there = p.rows.has(slot / p.top_k);

  JOIN(INPUT, _input)<1, ROWS> prologue;
  u8* const ring = shared + share.warp * STAGES<ROWS> * Weights::STAGE_BYTES;
  Stream stream(p, ring, share.begin + share.team, share.end, share.of_team, share.lane);
  u32 filled = 0, count = 0;
  const auto fill = [&] {
#pragma unroll 1
    for (; filled < STAGES<ROWS>; filled++) stream.fetch(filled * Weights::STAGE_BYTES, false);
  };
  // Prepares a slot's input as a column of the product.
  const auto prepare = [&](u32 slot, u32 column) {
    Prologue input = p.input;
    input.x += u64(p.input_per_expert ? slot : slot / p.top_k) * p.columns;
    prologue.load_first(input, p.columns);
    // The input was asked for first: memory that has much to give delays it.
    if (count) fill();
    prologue.template prepare<Weights>(layout.column(column), input, p.columns, p.padded, 1, false, [] {});
  };
  prologue.load_weights(p.input, p.columns);
  const u32 early = p.pdl & (EARLY_INPUT | EARLY_ROUTE);
  // Waits for the launch before, and finds the matrix and the rows to multiply it with: before that or after.
  const auto settle = [&] {
#pragma unroll 1
    for (u32 pass = 0; pass < 2; pass++) {
      if (there && pass == (early == EARLY_ROUTE ? 0 : 1)) {
        count = gather<ROWS>(p, slot, share.lane, slots);
        stream.start(u64(p.route[u64(slot / p.top_k) * 2 * p.top_k + slot % p.top_k]) * p.matrix_bytes);
        if (count && early) fill();
      }
      if (pass == 1) break;
      if (!(p.pdl & LATE_TRIGGER)) griddep_launch_dependents();
      griddep_wait();
      if (p.pdl & LATE_TRIGGER) griddep_launch_dependents();
    }
  };
  // Rows one after another, the first of them before the route is known where its input is there. One loop: code is fetched
  // from a cold cache.
  bool settled = false;
#pragma unroll 1
  for (u32 m = 0;; m++) {
    if (!settled && (m > 0 || !there || early != EARLY_INPUT)) {
      settle();
      settled = true;
      if (count == 0) return;
    }
    if (settled && m >= count) break;
    __syncthreads();  // slots are known; sums of the row before may still be read
    prepare(m == 0 ? slot : slots[m], m);
  }
  __syncthreads();
  multiply<ROWS, true>(p, share, layout, stream, ring, 0, slots, count);
}

// ---- Experts of many rows ----------------------------------------------------------------------------------------------------

constexpr u32 MAX_EXPERTS = 256, MAX_SLOTS = 512, GROUP_ROWS = 8;

// Slots (row * top_k + place) by expert, and groups of up to eight of one expert. Every block finds them for itself.
struct Groups {
  u32 counts[MAX_EXPERTS];
  u16 starts[MAX_EXPERTS];   // of an expert's slots
  u16 sorted[MAX_SLOTS];     // slots
  u16 routed[MAX_SLOTS];     // a slot's expert
  u16 index[MAX_SLOTS];      // of a slot among its expert's
  u16 expert[MAX_SLOTS];     // of a group
  u16 part[MAX_SLOTS];       // which eight of the expert's slots it has
  u32 number;                // of groups
};

// All threads call it. Every block finds the same.
__device__ __forceinline__ void find_groups(const Params& p, Groups& groups) {
  const u32 slots = *p.rows.count * p.top_k, lane = threadIdx.x % WARP;
  for (u32 slot = threadIdx.x; slot < slots; slot += blockDim.x)
    groups.routed[slot] = u16(p.route[u64(slot / p.top_k) * 2 * p.top_k + slot % p.top_k]);
  for (u32 e = threadIdx.x; e < MAX_EXPERTS; e += blockDim.x) groups.counts[e] = 0;
  __syncthreads();
  if (threadIdx.x < WARP) {
    // In order: 32 slots at a time, each behind those before it that have its expert.
#pragma unroll 1
    for (u32 first = 0; first < slots; first += WARP) {
      const u32 slot = first + lane, expert = slot < slots ? groups.routed[slot] : MAX_EXPERTS;
      const u32 alike = lanes_alike(expert), before = __popc(alike & ((1u << lane) - 1));
      const u32 count = slot < slots ? groups.counts[expert] : 0;
      __syncwarp();
      if (slot < slots) {
        groups.index[slot] = u16(count + before);
        if (before == 0) groups.counts[expert] = count + __popc(alike);
      }
      __syncwarp();
    }
    // A lane has eight experts; both sums at once, the slots' in the upper half.
    constexpr u32 EACH = MAX_EXPERTS / WARP;
    u32 own = 0;
    for (u32 i = 0; i < EACH; i++) {
      const u32 count = groups.counts[threadIdx.x * EACH + i];
      own += count << 16 | (count + GROUP_ROWS - 1) / GROUP_ROWS;
    }
    u32 before = own;
    for (u32 by = 1; by < WARP; by *= 2) {
      const u32 other = __shfl_sync(ALL_LANES, before, (threadIdx.x + WARP - by) % WARP);
      if (threadIdx.x >= by) before += other;
    }
    if (threadIdx.x == WARP - 1) groups.number = before & 0xffff;
    before -= own;
    for (u32 i = 0; i < EACH; i++) {
      const u32 e = threadIdx.x * EACH + i, count = groups.counts[e], parts = (count + GROUP_ROWS - 1) / GROUP_ROWS;
      groups.starts[e] = u16(before >> 16);
      for (u32 part = 0; part < parts; part++) {
        groups.expert[(before & 0xffff) + part] = u16(e);
        groups.part[(before & 0xffff) + part] = u16(part);
      }
      before += count << 16 | parts;
    }
  }
  __syncthreads();
  for (u32 slot = threadIdx.x; slot < slots; slot += blockDim.x) groups.sorted[groups.starts[groups.routed[slot]] + groups.index[slot]] = u16(slot);
  __syncthreads();
}

// Copies a group's prepared rows, two loads at once: registers are short.
template <int ROWS>
__device__ __forceinline__ void copy_rows(const Params& p, const Input& in, const u16* members, u32 count) {
  constexpr u32 AT_ONCE = 2;
  const u32 row_pieces = p.padded / 16, pieces = count * row_pieces, blocks = p.padded / 32;
#pragma unroll 1
  for (u32 first = threadIdx.x; first < pieces; first += AT_ONCE * blockDim.x) {
    uint4 held[AT_ONCE];
    u32 to[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 piece = min(first + i * blockDim.x, pieces - 1), m = piece / row_pieces, at = piece - m * row_pieces;
      const u32 row = members[m] / p.top_k;
      held[i] = *(const uint4*)((const u8*)p.input.x + row / PREPARED_ROWS * prepared_bytes(p.padded) + row % PREPARED_ROWS * p.padded + 16 * at);
      to[i] = m * in.stride + 16 * at;
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) *(uint4*)(in.values + to[i]) = held[i];
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; i < count * blocks; i += blockDim.x) {
    const u32 m = i / blocks, block = i - m * blocks, row = members[m] / p.top_k;
    const u32 at = row / PREPARED_ROWS * prepared_bytes(p.padded) / 4 + block * PREPARED_ROWS + row % PREPARED_ROWS;
    in.scales[block * ROWS + m] = p.input.weight[at];
    if (Weights::HAS_MINS) in.sums[block * ROWS + m] = p.input.following_weight[at];
  }
}

// Prepares a group's rows, or copies them, while the first weights are on their way; and multiplies a block's part of the group's expert.
template <int ROWS>
__device__ __forceinline__ void multiply_group(const Params& p, const Share& share, u32 expert, const u16* members, u32* slots, u32 count,
                                               u8* shared) {
  const Layout<ROWS> layout(p, share, shared);
  u8* const ring = shared + share.warp * RING * Weights::STAGE_BYTES;
  Stream stream(p, ring, share.begin + share.team, share.end, share.of_team, share.lane);
  stream.start(u64(expert) * p.matrix_bytes);
#pragma unroll 1
  for (u32 filled = 0; filled < RING; filled++) stream.fetch(filled * Weights::STAGE_BYTES, false);
  // A route may be there before the rows.
  if (p.pdl & EARLY_ROUTE) griddep_wait();
  if (threadIdx.x < count) slots[threadIdx.x] = members[threadIdx.x];
  if constexpr (READY) {
    copy_rows<ROWS>(p, layout.in, members, count);
  } else {
#pragma unroll 1
    for (u32 m = 0; m < count; m++) {
      PlainInput<1, ROWS> row;
      Prologue input = p.input;
      input.x += u64(members[m]) * p.columns;
      row.load_first(input, p.columns);
      row.template prepare<Weights>(layout.column(m), input, p.columns, p.padded, 1, false, [] {});
    }
  }
  __syncthreads();
  multiply<ROWS, true>(p, share, layout, stream, ring, 0, slots, count);
  // Before the next group: inputs, slots and sums are read.
  __syncthreads();
}

__device__ __forceinline__ void grouped_gemv(const Params& p) {
  DYNAMIC_SHARED(shared);
  __shared__ Groups groups;
  __shared__ u32 slots[GROUP_ROWS];
  if (!(p.pdl & LATE_TRIGGER)) griddep_launch_dependents();
  if (!(p.pdl & EARLY_ROUTE)) griddep_wait();
  if (p.pdl & LATE_TRIGGER) griddep_launch_dependents();
  find_groups(p, groups);
  // A run of granules, over all groups. What is computed again for each part would take registers that products need.
  const auto run_to = [&](u32 block) { return groups.number * (p.m_tiles / p.granule) * block / gridDim.x; };
  Share share(p, 0);
  share.a_block = p.m_tiles;
#pragma unroll 1
  for (u32 at = run_to(blockIdx.x); at < run_to(blockIdx.x + 1);) {
    const u32 granules = p.m_tiles / p.granule, group = at / granules, first = group * granules;
    share.begin = (at - first) * p.granule;
    at = min(first + granules, run_to(blockIdx.x + 1));
    share.end = (at - first) * p.granule;
    const u32 expert = groups.expert[group], part = groups.part[group] * GROUP_ROWS;
    const u32 count = min(groups.counts[expert] - part, GROUP_ROWS);
    const u16* const members = groups.sorted + groups.starts[expert] + part;
    // Few rows leave room for the sums of more M-tiles, and so for fewer barriers.
    if (count <= 2) {
      multiply_group<2>(p, share, expert, members, slots, count, shared);
    } else {
      multiply_group<8>(p, share, expert, members, slots, count, shared);
    }
  }
  // When this launch is over, so is the one before, also for blocks without work.
  if (p.pdl & EARLY_ROUTE) griddep_wait();
}

// Experts are packed, and prepare their inputs themselves; other modules have no code for them.
template <int ROWS>
__device__ __forceinline__ void routed(const Params& p) {
  if constexpr (Weights::QUANTIZED && !READY && !GROUPED) routed_gemv<ROWS>(p);
}

// Mirrors `registers` in src/kernel/linear/gemv.rs: 96 let two blocks of 10 warps share a multiprocessor.
constexpr int FEW_REGISTERS = 96, REGISTERS = Weights::QUANTIZED && (CLUSTER || READY) ? 96 : 128;
constexpr int ROUTED_REGISTERS = Weights::QUANTIZED ? 96 : 128;

extern "C" __global__ void __maxnreg__(FEW_REGISTERS) gemv_1(const Params p) { gemv<1>(p); }
extern "C" __global__ void __maxnreg__(REGISTERS) gemv_2(const Params p) { gemv<2>(p); }
extern "C" __global__ void __maxnreg__(REGISTERS) gemv_4(const Params p) { gemv<4>(p); }
extern "C" __global__ void __maxnreg__(REGISTERS) gemv_8(const Params p) { gemv<8>(p); }
extern "C" __global__ void __maxnreg__(ROUTED_REGISTERS) gemv_routed_1(const Params p) { routed<1>(p); }
extern "C" __global__ void __maxnreg__(ROUTED_REGISTERS) gemv_routed_2(const Params p) { routed<2>(p); }
extern "C" __global__ void __maxnreg__(ROUTED_REGISTERS) gemv_routed_4(const Params p) { routed<4>(p); }
extern "C" __global__ void __maxnreg__(ROUTED_REGISTERS) gemv_routed_8(const Params p) { routed<8>(p); }
// Registers as `GroupedSize` in src/kernel/linear/gemv/shape.rs has them, which decides how many blocks share a multiprocessor.
extern "C" __global__ void __maxnreg__(GROUPED_REGISTERS) gemv_grouped(const Params p) {
  if constexpr (GROUPED) grouped_gemv(p);
}
