//! The engine's thread: takes commands, schedules, runs a batch, hands out the tokens.
//!
//! One plain loop around [`Pipeline::step`]. Commands are taken between batches, all that have come; one that ends a request
//! interrupts the batch under way where it is computed on this thread; without requests the thread
//! sleeps on its inbox. Sinks take what they are given and never hold up the others, and text is none of this thread's business.

use std::{
    any::Any,
    ops::ControlFlow,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, TryRecvError},
    },
    time::{Duration, Instant},
};

use carat_model::backend::{BackendError, Executor, RowResult};

use crate::{
    config::Limits,
    core::{FinishReason, Pipeline, Request, RequestId, Scheduler, Update},
    deadlines::{Deadlines, Limit},
    disk::DiskStore,
    events::{EngineError, Event, Usage},
    handle::StartError,
    measure,
    shared::{Client, Shared},
};

/// Rows of prompts in a step that tell how fast prompts are computed.
const TELLING_ROWS: usize = 64;
/// Time for which a store that has enough to do is left alone.
const STORE_WAIT: Duration = Duration::from_millis(10);
/// Time for which a thread that ends goes on writing.
const LAST_WRITES: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<Submission>),
    Cancel(RequestId),
    Stop,
}

pub(crate) struct Submission {
    pub(crate) id: RequestId,
    /// Checked against the limits.
    pub(crate) request: Request,
    pub(crate) client: Client,
}

impl std::fmt::Debug for Submission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Submission({:?})", self.id)
    }
}

/// The thread's whole life. Says on `ready` whether the executor could be made, then serves the inbox until told to
/// stop, or until the device fails. A panic ends the engine, not the program: every client hears its cause.
pub(crate) fn run(
    limits: Limits,
    make: impl FnOnce(&Limits) -> Result<Box<dyn Executor>, BackendError>,
    ready: Sender<Result<(), StartError>>,
    inbox: Receiver<Command>,
    shared: Arc<Shared>,
) {
    let of_panic = Arc::clone(&shared);
    let serve = AssertUnwindSafe(move || {
        let mut executor = match make(&limits) {
            Ok(executor) => executor,
            Err(error) => {
                // Nobody is left to tell if the handle's side is gone.
                let _ = ready.send(Err(error.into()));
                return;
            }
        };
        let costs = measure::costs_for_drafts(executor.as_mut(), &limits);
        let mut scheduler = Scheduler::new(limits.clone());
        if let Some(costs) = costs {
            tracing::debug!(?costs, "measured for drafts");
            scheduler.set_costs(costs);
        }
        let pipeline = match with_disk(Pipeline::new(scheduler, executor), &limits) {
            Ok(pipeline) => pipeline,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let worker = Worker {
            pipeline,
            shared,
            inbox,
            deadlines: Deadlines::default(),
        };
        worker
            .shared
            .interrupt_by(worker.pipeline.interrupt().clone());
        worker.observe();
        if ready.send(Ok(())).is_ok() {
            worker.serve();
        }
    });
    if let Err(payload) = panic::catch_unwind(serve) {
        of_panic.close(&EngineError::Panicked(cause(&*payload)));
    }
}

/// With the prefix cache on disk, if there is one.
fn with_disk<E: Executor>(
    pipeline: Pipeline<E>,
    limits: &Limits,
) -> Result<Pipeline<E>, StartError> {
    let Some(disk) = &limits.config().disk else {
        return Ok(pipeline);
    };
    pipeline.with_store(limits, |page_bytes| {
        let store = DiskStore::open(&disk.folder, disk.namespace, page_bytes, disk.max_bytes)?;
        Ok(Box::new(store))
    })
}

fn cause(payload: &(dyn Any + Send)) -> Arc<str> {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message").into()
}

struct Worker {
    pipeline: Pipeline<Box<dyn Executor>>,
    shared: Arc<Shared>,
    inbox: Receiver<Command>,
    /// Of requests whose time is limited.
    deadlines: Deadlines,
}

impl Worker {
    fn serve(mut self) {
        let mut goes_on = ControlFlow::Continue(());
        while goes_on.is_continue() && self.take_commands().is_continue() {
            goes_on = self.step();
            // The watchdog has told everybody that nothing more comes.
            if self.shared.failure().is_some() {
                break;
            }
        }
        let is_sound = self.shared.failure().is_none();
        self.shared.close(&EngineError::Stopped);
        if is_sound {
            self.flush();
        }
    }

    /// Leaves what was said behind for the next start.
    fn flush(&mut self) {
        let until = Instant::now() + LAST_WRITES;
        while self.pipeline.has_unsaved() && Instant::now() < until {
            match self.pipeline.persist() {
                Ok(true) => {}
                Ok(false) => self.pipeline.await_store(STORE_WAIT),
                Err(_) => return,
            }
        }
    }

    /// Takes all commands there are; waits for one if there is nothing else to do.
    fn take_commands(&mut self) -> ControlFlow<()> {
        if self.pipeline.is_idle() {
            let command = self.await_command()?;
            self.obey(command)?;
        }
        // Whatever it was raised for is in the inbox by now.
        self.pipeline.interrupt().clear();
        while let Ok(command) = self.inbox.try_recv() {
            self.obey(command)?;
        }
        self.expire();
        ControlFlow::Continue(())
    }

    /// The next command. Until it comes, what was computed is handed to the store.
    fn await_command(&mut self) -> ControlFlow<(), Command> {
        loop {
            match self.inbox.try_recv() {
                Ok(command) => return ControlFlow::Continue(command),
                Err(TryRecvError::Disconnected) => return ControlFlow::Break(()),
                Err(TryRecvError::Empty) => {}
            }
            match self.pipeline.persist() {
                Ok(true) => self.observe(),
                Ok(false) if self.pipeline.has_unsaved() => {
                    if let Ok(command) = self.inbox.recv_timeout(STORE_WAIT) {
                        return ControlFlow::Continue(command);
                    }
                }
                Ok(false) => {
                    return match self.inbox.recv() {
                        Ok(command) => ControlFlow::Continue(command),
                        Err(_) => ControlFlow::Break(()),
                    };
                }
                Err(error) => self.fail(Instant::now(), error)?,
            }
        }
    }

    /// Ends the requests whose time is up.
    fn expire(&mut self) {
        while let Some((id, limit)) = self.deadlines.pop(Instant::now()) {
            if limit == Limit::Request || !self.shared.has_started(id) {
                self.pipeline.scheduler().expire(id);
            }
        }
    }

    fn obey(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::Submit(submission) => self.accept(*submission),
            Command::Cancel(id) => self.pipeline.scheduler().cancel(id),
            Command::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    fn accept(&mut self, submission: Submission) {
        let Submission {
            id,
            request,
            client,
        } = submission;
        let limits = [
            (request.deadline, Limit::Request),
            (request.queue_limit, Limit::Queue),
        ];
        for (most, limit) in limits {
            // What is too far away to be told as a time is never reached.
            if let Some(when) = most.and_then(|most| client.submitted.checked_add(most)) {
                self.deadlines.push(when, id, limit);
            }
        }
        self.shared.add(id, client);
        let shared = &self.shared;
        self.deadlines.forget(|id| shared.is_unfinished(id));
        self.pipeline
            .submit(id, request)
            .expect("the handle has checked the request against the same limits");
    }

    /// Sees one batch to its end, if there is anything to run.
    fn step(&mut self) -> ControlFlow<()> {
        let begun = Instant::now();
        {
            let stats = self.pipeline.stats();
            let mut snapshot = self.shared.snapshot();
            snapshot.batch_since = Some(begun);
            snapshot.stats = stats;
        }
        let before = self.pipeline.prompt_rows();
        match self.pipeline.step() {
            Ok(ran) => {
                let rows = self.pipeline.prompt_rows() - before;
                if rows >= TELLING_ROWS {
                    self.pipeline.observe_prefill(rows, begun.elapsed());
                }
                self.shared.snapshot().totals.batches += u64::from(ran);
                self.deliver(begun, None);
                ControlFlow::Continue(())
            }
            Err(error) => self.fail(begun, error),
        }
    }

    /// Ends the requests of a failed batch. A batch that was refused leaves the device as it was; a device that failed
    /// is not to be trusted again, so then all other requests end too.
    fn fail(&mut self, begun: Instant, error: BackendError) -> ControlFlow<()> {
        tracing::debug!(%error, "a batch failed");
        let is_over = match error {
            BackendError::OutOfMemory { .. }
            | BackendError::Unsupported { .. }
            | BackendError::Interrupted => false,
            BackendError::Device(_) => true,
        };
        let error = EngineError::Failed(Arc::new(error));
        self.shared.snapshot().totals.failed_batches += 1;
        self.pipeline.give_up();
        self.deliver(begun, Some(&error));
        if is_over {
            self.shared.close(&error);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    /// Tells the clients what has happened in the step that began then. The snapshot comes first: whoever hears of an end finds
    /// it there.
    fn deliver(&mut self, begun: Instant, failure: Option<&EngineError>) {
        let now = Instant::now();
        self.observe();
        let mut unwanted = Vec::new();
        let (outputs, updates) = self.pipeline.results();
        for update in updates {
            match update {
                Update::Started { id, counts } => {
                    if self.shared.started(id, counts, begun).is_break() {
                        unwanted.push(id);
                    }
                }
                Update::Token { id, row } => {
                    self.shared.snapshot().totals.generated_tokens += 1;
                    let event = token_event(&mut outputs.rows[row]);
                    if self.shared.token(id, event, now).is_break() {
                        unwanted.push(id);
                    }
                }
                Update::Forced { id, token } => {
                    self.shared.snapshot().totals.generated_tokens += 1;
                    let event = Event::Token {
                        id: token,
                        logprob: None,
                        top: Vec::new(),
                    };
                    if self.shared.token(id, event, now).is_break() {
                        unwanted.push(id);
                    }
                }
                Update::PromptToken { id, position, row } => {
                    let RowResult {
                        token,
                        logprob,
                        top,
                        ..
                    } = std::mem::take(&mut outputs.rows[row]);
                    let event = Event::PromptToken {
                        id: token,
                        position,
                        logprob,
                        top,
                    };
                    if self.shared.push(id, event).is_break() {
                        unwanted.push(id);
                    }
                }
                Update::Finished { id, reason, counts } => {
                    {
                        let totals = &mut self.shared.snapshot().totals;
                        totals.requests += 1;
                        totals.prompt_tokens += counts.prompt_tokens as u64;
                        totals.cached_tokens += counts.cached_tokens as u64;
                        totals.cached_in_host += counts.cached_in_host as u64;
                        totals.cached_on_disk += counts.cached_on_disk as u64;
                        totals.preemptions += counts.preemptions as u64;
                        totals.drafts.add(&counts.drafts);
                    }
                    if let Some(usage) = self.shared.finish(id, reason, counts, now) {
                        log_finish(id, reason, &usage);
                    }
                }
                Update::Abandoned { id } => {
                    self.shared.snapshot().totals.requests += 1;
                    let error = failure.expect("only a failure abandons a step");
                    self.shared.fail(id, error.clone());
                }
            }
        }
        for id in unwanted {
            self.pipeline.scheduler().cancel(id);
        }
    }

    /// Brings the snapshot up to date, between two batches.
    fn observe(&self) {
        let stats = self.pipeline.stats();
        let mut snapshot = self.shared.snapshot();
        snapshot.batch_since = None;
        snapshot.stats = stats;
    }
}

fn token_event(result: &mut RowResult) -> Event {
    Event::Token {
        id: result.token,
        logprob: result.logprob,
        top: std::mem::take(&mut result.top),
    }
}

fn log_finish(id: RequestId, reason: FinishReason, usage: &Usage) {
    let counts = &usage.counts;
    tracing::info!(
        request = id.0,
        ?reason,
        prompt = counts.prompt_tokens,
        cached = counts.cached_tokens,
        miss = ?counts.miss,
        generated = counts.generated_tokens,
        preemptions = counts.preemptions,
        drafted = counts.drafts.drafted,
        accepted = counts.drafts.accepted,
        queue = ?usage.queue,
        prefill = ?usage.prefill,
        decode = ?usage.decode,
        "finished"
    );
}
