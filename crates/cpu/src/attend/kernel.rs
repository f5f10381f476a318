//! The inner loops of attention over one page: scores, their exponentials, and the weighted sum of values.
//!
//! A page holds keys as `[head_dim, tokens]` and values as `[tokens, width]` in F16. A lane of the scores is a position and
//! a lane of the sum is a column, so both run over the other dimension in plain order, one multiply-add after another:
//! each result has one definition, whatever else shares the registers.

use carat_model::backend::PAGE_TOKENS;

use crate::simd::{Floats, LANES, Simd, array, exp};

/// Queries that one call of [`scores`] or [`weigh`] may take.
pub(crate) const MOST_QUERIES: usize = 8;

/// Scores of one page.
pub(crate) type PageScores = [f32; PAGE_TOKENS];

/// Vectors of scores of a page.
const VECTORS: usize = PAGE_TOKENS / LANES;

/// `out[i][t]` = query `i` times key `t`. At most [`MOST_QUERIES`] queries.
#[inline(always)]
pub(crate) fn scores<S: Simd>(queries: &[&[f32]], keys: &[u16], out: &mut [&mut PageScores]) {
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
    keys: &[u16],
    out: &mut [&mut PageScores],
) -> usize {
    let (keys, _) = keys.as_chunks::<LANES>();
    let (keys, _) = keys.as_chunks::<VECTORS>();
    let queries: [&[f32]; Q] = array![[].as_slice(); q => &queries[q][..keys.len()]];
    let mut sums = [[S::Floats::zero(); VECTORS]; Q];
    for (d, keys) in keys.iter().enumerate() {
        let keys: [S::Floats; VECTORS] =
            array![S::Floats::zero(); v => S::Floats::load_half(&keys[v])];
        for (sums, query) in sums.iter_mut().zip(queries) {
            let query = S::Floats::splat(query[d]);
            for (sum, key) in sums.iter_mut().zip(keys) {
                *sum = key.mul_add(query, *sum);
            }
        }
    }
    for (sums, out) in sums.iter().zip(out) {
        let (out, _) = out.as_chunks_mut();
        for (sum, out) in sums.iter().zip(out) {
            sum.store(out);
        }
    }
    Q
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
pub(crate) fn weigh<S: Simd>(weights: &[&PageScores], values: &[u16], out: &mut [f32]) {
    let width = values.len() / PAGE_TOKENS;
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
    values: &[u16],
    out: &mut [f32],
    width: usize,
) -> usize {
    let weights: [&PageScores; Q] = array![weights[0]; q => weights[q]];
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
    Q
}

#[inline(always)]
fn weigh_tile<S: Simd, const Q: usize, const V: usize>(
    weights: [&PageScores; Q],
    values: &[u16],
    out: &mut [f32],
    width: usize,
    column: usize,
) -> usize {
    let mut sums = [[S::Floats::zero(); V]; Q];
    for (q, sums) in sums.iter_mut().enumerate() {
        let (out, _) = out[q * width + column..].as_chunks();
        for (sum, out) in sums.iter_mut().zip(out) {
            *sum = S::Floats::load(out);
        }
    }
    for (token, values) in values.chunks_exact(width).enumerate() {
        let (values, _) = values[column..].as_chunks();
        let values: [S::Floats; V] =
            array![S::Floats::zero(); v => S::Floats::load_half(&values[v])];
        for (sums, weights) in sums.iter_mut().zip(weights) {
            let weight = S::Floats::splat(weights[token]);
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = value.mul_add(weight, *sum);
            }
        }
    }
    for (q, sums) in sums.iter().enumerate() {
        let (out, _) = out[q * width + column..].as_chunks_mut();
        for (sum, out) in sums.iter().zip(out) {
            sum.store(out);
        }
    }
    V * LANES
}

/// F16 of a row, sixteen at a time; missing values at the end of `out` become 0.
#[inline(always)]
pub(crate) fn to_half<S: Simd>(x: &[f32], out: &mut [u16]) {
    let (out, _) = out.as_chunks_mut::<LANES>();
    for (x, out) in x.chunks(LANES).zip(out) {
        S::Floats::load_part(x).store_half(out);
    }
}
