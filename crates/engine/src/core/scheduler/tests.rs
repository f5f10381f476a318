use super::*;
use crate::core::{
    MissReason,
    testing::{Bench, FakeConstraint, FakeExecutor, request, roomy, text, with_pages},
};

impl Scheduler {
    /// Everything the design promises, between steps.
    pub(crate) fn audit(&self) {
        let everyone = || self.running.iter().chain(self.waiting.iter());
        let number = |s: &Sequence| s.shares.iter().map(|share| share.step).collect::<Vec<_>>();
        let under_way: Vec<u64> = self.steps.iter().map(|step| step.number).collect();
        assert!(everyone().all(|s| number(s).iter().all(|n| under_way.contains(n))));
        assert!(everyone().all(|s| !s.shares.is_empty() || s.fed == s.table.computed));
        assert!(self.waiting.iter().all(|s| s.table.pages.full.is_empty()));
        assert!(self.running.len() <= self.limits.config().max_sequences);
        assert!(self.reserved_sliding() <= self.limits.config().pages.sliding);
        self.waiting.audit(|id| everyone().any(|s| s.id == id));
        for sequence in &self.running {
            let pool = self.limits.config().pages.sliding;
            let sliding = || {
                sequence
                    .table
                    .pages
                    .sliding
                    .iter()
                    .map(|page| page.0 as usize)
            };
            let held = sliding().filter(|page| *page < pool).count();
            assert_eq!(held, sequence.table.held_sliding());
            let is_settled = sequence.shares.is_empty();
            assert!(!is_settled || held <= sequence.reservation);
            let named = pool..pool + self.limits.config().chunk_pages;
            let passing = sliding().filter(|page| named.contains(page)).count();
            assert!(
                !is_settled || passing == 0,
                "what is in chunk pages is over"
            );
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
fn prompts_are_computed_one_after_the_other_in_the_order_they_came() {
    let mut bench = Bench::new(roomy(Some(64)));
    bench.submit(request(text(1, 40), 1));
    bench.submit(request(text(2, 100), 1));
    bench.submit(request(text(3, 10), 1));
    assert_eq!(bench.step(), Some(vec![40, 24]));
    assert_eq!(bench.step(), Some(vec![64]));
    assert_eq!(bench.step(), Some(vec![12, 10]));
}

#[test]
fn prompts_leave_a_step_to_those_who_decode_but_for_prefill_rows() {
    let (mut config, facts) = roomy(Some(64));
    config.prefill_rows = 20;
    let mut bench = Bench::new((config, facts));
    bench.submit(request(text(1, 50), 4));
    // Nobody decodes yet.
    assert_eq!(bench.step(), Some(vec![50]));
    bench.submit(request(text(2, 30), 4));
    bench.submit(request(text(3, 30), 4));
    assert_eq!(bench.step(), Some(vec![1, 20]));
    assert_eq!(bench.step(), Some(vec![1, 10, 10]));
    assert_eq!(bench.step(), Some(vec![1, 1, 20]));
}

#[test]
fn chunks_get_shorter_with_depth_whoever_else_is_there() {
    let (mut config, mut facts) = roomy(None);
    facts.even_depth = Some(1000);
    config.context = 4000;
    config.max_rows = 1024;
    config.pages.full = 1000;
    let chunks = |others: usize| {
        let mut bench = Bench::new((config.clone(), facts));
        bench.submit(request(text(1, 3900), 1));
        for other in 0..others {
            bench.submit(request(text(2 + other as u64, 1000), 1));
        }
        let mut chunks = Vec::new();
        while let Some(rows) = bench.step() {
            chunks.push(rows);
        }
        chunks
    };
    let alone = chunks(0);
    assert_eq!(alone[..4], [[1024], [512], [384], [384]]);
    let company = chunks(2);
    let last = company.iter().position(|step| step.len() > 1).unwrap();
    assert_eq!(company[..last], alone[..last]);
    // The last chunk leaves a part of the step, in which the next prompt has as large a part of its own chunk.
    let rest = alone[last][0];
    assert!(rest < 256);
    assert_eq!(company[last], [rest, 1024 - rest * 1024 / 256]);
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
            Update::Started { id, .. } => Some(id),
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

fn lane(lane: u64, request: Request) -> Request {
    Request {
        lane: Some(super::super::LaneId(lane)),
        ..request
    }
}

/// Those who started since the last call.
fn started(bench: &mut Bench) -> Vec<u64> {
    let updates = bench.scheduler.updates();
    let started = updates.filter_map(|u| match u {
        Update::Started { id, .. } => Some(id.0),
        _ => None,
    });
    started.collect()
}

#[test]
fn lanes_are_served_in_turn_however_many_wait_in_one() {
    let (mut config, facts) = roomy(None);
    config.max_sequences = 1;
    let mut bench = Bench::new((config, facts));
    for n in 0..8 {
        bench.submit(lane(1, request(text(n, 100), 100)));
    }
    for n in 8..10 {
        bench.submit(lane(2, request(text(n, 100), 100)));
    }
    while bench.step().is_some() {}
    let order = started(&mut bench);
    let second = |id| order.iter().position(|o| *o == id).unwrap();
    assert!(second(9) <= 4 && second(10) <= 6, "{order:?}");
    let of_first: Vec<u64> = order.iter().copied().filter(|id| *id < 9).collect();
    assert_eq!(of_first, [1, 2, 3, 4, 5, 6, 7, 8], "in order within a lane");
}

#[test]
fn a_lane_of_long_requests_starts_fewer_of_them() {
    let (mut config, facts) = roomy(None);
    config.max_sequences = 1;
    let mut bench = Bench::new((config, facts));
    for n in 0..40 {
        bench.submit(lane(1, request(text(n, 150), 50)));
        bench.submit(lane(2, request(text(100 + n, 40), 10)));
    }
    let mut order = Vec::new();
    while order.len() < 30 {
        bench.step().unwrap();
        order.extend(started(&mut bench));
    }
    let long = order.iter().filter(|id| *id % 2 == 1).count();
    // They cost 200 and 50 tokens.
    assert!((4..=8).contains(&long), "{order:?}");
}

#[test]
fn a_large_request_is_passed_by_small_ones_but_not_for_ever() {
    let (mut config, facts) = roomy(None);
    config.max_unfinished = 1000;
    let mut bench = Bench::new(with_pages((config, facts), 9, 0));
    bench.submit(request(text(1, 60), 190));
    bench.step();
    // Eight pages are not there before the first is done.
    let large = bench.submit(request(text(2, 240), 1));
    let mut passed = 0;
    let mut n = 3;
    loop {
        while bench.scheduler.stats().waiting < 4 {
            bench.submit(request(text(n, 8), 1));
            n += 1;
        }
        bench.step().unwrap();
        let started = started(&mut bench);
        if started.contains(&large.0) {
            break;
        }
        passed += started.iter().filter(|id| **id > large.0).count();
        assert!(passed <= 32, "it waits for ever");
    }
    assert_eq!(passed, 32);
}

#[test]
fn who_waits_for_room_is_looked_up_once_until_something_changes() {
    let mut bench = Bench::new(with_pages(roomy(None), 8, 0));
    bench.submit(request(text(1, 100), 60));
    bench.submit(request(text(2, 200), 10));
    // The prompt takes two steps; its first token is a change.
    for _ in 0..3 {
        bench.step();
    }
    let before = bench.scheduler.changes;
    for _ in 0..40 {
        bench.step();
        assert_eq!(bench.scheduler.full_since, Some(before));
    }
    assert_eq!(bench.scheduler.changes, before);
    let updates = bench.run();
    assert!(counts(&updates, RequestId(2)).is_some());

    // Somebody who was found to have no room is not looked at before that.
    let late = bench.submit(request(text(3, 10), 1));
    bench.scheduler.full_since = Some(bench.scheduler.changes);
    assert_eq!(bench.step(), None);
    bench.submit(request(text(4, 10), 1));
    bench.step();
    assert!(started(&mut bench).contains(&late.0));
}

#[test]
fn a_sibling_starts_with_the_first_token_and_computes_no_prompt() {
    let mut bench = Bench::new(roomy(Some(64)));
    let first = bench.submit(request(text(1, 100), 5));
    let mut sibling = request(text(1, 100), 5);
    sibling.after = Some(first);
    let second = bench.submit(sibling.clone());
    let other = bench.submit(request(text(2, 10), 5));
    bench.step();
    assert_eq!(started(&mut bench), [first.0, other.0]);
    bench.step();
    assert!(started(&mut bench).is_empty(), "the prompt takes two steps");
    bench.step();
    assert_eq!(started(&mut bench), [second.0]);
    let updates = bench.run();
    assert_eq!(counts(&updates, second).unwrap().1.cached_tokens, 96);

    // Of one that is over, or was never there, nobody waits for anything.
    bench.submit(sibling);
    let mut stranger = request(text(3, 10), 1);
    stranger.after = Some(RequestId(99));
    bench.submit(stranger);
    bench.step();
    assert_eq!(started(&mut bench).len(), 2);
}

#[test]
fn a_sibling_waits_for_the_prompt_whatever_is_forced_before() {
    let mut bench = Bench::new(roomy(None));
    let forcing = Request {
        constraint: Some(FakeConstraint::source(2, 14)),
        ..request(text(1, 100), 50)
    };
    let first = bench.submit(forcing.clone());
    let second = bench.submit(Request {
        after: Some(first),
        ..forcing
    });
    bench.step();
    let updates: Vec<Update> = bench.scheduler.updates().collect();
    assert!(matches!(updates[1], Update::Forced { .. }), "{updates:?}");
    let started = |u: &Update| matches!(u, Update::Started { id, .. } if *id == second);
    assert!(!updates.iter().any(started));
    let updates = bench.run();
    assert_eq!(counts(&updates, second).unwrap().1.cached_tokens, 96);
}

#[test]
fn siblings_of_one_that_ends_without_a_token_start() {
    let mut bench = Bench::new(roomy(None));
    let first = bench.submit(request(text(1, 200), 5));
    let second = bench.submit(Request {
        after: Some(first),
        ..request(text(1, 200), 5)
    });
    bench.step();
    bench.scheduler.cancel(first);
    let updates = bench.run();
    let (reason, _) = counts(&updates, second).unwrap();
    assert_eq!(reason, FinishReason::Length);
}

#[test]
fn a_request_ends_at_its_deadline_whether_it_runs_or_waits() {
    let (mut config, facts) = roomy(None);
    config.max_sequences = 1;
    let mut bench = Bench::new((config, facts));
    let running = bench.submit(request(text(1, 20), 50));
    let waiting = bench.submit(request(text(2, 20), 50));
    bench.step();
    bench.scheduler.expire(running);
    bench.scheduler.expire(waiting);
    // The first to end it has the last word.
    bench.scheduler.cancel(waiting);
    assert_eq!(bench.step(), None);
    let updates: Vec<Update> = bench.scheduler.updates().collect();
    for id in [running, waiting] {
        assert_eq!(counts(&updates, id).unwrap().0, FinishReason::Deadline);
    }
}

#[test]
fn who_loses_its_pages_is_the_one_that_loses_the_least_work() {
    let mut bench = Bench::new(with_pages(roomy(None), 9, 0));
    let first = bench.submit(request(text(1, 60), 150));
    let little = bench.submit(request(text(2, 10), 100));
    let much = bench.submit(request(text(3, 94), 100));
    while bench.scheduler.stats().running < 3 || bench.scheduler.stats().waiting > 0 {
        bench.step().unwrap();
    }
    while bench.scheduler.stats().waiting == 0 {
        bench.step().unwrap();
    }
    let running: Vec<RequestId> = bench.scheduler.running.iter().map(|s| s.id).collect();
    assert_eq!(running, [first, much], "and not the youngest");
    let updates = bench.run();
    assert_eq!(counts(&updates, little).unwrap().0, FinishReason::Length);
}

#[test]
fn one_with_much_work_is_not_given_up_for_one_with_little() {
    let mut bench = Bench::new(with_pages(roomy(None), 9, 0));
    bench.submit(request(text(1, 20), 200));
    bench.step();
    let little = bench.submit(request(text(2, 20), 100));
    let much = bench.submit(request(text(3, 150), 40));
    let updates = bench.run();
    let preemptions = |id| counts(&updates, id).unwrap().1.preemptions;
    assert!(
        preemptions(little) > 0,
        "it was started before, but has done less"
    );
    assert_eq!(preemptions(much), 0);
}

#[test]
fn who_lost_its_pages_often_is_spared() {
    let mut bench = Bench::new(roomy(None));
    for n in 1..=3 {
        bench.submit(request(text(n, 10 * n as usize), 100));
    }
    bench.step();
    assert_eq!(bench.scheduler.victim(0), Some(1));
    bench.scheduler.running[1].counts.preemptions = 3;
    assert_eq!(bench.scheduler.victim(0), Some(2));
    assert_eq!(bench.scheduler.victim(1), Some(2));
    bench.scheduler.running[1].counts.preemptions = 2;
    assert_eq!(bench.scheduler.victim(1), Some(1));
    assert_eq!(bench.scheduler.victim(2), None);
}

/// Positions of the prompt that were told of, each with its row's result.
fn reported(bench: &mut Bench) -> Vec<(usize, TokenId, usize)> {
    let mut told = Vec::new();
    while bench.step().is_some() {
        for update in bench.scheduler.updates() {
            if let Update::PromptToken { position, row, .. } = update {
                let result = &bench.outputs.rows[row];
                assert!(result.logprob.is_some());
                told.push((position, result.token, result.top.len()));
            }
        }
    }
    told
}

#[test]
fn every_token_of_a_prompt_is_told_of_once_and_nothing_of_it_is_reused() {
    let (mut config, facts) = roomy(Some(64));
    config.max_draft = 6;
    let mut bench = Bench::new((config, facts));
    let prompt = text(1, 100);
    bench.finish(request(prompt.clone(), 5));
    let asked = Request {
        prompt_logprobs: Some(3),
        ..request(prompt.clone(), 5)
    };
    let id = bench.submit(asked.clone());
    let expected: Vec<_> = (1..100).map(|place| (place, prompt[place], 3)).collect();
    assert_eq!(reported(&mut bench), expected);

    bench.submit(asked);
    let updates = bench.run();
    let id = RequestId(id.0 + 1);
    let (_, counts) = counts(&updates, id).unwrap();
    assert_eq!(
        (counts.cached_tokens, counts.miss),
        (0, Some(MissReason::Logprobs))
    );
    assert_eq!(tokens(&updates, id), 5);
}

#[test]
fn a_step_that_is_taken_back_leaves_nothing_behind() {
    let mut bench = Bench::new(roomy(Some(64)));
    let first = bench.submit(request(text(1, 40), 5));
    bench.step();
    let second = bench.submit(request(text(2, 100), 5));
    let held = bench.scheduler.stats().pages;
    assert!(bench.scheduler.next().is_some());
    assert_eq!(bench.scheduler.take_back(), [first, second]);
    bench.scheduler.audit();
    assert_eq!(bench.scheduler.stats().pages, held);
    let work = bench.scheduler.next_of(&[second]).unwrap();
    assert_eq!(work.batch().feeds.len(), 64);
    drop(work);
    assert_eq!(bench.scheduler.take_back(), [second]);
    assert!(bench.scheduler.next_of(&[RequestId(9)]).is_none());
    bench.run();
}

#[test]
fn a_long_chunk_is_not_cut_short_and_leaves_what_the_next_turn_needs() {
    let facts = crate::core::testing::facts(Some(64));
    let config = crate::EngineConfig::comfortable(2048, 1, 512, facts);
    // Windows of 3 pages, twice.
    assert_eq!((config.pages.sliding, config.chunk_pages), (9, 16));
    let mut bench = Bench::new((config, facts));
    let prompt = text(1, 1300);
    bench.submit(request(prompt.clone(), 1));
    let rows: Vec<_> = std::iter::from_fn(|| bench.step()).collect();
    assert_eq!(rows, [[512], [512], [276]]);
    assert!(bench.executor.chunk_pages_written > 30);
    // The next turn has other tokens in place of its last ones.
    let mut next = prompt[..1260].to_vec();
    next.extend(text(2, 100));
    assert_eq!(bench.finish(request(next.clone(), 1)).cached_tokens, 1248);
}

#[test]
fn what_lies_within_a_prompt_is_found_as_long_as_there_is_room_for_it() {
    let facts = crate::core::testing::facts(Some(64));
    let second = |sequences: usize| {
        let config = crate::EngineConfig::comfortable(2048, sequences, 512, facts);
        let mut bench = Bench::new((config, facts));
        let prompt = text(1, 500);
        bench.finish(request(prompt.clone(), 1));
        let mut branch = prompt[..200].to_vec();
        branch.extend(text(2, 100));
        bench.finish(request(branch.clone(), 1)).cached_tokens
    };
    // There the part that no step of its own sees is not kept.
    assert_eq!((second(1), second(4)), (0, 192));
}
