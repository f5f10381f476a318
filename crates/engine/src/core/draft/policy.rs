//! Source and length of the next draft: whatever is expected to give the most tokens for its time.

use super::{acceptance::Acceptance, costs::StepCosts, suffix::Match};

/// Least gain expected of drafts, or the plain path is taken: estimates are no better than that.
const LEAST_GAIN: f64 = 1.03;
/// Share of the acceptance at one place that is expected at the next, before anything is known of that.
const NEXT_PLACE: f32 = 0.97;
/// Decay per round of an estimate of all requests together.
const OVERALL_DECAY: f32 = 0.99;

/// Proposer of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The draft model.
    Model,
    /// Prompt lookup, by how much of the sequence's end was found: an index into [`LOOKUP_CLASSES`].
    Lookup(usize),
}

/// Matches of at least so many tokens, and the share of drafts that are taken to be right before any has been seen.
const LOOKUP_CLASSES: [(usize, f32); 4] = [(3, 0.25), (5, 0.5), (9, 0.75), (17, 0.9)];
/// The same of draft models.
const MODEL_PRIOR: f32 = 0.7;

impl Source {
    pub(crate) const COUNT: usize = 1 + LOOKUP_CLASSES.len();

    pub(crate) fn of_match(found: &Match) -> Option<Source> {
        let mut classes = LOOKUP_CLASSES.iter();
        let class = classes.rposition(|(least, _)| found.length >= *least)?;
        Some(Source::Lookup(class))
    }

    pub(crate) fn index(self) -> usize {
        match self {
            Source::Model => 0,
            Source::Lookup(class) => 1 + class,
        }
    }

    fn prior(self) -> f32 {
        match self {
            Source::Model => MODEL_PRIOR,
            Source::Lookup(class) => LOOKUP_CLASSES[class].1,
        }
    }
}

/// A draft to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) source: Source,
    pub(crate) length: usize,
}

/// Sequences that decode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Those that may draft.
    pub(crate) drafting: usize,
    pub(crate) others: usize,
}

/// Drafting state that all sequences share.
pub(crate) struct DraftPolicy {
    /// There is a draft model.
    pub(crate) model: bool,
    /// Prompt lookup is on.
    pub(crate) lookup: bool,
    /// Rows that drafts may bring a step to.
    pub(crate) rows: usize,
    /// The longest draft.
    pub(crate) most: usize,
    pub(crate) costs: StepCosts,
    /// Of all requests, by source.
    overall: [Acceptance; Source::COUNT],
}

impl DraftPolicy {
    pub(crate) fn new(
        (model, lookup): (bool, bool),
        (rows, most): (usize, usize),
        costs: StepCosts,
    ) -> DraftPolicy {
        DraftPolicy {
            model,
            lookup,
            rows,
            most,
            costs,
            overall: [Acceptance::new(OVERALL_DECAY); Source::COUNT],
        }
    }

    /// A draft of any sequence has been verified.
    pub(crate) fn observe(&mut self, source: Source, offered: usize, accepted: usize) {
        self.overall[source.index()].observe(offered, accepted);
    }

    /// Rows of a draft that each sequence may have.
    pub(crate) fn room(&self, load: Load) -> usize {
        let rows = self.rows.saturating_sub(load.drafting + load.others);
        self.most.min(rows / load.drafting.max(1))
    }

    /// The length that gives the most tokens for its time, if all that draft do so in the same way, and the gain over none.
    pub(crate) fn best_length(&self, source: Source, own: &Acceptance, load: Load) -> (usize, f64) {
        let drafting = load.drafting.max(1);
        let plain = self.costs.target(drafting + load.others);
        let plain_rate = (drafting + load.others) as f64 / plain;
        let step = match source {
            Source::Model => self.costs.drafter(drafting),
            Source::Lookup(_) => 0.0,
        };
        let overall = &self.overall[source.index()];
        let (mut best, mut best_gain) = (0, LEAST_GAIN);
        let (mut right, mut tokens) = (1.0, 1.0);
        let mut expected = source.prior();
        for length in 1..=self.room(load) {
            let position = length - 1;
            // What is not known of a place is taken to be a little worse than the one before it.
            let prior = overall.rate(position, expected);
            let rate = own.rate(position, prior);
            expected = rate * NEXT_PLACE;
            right *= f64::from(rate);
            tokens += right;
            let rows = load.others + drafting * (1 + length);
            let time = self.costs.target(rows) + length as f64 * step;
            let rate = (load.others as f64 + drafting as f64 * tokens) / time;
            let gain = rate / plain_rate;
            if gain > best_gain {
                (best, best_gain) = (length, gain);
            }
        }
        (best, best_gain)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Weights dominate: eight rows cost a fifth more than one, and a draft step a tenth of a pass.
    fn policy() -> DraftPolicy {
        DraftPolicy::new((true, true), (64, 7), StepCosts::assumed())
    }

    fn after(offered: usize, accepted: usize) -> Acceptance {
        let mut own = Acceptance::new(0.9);
        for _ in 0..30 {
            own.observe(offered, accepted);
        }
        own
    }

    const ALONE: Load = Load {
        drafting: 1,
        others: 0,
    };

    #[test]
    fn the_better_drafts_are_the_longer_they_get() {
        // Of one request, which are all there are.
        let length = |accepted: usize| {
            let mut policy = policy();
            for _ in 0..30 {
                policy.observe(Source::Model, 7, accepted);
            }
            policy
                .best_length(Source::Model, &after(7, accepted), ALONE)
                .0
        };
        assert_eq!(length(0), 0, "none is right");
        let (one, all) = (length(1), length(7));
        assert!(one >= 1 && one < all, "{one}, {all}");
        assert_eq!(all, 7);
    }

    #[test]
    fn rows_that_cost_much_make_drafts_short() {
        let mut policy = policy();
        let millis = Duration::from_millis;
        policy.costs = StepCosts {
            target: vec![(1, millis(10)), (8, millis(80))],
            drafter: vec![(1, millis(2))],
        };
        let (length, _) = policy.best_length(Source::Model, &after(7, 7), ALONE);
        assert_eq!(length, 0, "each row costs as much as a pass");
    }

    #[test]
    fn drafts_keep_within_the_rows_that_they_may_bring_a_step_to() {
        let mut policy = policy();
        policy.rows = 32;
        for (drafting, most) in [(1, 7), (4, 7), (8, 3), (16, 1), (17, 0), (40, 0)] {
            let load = Load {
                drafting,
                others: 0,
            };
            assert_eq!(policy.room(load), most);
            let (length, _) = policy.best_length(Source::Model, &after(7, 7), load);
            assert!(length <= most);
        }
    }

    #[test]
    fn what_all_requests_see_is_what_a_new_one_expects() {
        let mut policy = policy();
        let new = Acceptance::new(0.9);
        assert!(policy.best_length(Source::Model, &new, ALONE).0 > 0);
        for _ in 0..200 {
            policy.observe(Source::Model, 3, 0);
        }
        assert_eq!(policy.best_length(Source::Model, &new, ALONE).0, 0);
    }
}
