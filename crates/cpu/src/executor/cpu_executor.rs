//! The executor: the loop that runs a batch through the operations of a compiled model, and sampling.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use carat_model::{
    TokenId,
    backend::{
        BackendError, Batch, CompileOptions, DraftRun, Draw, Executor, HostPageId, Interrupt,
        KvGroup, LaunchTime, Outputs, PageMove, Ticket,
    },
    layout::Layout,
    phase::{Origin, Phase},
    plan::{Plan, Rows, Value},
    sampling::Scratch as SamplingScratch,
    weights::Weights,
};

use super::{
    draft_model::DraftModel,
    row_view::RowView,
    state::{Shared, State},
};
use crate::{
    lower::{Fusion, LoweredOp, Program, lower},
    op::workers::Workers,
};

pub(crate) struct CpuExecutor {
    plan: Plan,
    options: CompileOptions,
    program: Program,
    fusion: Fusion,
    shared: Shared,
    state: State,
    drafter: Option<DraftModel>,
    sampling_scratch: SamplingScratch,
    interrupt: Interrupt,
    in_flight: VecDeque<InFlight>,
    /// Results that were taken, for their memory.
    spare: Outputs,
    batches: u64,
    /// Rows of the last batch, for [`Executor::probed`].
    last_rows: usize,
    last_sampled: usize,
}

/// A batch that has been submitted and not collected.
struct InFlight {
    ticket: u64,
    /// Of its sampled rows.
    positions: Vec<usize>,
    /// `None` until it is drawn.
    outputs: Option<Outputs>,
}

impl CpuExecutor {
    pub(crate) fn new(
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
        (program, fusion): (Program, Fusion),
        workers: Workers,
    ) -> CpuExecutor {
        let most = (options.max_rows, options.max_sampled);
        let classes = workers.classes;
        let shared = Shared::new(plan, &weights, options, workers);
        let state = State::new(plan, weights, most, &program, classes);
        CpuExecutor {
            fusion,
            shared,
            drafter: None,
            plan: plan.clone(),
            options: options.clone(),
            program,
            state,
            sampling_scratch: SamplingScratch::default(),
            interrupt: Interrupt::default(),
            in_flight: VecDeque::new(),
            spare: Outputs::default(),
            batches: 0,
            last_rows: 0,
            last_sampled: 0,
        }
    }

    /// Computes the rows of a batch, and calls `done` after each operation.
    fn forward(
        &mut self,
        view: &RowView<'_>,
        mut done: impl FnMut(&Plan, &LoweredOp),
    ) -> Result<(), BackendError> {
        let shared = &mut self.shared;
        self.state.fill_angles(shared, &self.plan, view);
        for lowered in &self.program.ops {
            if self.interrupt.is_raised() {
                return Err(BackendError::Interrupted);
            }
            if !view.of(lowered.op.rows()).is_empty() {
                self.state.run(shared, &lowered.op, view);
                done(&self.plan, lowered);
            }
        }
        (self.last_rows, self.last_sampled) = (view.all.len(), view.sampled.len());
        Ok(())
    }
}

impl Executor for CpuExecutor {
    /// Computes here and now: the caller is one of the pool's threads. A wish to stop is heard between operations; keys and values
    /// that were stored until then lie behind everything that counts as computed, and are written again.
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        let before = self.in_flight.back();
        let before = before.and_then(|batch| batch.outputs.as_ref());
        let drawn: Vec<TokenId> = before
            .map(|outputs| outputs.rows.iter().map(|row| row.token).collect())
            .unwrap_or_default();
        batch.check(&self.plan, &self.options, drawn.len())?;
        let view = RowView::new(batch, &self.plan, self.options.pages, &drawn);
        self.forward(&view, |_, _| {})?;
        self.batches += 1;
        self.in_flight.push_back(InFlight {
            ticket: self.batches,
            positions: view.sampled.iter().map(|row| row.position).collect(),
            outputs: None,
        });
        Ok(Ticket(self.batches))
    }

    /// At once: the logits are there.
    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        let batch = self.in_flight.back_mut();
        let batch = batch.filter(|batch| batch.ticket == ticket.0 && batch.outputs.is_none());
        let batch = batch.expect("the batch submitted last is drawn, once");
        Draw::check(draws, batch.positions.len(), &self.plan)?;
        let logits = self.program.logits;
        let rows = self.state.buffer(logits.buffer).chunks(logits.columns);
        let mut outputs = std::mem::take(&mut self.spare);
        let drawn = (draws, &*batch.positions);
        sample(rows, drawn, &mut self.sampling_scratch, &mut outputs);
        batch.outputs = Some(outputs);
        Ok(())
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let batch = self.in_flight.pop_front();
        let batch = batch.filter(|batch| batch.ticket == ticket.0);
        let batch = batch.expect("a ticket is used once, in order");
        self.spare = std::mem::replace(out, batch.outputs.unwrap_or_default());
        Ok(())
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        PageMove::check(moves, self.options.pages, self.options.host_pages)?;
        self.shared.move_pages(moves);
        Ok(())
    }

    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError> {
        PageMove::check_place(group, place, self.options.host_pages)?;
        Ok(self.shared.saved_page(group, place))
    }

    fn attach_drafter(
        &mut self,
        plan: &Plan,
        weights: Arc<Weights>,
        max_drafts: usize,
    ) -> Result<(), BackendError> {
        let plan = plan.with_products_gathered();
        let layout = if self.options.probe {
            Layout::separate(&plan)
        } else {
            Layout::shared(&plan)
        };
        let program = lower(&plan, &weights, layout, self.fusion);
        let classes = self.shared.workers.classes;
        self.drafter = Some(DraftModel::new(plan, weights, program, max_drafts, classes));
        Ok(())
    }

    fn draft(&mut self, drafts: &[DraftRun<'_>]) -> Result<Vec<Vec<TokenId>>, BackendError> {
        let Some(drafter) = &mut self.drafter else {
            return Err(BackendError::Unsupported {
                what: "no draft model is attached".to_owned(),
            });
        };
        DraftRun::check(drafts, drafter.plan(), &self.options, self.last_sampled)?;
        let hidden = self.program.hidden;
        let rows = self.state.buffer(hidden.buffer);
        let row = |draft: &DraftRun<'_>| &rows[draft.row * hidden.columns..][..hidden.columns];
        Ok(drafter.run(&mut self.shared, drafts, row))
    }

    fn probed_draft(&self, value: Value) -> Option<&[f32]> {
        let drafter = self.drafter.as_ref().filter(|_| self.options.probe)?;
        Some(drafter.value(value))
    }

    fn interrupt_by(&mut self, interrupt: Interrupt) {
        self.interrupt = interrupt;
    }

    /// Angles of RoPE are counted with the first operation.
    fn profile(
        &mut self,
        batch: &Batch<'_>,
        draws: &[Draw<'_>],
    ) -> Result<Option<Vec<LaunchTime>>, BackendError> {
        batch.check(&self.plan, &self.options, 0)?;
        Draw::check(draws, batch.sampled_count(), &self.plan)?;
        let view = RowView::new(batch, &self.plan, self.options.pages, &[]);
        let positions: Vec<usize> = view.sampled.iter().map(|row| row.position).collect();
        let mut times = Vec::new();
        let mut clock = Clock(Instant::now());
        self.forward(&view, |plan, lowered| {
            let time = clock.lap();
            times.push(LaunchTime {
                label: lowered.label(plan),
                origin: plan.origin(&plan.steps[lowered.steps[0]]),
                time,
            });
        })?;
        clock.lap();
        let logits = self.program.logits;
        let rows = self.state.buffer(logits.buffer).chunks(logits.columns);
        let scratch = &mut self.sampling_scratch;
        sample(rows, (draws, &positions), scratch, &mut Outputs::default());
        times.push(LaunchTime {
            label: "sample".to_owned(),
            origin: Origin {
                layer: None,
                phase: Phase::Sample,
            },
            time: clock.lap(),
        });
        Ok(Some(times))
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

/// Draws a token from each row of logits.
fn sample<'a>(
    logits: impl Iterator<Item = &'a [f32]>,
    (draws, positions): (&[Draw<'_>], &[usize]),
    scratch: &mut SamplingScratch,
    outputs: &mut Outputs,
) {
    outputs.rows.clear();
    for ((draw, position), logits) in draws.iter().zip(positions).zip(logits) {
        let row = draw.report(logits, *position, scratch);
        outputs.rows.push(row);
    }
}

/// Time from one moment to the next.
struct Clock(Instant);

impl Clock {
    fn lap(&mut self) -> Duration {
        let before = std::mem::replace(&mut self.0, Instant::now());
        self.0 - before
    }
}
