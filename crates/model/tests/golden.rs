//! The reference interpreter against logits of a published implementation, and against itself fed differently.

use carat_model::{
    backend::{Backend, Batch, Executor, Outputs, RowOutput, Run},
    evaluate, gemma4,
    kv::{PAGE_TOKENS, PageId, PerGroup},
    reference::Reference,
    sampling::Sampling,
};
use carat_testkit::{close, fixtures};

fn executor(fixture: &fixtures::Fixture, tokens: usize, chunk: usize) -> Box<dyn Executor> {
    let model = fixture.model();
    let plan = gemma4::plan(&model);
    Reference
        .compile(&plan, model.weights, &evaluate::options(tokens, chunk))
        .expect("the reference compiles everything")
}

fn logits(fixture: &fixtures::Fixture, chunk: usize) -> Vec<f32> {
    let tokens = fixture.tokens();
    let mut executor = executor(fixture, tokens.len(), chunk);
    evaluate::logits(executor.as_mut(), &tokens, chunk).expect("runs")
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
        let mut executor = executor(fixture, tokens.len(), usize::MAX);
        let pages: Vec<PageId> = (0..tokens.len().div_ceil(PAGE_TOKENS) as u32)
            .map(PageId)
            .collect();
        let run = Run {
            rows: 0..tokens.len(),
            position: 0,
            pages: PerGroup {
                full: &pages,
                sliding: &pages,
            },
            sampled: 1,
            sampling: &Sampling::greedy(),
            history: &tokens,
            output: RowOutput::Logits,
        };
        let batch = Batch {
            tokens: &tokens,
            runs: &[run],
        };
        let mut outputs = Outputs::default();
        let ticket = executor.submit(&batch).expect("runs");
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
