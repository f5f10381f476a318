use super::*;
use crate::core::{
    MissReason,
    testing::{Bench, FakeExecutor, request, roomy, text, with_pages},
};

impl Scheduler {
    /// Everything the design promises, between steps.
    pub(crate) fn audit(&self) {
        let everyone = || self.running.iter().chain(&self.waiting);
        let number = |s: &Sequence| s.shares.iter().map(|share| share.step).collect::<Vec<_>>();
        let under_way: Vec<u64> = self.steps.iter().map(|step| step.number).collect();
        assert!(everyone().all(|s| number(s).iter().all(|n| under_way.contains(n))));
        assert!(everyone().all(|s| !s.shares.is_empty() || s.fed == s.table.computed));
        assert!(
            everyone().is_sorted_by_key(|s| s.id),
            "older requests run first"
        );
        assert!(self.waiting.iter().all(|s| s.table.pages.full.is_empty()));
        assert!(self.running.len() <= self.limits.config().max_sequences);
        assert!(self.reserved_sliding() <= self.limits.config().pages.sliding);
        for sequence in &self.running {
            let held = sequence.table.pages.sliding.iter();
            let held = held
                .filter(|p| **p != carat_model::kv::PageId::FREED)
                .count();
            assert_eq!(held, sequence.table.held_sliding());
            let is_settled = sequence.shares.is_empty();
            assert!(!is_settled || held <= self.reservation(sequence));
        }
        self.kv.audit(self.running.iter().map(|s| &s.table));
    }

    pub(crate) fn audit_contents(&self, executor: &FakeExecutor, has_media: bool) {
        self.kv.audit_contents(executor, has_media);
    }

    /// Sequences that could be given a draft now, with their tokens.
    pub(crate) fn draftable(&self) -> Vec<(RequestId, Vec<TokenId>)> {
        let settled = self
            .running
            .iter()
            .filter(|s| s.drafts && s.shares.is_empty());
        settled
            .map(|s| (s.id, s.content().tokens.to_vec()))
            .collect()
    }
}

fn tokens(updates: &[Update], id: RequestId) -> usize {
    let of = |u: &&Update| matches!(u, Update::Token { id: of, .. } if *of == id);
    updates.iter().filter(of).count()
}

fn counts(updates: &[Update], id: RequestId) -> Option<(FinishReason, Counts)> {
    updates.iter().find_map(|u| match u {
        Update::Finished {
            id: of,
            reason,
            counts,
        } if *of == id => Some((*reason, *counts)),
        _ => None,
    })
}

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_decoding_ones() {
    let mut bench = Bench::new(roomy(Some(64)));
    bench.submit(request(text(1, 10), 20));
    assert_eq!(bench.step(), Some(vec![10]));
    bench.submit(request(text(2, 150), 20));
    assert_eq!(bench.step(), Some(vec![1, 63]));
    assert_eq!(bench.step(), Some(vec![1, 63]));
    assert_eq!(bench.step(), Some(vec![1, 24]));
    assert_eq!(bench.step(), Some(vec![1, 1]));
}

#[test]
fn prompts_share_a_step_evenly_and_short_ones_leave_their_rest_to_the_oldest() {
    let mut bench = Bench::new(roomy(Some(64)));
    bench.submit(request(text(1, 200), 1));
    bench.submit(request(text(2, 4), 1));
    bench.submit(request(text(3, 200), 1));
    // 21 each and one over; the second leaves 17.
    assert_eq!(bench.step(), Some(vec![39, 4, 21]));
}

#[test]
fn requests_start_in_the_order_they_came() {
    let mut bench = Bench::new(roomy(None));
    let ids: Vec<RequestId> = (0..9)
        .map(|n| bench.submit(request(text(n, 9), 3)))
        .collect();
    let started: Vec<RequestId> = bench
        .run()
        .into_iter()
        .filter_map(|u| match u {
            Update::Started { id } => Some(id),
            _ => None,
        })
        .collect();
    assert_eq!(started, ids);
}

#[test]
fn a_repeated_prompt_is_reused_up_to_its_last_page() {
    let mut bench = Bench::new(roomy(Some(64)));
    assert_eq!(bench.finish(request(text(1, 100), 5)).cached_tokens, 0);
    let again = bench.finish(request(text(1, 100), 5));
    assert_eq!((again.cached_tokens, again.miss), (96, None));
}

#[test]
fn generated_tokens_are_reused_by_the_next_turn() {
    let mut bench = Bench::new(roomy(Some(64)));
    let id = bench.submit(request(text(1, 60), 70));
    let mut turn = text(1, 60);
    while bench.step().is_some() {
        turn.extend(bench.outputs.rows.iter().map(|r| r.token));
    }
    let updates: Vec<Update> = bench.scheduler.updates().collect();
    assert_eq!(tokens(&updates, id), 70);
    turn.extend(text(2, 40));
    let next = bench.finish(request(turn, 1));
    // 129 of the 130 tokens were computed: four pages.
    assert_eq!(
        (next.cached_tokens, next.miss),
        (128, Some(MissReason::Diverged))
    );
}

#[test]
fn the_youngest_is_preempted_when_pages_run_out_and_still_finishes() {
    // Six pages: both fit with their prompts, not with their answers.
    let mut bench = Bench::new(with_pages(roomy(Some(64)), 6, 40));
    let old = bench.submit(request(text(1, 60), 60));
    let young = bench.submit(request(text(2, 60), 60));
    let updates = bench.run();
    let (reason, kept) = counts(&updates, old).unwrap();
    assert_eq!((reason, kept.preemptions), (FinishReason::Length, 0));
    let (reason, counts) = counts(&updates, young).unwrap();
    assert_eq!(reason, FinishReason::Length);
    assert_eq!(counts.preemptions, 1);
    assert_eq!(tokens(&updates, young), 60);
    let starts = updates
        .iter()
        .filter(|u| matches!(u, Update::Started { .. }));
    assert_eq!(starts.count(), 2, "a preempted request starts once");
}

#[test]
fn a_newcomer_waits_rather_than_being_preempted_at_once() {
    let mut bench = Bench::new(with_pages(roomy(None), 4, 0));
    bench.submit(request(text(1, 70), 20));
    let late = bench.submit(request(text(2, 40), 5));
    let updates = bench.run();
    assert_eq!(counts(&updates, late).unwrap().1.preemptions, 0);
}

#[test]
fn cancelled_requests_give_their_pages_back_before_the_next_step() {
    let mut bench = Bench::new(roomy(Some(64)));
    let running = bench.submit(request(text(1, 200), 5));
    bench.step();
    let waiting = bench.submit(request(text(2, 200), 5));
    assert!(bench.scheduler.stats().pages.full.held > 0);
    bench.scheduler.cancel(running);
    bench.scheduler.cancel(waiting);
    assert_eq!(bench.step(), None);
    assert_eq!(bench.scheduler.stats().pages.full.held, 0);
    let updates: Vec<Update> = bench.scheduler.updates().collect();
    for id in [running, waiting] {
        let (reason, _) = counts(&updates, id).unwrap();
        assert_eq!(reason, FinishReason::Cancelled);
    }
}

#[test]
fn a_request_cancelled_during_a_step_gets_no_token_of_it() {
    let mut bench = Bench::new(roomy(None));
    let id = bench.submit(request(text(1, 20), 5));
    bench.begin();
    bench.scheduler.cancel(id);
    bench.scheduler.apply(&bench.outputs);
    assert_eq!(bench.step(), None);
    let updates: Vec<Update> = bench.scheduler.updates().collect();
    assert_eq!(tokens(&updates, id), 0);
}

#[test]
fn an_abandoned_step_ends_its_requests_and_keeps_nothing_of_it() {
    let mut bench = Bench::new(roomy(None));
    let id = bench.submit(request(text(1, 64), 5));
    bench.begin();
    bench.scheduler.abandon();
    bench.scheduler.audit();
    let updates: Vec<Update> = bench.scheduler.updates().collect();
    assert!(updates.contains(&Update::Abandoned { id }));
    assert_eq!(
        bench.finish(request(text(1, 64), 5)).miss,
        Some(MissReason::NoMatch)
    );
}

#[test]
fn few_sliding_pages_make_chunks_shorter_not_fewer() {
    // One window of 64 is 3 pages; the fourth leaves a page more for the chunk.
    let mut bench = Bench::new(with_pages(roomy(Some(64)), 40, 4));
    bench.submit(request(text(1, 200), 1));
    let mut chunks = Vec::new();
    while let Some(rows) = bench.step() {
        chunks.push(rows[0]);
    }
    assert_eq!(chunks.iter().sum::<usize>(), 200);
    assert!(
        chunks
            .iter()
            .all(|rows| *rows >= 32 || rows == chunks.last().unwrap())
    );
}

#[test]
fn a_request_that_could_never_fit_is_rejected_with_the_numbers() {
    let mut scheduler = Bench::new(with_pages(roomy(None), 4, 0)).scheduler;
    let over = scheduler.submit(RequestId(1), request(text(1, 100), 30));
    assert_eq!(
        over.unwrap_err(),
        Rejected::OverPages {
            prompt: 100,
            max_tokens: 30,
            room: 129
        }
    );
    assert!(
        scheduler
            .submit(RequestId(2), request(text(1, 100), 29))
            .is_ok()
    );
}
