//! The executor: the loop that runs a batch through the operations of a compiled model, and sampling.

use std::sync::Arc;

use carat_model::{
    backend::{BackendError, Batch, CompileOptions, Executor, Outputs, Ticket},
    plan::{Plan, Rows, Value},
    reference::sampled_row,
    sampling::Scratch as SamplingScratch,
    weights::Weights,
};

use super::{row_view::RowView, state::State};
use crate::{
    lower::{LoweredOp, Program},
    op::workers::Workers,
};

pub(crate) struct CpuExecutor {
    plan: Plan,
    options: CompileOptions,
    program: Program,
    state: State,
    sampling_scratch: SamplingScratch,
    outputs: Outputs,
    batches: u64,
    /// Rows of the last batch, for [`Executor::probed`].
    last_rows: usize,
    last_sampled: usize,
}

impl CpuExecutor {
    pub(crate) fn new(
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
        program: Program,
        workers: Workers,
    ) -> CpuExecutor {
        let state = State::new(plan, weights, options, &program, workers);
        CpuExecutor {
            plan: plan.clone(),
            options: options.clone(),
            program,
            state,
            sampling_scratch: SamplingScratch::default(),
            outputs: Outputs::default(),
            batches: 0,
            last_rows: 0,
            last_sampled: 0,
        }
    }
}

impl Executor for CpuExecutor {
    /// Computes here and now: the caller is one of the pool's threads.
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        batch.check(&self.plan, &self.options)?;
        let view = RowView::new(batch, &self.plan);
        self.state.fill_angles(&self.plan, &view);
        for LoweredOp { op, .. } in &self.program.ops {
            if !view.of(op.rows()).is_empty() {
                self.state.run(op, &view);
            }
        }
        let logits = self.program.logits;
        let rows = self.state.buffer(logits.buffer).chunks(logits.columns);
        self.outputs.rows.clear();
        for (sampled, logits) in view.sampled.iter().zip(rows) {
            let row = sampled_row(batch, sampled, logits, &mut self.sampling_scratch);
            self.outputs.rows.push(row);
        }
        (self.last_rows, self.last_sampled) = (view.all.len(), view.sampled.len());
        self.batches += 1;
        Ok(Ticket(self.batches))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        assert_eq!(ticket, Ticket(self.batches), "a ticket is used once");
        std::mem::swap(out, &mut self.outputs);
        Ok(())
    }

    fn probed(&self, value: Value) -> Option<&[f32]> {
        let rows = match self.plan.rows(value) {
            Rows::All => self.last_rows,
            Rows::Sampled => self.last_sampled,
        };
        let buffer = self.state.buffer(self.program.layout.buffer(value));
        self.options
            .probe
            .then(|| &buffer[..rows * self.plan.columns(value)])
    }
}
