//! A drafter beside the model: buffers of its own, threads and KV pages of its target.

use std::sync::Arc;

use carat_model::{
    TokenId,
    backend::DraftRun,
    draft::{self, DraftStep},
    plan::{Plan, Value},
    weights::Weights,
};

use super::{
    row_view::RowView,
    state::{Shared, State},
};
use crate::lower::{LoweredOp, Program};
use carat_cpu_kernels::gemm::row_class::RowClasses;

/// The most drafts that go together: a small batch at every level of instructions, so that a draft does not depend on others.
const MAX_DRAFTS_PER_BATCH: usize = 32;

pub(super) struct DraftModel {
    plan: Plan,
    program: Program,
    state: State,
    /// Rows of the last step.
    last_rows: usize,
}

impl DraftModel {
    pub(super) fn new(
        plan: Plan,
        weights: Arc<Weights>,
        program: Program,
        max_drafts: usize,
        classes: RowClasses,
    ) -> DraftModel {
        let most = max_drafts.clamp(1, MAX_DRAFTS_PER_BATCH);
        DraftModel {
            state: State::new(&plan, weights, (most, most), &program, classes),
            plan,
            program,
            last_rows: 0,
        }
    }

    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Drafts that have been checked; `hidden` is the state that one starts from.
    pub(super) fn run<'a>(
        &mut self,
        shared: &mut Shared,
        drafts: &[DraftRun<'_>],
        hidden: impl Fn(&DraftRun<'_>) -> &'a [f32],
    ) -> Vec<Vec<TokenId>> {
        let together = drafts.chunks(MAX_DRAFTS_PER_BATCH);
        let drafted = together.flat_map(|drafts| {
            let states = drafts
                .iter()
                .flat_map(|draft| hidden(draft).iter().copied());
            draft::run(drafts, states.collect(), |batch, states| {
                let view = RowView::of_drafts(batch, states);
                self.state.fill_angles(shared, &self.plan, &view);
                for LoweredOp { op, .. } in &self.program.ops {
                    self.state.run(shared, op, &view);
                }
                self.last_rows = view.all.len();
                DraftStep {
                    logits: self.value(self.plan.logits).to_vec(),
                    states: self.value(self.plan.hidden).to_vec(),
                }
            })
        });
        drafted.collect()
    }

    /// A value of the last step.
    pub(super) fn value(&self, value: Value) -> &[f32] {
        let buffer = self.state.buffer(self.program.layout.buffer(value));
        &buffer[..self.last_rows * self.plan.columns(value)]
    }
}
