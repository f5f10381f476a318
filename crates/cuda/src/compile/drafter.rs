//! A drafter's plan compiled: small batches alone, and nothing of what its target has already.

use carat_model::{
    backend::{BackendError, CompileOptions},
    kv::PerGroup,
    plan::{Plan, Step},
    weights::Weights,
};

use super::{
    batch_layout::WORD,
    prepare::{Prepared, prepare},
    rows::SMALL_ROWS,
    target::{GemmImpl, Target},
};
use crate::{config::TableMemory, kernel::DRAFT_BEST_BYTES};

/// Steps that are queued together; longer drafts go on from there.
pub(crate) const MAX_STEPS: usize = 16;
/// Bytes of the tokens that those draft.
pub(crate) const DRAFTED_BYTES: usize = MAX_STEPS * SMALL_ROWS * WORD;

/// The most drafts that go together.
pub(crate) fn most_together(max_drafts: usize) -> usize {
    max_drafts.clamp(1, SMALL_ROWS)
}

/// Compiles a plan for so many drafts at a time, beside a target that was compiled with `options`.
pub(crate) fn prepare_drafter(
    plan: &Plan,
    weights: &Weights,
    (options, max_drafts): (&CompileOptions, usize),
    tables: TableMemory,
    target: Target,
) -> Result<Prepared, BackendError> {
    let options = drafter_options(options, max_drafts);
    let target = Target {
        gemm: GemmImpl::Native,
        max_rows: options.max_rows,
        ..target
    };
    let mut prepared = prepare(plan, weights, &options, tables, target)?;
    // Nothing is drawn: a step's token is that of its largest logit.
    prepared.memory.sampling = bytes_beside_plan(plan);
    Ok(prepared)
}

/// Options that a drafter is compiled with.
pub(crate) fn drafter_options(target: &CompileOptions, max_drafts: usize) -> CompileOptions {
    let most = most_together(max_drafts);
    CompileOptions {
        chunk_pages: 0,
        host_pages: PerGroup::default(),
        max_rows: most,
        max_sampled: most,
        ..target.clone()
    }
}

/// Bytes of the states that rows go on from.
pub(crate) fn state_bytes(width: usize) -> usize {
    SMALL_ROWS * width * size_of::<f32>()
}

/// Bytes that go from step to step, and those of tables of clusters.
fn bytes_beside_plan(plan: &Plan) -> usize {
    let states = plan.steps.iter().filter_map(|s| match s.step {
        Step::State { out } => Some(state_bytes(plan.columns(out))),
        _ => None,
    });
    let clusters = plan.clusters.iter().map(|tokens| tokens.len() * WORD);
    let ends = DRAFTED_BYTES + SMALL_ROWS * (DRAFT_BEST_BYTES + WORD);
    states.chain(clusters).sum::<usize>() + ends
}

#[cfg(test)]
mod tests {
    use carat_model::{
        gemma4_assistant::{self, Head},
        kv::PAGE_TOKENS,
    };
    use carat_testkit::pairs::{self, Pair};

    use super::*;
    use crate::{
        config::Fusion,
        kernel::{TableFormat, WeightFormat},
    };

    #[test]
    fn nothing_of_the_target_is_taken_again() {
        for name in pairs::ALL {
            let pair = Pair::load(name);
            let (plan, weights) = (
                gemma4_assistant::plan(&pair.drafter, Head::Clusters),
                &pair.drafter.weights,
            );
            let options = carat_model::evaluate::options(4 * PAGE_TOKENS, 64);
            let prepared = |borrowed_table| {
                let target = Target {
                    borrowed_table,
                    ..Target::hopper(Fusion::On, 64)
                };
                prepare_drafter(&plan, weights, (&options, 100), TableMemory::Device, target)
                    .unwrap()
            };
            let beside = prepared(Some(TableFormat::Fragments));
            assert_eq!(beside.memory.kv, PerGroup::default(), "{name}");
            let borrowed = |(operand, _): (&crate::kernel::WeightOperand, _)| {
                operand.parts.iter().any(|w| weights.is_borrowed(*w))
            };
            assert!(!beside.weights.named().any(borrowed), "{name}");
            // Where the target's is not found, it is loaded.
            let alone = prepared(None);
            let table = weights.matrix(pair.drafter.embedding);
            let more = alone.memory.weights - beside.memory.weights;
            assert!(
                (table.bytes()..table.bytes() + 256).contains(&more),
                "{name}: {more}"
            );
            let loaded: Vec<WeightFormat> = (alone.weights.named())
                .filter(|it| borrowed(*it))
                .map(|(operand, _)| operand.format)
                .collect();
            assert_eq!(loaded, [WeightFormat::Table], "{name}");
        }
    }
}
