//! The engine's thread: takes commands, schedules, runs a batch, hands out the tokens.
//!
//! One plain loop around [`Pipeline::step`]. Commands are taken between batches, all that have come; without requests the thread
//! sleeps on its inbox. Streams are unbounded, so a slow reader never holds up the others, and text is none of this thread's
//! business.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender},
    },
    time::Instant,
};

use carat_model::backend::{BackendError, Executor, RowResult};
use rustc_hash::FxHashMap;

use crate::{
    config::Limits,
    core::{Counts, FinishReason, Pipeline, Request, RequestId, Scheduler, Stats, Update},
    handle::{EngineError, Event, Place, Usage},
};

type Events = Sender<Result<Event, EngineError>>;

pub(crate) enum Command {
    Submit(Box<Submission>),
    Cancel(RequestId),
    Stats(Sender<Stats>),
    Stop,
}

pub(crate) struct Submission {
    pub(crate) id: RequestId,
    /// Checked against the limits.
    pub(crate) request: Request,
    pub(crate) events: Events,
    pub(crate) place: Place,
    pub(crate) submitted: Instant,
}

/// Where a request's tokens go, and when things happened to it.
struct Client {
    events: Events,
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    _place: Place,
}

impl Client {
    fn usage(&self, counts: Counts, end: Instant) -> Usage {
        let started = self.started.unwrap_or(end);
        let first_token = self.first_token.unwrap_or(end);
        Usage {
            counts,
            queue: started - self.submitted,
            prefill: first_token - started,
            decode: end - first_token,
        }
    }

    /// A reader that is gone has cancelled; the command is on its way.
    fn send(&self, event: Result<Event, EngineError>) {
        let _ = self.events.send(event);
    }
}

/// Whether the loop goes on.
enum Next {
    Continue,
    Stop,
}

/// The thread's whole life. Says on `ready` whether the executor could be made, then serves the inbox until told to
/// stop, or until the device fails.
pub(crate) fn run(
    limits: Limits,
    make: impl FnOnce(&Limits) -> Result<Box<dyn Executor>, BackendError>,
    ready: &Sender<Result<(), BackendError>>,
    inbox: Receiver<Command>,
) {
    let executor = match make(&limits) {
        Ok(executor) => executor,
        Err(error) => {
            // Nobody is left to tell if the handle's side is gone.
            let _ = ready.send(Err(error));
            return;
        }
    };
    let worker = Worker {
        pipeline: Pipeline::new(Scheduler::new(limits), executor),
        clients: FxHashMap::default(),
        inbox,
    };
    if ready.send(Ok(())).is_ok() {
        worker.serve();
    }
}

struct Worker {
    pipeline: Pipeline<Box<dyn Executor>>,
    clients: FxHashMap<RequestId, Client>,
    inbox: Receiver<Command>,
}

impl Worker {
    fn serve(mut self) {
        while let Next::Continue = self.take_commands() {
            if let Next::Stop = self.step() {
                break;
            }
        }
        for client in self.clients.values() {
            client.send(Err(EngineError::Stopped));
        }
    }

    /// Takes all commands there are; waits for one if there is nothing else to do.
    fn take_commands(&mut self) -> Next {
        if self.pipeline.is_idle() {
            let Ok(command) = self.inbox.recv() else {
                return Next::Stop;
            };
            if let Next::Stop = self.obey(command) {
                return Next::Stop;
            }
        }
        while let Ok(command) = self.inbox.try_recv() {
            if let Next::Stop = self.obey(command) {
                return Next::Stop;
            }
        }
        Next::Continue
    }

    fn obey(&mut self, command: Command) -> Next {
        match command {
            Command::Submit(submission) => self.accept(*submission),
            Command::Cancel(id) => self.pipeline.scheduler().cancel(id),
            Command::Stats(reply) => {
                // Whoever asked may be gone.
                let _ = reply.send(self.pipeline.scheduler().stats());
            }
            Command::Stop => return Next::Stop,
        }
        Next::Continue
    }

    fn accept(&mut self, submission: Submission) {
        let Submission {
            id,
            request,
            events,
            place,
            submitted,
        } = submission;
        let scheduler = self.pipeline.scheduler();
        scheduler
            .submit(id, request)
            .expect("the handle has checked the request against the same limits");
        let client = Client {
            events,
            submitted,
            started: None,
            first_token: None,
            _place: place,
        };
        self.clients.insert(id, client);
    }

    /// Sees one batch to its end, if there is anything to run.
    fn step(&mut self) -> Next {
        let begun = Instant::now();
        match self.pipeline.step() {
            Ok(_) => {
                self.deliver(begun, None);
                Next::Continue
            }
            Err(error) => self.fail(begun, error),
        }
    }

    /// Ends the requests of a failed batch. A batch that was refused leaves the device as it was; a device that failed
    /// is not to be trusted again, so then all other requests end too.
    fn fail(&mut self, begun: Instant, error: BackendError) -> Next {
        tracing::debug!(%error, "a batch failed");
        let next = match error {
            BackendError::OutOfMemory { .. } | BackendError::Unsupported { .. } => Next::Continue,
            BackendError::Device(_) => Next::Stop,
        };
        let error = Arc::new(error);
        self.pipeline.give_up();
        self.deliver(begun, Some(&error));
        if let Next::Stop = next {
            for (_, client) in self.clients.drain() {
                client.send(Err(EngineError::Failed(Arc::clone(&error))));
            }
        }
        next
    }

    /// Tells the streams what has happened in the step that began then.
    fn deliver(&mut self, begun: Instant, failure: Option<&Arc<BackendError>>) {
        let now = Instant::now();
        let (outputs, updates) = self.pipeline.results();
        for update in updates {
            let (Update::Started { id }
            | Update::Token { id, .. }
            | Update::Forced { id, .. }
            | Update::PromptToken { id, .. }
            | Update::Finished { id, .. }
            | Update::Abandoned { id }) = update;
            let client = self
                .clients
                .get_mut(&id)
                .expect("a request has a client until it ends");
            match update {
                Update::Started { .. } => client.started = Some(begun),
                Update::Token { row, .. } => {
                    client.first_token.get_or_insert(now);
                    client.send(Ok(token_event(&mut outputs.rows[row])));
                }
                Update::Forced { token, .. } => {
                    client.first_token.get_or_insert(now);
                    client.send(Ok(Event::Token {
                        id: token,
                        logprob: None,
                        top: Vec::new(),
                    }));
                }
                Update::PromptToken { .. } => {}
                Update::Finished { reason, counts, .. } => {
                    let usage = client.usage(counts, now);
                    log_finish(id, reason, &usage);
                    client.send(Ok(Event::Finished { reason, usage }));
                    self.clients.remove(&id);
                }
                Update::Abandoned { .. } => {
                    let error = failure.expect("only a failure abandons a step");
                    client.send(Err(EngineError::Failed(Arc::clone(error))));
                    self.clients.remove(&id);
                }
            }
        }
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
        queue = ?usage.queue,
        prefill = ?usage.prefill,
        decode = ?usage.decode,
        "finished"
    );
}
