// The prologue of a GEMV of several rows, done once for all its blocks: nothing, a norm, or the residual add with the norm that
// follows (INPUT is plain or normed); then int8 codes in blocks of 32, and with SUMS what each block's codes sum up to.
//
// Grid: (rows, parts). A normed row is one block's, which has as many threads as the GEMV's, so that sums are those it has where it
// does its prologue itself. A plain row is cut into parts of PART columns.
//
// Bytes: a row once (twice with a residual, and its sum once), a quarter of it out.
// Requires columns % 8 == 0, padded % 32 == 0; of norms, columns <= 12 * threads; no output that is also an input.
#include "lib/batch.cuh"
#include "lib/gemv_input.cuh"

struct Params {
  Prologue input;
  u8* codes;      // [PREPARED_ROWS, padded]
  float* scales;  // [blocks of 32, PREPARED_ROWS]
  float* sums;    // the same
  u32 columns;
  u32 padded;
  Rows rows;
  u32 early;  // whether its input was there before the launch before it started
  u32 reserved;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/linear/prepare_rows.rs differs");

struct Codes {
  static constexpr bool QUANTIZED = true, HAS_MINS = SUMS;
};
typedef PlainInput<1, PREPARED_ROWS> plain_input;
typedef NormedInput<1, PREPARED_ROWS> normed_input;

extern "C" __global__ void prepare_rows(const Params p) {
  const u32 row = blockIdx.x, first = blockIdx.y * PART, columns = p.columns - min(p.columns, first);
  const u32 padded = gridDim.y > 1 ? min(u32(PART), p.padded - first) : p.padded;
  Prologue input = from_row(p.input, row, p.columns);
  input.x += first;
  // Past eight rows, eight after the other.
  const u32 group = row / PREPARED_ROWS, of_group = row % PREPARED_ROWS;
  const u64 group_at = u64(group) * prepared_bytes(p.padded);
  const u32 at = first / 32 * PREPARED_ROWS + of_group;
  const Input out = {p.codes + group_at + of_group * p.padded + first, p.scales + group_at / 4 + at, p.sums + group_at / 4 + at, p.padded};
  JOIN(INPUT, _input) prologue;
  prologue.load_weights(input, columns);
  if (!p.early) griddep_wait();
  if (p.rows.has(row)) {
    prologue.load_first(input, columns);
    prologue.prepare<Codes>(out, input, columns, padded, 1, true, [] { griddep_launch_dependents(); });
  }
  // When this launch is over, so is the one before.
  if (p.early) griddep_wait();
}
