//! Drafting state of one sequence: how drafts went, where it repeats itself, and what to draft next.

use carat_model::TokenId;

use super::{
    acceptance::Acceptance,
    pause::Pause,
    policy::{Decision, DraftPolicy, Load, Source},
    suffix::{Match, SuffixIndex},
};

/// Decay per round of an estimate of one request.
const OWN_DECAY: f32 = 0.95;

/// Record of the drafts of one source.
#[derive(Clone, Copy)]
struct Tracker {
    acceptance: Acceptance,
    pause: Pause,
}

pub(crate) struct Drafting {
    suffixes: SuffixIndex,
    found: Option<Match>,
    trackers: [Tracker; Source::COUNT],
    decision: Option<Decision>,
}

impl Drafting {
    pub(crate) fn new() -> Drafting {
        let tracker = Tracker {
            acceptance: Acceptance::new(OWN_DECAY),
            pause: Pause::new(),
        };
        Drafting {
            suffixes: SuffixIndex::default(),
            found: None,
            trackers: [tracker; Source::COUNT],
            decision: None,
        }
    }

    /// The draft to be made next; `None` on the plain path.
    pub(crate) fn decision(&self) -> Option<Decision> {
        self.decision
    }

    /// Decides what to draft behind these tokens.
    pub(crate) fn decide(&mut self, tokens: &[TokenId], policy: &DraftPolicy, load: Load) {
        let lookup = if policy.lookup {
            self.suffixes.extend(tokens);
            self.found = self.suffixes.find(tokens);
            self.found.as_ref().and_then(Source::of_match)
        } else {
            None
        };
        let model = policy.model.then_some(Source::Model);
        let mut best: Option<(Decision, f64)> = None;
        for source in model.into_iter().chain(lookup) {
            let tracker = &mut self.trackers[source.index()];
            let (mut length, mut gain) = policy.best_length(source, &tracker.acceptance, load);
            if length > 0 {
                tracker.pause.end();
            } else if tracker.pause.step() {
                (length, gain) = (policy.room(load).min(1), 1.0);
            }
            if length > 0 && best.is_none_or(|(_, most)| gain > most) {
                best = Some((Decision { source, length }, gain));
            }
        }
        self.decision = best.map(|(decision, _)| decision);
    }

    /// The tokens behind the position that the end repeats.
    pub(crate) fn look_up(&self, tokens: &[TokenId], length: usize) -> Vec<TokenId> {
        let found = self.found.as_ref();
        found.map_or(Vec::new(), |found| found.draft(tokens, length))
    }

    /// Of a draft of `offered` tokens the first `accepted` were right. Returns whose it was.
    pub(crate) fn observe(&mut self, offered: usize, accepted: usize) -> Option<Source> {
        let source = self.decision?.source;
        let tracker = &mut self.trackers[source.index()];
        tracker.acceptance.observe(offered, accepted);
        tracker.pause.round();
        Some(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::draft::StepCosts;

    const ALONE: Load = Load {
        drafting: 1,
        others: 0,
    };

    fn policy(model: bool) -> DraftPolicy {
        DraftPolicy::new((model, true), (32, 4), StepCosts::assumed())
    }

    #[test]
    fn drafts_that_are_never_right_stop_and_are_tried_again_rarely() {
        let policy = policy(true);
        let mut drafting = Drafting::new();
        let mut drafted = 0;
        for _ in 0..2000 {
            drafting.decide(&[1], &policy, ALONE);
            if let Some(Decision { length, .. }) = drafting.decision() {
                drafted += 1;
                drafting.observe(length, 0);
            }
        }
        assert!((8..60).contains(&drafted), "{drafted} of 2000 steps");
    }

    #[test]
    fn the_same_history_gives_the_same_lengths() {
        let run = || {
            let policy = policy(true);
            let mut drafting = Drafting::new();
            let mut lengths = Vec::new();
            for round in 0..300usize {
                drafting.decide(&[1], &policy, ALONE);
                let length = drafting.decision().map_or(0, |d| d.length);
                lengths.push(length);
                if length > 0 {
                    drafting.observe(length, (round * round % 5).min(length));
                }
            }
            lengths
        };
        let lengths = run();
        assert_eq!(lengths, run());
        assert!(lengths.iter().any(|length| *length != lengths[0]));
    }

    #[test]
    fn a_long_match_is_better_than_the_model() {
        let policy = policy(true);
        let mut drafting = Drafting::new();
        let tokens: Vec<TokenId> = (0..40).chain(0..20).collect();
        drafting.decide(&tokens, &policy, ALONE);
        let decision = drafting.decision().unwrap();
        assert_eq!(decision.source, Source::Lookup(3));
        assert_eq!(drafting.look_up(&tokens, 3), [20, 21, 22]);
    }
}
