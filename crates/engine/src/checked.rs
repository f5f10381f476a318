//! An executor that is never handed a malformed batch.
//!
//! Executors rely on what `Batch::check` demands; this is the one place that checks it, once a batch.

use std::time::Duration;

use carat_model::{
    backend::{BackendError, Batch, CompileOptions, Executor, Outputs, Ticket},
    plan::{Plan, Value},
};

pub(crate) struct Checked {
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) plan: Plan,
    pub(crate) options: CompileOptions,
}

impl Executor for Checked {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        batch.check(&self.plan, &self.options)?;
        self.executor.submit(batch)
    }

    fn chains(&self) -> bool {
        self.executor.chains()
    }

    fn submit_chained(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        batch.check(&self.plan, &self.options)?;
        self.executor.submit_chained(batch)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        self.executor.collect(ticket, out)
    }

    fn probed(&self, value: Value) -> Option<&[f32]> {
        self.executor.probed(value)
    }

    fn profile(
        &mut self,
        batch: &Batch<'_>,
    ) -> Result<Option<Vec<(String, Duration)>>, BackendError> {
        batch.check(&self.plan, &self.options)?;
        self.executor.profile(batch)
    }
}
