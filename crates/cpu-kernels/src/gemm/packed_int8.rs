//! GEMM over packed panels: sixteen weight rows unpacked side by side, times any number of activation rows.
//!
//! This is the prefill path of levels without tiles. A worker unpacks a panel once into memory that stays in its own cache, and multiplies all
//! rows of the batch with it, so each weight is read from the file once per batch. Codes lie so that one vector holds the
//! same four columns of all sixteen rows: a lane is an output, and nothing has to be added across lanes. Where two rows are
//! multiplied with two others at once, eight columns of a row lie together instead ([`Simd::totals_by_eights`]).
//!
//! The sixteen partial sums of an output (see [`super`]) are sixteen vectors here. One after another goes through all of its
//! groups, so that it stays in a register, and is added to the others as soon as they meet; panels and rows are arranged in
//! that order.

use std::{marker::PhantomData, ops::Range};

use carat_gguf::QuantType;

use super::{
    WeightRows,
    activations::{CHUNK, Chunk, GROUP, Row},
    format::{Coding, Format, TransposeLayout, WithFormat, chunk_at, signed, with_format},
    sixteen_rows::{self, Groups},
};
use crate::simd::{Floats, LANES, Line, Simd, array};

/// Weight rows of a panel.
pub const ROWS: usize = LANES;

/// One number for each of sixteen rows.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Column([f32; ROWS]);

/// Sixteen weight rows, unpacked: the groups of a lane one after another, lane after lane.
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
    /// Groups of a row.
    groups: usize,
}

impl Panel {
    fn columns(&self) -> usize {
        self.groups * self.group
    }

    /// Groups that each lane has room for.
    fn room(&self) -> usize {
        self.groups.div_ceil(LANES)
    }

    /// The groups that a lane has.
    fn groups_of(&self, lane: usize) -> Range<usize> {
        let start = lane * self.room();
        start..start + (self.groups + LANES - 1 - lane) / LANES
    }
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
        (panel.group, panel.groups) = (F::GROUP, groups);
        let room = panel.room();
        // Grown once to the widest matrix; whole chunks, so the last one may be written past its end.
        let padded = room * LANES;
        panel.codes.resize(padded * lines_per_group, Line([0; 64]));
        panel.scales.resize(padded, Column([0.0; ROWS]));
        panel
            .mins
            .resize(if F::MINS { padded } else { 0 }, Column([0.0; ROWS]));
        if const { !S::PAIRS && !matches!(F::TRANSPOSE, TransposeLayout::None) } {
            sixteen_rows::read::<S, F>(format, weights, panel);
            return;
        }

        let mut codes = [[Line([0; 64]); ROWS]; 8];
        let mut lines = [Line([0; 64]); ROWS];
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
            for (piece, codes) in codes.iter().enumerate().take(F::GROUP / 4) {
                if S::PAIRS {
                    S::transpose_by_eights(codes, &mut lines);
                } else {
                    S::transpose(codes, &mut lines);
                }
                let first = piece * LANES / lines_per_group;
                for (i, lines) in lines.chunks_exact(lines_per_group).enumerate() {
                    let group = (first + i) * room + index;
                    panel.codes[group * lines_per_group..][..lines_per_group]
                        .copy_from_slice(lines);
                }
            }
            let (_, of_scales) = panel.scales.split_at_mut(index);
            transpose_columns(&scales, of_scales.iter_mut().step_by(room));
            if F::MINS {
                let (_, of_mins) = panel.mins.split_at_mut(index);
                transpose_columns(&mins, of_mins.iter_mut().step_by(room));
            }
        }
    }
}

impl<S: Simd> Groups<S> for Panel {
    #[inline(always)]
    fn group<F: Format>(
        &mut self,
        group: usize,
        codes: &[S::Bytes; 8],
        scales: S::Floats,
        mins: S::Floats,
    ) {
        let at = self.keep::<S, F>(group, codes, scales);
        if F::MINS {
            mins.store(&mut self.mins[at].0);
        }
    }

    #[inline(always)]
    fn half_group<F: Format>(&mut self, group: usize, codes: &[S::Bytes; 4], scales: S::Floats) {
        self.keep::<S, F>(group, codes, scales);
    }
}

impl Panel {
    /// Keeps a group, and tells where.
    #[inline(always)]
    fn keep<S: Simd, F: Format>(
        &mut self,
        group: usize,
        codes: &[S::Bytes],
        scales: S::Floats,
    ) -> usize {
        let at = group % LANES * self.room() + group / LANES;
        let lines = &mut self.codes[at * codes.len()..][..codes.len()];
        for (line, codes) in lines.iter_mut().zip(codes) {
            let prepared = match F::CODING {
                Coding::Offset(_) => S::prepare(signed::<S, F>(*codes)),
                Coding::Signed => *codes,
            };
            S::store_bytes(prepared, &mut line.0);
        }
        scales.store(&mut self.scales[at].0);
        at
    }
}

/// Rows of sixteen numbers to columns.
#[inline(always)]
fn transpose_columns<'a>(
    rows: &[[f32; LANES]; ROWS],
    columns: impl Iterator<Item = &'a mut Column>,
) {
    for (g, column) in columns.enumerate() {
        for (value, row) in column.0.iter_mut().zip(rows) {
            *value = row[g];
        }
    }
}

/// Activation rows of a block, which are arranged together, and the blocks and panels that one call of [`gemm_packed_int8`] may
/// take.
pub const MAX_ROWS: usize = 4;
pub const MAX_BLOCKS: usize = 8;
pub const MAX_PANELS: usize = 6;
/// Panels that go through the rows together where registers are many: twelve sums of integers, as many of floats, and what is
/// multiplied.
const TOGETHER: usize = 3;

/// The same group of four rows, or two short groups that are neighbours in a lane.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct FourRows {
    /// Four columns of each row in turn; where rows are multiplied in pairs, all columns of a part of each row.
    codes: [i8; MAX_ROWS * GROUP],
    /// One of a whole group, two of short ones.
    parts: [Part; 2],
}

/// What a group of each row has beside its codes.
#[derive(Clone, Copy)]
struct Part {
    scales: [f32; MAX_ROWS],
    /// Where the sums of products begin: as many as must not count, where codes of weights are shifted to be unsigned.
    starts: [i32; MAX_ROWS],
    /// What the values add up to.
    sums: [f32; MAX_ROWS],
}

impl FourRows {
    pub const ZERO: FourRows = FourRows {
        codes: [0; MAX_ROWS * GROUP],
        parts: [Part {
            scales: [0.0; MAX_ROWS],
            starts: [0; MAX_ROWS],
            sums: [0.0; MAX_ROWS],
        }; 2],
    };

    /// How many [`arrange_int8`] makes of rows with so many columns.
    pub fn count(columns: usize) -> usize {
        columns.div_ceil(CHUNK) * LANES
    }

    /// Copies one of `PARTS` groups of each row.
    #[inline(always)]
    fn fill<S: Simd, const PARTS: usize>(
        &mut self,
        part: usize,
        chunks: [&Chunk; MAX_ROWS],
        group: usize,
    ) {
        let sixteens = GROUP / PARTS / 16;
        for i in 0..sixteens {
            let rows: [&[i8; 16]; MAX_ROWS] = array![&[0; 16]; r => {
                &chunks[r].codes.as_chunks().0[group * sixteens + i]
            }];
            let (codes, _) = self.codes.as_chunks_mut::<16>();
            let first = part * MAX_ROWS * sixteens;
            for r in 0..MAX_ROWS {
                if S::PAIRS {
                    codes[first + r * sixteens + i] = *rows[r];
                } else {
                    let quads: [[i8; 4]; MAX_ROWS] =
                        array![[0; 4]; from => rows[from].as_chunks().0[r]];
                    codes[first + MAX_ROWS * i + r].copy_from_slice(quads.as_flattened());
                }
            }
        }
        let part = &mut self.parts[part];
        for (r, chunk) in chunks.iter().enumerate() {
            let sum = if PARTS == 1 {
                chunk.sums[group]
            } else {
                chunk.half_sums[group]
            };
            let scale = chunk.scales[group / PARTS];
            part.scales[r] = scale;
            part.starts[r] = -S::SIGNED_OFFSET * sum;
            part.sums[r] = sum as f32 * scale;
        }
    }
}

/// Arranges up to [`MAX_ROWS`] rows for weights whose groups have `group` values: lane after lane. Missing rows repeat the last.
#[inline(always)]
pub fn arrange_int8<S: Simd>(x: &[Row<'_>], group: usize, arranged: &mut [FourRows]) {
    if group == GROUP {
        arrange::<S, 1>(x, arranged);
    } else {
        arrange::<S, 2>(x, arranged);
    }
}

#[inline(always)]
fn arrange<S: Simd, const PARTS: usize>(x: &[Row<'_>], arranged: &mut [FourRows]) {
    let count = x[0].len();
    assert_eq!(arranged.len(), count * LANES, "rows of another width");
    for index in 0..count {
        let chunks: [&Chunk; MAX_ROWS] = array![&x[0][0]; r => &x[r.min(x.len() - 1)][index]];
        for lane in 0..LANES {
            let four = &mut arranged[lane * count + index];
            for part in 0..PARTS {
                four.fill::<S, PARTS>(part, chunks, part * LANES + lane);
            }
        }
    }
}

/// Partial sums, and the outputs of the last call.
pub struct Accumulators {
    /// Sums of lanes that wait for those of as many others: of one lane, two, four and eight.
    waiting: Vec<[Outputs<TOGETHER>; MAX_BLOCKS]>,
    outputs: Box<[Outputs<MAX_PANELS>; MAX_BLOCKS]>,
}

/// Outputs of a block of rows and `C` panels.
type Outputs<const C: usize> = [[Column; C]; MAX_ROWS];

/// How often pairs of lanes are added up.
const LEVELS: usize = LANES.ilog2() as usize;

impl Default for Accumulators {
    fn default() -> Accumulators {
        let zero = Column([0.0; ROWS]);
        Accumulators {
            waiting: vec![[[[zero; TOGETHER]; MAX_ROWS]; MAX_BLOCKS]; LEVELS],
            outputs: Box::new([[[zero; MAX_PANELS]; MAX_ROWS]; MAX_BLOCKS]),
        }
    }
}

impl Accumulators {
    /// The first outputs of a row.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        let columns = &self.outputs[row / MAX_ROWS][row % MAX_ROWS];
        for (out, column) in out.chunks_mut(ROWS).zip(columns) {
            out.copy_from_slice(&column.0[..out.len()]);
        }
    }
}

/// Multiplies some panels of one format and width with blocks of rows, `x`, that were arranged for it.
#[inline(always)]
pub fn gemm_packed_int8<S: Simd>(panels: &[Panel], x: &[FourRows], sums: &mut Accumulators) {
    assert!(
        (1..=MAX_PANELS).contains(&panels.len()),
        "{} panels are none or too many",
        panels.len()
    );
    let block = FourRows::count(panels[0].columns());
    assert!(
        x.len().is_multiple_of(block) && x.len() <= MAX_BLOCKS * block,
        "{} entries are too many, or of another width",
        x.len()
    );
    if panels[0].group == GROUP {
        all_panels::<S, 1>(panels, x, sums);
    } else {
        all_panels::<S, 2>(panels, x, sums);
    }
}

/// As many panels together as sums fit in registers. A row's result is the same in any company.
#[inline(always)]
fn all_panels<S: Simd, const PARTS: usize>(
    panels: &[Panel],
    x: &[FourRows],
    sums: &mut Accumulators,
) {
    let together = if S::WIDE { TOGETHER } else { 1 };
    for (i, panels) in panels.chunks(together).enumerate() {
        let first = i * together;
        match panels {
            [a, b, c] if S::WIDE => tile::<S, PARTS, 3>([a, b, c], first, x, sums),
            [a, b] if S::WIDE => tile::<S, PARTS, 2>([a, b], first, x, sums),
            [a, ..] => tile::<S, PARTS, 1>([a], first, x, sums),
            [] => {}
        }
    }
}

/// All blocks of rows times `C` panels, lane after lane, so that a lane of the panels stays near while the rows pass by.
///
/// Lanes are added up in pairs, the pairs in pairs and so on, lane `i` with lane `i + 8` first. They come in the order in which
/// these meet, so that few sums wait.
#[inline(always)]
fn tile<S: Simd, const PARTS: usize, const C: usize>(
    panels: [&Panel; C],
    first: usize,
    x: &[FourRows],
    sums: &mut Accumulators,
) {
    let Accumulators { waiting, outputs } = sums;
    let block = FourRows::count(panels[0].columns());
    let per_lane = block / LANES;
    for turn in 0..LANES {
        let lane = turn.reverse_bits() >> (usize::BITS as usize - LEVELS);
        let level = turn.trailing_ones() as usize;
        let (below, rest) = waiting.split_at_mut(level);
        for (i, x) in x.chunks_exact(block).enumerate() {
            let x = &x[lane * per_lane..][..per_lane];
            let mut sums = lane_sums::<S, PARTS, C>(panels, lane, x);
            for earlier in &*below {
                for r in 0..MAX_ROWS {
                    for c in 0..C {
                        sums[r][c] = S::Floats::load(&earlier[i][r][c].0).add(sums[r][c]);
                    }
                }
            }
            for r in 0..MAX_ROWS {
                for c in 0..C {
                    let to = match rest.first_mut() {
                        Some(waiting) => &mut waiting[i][r][c],
                        None => &mut outputs[i][r][first + c],
                    };
                    sums[r][c].store(&mut to.0);
                }
            }
        }
    }
}

/// What the groups of a lane add up to.
#[inline(always)]
fn lane_sums<S: Simd, const PARTS: usize, const C: usize>(
    panels: [&Panel; C],
    lane: usize,
    x: &[FourRows],
) -> [[S::Floats; C]; MAX_ROWS] {
    let groups = panels[0].groups_of(lane);
    let quads = panels[0].group / 4;
    let of_lane = groups.start * quads..groups.end * quads;
    let lines: [&[Line]; C] = array![[].as_slice(); c => &panels[c].codes[of_lane.clone()]];
    let scales: [&[Column]; C] = array![[].as_slice(); c => &panels[c].scales[groups.clone()]];
    let mins: [&[Column]; C] = array![[].as_slice(); c => {
        panels[c].mins.get(groups.clone()).unwrap_or_default()
    }];
    let mut sums = [[S::Floats::zero(); C]; MAX_ROWS];
    for i in 0..groups.len() {
        let (x, part) = (&x[i / PARTS], i % PARTS);
        let lines = array![[].as_slice(); c => &lines[c][i * quads..][..quads]];
        let totals = products::<S, PARTS, C>(lines, x, part);
        let scales: [S::Floats; C] =
            array![S::Floats::zero(); c => S::Floats::load(&scales[c][i].0)];
        for r in 0..MAX_ROWS {
            let scale = S::Floats::splat(x.parts[part].scales[r]);
            for c in 0..C {
                sums[r][c] = S::to_floats(totals[r][c]).mul_add(scales[c].mul(scale), sums[r][c]);
            }
        }
        if mins[0].len() > i {
            for (sums, x_sum) in sums.iter_mut().zip(x.parts[part].sums) {
                let x_sum = S::Floats::splat(x_sum);
                for (sum, mins) in sums.iter_mut().zip(mins) {
                    *sum = S::Floats::load(&mins[i].0).neg_mul_add(x_sum, *sum);
                }
            }
        }
    }
    sums
}

/// Products of one group's columns, added up.
#[inline(always)]
fn products<S: Simd, const PARTS: usize, const C: usize>(
    lines: [&[Line]; C],
    x: &FourRows,
    part: usize,
) -> [[S::Ints; C]; MAX_ROWS] {
    let mut totals: [[S::Ints; C]; MAX_ROWS] = array![[S::ints(0); C]; r => {
        [S::ints(x.parts[part].starts[r]); C]
    }];
    if S::PAIRS {
        let sixteens = GROUP / PARTS / 16;
        let (codes, _) = x.codes.as_chunks::<16>();
        let rows: [&[[i8; 16]]; MAX_ROWS] = array![[].as_slice(); r => {
            &codes[(part * MAX_ROWS + r) * sixteens..][..sixteens]
        }];
        for c in 0..C {
            let of_panel = S::totals_by_eights(lines[c], rows);
            for r in 0..MAX_ROWS {
                totals[r][c] = of_panel[r];
            }
        }
        return totals;
    }
    let (codes, _) = x.codes.as_chunks::<{ 4 * MAX_ROWS }>();
    let codes = &codes[part * (GROUP / PARTS / 4)..][..GROUP / PARTS / 4];
    for (quad, codes) in codes.iter().enumerate() {
        let weights: [S::Bytes; C] =
            array![S::load_bytes(&[0; 64]); c => S::load_bytes(&lines[c][quad].0)];
        let (of_rows, _) = codes.as_chunks();
        for r in 0..MAX_ROWS {
            let x = S::splat_quad(of_rows[r]);
            for c in 0..C {
                totals[r][c] = S::dot_prepared(totals[r][c], weights[c], x);
            }
        }
    }
    totals
}
