//! State that the engine's thread, its watchdog and its handles share: the clients, and a snapshot of the engine.

use std::{
    ops::ControlFlow,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use carat_model::backend::Interrupt;
use rustc_hash::FxHashMap;

use crate::{
    core::{Counts, DraftCounts, FinishReason, Rejected, RequestId, Stats},
    events::{EngineError, Event, Sink, Usage},
};

/// State of an engine, as of the last break between two batches. Copied without asking the engine's thread.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Its load.
    pub stats: Stats,
    /// All it has done since its start.
    pub totals: Totals,
    /// Since when it works on a batch; `None` between two.
    pub batch_since: Option<Instant>,
    /// Reason it takes no more requests.
    pub failure: Option<EngineError>,
}

/// Sums since the start of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Batches run.
    pub batches: u64,
    /// Batches that failed.
    pub failed_batches: u64,
    /// Requests that ended, however they did.
    pub requests: u64,
    /// Prompt tokens of those.
    pub prompt_tokens: u64,
    /// Prompt tokens of those that an earlier request had computed.
    pub cached_tokens: u64,
    /// Of these, those that were copied from host memory.
    pub cached_in_host: u64,
    /// Of these, those that were read from disk.
    pub cached_on_disk: u64,
    /// Tokens of all answers, those under way included.
    pub generated_tokens: u64,
    /// Times that those lost their pages.
    pub preemptions: u64,
    /// Outcome of the drafts of those that ended.
    pub drafts: DraftCounts,
}

/// Room for one request, from before it is submitted. Dropping it gives the room back.
#[derive(Debug)]
pub struct Reservation(pub(crate) Permit);

/// A request's permit to be unfinished, given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit(Arc<AtomicUsize>);

impl Permit {
    pub(crate) fn take(unfinished: &Arc<AtomicUsize>, most: usize) -> Result<Permit, Rejected> {
        let another = |n| (n < most).then_some(n + 1);
        match unfinished.fetch_update(Ordering::Relaxed, Ordering::Relaxed, another) {
            Ok(_) => Ok(Permit(Arc::clone(unfinished))),
            Err(unfinished) => Err(Rejected::Busy { unfinished }),
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Receiver of a request's events, and the times at which things happened to it.
pub(crate) struct Client {
    pub(crate) sink: Box<dyn Sink>,
    pub(crate) submitted: Instant,
    pub(crate) started: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) permit: Permit,
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

    /// The last event. The permit goes first: whoever hears of the end may ask for the next at once.
    fn end(self, event: Result<Event, EngineError>) {
        let Client {
            mut sink, permit, ..
        } = self;
        drop(permit);
        // Nothing is left to cancel.
        let _ = sink.send(event);
    }
}

/// One lock each, held for moments: a panic in between leaves nothing half done that matters, so poison is ignored.
#[derive(Default)]
pub(crate) struct Shared {
    snapshot: Mutex<Snapshot>,
    clients: Mutex<FxHashMap<RequestId, Client>>,
    /// Stops the batch under way, where the executor computes on the engine's thread.
    interrupt: OnceLock<Interrupt>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn snapshot(&self) -> MutexGuard<'_, Snapshot> {
        lock(&self.snapshot)
    }

    /// Says how the batch under way is stopped; once.
    pub(crate) fn interrupt_by(&self, interrupt: Interrupt) {
        // The worker says so once, before it is ready.
        let _ = self.interrupt.set(interrupt);
    }

    /// Stops the batch under way, so that a command is taken now.
    pub(crate) fn interrupt(&self) {
        if let Some(interrupt) = self.interrupt.get() {
            interrupt.raise();
        }
    }

    pub(crate) fn add(&self, id: RequestId, client: Client) {
        lock(&self.clients).insert(id, client);
    }

    /// The engine has begun to compute for it.
    pub(crate) fn started(&self, id: RequestId, counts: Counts, when: Instant) -> ControlFlow<()> {
        match lock(&self.clients).get_mut(&id) {
            Some(client) => {
                client.started.get_or_insert(when);
                client.sink.send(Ok(Event::Started {
                    counts: Box::new(counts),
                }))
            }
            None => ControlFlow::Break(()),
        }
    }

    /// Whether somebody still waits for something of it.
    pub(crate) fn is_unfinished(&self, id: RequestId) -> bool {
        lock(&self.clients).contains_key(&id)
    }

    /// Whether the engine has begun to compute for it; true of one that is over.
    pub(crate) fn has_started(&self, id: RequestId) -> bool {
        let clients = lock(&self.clients);
        clients
            .get(&id)
            .is_none_or(|client| client.started.is_some())
    }

    /// Hands on what comes before the answer. `Break` if nobody wants it.
    pub(crate) fn push(&self, id: RequestId, event: Event) -> ControlFlow<()> {
        match lock(&self.clients).get_mut(&id) {
            Some(client) => client.sink.send(Ok(event)),
            None => ControlFlow::Break(()),
        }
    }

    /// Hands on a token. `Break` if nobody wants it.
    pub(crate) fn token(&self, id: RequestId, event: Event, now: Instant) -> ControlFlow<()> {
        match lock(&self.clients).get_mut(&id) {
            Some(client) => {
                client.first_token.get_or_insert(now);
                client.sink.send(Ok(event))
            }
            None => ControlFlow::Break(()),
        }
    }

    /// Ends a request as its scheduler says. The usage is for logs; `None` if its client is gone.
    pub(crate) fn finish(
        &self,
        id: RequestId,
        reason: FinishReason,
        counts: Counts,
        now: Instant,
    ) -> Option<Usage> {
        let client = lock(&self.clients).remove(&id)?;
        let usage = client.usage(counts, now);
        client.end(Ok(Event::Finished {
            reason,
            usage: Box::new(usage),
        }));
        Some(usage)
    }

    /// Ends a request with an error.
    pub(crate) fn fail(&self, id: RequestId, error: EngineError) {
        let client = lock(&self.clients).remove(&id);
        if let Some(client) = client {
            client.end(Err(error));
        }
    }

    /// Nobody's request is answered any more. The first reason stays.
    pub(crate) fn close(&self, reason: &EngineError) {
        self.snapshot()
            .failure
            .get_or_insert_with(|| reason.clone());
        let clients = std::mem::take(&mut *lock(&self.clients));
        for client in clients.into_values() {
            client.end(Err(reason.clone()));
        }
    }

    pub(crate) fn failure(&self) -> Option<EngineError> {
        self.snapshot().failure.clone()
    }
}
