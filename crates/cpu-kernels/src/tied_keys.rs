//! Scores over pages that hold values alone, where keys follow from them: a key is `rope(weight * value)`, head by head.
//!
//! Pairs that never turn need no key: with the weight in the query, its product with the value is the score. Of those that turn, the
//! first ones of a head, keys of a page are made as floats, and every query of its KV head uses them.
//!
//! Values lie token by token, so a lane of a sum is a column here, and lanes are added up in the end: each score has one definition,
//! whatever else shares the registers.

use carat_model::backend::PAGE_TOKENS;

use super::{
    attention::PageScores,
    kv_page::{GROUP, PageHead, PageRow, Q8Block},
};
use crate::simd::{Floats, LANES, Simd, array, sin_cos};

/// What the keys of a slot's heads are made from values with.
#[derive(Clone, Debug)]
pub struct TiedKeys {
    weight: Vec<f32>,
    turning: usize,
    /// Of pairs that turn: radians a position, and the weights of both members. Whole vectors, the rest of which is 0.
    frequencies: Vec<f32>,
    low: Vec<f32>,
    high: Vec<f32>,
}

impl TiedKeys {
    /// `frequencies` are those of the pairs that turn. A head is whole vectors twice.
    pub fn new(weight: &[f32], frequencies: &[f32]) -> TiedKeys {
        let (half, turning) = (weight.len() / 2, frequencies.len());
        assert!(half.is_multiple_of(LANES) && turning <= half);
        let whole = |part: &[f32]| {
            let mut vectors = part.to_vec();
            vectors.resize(turning.next_multiple_of(LANES), 0.0);
            vectors
        };
        TiedKeys {
            weight: weight.to_vec(),
            turning,
            frequencies: whole(frequencies),
            low: whole(&weight[..turning]),
            high: whole(&weight[half..half + turning]),
        }
    }

    /// Vectors that turn with all their lanes, of each half of this many, so that values do not meet queries there.
    fn turning_vectors(&self) -> Halves {
        Halves {
            vectors: self.weight.len() / 2 / LANES,
            turning: self.turning / LANES,
        }
    }

    /// Columns of a key that is made.
    fn made_columns(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Elements of the keys that are made of a page.
    pub fn page_elements(&self) -> usize {
        PAGE_TOKENS * self.made_columns()
    }

    /// Elements of a query as [`tied_scores`] takes it.
    pub fn query_elements(&self) -> usize {
        self.weight.len() + self.made_columns()
    }

    /// Brings a query into that form: what meets values, then what meets made keys.
    pub fn split_query(&self, query: &[f32], out: &mut [f32]) {
        let (columns, half) = (self.weight.len(), self.weight.len() / 2);
        let (still, made) = out.split_at_mut(columns);
        for (j, ((to, q), w)) in still.iter_mut().zip(query).zip(&self.weight).enumerate() {
            *to = if j % half < self.turning { 0.0 } else { q * w };
        }
        let (low, high) = made.split_at_mut(made.len() / 2);
        for (first, part) in [(0, low), (half, high)] {
            part.fill(0.0);
            part[..self.turning].copy_from_slice(&query[first..first + self.turning]);
        }
    }
}

/// Vectors of each half of a head, the first of which turn.
#[derive(Clone, Copy)]
struct Halves {
    vectors: usize,
    turning: usize,
}

impl Halves {
    fn turns(self, vector: usize) -> bool {
        vector % self.vectors < self.turning
    }
}

/// Makes the keys of a page whose first token is at `position`: `[tokens, low | high]`, each part as [`TiedKeys`] has it.
#[inline(always)]
pub fn make_keys<S: Simd>(
    tied: &TiedKeys,
    values: PageHead<'_>,
    position: usize,
    made: &mut [f32],
) {
    let vectors = tied.frequencies.len() / LANES;
    let high_vector = tied.weight.len() / 2 / LANES;
    let (frequencies, _) = tied.frequencies.as_chunks();
    let ((low_weights, _), (high_weights, _)) = (tied.low.as_chunks(), tied.high.as_chunks());
    let (made, _) = made.as_chunks_mut::<LANES>();
    for (token, made) in made.chunks_exact_mut(2 * vectors).enumerate() {
        let at = S::Floats::splat((position + token) as f32);
        for v in 0..vectors {
            // The angle is one f32 product: that is the definition.
            let (sin, cos) = sin_cos(at.mul(S::Floats::load(&frequencies[v])));
            let low = load_values::<S>(values, token, v, high_vector)
                .mul(S::Floats::load(&low_weights[v]));
            let high = load_values::<S>(values, token, high_vector + v, high_vector)
                .mul(S::Floats::load(&high_weights[v]));
            high.neg_mul_add(sin, low.mul(cos)).store(&mut made[v]);
            low.mul_add(sin, high.mul(cos))
                .store(&mut made[vectors + v]);
        }
    }
}

/// Vector `v` of a token's value, of heads of twice `half_vectors`.
#[inline(always)]
fn load_values<S: Simd>(
    values: PageHead<'_>,
    token: usize,
    v: usize,
    half_vectors: usize,
) -> S::Floats {
    match values {
        PageHead::F16(rows) => S::Floats::load_f16_bytes(&rows[token * 2 * half_vectors + v]),
        PageHead::Q8_0(blocks) => {
            let block = &blocks[v * LANES / GROUP];
            let (codes, _) = block[token].as_chunks();
            let scales = S::Floats::load_f16_bytes(&block[GROUP + token / LANES]);
            let mut scale = [0.0; LANES];
            scales.store(&mut scale);
            S::Floats::load_i8_bytes(&codes[v % (GROUP / LANES)])
                .mul(S::Floats::splat(scale[token % LANES]))
        }
    }
}

/// `out[i][t]` = query `i` times the key of token `t`, as `made` and the values give it. Queries are split.
#[inline(always)]
pub fn tied_scores<S: Simd>(
    tied: &TiedKeys,
    queries: &[&[f32]],
    values: PageHead<'_>,
    made: &[f32],
    out: &mut [&mut PageScores],
) {
    let halves = tied.turning_vectors();
    let mut done = 0;
    while done < queries.len() {
        let (queries, out) = (&queries[done..], &mut out[done..]);
        // The more queries share a vector of values, the less widening there is.
        done += if S::WIDE && queries.len() >= 8 {
            score_tile::<S, 8, 2>(halves, queries, (values, made), out)
        } else if S::WIDE && queries.len() >= 4 {
            score_tile::<S, 4, 4>(halves, queries, (values, made), out)
        } else if queries.len() >= 2 {
            score_tile::<S, 2, 2>(halves, queries, (values, made), out)
        } else {
            score_tile::<S, 1, 4>(halves, queries, (values, made), out)
        };
    }
}

#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "of several slices at once")]
fn score_tile<S: Simd, const Q: usize, const T: usize>(
    halves: Halves,
    queries: &[&[f32]],
    (values, made): (PageHead<'_>, &[f32]),
    out: &mut [&mut PageScores],
) -> usize {
    let made_columns = made.len() / PAGE_TOKENS;
    let columns = queries[0].len() - made_columns;
    let split: [(&[f32], &[f32]); Q] =
        array![([].as_slice(), [].as_slice()); q => queries[q].split_at(columns)];
    let still: [&[[f32; LANES]]; Q] = array![[].as_slice(); q => split[q].0.as_chunks().0];
    let turning: [&[[f32; LANES]]; Q] = array![[].as_slice(); q => split[q].1.as_chunks().0];
    let (made, _) = made.as_chunks::<LANES>();
    let mut token = 0;
    while token < PAGE_TOKENS {
        let mut sums = match values {
            PageHead::F16(rows) => still_f16::<S, Q, T>(halves, still, rows, token),
            PageHead::Q8_0(blocks) => still_q8_0::<S, Q, T>(halves, still, blocks, token),
        };
        let vectors = made_columns / LANES;
        let turning: [&[[f32; LANES]]; Q] = array![[].as_slice(); q => &turning[q][..vectors]];
        let made: [&[[f32; LANES]]; T] =
            array![[].as_slice(); t => &made[(token + t) * vectors..][..vectors]];
        for v in 0..vectors {
            let keys: [S::Floats; T] = array![S::Floats::zero(); t => S::Floats::load(&made[t][v])];
            add_products::<S, Q, T>(&mut sums, turning, v, keys);
        }
        for (sums, out) in sums.iter().zip(out.iter_mut()) {
            for (t, sum) in sums.iter().enumerate() {
                out[token + t] = sum.sum();
            }
        }
        token += T;
    }
    Q
}

/// Adds the products of vector `v` of the queries with one vector of each token.
#[inline(always)]
fn add_products<S: Simd, const Q: usize, const T: usize>(
    sums: &mut [[S::Floats; T]; Q],
    queries: [&[[f32; LANES]]; Q],
    v: usize,
    keys: [S::Floats; T],
) {
    for (sums, query) in sums.iter_mut().zip(queries) {
        let query = S::Floats::load(&query[v]);
        for (sum, key) in sums.iter_mut().zip(keys) {
            *sum = key.mul_add(query, *sum);
        }
    }
}

#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "of several slices at once")]
fn still_f16<S: Simd, const Q: usize, const T: usize>(
    halves: Halves,
    queries: [&[[f32; LANES]]; Q],
    rows: &[PageRow],
    token: usize,
) -> [[S::Floats; T]; Q] {
    let mut sums = [[S::Floats::zero(); T]; Q];
    let still = halves.vectors - halves.turning;
    // Slices of one length, so that nothing is checked within.
    for half in 0..2 {
        let first = half * halves.vectors + halves.turning;
        let queries: [&[[f32; LANES]]; Q] =
            array![[].as_slice(); q => &queries[q][first..first + still]];
        let rows: [&[PageRow]; T] =
            array![[].as_slice(); t => &rows[(token + t) * 2 * halves.vectors + first..][..still]];
        for v in 0..still {
            let keys: [S::Floats; T] =
                array![S::Floats::zero(); t => S::Floats::load_f16_bytes(&rows[t][v])];
            add_products::<S, Q, T>(&mut sums, queries, v, keys);
        }
    }
    sums
}

#[inline(always)]
fn still_q8_0<S: Simd, const Q: usize, const T: usize>(
    halves: Halves,
    queries: [&[[f32; LANES]]; Q],
    blocks: &[Q8Block],
    token: usize,
) -> [[S::Floats; T]; Q] {
    const VECTORS: usize = GROUP / LANES;
    let mut totals = [[S::Floats::zero(); T]; Q];
    for (g, block) in blocks.iter().enumerate() {
        let first = g * VECTORS;
        if halves.turns(first) && halves.turns(first + VECTORS - 1) {
            continue;
        }
        let mut scales = [0.0; LANES];
        S::Floats::load_f16_bytes(&block[GROUP + token / LANES]).store(&mut scales);
        let queries: [&[[f32; LANES]]; Q] =
            array![[].as_slice(); q => &queries[q][first..first + VECTORS]];
        let mut sums = [[S::Floats::zero(); T]; Q];
        for v in 0..VECTORS {
            let keys: [S::Floats; T] = array![S::Floats::zero(); t => S::Floats::load_i8_bytes(&block[token + t].as_chunks().0[v])];
            add_products::<S, Q, T>(&mut sums, queries, v, keys);
        }
        for (totals, sums) in totals.iter_mut().zip(sums) {
            for (t, (total, sum)) in totals.iter_mut().zip(sums).enumerate() {
                *total = sum.mul_add(S::Floats::splat(scales[token % LANES + t]), *total);
            }
        }
    }
    totals
}
