//! The contract between the engine and a device: two traits and the batch they run.
//!
//! A backend compiles a plan once; the executor then runs ragged batches of prompt chunks and single decode tokens.
//! Nothing here knows about requests, text or scheduling.
//!
//! A batch has three moments. [`Executor::submit`] starts its forward pass, [`Executor::draw`] says how its sampled rows become
//! tokens, and [`Executor::collect`] waits for them. Because the draw comes late, the next batch can be under way before the host
//! knows what it is fed ([`Feed::Sampled`]), and still be drawn with every token before it known: histories, masks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    TokenId,
    cost::Roofline,
    phase::Origin,
    plan::{Plan, Value},
    weights::Weights,
};

pub use crate::{
    batch::{Batch, Feed, RowRef, Run, TableRef, token_feeds},
    draft::DraftRun,
    draw::{Draw, Outputs, RowOutput, RowResult},
    kv::{HostPageId, KvGroup, KvType, PAGE_TOKENS, PageId, PageMove, PerGroup},
};

/// Compiles plans for one device.
pub trait Backend: Send {
    /// Name that `--backend` takes.
    fn name(&self) -> &'static str;

    /// Memory of the device, and what of it is free.
    fn memory(&self) -> Result<Memory, BackendError>;

    /// Rows of a prompt to feed at a time: enough to keep the device busy, few enough to stay responsive.
    fn chunk_rows(&self, _batching: Batching) -> usize {
        512
    }

    /// Part of [`Backend::memory`] that compiling would take, where that can be told: on devices that copy the weights.
    fn need(
        &self,
        _plan: &Plan,
        _weights: &Weights,
        _options: &CompileOptions,
    ) -> Result<Option<Need>, BackendError> {
        Ok(None)
    }

    /// The same of a drafter, beside a plan that is compiled with `options`.
    fn drafter_need(
        &self,
        _drafter: &DraftPlan,
        _options: &CompileOptions,
    ) -> Result<Option<Need>, BackendError> {
        Ok(None)
    }

    /// Whether its executors take a drafter ([`Executor::attach_drafter`]).
    fn drafts(&self) -> bool {
        false
    }

    /// Rows up to which a batch gives each of them the same result, whatever else is in it; drafts are verified within them.
    fn exact_rows(&self) -> usize {
        usize::MAX
    }

    /// Everything about device and kernels that times depend on, if times may be kept between runs.
    fn timing_identity(&self) -> Option<String> {
        None
    }

    /// What was measured on this device of choices that depend on it, for such a model, in words for a person; `None` where there are no
    /// such choices.
    fn tuning(&self, _plan: &Plan, _weights: &Weights) -> Option<String> {
        None
    }

    /// The most device memory held at a time, where that is counted.
    fn peak_bytes(&self) -> Option<u64> {
        None
    }

    /// Peak rates of the device, measured now, in about a second; `None` where nobody would ask.
    fn roofline(&self) -> Result<Option<Roofline>, BackendError> {
        Ok(None)
    }

    /// Prepares everything a batch needs. Running then allocates nothing of the plan's size.
    fn compile(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
    ) -> Result<Box<dyn Executor>, BackendError>;

    /// The same with a drafter attached, for which memory is left.
    fn compile_with_drafter(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
        drafter: DraftPlan,
    ) -> Result<Box<dyn Executor>, BackendError> {
        let mut executor = self.compile(plan, weights, options)?;
        executor.attach_drafter(&drafter.plan, drafter.weights, drafter.max_drafts)?;
        Ok(executor)
    }
}

/// A drafter that is to run beside a plan.
#[derive(Clone)]
pub struct DraftPlan {
    /// One step.
    pub plan: Plan,
    /// The drafter's own, and those it borrows.
    pub weights: Arc<Weights>,
    /// The most drafts at a time.
    pub max_drafts: usize,
}

/// A loaded model and its KV pages. Made on the engine's thread and never leaving it, hence not `Send`.
///
/// Work is done in the order of the calls: a batch sees the pages as the batches and moves before it left them. At most two
/// batches are in flight, that is submitted and not collected, and the earlier of them is drawn before the later is submitted.
pub trait Executor {
    /// Starts one forward pass. May return before the device is done. An executor that computes here and now gives up with
    /// [`BackendError::Interrupted`] soon after its [`Interrupt`] is raised: nothing of the batch counts, as if it had not come.
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError>;

    /// Says how the sampled rows of the batch submitted last become tokens, one draw per row in order; at most once per batch,
    /// and never for one without sampled rows. May return before the device is done, and does not wait for it: a row that only
    /// the host can draw is drawn when the batch is collected.
    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError>;

    /// Whether a batch submitted now can be fed what this one, which has been drawn, samples, without the device or the caller
    /// waiting for the host. `false` where batches are computed in `submit`, or where the host has rows to draw.
    fn lookahead(&self, ticket: &Ticket) -> bool {
        let _ = ticket;
        false
    }

    /// Waits for a batch and replaces `out` with its results. A ticket is used once, in the order of submission. A batch that
    /// was not drawn has no results: so are batches given up.
    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError>;

    /// Copies pages to host memory and back, in order with the batches. Each page is named by one move at the most, and so is
    /// each place in host memory.
    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError>;

    /// The bytes of a place in host memory, when all copies to and from it are over. They mean something to an executor that was
    /// compiled alike, and to nobody else.
    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError>;

    /// Watches this from now on, if batches are computed in [`Executor::submit`]; those that only queue there have no need to.
    fn interrupt_by(&mut self, interrupt: Interrupt) {
        let _ = interrupt;
    }

    /// A value of the last batch, `[rows, columns]`; `None` unless compiled with [`CompileOptions::probe`].
    fn probed(&self, value: Value) -> Option<&[f32]>;

    /// Takes a drafter's plan, for up to `max_drafts` drafts at a time. It reads the keys and values of the plan that this was
    /// compiled for.
    fn attach_drafter(
        &mut self,
        plan: &Plan,
        weights: Arc<Weights>,
        max_drafts: usize,
    ) -> Result<(), BackendError> {
        let _ = (plan, weights, max_drafts);
        Err(BackendError::Unsupported {
            what: "this backend runs no draft model".to_owned(),
        })
    }

    /// Drafts what follows some sampled rows of the batch collected last, when none is in flight. One list of tokens per draft, as
    /// long as asked for.
    fn draft(&mut self, drafts: &[DraftRun<'_>]) -> Result<Vec<Vec<TokenId>>, BackendError> {
        let _ = drafts;
        Err(BackendError::Unsupported {
            what: "no draft model is attached".to_owned(),
        })
    }

    /// A value of the drafter's plan in the last step of the last drafts, `[rows, columns]`; `None` unless compiled with
    /// [`CompileOptions::probe`].
    fn probed_draft(&self, value: Value) -> Option<&[f32]> {
        let _ = value;
        None
    }

    /// Runs a batch and its draws once and times every launch, in order. Its tokens are not reported. `None` where times are
    /// not told apart.
    fn profile(
        &mut self,
        batch: &Batch<'_>,
        draws: &[Draw<'_>],
    ) -> Result<Option<Vec<LaunchTime>>, BackendError> {
        let _ = (batch, draws);
        Ok(None)
    }
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        (**self).submit(batch)
    }

    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        (**self).draw(ticket, draws)
    }

    fn lookahead(&self, ticket: &Ticket) -> bool {
        (**self).lookahead(ticket)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        (**self).collect(ticket, out)
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        (**self).move_pages(moves)
    }

    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError> {
        (**self).host_page(group, place)
    }

    fn interrupt_by(&mut self, interrupt: Interrupt) {
        (**self).interrupt_by(interrupt);
    }

    fn probed(&self, value: Value) -> Option<&[f32]> {
        (**self).probed(value)
    }

    fn attach_drafter(
        &mut self,
        plan: &Plan,
        weights: Arc<Weights>,
        max_drafts: usize,
    ) -> Result<(), BackendError> {
        (**self).attach_drafter(plan, weights, max_drafts)
    }

    fn draft(&mut self, drafts: &[DraftRun<'_>]) -> Result<Vec<Vec<TokenId>>, BackendError> {
        (**self).draft(drafts)
    }

    fn probed_draft(&self, value: Value) -> Option<&[f32]> {
        (**self).probed_draft(value)
    }

    fn profile(
        &mut self,
        batch: &Batch<'_>,
        draws: &[Draw<'_>],
    ) -> Result<Option<Vec<LaunchTime>>, BackendError> {
        (**self).profile(batch, draws)
    }
}

/// One launch of a profiled batch.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchTime {
    /// Label of the step, or of the steps, that it computes.
    pub label: String,
    /// Layer and phase it is counted with.
    pub origin: Origin,
    /// Time that it took the device.
    pub time: Duration,
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// All there is.
    pub total_bytes: u64,
    /// Bytes that nobody has taken.
    pub free_bytes: u64,
}

/// Bytes of device memory that a compiled plan takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// All together.
    pub bytes: u64,
    /// Bytes of matrices that would lie in host memory instead, for want of the device's: each use reads them through the bus.
    pub offloaded_bytes: u64,
    /// By purpose, in lines for a person.
    pub parts: String,
}

/// Limits and formats that a plan is compiled for.
#[derive(Clone, Debug)]
pub struct CompileOptions {
    /// KV pages to hold, per group.
    pub pages: PerGroup<usize>,
    /// Sliding pages besides, numbered behind them, which all sliding-window layers have at the same place, one after another: what
    /// a layer stores there is read by its own rows of the batch and by nobody later. None of a plan that
    /// [cannot have them](Plan::sliding_layers_take_turns).
    pub chunk_pages: usize,
    /// Pages in host memory that [`Executor::move_pages`] saves to and loads from, per group.
    pub host_pages: PerGroup<usize>,
    /// Format of keys and values.
    pub kv: PerGroup<KvType>,
    /// The most rows a batch will have.
    pub max_rows: usize,
    /// The most sampled rows a batch will have.
    pub max_sampled: usize,
    /// Keep every value of the last batch for [`Executor::probed`].
    pub probe: bool,
    /// The company that a row's bits may depend on.
    pub batching: Batching,
}

impl CompileOptions {
    /// Pages that the tables of a group may name.
    pub fn named_pages(&self, group: KvGroup) -> usize {
        match group {
            KvGroup::Full => self.pages.full,
            KvGroup::Sliding => self.pages.sliding + self.chunk_pages,
        }
    }
}

/// Freedom of kernels with the rows of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Batching {
    /// The fastest kernels for as many rows as a batch has. Results of a row differ between classes of batches in their last
    /// bits, so that a near tie may be decided by the company.
    #[default]
    Fast,
    /// A row has the same bits whatever else is in its batch, and however its prompt is cut.
    Invariant,
}

/// A wish, from any thread, that the batch being computed is given up.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<InterruptState>);

#[derive(Debug, Default)]
struct InterruptState {
    is_raised: AtomicBool,
    is_ignored: AtomicBool,
}

impl Interrupt {
    /// Wishes it.
    pub fn raise(&self) {
        self.0.is_raised.store(true, Ordering::Relaxed);
    }

    /// Takes the wish back.
    pub fn clear(&self) {
        self.0.is_raised.store(false, Ordering::Relaxed);
    }

    /// Lets wishes wait, or not any more: a batch that is to be seen through whatever is wished.
    pub fn ignore(&self, is_ignored: bool) {
        self.0.is_ignored.store(is_ignored, Ordering::Relaxed);
    }

    /// To be looked at between operations. The flag carries nothing but itself, so no order of memory is asked for.
    pub fn is_raised(&self) -> bool {
        self.0.is_raised.load(Ordering::Relaxed) && !self.0.is_ignored.load(Ordering::Relaxed)
    }
}

/// Proof that a batch was submitted.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a submitted batch must be collected"]
pub struct Ticket(pub u64);

/// Failure of a device: the four cases callers act on.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The device has too little memory.
    #[error("not enough memory: {} needed, {} free", mib(*.needed_bytes), mib(*.free_bytes))]
    OutOfMemory {
        /// Bytes it would take.
        needed_bytes: u64,
        /// Bytes there are.
        free_bytes: u64,
    },
    /// It was refused before anything was done.
    #[error("{what}")]
    Unsupported {
        /// The wish, as a sentence.
        what: String,
    },
    /// It was given up because somebody wished so, and nothing of it counts.
    #[error("the batch was interrupted")]
    Interrupted,
    /// Failure of the device, in its own words.
    #[error(transparent)]
    Device(Box<dyn std::error::Error + Send + Sync>),
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
