//! Keys and values in pages, as F16 or Q8_0.
//!
//! A page of a slot holds, head after head, the keys and then the values, in layouts that let attention run without adding
//! across lanes. As F16, keys are `[head_dim, tokens]` and values `[tokens, width]`, where `width` is the head size rounded up
//! to whole vectors. As Q8_0, both are cut into groups of 32 dimensions, each a [`Block`] with the scales beside the codes.

use carat_model::{
    backend::{Batch, KvGroup, KvType, PAGE_TOKENS, PerGroup},
    plan::SlotSpec,
};

use super::workers::Workers;
use crate::{aligned::Aligned, kernel::table::Kernels, simd::LANES};

/// Sixteen F16, or thirty-two codes.
pub(crate) type Row = [u8; 2 * LANES];

/// A group of dimensions of all tokens of a page: codes, for keys `[dimensions, tokens]` and for values `[tokens, dimensions]`,
/// then one scale a token, in F16.
pub(crate) type Block = [Row; GROUP + SCALE_ROWS];

/// Dimensions of a block.
pub(crate) const GROUP: usize = KvType::GROUP;
const SCALE_ROWS: usize = PAGE_TOKENS / LANES;

const _: () = assert!(
    GROUP == PAGE_TOKENS && GROUP == size_of::<Row>(),
    "a block is square, so that keys and values have the same"
);

/// Keys or values of one head in one page.
#[derive(Clone, Copy)]
pub(crate) enum Cells<'a> {
    Halves(&'a [Row]),
    Blocks(&'a [Block]),
}

impl Cells<'_> {
    fn new(kv: KvType, bytes: &[u8]) -> Cells<'_> {
        let (rows, _) = bytes.as_chunks();
        match kv {
            KvType::F16 => Cells::Halves(rows),
            KvType::Q8_0 => Cells::Blocks(rows.as_chunks().0),
        }
    }
}

/// The cache of one slot.
pub(crate) struct Slot {
    pub(crate) spec: SlotSpec,
    kv: KvType,
    /// Elements of a value row.
    pub(crate) width: usize,
    pages: Aligned<u8>,
}

impl Slot {
    /// Memory comes from the system untouched, so pages cost nothing until they are written.
    pub(crate) fn new(spec: &SlotSpec, kv: KvType, pages: usize) -> Slot {
        Slot {
            spec: spec.clone(),
            kv,
            width: width(spec, kv),
            pages: Aligned::new(pages * page_bytes(spec, kv)),
        }
    }

    fn key_bytes(&self) -> usize {
        PAGE_TOKENS * self.kv.head_bytes(self.spec.head_dim)
    }

    fn head_bytes(&self) -> usize {
        self.key_bytes() + PAGE_TOKENS * self.kv.head_bytes(self.width)
    }

    /// Keys and values of one head in one page.
    pub(crate) fn head(&self, page: usize, kv_head: usize) -> (Cells<'_>, Cells<'_>) {
        let start = (page * self.spec.kv_heads + kv_head) * self.head_bytes();
        let head = &self.pages[start..start + self.head_bytes()];
        let (keys, values) = head.split_at(self.key_bytes());
        (Cells::new(self.kv, keys), Cells::new(self.kv, values))
    }

    /// Stores rows `[rows, kv_heads * head_dim]` where `writes` says.
    pub(crate) fn store(&mut self, workers: &Workers, writes: &Writes, k: &[f32], v: &[f32]) {
        let (kv, head_dim) = (self.kv, self.spec.head_dim);
        let (key_bytes, head_bytes) = (self.key_bytes(), self.head_bytes());
        let columns = self.spec.kv_heads * head_dim;
        let kernels = workers.kernels;
        let store = |item: usize, page: &mut [u8]| {
            let write = &writes.rows[item];
            for (h, head) in page.chunks_exact_mut(head_bytes).enumerate() {
                let (keys, values) = head.split_at_mut(key_bytes);
                for token in 0..write.tokens {
                    let place = write.first_token + token;
                    let start = (write.first_row + token) * columns + h * head_dim;
                    let (k, v) = (&k[start..start + head_dim], &v[start..start + head_dim]);
                    match kv {
                        KvType::F16 => store_halves(kernels, place, (k, v), (keys, values)),
                        KvType::Q8_0 => store_codes(kernels, place, (k, v), (keys, values)),
                    }
                }
            }
        };
        workers.pool.for_each_chosen_chunk(
            &mut self.pages,
            page_bytes(&self.spec, kv),
            &writes.pages,
            store,
        );
    }
}

/// Stores one token of one head.
fn store_halves(
    kernels: &Kernels,
    place: usize,
    (k, v): (&[f32], &[f32]),
    (keys, values): (&mut [u8], &mut [u8]),
) {
    let (rows, _) = values.as_chunks_mut::<{ size_of::<Row>() }>();
    let token_rows = rows.len() / PAGE_TOKENS;
    kernels.to_half(v, &mut rows[place * token_rows..][..token_rows]);
    let (keys, _) = keys.as_chunks_mut::<2>();
    for (k, keys) in k.chunks(LANES).zip(keys.chunks_mut(LANES * PAGE_TOKENS)) {
        let mut row = [[0; size_of::<Row>()]];
        kernels.to_half(k, &mut row);
        let column = keys[place..].iter_mut().step_by(PAGE_TOKENS);
        for (key, half) in column.zip(row[0].as_chunks().0) {
            *key = *half;
        }
    }
}

/// The same in blocks.
fn store_codes(
    kernels: &Kernels,
    place: usize,
    (k, v): (&[f32], &[f32]),
    (keys, values): (&mut [u8], &mut [u8]),
) {
    let set_scale = |block: &mut Block, scale: [u8; 2]| {
        block[GROUP + place / LANES].as_chunks_mut().0[place % LANES] = scale;
    };
    for (v, block) in v.chunks(GROUP).zip(blocks_mut(values)) {
        let scale = kernels.to_codes(v, &mut block[place]);
        set_scale(block, scale);
    }
    for (k, block) in k.chunks(GROUP).zip(blocks_mut(keys)) {
        let mut codes = [0; GROUP];
        let scale = kernels.to_codes(k, &mut codes);
        set_scale(block, scale);
        for (row, code) in block.iter_mut().zip(codes) {
            row[place] = code;
        }
    }
}

fn blocks_mut(bytes: &mut [u8]) -> &mut [Block] {
    bytes.as_chunks_mut().0.as_chunks_mut().0
}

/// Elements of a value row: whole vectors, or whole blocks.
fn width(spec: &SlotSpec, kv: KvType) -> usize {
    spec.head_dim.next_multiple_of(match kv {
        KvType::F16 => LANES,
        KvType::Q8_0 => GROUP,
    })
}

/// Bytes of one page of a slot.
pub(crate) fn page_bytes(spec: &SlotSpec, kv: KvType) -> usize {
    let head_bytes = kv.head_bytes(spec.head_dim) + kv.head_bytes(width(spec, kv));
    spec.kv_heads * head_bytes * PAGE_TOKENS
}

/// Where the rows of a batch go in one group of slots, in order of pages.
#[derive(Default)]
pub(crate) struct Writes {
    pages: Vec<usize>,
    rows: Vec<PageRows>,
}

/// Consecutive rows that go to one page.
#[derive(Clone, Copy)]
struct PageRows {
    first_row: usize,
    first_token: usize,
    tokens: usize,
}

/// Sorts the rows of a batch by the pages they are stored in, for each group that the plan uses.
pub(crate) fn writes(batch: &Batch<'_>, uses: impl Fn(KvGroup) -> bool) -> PerGroup<Writes> {
    let mut all = PerGroup::default();
    for group in KvGroup::ALL.into_iter().filter(|group| uses(*group)) {
        let mut writes: Vec<(usize, PageRows)> = Vec::new();
        for run in batch.runs {
            let pages = run.pages.get(group);
            let (mut row, mut position) = (run.rows.start, run.position);
            while row < run.rows.end {
                let first_token = position % PAGE_TOKENS;
                let tokens = (PAGE_TOKENS - first_token).min(run.rows.end - row);
                let rows = PageRows {
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
        let (pages, rows) = writes.into_iter().unzip();
        *all.get_mut(group) = Writes { pages, rows };
    }
    all
}
