// out[r] = scale * table[token[r]], or the embedding that the row is fed, the table in fragments: an output head that is also the embedding lies on the device once.
//
// Grid: (batch rows, blocks of 256 columns), one thread per value.
// Bytes per row: sectors of all K-blocks of an M-tile in, which is up to eight times a packed row; 4 * columns out.
// An embedding that a row is fed is read where the host left it, in mapped host memory.
// Requires tokens within the table, which `Batch::check` has established.
#include "lib/batch.cuh"
#include "lib/fragment_value.cuh"

struct Params {
  Rows rows;
  const u32* tokens;
  Inputs inputs;
  const u8* table;
  u64 m_tile_bytes;
  float* out;
  u32 columns;
  float scale;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/embed/embed_rows.rs differs");

extern "C" __global__ void embed_fragments(const Params p) {
  const u32 r = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  if (!p.rows.has(r) || column >= p.columns) return;
  const u32 row = p.rows.index[r], token = p.tokens[row];
  const float* const input = p.inputs.row(row, p.columns);
  p.out[u64(r) * p.columns + column] =
      input ? input[column] : mul(fragment_value(p.table, p.m_tile_bytes, token, column), p.scale);
}
