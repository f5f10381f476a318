//! A few activation rows side by side in tiles of bytes, where there are registers for those: the bits of
//! [`super::matvec`], faster.
//!
//! A tile of sixteen weight rows by 64 codes meets a tile of activations and gives sixteen by sixteen exact integers. There
//! may be fewer rows than columns, and a tile has several groups; so a column is one row's share of one group: eight rows
//! of two groups, or two rows of eight. It holds the row's codes where its group stands, and zeros elsewhere. This
//! arrangement is made once a product ([`Columns`]); weights are unpacked as they are read, for all rows at once.
#![cfg_attr(
    all(not(target_arch = "x86_64"), not(test)),
    expect(dead_code, reason = "no other processor has such tiles yet")
)]

use std::{marker::PhantomData, ops::Range};

use carat_gguf::QuantType;

use super::{
    STRANDS, WeightRows,
    format::{Format, WithFormat, chunk_at, with_format},
};
use crate::{
    activations::{GROUP, Row},
    simd::{Floats, LANES, Line, Simd, Tile, Tiles, Totals, UNDER_WAY, array},
};

/// Weight rows at a time.
const ROWS: usize = LANES;
/// Activation rows that one set of columns may hold.
const MOST_ROWS: usize = LANES;
/// Sets of columns that share unpacked weights.
pub(crate) const MOST_SETS: usize = 2;
/// Codes in a row of a tile.
const STEP: usize = 64;

/// Activation rows from which on this is faster than [`super::matvec`]: two have so many groups side by side that the tiles
/// of a product wait for each other.
pub(crate) const LEAST_ROWS: usize = 3;

/// How rows share the columns of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Values of a group.
    group: usize,
    /// Groups side by side, each with a column for every row: 1, 2, 4, 8 or 16.
    groups: usize,
}

impl Shape {
    fn new(group: usize, rows: usize) -> Shape {
        assert!((1..=MOST_ROWS).contains(&rows), "{rows} rows side by side");
        Shape {
            group,
            groups: LANES / rows.next_power_of_two(),
        }
    }

    /// Products of tiles that a chunk of sixteen groups takes.
    const fn products(self) -> usize {
        LANES / self.groups
    }

    /// Tiles that add up to a product.
    const fn steps(self) -> usize {
        (self.groups * self.group).div_ceil(STEP)
    }

    /// The first tile of weights in a product.
    const fn first_step(self, product: usize) -> usize {
        product * self.groups * self.group / STEP
    }
}

/// What the columns of a product stand for: their scales, and their sums of values.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Factors {
    scales: [f32; LANES],
    sums: [f32; LANES],
}

/// Activation rows arranged in columns, up to sixteen in a set.
#[derive(Default)]
pub(crate) struct Columns {
    sets: Vec<Set>,
    /// Of all sets: `[chunks, products, steps]` each.
    tiles: Vec<Tile>,
    /// Of all sets: `[chunks, products]` each.
    factors: Vec<Factors>,
}

struct Set {
    shape: Shape,
    rows: usize,
    tiles: Range<usize>,
    factors: Range<usize>,
}

impl Columns {
    /// Forgets all sets.
    pub(crate) fn clear(&mut self) {
        self.sets.clear();
        self.tiles.clear();
        self.factors.clear();
    }

    /// Adds sets of the rows, as weights of a format and width meet them, and returns their numbers.
    pub(crate) fn add<'a>(
        &mut self,
        quant: QuantType,
        columns: usize,
        rows: impl Iterator<Item = Row<'a>>,
    ) -> Range<usize> {
        let group = group_of(quant);
        let first = self.sets.len();
        let rows: Vec<Row<'_>> = rows.collect();
        for rows in rows.chunks(MOST_ROWS) {
            self.add_set(Shape::new(group, rows.len()), columns, rows);
        }
        first..self.sets.len()
    }

    fn add_set(&mut self, shape: Shape, columns: usize, rows: &[Row<'_>]) {
        let products = columns.div_ceil(shape.group * LANES) * shape.products();
        let (tiles, factors) = (self.tiles.len(), self.factors.len());
        self.tiles
            .resize(tiles + products * shape.steps(), Tile::ZERO);
        let none = Factors {
            scales: [0.0; LANES],
            sums: [0.0; LANES],
        };
        self.factors.resize(factors + products, none);
        self.sets.push(Set {
            shape,
            rows: rows.len(),
            tiles: tiles..self.tiles.len(),
            factors: factors..self.factors.len(),
        });
        let product_tiles = self.tiles[tiles..].chunks_exact_mut(shape.steps());
        let products = product_tiles.zip(&mut self.factors[factors..]);
        for (product, (tiles, factors)) in products.enumerate() {
            for (row, x) in rows.iter().enumerate() {
                for i in 0..shape.groups {
                    let column = row * shape.groups + i;
                    let value = (product * shape.groups + i) * shape.group;
                    let first_quad = value - product * shape.groups * shape.group / STEP * STEP;
                    let part = Part::new(x, value, shape.group);
                    for (quad, codes) in part.codes.as_chunks::<4>().0.iter().enumerate() {
                        let place = first_quad / 4 + quad;
                        let line = &mut tiles[place / LANES].0[place % LANES];
                        line.0.as_chunks_mut().0[column] = codes.map(i8::cast_unsigned);
                    }
                    factors.scales[column] = part.scale;
                    factors.sums[column] = part.sum as f32 * part.scale;
                }
            }
        }
    }
}

/// One group of an activation row.
struct Part<'a> {
    codes: &'a [i8],
    scale: f32,
    sum: i32,
}

impl<'a> Part<'a> {
    fn new(x: Row<'a>, value: usize, group: usize) -> Part<'a> {
        let (chunk, value) = (&x[value / (GROUP * LANES)], value % (GROUP * LANES));
        Part {
            codes: &chunk.codes[value..value + group],
            scale: chunk.scales[value / GROUP],
            sum: if group == GROUP {
                chunk.sums[value / GROUP]
            } else {
                chunk.half_sums[value / group]
            },
        }
    }
}

/// Values that share a scale.
pub(crate) fn group_of(quant: QuantType) -> usize {
    struct GroupOf;
    impl WithFormat for GroupOf {
        type Output = usize;
        fn run<F: Format>(self) -> usize {
            F::GROUP
        }
    }
    with_format(quant, GroupOf)
}

/// One number for every column.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Numbers([f32; LANES]);

type Square = [Numbers; ROWS];

const ZEROS: Square = [Numbers([0.0; LANES]); ROWS];

/// What a thread works in: a chunk of sixteen weight rows, and sums.
pub(crate) struct Space(Box<Parts>);

struct Parts {
    codes: [Tile; 8],
    scales: Square,
    mins: Square,
    totals: [Totals; UNDER_WAY],
    /// `[sets, products of a chunk]`, each `[weight rows, columns]`.
    sums: Vec<[Square; LANES]>,
}

impl Default for Space {
    fn default() -> Space {
        Space(Box::new(Parts {
            codes: [Tile::ZERO; 8],
            scales: ZEROS,
            mins: ZEROS,
            totals: [Totals::ZERO; UNDER_WAY],
            sums: vec![[ZEROS; LANES]; MOST_SETS],
        }))
    }
}

/// Fills `out`, `[rows of the sets, weights.len()]`.
#[inline(always)]
pub(crate) fn multiply<T: Tiles>(
    quant: QuantType,
    weights: WeightRows<'_>,
    columns: &Columns,
    sets: Range<usize>,
    space: &mut Space,
    out: &mut [f32],
) {
    assert!(sets.len() <= MOST_SETS, "{} sets are too many", sets.len());
    with_format(
        quant,
        Multiply::<T> {
            weights,
            columns,
            sets,
            space: &mut space.0,
            out,
            level: PhantomData,
        },
    );
}

struct Multiply<'a, T> {
    weights: WeightRows<'a>,
    columns: &'a Columns,
    sets: Range<usize>,
    space: &'a mut Parts,
    out: &'a mut [f32],
    level: PhantomData<T>,
}

impl<T: Tiles> WithFormat for Multiply<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<F: Format>(mut self) {
        let mut registers = T::take();
        let chunks = self.weights.row_bytes.div_ceil(F::CHUNK_BYTES);
        let count = self.weights.len();
        for first in (0..count).step_by(ROWS) {
            let rows = self.weights.slice(first..count.min(first + ROWS));
            for chunk in 0..chunks {
                self.unpack::<F>(rows, chunk);
                let mut ahead = Ahead::new::<F>(rows, chunk);
                for (place, set) in self.columns.sets[self.sets.clone()].iter().enumerate() {
                    let mut meeting = Meeting {
                        registers: &mut registers,
                        space: self.space,
                        tiles: &self.columns.tiles[set.tiles.clone()],
                        factors: &self.columns.factors[set.factors.clone()],
                        place,
                        chunk,
                        ahead,
                    };
                    match set.shape.groups {
                        1 => meeting.add::<F, 1>(),
                        2 => meeting.add::<F, 2>(),
                        4 => meeting.add::<F, 4>(),
                        8 => meeting.add::<F, 8>(),
                        _ => meeting.add::<F, 16>(),
                    }
                    ahead = Ahead::NOTHING;
                }
            }
            let mut above = 0;
            for (place, set) in self.columns.sets[self.sets.clone()].iter().enumerate() {
                let out = &mut self.out[above * count..(above + set.rows) * count];
                let outputs = fold::<T::Vectors>(&mut self.space.sums[place], set.shape);
                for (out, outputs) in out.chunks_exact_mut(count).zip(outputs) {
                    out[first..first + rows.len()].copy_from_slice(&outputs.0[..rows.len()]);
                }
                above += set.rows;
            }
        }
    }
}

impl<T: Tiles> Multiply<'_, T> {
    /// One chunk of up to sixteen rows. What is there for missing rows is nobody's concern.
    #[inline(always)]
    fn unpack<F: Format>(&mut self, rows: WeightRows<'_>, chunk: usize) {
        for row in 0..rows.len() {
            let mut tail = None;
            let bytes = chunk_at::<F>(rows.row(row), chunk * F::CHUNK_BYTES, &mut tail);
            let unpacked = F::unpack_signed::<T>(bytes);
            let pieces = unpacked.codes.iter().take(F::GROUP / 4);
            for (codes, tile) in pieces.zip(&mut self.space.codes) {
                T::Vectors::store_bytes(*codes, &mut tile.0[row].0);
            }
            unpacked.scales.store(&mut self.space.scales[row].0);
            if F::MINS {
                unpacked.mins.store(&mut self.space.mins[row].0);
            }
        }
    }
}

/// Weights that are asked for while others are multiplied: memory would be idle then.
#[derive(Clone, Copy)]
struct Ahead {
    starts: [*const u8; STRANDS],
    /// From each start on.
    lines: usize,
}

impl Ahead {
    const NOTHING: Ahead = Ahead {
        starts: [std::ptr::null(); STRANDS],
        lines: 0,
    };

    /// As much as a chunk of `rows` has, in those that come next.
    #[inline(always)]
    fn new<F: Format>(rows: WeightRows<'_>, chunk: usize) -> Ahead {
        let bytes = ROWS / STRANDS * F::CHUNK_BYTES;
        let runs = rows.runs_after(ROWS);
        Ahead {
            starts: array![std::ptr::null(); i => runs[i].wrapping_add(chunk * bytes)],
            lines: bytes.div_ceil(64),
        }
    }

    /// The `part`th of so many parts.
    #[inline(always)]
    fn ask<S: Simd>(self, part: usize, parts: usize) {
        for line in part * self.lines / parts..(part + 1) * self.lines / parts {
            for start in self.starts {
                S::prefetch(start.wrapping_add(64 * line));
            }
        }
    }
}

/// The unpacked chunk of sixteen weight rows meets a set of columns.
struct Meeting<'a, T> {
    registers: &'a mut T,
    space: &'a mut Parts,
    tiles: &'a [Tile],
    factors: &'a [Factors],
    /// Of the set's sums.
    place: usize,
    /// Which of its row.
    chunk: usize,
    ahead: Ahead,
}

impl<T: Tiles> Meeting<'_, T> {
    /// Adds the products with columns of `J` groups side by side to the sums.
    #[inline(always)]
    fn add<F: Format, const J: usize>(&mut self) {
        let shape = Shape {
            group: F::GROUP,
            groups: J,
        };
        let (products, steps) = (shape.products(), shape.steps());
        let tiles = &self.tiles[self.chunk * products * steps..][..products * steps];
        let factors = &self.factors[self.chunk * products..][..products];
        // Two products are multiplied while one is stored and one is added.
        for turn in 0..products + 3 {
            if turn < products {
                let left = &self.space.codes[shape.first_step(turn)..][..steps];
                let right = &tiles[turn * steps..][..steps];
                self.registers.start_bytes(turn % UNDER_WAY, left, right);
            }
            if (2..products + 2).contains(&turn) {
                let place = (turn - 2) % UNDER_WAY;
                self.registers
                    .finish_bytes(place, &mut self.space.totals[place]);
            }
            if turn >= 3 {
                self.ahead.ask::<T::Vectors>(turn - 3, products);
                self.add_product::<F, J>(turn - 3, &factors[turn - 3]);
            }
        }
    }

    /// Adds one product to its sums, or begins them.
    #[inline(always)]
    fn add_product<F: Format, const J: usize>(&mut self, product: usize, factors: &Factors) {
        let x_scales = <T::Vectors as Simd>::Floats::load(&factors.scales);
        let x_sums = <T::Vectors as Simd>::Floats::load(&factors.sums);
        let space = &mut *self.space;
        let totals = &space.totals[product % UNDER_WAY];
        let sums = &mut space.sums[self.place][product];
        for (row, sum) in sums.iter_mut().enumerate() {
            let scales = T::repeat::<J>(&space.scales[row].0.as_chunks().0[product]);
            let total = T::Vectors::to_floats(T::Vectors::load_ints(&totals.0[row]));
            let before = if self.chunk == 0 {
                Floats::zero()
            } else {
                Floats::load(&sum.0)
            };
            let mut after = total.mul_add(scales.mul(x_scales), before);
            if F::MINS {
                let mins = T::repeat::<J>(&space.mins[row].0.as_chunks().0[product]);
                after = mins.neg_mul_add(x_sums, after);
            }
            after.store(&mut sum.0);
        }
    }
}

/// Folds the sixteen lanes of every output, in the order of [`Floats::sum`]: sixteen outputs for each row.
#[inline(always)]
fn fold<S: Simd>(sums: &mut [Square; LANES], shape: Shape) -> Square {
    // First those that lie in different products, at the same column.
    let mut width = shape.products();
    while width > 1 {
        width /= 2;
        let (left, right) = sums.split_at_mut(width);
        for (left, right) in left.iter_mut().zip(&*right).take(width) {
            for (left, right) in left.iter_mut().zip(right) {
                let sum = S::Floats::load(&left.0).add(S::Floats::load(&right.0));
                sum.store(&mut left.0);
            }
        }
    }
    let mut rows = [Line([0; 64]); LANES];
    for (line, sums) in rows.iter_mut().zip(&sums[0]) {
        for (bytes, sum) in line.0.as_chunks_mut().0.iter_mut().zip(sums.0) {
            *bytes = sum.to_le_bytes();
        }
    }
    let mut columns = [Line([0; 64]); LANES];
    S::transpose(&rows, &mut columns);
    let mut lanes: [S::Floats; LANES] =
        array![S::Floats::zero(); i => S::Floats::load_f32_bytes(&columns[i].0)];
    let mut outputs = ZEROS;
    let rows = lanes.chunks_exact_mut(shape.groups);
    for (lanes, outputs) in rows.zip(&mut outputs) {
        let mut width = lanes.len();
        while width > 1 {
            width /= 2;
            for i in 0..width {
                lanes[i] = lanes[i].add(lanes[i + width]);
            }
        }
        lanes[0].store(&mut outputs.0);
    }
    outputs
}
