//! GEMM over packed panels: sixteen weight rows unpacked side by side, times any number of activation rows.
//!
//! This is the prefill path of levels without tiles. A worker unpacks a panel once into memory that stays in its own cache, and multiplies all
//! rows of the batch with it, so each weight is read from the file once per batch. Codes lie so that one vector holds the
//! same four columns of all sixteen rows: a lane is an output, and nothing has to be added across lanes. Where two rows are
//! multiplied with two others at once, eight columns of a row lie together instead ([`Simd::totals_by_eights`]).
//! The sixteen partial sums of an output (see [`super`]) are sixteen vectors here, folded at the end.

use std::marker::PhantomData;

use carat_gguf::QuantType;

use super::{
    WeightRows,
    activations::{CHUNK, Chunk, GROUP, Row},
    format::{Format, WithFormat, chunk_at, signed, with_format},
};
use crate::simd::{Floats, LANES, Line, Simd, array};

/// Weight rows of a panel.
pub const ROWS: usize = LANES;

/// One number for each of sixteen rows.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Column([f32; ROWS]);

/// Sixteen weight rows, unpacked.
#[derive(Default)]
pub struct Panel {
    /// A line holds four columns of all rows, or two lines hold eight where rows are multiplied in pairs; prepared for this
    /// instruction set.
    codes: Vec<Line>,
    scales: Vec<Column>,
    /// Empty in formats without minimums.
    mins: Vec<Column>,
    /// Values that share a scale.
    group: usize,
}

/// Unpacks up to sixteen rows; missing ones count as zero.
#[inline(always)]
pub fn pack_int8<S: Simd>(quant: QuantType, weights: WeightRows<'_>, panel: &mut Panel) {
    assert!(weights.len() <= ROWS, "a panel holds {ROWS} rows");
    with_format(
        quant,
        Pack::<S> {
            weights,
            panel,
            simd: PhantomData,
        },
    );
}

struct Pack<'a, S> {
    weights: WeightRows<'a>,
    panel: &'a mut Panel,
    simd: PhantomData<S>,
}

impl<S: Simd> WithFormat for Pack<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<F: Format>(self, format: F) {
        let Pack { weights, panel, .. } = self;
        let groups = format.groups(weights.row_bytes);
        let lines_per_group = F::GROUP / 4;
        panel.group = F::GROUP;
        // Grown once to the widest matrix; whole chunks, so the last one may be written past its end.
        let padded = groups.next_multiple_of(LANES);
        panel.codes.resize(padded * lines_per_group, Line([0; 64]));
        panel.scales.resize(padded, Column([0.0; ROWS]));
        panel
            .mins
            .resize(if F::MINS { padded } else { 0 }, Column([0.0; ROWS]));

        let mut codes = [[Line([0; 64]); ROWS]; 8];
        let mut scales = [[0.0; LANES]; ROWS];
        let mut mins = [[0.0; LANES]; ROWS];
        for index in 0..padded / LANES {
            let start = index * format.chunk_bytes();
            for row in 0..weights.len() {
                let mut tail = None;
                let chunk = chunk_at(format, weights.row(row), start, &mut tail);
                let unpacked = format.unpack::<S>(chunk);
                for (piece, codes) in codes.iter_mut().enumerate().take(F::GROUP / 4) {
                    let prepared = S::prepare(signed::<S, F>(unpacked.codes[piece]));
                    S::store_bytes(prepared, &mut codes[row].0);
                }
                unpacked.scales.store(&mut scales[row]);
                unpacked.mins.store(&mut mins[row]);
            }
            let (lines, _) = panel.codes[index * LANES * lines_per_group..].as_chunks_mut();
            for (codes, lines) in codes.iter().zip(&mut lines[..F::GROUP / 4]) {
                if S::PAIRS {
                    S::transpose_by_eights(codes, lines);
                } else {
                    S::transpose(codes, lines);
                }
            }
            transpose_columns(&scales, &mut panel.scales[index * LANES..][..LANES]);
            if F::MINS {
                transpose_columns(&mins, &mut panel.mins[index * LANES..][..LANES]);
            }
        }
        panel.scales.truncate(groups);
    }
}

/// Rows of sixteen numbers to columns.
#[inline(always)]
fn transpose_columns(rows: &[[f32; LANES]; ROWS], columns: &mut [Column]) {
    for (g, column) in columns.iter_mut().enumerate() {
        for (value, row) in column.0.iter_mut().zip(rows) {
            *value = row[g];
        }
    }
}

/// Activation rows and panels that one call of [`gemm_packed_int8`] may take.
pub const MAX_ROWS: usize = 8;
pub const MAX_PANELS: usize = 2;

/// Partial sums of a call, `[lane][row][panel]`. After it, lane 0 holds the sixteen outputs of each row and panel.
pub struct Accumulators(Box<[[[Column; MAX_PANELS]; MAX_ROWS]; LANES]>);

impl Default for Accumulators {
    fn default() -> Accumulators {
        Accumulators(Box::new(
            [[[Column([0.0; ROWS]); MAX_PANELS]; MAX_ROWS]; LANES],
        ))
    }
}

impl Accumulators {
    /// The first outputs of a row.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        for (out, column) in out.chunks_mut(ROWS).zip(&self.0[0][row]) {
            out.copy_from_slice(&column.0[..out.len()]);
        }
    }
}

/// Multiplies one or two panels of one format and width with up to [`MAX_ROWS`] rows.
#[inline(always)]
pub fn gemm_packed_int8<S: Simd>(panels: &[Panel], x: &[Row<'_>], sums: &mut Accumulators) {
    assert!(
        x.len() <= MAX_ROWS && panels.len() <= MAX_PANELS,
        "{} rows and {} panels are too many",
        x.len(),
        panels.len()
    );
    // As many rows go through the panels together as sums fit in registers. A row's result is the same in any company.
    match panels {
        [a, b] if S::WIDE => blocks::<S, 8, 2>([a, b], x, sums, 0),
        _ if S::WIDE => {
            for (first, panel) in panels.iter().enumerate() {
                blocks::<S, 8, 1>([panel], x, sums, first);
            }
        }
        _ => {
            for (first, panel) in panels.iter().enumerate() {
                blocks::<S, 4, 1>([panel], x, sums, first);
            }
        }
    }
}

/// Cuts the rows into blocks of `R`, then of four, then pairs where those are multiplied at once, then single rows.
#[inline(always)]
fn blocks<S: Simd, const R: usize, const C: usize>(
    panels: [&Panel; C],
    x: &[Row<'_>],
    sums: &mut Accumulators,
    first_panel: usize,
) {
    let mut row = 0;
    while row < x.len() {
        row += if let Some(block) = x[row..].first_chunk::<R>() {
            tile::<S, R, C>(panels, *block, sums, (row, first_panel))
        } else if let Some(block) = x[row..].first_chunk::<4>() {
            tile::<S, 4, C>(panels, *block, sums, (row, first_panel))
        } else if S::PAIRS
            && let Some(block) = x[row..].first_chunk::<2>()
        {
            tile::<S, 2, C>(panels, *block, sums, (row, first_panel))
        } else {
            tile::<S, 1, C>(panels, [x[row]], sums, (row, first_panel))
        };
    }
}

/// `R` rows times `C` panels, into the sums from row and panel `first` on. Returns `R`.
#[inline(always)]
#[expect(
    clippy::needless_range_loop,
    reason = "rows, panels and lanes are indexed alike in several arrays"
)]
fn tile<S: Simd, const R: usize, const C: usize>(
    panels: [&Panel; C],
    x: [Row<'_>; R],
    sums: &mut Accumulators,
    first: (usize, usize),
) -> usize {
    let group = panels[0].group;
    let groups = panels[0].scales.len();
    // Kept out of the constants on purpose: told this number, the compiler unrolls the loop below completely and spills
    // every broadcast, at a third of the speed.
    let quads = group / 4;
    for g in 0..groups {
        let first_value = g * group;
        let chunks: [&Chunk; R] = array![&x[0][0]; r => &x[r][first_value / CHUNK]];
        let first_quad = first_value % CHUNK / 4;
        let lines: [&[Line]; C] =
            array![[].as_slice(); c => &panels[c].codes[g * quads..][..quads]];
        let code_sums: [i32; R] = array![0; r => code_sum(chunks[r], group, first_quad)];
        let mut totals: [[S::Ints; C]; R] =
            array![[S::ints(0); C]; r => [S::ints(-S::SIGNED_OFFSET * code_sums[r]); C]];
        if S::PAIRS {
            const { assert!(!S::PAIRS || S::SIGNED_OFFSET == 0, "pairs have no offset") };
            let sixteens = first_quad / 4..first_quad / 4 + quads / 4;
            let x: [&[[i8; 16]]; R] = array![[].as_slice(); r => {
                &chunks[r].codes.as_chunks().0[sixteens.clone()]
            }];
            for c in 0..C {
                let of_panel = S::totals_by_eights(lines[c], x);
                for r in 0..R {
                    totals[r][c] = of_panel[r];
                }
            }
        } else {
            for quad in 0..quads {
                let weights: [S::Bytes; C] =
                    array![S::load_bytes(&[0; 64]); c => S::load_bytes(&lines[c][quad].0)];
                // The remainder only tells the compiler what is always true.
                let quad_index = (first_quad + quad) % (CHUNK / 4);
                for r in 0..R {
                    let x = S::splat_quad(chunks[r].codes.as_chunks().0[quad_index]);
                    for c in 0..C {
                        totals[r][c] = S::dot_prepared(totals[r][c], weights[c], x);
                    }
                }
            }
        }
        let scales: [S::Floats; C] =
            array![S::Floats::zero(); c => S::Floats::load(&panels[c].scales[g].0)];
        let lane = &mut sums.0[g % LANES];
        for r in 0..R {
            let scale = S::Floats::splat(chunks[r].scales[first_quad / (GROUP / 4)]);
            for c in 0..C {
                let sum = &mut lane[first.0 + r][first.1 + c].0;
                // A lane's first group starts it.
                let before = if g < LANES {
                    S::Floats::zero()
                } else {
                    S::Floats::load(sum)
                };
                S::to_floats(totals[r][c])
                    .mul_add(scales[c].mul(scale), before)
                    .store(sum);
            }
        }
        if panels[0].mins.len() > g {
            for r in 0..R {
                let scale = chunks[r].scales[first_quad / (GROUP / 4)];
                let x_sum = S::Floats::splat(code_sums[r] as f32 * scale);
                for c in 0..C {
                    let sum = &mut lane[first.0 + r][first.1 + c].0;
                    S::Floats::load(&panels[c].mins[g].0)
                        .neg_mul_add(x_sum, S::Floats::load(sum))
                        .store(sum);
                }
            }
        }
    }
    for r in first.0..first.0 + R {
        for c in first.1..first.1 + C {
            for lane in groups..LANES {
                sums.0[lane][r][c].0.fill(0.0);
            }
            let mut lanes: [S::Floats; LANES] =
                array![S::Floats::zero(); lane => S::Floats::load(&sums.0[lane][r][c].0)];
            for width in [8, 4, 2, 1] {
                for i in 0..width {
                    lanes[i] = lanes[i].add(lanes[i + width]);
                }
            }
            lanes[0].store(&mut sums.0[0][r][c].0);
        }
    }
    R
}

/// The sum of one group's codes.
#[inline(always)]
fn code_sum(chunk: &Chunk, group: usize, first_quad: usize) -> i32 {
    if group == GROUP {
        chunk.sums[first_quad / 8]
    } else {
        chunk.half_sums[first_quad / 4]
    }
}
