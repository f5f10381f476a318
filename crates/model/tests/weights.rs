//! F32 matrices that are copied as BF16: the same values in half the bytes.

use std::collections::BTreeSet;

use carat_gguf::QuantType;
use carat_model::weights::{Weight, Weights};
use carat_testkit::fixtures;

/// All values of a weight.
fn values(weights: &Weights, weight: Weight) -> Vec<f32> {
    let m = weights.matrix(weight);
    let mut values = vec![0.0; m.count * m.rows * m.columns];
    for (i, out) in values.chunks_exact_mut(m.columns).enumerate() {
        let row = weights.row(weight, i / m.rows, i % m.rows);
        m.quant.dequantize(row, out);
    }
    values
}

#[test]
fn narrowed_floats_are_the_same_values() {
    let (mut narrowed, mut kept) = (BTreeSet::new(), BTreeSet::new());
    for fixture in fixtures::ALL {
        let before = fixture.model_of_rounded_floats(QuantType::F32).weights;
        let after = before.with_floats_narrowed();
        let mut copied = 0;
        for (weight, m) in before.iter() {
            let is_f32_matrix = m.quant == QuantType::F32 && m.rows > 1;
            let now = after.matrix(weight);
            if now == m {
                if is_f32_matrix {
                    kept.insert(fixture.name);
                }
                assert_eq!(after.bytes(weight), before.bytes(weight));
                continue;
            }
            assert!(is_f32_matrix, "{} {}", fixture.name, m.name);
            assert_eq!(now.quant, QuantType::BF16);
            let bits = |weights| values(weights, weight).into_iter().map(f32::to_bits);
            assert!(
                bits(&before).eq(bits(&after)),
                "{} {}",
                fixture.name,
                m.name
            );
            assert_eq!(before.least_bytes(weight), now.bytes(), "{}", m.name);
            copied += now.bytes();
            narrowed.insert(fixture.name);

            let (views, of) = after.with_rows_from(&[(weight, m.rows - 1)]);
            assert_eq!(
                views.row(of[0], 0, 0),
                after.row(weight, 0, m.rows - 1),
                "a view of a copy"
            );
        }
        assert!(copied <= before.narrowed_bytes(), "{}", fixture.name);
    }
    let all: BTreeSet<_> = narrowed.union(&kept).copied().collect();
    assert!(narrowed.contains("e2b-like-q4_0"), "{narrowed:?}");
    assert!(
        narrowed.is_disjoint(&kept),
        "a file is narrowed or left alone"
    );
    assert!(
        kept.contains("ple-shared-kv-f32"),
        "a file of floats: {all:?}"
    );
}

/// Values that no BF16 is stay as they are.
#[test]
fn longer_floats_are_left_alone() {
    for fixture in fixtures::ALL {
        let weights = fixture.model().weights;
        let after = weights.with_floats_narrowed();
        for (weight, m) in weights.iter() {
            assert_eq!(after.matrix(weight), m, "{}", fixture.name);
            assert_eq!(weights.least_bytes(weight), m.bytes());
        }
    }
}
