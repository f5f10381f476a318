//! The paged KV cache of one slot: where a batch's keys and values go, and their encoding on the way.
//!
//! A page holds, head after head, the keys and then the values, in the layouts of [`carat_cpu_kernels::kv_page`]; values alone where
//! keys follow from them ([`carat_cpu_kernels::tied_keys`]).

use carat_model::{
    backend::{Batch, KvGroup, KvType, PAGE_TOKENS, PerGroup},
    plan::{Plan, SlotSpec},
    weights::Weights,
};

use super::workers::Workers;
use carat_cpu_kernels::{
    aligned::Aligned,
    kv_page::{GROUP, PageHead, PageRow, Q8Block},
    simd::LANES,
    table::Kernels,
    tied_keys::TiedKeys,
};

/// The KV cache of one slot.
pub(crate) struct PagedKv {
    pub(crate) spec: SlotSpec,
    kv: KvType,
    /// Elements of a value row.
    pub(crate) width: usize,
    /// What keys are made from values with, where there are no others.
    pub(crate) tied: Option<TiedKeys>,
    pages: Aligned<u8>,
}

impl PagedKv {
    /// Memory comes from the system untouched, so pages cost nothing until they are written.
    pub(crate) fn new(
        spec: &SlotSpec,
        kv: KvType,
        tied: Option<TiedKeys>,
        pages: usize,
    ) -> PagedKv {
        PagedKv {
            spec: spec.clone(),
            kv,
            width: width(spec, kv),
            pages: Aligned::new(pages * page_bytes(spec, kv, tied.is_some())),
            tied,
        }
    }

    fn key_bytes(&self) -> usize {
        match self.tied {
            None => PAGE_TOKENS * self.kv.head_bytes(self.spec.head_dim),
            Some(_) => 0,
        }
    }

    /// Bytes of one page.
    pub(crate) fn page_bytes(&self) -> usize {
        page_bytes(&self.spec, self.kv, self.tied.is_some())
    }

    fn head_bytes(&self) -> usize {
        self.key_bytes() + PAGE_TOKENS * self.kv.head_bytes(self.width)
    }

    /// Keys and values of one head in one page, which may be one of those that all sliding slots have together. Where keys follow from
    /// values, there are none.
    pub(crate) fn head<'a>(
        &'a self,
        chunk_pages: &'a [u8],
        page: usize,
        kv_head: usize,
    ) -> (PageHead<'a>, PageHead<'a>) {
        let start = (page * self.spec.kv_heads + kv_head) * self.head_bytes();
        let (pages, start) = match start.checked_sub(self.pages.len()) {
            None => (&*self.pages, start),
            Some(start) => (chunk_pages, start),
        };
        let head = &pages[start..start + self.head_bytes()];
        let (keys, values) = head.split_at(self.key_bytes());
        (PageHead::new(self.kv, keys), PageHead::new(self.kv, values))
    }

    /// All of one page.
    pub(crate) fn page_mut(&mut self, page: usize) -> &mut [u8] {
        let bytes = self.page_bytes();
        &mut self.pages[page * bytes..][..bytes]
    }

    /// Stores rows `[rows, kv_heads * head_dim]` where `writes` says.
    pub(crate) fn store(
        &mut self,
        chunk_pages: &mut [u8],
        workers: &Workers,
        writes: &KvWrites,
        (k, v): (&[f32], &[f32]),
    ) {
        let (kv, head_dim) = (self.kv, self.spec.head_dim);
        let (key_bytes, head_bytes) = (self.key_bytes(), self.head_bytes());
        let columns = self.spec.kv_heads * head_dim;
        let kernels = workers.kernels;
        let store = |item: usize, page: &mut [u8]| {
            let write = &writes.rows[item];
            for (h, head) in page.chunks_exact_mut(head_bytes).enumerate() {
                let (keys, values) = head.split_at_mut(key_bytes);
                for i in 0..write.tokens {
                    let token = write.first_token + i;
                    let start = (write.first_row + i) * columns + h * head_dim;
                    let (k, v) = (&k[start..start + head_dim], &v[start..start + head_dim]);
                    match kv {
                        KvType::F16 => store_f16(kernels, token, (k, v), (keys, values)),
                        KvType::Q8_0 => store_q8_0(kernels, token, (k, v), (keys, values)),
                    }
                }
            }
        };
        let bytes = self.page_bytes();
        let pool = &workers.pool;
        pool.for_each_chosen_chunk(&mut self.pages, bytes, &writes.pages, store);
        let own = writes.pages.len();
        let store = |item: usize, page: &mut [u8]| store(own + item, page);
        pool.for_each_chosen_chunk(chunk_pages, bytes, &writes.chunk_pages, store);
    }
}

/// Stores one token of one head as F16. Where there is no place for keys, values alone.
fn store_f16(
    kernels: &Kernels,
    token: usize,
    (k, v): (&[f32], &[f32]),
    (keys, values): (&mut [u8], &mut [u8]),
) {
    let (rows, _) = values.as_chunks_mut::<{ size_of::<PageRow>() }>();
    let token_rows = rows.len() / PAGE_TOKENS;
    kernels.to_f16(v, &mut rows[token * token_rows..][..token_rows]);
    let (keys, _) = keys.as_chunks_mut::<2>();
    if keys.is_empty() {
        return;
    }
    for (k, keys) in k.chunks(LANES).zip(keys.chunks_mut(LANES * PAGE_TOKENS)) {
        let mut row = [[0; size_of::<PageRow>()]];
        kernels.to_f16(k, &mut row);
        let column = keys[token..].iter_mut().step_by(PAGE_TOKENS);
        for (key, k) in column.zip(row[0].as_chunks().0) {
            *key = *k;
        }
    }
}

/// The same as Q8_0.
fn store_q8_0(
    kernels: &Kernels,
    token: usize,
    (k, v): (&[f32], &[f32]),
    (keys, values): (&mut [u8], &mut [u8]),
) {
    let set_scale = |block: &mut Q8Block, scale: [u8; 2]| {
        block[GROUP + token / LANES].as_chunks_mut().0[token % LANES] = scale;
    };
    for (v, block) in v.chunks(GROUP).zip(blocks_mut(values)) {
        let scale = kernels.to_q8_0(v, &mut block[token]);
        set_scale(block, scale);
    }
    for (k, block) in k.chunks(GROUP).zip(blocks_mut(keys)) {
        let mut codes = [0; GROUP];
        let scale = kernels.to_q8_0(k, &mut codes);
        set_scale(block, scale);
        for (row, code) in block.iter_mut().zip(codes) {
            row[token] = code;
        }
    }
}

fn blocks_mut(bytes: &mut [u8]) -> &mut [Q8Block] {
    bytes.as_chunks_mut().0.as_chunks_mut().0
}

/// Elements of a value row: whole vectors, or whole blocks.
fn width(spec: &SlotSpec, kv: KvType) -> usize {
    spec.head_dim.next_multiple_of(match kv {
        KvType::F16 => LANES,
        KvType::Q8_0 => GROUP,
    })
}

/// Bytes of one page of a slot; `tied` is whether it holds values alone.
pub(crate) fn page_bytes(spec: &SlotSpec, kv: KvType, tied: bool) -> usize {
    let keys = if tied {
        0
    } else {
        kv.head_bytes(spec.head_dim)
    };
    spec.kv_heads * (keys + kv.head_bytes(width(spec, kv))) * PAGE_TOKENS
}

/// What the keys of a plan's slots are made from values with, where they are.
pub(crate) fn tied_keys(plan: &Plan, weights: &Weights) -> Vec<Option<TiedKeys>> {
    let mut slots = vec![None; plan.slots.len()];
    for (slot, tied) in plan.tied_keys() {
        let rope = plan.rope(tied.rope);
        let matrix = weights.matrix(tied.weight);
        let mut weight = vec![0.0; matrix.columns];
        (matrix.quant).dequantize(weights.row(tied.weight, 0, 0), &mut weight);
        let turning = &rope.frequencies[..rope.turning_pairs()];
        slots[slot.0 as usize] = Some(TiedKeys::new(&weight, turning));
    }
    slots
}

/// Bytes of one page that all sliding slots of a plan have together.
pub(crate) fn chunk_page_bytes(plan: &Plan, kv: PerGroup<KvType>) -> usize {
    let mut slots = plan.own_slots(KvGroup::Sliding);
    slots
        .next()
        .map_or(0, |spec| page_bytes(spec, kv.sliding, false))
}

/// Pages that the rows of a batch go to in one group of slots, in order of pages.
#[derive(Default)]
pub(crate) struct KvWrites {
    pages: Vec<usize>,
    /// Counted from the first of them.
    chunk_pages: Vec<usize>,
    /// Of pages, then of chunk pages.
    rows: Vec<PageWrite>,
}

/// Consecutive rows that go to one page.
#[derive(Clone, Copy)]
struct PageWrite {
    first_row: usize,
    first_token: usize,
    tokens: usize,
}

/// Sorts the rows of a batch by the pages they are stored in, for each group that the plan uses.
pub(crate) fn writes(
    batch: &Batch<'_>,
    uses: impl Fn(KvGroup) -> bool,
    held: PerGroup<usize>,
) -> PerGroup<KvWrites> {
    let mut all = PerGroup::default();
    for group in KvGroup::ALL.into_iter().filter(|group| uses(*group)) {
        let mut writes: Vec<(usize, PageWrite)> = Vec::new();
        for run in batch.runs {
            let pages = run.pages.get(group);
            let (mut row, mut position) = (run.rows.start, run.position);
            while row < run.rows.end {
                let first_token = position % PAGE_TOKENS;
                let tokens = (PAGE_TOKENS - first_token).min(run.rows.end - row);
                let rows = PageWrite {
                    first_row: row,
                    first_token,
                    tokens,
                };
                writes.push((pages[position / PAGE_TOKENS].0 as usize, rows));
                row += tokens;
                position += tokens;
            }
        }
        writes.sort_unstable_by_key(|(page, _)| *page);
        let (mut pages, rows): (Vec<usize>, Vec<PageWrite>) = writes.into_iter().unzip();
        let held = *held.get(group);
        let own = pages.partition_point(|page| *page < held);
        let chunk_pages = pages.split_off(own).into_iter().map(|page| page - held);
        *all.get_mut(group) = KvWrites {
            pages,
            chunk_pages: chunk_pages.collect(),
            rows,
        };
    }
    all
}
