//! Pages of keys or values on the host as the kernels lay them out, for tests: written and read one cell at a time.

use carat_model::kv::{KvType, PAGE_TOKENS};
use half::f16;

use crate::{
    device::Address,
    kernel::{SlotAt, TablesAt, TiedAt},
};

/// An f16 that is not a number: what must not be read.
const POISON: u16 = 0x7e00;

/// The first name of a chunk page, far from that of any other.
const CHUNK_PAGES: u32 = 1 << 20;

/// A slot whose tables have [`names`]: chunk pages lie among the others.
pub(crate) fn slot_at(
    (keys, values): (Address, Address),
    tables: TablesAt,
    (kv_heads, head_dim): (usize, usize),
) -> SlotAt {
    SlotAt {
        keys,
        values,
        tables,
        kv_heads: kv_heads as u32,
        head_dim: head_dim as u32,
        chunk_pages: CHUNK_PAGES,
        chunk_shift: CHUNK_PAGES.wrapping_neg(),
        tied: TiedAt::NONE,
    }
}

/// Names of pages as tables have them, every other one that of a chunk page.
pub(crate) fn names(pages: &[u32]) -> Vec<u32> {
    let name = |page: &u32| match page % 2 {
        0 => *page,
        _ => page + CHUNK_PAGES,
    };
    pages.iter().map(name).collect()
}

/// Keys or values of one slot.
#[derive(Clone, PartialEq)]
pub(crate) struct HostPages {
    kv: KvType,
    kv_heads: usize,
    head_dim: usize,
    pub(crate) bytes: Vec<u8>,
}

impl HostPages {
    /// Pages of cells that are not numbers.
    pub(crate) fn poisoned(kv: KvType, pages: usize, kv_heads: usize, head_dim: usize) -> Self {
        let cells = pages * kv_heads * PAGE_TOKENS;
        let mut all = HostPages {
            kv,
            kv_heads,
            head_dim,
            bytes: vec![0; cells * kv.head_bytes(head_dim)],
        };
        for cell in 0..cells {
            let (head, row) = (cell / PAGE_TOKENS, cell % PAGE_TOKENS);
            all.poison((head / kv_heads, head % kv_heads, row));
        }
        all
    }

    /// A cell, by page, head and row, as F16: whole; as Q8_0: its codes, and its scales apart from them.
    fn places(&self, (page, head, row): (usize, usize, usize)) -> (usize, usize) {
        let start = (page * self.kv_heads + head) * PAGE_TOKENS * self.kv.head_bytes(self.head_dim);
        let blocks = self.blocks();
        match self.kv {
            KvType::F16 => (start + row * 2 * self.head_dim, 0),
            KvType::Q8_0 => (
                start + row * blocks * KvType::GROUP,
                start + PAGE_TOKENS * blocks * KvType::GROUP + row * blocks * 2,
            ),
        }
    }

    fn blocks(&self) -> usize {
        self.head_dim.div_ceil(KvType::GROUP)
    }

    fn put_u16(&mut self, at: usize, bits: u16) {
        self.bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }

    fn f16_at(&self, at: usize) -> f64 {
        f16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]).to_f64()
    }

    pub(crate) fn poison(&mut self, cell: (usize, usize, usize)) {
        let (start, scales) = self.places(cell);
        match self.kv {
            KvType::F16 => (0..self.head_dim).for_each(|i| self.put_u16(start + 2 * i, POISON)),
            KvType::Q8_0 => {
                self.bytes[start..][..self.head_dim].fill(127);
                (0..self.blocks()).for_each(|i| self.put_u16(scales + 2 * i, POISON));
            }
        }
    }

    /// Rounds values into a cell.
    pub(crate) fn put(&mut self, cell: (usize, usize, usize), values: &[f32]) {
        let (start, scales) = self.places(cell);
        match self.kv {
            KvType::F16 => {
                for (i, value) in values.iter().enumerate() {
                    self.put_u16(start + 2 * i, f16::from_f32(*value).to_bits());
                }
            }
            KvType::Q8_0 => {
                for (b, block) in values.chunks(KvType::GROUP).enumerate() {
                    let (scale, codes) = q8_0(block);
                    self.put_u16(scales + 2 * b, scale.to_bits());
                    for (i, code) in codes.into_iter().enumerate() {
                        self.bytes[start + b * KvType::GROUP + i] = code.cast_unsigned();
                    }
                }
            }
        }
    }

    /// The exact values of a cell.
    pub(crate) fn get(&self, cell: (usize, usize, usize)) -> Vec<f64> {
        let (start, scales) = self.places(cell);
        let value = |i: usize| match self.kv {
            KvType::F16 => self.f16_at(start + 2 * i),
            KvType::Q8_0 => {
                let code = f64::from(self.bytes[start + i].cast_signed());
                code * self.f16_at(scales + 2 * (i / KvType::GROUP))
            }
        };
        (0..self.head_dim).map(value).collect()
    }
}

/// Values as a KV type keeps them.
pub(crate) fn rounded(kv: KvType, values: &[f64]) -> Vec<f64> {
    let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
    let mut pages = HostPages::poisoned(kv, 1, 1, values.len());
    pages.put((0, 0, 0), &values);
    pages.get((0, 0, 0))
}

/// The scale and codes of a block, as the CPU backend defines them.
fn q8_0(block: &[f32]) -> (f16, Vec<i8>) {
    let largest = block.iter().fold(0f32, |most, x| most.max(x.abs()));
    let scale = f16::from_f32(largest / 127.0);
    let inverse = match scale.to_f32() {
        0.0 => 0.0,
        scale => 1.0 / scale,
    };
    let code = |x: &f32| (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
    (scale, block.iter().map(code).collect())
}
