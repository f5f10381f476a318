//! Elementary functions over sixteen lanes, with errors of a few units in the last place.

use super::Floats;

/// `e^x`, within 2e-7 of the true ratio. Below -87 it stays at `e^-87`, above 88 at `e^88`: finite and never zero.
#[inline(always)]
pub fn exp<F: Floats>(x: F) -> F {
    let x = x.max(F::splat(-87.0)).min(F::splat(88.0));
    // x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, so that n times the first is exact.
    let n = x.mul(F::splat(std::f32::consts::LOG2_E)).round();
    let r = n.neg_mul_add(F::splat(0.693_359_4), x);
    let r = n.neg_mul_add(F::splat(-2.121_944_4e-4), r);
    // Near-minimax polynomial of (e^r - 1 - r) / r^2 on that interval.
    let mut p = F::splat(1.987_569_1e-4);
    for c in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        p = p.mul_add(r, F::splat(c));
    }
    let e = p.mul_add(r.mul(r), r).add(F::splat(1.0));
    e.mul(n.exp2_whole())
}

/// `tanh x`, within 3e-7 of the true ratio.
#[inline(always)]
pub fn tanh<F: Floats>(x: F) -> F {
    let one = F::splat(1.0);
    // Far from zero the exponential is accurate; its sign is put back by the two branches of 1 - 2 / (e^2x + 1).
    let far = one.sub(F::splat(2.0).div(exp(x.add(x)).add(one)));
    // Near zero that cancels; an odd polynomial does not.
    let square = x.mul(x);
    let mut p = F::splat(-5.704_988_7e-3);
    for c in [2.063_909e-2, -5.373_971_5e-2, 1.333_144_2e-1, -3.333_328e-1] {
        p = p.mul_add(square, F::splat(c));
    }
    let near = p.mul(square).mul_add(x, x);
    x.abs().select_below(F::splat(0.625), near, far)
}

/// Sine and cosine, within 1e-6 for magnitudes up to 2^20.
#[inline(always)]
pub fn sin_cos<F: Floats>(x: F) -> (F, F) {
    // x = 2 pi n + r with |r| <= pi; 2 pi in two parts.
    let n = x.mul(F::splat(0.159_154_94)).round();
    let r = n.neg_mul_add(F::splat(6.283_185_5), x);
    let r = n.mul_add(F::splat(1.748_455_6e-7), r);
    // Short series do for half the angle, whose sine and cosine give those of all of it.
    let y = r.mul(F::splat(0.5));
    let square = y.mul(y);
    let mut s = F::splat(-2.505_210_8e-8);
    for c in [2.755_731_9e-6, -1.984_127e-4, 8.333_333e-3, -1.666_666_7e-1] {
        s = s.mul_add(square, F::splat(c));
    }
    let s = s.mul(square).mul_add(y, y);
    let mut c = F::splat(2.087_675_7e-9);
    for k in [
        -2.755_732e-7,
        2.480_158_7e-5,
        -1.388_888_9e-3,
        4.166_666_8e-2,
        -0.5,
        1.0,
    ] {
        c = c.mul_add(square, F::splat(k));
    }
    let twice = s.add(s);
    (twice.mul(c), twice.neg_mul_add(s, F::splat(1.0)))
}

/// The tanh form of GELU, as `x / (1 + e^-2u)`: the same function, with nothing that cancels.
#[inline(always)]
pub fn gelu<F: Floats>(x: F) -> F {
    let cubic = F::splat(0.044_715).mul(x).mul_add(x, F::splat(1.0));
    let u = F::splat(-2.0 * 0.797_884_6).mul(x).mul(cubic);
    x.div(exp(u).add(F::splat(1.0)))
}
