//! Distances between two results.

use std::fmt::Display;

/// `|a - b| / |b|`, over all elements together; NaN anywhere gives NaN, which no bound accepts.
pub fn relative_l2(found: &[f32], expected: &[f32]) -> f64 {
    normalised_mean_square(found, expected).sqrt()
}

/// `|a - b|^2 / |b|^2`: what errors of independent parts add up in.
pub fn normalised_mean_square(found: &[f32], expected: &[f32]) -> f64 {
    let difference: f64 = differences(found, expected).map(|d| d * d).sum();
    let norm: f64 = expected.iter().map(|b| f64::from(*b).powi(2)).sum();
    if difference == 0.0 {
        return 0.0; // also where nothing but zeros is expected
    }
    difference / norm
}

/// The largest difference and where it is; a NaN counts as the largest. `None` for empty results.
pub fn max_abs(found: &[f32], expected: &[f32]) -> Option<(usize, f64)> {
    let sizes = differences(found, expected).map(f64::abs).enumerate();
    sizes.max_by(|a, b| a.1.total_cmp(&b.1))
}

fn differences(found: &[f32], expected: &[f32]) -> impl Iterator<Item = f64> {
    assert_eq!(found.len(), expected.len(), "results of different sizes");
    let pairs = found.iter().zip(expected);
    pairs.map(|(a, b)| f64::from(*a) - f64::from(*b))
}

/// Panics unless the relative L2 error is within `bound`, naming the element that is furthest off.
#[track_caller]
pub fn assert_close(what: impl Display, found: &[f32], expected: &[f32], bound: f64) {
    let error = relative_l2(found, expected);
    if error <= bound {
        return;
    }
    let (worst, difference) = max_abs(found, expected).unwrap_or_default();
    panic!(
        "{what}: relative error {error:.3e} is above {bound:.1e}; the worst of {} elements is {worst}: \
         {} instead of {}, off by {difference:.3e}",
        found.len(),
        found[worst],
        expected[worst],
    );
}

/// Share of rows whose largest element is at the same place.
pub fn arg_max_agreement(found: &[f32], expected: &[f32], columns: usize) -> f64 {
    let arg_max = |row: &[f32]| {
        let best = row
            .iter()
            .enumerate()
            .reduce(|a, b| if b.1 > a.1 { b } else { a });
        best.map(|(i, _)| i)
    };
    let rows = found.chunks(columns).zip(expected.chunks(columns));
    let (mut same, mut count) = (0u32, 0u32);
    for (a, b) in rows {
        same += u32::from(arg_max(a) == arg_max(b));
        count += 1;
    }
    f64::from(same) / f64::from(count)
}

/// The sum of the squares of all elements.
pub fn squares(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_results_have_no_error() {
        let x = [0.0, 1.0, -2.0];
        assert_eq!(relative_l2(&x, &x), 0.0);
        assert_eq!(relative_l2(&[0.0; 3], &[0.0; 3]), 0.0);
        assert_eq!(max_abs(&[], &[]), None);
        assert_close("nothing", &[], &[], 0.0);
    }

    #[test]
    fn error_is_relative_to_the_expected_size() {
        assert_eq!(relative_l2(&[3.0, 5.0], &[3.0, 4.0]), 0.2);
        assert_eq!(normalised_mean_square(&[3.0, 5.0], &[3.0, 4.0]), 0.04);
        assert_eq!(relative_l2(&[1.0], &[0.0]), f64::INFINITY);
    }

    #[test]
    #[should_panic(
        expected = "attention: relative error NaN is above 1.0e-3; the worst of 3 elements is 1: NaN instead of 2, off by NaN"
    )]
    fn nan_is_never_close_and_is_named() {
        assert_close("attention", &[9.0, f32::NAN, 3.0], &[1.0, 2.0, 3.0], 1e-3);
    }

    #[test]
    fn agreement_counts_rows() {
        let found = [0.0, 1.0, 5.0, 2.0];
        let expected = [0.0, 3.0, 1.0, 2.0];
        assert_eq!(arg_max_agreement(&found, &expected, 2), 0.5);
    }
}
