//! Acceptance rate of drafts by position: recent rounds count the most.

/// Positions of a draft that are counted apart; those behind are taken for the last.
pub(crate) const POSITIONS: usize = 8;

/// Rounds that an estimate from elsewhere counts as.
const PRIOR_ROUNDS: f32 = 3.0;

/// Decaying counts of tries and successes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acceptance {
    tries: [f32; POSITIONS],
    hits: [f32; POSITIONS],
    /// Weight that a round before the last still has.
    decay: f32,
}

impl Acceptance {
    /// Of rounds that are forgotten by this factor each time.
    pub(crate) fn new(decay: f32) -> Acceptance {
        Acceptance {
            tries: [0.0; POSITIONS],
            hits: [0.0; POSITIONS],
            decay,
        }
    }

    /// Of `offered` tokens the first `accepted` were right, and the one behind them was wrong.
    pub(crate) fn observe(&mut self, offered: usize, accepted: usize) {
        for position in 0..POSITIONS.min(offered) {
            let tried = position <= accepted;
            if tried {
                self.tries[position] = self.tries[position] * self.decay + 1.0;
                self.hits[position] *= self.decay;
            }
            if position < accepted {
                self.hits[position] += 1.0;
            }
        }
    }

    /// The share of drafts that are right at a position, if all before it are; `prior` is what is believed without evidence.
    pub(crate) fn rate(&self, position: usize, prior: f32) -> f32 {
        let position = position.min(POSITIONS - 1);
        let (hits, tries) = (self.hits[position], self.tries[position]);
        (hits + PRIOR_ROUNDS * prior) / (tries + PRIOR_ROUNDS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_tried_only_where_all_before_it_are_right() {
        let mut acceptance = Acceptance::new(1.0);
        acceptance.observe(3, 1);
        assert_eq!(acceptance.tries[..4], [1.0, 1.0, 0.0, 0.0]);
        assert_eq!(acceptance.hits[..4], [1.0, 0.0, 0.0, 0.0]);
        acceptance.observe(2, 2);
        assert_eq!(acceptance.tries[..4], [2.0, 2.0, 0.0, 0.0]);
        assert_eq!(acceptance.hits[..4], [2.0, 1.0, 0.0, 0.0]);
        acceptance.observe(20, 20);
        assert_eq!(acceptance.tries[POSITIONS - 1], 1.0);
    }

    #[test]
    fn evidence_moves_the_estimate_and_fades() {
        let mut acceptance = Acceptance::new(0.9);
        assert_eq!(acceptance.rate(0, 0.7), 0.7);
        for _ in 0..20 {
            acceptance.observe(1, 0);
        }
        assert!(acceptance.rate(0, 0.7) < 0.2);
        for _ in 0..20 {
            acceptance.observe(1, 1);
        }
        assert!(acceptance.rate(0, 0.7) > 0.8);
    }
}
