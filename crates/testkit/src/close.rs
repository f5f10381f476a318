//! How far two results are apart.

/// `|a - b| / |b|`, over all elements together; NaN anywhere gives NaN, which no bound accepts.
pub fn relative_l2(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len(), "results of different sizes");
    let square = |x: f64| x * x;
    let pairs = found.iter().zip(expected);
    let difference: f64 = pairs
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    let norm: f64 = expected.iter().map(|b| square(f64::from(*b))).sum();
    (difference / norm).sqrt()
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
