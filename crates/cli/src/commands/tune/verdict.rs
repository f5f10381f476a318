//! What times say: a candidate is taken where it gains more than the least that is worth a change, more than its gains differ from
//! round to round, and costs no batch as much.

use serde::Serialize;

/// The least gain that is worth another choice than everybody's.
const LEAST_GAIN: f64 = 0.01;
/// Rounds from which on the best and the worst do not count: a clock that changes once is no spread.
const ROUNDS_TO_TRIM: usize = 5;

/// A figure of several rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Figure {
    pub(super) median: f64,
    /// Half of the range.
    pub(super) spread: f64,
}

impl Figure {
    /// Of one number for each round.
    pub(super) fn of(rounds: &[f64]) -> Figure {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let trimmed = match sorted.len() {
            ROUNDS_TO_TRIM.. => &sorted[1..sorted.len() - 1],
            _ => &sorted,
        };
        let (least, most) = (trimmed[0], trimmed[trimmed.len() - 1]);
        Figure {
            median: f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]),
            spread: (most - least) / 2.0,
        }
    }

    /// Whether it is above zero by more than its spread and more than the least that counts.
    fn is_gain(self) -> bool {
        self.median > LEAST_GAIN.max(self.spread)
    }

    fn is_loss(self) -> bool {
        -self.median > LEAST_GAIN.max(self.spread)
    }
}

/// A candidate beside the usual value, as shares of its speed: 0.02 is 2 % faster.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Verdict {
    /// Over all batches alike.
    pub(super) gain: Figure,
    /// A batch that would be slower.
    pub(super) slower: Option<usize>,
}

impl Verdict {
    /// Whether the candidate is to be taken.
    pub(super) fn wins(&self) -> bool {
        self.gain.is_gain() && self.slower.is_none()
    }

    /// The batch for whose sake a gain is not taken.
    pub(super) fn prevented_by(&self) -> Option<usize> {
        self.slower.filter(|_| self.gain.is_gain())
    }
}

/// Judges seconds, by batch and by round; both took turns in each round.
pub(super) fn judge(candidate: &[Vec<f64>], usual: &[Vec<f64>]) -> Verdict {
    let ratios = |(candidate, usual): (&Vec<f64>, &Vec<f64>)| -> Vec<f64> {
        let rounds = candidate.iter().zip(usual);
        rounds.map(|(seconds, usual)| usual / seconds).collect()
    };
    let by_batch: Vec<Vec<f64>> = candidate.iter().zip(usual).map(ratios).collect();
    let rounds = by_batch.iter().map(Vec::len).min().unwrap_or(0);
    let over_batches = |round: usize| {
        let logs: f64 = by_batch.iter().map(|ratios| ratios[round].ln()).sum();
        (logs / by_batch.len() as f64).exp() - 1.0
    };
    let gain = Figure::of(&(0..rounds).map(over_batches).collect::<Vec<_>>());
    let slower = by_batch.iter().position(|ratios| {
        let gains: Vec<f64> = ratios.iter().map(|ratio| ratio - 1.0).collect();
        Figure::of(&gains).is_loss()
    });
    Verdict { gain, slower }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds of a batch that takes so long, a little more or less in each round.
    fn batch(seconds: f64, jitter: f64) -> Vec<f64> {
        let of_round = |r: i32| seconds * (1.0 + jitter * f64::from(r % 3 - 1));
        (0..7).map(of_round).collect()
    }

    fn wins(candidate: &[Vec<f64>], usual: &[Vec<f64>]) -> bool {
        judge(candidate, usual).wins()
    }

    #[test]
    fn a_gain_must_be_worth_it() {
        let usual = [batch(1.0, 0.0)];
        assert!(wins(&[batch(0.97, 0.0)], &usual));
        assert!(!wins(&[batch(0.995, 0.0)], &usual));
        assert!(!wins(&[batch(1.0, 0.0)], &usual));
        assert!(!wins(&[batch(1.03, 0.0)], &usual));
        let gain = judge(&[batch(0.5, 0.0)], &usual).gain;
        assert_eq!((gain.median, gain.spread), (1.0, 0.0));
    }

    #[test]
    fn a_gain_within_the_spread_is_none() {
        let usual = [batch(1.0, 0.0)];
        assert!(!wins(&[batch(0.97, 0.05)], &usual));
        assert!(wins(&[batch(0.9, 0.05)], &usual));
        // What both have in common is no spread of the gain: they took turns.
        let slow_rounds: Vec<f64> = batch(1.0, 0.2);
        let faster: Vec<f64> = slow_rounds.iter().map(|s| s * 0.97).collect();
        assert!(wins(&[faster], &[slow_rounds]));
        // One round in which something else happened does not count.
        let mut once = batch(0.97, 0.0);
        once[3] = 4.0;
        assert!(wins(&[once], &usual));
    }

    #[test]
    fn what_makes_one_batch_slower_is_left_alone() {
        let usual = [batch(1.0, 0.0), batch(3.0, 0.0)];
        assert!(wins(&[batch(0.9, 0.0), batch(3.0, 0.0)], &usual));
        assert!(wins(&[batch(0.9, 0.0), batch(3.02, 0.0)], &usual));
        let mixed = judge(&[batch(0.9, 0.0), batch(3.1, 0.0)], &usual);
        assert!(!mixed.wins());
        assert_eq!(mixed.prevented_by(), Some(1));
        // Nothing is prevented where nothing is gained.
        let slow = judge(&[batch(1.1, 0.0), batch(3.1, 0.0)], &usual);
        assert_eq!((slow.slower, slow.prevented_by()), (Some(0), None));
    }

    #[test]
    fn few_rounds_are_taken_whole() {
        assert_eq!(Figure::of(&[1.0, 3.0, 2.0]).spread, 1.0);
        assert_eq!(Figure::of(&[1.0, 3.0, 2.0, 9.0]).median, 2.5);
        assert_eq!(Figure::of(&[1.0, 3.0, 2.0, 9.0, 2.5]).spread, 0.5);
    }
}
