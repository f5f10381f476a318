//! Twin of `kernels/draft/draft_next.cu`. No step of a plan: it is launched behind the program of each draft step.

use crate::{
    device::{Address, Grid},
    kernel::{
        RowsAt, Specialization,
        params::{Params, params},
    },
};

const THREADS: usize = 256;
/// Blocks of a row: enough for the largest vocabulary to be read at the speed of the cache.
const SHARES: usize = 64;

params! {
    pub(crate) struct DraftNextParams {
        rows: RowsAt,
        logits: Address,
        left: Address,
        states: Address,
        tokens: Address,
        drafted: Address,
        best: Address,
        arrived: Address,
        vocab: u32,
        width: u32,
    }
}

/// Bytes per row of the best token of each share.
pub(crate) const BEST_BYTES: usize = SHARES * size_of::<u64>();

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "draft_next",
        entries: &["draft_next"],
        constants: vec![("SHARES", format!("{SHARES}u"))],
        params_bytes: DraftNextParams::BYTES,
    }
}

pub(crate) fn grid(rows: usize) -> Grid {
    Grid::new((rows, SHARES), THREADS)
}

#[cfg(test)]
mod tests {
    use carat_model::sampling::arg_max;

    use super::*;
    use crate::{
        config::Tier,
        testing::{Card, normals},
    };

    #[test]
    #[ignore = "needs a card"]
    fn draft_next_takes_the_lowest_of_the_largest_and_hands_the_state_on() {
        let card = Card::open(Tier::Best);
        let module = card.load(&specialization());
        let width = 300;
        for vocab in [1, 70, 5000, 262_144] {
            let rows = 5;
            let mut logits = normals(vocab as u64, rows * vocab);
            // A tie, no number at all, nothing but masked tokens, and numbers among what are none.
            logits[vocab - 1] = 9.0;
            logits[vocab / 2] = 9.0;
            logits[vocab..2 * vocab].fill(f32::NAN);
            logits[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
            logits[3 * vocab] = f32::NAN;
            logits[4 * vocab - 1] = f32::NEG_INFINITY;
            let left = normals(7, rows * width);
            let given = card.upload(&logits);
            let (count, best) = (
                card.upload(&[rows as u32 - 1]),
                card.upload(&vec![0u64; rows * SHARES]),
            );
            let (left_at, states) = (
                card.upload(&left),
                card.upload(&vec![-1.0f32; rows * width]),
            );
            let (tokens, drafted) = (
                card.upload(&vec![77u32; rows]),
                card.upload(&vec![77u32; rows]),
            );
            let arrived = card.upload(&vec![0u32; rows]);
            let params = DraftNextParams {
                rows: RowsAt {
                    count: count.address(),
                    index: Address::NULL,
                },
                logits: given.address(),
                left: left_at.address(),
                states: states.address(),
                tokens: tokens.address(),
                drafted: drafted.address(),
                best: best.address(),
                arrived: arrived.address(),
                vocab: vocab as u32,
                width: width as u32,
            };
            // Twice: counters are as they were.
            for _ in 0..2 {
                card.run(&module, grid(rows), &params.bytes());
            }
            let each = logits.chunks(vocab).take(rows - 1);
            let expected: Vec<u32> = each.map(arg_max).chain([77]).collect();
            assert_eq!(card.download::<u32>(&tokens, rows), expected, "{vocab}");
            assert_eq!(card.download::<u32>(&drafted, rows), expected, "{vocab}");
            let found: Vec<f32> = card.download(&states, rows * width);
            let there = (rows - 1) * width;
            assert_eq!(found[..there], left[..there]);
            assert!(found[there..].iter().all(|x| *x == -1.0));
        }
    }
}
