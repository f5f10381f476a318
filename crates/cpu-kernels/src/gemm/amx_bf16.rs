//! GEMM of large batches in BF16, two by two tiles at a time, where there are registers for whole tiles.
//!
//! A class of results of its own, nearer to exact ones than 8-bit activations: weights are what their format says, rounded to
//! BF16, and so are activations. Scales are part of the weights then, so the sums stay in tile registers from the first
//! value to the last. Weights that are BF16 in the file meet activations in three terms that add up to them exactly.
//! One output is the sum over steps of 32 values in order, as [`crate::simd::Tiles::multiply`] adds them; it does not
//! depend on other rows, on output tiles, or on the K blocks that steps are cut into.
#![cfg_attr(
    all(not(target_arch = "x86_64"), not(test)),
    expect(dead_code, reason = "no other processor has such tiles yet")
)]

use carat_gguf::QuantType;

use super::{
    WeightRows,
    format::{Coding, Format, WithFormat, chunk_at, with_format},
};
use crate::{
    matrix::MatrixMut,
    simd::{Accumulate, Floats, K_STEP, LANES, Line, Simd, Tile, Tiles, unit_of_row},
};

/// Rows of a tile.
pub const ROWS: usize = LANES;
/// Values that a K block begins at multiples of: whole chunks of every format.
pub const K_BLOCK_MULTIPLE: usize = 512;
/// BF16 terms of an f32 that add up to it.
pub const TERMS: usize = 3;

/// Tiles along a row of `columns`.
pub fn k_steps(columns: usize) -> usize {
    columns.div_ceil(K_STEP)
}

/// Rounds up to sixteen rows to BF16, `[steps]`. Lines of missing rows stay as they are.
#[inline(always)]
pub fn to_bf16<T: Tiles>(rows: &[&[f32]], tiles: &mut [Tile]) {
    for (i, row) in rows.iter().enumerate() {
        for (values, tile) in row.chunks(K_STEP).zip(tiles.iter_mut()) {
            let (low, high) = load::<T::Vectors>(values);
            T::to_bf16(low, high, &mut tile.0[i]);
        }
    }
}

/// Splits up to sixteen rows into BF16 terms, `[steps, TERMS]`, the largest first.
#[inline(always)]
pub fn split_bf16<T: Tiles>(rows: &[&[f32]], tiles: &mut [Tile]) {
    let (tiles, _) = tiles.as_chunks_mut::<TERMS>();
    for (i, row) in rows.iter().enumerate() {
        for (values, tiles) in row.chunks(K_STEP).zip(tiles.iter_mut()) {
            let (mut low, mut high) = load::<T::Vectors>(values);
            for tile in tiles {
                let line = &mut tile.0[i];
                T::to_bf16(low, high, line);
                let (rounded, _) = line.0.as_chunks();
                low = low.sub(Floats::load_bf16_bytes(&rounded[0]));
                high = high.sub(Floats::load_bf16_bytes(&rounded[1]));
            }
        }
    }
}

/// Up to 32 numbers, the missing ones zero.
#[inline(always)]
fn load<S: Simd>(values: &[f32]) -> (S::Floats, S::Floats) {
    if let (&[low, high], []) = values.as_chunks() {
        (S::Floats::load(&low), S::Floats::load(&high))
    } else {
        let middle = values.len().min(LANES);
        (
            S::Floats::load_part(&values[..middle]),
            S::Floats::load_part(&values[middle..]),
        )
    }
}

/// Unpacks up to sixteen rows from value `first` on, a multiple of [`K_BLOCK_MULTIPLE`], as far as `tiles` go. Missing rows
/// and values count as zero.
#[inline(always)]
pub fn pack_bf16<T: Tiles>(
    quant: QuantType,
    weights: WeightRows<'_>,
    first: usize,
    tiles: &mut [Tile],
) {
    assert!(weights.len() <= ROWS, "a tile holds {ROWS} rows");
    match quant {
        QuantType::BF16 => pack_floats::<T, 2>(weights, first, tiles),
        QuantType::F32 => pack_floats::<T, 4>(weights, first, tiles),
        _ => with_format(
            quant,
            Pack::<T> {
                weights,
                first,
                tiles,
                level: std::marker::PhantomData,
            },
        ),
    }
}

/// Weights that are BF16 values, stored in `BYTES` bytes.
#[inline(always)]
fn pack_floats<T: Tiles, const BYTES: usize>(
    weights: WeightRows<'_>,
    first: usize,
    tiles: &mut [Tile],
) {
    let mut lines = [Line([0; 64]); ROWS];
    for (step, tile) in tiles.iter_mut().enumerate() {
        let start = (first + step * K_STEP) * BYTES;
        for (i, line) in lines.iter_mut().enumerate().take(weights.len()) {
            let row = &weights.row(i)[start..];
            let row = &row[..row.len().min(K_STEP * BYTES)];
            if let (2, Some(whole)) = (BYTES, row.first_chunk()) {
                line.0 = *whole;
            } else {
                // The upper half of an F32 that is a BF16 is that BF16.
                line.0.fill(0);
                let (bf16s, _) = line.0.as_chunks_mut::<2>();
                for (bf16, value) in bf16s.iter_mut().zip(row.chunks_exact(BYTES)) {
                    bf16.copy_from_slice(&value[BYTES - 2..]);
                }
            }
        }
        T::Vectors::transpose(&lines, &mut tile.0);
    }
}

struct Pack<'a, T> {
    weights: WeightRows<'a>,
    first: usize,
    tiles: &'a mut [Tile],
    level: std::marker::PhantomData<T>,
}

impl<T: Tiles> WithFormat for Pack<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<F: Format>(self, format: F) {
        let Pack {
            weights,
            first,
            tiles,
            ..
        } = self;
        let chunk_values = F::GROUP * LANES;
        let mut codes = [[Line([0; 64]); ROWS]; 8];
        let mut scales = [Line([0; 64]); ROWS];
        let mut mins = [Line([0; 64]); ROWS];
        for (chunk, tiles) in tiles.chunks_mut(chunk_values / K_STEP).enumerate() {
            let start = (first / chunk_values + chunk) * format.chunk_bytes();
            for row in 0..weights.len() {
                let mut tail = None;
                let chunk = chunk_at(format, weights.row(row), start, &mut tail);
                let unpacked = format.unpack::<T::Vectors>(chunk);
                for (piece, codes) in codes.iter_mut().enumerate().take(F::GROUP / 4) {
                    let unsigned = unsigned::<T::Vectors, F>(unpacked.codes[piece]);
                    T::Vectors::store_bytes(unsigned, &mut codes[unit_of_row(row)].0);
                }
                unpacked.scales.store_f32_bytes(&mut scales[row].0);
                if F::MINS {
                    unpacked.mins.store_f32_bytes(&mut mins[row].0);
                }
            }
            fill::<T, F>(&codes, &scales, &mins, tiles);
        }
    }
}

/// The tiles of a chunk, from its codes `[piece][unit]`, and scales and minimums `[row]`.
#[inline(always)]
fn fill<T: Tiles, F: Format>(
    codes: &[[Line; ROWS]; 8],
    scales: &[Line; ROWS],
    mins: &[Line; ROWS],
    tiles: &mut [Tile],
) {
    let mut group_scales = [Line([0; 64]); LANES];
    let mut group_mins = [Line([0; 64]); LANES];
    let mut units = [Line([0; 64]); LANES];
    T::Vectors::transpose(scales, &mut group_scales);
    if F::MINS {
        T::Vectors::transpose(mins, &mut group_mins);
    }
    let offset = <T::Vectors as Simd>::Floats::splat(-offset::<F>());
    let in_group = F::GROUP / 4;
    // A piece has 64 values of every row, so two tiles.
    for (piece, tiles) in tiles.chunks_mut(2).enumerate() {
        T::Vectors::transpose(&codes[piece], &mut units);
        for (half, tile) in tiles.iter_mut().enumerate() {
            for part in 0..K_STEP / F::GROUP {
                let group = (2 * piece + half) * K_STEP / F::GROUP + part;
                let scales = twice::<T::Vectors>(&group_scales[group]);
                let offsets = if F::MINS {
                    twice::<T::Vectors>(&group_mins[group])
                } else {
                    [scales[0].mul(offset), scales[1].mul(offset)]
                };
                for unit in part * in_group..(part + 1) * in_group {
                    let from = &units[8 * half + unit];
                    for pair in 0..2 {
                        let [low, high] = T::widen_pair(from, pair);
                        let (low, high) = if F::MINS {
                            (
                                low.mul(scales[0]).sub(offsets[0]),
                                high.mul(scales[1]).sub(offsets[1]),
                            )
                        } else {
                            // Offsets are powers of two, so this rounds once, as the product with the signed code would.
                            (
                                low.mul_add(scales[0], offsets[0]),
                                high.mul_add(scales[1], offsets[1]),
                            )
                        };
                        T::to_bf16(low, high, &mut tile.0[2 * unit + pair]);
                    }
                }
            }
        }
    }
}

/// Excess of unsigned codes over the weights' codes.
#[inline(always)]
fn offset<F: Format>() -> f32 {
    match F::CODING {
        Coding::Offset(offset) => offset as f32,
        Coding::Signed => 128.0,
    }
}

#[inline(always)]
fn unsigned<S: Simd, F: Format>(codes: S::Bytes) -> S::Bytes {
    match F::CODING {
        Coding::Offset(_) => codes,
        Coding::Signed => S::sub_bytes(codes, 128),
    }
}

/// Sixteen numbers, each in two neighbouring lanes.
#[inline(always)]
fn twice<S: Simd>(line: &Line) -> [S::Floats; 2] {
    let mut lanes = [0.0; LANES];
    S::Floats::load_f32_bytes(&line.0).store(&mut lanes);
    let (eights, _) = lanes.as_chunks();
    [
        S::Floats::load_twice(&eights[0]),
        S::Floats::load_twice(&eights[1]),
    ]
}

/// One K block of rows and of weights.
#[derive(Clone, Copy)]
pub struct TileOperands<'a> {
    /// `[row tiles, steps, terms]`.
    pub left: TileRows<'a>,
    pub terms: usize,
    /// `[rows of weight tiles, steps]`.
    pub right: TileRows<'a>,
    pub steps: usize,
}

/// Rows of tiles, of which a K block takes some.
#[derive(Clone, Copy)]
pub struct TileRows<'a> {
    pub tiles: &'a [Tile],
    /// Tiles from a row of tiles to the next.
    pub row: usize,
    /// The first to take of every row.
    pub first: usize,
}

impl<'a> TileRows<'a> {
    fn part(self, row: usize, count: usize) -> &'a [Tile] {
        &self.tiles[row * self.row + self.first..][..count]
    }
}

impl<'a> TileOperands<'a> {
    fn left(&self, tile: usize) -> &'a [Tile] {
        self.left.part(tile, self.steps * self.terms)
    }

    fn right(&self, row: usize) -> &'a [Tile] {
        self.right.part(row, self.steps)
    }
}

/// Fills or adds to `out`: the rows of the tiles on the left by those of the tiles on the right.
#[inline(always)]
pub fn gemm_bf16<T: Tiles>(
    operands: &TileOperands<'_>,
    accumulate: Accumulate,
    out: &mut MatrixMut<'_>,
) {
    let mut tiles = T::take();
    let (rows, columns) = (out.rows().div_ceil(ROWS), out.columns().div_ceil(ROWS));
    // Two row tiles stay in the nearest caches while all weight tiles pass by.
    for row in (0..rows).step_by(2) {
        for column in (0..columns).step_by(2) {
            let (x, w) = (operands, column);
            match (rows - row > 1, columns - column > 1) {
                (true, true) => tile_block::<T, 2, 2>(
                    &mut tiles,
                    [x.left(row), x.left(row + 1)],
                    [x.right(w), x.right(w + 1)],
                    accumulate,
                    out,
                    [row, column],
                ),
                (true, false) => tile_block::<T, 2, 1>(
                    &mut tiles,
                    [x.left(row), x.left(row + 1)],
                    [x.right(w)],
                    accumulate,
                    out,
                    [row, column],
                ),
                (false, true) => tile_block::<T, 1, 2>(
                    &mut tiles,
                    [x.left(row)],
                    [x.right(w), x.right(w + 1)],
                    accumulate,
                    out,
                    [row, column],
                ),
                (false, false) => tile_block::<T, 1, 1>(
                    &mut tiles,
                    [x.left(row)],
                    [x.right(w)],
                    accumulate,
                    out,
                    [row, column],
                ),
            }
        }
    }
}

/// `M` by `N` tiles, whose sums accumulate at tile `at` of `out`.
#[inline(always)]
fn tile_block<T: Tiles, const M: usize, const N: usize>(
    tiles: &mut T,
    left: [&[Tile]; M],
    right: [&[Tile]; N],
    accumulate: Accumulate,
    out: &mut MatrixMut<'_>,
    at: [usize; 2],
) {
    let [row, column] = at.map(|tile| tile * ROWS);
    let (height, width) = (
        (out.rows() - row).min(M * ROWS),
        (out.columns() - column).min(N * ROWS),
    );
    let mut out = out.part(row..row + height, column..column + width);
    if (height, width) == (M * ROWS, N * ROWS) {
        tiles.multiply(left, right, accumulate, &mut out);
        return;
    }
    // Registers hold whole tiles: where the output is smaller, they are stored beside it first.
    let mut whole = [0.0; 4 * ROWS * ROWS];
    for i in 0..height {
        whole[i * N * ROWS..][..width].copy_from_slice(out.row_mut(i));
    }
    tiles.multiply(
        left,
        right,
        accumulate,
        &mut MatrixMut::new(&mut whole[..M * N * ROWS * ROWS], N * ROWS),
    );
    for i in 0..height {
        out.row_mut(i)
            .copy_from_slice(&whole[i * N * ROWS..][..width]);
    }
}
