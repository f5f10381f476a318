//! The inner loops of attention over one page: scores (QK), their softmax numerators, and the weighted sum of values (PV).
//!
//! [`super::kv_page`] says how a page holds keys and values. A lane of the scores is a position and a lane of the sum is a column,
//! so both run over the other dimension in plain order, one multiply-add after another: each result has one definition,
//! whatever else shares the registers.
//!
//! Codes of Q8_0 become floats in registers. A scale is of a token and a group of dimensions: scores are added up group by
//! group, each sum times its scales; for values the scales go into the weights, once per group.

use carat_model::backend::PAGE_TOKENS;

use super::kv_page::{GROUP, PageHead, PageRow, Q8Block};
use crate::simd::{Floats, LANES, Simd, array, exp};

/// Queries that one call of [`scores`] or [`accumulate_values`] may take.
pub const MAX_QUERIES: usize = 8;

/// Scores of one page.
pub type PageScores = [f32; PAGE_TOKENS];

/// Vectors of scores of a page.
const VECTORS: usize = PAGE_TOKENS / LANES;

/// `out[i][t]` = query `i` times key `t`. At most [`MAX_QUERIES`] queries.
#[inline(always)]
pub fn scores<S: Simd>(queries: &[&[f32]], keys: PageHead<'_>, out: &mut [&mut PageScores]) {
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
    keys: PageHead<'_>,
    out: &mut [&mut PageScores],
) -> usize {
    let queries: [&[f32]; Q] = array![[].as_slice(); q => queries[q]];
    let sums = match keys {
        PageHead::F16(rows) => score_f16::<S, Q>(queries, rows),
        PageHead::Q8_0(blocks) => score_q8_0::<S, Q>(queries, blocks),
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
fn score_f16<S: Simd, const Q: usize>(
    queries: [&[f32]; Q],
    keys: &[PageRow],
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
fn score_q8_0<S: Simd, const Q: usize>(
    queries: [&[f32]; Q],
    keys: &[Q8Block],
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
fn widen<S: Simd>(codes: &PageRow) -> [S::Floats; VECTORS] {
    let (codes, _) = codes.as_chunks();
    array![S::Floats::zero(); v => S::Floats::load_i8_bytes(&codes[v])]
}

/// Softmax numerators: the scores of `visible` positions become `e^(score - largest)` and all others 0.
/// Returns the largest score and the sum of the exponentials. `visible` is not empty.
#[inline(always)]
pub fn partial_softmax<S: Simd>(scores: &mut [f32], visible: std::ops::Range<usize>) -> (f32, f32) {
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

/// `out[i] += weights[i] * values`, with `out` `[weights.len(), width]`. At most [`MAX_QUERIES`] rows of weights.
#[inline(always)]
pub fn accumulate_values<S: Simd>(weights: &[&PageScores], values: PageHead<'_>, out: &mut [f32]) {
    let width = out.len() / weights.len();
    let mut done = 0;
    while done < weights.len() {
        let (weights, out) = (&weights[done..], &mut out[done * width..]);
        done += if S::WIDE && weights.len() >= 8 {
            accumulate_rows::<S, 8>(weights, values, out, width)
        } else if S::WIDE && weights.len() >= 4 {
            accumulate_rows::<S, 4>(weights, values, out, width)
        } else if weights.len() >= 2 {
            accumulate_rows::<S, 2>(weights, values, out, width)
        } else {
            accumulate_rows::<S, 1>(weights, values, out, width)
        };
    }
}

#[inline(always)]
fn accumulate_rows<S: Simd, const Q: usize>(
    weights: &[&PageScores],
    values: PageHead<'_>,
    out: &mut [f32],
    width: usize,
) -> usize {
    let weights: [&PageScores; Q] = array![weights[0]; q => weights[q]];
    match values {
        PageHead::F16(rows) => accumulate_f16::<S, Q>(weights, rows, out, width),
        PageHead::Q8_0(blocks) => {
            for (g, block) in blocks.iter().enumerate() {
                accumulate_q8_block::<S, Q>(weights, block, &mut out[g * GROUP..], width);
            }
        }
    }
    Q
}

#[inline(always)]
fn accumulate_f16<S: Simd, const Q: usize>(
    weights: [&PageScores; Q],
    values: &[PageRow],
    out: &mut [f32],
    width: usize,
) {
    let mut column = 0;
    while column < width {
        // Sixteen sums; the more rows share a vector of values, the less widening there is.
        column += if S::WIDE && Q <= 4 && column + 4 * LANES <= width {
            accumulate_tile::<S, Q, 4>(weights, values, out, width, column)
        } else if column + 2 * LANES <= width {
            accumulate_tile::<S, Q, 2>(weights, values, out, width, column)
        } else {
            accumulate_tile::<S, Q, 1>(weights, values, out, width, column)
        };
    }
}

#[inline(always)]
fn accumulate_tile<S: Simd, const Q: usize, const V: usize>(
    weights: [&PageScores; Q],
    values: &[PageRow],
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
fn accumulate_q8_block<S: Simd, const Q: usize>(
    weights: [&PageScores; Q],
    block: &Q8Block,
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
