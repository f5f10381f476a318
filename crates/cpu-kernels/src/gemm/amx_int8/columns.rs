//! Activations of a small batch, arranged as the columns of int8 tiles.
//!
//! There may be fewer rows than columns, and a tile has several groups; so a column is one row's share of one group: eight
//! rows of two groups, or four rows of four. It holds the row's codes where its group stands, and zeros elsewhere.

use std::ops::Range;

use carat_gguf::QuantType;

use crate::{
    gemm::{
        activations::{GROUP, Row},
        format::{Format, WithFormat, with_format},
    },
    simd::{LANES, Tile},
};

/// Activation rows that one set of columns may hold.
const MAX_ROWS: usize = LANES;
/// Codes in a row of a tile.
const TILE_CODES: usize = 64;

/// Layout of rows in the columns of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ColumnLayout {
    /// Values of a group.
    pub(super) group: usize,
    /// Groups side by side, each with a column for every row: 1, 2 or 4.
    pub(super) groups: usize,
}

impl ColumnLayout {
    fn new(group: usize, rows: usize) -> ColumnLayout {
        assert!((1..=MAX_ROWS).contains(&rows), "{rows} rows side by side");
        ColumnLayout {
            group,
            // Fewer rows leave columns empty: the tiles of more groups would wait for each other in one product.
            groups: LANES / rows.next_power_of_two().max(4),
        }
    }

    /// Products of tiles that a chunk of sixteen groups takes.
    pub(super) const fn products(self) -> usize {
        LANES / self.groups
    }

    /// Tiles that add up to a product.
    pub(super) const fn steps(self) -> usize {
        (self.groups * self.group).div_ceil(TILE_CODES)
    }

    /// The first tile of weights in a product.
    pub(super) const fn first_step(self, product: usize) -> usize {
        product * self.groups * self.group / TILE_CODES
    }
}

/// Factors of the columns of a product: their scales, and their sums of values.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Factors {
    pub(super) scales: [f32; LANES],
    pub(super) sums: [f32; LANES],
}

/// Activation rows arranged in columns, up to sixteen in a set.
#[derive(Default)]
pub struct ActivationColumns {
    pub(super) sets: Vec<ColumnSet>,
    /// Of all sets: `[chunks, products, steps]` each.
    pub(super) tiles: Vec<Tile>,
    /// Of all sets: `[chunks, products]` each.
    pub(super) factors: Vec<Factors>,
}

/// Up to sixteen rows, and where their columns lie.
pub(super) struct ColumnSet {
    pub(super) layout: ColumnLayout,
    pub(super) rows: usize,
    pub(super) tiles: Range<usize>,
    pub(super) factors: Range<usize>,
}

impl ActivationColumns {
    /// Forgets all sets.
    pub fn clear(&mut self) {
        self.sets.clear();
        self.tiles.clear();
        self.factors.clear();
    }

    /// Adds sets of the rows, as weights of a format and width meet them, and returns their numbers.
    pub fn add<'a>(
        &mut self,
        quant: QuantType,
        columns: usize,
        rows: impl Iterator<Item = Row<'a>>,
    ) -> Range<usize> {
        let group = group_of(quant);
        let first = self.sets.len();
        let rows: Vec<Row<'_>> = rows.collect();
        for rows in rows.chunks(MAX_ROWS) {
            self.add_set(ColumnLayout::new(group, rows.len()), columns, rows);
        }
        first..self.sets.len()
    }

    fn add_set(&mut self, layout: ColumnLayout, columns: usize, rows: &[Row<'_>]) {
        let products = columns.div_ceil(layout.group * LANES) * layout.products();
        let (tiles, factors) = (self.tiles.len(), self.factors.len());
        self.tiles
            .resize(tiles + products * layout.steps(), Tile::ZERO);
        let none = Factors {
            scales: [0.0; LANES],
            sums: [0.0; LANES],
        };
        self.factors.resize(factors + products, none);
        self.sets.push(ColumnSet {
            layout,
            rows: rows.len(),
            tiles: tiles..self.tiles.len(),
            factors: factors..self.factors.len(),
        });
        let product_tiles = self.tiles[tiles..].chunks_exact_mut(layout.steps());
        let products = product_tiles.zip(&mut self.factors[factors..]);
        for (product, (tiles, factors)) in products.enumerate() {
            for (row, x) in rows.iter().enumerate() {
                for i in 0..layout.groups {
                    let column = row * layout.groups + i;
                    let value = (product * layout.groups + i) * layout.group;
                    let first_code =
                        value - product * layout.groups * layout.group / TILE_CODES * TILE_CODES;
                    let group = ActivationGroup::new(x, value, layout.group);
                    for (quad, codes) in group.codes.as_chunks::<4>().0.iter().enumerate() {
                        let line = first_code / 4 + quad;
                        let line = &mut tiles[line / LANES].0[line % LANES];
                        line.0.as_chunks_mut().0[column] = codes.map(i8::cast_unsigned);
                    }
                    factors.scales[column] = group.scale;
                    factors.sums[column] = group.sum as f32 * group.scale;
                }
            }
        }
    }
}

/// One group of an activation row.
struct ActivationGroup<'a> {
    codes: &'a [i8],
    scale: f32,
    sum: i32,
}

impl<'a> ActivationGroup<'a> {
    fn new(x: Row<'a>, value: usize, group: usize) -> ActivationGroup<'a> {
        let (chunk, value) = (&x[value / (GROUP * LANES)], value % (GROUP * LANES));
        ActivationGroup {
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
pub fn group_of(quant: QuantType) -> usize {
    struct GroupOf;
    impl WithFormat for GroupOf {
        type Output = usize;
        fn run<F: Format>(self, _: F) -> usize {
            F::GROUP
        }
    }
    with_format(quant, GroupOf)
}
