use carat_model::{TokenId, sampling::Sampling};

use super::*;
use crate::{
    Limits,
    core::{
        FinishReason, Request, RequestId, Update,
        testing::{FakeConstraint, FakeExecutor, Lookahead, alone, image, request, roomy, text},
    },
};

impl Pipeline<FakeExecutor> {
    pub(crate) fn audit_contents(&mut self, has_media: bool) {
        // Those of a step that came to nothing are made before the next.
        for call in self.scheduler.kv().take_moves() {
            self.executor.move_pages(&call).unwrap();
        }
        self.scheduler.audit_contents(&self.executor, has_media);
    }
}

const WINDOW: Option<usize> = Some(64);

fn pipeline(lookahead: Lookahead) -> Pipeline<FakeExecutor> {
    let (mut config, facts) = roomy(WINDOW);
    config.max_draft = 4;
    let limits = Limits::new(config, facts).unwrap();
    let mut executor = FakeExecutor::new(&limits);
    executor.lookahead = lookahead;
    Pipeline::new(Scheduler::new(limits), executor)
}

fn submit(pipeline: &mut Pipeline<FakeExecutor>, id: u64, request: &Request) {
    let scheduler = pipeline.scheduler();
    scheduler.submit(RequestId(id), request.clone()).unwrap();
}

/// The tokens that came of one step, and who finished.
fn step(pipeline: &mut Pipeline<FakeExecutor>) -> (Vec<(u64, TokenId)>, Vec<u64>) {
    pipeline.step().unwrap();
    pipeline.scheduler.audit();
    let (outputs, updates) = pipeline.results();
    let (mut tokens, mut finished) = (Vec::new(), Vec::new());
    for update in updates {
        match update {
            Update::Token { id, row } => tokens.push((id.0, outputs.rows[row].token)),
            Update::Forced { id, token } => tokens.push((id.0, token)),
            Update::Finished { id, .. } => finished.push(id.0),
            Update::Started { .. } | Update::PromptToken { .. } | Update::Abandoned { .. } => {}
        }
    }
    (tokens, finished)
}

fn answers(pipeline: &mut Pipeline<FakeExecutor>, count: u64) -> Vec<Vec<TokenId>> {
    let mut answers = vec![Vec::new(); count as usize];
    while !pipeline.is_idle() {
        for (id, token) in step(pipeline).0 {
            answers[id as usize - 1].push(token);
        }
    }
    answers
}

fn penalized(n: u64) -> Request {
    let mut asked = request(text(n, 20), 30);
    asked.sampling = Sampling {
        presence_penalty: 1.0,
        penalty_window: 10,
        ..Sampling::greedy()
    };
    asked
}

#[test]
fn steps_ahead_are_drawn_with_every_token_before_them_known() {
    let mut pipeline = pipeline(Lookahead::Always);
    let mut asked: Vec<Request> = (1..=3).map(penalized).collect();
    asked[1].logprobs = Some(2);
    asked[2].constraint = Some(FakeConstraint::source(1, 0));
    for (id, request) in (1..).zip(&asked) {
        submit(&mut pipeline, id, request);
    }
    let found = answers(&mut pipeline, 3);
    for (found, asked) in found.iter().zip(&asked) {
        assert_eq!(found, &alone(asked, 50, WINDOW).0);
    }
    // Every step but the first was submitted while another was in flight.
    assert!(
        pipeline.executor().ahead >= 29,
        "{}",
        pipeline.executor().ahead
    );
}

#[test]
fn who_waits_is_admitted_while_batches_are_fed_ahead() {
    let mut pipeline = pipeline(Lookahead::Always);
    submit(&mut pipeline, 1, &request(text(1, 20), 200));
    for _ in 0..5 {
        step(&mut pipeline);
    }
    submit(&mut pipeline, 2, &request(text(2, 20), 3));
    // It is in the batch submitted next; the one in flight and its own pass before its first token.
    let mut tokens = Vec::new();
    for _ in 0..3 {
        tokens.extend(step(&mut pipeline).0);
    }
    assert!(tokens.iter().any(|(id, _)| *id == 2), "{tokens:?}");
    assert!(pipeline.executor().ahead >= 7);
}

#[test]
fn chunks_that_are_fed_ahead_are_as_long_as_others() {
    let facts = crate::core::testing::facts(Some(256));
    let config = crate::EngineConfig::comfortable(2048, 1, 512, facts);
    let limits = Limits::new(config, facts).unwrap();
    let mut executor = FakeExecutor::new(&limits);
    executor.lookahead = Lookahead::Always;
    let mut pipeline = Pipeline::new(Scheduler::new(limits), executor);
    let id = RequestId(1);
    let asked = request(text(1, 1900), 1);
    pipeline.scheduler().submit(id, asked).unwrap();
    let mut steps = 0;
    while pipeline.step().unwrap() {
        steps += 1;
    }
    assert_eq!((steps, pipeline.executor().ahead), (4, 3));
}

#[test]
fn prompts_go_on_while_batches_are_fed_ahead() {
    let mut pipeline = pipeline(Lookahead::Always);
    submit(&mut pipeline, 1, &request(text(1, 20), 60));
    step(&mut pipeline);
    submit(&mut pipeline, 2, &request(text(2, 200), 3));
    let before = pipeline.executor().ahead;
    for done in 1..=6 {
        step(&mut pipeline);
        assert_eq!(pipeline.executor().ahead, before + done);
    }
}

#[test]
fn what_the_host_draws_comes_no_step_later() {
    for lookahead in [Lookahead::Never, Lookahead::Mostly] {
        let mut pipeline = pipeline(lookahead);
        let asked = request(text(1, 20), 40);
        submit(&mut pipeline, 1, &asked);
        for done in 1..=40 {
            let (tokens, _) = step(&mut pipeline);
            assert_eq!(tokens.len(), 1);
            // Nothing has been computed that was not collected, unless it was ahead.
            let ahead = pipeline.executor().in_flight();
            assert!(lookahead == Lookahead::Mostly || ahead == 0, "step {done}");
        }
    }
}

#[test]
fn a_failure_leaves_nothing_in_flight_and_others_go_on() {
    let mut unharmed = 0;
    for call in 1..=12 {
        for lookahead in [Lookahead::Never, Lookahead::Always] {
            let mut pipeline = pipeline(lookahead);
            let asked = request(text(1, 100), 20);
            submit(&mut pipeline, 1, &asked);
            pipeline.executor().fails_in = call + 1;
            let mut failed = false;
            while !failed && !pipeline.is_idle() {
                failed = pipeline.step().is_err();
            }
            if failed {
                pipeline.give_up();
            }
            assert_eq!(pipeline.executor().in_flight(), 0, "call {call}");
            let lost = pipeline.scheduler().updates();
            let lost = lost.filter(|u| matches!(u, Update::Abandoned { .. }));
            assert_eq!(lost.count(), usize::from(failed), "call {call}");
            // A batch ahead that is refused is planned again.
            assert!(failed || pipeline.executor().refused == 1);
            unharmed += usize::from(!failed);
            pipeline.scheduler.audit();
            submit(&mut pipeline, 2, &asked);
            let found = answers(&mut pipeline, 2);
            assert_eq!(found[1], alone(&asked, 120, WINDOW).0);
        }
    }
    assert!((1..=6).contains(&unharmed), "{unharmed}");
}

#[test]
fn a_row_fed_a_token_that_nobody_took_is_forgotten() {
    let mut pipeline = pipeline(Lookahead::Always);
    submit(&mut pipeline, 1, &request(text(1, 30), 20));
    step(&mut pipeline);
    // Two batches are in flight; the later completes a page with the token of the earlier.
    assert_eq!(pipeline.executor().in_flight(), 2);
    pipeline.scheduler().cancel(RequestId(1));
    pipeline.executor().lookahead = Lookahead::Never;
    while !pipeline.is_idle() {
        step(&mut pipeline);
    }
    pipeline.audit_contents(false);
}

#[test]
fn a_refused_batch_is_run_in_parts_and_nobody_is_lost() {
    for lookahead in [Lookahead::Never, Lookahead::Always] {
        for max_runs in 1..=3 {
            let mut pipeline = pipeline(lookahead);
            pipeline.executor().max_runs = max_runs;
            let asked: Vec<Request> = (1..=6).map(penalized).collect();
            for (id, request) in (1..).zip(&asked) {
                submit(&mut pipeline, id, request);
            }
            let found = answers(&mut pipeline, 6);
            for (found, asked) in found.iter().zip(&asked) {
                assert_eq!(found, &alone(asked, 50, WINDOW).0);
            }
            assert!(pipeline.executor().refused > 20);
        }
    }
}

#[test]
fn an_interrupted_step_is_done_again_and_the_next_is_seen_through() {
    for lookahead in [Lookahead::Never, Lookahead::Always] {
        let mut pipeline = pipeline(lookahead);
        let asked: Vec<Request> = (1..=3).map(penalized).collect();
        for (id, request) in (1..).zip(&asked) {
            submit(&mut pipeline, id, request);
        }
        // Nobody ever takes the wish back: every other batch is computed all the same.
        pipeline.interrupt().raise();
        assert!(!pipeline.step().unwrap(), "nothing was computed");
        assert_eq!(pipeline.executor().in_flight(), 0);
        let found = answers(&mut pipeline, 3);
        for (found, asked) in found.iter().zip(&asked) {
            assert_eq!(found, &alone(asked, 50, WINDOW).0);
        }
        let executor = pipeline.executor();
        assert!(executor.interrupted > 10, "{}", executor.interrupted);
    }
}

#[test]
fn parts_of_a_refused_batch_take_turns() {
    let mut pipeline = pipeline(Lookahead::Always);
    pipeline.executor().max_runs = 1;
    for n in 1..=4 {
        submit(&mut pipeline, n, &request(text(n, 20), 40));
    }
    let mut tokens = [0; 4];
    for _ in 0..40 {
        for (id, _) in step(&mut pipeline).0 {
            tokens[id as usize - 1] += 1;
        }
    }
    assert_eq!(tokens, [10; 4]);
}

#[test]
fn only_who_is_refused_alone_is_abandoned() {
    for lookahead in [Lookahead::Never, Lookahead::Always] {
        let mut pipeline = pipeline(lookahead);
        // The second comes to 70 tokens, the others to 50 at the most.
        pipeline.executor().refused_from = 60;
        let asked: Vec<Request> = (1..=4)
            .map(|n| request(text(n, 20), if n == 2 { 50 } else { 30 }))
            .collect();
        for (id, request) in (1..).zip(&asked) {
            submit(&mut pipeline, id, request);
        }
        let mut found = vec![Vec::new(); 4];
        let mut lost = Vec::new();
        while !pipeline.is_idle() {
            if pipeline.step().is_err() {
                pipeline.give_up();
            }
            pipeline.scheduler.audit();
            let (outputs, updates) = pipeline.results();
            for update in updates {
                match update {
                    Update::Token { id, row } => {
                        found[id.0 as usize - 1].push(outputs.rows[row].token);
                    }
                    Update::Abandoned { id } => lost.push(id.0),
                    _ => {}
                }
            }
        }
        assert_eq!(lost, [2]);
        for (n, (found, asked)) in found.iter().zip(&asked).enumerate() {
            let (answer, _) = alone(asked, 70, WINDOW);
            assert_eq!(found[..], answer[..if n == 1 { 41 } else { 30 }]);
        }
    }
}

#[test]
fn prompts_are_told_of_while_batches_are_fed_ahead() {
    let mut pipeline = pipeline(Lookahead::Always);
    submit(&mut pipeline, 1, &request(text(1, 20), 60));
    let prompt = text(2, 50);
    let asked = Request {
        prompt_logprobs: Some(2),
        ..request(prompt.clone(), 5)
    };
    submit(&mut pipeline, 2, &asked);
    let (mut told, mut answer) = (Vec::new(), Vec::new());
    while !pipeline.is_idle() {
        pipeline.step().unwrap();
        let (outputs, updates) = pipeline.results();
        for update in updates {
            match update {
                Update::PromptToken { id, position, row } => {
                    assert_eq!((id.0, outputs.rows[row].top.len()), (2, 2));
                    told.push((position, outputs.rows[row].token));
                }
                Update::Token { id, row } if id.0 == 2 => answer.push(outputs.rows[row].token),
                _ => {}
            }
        }
    }
    let expected: Vec<_> = (1..50).map(|place| (place, prompt[place])).collect();
    assert_eq!(told, expected);
    assert_eq!(answer, alone(&asked, 55, WINDOW).0);
    assert!(pipeline.executor().ahead > 50);
}

#[test]
fn forced_tokens_are_fed_and_not_sampled() {
    for lookahead in [Lookahead::Never, Lookahead::Always] {
        let mut pipeline = pipeline(lookahead);
        // Half of all states force a token, which is hardly ever the one that would be drawn.
        let asked: Vec<Request> = (0..4)
            .map(|n| Request {
                constraint: Some(FakeConstraint::source(n, 8)),
                ..request(text(n, 30), 100)
            })
            .collect();
        for (id, request) in (1..).zip(&asked) {
            submit(&mut pipeline, id, request);
        }
        let mut steps = 0;
        let mut found = vec![Vec::new(); 4];
        while !pipeline.is_idle() {
            for (id, token) in step(&mut pipeline).0 {
                found[id as usize - 1].push(token);
            }
            steps += 1;
        }
        for (found, asked) in found.iter().zip(&asked) {
            assert_eq!(found, &alone(asked, 130, WINDOW).0);
        }
        let longest = found.iter().map(Vec::len).max().unwrap();
        assert!(steps < longest, "{steps} steps for {longest} tokens");
    }
}

#[test]
fn a_draft_that_is_right_saves_steps_and_a_wrong_one_changes_nothing() {
    for (right, max_steps) in [(true, 12), (false, 40)] {
        let mut pipeline = pipeline(Lookahead::Always);
        let asked = Request {
            drafts: true,
            ..request(text(1, 30), 40)
        };
        let (expected, _) = alone(&asked, 70, WINDOW);
        submit(&mut pipeline, 1, &asked);
        let (mut found, mut steps) = (Vec::new(), 0);
        while !pipeline.is_idle() {
            let next = &expected[found.len()..];
            let draft: Vec<TokenId> = next
                .iter()
                .take(4)
                .map(|t| if right { *t } else { (t + 1) % 50 })
                .collect();
            pipeline.scheduler().propose(RequestId(1), &draft);
            found.extend(step(&mut pipeline).0.into_iter().map(|(_, t)| t));
            steps += 1;
        }
        assert_eq!(found, expected);
        assert!(steps <= max_steps, "{steps}");
    }
}

#[test]
fn a_constraint_without_a_way_on_ends_the_request() {
    let mut pipeline = pipeline(Lookahead::Always);
    let mut ends = 0;
    for n in 0..60 {
        let asked = Request {
            constraint: Some(FakeConstraint::source(n, 0)),
            ..request(text(n, 10), 100)
        };
        submit(&mut pipeline, n + 1, &asked);
        let (answer, reason) = alone(&asked, 110, WINDOW);
        ends += usize::from(reason == FinishReason::DeadEnd);
        let mut found = Vec::new();
        while !pipeline.is_idle() {
            found.extend(step(&mut pipeline).0.into_iter().map(|(_, t)| t));
        }
        assert_eq!(found, answer);
    }
    assert!(ends > 5, "{ends}");
}

#[test]
fn an_image_is_in_one_batch_whatever_stands_around_it() {
    for lookahead in [Lookahead::Never, Lookahead::Always] {
        let mut pipeline = pipeline(lookahead);
        // Chunks of 64 rows, and at times of half of that, would end within them.
        let asked: Vec<Request> = (1..=3)
            .map(|n| {
                let mut asked = request(text(n, 200), 5);
                asked.media = vec![image(40..90, n), image(91..130, n + 1)];
                asked
            })
            .collect();
        for (id, request) in (1..).zip(&asked) {
            submit(&mut pipeline, id, request);
        }
        let found = answers(&mut pipeline, 3);
        for (found, asked) in found.iter().zip(&asked) {
            assert_eq!(found, &alone(asked, 205, WINDOW).0);
        }
    }
}
