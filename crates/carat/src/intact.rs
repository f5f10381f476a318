//! A backend that notices when the model's file is no longer the one that was opened.
//!
//! Weights are read where the file is mapped, so a file that somebody overwrites or cuts short changes under the computation.
//! Every batch is checked when it is done, before anybody sees its tokens: its requests fail with a sentence, the program goes
//! on.

use std::sync::Arc;

use carat_gguf::Gguf;
use carat_model::{
    TokenId,
    backend::{
        Backend, BackendError, Batch, Batching, CompileOptions, DraftPlan, DraftRun, Draw,
        Executor, HostPageId, Interrupt, KvGroup, LaunchTime, Memory, Need, Outputs, PageMove,
        Ticket,
    },
    cost::Roofline,
    plan::{Plan, Value},
    weights::Weights,
};

/// A backend, and the file whose weights it will read.
pub struct Intact {
    backend: Box<dyn Backend>,
    file: Arc<Gguf>,
}

impl Intact {
    /// Watches over `file` in all that `backend` computes.
    pub fn new(backend: Box<dyn Backend>, file: Arc<Gguf>) -> Intact {
        Intact { backend, file }
    }
}

impl Backend for Intact {
    fn name(&self) -> &'static str {
        self.backend.name()
    }

    fn memory(&self) -> Result<Memory, BackendError> {
        self.backend.memory()
    }

    fn chunk_rows(&self, batching: Batching) -> usize {
        self.backend.chunk_rows(batching)
    }

    fn need(
        &self,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
    ) -> Result<Option<Need>, BackendError> {
        self.backend.need(plan, weights, options)
    }

    fn drafter_need(
        &self,
        drafter: &DraftPlan,
        options: &CompileOptions,
    ) -> Result<Option<Need>, BackendError> {
        self.backend.drafter_need(drafter, options)
    }

    fn drafts(&self) -> bool {
        self.backend.drafts()
    }

    fn exact_rows(&self) -> usize {
        self.backend.exact_rows()
    }

    fn timing_identity(&self) -> Option<String> {
        self.backend.timing_identity()
    }

    fn tuning(&self, plan: &Plan, weights: &Weights) -> Option<String> {
        self.backend.tuning(plan, weights)
    }

    fn peak_bytes(&self) -> Option<u64> {
        self.backend.peak_bytes()
    }

    fn roofline(&self) -> Result<Option<Roofline>, BackendError> {
        self.backend.roofline()
    }

    fn compile(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
    ) -> Result<Box<dyn Executor>, BackendError> {
        let copies = self.backend.need(plan, &weights, options)?.is_some();
        self.watched(copies, self.backend.compile(plan, weights, options))
    }

    fn compile_with_drafter(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
        drafter: DraftPlan,
    ) -> Result<Box<dyn Executor>, BackendError> {
        let copies = self.backend.need(plan, &weights, options)?.is_some();
        let compiled = (self.backend).compile_with_drafter(plan, weights, options, drafter);
        self.watched(copies, compiled)
    }
}

impl Intact {
    /// What was compiled, unless the file changed meanwhile: what went wrong then is that it changed.
    fn watched(
        &self,
        copies: bool,
        compiled: Result<Box<dyn Executor>, BackendError>,
    ) -> Result<Box<dyn Executor>, BackendError> {
        Ok(Box::new(Watched {
            file: Arc::clone(&self.file),
            copies,
            executor: self.checked(compiled)?,
        }))
    }

    fn checked<T>(&self, result: Result<T, BackendError>) -> Result<T, BackendError> {
        self.file.check_unchanged().map_err(changed)?;
        result
    }
}

fn changed(error: carat_gguf::GgufError) -> BackendError {
    BackendError::Device(Box::new(error))
}

struct Watched {
    executor: Box<dyn Executor>,
    file: Arc<Gguf>,
    /// The device has weights of its own: what becomes of the file is no matter, unless something was still read from it.
    copies: bool,
}

impl Watched {
    fn check(&self) -> Result<(), BackendError> {
        if self.copies {
            self.file.check_read().map_err(changed)
        } else {
            self.file.check_unchanged().map_err(changed)
        }
    }
}

impl Executor for Watched {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        self.executor.submit(batch)
    }

    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        self.executor.draw(ticket, draws)
    }

    fn lookahead(&self, ticket: &Ticket) -> bool {
        self.executor.lookahead(ticket)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let collected = self.executor.collect(ticket, out);
        self.check()?;
        collected
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        self.executor.move_pages(moves)
    }

    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError> {
        self.executor.host_page(group, place)
    }

    fn interrupt_by(&mut self, interrupt: Interrupt) {
        self.executor.interrupt_by(interrupt);
    }

    fn probed(&self, value: Value) -> Option<&[f32]> {
        self.executor.probed(value)
    }

    fn attach_drafter(
        &mut self,
        plan: &Plan,
        weights: Arc<Weights>,
        max_drafts: usize,
    ) -> Result<(), BackendError> {
        self.executor.attach_drafter(plan, weights, max_drafts)
    }

    fn draft(&mut self, drafts: &[DraftRun<'_>]) -> Result<Vec<Vec<TokenId>>, BackendError> {
        self.executor.draft(drafts)
    }

    fn probed_draft(&self, value: Value) -> Option<&[f32]> {
        self.executor.probed_draft(value)
    }

    fn profile(
        &mut self,
        batch: &Batch<'_>,
        draws: &[Draw<'_>],
    ) -> Result<Option<Vec<LaunchTime>>, BackendError> {
        let profile = self.executor.profile(batch, draws);
        self.check()?;
        profile
    }
}
