//! The engine as the rest of the program sees it: submit a request, read its tokens.
//!
//! An [`EngineHandle`] is a sender of commands to the worker thread and may be cloned freely. A [`TokenStream`] is a
//! plain blocking iterator; who lives in an async world reads it on a blocking task. Dropping a stream cancels its
//! request.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use carat_model::{
    TokenId,
    backend::{Backend, BackendError, Executor},
    plan::Plan,
    weights::Weights,
};

use crate::{
    config::{ConfigError, EngineConfig, Limits, ModelShape},
    core::{Counts, FinishReason, Rejected, Request, RequestId, Stats},
    worker::{self, Command, Submission},
};

/// Why the engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration cannot work.
    #[error("the engine's settings do not work")]
    Config(#[from] ConfigError),
    /// The device could not do it.
    #[error("the model could not be prepared")]
    Backend(#[from] BackendError),
    /// The system refused a thread.
    #[error("the engine's thread could not be started")]
    Thread(#[source] io::Error),
    /// The thread panicked.
    #[error("the engine's thread ended while preparing the model")]
    Died,
}

/// Why an accepted request ended without a [`Event::Finished`].
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// A batch with this request in it failed.
    #[error("the request was ended by a failure")]
    Failed(#[source] Arc<BackendError>),
    /// The last handle was dropped, or the worker thread died.
    #[error("the engine has stopped")]
    Stopped,
}

/// What a stream yields.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The next token of the answer.
    Token {
        /// The token.
        id: TokenId,
        /// Under the model itself, before mask, penalties, temperature and truncation; if asked for, and if the model was asked:
        /// not for a token that a constraint forced.
        logprob: Option<f32>,
        /// The likeliest tokens, best first; if asked for.
        top: Vec<(TokenId, f32)>,
    },
    /// Always the last.
    Finished {
        /// Why it is over.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
}

/// What a request came to, and what took how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// In tokens.
    pub counts: Counts,
    /// From submission until the request was first scheduled.
    pub queue: Duration,
    /// From there to the first token.
    pub prefill: Duration,
    /// From there to the end.
    pub decode: Duration,
}

/// Speaks to a running engine. When the last clone is dropped the engine stops: requests still under way end with
/// [`EngineError::Stopped`], and the drop returns when the thread has ended.
#[derive(Clone)]
pub struct EngineHandle(Arc<Engine>);

struct Engine {
    limits: Limits,
    commands: Sender<Command>,
    last_id: AtomicU64,
    /// Requests that hold a [`Place`].
    unfinished: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

/// A request's place among the unfinished ones, given up when dropped.
pub(crate) struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(unfinished: &Arc<AtomicUsize>, most: usize) -> Result<Place, Rejected> {
        let another = |n| (n < most).then_some(n + 1);
        match unfinished.fetch_update(Ordering::Relaxed, Ordering::Relaxed, another) {
            Ok(_) => Ok(Place(Arc::clone(unfinished))),
            Err(unfinished) => Err(Rejected::Busy { unfinished }),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl EngineHandle {
    /// Compiles the plan on the engine's own thread and returns when it is ready for requests.
    pub fn start(
        config: EngineConfig,
        backend: Box<dyn Backend>,
        plan: Plan,
        weights: Arc<Weights>,
    ) -> Result<EngineHandle, StartError> {
        let shape = ModelShape::with_costs(&plan, &weights);
        EngineHandle::start_with(config, shape, move |limits| {
            let options = limits.compile_options();
            backend.compile(&plan, weights, &options)
        })
    }

    /// Like [`EngineHandle::start`], with any executor. `make` runs on the engine's thread, which the executor never
    /// leaves; it must be able to run whatever the limits allow.
    pub fn start_with(
        config: EngineConfig,
        shape: ModelShape,
        make: impl FnOnce(&Limits) -> Result<Box<dyn Executor>, BackendError> + Send + 'static,
    ) -> Result<EngineHandle, StartError> {
        let limits = Limits::new(config, shape)?;
        let (commands, inbox) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let of_worker = limits.clone();
        let thread = thread::Builder::new()
            .name("carat-engine".to_owned())
            .spawn(move || worker::run(of_worker, make, &ready, inbox))
            .map_err(StartError::Thread)?;
        started.recv().map_err(|_| StartError::Died)??;
        Ok(EngineHandle(Arc::new(Engine {
            limits,
            commands,
            last_id: AtomicU64::new(0),
            unfinished: Arc::default(),
            thread: Some(thread),
        })))
    }

    /// Queues a request; its tokens can be read from the stream.
    pub fn submit(&self, request: Request) -> Result<TokenStream, Rejected> {
        let engine = &*self.0;
        engine.limits.check(&request)?;
        let place = Place::take(&engine.unfinished, engine.limits.config().max_unfinished)?;
        let id = RequestId(engine.last_id.fetch_add(1, Ordering::Relaxed) + 1);
        let (events, received) = mpsc::channel();
        let submission = Submission {
            id,
            request,
            events,
            place,
            submitted: Instant::now(),
        };
        engine
            .commands
            .send(Command::Submit(Box::new(submission)))
            .map_err(|_| Rejected::Stopped)?;
        Ok(TokenStream {
            id,
            events: received,
            commands: engine.commands.clone(),
            ended: false,
        })
    }

    /// How busy the engine is, as of the next break between two batches; `None` if it has stopped.
    pub fn stats(&self) -> Option<Stats> {
        let (reply, stats) = mpsc::channel();
        self.0.commands.send(Command::Stats(reply)).ok()?;
        stats.recv().ok()
    }

    /// What a request may ask for.
    pub fn limits(&self) -> &Limits {
        &self.0.limits
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Fails only if the thread has ended already.
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported there, and to the streams.
            let _ = thread.join();
        }
    }
}

/// The answer to a request: tokens, then [`Event::Finished`] or one error. Reading blocks until there is an event.
/// Dropping it before its end cancels the request at the next step.
pub struct TokenStream {
    id: RequestId,
    events: Receiver<Result<Event, EngineError>>,
    commands: Sender<Command>,
    ended: bool,
}

impl TokenStream {
    /// Names it in logs.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next event, if it comes in time; `None` otherwise, and after the end.
    pub fn wait(&mut self, patience: Duration) -> Option<Result<Event, EngineError>> {
        if self.ended {
            return None;
        }
        match self.events.recv_timeout(patience) {
            Ok(event) => Some(self.take(event)),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(self.take(Err(EngineError::Stopped))),
        }
    }

    /// Wants no more tokens. Those already on their way still come; then the stream ends with
    /// [`FinishReason::Cancelled`] and the usage so far, unless it has ended before.
    pub fn cancel(&self) {
        // A stopped engine has nothing left to cancel.
        let _ = self.commands.send(Command::Cancel(self.id));
    }

    fn take(&mut self, event: Result<Event, EngineError>) -> Result<Event, EngineError> {
        self.ended = !matches!(event, Ok(Event::Token { .. }));
        event
    }
}

impl Iterator for TokenStream {
    type Item = Result<Event, EngineError>;

    fn next(&mut self) -> Option<Result<Event, EngineError>> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().unwrap_or(Err(EngineError::Stopped));
        Some(self.take(event))
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if !self.ended {
            self.cancel();
        }
    }
}

#[cfg(test)]
mod tests;
