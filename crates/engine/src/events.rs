//! Events of an answer, and where they go: sinks are pushed to, a [`TokenStream`] is read.

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    time::Duration,
};

use carat_model::{TokenId, backend::BackendError};

use crate::{
    core::{Counts, FinishReason, RequestId},
    shared::Shared,
    worker::Command,
};

/// Reason an accepted request ended without an [`Event::Finished`].
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// A batch with this request in it failed.
    #[error("the request was ended by a failure")]
    Failed(#[source] Arc<BackendError>),
    /// The engine's thread panicked: a mistake in this program.
    #[error("the engine's thread panicked: {0}")]
    Panicked(Arc<str>),
    /// A batch took longer than any should.
    #[error("the device has not answered for {} s; it is given up", .0.as_secs())]
    Stalled(Duration),
    /// The last handle was dropped.
    #[error("the engine has stopped")]
    Stopped,
}

/// Event of a request. Small, for queues of them are held for every stream: what comes once is in a box.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Always the first, and once, with the first batch that computes some of it. A request that ends before has none.
    Started {
        /// Of the prompt: what was cached, and why not more.
        counts: Box<Counts>,
    },
    /// Log probability of a token of the prompt; if asked for. Comes for each but the first, in order, before the answer.
    PromptToken {
        /// The token.
        id: TokenId,
        /// In the prompt.
        position: usize,
        /// Under the model itself.
        logprob: Option<f32>,
        /// The likeliest tokens in its place, best first.
        top: Vec<(TokenId, f32)>,
    },
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
        /// Reason of the end.
        reason: FinishReason,
        /// Counts and times of the request.
        usage: Box<Usage>,
    },
}

/// Counts and times of one request.
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

/// Takes the events of one request, in order: [`Event::Started`], any number of tokens, then [`Event::Finished`] or one error.
///
/// Called on the engine's thread, between batches, so it must neither block nor compute: push and return. Any such closure is a
/// sink.
pub trait Sink: Send {
    /// Takes an event. `Break` says that nobody is interested any more and cancels the request; only its end follows.
    fn send(&mut self, event: Result<Event, EngineError>) -> ControlFlow<()>;
}

impl<F: FnMut(Result<Event, EngineError>) -> ControlFlow<()> + Send> Sink for F {
    fn send(&mut self, event: Result<Event, EngineError>) -> ControlFlow<()> {
        self(event)
    }
}

/// Ends a request early, from any thread. Dropping it does nothing.
#[derive(Clone)]
pub struct Cancel {
    pub(crate) id: RequestId,
    pub(crate) commands: Sender<Command>,
    pub(crate) shared: Arc<Shared>,
}

impl std::fmt::Debug for Cancel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cancel({:?})", self.id)
    }
}

impl Cancel {
    /// Names the request in logs.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Wants no more tokens. Those already on their way still come; then the request ends with
    /// [`FinishReason::Cancelled`] and the usage so far, unless it has ended before. A batch that is computed on
    /// the engine's thread does not hold it up: it is interrupted, and done again without the request.
    pub fn cancel(&self) {
        // A stopped engine has nothing left to cancel.
        if self.commands.send(Command::Cancel(self.id)).is_ok() {
            self.shared.interrupt();
        }
    }
}

/// The answer to a request: [`Event::Started`], tokens, then [`Event::Finished`] or one error. Reading blocks until there is an event.
/// Dropping it before its end cancels the request at the next step.
pub struct TokenStream {
    pub(crate) cancel: Cancel,
    pub(crate) events: Receiver<Result<Event, EngineError>>,
    pub(crate) ended: bool,
}

impl TokenStream {
    /// Names it in logs.
    pub fn id(&self) -> RequestId {
        self.cancel.id
    }

    /// To end it from another thread while this one reads.
    pub fn canceller(&self) -> Cancel {
        self.cancel.clone()
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

    /// As [`Cancel::cancel`].
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    fn take(&mut self, event: Result<Event, EngineError>) -> Result<Event, EngineError> {
        self.ended = matches!(event, Err(_) | Ok(Event::Finished { .. }));
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
