//! Sixteen weight rows times sixteen activation rows, a group at a time in tile registers.
//!
//! This is the prefill path of processors with such registers ([`crate::simd::Tiles`]). Weights are unpacked once into
//! strips, activations once into row tiles, both in steps of one group. A step gives 256 exact integers,
//! which vector instructions scale and add to the lane of the group (see [`super`]). The steps of a lane stand next to each
//! other, so the sums of a lane stay in registers, and lanes come in an order in which they can be folded as they end.

use std::marker::PhantomData;

use carat_gguf::QuantType;

use super::{
    WeightRows,
    format::{Format, Tail, WithFormat, signed, with_format},
};
use crate::{
    activations::{CHUNK, GROUP, Row},
    simd::{Floats, HELD, LANES, Line, Simd, Square, Tile, Tiles, array},
};

/// Rows of a strip of weights, and of a tile of activations.
pub(crate) const ROWS: usize = LANES;
/// Strips and row tiles that one call of [`multiply`] may take.
pub(crate) const MOST_STRIPS: usize = 8;
pub(crate) const MOST_TILES: usize = 4;

/// One group of sixteen rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Step {
    codes: Tile,
    scales: [f32; ROWS],
    /// Minimums of weights, scaled sums of activations.
    offsets: [f32; ROWS],
}

impl Step {
    pub(crate) const ZERO: Step = Step {
        codes: [Line([0; 64]); 8],
        scales: [0.0; ROWS],
        offsets: [0.0; ROWS],
    };
}

/// Sixteen weight rows, unpacked.
#[derive(Default)]
pub(crate) struct Strip {
    steps: Vec<Step>,
    /// Values that share a scale.
    group: usize,
    minimums: bool,
}

/// Groups in a row of `columns`, for weights of format `quant`, and how long they are.
pub(crate) fn groups(quant: QuantType, columns: usize) -> (usize, usize) {
    struct Group;
    impl WithFormat for Group {
        type Output = usize;
        fn run<F: Format>(self) -> usize {
            F::GROUP
        }
    }
    let group = with_format(quant, Group);
    (columns / group, group)
}

/// The order of steps: lane after lane, with lanes that are added first next to each other.
struct Order {
    starts: [usize; LANES + 1],
}

impl Order {
    #[inline(always)]
    fn new(groups: usize) -> Order {
        let mut starts = [0; LANES + 1];
        for turn in 0..LANES {
            let lane = reversed(turn);
            starts[turn + 1] = starts[turn] + groups.saturating_sub(lane).div_ceil(LANES);
        }
        Order { starts }
    }

    #[inline(always)]
    fn place(&self, group: usize) -> usize {
        self.starts[reversed(group % LANES)] + group / LANES
    }
}

/// The lane of a turn, and the turn of a lane: its four bits in reverse.
#[inline(always)]
fn reversed(number: usize) -> usize {
    usize::from((number as u8).reverse_bits() >> 4)
}

/// Unpacks up to sixteen rows; missing ones count as zero.
#[inline(always)]
pub(crate) fn pack<S: Simd>(quant: QuantType, weights: WeightRows<'_>, strip: &mut Strip) {
    assert!(weights.len() <= ROWS, "a strip holds {ROWS} rows");
    with_format(
        quant,
        Pack::<S> {
            weights,
            strip,
            simd: PhantomData,
        },
    );
}

struct Pack<'a, S> {
    weights: WeightRows<'a>,
    strip: &'a mut Strip,
    simd: PhantomData<S>,
}

impl<S: Simd> WithFormat for Pack<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<F: Format>(self) {
        let Pack { weights, strip, .. } = self;
        let groups = weights.row_bytes / F::QUANT.block_bytes() * (F::QUANT.block_len() / F::GROUP);
        strip.group = F::GROUP;
        strip.minimums = F::MINS;
        strip.steps.resize(groups, Step::ZERO);
        let order = Order::new(groups);
        let quads = F::GROUP / 4;

        let mut codes = [[Line([0; 64]); ROWS]; 8];
        let mut scales = [[0.0; LANES]; ROWS];
        let mut mins = [[0.0; LANES]; ROWS];
        let mut turned = [Line([0; 64]); LANES];
        for first in (0..groups).step_by(LANES) {
            let start = first / LANES * F::CHUNK_BYTES;
            for row in 0..weights.len() {
                let bytes = weights.row(row);
                let tail;
                let chunk = if let Some(chunk) = bytes.get(start..start + F::CHUNK_BYTES) {
                    chunk
                } else {
                    tail = Tail::of::<F>(bytes).expect("a row ends short of a whole chunk");
                    tail.chunk::<F>()
                };
                let unpacked = F::unpack::<S>(chunk);
                for (piece, codes) in codes.iter_mut().enumerate().take(F::GROUP / 4) {
                    S::store_bytes(signed::<S, F>(unpacked.codes[piece]), &mut codes[row].0);
                }
                unpacked.scales.store(&mut scales[row]);
                unpacked.mins.store(&mut mins[row]);
            }
            let count = (groups - first).min(LANES);
            let in_piece = 64 / F::GROUP;
            for (piece, codes) in codes.iter().enumerate().take(count.div_ceil(in_piece)) {
                S::transpose(codes, &mut turned);
                for (i, turned) in turned.chunks(quads).enumerate() {
                    let group = piece * in_piece + i;
                    if group < count {
                        let step = &mut strip.steps[order.place(first + group)];
                        step.codes[..quads].copy_from_slice(turned);
                    }
                }
            }
            for group in 0..count {
                let step = &mut strip.steps[order.place(first + group)];
                step.scales = array![0.0; row => scales[row][group]];
                if F::MINS {
                    step.offsets = array![0.0; row => mins[row][group]];
                }
            }
        }
    }
}

/// Turns up to sixteen activation rows into the steps of a row tile; missing rows count as zero.
#[inline(always)]
pub(crate) fn arrange<S: Simd>(x: &[Row<'_>], group: usize, steps: &mut [Step]) {
    assert!(x.len() <= ROWS, "a tile holds {ROWS} rows");
    match group {
        GROUP => arrange_groups::<S, GROUP>(x, steps),
        16 => arrange_groups::<S, 16>(x, steps),
        _ => panic!("no format has groups of {group}"),
    }
}

#[inline(always)]
fn arrange_groups<S: Simd, const G: usize>(x: &[Row<'_>], steps: &mut [Step]) {
    let order = Order::new(steps.len());
    if x.len() < ROWS {
        steps.fill(Step::ZERO);
    }
    for (row, x) in x.iter().enumerate() {
        for (chunk, first_group) in x.iter().zip((0..steps.len()).step_by(CHUNK / G)) {
            let count = (steps.len() - first_group).min(CHUNK / G);
            let (codes, _) = chunk.codes.as_chunks::<G>();
            for (i, codes) in codes[..count].iter().enumerate() {
                let step = &mut steps[order.place(first_group + i)];
                let first = i * G;
                let line = &mut step.codes[row * G / 64].0[row * G % 64..][..G];
                for (to, code) in line.iter_mut().zip(codes) {
                    *to = code.cast_unsigned();
                }
                let scale = chunk.scales[first / GROUP];
                let sum = if G == GROUP {
                    chunk.sums[first / GROUP]
                } else {
                    chunk.half_sums[first / 16]
                };
                step.scales[row] = scale;
                step.offsets[row] = sum as f32 * scale;
            }
        }
    }
}

/// Sums of a row tile and a strip, or some of their lanes: `[row][weight row]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Outputs([[f32; ROWS]; ROWS]);

/// Partial sums of a call, each `[tile][strip]`. After it, `outputs` has them.
pub(crate) struct TileSums {
    /// Of the lane at work.
    lane: Vec<Outputs>,
    /// Of 1, 2, 4 and 8 lanes that wait for as many more.
    folded: [Vec<Outputs>; 4],
    outputs: Vec<Outputs>,
    strips: usize,
}

impl Default for TileSums {
    fn default() -> TileSums {
        let block = || vec![Outputs([[0.0; ROWS]; ROWS]); MOST_TILES * MOST_STRIPS];
        TileSums {
            lane: block(),
            folded: std::array::from_fn(|_| block()),
            outputs: block(),
            strips: 0,
        }
    }
}

impl TileSums {
    /// The outputs of a row, counted through the tiles.
    pub(crate) fn copy_row(&self, row: usize, out: &mut [f32]) {
        let squares = &self.outputs[row / ROWS * self.strips..][..self.strips];
        for (out, square) in out.chunks_mut(ROWS).zip(squares) {
            out.copy_from_slice(&square.0[row % ROWS][..out.len()]);
        }
    }
}

/// Multiplies strips of one format and width with row tiles, `[tiles, groups]`.
#[inline(always)]
pub(crate) fn multiply<S: Simd>(strips: &[Strip], rows: &[Step], sums: &mut TileSums) {
    let groups = strips[0].steps.len();
    assert!(
        strips.len() <= MOST_STRIPS && rows.len() <= MOST_TILES * groups,
        "{} strips and {} tiles are too many",
        strips.len(),
        rows.len() / groups
    );
    sums.strips = strips.len();
    if strips[0].minimums {
        multiply_all::<S, true>(strips, rows, sums);
    } else {
        multiply_all::<S, false>(strips, rows, sums);
    }
}

/// Squares on their way from tile registers to vectors; more were no faster.
const RING: usize = 4;
/// Squares that tiles are ahead of vectors, which hides how long a product takes.
const AHEAD: usize = 2;

#[inline(always)]
fn multiply_all<S: Simd, const MINS: bool>(strips: &[Strip], rows: &[Step], sums: &mut TileSums) {
    let groups = strips[0].steps.len();
    let order = Order::new(groups);
    let pairs = rows.len() / groups * strips.len();
    let mut tiles = S::Tiles::take(strips[0].group);
    let mut ring = [Square::ZERO; RING];
    for turn in 0..LANES {
        let (first, end) = (order.starts[turn], order.starts[turn + 1]);
        if first == end {
            for pair in 0..pairs {
                fold::<S>([S::Floats::zero(); ROWS], turn, pair, sums);
            }
        }
        for start in (first..end).step_by(HELD) {
            let count = (end - start).min(HELD);
            let (mut ahead, mut behind) = (Cursor::default(), Cursor::default());
            let mut lane = [S::Floats::zero(); ROWS];
            for i in 0..pairs * count + AHEAD {
                if i < pairs * count {
                    let rows = &rows[ahead.tile * groups + start..][..count];
                    if ahead.strip == 0 && ahead.place == 0 {
                        for (place, step) in rows.iter().enumerate() {
                            tiles.hold(place, &step.codes);
                        }
                    }
                    let weights = &strips[ahead.strip].steps[start + ahead.place];
                    tiles.multiply(ahead.place, &weights.codes, &mut ring[i % RING]);
                    ahead.advance(count, strips.len());
                }
                if i < AHEAD {
                    continue;
                }
                if behind.place == 0 {
                    lane = if start == first {
                        [S::Floats::zero(); ROWS]
                    } else {
                        load::<S>(&sums.lane[behind.pair])
                    };
                }
                let step = start + behind.place;
                lane = scale::<S, MINS>(
                    lane,
                    &ring[(i - AHEAD) % RING],
                    &rows[behind.tile * groups + step],
                    &strips[behind.strip].steps[step],
                );
                if behind.place == count - 1 {
                    if start + count < end {
                        store::<S>(lane, &mut sums.lane[behind.pair]);
                    } else {
                        fold::<S>(lane, turn, behind.pair, sums);
                    }
                }
                behind.advance(count, strips.len());
            }
        }
    }
}

/// A step of a pair of row tile and strip, place by place, strip by strip, tile by tile.
#[derive(Default)]
struct Cursor {
    pair: usize,
    tile: usize,
    strip: usize,
    place: usize,
}

impl Cursor {
    #[inline(always)]
    fn advance(&mut self, places: usize, strips: usize) {
        self.place += 1;
        if self.place == places {
            self.place = 0;
            self.pair += 1;
            self.strip += 1;
            if self.strip == strips {
                self.strip = 0;
                self.tile += 1;
            }
        }
    }
}

/// Adds one group: the squares of its integers times both scales, less the minimums.
#[inline(always)]
fn scale<S: Simd, const MINS: bool>(
    mut lane: [S::Floats; ROWS],
    square: &Square,
    rows: &Step,
    weights: &Step,
) -> [S::Floats; ROWS] {
    let scales = S::Floats::load(&weights.scales);
    let mins = S::Floats::load(&weights.offsets);
    for (i, sum) in lane.iter_mut().enumerate() {
        let by = scales.mul(S::Floats::splat(rows.scales[i]));
        *sum = S::to_floats(S::load_ints(&square.0[i])).mul_add(by, *sum);
        if MINS {
            *sum = mins.neg_mul_add(S::Floats::splat(rows.offsets[i]), *sum);
        }
    }
    lane
}

/// Adds a finished lane to what waits for it, in the order of [`Floats::sum`]: a counter in binary, lane by lane.
#[inline(always)]
fn fold<S: Simd>(mut lane: [S::Floats; ROWS], turn: usize, pair: usize, sums: &mut TileSums) {
    let levels = turn.trailing_ones() as usize;
    for level in 0..levels {
        let before = load::<S>(&sums.folded[level][pair]);
        for (sum, before) in lane.iter_mut().zip(before) {
            *sum = before.add(*sum);
        }
    }
    match sums.folded.get_mut(levels) {
        Some(folded) => store::<S>(lane, &mut folded[pair]),
        None => store::<S>(lane, &mut sums.outputs[pair]),
    }
}

#[inline(always)]
fn load<S: Simd>(square: &Outputs) -> [S::Floats; ROWS] {
    array![S::Floats::zero(); i => S::Floats::load(&square.0[i])]
}

#[inline(always)]
fn store<S: Simd>(sums: [S::Floats; ROWS], square: &mut Outputs) {
    for (sum, out) in sums.into_iter().zip(&mut square.0) {
        sum.store(out);
    }
}
