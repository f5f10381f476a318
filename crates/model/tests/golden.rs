//! The reference interpreter against logits of a published implementation, and against itself fed differently.

use carat_model::{
    backend::{Backend, Batch, Draw, Executor, Outputs, Run, token_feeds},
    evaluate::{self, Pages},
    gemma4,
    plan::Plan,
    reference::Reference,
    sampling::Sampling,
};
use carat_testkit::{close, fixtures};

fn executor(fixture: &fixtures::Fixture, tokens: usize, chunk: usize) -> (Plan, Box<dyn Executor>) {
    let model = fixture.model();
    let plan = gemma4::plan(&model);
    let executor = Reference
        .compile(&plan, model.weights, &evaluate::options(tokens, chunk))
        .expect("the reference compiles everything");
    (plan, executor)
}

fn logits(fixture: &fixtures::Fixture, chunk: usize) -> Vec<f32> {
    let tokens = fixture.tokens();
    let (plan, mut executor) = executor(fixture, tokens.len(), chunk);
    evaluate::logits(executor.as_mut(), &plan, &tokens, chunk).expect("runs")
}

#[test]
fn logits_agree_with_transformers() {
    for fixture in &fixtures::ALL {
        let error = close::relative_l2(&logits(fixture, usize::MAX), &fixture.logits());
        assert!(error <= 1e-4, "{}: relative error {error:e}", fixture.name);
    }
}

#[test]
fn chunks_and_single_tokens_give_the_same_bits() {
    for fixture in &fixtures::ALL {
        let whole = logits(fixture, usize::MAX);
        for chunk in [1, 7, 16] {
            assert!(
                whole == logits(fixture, chunk),
                "{} in chunks of {chunk}",
                fixture.name
            );
        }
    }
}

#[test]
fn rows_that_are_not_sampled_change_nothing() {
    for fixture in &fixtures::ALL {
        let tokens = fixture.tokens();
        let (plan, mut executor) = executor(fixture, tokens.len(), usize::MAX);
        let pages = Pages::new(&plan, evaluate::options(tokens.len(), 1).pages);
        let run = Run {
            rows: 0..tokens.len(),
            position: 0,
            pages: pages.tables(),
            sampled: 1,
            visible_end: None,
            table: None,
        };
        let batch = Batch {
            feeds: &token_feeds(&tokens),
            runs: &[run],
        };
        let mut outputs = Outputs::default();
        let ticket = executor.submit(&batch).expect("runs");
        let sampling = Sampling::greedy();
        let draw = Draw::logits(&sampling);
        executor.draw(&ticket, &[draw]).expect("draws");
        executor.collect(ticket, &mut outputs).expect("collects");
        let narrowed = &outputs.rows[0].logits;
        let whole = logits(fixture, usize::MAX);
        assert!(
            whole.ends_with(narrowed),
            "{}: narrowing changed the last row",
            fixture.name
        );
    }
}
