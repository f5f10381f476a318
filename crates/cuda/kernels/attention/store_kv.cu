// Rounds keys and values to f16 and writes them to their position's page.
//
// Grid: (rows, blocks of 256 columns), one thread per column of both.
// Bytes per row: 8 * columns in, 4 * columns out.
// Requires that no two rows of a batch share a cell: each run belongs to another sequence, and pages being written are not
// shared.
#include "lib/kv.cuh"

struct Params {
  Rows rows;
  RowRefs row_refs;
  Slot slot;
  const float* k;
  const float* v;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "src/kernel/attention/store_kv.rs differs");

extern "C" __global__ void store_kv(const Params p) {
  const u32 r = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  const u32 columns = p.slot.kv_heads * p.slot.head_dim;
  if (!p.rows.has(r) || column >= columns) return;
  const u32 row = p.rows.index[r];
  const u32 head = column / p.slot.head_dim, element = column % p.slot.head_dim;
  const u64 to = p.slot.cell(p.row_refs.run[row], p.row_refs.position[row], head) + element;
  const u64 from = u64(r) * columns + column;
  p.slot.keys[to] = f32_to_f16(p.k[from]);
  p.slot.values[to] = f32_to_f16(p.v[from]);
}
