//! Steps that look at one value, or one group of a row, at a time: norms, sums, gates, rotations.

use crate::simd::{Floats, LANES, Simd, gelu, tanh};

/// `out[i] = f(a[i], b[i])`, sixteen at a time; the three have one length.
#[inline(always)]
fn zip<F: Floats>(a: &[f32], b: &[f32], out: &mut [f32], f: impl Fn(F, F) -> F) {
    assert!(
        a.len() == out.len() && b.len() == out.len(),
        "equal lengths"
    );
    let (a, a_rest) = a.as_chunks();
    let (b, b_rest) = b.as_chunks();
    let (out, out_rest) = out.as_chunks_mut();
    for ((a, b), out) in a.iter().zip(b).zip(out) {
        f(F::load(a), F::load(b)).store(out);
    }
    if !out_rest.is_empty() {
        let mut last = [0.0; LANES];
        f(F::load_part(a_rest), F::load_part(b_rest)).store(&mut last);
        out_rest.copy_from_slice(&last[..out_rest.len()]);
    }
}

#[inline(always)]
fn map<F: Floats>(x: &[f32], out: &mut [f32], f: impl Fn(F) -> F) {
    zip(x, x, out, |x, _| f(x));
}

#[inline(always)]
pub(crate) fn add<S: Simd>(a: &[f32], b: &[f32], out: &mut [f32]) {
    zip::<S::Floats>(a, b, out, Floats::add);
}

#[inline(always)]
pub(crate) fn scale<S: Simd>(x: &[f32], by: f32, out: &mut [f32]) {
    let by = S::Floats::splat(by);
    map::<S::Floats>(x, out, |x| x.mul(by));
}

/// `gelu(gate) * up`.
#[inline(always)]
pub(crate) fn gelu_mul<S: Simd>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    zip::<S::Floats>(gate, up, out, |gate, up| gelu(gate).mul(up));
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
pub(crate) fn softcap<S: Simd>(x: &[f32], cap: f32, out: &mut [f32]) {
    let (inverse, cap) = (S::Floats::splat(1.0 / cap), S::Floats::splat(cap));
    map::<S::Floats>(x, out, |x| cap.mul(tanh(x.mul(inverse))));
}

/// RMS norm of one group, times the weight if there is one.
#[inline(always)]
pub(crate) fn norm<S: Simd>(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let (whole, rest) = x.as_chunks();
    let mut squares = S::Floats::zero();
    for x in whole {
        let x = S::Floats::load(x);
        squares = x.mul_add(x, squares);
    }
    let rest = S::Floats::load_part(rest);
    let mean = rest.mul_add(rest, squares).sum() / x.len() as f32;
    let by = S::Floats::splat(1.0 / (mean + eps).sqrt());
    match weight {
        Some(weight) => zip::<S::Floats>(x, weight, out, |x, w| x.mul(by).mul(w)),
        None => map::<S::Floats>(x, out, |x| x.mul(by)),
    }
}

/// Turns the pairs `(j, j + half)` of one head.
#[inline(always)]
pub(crate) fn rotate<S: Simd>(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
    let half = cos.len();
    let (low, high) = x.split_at(half);
    let (out_low, out_high) = out.split_at_mut(half);
    assert!(
        sin.len() == half && high.len() == half && out_high.len() == half,
        "an angle a pair"
    );
    let mut j = 0;
    while j < half {
        let end = half.min(j + LANES);
        let part = |x: &[f32]| S::Floats::load_part(&x[j..end]);
        let (a, b, cos, sin) = (part(low), part(high), part(cos), part(sin));
        let mut turned = [0.0; LANES];
        b.neg_mul_add(sin, a.mul(cos)).store(&mut turned);
        out_low[j..end].copy_from_slice(&turned[..end - j]);
        a.mul_add(sin, b.mul(cos)).store(&mut turned);
        out_high[j..end].copy_from_slice(&turned[..end - j]);
        j = end;
    }
}

/// `sum += weight * x`.
#[inline(always)]
pub(crate) fn add_weighted<S: Simd>(x: &[f32], weight: f32, sum: &mut [f32]) {
    let weight = S::Floats::splat(weight);
    let (x, x_rest) = x.as_chunks();
    let (sum, sum_rest) = sum.as_chunks_mut();
    for (x, sum) in x.iter().zip(sum) {
        S::Floats::load(x)
            .mul_add(weight, S::Floats::load(sum))
            .store(sum);
    }
    if !sum_rest.is_empty() {
        let mut last = [0.0; LANES];
        S::Floats::load_part(x_rest)
            .mul_add(weight, S::Floats::load_part(sum_rest))
            .store(&mut last);
        sum_rest.copy_from_slice(&last[..sum_rest.len()]);
    }
}
