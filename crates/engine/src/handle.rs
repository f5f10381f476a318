//! The engine as the rest of the program sees it: submit a request, read its tokens.
//!
//! An [`EngineHandle`] is a sender of commands to the worker thread and may be cloned freely. Events are pushed into a [`Sink`]; a
//! [`TokenStream`] is the one for plain threads, a blocking iterator.

use std::{
    io,
    ops::ControlFlow,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use carat_model::{
    backend::{Backend, BackendError, DraftPlan, Executor},
    plan::Plan,
    weights::Weights,
};

use crate::{
    config::{ConfigError, EngineConfig, Limits, ModelFacts},
    core::{Rejected, Request, RequestId},
    disk::DiskError,
    events::{Cancel, EngineError, Sink, TokenStream},
    shared::{Client, Permit, Reservation, Shared, Snapshot},
    watchdog,
    worker::{self, Command, Submission},
};

/// The longest that dropping the last handle waits for the batch under way.
const LAST_BATCH: Duration = Duration::from_secs(10);

/// Reason the engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration cannot work.
    #[error("the engine's settings do not work")]
    Config(#[from] ConfigError),
    /// The device could not do it.
    #[error("the model could not be prepared")]
    Backend(#[from] BackendError),
    /// The prefix cache on disk cannot be used.
    #[error("the prefix cache on disk cannot be used")]
    Disk(#[from] DiskError),
    /// The system refused a thread.
    #[error("the engine's thread could not be started")]
    Thread(#[source] io::Error),
    /// The thread panicked.
    #[error("the engine's thread ended while preparing the model")]
    Died,
}

/// Speaks to a running engine. When the last clone is dropped the engine stops: requests still under way end with
/// [`EngineError::Stopped`], and the drop returns when the thread has ended.
#[derive(Clone)]
pub struct EngineHandle(Arc<Engine>);

struct Engine {
    limits: Limits,
    commands: Sender<Command>,
    last_id: AtomicU64,
    /// Requests that hold a [`Permit`].
    unfinished: Arc<AtomicUsize>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Hangs up when the thread ends. Behind a lock because receivers are not shared, though only the last handle asks.
    ended: Mutex<Receiver<()>>,
}

impl EngineHandle {
    /// Compiles the plan on the engine's own thread and returns when it is ready for requests.
    pub fn start(
        config: EngineConfig,
        backend: Box<dyn Backend>,
        plan: Plan,
        weights: Arc<Weights>,
    ) -> Result<EngineHandle, StartError> {
        let facts = ModelFacts::with_costs(&plan, &weights);
        EngineHandle::start_with(config, facts, move |limits| {
            let options = limits.compile_options();
            backend.compile(&plan, weights, &options)
        })
    }

    /// Like [`EngineHandle::start`], with a draft model beside the plan ([`DraftConfig::model`](crate::DraftConfig)).
    pub fn start_with_drafter(
        config: EngineConfig,
        backend: Box<dyn Backend>,
        (plan, weights): (Plan, Arc<Weights>),
        drafter: DraftPlan,
    ) -> Result<EngineHandle, StartError> {
        let facts = ModelFacts::with_costs(&plan, &weights);
        EngineHandle::start_with(config, facts, move |limits| {
            let options = limits.compile_options();
            backend.compile_with_drafter(&plan, weights, &options, drafter)
        })
    }

    /// Like [`EngineHandle::start`], with any executor. `make` runs on the engine's thread, which the executor never
    /// leaves; it must be able to run whatever the limits allow.
    pub fn start_with(
        config: EngineConfig,
        facts: ModelFacts,
        make: impl FnOnce(&Limits) -> Result<Box<dyn Executor>, BackendError> + Send + 'static,
    ) -> Result<EngineHandle, StartError> {
        let limits = Limits::new(config, facts)?;
        let (commands, inbox) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let (alive, ended) = mpsc::channel();
        let (watched, watchdog_ended) = mpsc::channel();
        let shared = Arc::<Shared>::default();
        let (of_worker, its_limits) = (Arc::clone(&shared), limits.clone());
        let thread = thread::Builder::new()
            .name("carat-engine".to_owned())
            .spawn(move || {
                worker::run(its_limits, make, ready, inbox, of_worker);
                drop::<(Sender<()>, Sender<()>)>((alive, watched));
            })
            .map_err(StartError::Thread)?;
        started.recv().map_err(|_| StartError::Died)??;
        let (of_watchdog, limit) = (Arc::clone(&shared), limits.config().stall_limit);
        thread::Builder::new()
            .name("carat-watchdog".to_owned())
            .spawn(move || watchdog::run(&of_watchdog, limit, &watchdog_ended))
            .map_err(StartError::Thread)?;
        Ok(EngineHandle(Arc::new(Engine {
            limits,
            commands,
            last_id: AtomicU64::new(0),
            unfinished: Arc::default(),
            shared,
            thread: Some(thread),
            ended: Mutex::new(ended),
        })))
    }

    /// Keeps room for a request that is yet to be prepared, which costs time: whoever would be turned away for their number is turned
    /// away before.
    pub fn reserve(&self) -> Result<Reservation, Rejected> {
        let most = self.0.limits.config().max_unfinished;
        Permit::take(&self.0.unfinished, most).map(Reservation)
    }

    /// Queues a request whose events go into `sink`.
    pub fn submit_to(&self, request: Request, sink: Box<dyn Sink>) -> Result<Cancel, Rejected> {
        self.submit_reserved(self.reserve()?, request, sink)
    }

    /// Queues a request in the room that was kept for it.
    pub fn submit_reserved(
        &self,
        Reservation(permit): Reservation,
        request: Request,
        sink: Box<dyn Sink>,
    ) -> Result<Cancel, Rejected> {
        let engine = &*self.0;
        engine.limits.check(&request)?;
        if engine.shared.failure().is_some() {
            return Err(Rejected::Stopped);
        }
        let id = RequestId(engine.last_id.fetch_add(1, Ordering::Relaxed) + 1);
        let submission = Submission {
            id,
            request,
            client: Client {
                sink,
                submitted: Instant::now(),
                started: None,
                first_token: None,
                permit,
            },
        };
        engine
            .commands
            .send(Command::Submit(Box::new(submission)))
            .map_err(|_| Rejected::Stopped)?;
        Ok(Cancel {
            id,
            commands: engine.commands.clone(),
            shared: Arc::clone(&engine.shared),
        })
    }

    /// Queues a request; its tokens can be read from the stream.
    pub fn submit(&self, request: Request) -> Result<TokenStream, Rejected> {
        let (sender, events) = mpsc::channel();
        let sink = move |event| match sender.send(event) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        };
        Ok(TokenStream {
            cancel: self.submit_to(request, Box::new(sink))?,
            events,
            ended: false,
        })
    }

    /// State of the engine, as of the last break between two batches; never waits for one.
    pub fn snapshot(&self) -> Snapshot {
        self.0.shared.snapshot().clone()
    }

    /// Limits on what a request may ask for.
    pub fn limits(&self) -> &Limits {
        &self.0.limits
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Fails only if the thread has ended already.
        let _ = self.commands.send(Command::Stop);
        self.shared.interrupt();
        // A thread that hangs in its device is left behind; whoever waited for it has been told, or is now.
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LAST_BATCH) {
            tracing::warn!("the engine's thread does not end; it is left behind");
            self.shared.close(&EngineError::Stopped);
            return;
        }
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported to the clients.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
