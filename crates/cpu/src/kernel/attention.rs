//! The inner loops of attention over one page: scores, their exponentials, and the weighted sum of values.
//!
//! [`crate::op::kv`] says how a page holds keys and values. A lane of the scores is a position and a lane of the sum is a column,
//! so both run over the other dimension in plain order, one multiply-add after another: each result has one definition,
//! whatever else shares the registers.
//!
//! Codes of Q8_0 become floats in registers. A scale is of a token and a group of dimensions: scores are added up group by
//! group, each sum times its scales; for values the scales go into the weights, once a group.

use carat_model::backend::PAGE_TOKENS;
use half::f16;

use crate::{
    op::kv::{Block, Cells, GROUP, Row},
    simd::{Floats, LANES, Simd, array, exp},
};

/// Queries that one call of [`scores`] or [`weigh`] may take.
pub(crate) const MOST_QUERIES: usize = 8;

/// Scores of one page.
pub(crate) type PageScores = [f32; PAGE_TOKENS];

/// Vectors of scores of a page.
const VECTORS: usize = PAGE_TOKENS / LANES;

/// `out[i][t]` = query `i` times key `t`. At most [`MOST_QUERIES`] queries.
#[inline(always)]
pub(crate) fn scores<S: Simd>(queries: &[&[f32]], keys: Cells<'_>, out: &mut [&mut PageScores]) {
    let mut done = 0;
    while done < queries.len() {
        let (queries, out) = (&queries[done..], &mut out[done..]);
        done += if S::WIDE && queries.len() >= 8 {
            score_tile::<S, 8>(queries, keys, out)
        } else if S::WIDE && queries.len() >= 4 {
            score_tile::<S, 4>(queries, keys, out)
        } else if queries.len() >= 2 {
            score_tile::<S, 2>(queries, keys, out)
        } else {
            score_tile::<S, 1>(queries, keys, out)
        };
    }
}

#[inline(always)]
fn score_tile<S: Simd, const Q: usize>(
    queries: &[&[f32]],
    keys: Cells<'_>,
    out: &mut [&mut PageScores],
) -> usize {
    let queries: [&[f32]; Q] = array![[].as_slice(); q => queries[q]];
    let sums = match keys {
        Cells::Halves(rows) => score_halves::<S, Q>(queries, rows),
        Cells::Blocks(blocks) => score_blocks::<S, Q>(queries, blocks),
    };
    for (sums, out) in sums.iter().zip(out) {
        let (out, _) = out.as_chunks_mut();
        for (sum, out) in sums.iter().zip(out) {
            sum.store(out);
        }
    }
    Q
}

#[inline(always)]
fn score_halves<S: Simd, const Q: usize>(
    queries: [&[f32]; Q],
    keys: &[Row],
) -> [[S::Floats; VECTORS]; Q] {
    let (keys, _) = keys.as_chunks::<VECTORS>();
    let queries: [&[f32]; Q] = array![[].as_slice(); q => &queries[q][..keys.len()]];
    let mut sums = [[S::Floats::zero(); VECTORS]; Q];
    for (d, keys) in keys.iter().enumerate() {
        let keys: [S::Floats; VECTORS] =
            array![S::Floats::zero(); v => S::Floats::load_f16_bytes(&keys[v])];
        for (sums, query) in sums.iter_mut().zip(queries) {
            let query = S::Floats::splat(query[d]);
            for (sum, key) in sums.iter_mut().zip(keys) {
                *sum = key.mul_add(query, *sum);
            }
        }
    }
    sums
}

#[inline(always)]
fn score_blocks<S: Simd, const Q: usize>(
    queries: [&[f32]; Q],
    keys: &[Block],
) -> [[S::Floats; VECTORS]; Q] {
    let mut totals = [[S::Floats::zero(); VECTORS]; Q];
    for (g, block) in keys.iter().enumerate() {
        // The last group may be short.
        let dimensions = GROUP.min(queries[0].len() - g * GROUP);
        let queries: [&[f32]; Q] =
            array![[].as_slice(); q => &queries[q][g * GROUP..][..dimensions]];
        let (codes, scales) = block.split_at(GROUP);
        let mut sums = [[S::Floats::zero(); VECTORS]; Q];
        for (d, codes) in codes[..dimensions].iter().enumerate() {
            let keys = widen::<S>(codes);
            for (sums, query) in sums.iter_mut().zip(queries) {
                let query = S::Floats::splat(query[d]);
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum = key.mul_add(query, *sum);
                }
            }
        }
        for (v, scales) in scales.iter().enumerate() {
            let scales = S::Floats::load_f16_bytes(scales);
            for (totals, sums) in totals.iter_mut().zip(sums) {
                totals[v] = sums[v].mul_add(scales, totals[v]);
            }
        }
    }
    totals
}

/// A row of codes.
#[inline(always)]
fn widen<S: Simd>(codes: &Row) -> [S::Floats; VECTORS] {
    let (codes, _) = codes.as_chunks();
    array![S::Floats::zero(); v => S::Floats::load_i8_bytes(&codes[v])]
}

/// Turns the scores of `visible` positions into `e^(score - largest)` and all others into 0.
/// Returns the largest score and the sum of the exponentials. `visible` is not empty.
#[inline(always)]
pub(crate) fn soften<S: Simd>(scores: &mut [f32], visible: std::ops::Range<usize>) -> (f32, f32) {
    scores[..visible.start].fill(f32::NEG_INFINITY);
    scores[visible.end..].fill(f32::NEG_INFINITY);
    let (vectors, _) = scores.as_chunks_mut::<LANES>();
    let mut largest = S::Floats::splat(f32::NEG_INFINITY);
    for vector in vectors.iter() {
        largest = S::Floats::load(vector).max(largest);
    }
    let largest = largest.largest();
    let by = S::Floats::splat(largest);
    for vector in vectors.iter_mut() {
        exp(S::Floats::load(vector).sub(by)).store(vector);
    }
    scores[..visible.start].fill(0.0);
    scores[visible.end..].fill(0.0);
    let (vectors, _) = scores.as_chunks::<LANES>();
    let mut sum = S::Floats::zero();
    for vector in vectors {
        sum = sum.add(S::Floats::load(vector));
    }
    (largest, sum.sum())
}

/// `out[i] += weights[i] * values`, with `out` `[weights.len(), width]`. At most [`MOST_QUERIES`] rows of weights.
#[inline(always)]
pub(crate) fn weigh<S: Simd>(weights: &[&PageScores], values: Cells<'_>, out: &mut [f32]) {
    let width = out.len() / weights.len();
    let mut done = 0;
    while done < weights.len() {
        let (weights, out) = (&weights[done..], &mut out[done * width..]);
        done += if S::WIDE && weights.len() >= 8 {
            weigh_rows::<S, 8>(weights, values, out, width)
        } else if S::WIDE && weights.len() >= 4 {
            weigh_rows::<S, 4>(weights, values, out, width)
        } else if weights.len() >= 2 {
            weigh_rows::<S, 2>(weights, values, out, width)
        } else {
            weigh_rows::<S, 1>(weights, values, out, width)
        };
    }
}

#[inline(always)]
fn weigh_rows<S: Simd, const Q: usize>(
    weights: &[&PageScores],
    values: Cells<'_>,
    out: &mut [f32],
    width: usize,
) -> usize {
    let weights: [&PageScores; Q] = array![weights[0]; q => weights[q]];
    match values {
        Cells::Halves(rows) => weigh_halves::<S, Q>(weights, rows, out, width),
        Cells::Blocks(blocks) => {
            for (g, block) in blocks.iter().enumerate() {
                weigh_block::<S, Q>(weights, block, &mut out[g * GROUP..], width);
            }
        }
    }
    Q
}

#[inline(always)]
fn weigh_halves<S: Simd, const Q: usize>(
    weights: [&PageScores; Q],
    values: &[Row],
    out: &mut [f32],
    width: usize,
) {
    let mut column = 0;
    while column < width {
        // Sixteen sums; the more rows share a vector of values, the less widening there is.
        column += if S::WIDE && Q <= 4 && column + 4 * LANES <= width {
            weigh_tile::<S, Q, 4>(weights, values, out, width, column)
        } else if column + 2 * LANES <= width {
            weigh_tile::<S, Q, 2>(weights, values, out, width, column)
        } else {
            weigh_tile::<S, Q, 1>(weights, values, out, width, column)
        };
    }
}

#[inline(always)]
fn weigh_tile<S: Simd, const Q: usize, const V: usize>(
    weights: [&PageScores; Q],
    values: &[Row],
    out: &mut [f32],
    width: usize,
    column: usize,
) -> usize {
    let out = &mut out[column..];
    let mut sums = load_tile::<S, Q, V>(out, width);
    for (token, values) in values.chunks_exact(width / LANES).enumerate() {
        let values = &values[column / LANES..][..V];
        let values: [S::Floats; V] =
            array![S::Floats::zero(); v => S::Floats::load_f16_bytes(&values[v])];
        for (sums, weights) in sums.iter_mut().zip(weights) {
            let weight = S::Floats::splat(weights[token]);
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = value.mul_add(weight, *sum);
            }
        }
    }
    store_tile::<S, Q, V>(sums, out, width);
    V * LANES
}

/// One group of columns, at the start of each row of `out`.
#[inline(always)]
fn weigh_block<S: Simd, const Q: usize>(
    weights: [&PageScores; Q],
    block: &Block,
    out: &mut [f32],
    width: usize,
) {
    let (codes, scales) = block.split_at(PAGE_TOKENS);
    let mut scaled = [[0.0; PAGE_TOKENS]; Q];
    for (v, scales) in scales.iter().enumerate() {
        let scales = S::Floats::load_f16_bytes(scales);
        for (scaled, weights) in scaled.iter_mut().zip(weights) {
            let weights = S::Floats::load(&weights.as_chunks().0[v]);
            weights.mul(scales).store(&mut scaled.as_chunks_mut().0[v]);
        }
    }
    let mut sums = load_tile::<S, Q, { GROUP / LANES }>(out, width);
    for (token, codes) in codes.iter().enumerate() {
        let values = widen::<S>(codes);
        for (sums, weights) in sums.iter_mut().zip(&scaled) {
            let weight = S::Floats::splat(weights[token]);
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = value.mul_add(weight, *sum);
            }
        }
    }
    store_tile::<S, Q, { GROUP / LANES }>(sums, out, width);
}

/// The first `V` vectors of `Q` rows, `width` apart.
#[inline(always)]
fn load_tile<S: Simd, const Q: usize, const V: usize>(
    rows: &[f32],
    width: usize,
) -> [[S::Floats; V]; Q] {
    let mut tile = [[S::Floats::zero(); V]; Q];
    for (q, tile) in tile.iter_mut().enumerate() {
        let (row, _) = rows[q * width..].as_chunks();
        for (vector, from) in tile.iter_mut().zip(row) {
            *vector = S::Floats::load(from);
        }
    }
    tile
}

#[inline(always)]
fn store_tile<S: Simd, const Q: usize, const V: usize>(
    tile: [[S::Floats; V]; Q],
    rows: &mut [f32],
    width: usize,
) {
    for (q, tile) in tile.iter().enumerate() {
        let (row, _) = rows[q * width..].as_chunks_mut();
        for (vector, to) in tile.iter().zip(row) {
            vector.store(to);
        }
    }
}

/// F16 of a row, sixteen at a time; missing values at the end of `out` become 0.
#[inline(always)]
pub(crate) fn to_half<S: Simd>(x: &[f32], out: &mut [Row]) {
    for (x, out) in x.chunks(LANES).zip(out) {
        let mut halves = [0; LANES];
        S::Floats::load_part(x).store_half(&mut halves);
        for (half, out) in halves.iter().zip(out.as_chunks_mut().0) {
            *out = half.to_le_bytes();
        }
    }
}

/// Q8_0 of a group: codes are the nearest multiples (ties to even) of the scale, a 127th of the largest magnitude as F16,
/// which is returned. The codes of missing values become 0.
#[inline(always)]
pub(crate) fn to_codes<S: Simd>(x: &[f32], codes: &mut Row) -> [u8; 2] {
    let (low, high) = x.split_at(x.len().min(LANES));
    let (low, high) = (S::Floats::load_part(low), S::Floats::load_part(high));
    let largest = low.abs().max(high.abs()).largest();
    let scale = f16::from_f32(largest / 127.0);
    let inverse = if scale > f16::ZERO {
        1.0 / scale.to_f32()
    } else {
        0.0
    };
    let (least, most) = (S::Floats::splat(-127.0), S::Floats::splat(127.0));
    let inverse = S::Floats::splat(inverse);
    let (codes, _) = codes.as_chunks_mut::<LANES>();
    for (x, codes) in [low, high].into_iter().zip(codes) {
        // Numbers so small that their scale has few bits may come to more than 127 of it.
        let steps = x.mul(inverse).round().min(most).max(least);
        let mut signed = [0; LANES];
        steps.store_bytes(&mut signed);
        *codes = signed.map(i8::cast_unsigned);
    }
    scale.to_le_bytes()
}
