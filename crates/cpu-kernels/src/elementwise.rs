//! Steps that look at one value, or one group of a row, at a time: norms, sums, gates, rotations.

use crate::simd::{Floats, LANES, Simd, array, gelu, tanh};

/// `out[i] = f(a[i], b[i])`, sixteen at a time; the three have one length.
macro_rules! zip {
    ($a:expr, $b:expr, $out:expr => |$x:ident, $y:ident| $body:expr) => {{
        let (a, b, out): (&[f32], &[f32], &mut [f32]) = ($a, $b, $out);
        assert!(
            a.len() == out.len() && b.len() == out.len(),
            "equal lengths"
        );
        let (a, a_rest) = a.as_chunks();
        let (b, b_rest) = b.as_chunks();
        let (out, out_rest) = out.as_chunks_mut();
        for ((a, b), out) in a.iter().zip(b).zip(out) {
            let ($x, $y) = (S::Floats::load(a), S::Floats::load(b));
            $body.store(out);
        }
        if !out_rest.is_empty() {
            let ($x, $y) = (S::Floats::load_part(a_rest), S::Floats::load_part(b_rest));
            let mut last = [0.0; LANES];
            $body.store(&mut last);
            out_rest.copy_from_slice(&last[..out_rest.len()]);
        }
    }};
}

#[inline(always)]
pub fn add<S: Simd>(a: &[f32], b: &[f32], out: &mut [f32]) {
    zip!(a, b, out => |a, b| a.add(b));
}

#[inline(always)]
pub fn scale<S: Simd>(x: &[f32], by: f32, out: &mut [f32]) {
    let by = S::Floats::splat(by);
    zip!(x, x, out => |x, _x| x.mul(by));
}

/// `gelu(gate) * up`.
#[inline(always)]
pub fn gelu_mul<S: Simd>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    zip!(gate, up, out => |gate, up| gelu(gate).mul(up));
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
pub fn softcap<S: Simd>(x: &[f32], cap: f32, out: &mut [f32]) {
    let (inverse, cap) = (S::Floats::splat(1.0 / cap), S::Floats::splat(cap));
    zip!(x, x, out => |x, _x| cap.mul(tanh(x.mul(inverse))));
}

/// RMS norm of one group, times the weight if there is one.
#[inline(always)]
pub fn norm<S: Simd>(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let (whole, rest) = x.as_chunks();
    let mut squares = S::Floats::zero();
    for x in whole {
        let x = S::Floats::load(x);
        squares = x.mul_add(x, squares);
    }
    let rest = S::Floats::load_part(rest);
    let mean = rest.mul_add(rest, squares).sum() / x.len() as f32;
    let by = S::Floats::splat(1.0 / (mean + eps).sqrt());
    if let Some(weight) = weight {
        zip!(x, weight, out => |x, w| x.mul(by).mul(w));
    } else {
        zip!(x, x, out => |x, _x| x.mul(by));
    }
}

/// RoPE: rotates the pairs `(j, j + half)` of one head.
#[inline(always)]
pub fn rotate<S: Simd>(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
    let half = cos.len();
    let (low, high) = x.split_at(half);
    let (out_low, out_high) = out.split_at_mut(half);
    assert!(
        sin.len() == half && high.len() == half && out_high.len() == half,
        "an angle per pair"
    );
    let mut j = 0;
    while j < half {
        let end = half.min(j + LANES);
        let [a, b, cos, sin]: [S::Floats; 4] =
            array![S::Floats::zero(); i => S::Floats::load_part(&[low, high, cos, sin][i][j..end])];
        let mut rotated = [0.0; LANES];
        b.neg_mul_add(sin, a.mul(cos)).store(&mut rotated);
        out_low[j..end].copy_from_slice(&rotated[..end - j]);
        a.mul_add(sin, b.mul(cos)).store(&mut rotated);
        out_high[j..end].copy_from_slice(&rotated[..end - j]);
        j = end;
    }
}

/// `sum += weight * x`.
#[inline(always)]
pub fn add_weighted<S: Simd>(x: &[f32], weight: f32, sum: &mut [f32]) {
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
