// out[r] = scale * table[token[r]], or the embedding that the row is fed: gathers and dequantizes one table row per batch row.
//
// Grid: (batch rows, blocks of 256 columns), one thread per value.
// Bytes per row: the packed table row in, 4 * columns out. The table may lie in mapped host memory.
// An embedding that a row is fed is read where the host left it, in mapped host memory.
// Requires tokens within the table, which `Batch::check` has established.
#include "lib/batch.cuh"
#include "lib/format.cuh"

struct Params {
  Rows rows;
  const u32* tokens;
  Inputs inputs;
  const u8* table;
  u64 row_bytes;
  float* out;
  u32 columns;
  float scale;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/embed/embed_rows.rs differs");

extern "C" __global__ void embed_rows(const Params p) {
  const u32 r = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  if (!p.rows.has(r) || column >= p.columns) return;
  const u32 row = p.rows.index[r];
  const float* const input = p.inputs.row(row, p.columns);
  const u8* const packed = p.table + u64(p.tokens[row]) * p.row_bytes;
  p.out[u64(r) * p.columns + column] = input ? input[column] : mul(weight_value(packed, column), p.scale);
}
