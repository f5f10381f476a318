//! Twin of `kernels/embed/feed_samples.cu`. No step of a plan: it is launched before the program of a batch that is fed samples.

use crate::{
    device::{Address, Grid},
    kernel::{
        RowsAt, Specialization,
        params::{Params, params},
    },
};

const THREADS: usize = 256;

/// Added to the number of a sample, in place of a token that is yet to be drawn. No vocabulary reaches it.
pub(crate) const FROM_SAMPLE: u32 = 1 << 31;

params! {
    pub(crate) struct FeedSamplesParams {
        rows: RowsAt,
        tokens: Address,
        samples: Address,
    }
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "feed_samples",
        entries: &["feed_samples"],
        constants: vec![("FROM_SAMPLE", format!("{FROM_SAMPLE}u"))],
        params_bytes: FeedSamplesParams::BYTES,
    }
}

pub(crate) fn grid(rows: usize) -> Grid {
    Grid::new((rows.div_ceil(THREADS), 1), THREADS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Tier, testing::Card};

    #[test]
    #[ignore = "needs a card"]
    fn feed_samples_gathers_in_any_order_and_leaves_tokens_alone() {
        let card = Card::open(Tier::Best);
        let module = card.load(&specialization());
        let samples: Vec<u32> = (0..300).map(|i| 1000 + 7 * i).collect();
        let fed = |i: u32| match i % 3 {
            0 => i,
            // Backwards, and some twice.
            _ => FROM_SAMPLE + (599 - i) / 2,
        };
        let tokens: Vec<u32> = (0..600).map(fed).collect();
        let (count, given) = (card.upload(&[590u32]), card.upload(&tokens));
        let samples_at = card.upload(&samples);
        let params = FeedSamplesParams {
            rows: RowsAt {
                count: count.address(),
                index: Address::NULL,
            },
            tokens: given.address(),
            samples: samples_at.address(),
        };
        card.run(&module, grid(600), &params.bytes());
        let expected = |(row, token): (usize, &u32)| match token.checked_sub(FROM_SAMPLE) {
            Some(sample) if row < 590 => samples[sample as usize],
            _ => *token,
        };
        let expected: Vec<u32> = tokens.iter().enumerate().map(expected).collect();
        assert_eq!(card.download::<u32>(&given, 600), expected);
    }
}
