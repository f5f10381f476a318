//! The product of weight rows, unpacked as they are read, with columns of activations.
//!
//! A tile of sixteen weight rows by 64 codes meets a tile of columns and gives sixteen by sixteen exact integers. There is one
//! body per format and column layout. One that formats share once they are unpacked, dispatched per chunk, was a third of the
//! code and 3 to 9 % slower for Q4_0 with weights in the cache.
#![cfg_attr(
    all(not(target_arch = "x86_64"), not(test)),
    expect(dead_code, reason = "no other processor has such tiles yet")
)]

use std::{marker::PhantomData, ops::Range};

use carat_gguf::QuantType;

use super::columns::{ActivationColumns, ColumnLayout, Factors};
use crate::{
    gemm::{
        READ_STREAMS, WeightRows,
        format::{Format, Tail, WithFormat, with_format},
    },
    simd::{Floats, IN_FLIGHT, LANES, Line, Simd, Tile, Tiles, Totals, array},
};

/// Weight rows at a time.
const ROWS: usize = LANES;
/// Sets of columns that share unpacked weights.
const MAX_SETS: usize = 2;

/// Activation rows from which on this is faster than [`crate::gemm::gemv`]: two would leave half of the columns empty.
pub const MIN_ROWS: usize = 3;

/// One number for every column.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([f32; LANES]);

type Square = [Lanes; ROWS];

const ZEROS: Square = [Lanes([0.0; LANES]); ROWS];

/// Memory of one thread: an unpacked chunk of sixteen weight rows, and sums.
pub struct Scratch(Box<ScratchMemory>);

struct ScratchMemory {
    codes: [Tile; 8],
    scales: Square,
    mins: Square,
    totals: [Totals; IN_FLIGHT],
    /// `[sets, products of a chunk]`, each `[weight rows, columns]`. All zero between calls.
    sums: Vec<[Square; LANES]>,
}

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch(Box::new(ScratchMemory {
            codes: [Tile::ZERO; 8],
            scales: ZEROS,
            mins: ZEROS,
            totals: [Totals::ZERO; IN_FLIGHT],
            sums: vec![[ZEROS; LANES]; MAX_SETS],
        }))
    }
}

/// Fills `out`, `[rows of the sets, weights.len()]`.
#[inline(always)]
pub fn gemm_int8<T: Tiles>(
    quant: QuantType,
    weights: WeightRows<'_>,
    columns: &ActivationColumns,
    sets: Range<usize>,
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    assert!(sets.len() <= MAX_SETS, "{} sets are too many", sets.len());
    with_format(
        quant,
        GemmInt8::<T> {
            weights,
            columns,
            sets,
            scratch: &mut scratch.0,
            out,
            level: PhantomData,
        },
    );
}

struct GemmInt8<'a, T> {
    weights: WeightRows<'a>,
    columns: &'a ActivationColumns,
    sets: Range<usize>,
    scratch: &'a mut ScratchMemory,
    out: &'a mut [f32],
    level: PhantomData<T>,
}

impl<T: Tiles> WithFormat for GemmInt8<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<F: Format>(self, format: F) {
        let mut registers = T::take();
        let chunks = self.weights.row_bytes.div_ceil(format.chunk_bytes());
        let count = self.weights.len();
        let sets = &self.columns.sets[self.sets.clone()];
        for first in (0..count).step_by(ROWS) {
            let rows = self.weights.slice(first..count.min(first + ROWS));
            // What is computed for missing rows is nobody's concern.
            let row_bytes: [&[u8]; ROWS] =
                array![[].as_slice(); i => rows.row(i.min(rows.len() - 1))];
            for chunk in 0..chunks {
                unpack::<T, F>(format, self.scratch, &row_bytes, chunk);
                let mut prefetch = Some(Prefetch::new(format, rows, chunk));
                for (index, set) in sets.iter().enumerate() {
                    let product_of_chunk = ChunkProduct {
                        registers: &mut registers,
                        scratch: self.scratch,
                        tiles: &self.columns.tiles[set.tiles.clone()],
                        factors: &self.columns.factors[set.factors.clone()],
                        set: index,
                        chunk,
                        prefetch,
                    };
                    match set.layout.groups {
                        1 => product_of_chunk.add::<F, 1>(),
                        2 => product_of_chunk.add::<F, 2>(),
                        _ => product_of_chunk.add::<F, 4>(),
                    }
                    prefetch = None;
                }
            }
            let mut above = 0;
            for (sums, set) in self.scratch.sums.iter_mut().zip(sets) {
                let outputs = match set.layout.groups {
                    1 => fold::<T::Vectors, 1>(sums),
                    2 => fold::<T::Vectors, 2>(sums),
                    _ => fold::<T::Vectors, 4>(sums),
                };
                let out = &mut self.out[above * count..(above + set.rows) * count];
                for (out, outputs) in out.chunks_exact_mut(count).zip(&outputs) {
                    let out = &mut out[first..first + rows.len()];
                    // A length that the compiler knows makes this one instruction.
                    if let Ok(out) = <&mut [f32; ROWS]>::try_from(&mut *out) {
                        *out = outputs.0;
                    } else {
                        out.copy_from_slice(&outputs.0[..rows.len()]);
                    }
                }
                above += set.rows;
            }
        }
    }
}

/// Unpacks one chunk of sixteen rows.
#[inline(always)]
fn unpack<T: Tiles, F: Format>(
    format: F,
    scratch: &mut ScratchMemory,
    rows: &[&[u8]; ROWS],
    chunk: usize,
) {
    let start = chunk * format.chunk_bytes();
    if start + format.chunk_bytes() <= rows[0].len() {
        for (row, bytes) in rows.iter().enumerate() {
            unpack_row::<T, F>(
                format,
                scratch,
                row,
                &bytes[start..start + format.chunk_bytes()],
            );
        }
    } else {
        for (row, bytes) in rows.iter().enumerate() {
            let tail = Tail::of(format, bytes).expect("a row ends short of a whole chunk");
            unpack_row::<T, F>(format, scratch, row, tail.chunk(format));
        }
    }
}

#[inline(always)]
fn unpack_row<T: Tiles, F: Format>(
    format: F,
    scratch: &mut ScratchMemory,
    row: usize,
    chunk: &[u8],
) {
    let unpacked = format.unpack_signed::<T>(chunk);
    let pieces = unpacked.codes.iter().take(F::GROUP / 4);
    for (codes, tile) in pieces.zip(&mut scratch.codes) {
        T::Vectors::store_bytes(*codes, &mut tile.0[row].0);
    }
    unpacked.scales.store(&mut scratch.scales[row].0);
    if F::MINS {
        unpacked.mins.store(&mut scratch.mins[row].0);
    }
}

/// Weights that are prefetched while others are multiplied: memory would be idle then.
#[derive(Clone, Copy)]
struct Prefetch {
    runs: [*const u8; READ_STREAMS],
    chunk_bytes: usize,
}

impl Prefetch {
    /// As much as a chunk of `rows` has, in those that come next.
    #[inline(always)]
    fn new<F: Format>(format: F, rows: WeightRows<'_>, chunk: usize) -> Prefetch {
        let bytes = ROWS / READ_STREAMS * format.chunk_bytes();
        let runs = rows.runs_after(ROWS);
        Prefetch {
            runs: array![std::ptr::null(); i => runs[i].wrapping_add(chunk * bytes)],
            chunk_bytes: format.chunk_bytes(),
        }
    }

    /// Prefetches the share of one of so many products, the `slot`th of its round: stream after stream, line after line.
    #[inline(always)]
    fn issue<T: Tiles>(self, round: usize, slot: usize, products: usize) {
        let lines = (ROWS * self.chunk_bytes).div_ceil(64 * products);
        for i in slot * lines..(slot + 1) * lines {
            let line = round * lines * IN_FLIGHT / READ_STREAMS + i / READ_STREAMS;
            T::prefetch(self.runs[i % READ_STREAMS].wrapping_add(64 * line));
        }
    }
}

/// The product of an unpacked chunk of sixteen weight rows with a set of columns.
struct ChunkProduct<'a, T> {
    registers: &'a mut T,
    scratch: &'a mut ScratchMemory,
    tiles: &'a [Tile],
    factors: &'a [Factors],
    /// Index of the set, and of its sums.
    set: usize,
    /// Index of the chunk in its row.
    chunk: usize,
    /// With the first set.
    prefetch: Option<Prefetch>,
}

impl<T: Tiles> ChunkProduct<'_, T> {
    /// Adds the products with columns of `J` groups side by side to the sums.
    #[inline(always)]
    fn add<F: Format, const J: usize>(mut self) {
        let products = LANES / J;
        self.start::<F, J>(0, 0);
        self.start::<F, J>(1, 1);
        // Written out, because a register's number is part of an instruction.
        for first in (0..products).step_by(IN_FLIGHT) {
            self.stage::<F, J>(0, first);
            self.stage::<F, J>(1, first + 1);
            self.stage::<F, J>(2, first + 2);
            self.stage::<F, J>(3, first + 3);
        }
        self.add_product::<F, J>(IN_FLIGHT - 1, products - 1);
    }

    /// One stage of the pipeline: a product is stored while the next two are multiplied and the one before is added.
    #[inline(always)]
    fn stage<F: Format, const J: usize>(&mut self, slot: usize, product: usize) {
        self.start::<F, J>((slot + 2) % IN_FLIGHT, product + 2);
        self.registers
            .finish_int8(slot, &mut self.scratch.totals[slot]);
        if product > 0 {
            self.add_product::<F, J>((slot + 3) % IN_FLIGHT, product - 1);
        }
    }

    /// Starts a product, if there is one of that number.
    #[inline(always)]
    fn start<F: Format, const J: usize>(&mut self, slot: usize, product: usize) {
        let layout = ColumnLayout {
            group: F::GROUP,
            groups: J,
        };
        let (products, steps) = (layout.products(), layout.steps());
        if product < products {
            let left = &self.scratch.codes[layout.first_step(product)..][..steps];
            let right = &self.tiles[(self.chunk * products + product) * steps..][..steps];
            self.registers.start_int8(slot, left, right);
        }
    }

    /// Adds one product to its sums.
    #[inline(always)]
    fn add_product<F: Format, const J: usize>(&mut self, slot: usize, product: usize) {
        if let Some(prefetch) = self.prefetch {
            prefetch.issue::<T>(product / IN_FLIGHT, slot, LANES / J);
        }
        let factors = &self.factors[self.chunk * (LANES / J) + product];
        let x_scales = <T::Vectors as Simd>::Floats::load(&factors.scales);
        let x_sums = <T::Vectors as Simd>::Floats::load(&factors.sums);
        let scratch = &mut *self.scratch;
        let totals = &scratch.totals[slot];
        let sums = &mut scratch.sums[self.set][product];
        for (row, sum) in sums.iter_mut().enumerate() {
            let scales = T::repeat::<J>(&scratch.scales[row].0.as_chunks().0[product]);
            let total = T::Vectors::to_floats(T::Vectors::load_ints(&totals.0[row]));
            let mut after = total.mul_add(scales.mul(x_scales), Floats::load(&sum.0));
            if F::MINS {
                let mins = T::repeat::<J>(&scratch.mins[row].0.as_chunks().0[product]);
                after = mins.neg_mul_add(x_sums, after);
            }
            after.store(&mut sum.0);
        }
    }
}

/// Folds the sixteen lanes of every output, in the order of [`Floats::sum`], where `J` lie side by side in a product: sixteen
/// outputs for each row. Leaves zeros, to which the next sums are added.
#[inline(always)]
fn fold<S: Simd, const J: usize>(sums: &mut [Square; LANES]) -> Square {
    // First those that lie in different products, at the same column.
    let mut rows = [Line([0; 64]); LANES];
    for (row, line) in rows.iter_mut().enumerate() {
        let mut lanes = [S::Floats::zero(); LANES];
        for (lane, sums) in lanes.iter_mut().zip(&mut sums[..LANES / J]) {
            *lane = S::Floats::load(&sums[row].0);
            S::Floats::zero().store(&mut sums[row].0);
        }
        fold_lanes::<S>(&mut lanes, LANES / J);
        lanes[0].store_f32_bytes(&mut line.0);
    }
    let mut columns = [Line([0; 64]); LANES];
    S::transpose(&rows, &mut columns);
    let mut lanes: [S::Floats; LANES] =
        array![S::Floats::zero(); i => S::Floats::load_f32_bytes(&columns[i].0)];
    let mut outputs = ZEROS;
    for (lanes, outputs) in lanes.as_chunks_mut::<J>().0.iter_mut().zip(&mut outputs) {
        fold_lanes::<S>(lanes, J);
        lanes[0].store(&mut outputs.0);
    }
    outputs
}

/// Adds up the first `count` to the first one, halves to halves.
#[inline(always)]
fn fold_lanes<S: Simd>(lanes: &mut [S::Floats], count: usize) {
    let mut width = count;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = lanes[i].add(lanes[i + width]);
        }
    }
}
