use super::*;
use crate::core::{
    ConstraintSource,
    testing::{request, roomy, text},
};

fn sequence(request: Request) -> Sequence {
    let limit = request.prompt.len() + request.max_tokens.unwrap();
    let (config, facts) = roomy(Some(64));
    let limits = Limits::new(config, facts).unwrap();
    Sequence::new(RequestId(1), request, limit, &limits)
}

#[test]
fn the_last_token_asked_for_finishes_by_length() {
    let mut sequence = sequence(request(text(1, 5), 2));
    assert_eq!(sequence.push(7), None);
    assert_eq!(sequence.push(7), Some(FinishReason::Length));
}

#[test]
fn a_stop_token_finishes_even_as_the_last_token() {
    let mut asked = request(text(1, 5), 1);
    asked.stop_tokens = vec![9, 7];
    let stop = Some(FinishReason::Stop { token: 7 });
    assert_eq!(sequence(asked).push(7), stop);
}

#[test]
fn stop_tokens_are_ordinary_when_ignored() {
    let mut asked = request(text(1, 5), 2);
    asked.stop_tokens = vec![7];
    asked.ignore_eos = true;
    assert_eq!(sequence(asked).push(7), None);
}

/// Sampled rows, and what the rows are fed.
fn last_run(sequence: &Sequence) -> (usize, Vec<Feed<'_>>) {
    let feeds: Vec<Feed<'_>> = sequence.feeds().collect();
    (sequence.run(0..feeds.len(), None).sampled, feeds)
}

fn result(token: TokenId) -> RowResult {
    RowResult {
        token,
        ..RowResult::default()
    }
}

#[test]
fn only_the_step_that_feeds_the_last_token_samples() {
    let mut sequence = sequence(request(text(1, 5), 2));
    sequence.enter(1, 4);
    assert_eq!(last_run(&sequence).0, 0);
    sequence.enter(2, 1);
    assert_eq!(last_run(&sequence), (1, vec![Feed::Token(text(1, 5)[4])]));
    let plain = Sampling::greedy();
    let draws: Vec<_> = sequence.draws(&plain, &mut [].iter()).collect();
    assert_eq!(draws[0].1.history, text(1, 5));
}

#[test]
fn the_row_after_a_step_is_fed_what_that_samples_unless_it_is_the_last() {
    let mut sequence = sequence(request(text(1, 5), 2));
    sequence.enter(1, 5);
    sequence.shares[0].first_result = 3;
    assert_eq!(sequence.ready(), 1);
    sequence.enter(2, 1);
    assert_eq!(last_run(&sequence), (1, vec![Feed::Sampled(3)]));
    let share = sequence.shares.pop_front().unwrap();
    assert_eq!(sequence.take(&share, &[result(7)]), (5, 1, None));
    // The second token is the last.
    assert_eq!(sequence.ready(), 0);
}

#[test]
fn a_draft_is_kept_as_far_as_it_is_drawn() {
    let mut asked = request(text(1, 5), 20);
    asked.drafts = true;
    for (results, kept) in [
        ([7, 8, 9, 4], 4),
        ([7, 8, 1, 9], 3),
        ([7, 1, 9, 9], 2),
        ([1, 8, 9, 9], 1),
    ] {
        let mut sequence = sequence(asked.clone());
        sequence.draft(&[7, 8, 9], 8, 50);
        sequence.enter(1, 5);
        let (sampled, feeds) = last_run(&sequence);
        assert_eq!((sampled, feeds.len()), (4, 8));
        let histories: Vec<usize> = (sequence.draws(&Sampling::greedy(), &mut [].iter()))
            .map(|(_, draw)| draw.history.len())
            .collect();
        assert_eq!(histories, [5, 6, 7, 8]);
        let share = sequence.shares.pop_front().unwrap();
        let taken = sequence.take(&share, &results.map(result));
        // Each token that was right is computed; the last one taken never is.
        assert_eq!(taken, (5 + kept - 1, kept, None), "{results:?}");
        assert_eq!(sequence.known(), 5 + kept);
    }
}

/// Anything first; then 8 alone, twice; then anything.
#[derive(Clone)]
struct Eights(usize);

impl Constraint for Eights {
    fn accept(&mut self, _: TokenId) {
        self.0 += 1;
    }

    fn mask(&mut self, mask: &mut TokenMask) {
        mask.allow_all();
    }

    fn forced(&self) -> Option<TokenId> {
        (1..3).contains(&self.0).then_some(8)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[test]
fn what_a_constraint_forces_in_a_draft_is_told_as_forced() {
    let mut asked = request(text(1, 5), 20);
    asked.drafts = true;
    asked.constraint = Some(ConstraintSource::new(|| Box::new(Eights(0))));
    for (results, forced) in [([7, 8, 8, 4], vec![1, 2]), ([1, 8, 8, 4], vec![])] {
        let mut sequence = sequence(asked.clone());
        sequence.draft(&[7, 8, 8], 8, 50);
        sequence.enter(1, 5);
        let share = sequence.shares.pop_front().unwrap();
        sequence.take(&share, &results.map(result));
        assert_eq!(sequence.forced_results, forced, "{results:?}");
    }
}

#[test]
fn a_draft_ends_where_it_cannot_come_to_be() {
    let mut asked = request(text(1, 5), 4);
    asked.stop_tokens = vec![9];
    let drafted = |draft: &[TokenId], most: usize| {
        let mut sequence = sequence(asked.clone());
        sequence.draft(draft, most, 50);
        sequence.drafted()
    };
    assert_eq!(drafted(&[1, 2, 3, 4, 5], 8), 3, "the limit");
    assert_eq!(drafted(&[1, 2, 3], 2), 2, "the most that is verified");
    assert_eq!(drafted(&[1, 9, 3], 8), 2, "a stop token");
    assert_eq!(drafted(&[1, 50, 3], 8), 1, "no token");
}
