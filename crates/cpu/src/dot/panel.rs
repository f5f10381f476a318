//! Sixteen weight rows unpacked side by side, times any number of activation rows.
//!
//! This is the prefill path. A worker unpacks a panel once into memory that stays in its own cache, and multiplies all
//! rows of the batch with it, so each weight is read from the file once a batch. Codes lie so that one vector holds the
//! same four columns of all sixteen rows: a lane is an output, and nothing has to be added across lanes.
//! The sixteen partial sums of an output (see [`super`]) are sixteen vectors here, folded at the end.

use std::marker::PhantomData;

use carat_gguf::QuantType;

use super::{
    WeightRows,
    format::{Chunks, Format, WithFormat, signed, with_format},
};
use crate::{
    activations::{GROUP, Row},
    simd::{Floats, LANES, Simd},
};

/// Weight rows of a panel.
pub(crate) const ROWS: usize = LANES;

/// One cache line of codes: four columns of sixteen rows.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

/// One number for each of sixteen rows.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Column([f32; ROWS]);

/// Sixteen weight rows, unpacked.
#[derive(Default)]
pub(crate) struct Panel {
    codes: Vec<Line>,
    scales: Vec<Column>,
    /// Empty in formats without minimums.
    mins: Vec<Column>,
    /// Values that share a scale.
    group: usize,
}

/// Unpacks up to sixteen rows; missing ones count as zero.
#[inline(always)]
pub(crate) fn pack<S: Simd>(quant: QuantType, weights: WeightRows<'_>, panel: &mut Panel) {
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
    fn run<F: Format>(self) {
        let Pack { weights, panel, .. } = self;
        let block = F::QUANT.block_bytes();
        let groups = weights.row_bytes / block * (F::QUANT.block_len() / F::GROUP);
        let lines_per_group = F::GROUP / 4;
        panel.group = F::GROUP;
        // Grown once to the widest matrix; whole chunks, so the last one may be written past its end.
        let padded = groups.next_multiple_of(LANES);
        panel.codes.resize(padded * lines_per_group, Line([0; 64]));
        panel.scales.resize(padded, Column([0.0; ROWS]));
        panel
            .mins
            .resize(if F::MINS { padded } else { 0 }, Column([0.0; ROWS]));

        let mut codes = [[[0; 64]; ROWS]; 8];
        let mut scales = [[0.0; LANES]; ROWS];
        let mut mins = [[0.0; LANES]; ROWS];
        let rows: [Option<Chunks<'_>>; ROWS] = std::array::from_fn(|row| {
            (row < weights.len()).then(|| Chunks::new::<F>(weights.row(row)))
        });
        for index in 0..padded / LANES {
            for (row, chunks) in rows.iter().enumerate() {
                let Some(chunks) = chunks else { continue };
                let unpacked = F::unpack::<S>(chunks.chunk::<F>(index));
                for (piece, codes) in codes.iter_mut().enumerate().take(F::GROUP / 4) {
                    S::store_bytes(signed::<S, F>(unpacked.codes[piece]), &mut codes[row]);
                }
                unpacked.scales.store(&mut scales[row]);
                unpacked.mins.store(&mut mins[row]);
            }
            let lines = &mut panel.codes[index * LANES * lines_per_group..];
            for (piece, codes) in codes.iter().enumerate().take(F::GROUP / 4) {
                let mut columns = [[0; 64]; LANES];
                S::transpose(codes, &mut columns);
                for (line, column) in lines[piece * LANES..].iter_mut().zip(columns) {
                    line.0 = column;
                }
            }
            for g in 0..LANES {
                panel.scales[index * LANES + g].0 = scales.map(|row| row[g]);
                if F::MINS {
                    panel.mins[index * LANES + g].0 = mins.map(|row| row[g]);
                }
            }
        }
        panel.scales.truncate(groups);
    }
}

/// Activation rows and panels that one call of [`multiply`] may take.
pub(crate) const MOST_ROWS: usize = 8;
pub(crate) const MOST_PANELS: usize = 2;

/// Multiplies one or two panels with up to [`MOST_ROWS`] rows: `out[row][panel]` holds sixteen outputs.
#[inline(always)]
pub(crate) fn multiply<S: Simd>(
    panels: &[Panel],
    x: &[Row<'_>],
    out: &mut [[[f32; ROWS]; MOST_PANELS]; MOST_ROWS],
) {
    assert!(
        x.len() <= MOST_ROWS && panels.len() <= MOST_PANELS,
        "{} rows and {} panels are too many",
        x.len(),
        panels.len()
    );
    // How many accumulators fit in registers decides how many rows go through the panel together. A row's result is
    // the same in any company.
    if S::WIDE {
        if let [a, b] = panels {
            blocks::<S, 8, 2>([a, b], x, out, 0);
        } else if let [a] = panels {
            blocks::<S, 8, 1>([a], x, out, 0);
        }
    } else {
        for (p, panel) in panels.iter().enumerate() {
            blocks::<S, 4, 1>([panel], x, out, p);
        }
    }
}

/// Cuts the rows into blocks of `R`, then single rows.
#[inline(always)]
fn blocks<S: Simd, const R: usize, const C: usize>(
    panels: [&Panel; C],
    x: &[Row<'_>],
    out: &mut [[[f32; ROWS]; MOST_PANELS]; MOST_ROWS],
    first_panel: usize,
) {
    let (whole, rest) = x.as_chunks::<R>();
    for (block, out) in whole.iter().zip(out.chunks_mut(R)) {
        grouped::<S, R, C>(panels, *block, out, first_panel);
    }
    for (row, out) in rest.iter().zip(&mut out[x.len() - rest.len()..]) {
        grouped::<S, 1, C>(panels, [row], std::slice::from_mut(out), first_panel);
    }
}

#[inline(always)]
fn grouped<S: Simd, const R: usize, const C: usize>(
    panels: [&Panel; C],
    x: [Row<'_>; R],
    out: &mut [[[f32; ROWS]; MOST_PANELS]],
    first_panel: usize,
) {
    if panels[0].group == GROUP {
        tile::<S, R, C, 8>(panels, x, out, first_panel);
    } else {
        tile::<S, R, C, 4>(panels, x, out, first_panel);
    }
}

/// `R` rows times `C` panels whose groups are `QUADS * 4` values long.
#[inline(always)]
fn tile<S: Simd, const R: usize, const C: usize, const QUADS: usize>(
    panels: [&Panel; C],
    x: [Row<'_>; R],
    out: &mut [[[f32; ROWS]; MOST_PANELS]],
    first_panel: usize,
) {
    let groups = panels[0].scales.len();
    let mut lanes = [[[S::Floats::zero(); C]; R]; LANES];
    let per_chunk = LANES * 8 / QUADS;
    for g in 0..groups {
        let (chunk, place) = (g / per_chunk, g % per_chunk);
        // One group of a row: its codes, its scale and the sum of its codes.
        let of_row = |row: Row<'_>| {
            let chunk = &row[chunk];
            if QUADS == 8 {
                (chunk.scales[place], chunk.sums[place])
            } else {
                (chunk.scales[place / 2], chunk.half_sums[place])
            }
        };
        let mut totals: [[S::Ints; C]; R] =
            x.map(|row| [S::ints(-S::SIGNED_OFFSET * of_row(row).1); C]);
        for quad in 0..QUADS {
            let weights: [S::Bytes; C] =
                std::array::from_fn(|c| S::load_bytes(&panels[c].codes[g * QUADS + quad].0));
            for (totals, row) in totals.iter_mut().zip(x) {
                let (quads, _) = row[chunk].codes.as_chunks::<4>();
                let x = S::splat_quad(&quads[place * QUADS + quad]);
                for (total, weights) in totals.iter_mut().zip(weights) {
                    *total = S::dot_signed(*total, weights, x);
                }
            }
        }
        let lane = &mut lanes[g % LANES];
        for r in 0..R {
            let (scale, code_sum) = of_row(x[r]);
            for c in 0..C {
                let by = S::Floats::load(&panels[c].scales[g].0).mul(S::Floats::splat(scale));
                let mut sum = S::to_floats(totals[r][c]).mul_add(by, lane[r][c]);
                if let Some(min) = panels[c].mins.get(g) {
                    let x_sum = S::Floats::splat(code_sum as f32 * scale);
                    sum = S::Floats::load(&min.0).neg_mul_add(x_sum, sum);
                }
                lane[r][c] = sum;
            }
        }
    }
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            for r in 0..R {
                for c in 0..C {
                    lanes[i][r][c] = lanes[i][r][c].add(lanes[i + width][r][c]);
                }
            }
        }
    }
    for (sums, out) in lanes[0].iter().zip(out) {
        for (c, sum) in sums.iter().enumerate() {
            sum.store(&mut out[first_panel + c]);
        }
    }
}
