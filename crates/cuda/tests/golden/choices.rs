//! Choices that depend on the card change how fast it is, and next to nothing of what it computes.

use carat_cuda::{Alternative, Alternatives, Choice, Tier};
use carat_gguf::QuantType;
use carat_testkit::tiny::{Tiny, Variant};

use super::{Cases, harness, logits, same_bits, within};

/// Distance of longer batches whose products are added up in another order, or rounded to f16 where others are to int8. A rounded score
/// may choose another expert, and experts of random weights differ much.
fn bound(variant: Variant) -> f64 {
    match variant {
        Variant::Moe26b => 1.2e-1,
        _ => 1e-2,
    }
}

/// Buckets of medium batches, and one of large ones.
const CHUNKS: [usize; 2] = [48, 100];

/// Each choice, with per-layer inputs and with experts.
pub(super) fn all(cases: &mut Cases) {
    for variant in [Variant::E4b, Variant::Moe26b] {
        for tier in [Tier::Best, Tier::Portable] {
            for choice in Choice::ALL {
                let name = format!("choices/{variant:?}/{choice}/{tier:?}");
                cases.add(name, move |_| choices(tier, variant, choice));
            }
        }
    }
}

/// Batches of up to 8 rows have the same bits whatever is chosen, longer ones nearly the same numbers.
fn choices(tier: Tier, variant: Variant, choice: Choice) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q4_0);
    let model = tiny.model();
    let tokens = tiny.prompt(100);
    // Three rows are in the bucket of four.
    let few = &tokens[..11];
    let of = |value: Option<Alternative>| -> Result<_, String> {
        let card = harness::open(|config| {
            config.tier = tier;
            config.alternatives = (value.into_iter()).fold(config.alternatives, Alternatives::with);
        })?;
        let small = [1, 2, 3, 8].map(|chunk| logits(card.as_ref(), &model, few, chunk));
        let long = CHUNKS.map(|chunk| logits(card.as_ref(), &model, &tokens, chunk));
        Ok((small, long))
    };
    let (small, long) = of(None)?;
    for &value in choice.alternatives() {
        let (found_small, found_long) = of(Some(value))?;
        for (found, expected) in found_small.into_iter().zip(&small) {
            let what = format!("{choice} {value}, up to 8 rows");
            same_bits(&what, &found?, expected.as_ref().map_err(String::clone)?)?;
        }
        for (found, expected) in found_long.into_iter().zip(&long) {
            let said = |e: String| format!("{choice} {value}: {e}");
            within(
                &found?,
                expected.as_ref().map_err(String::clone)?,
                bound(variant),
            )
            .map_err(said)?;
        }
    }
    Ok(())
}
