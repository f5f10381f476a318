// Rounds keys and values to the KV type and writes them to their position's page; values alone where keys follow from them.
//
// Grid: (rows, blocks of 256 columns), one thread per column of both; in Q8_0 heads are padded to whole blocks, so that a warp has
// one of them.
// Bytes per row: 8 * columns in, and out what the KV type takes.
// Requires that no two rows of a batch share a cell: each run belongs to another sequence, and pages being written are not
// shared.
#include "lib/kv.cuh"
#include "lib/reduce.cuh"

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
  if (!p.rows.has(r)) return;
  const u32 row = p.rows.index[r];
  const u32 run = p.row_refs.run[row], position = p.row_refs.position[row], head_dim = p.slot.head_dim;
#if KV_TYPE == KV_Q8_0
  const u32 block = column / KV_BLOCK, blocks = kv_blocks(head_dim);
  const u32 head = block / blocks, element = column - head * blocks * KV_BLOCK;
  if (head >= p.slot.kv_heads) return;
  const u64 from = (u64(r) * p.slot.kv_heads + head) * head_dim + element;
  const auto put = [&](const float* x, u8* to) {
    const float value = element < head_dim ? x[from] : 0;
    const Q8Scale scale(warp_max(fabsf(value)));
    const Q8Page page = p.slot.page_of(to, run, position, head);
    if (element < head_dim) page.codes(position % PAGE_TOKENS)[element] = i8(scale.code(value));
    if (element % KV_BLOCK == 0) page.scales(position % PAGE_TOKENS)[element / KV_BLOCK] = scale.bits;
  };
  if (!p.slot.key_weight) put(p.k, p.slot.keys);
  put(p.v, p.slot.values);
#else
  const u32 columns = p.slot.kv_heads * head_dim;
  if (column >= columns) return;
  const u64 to = p.slot.cell(run, position, column / head_dim) + column % head_dim;
  const u64 from = u64(r) * columns + column;
  if (!p.slot.key_weight) p.slot.keys[to] = f32_to_f16(p.k[from]);
  p.slot.values[to] = f32_to_f16(p.v[from]);
#endif
}
