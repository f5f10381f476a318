//! The models of a server by name: those in memory, and the way in for those that are not.
//!
//! A request holds a [`Use`] of its model, which keeps it in memory. Models that were offered are loaded when a request wants
//! them, within a budget of memory, by one thread that loads and unloads one at a time ([`keeper`]): a model's memory is free
//! before the next one's is taken. What comes and what goes is decided by [`policy`]. A model that was ready from the start is
//! the only one, and stays.

mod keeper;
mod policy;

use std::{
    ops::Deref,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use carat_engine::{EngineError, Snapshot, Totals};
use carat_grammar::Grammars;
use carat_model::sampling::Sampling;
use tokio::sync::oneshot;

use crate::{
    app::{Model, ModelInfo},
    error::{ApiError, Kind},
};

/// Brings a model into memory, or says why it cannot. Blocks.
pub type Load = Arc<dyn Fn() -> Result<Model, String> + Send + Sync>;

/// A model that is loaded when somebody asks for it.
pub struct Offer {
    /// Facts that are known before it is loaded.
    pub info: ModelInfo,
    /// Sampling for requests that do not say.
    pub sampling: Sampling,
    /// Requests that are computed side by side.
    pub parallel: usize,
    /// Requests that may run or wait.
    pub max_unfinished: usize,
    /// Memory it takes while it is loaded: weights, keys and values, workspaces.
    pub memory_bytes: u64,
    /// Loads it.
    pub load: Load,
}

/// Time that models stay, and the memory they may take together.
#[derive(Clone, Copy, Debug)]
pub struct Residency {
    /// Memory for all loaded models together.
    pub memory_bytes: u64,
    /// Time without a request after which a model goes; `None` lets it stay until its room is needed.
    pub idle: Option<Duration>,
    /// Time before a load that failed is tried again.
    pub retry: Duration,
}

/// State of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Unloaded,
    Loading,
    Loaded,
    Unloading,
    Failed,
}

impl State {
    /// As clients and metrics name it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            State::Unloaded => "unloaded",
            State::Loading => "loading",
            State::Loaded => "loaded",
            State::Unloading => "unloading",
            State::Failed => "failed",
        }
    }

    pub(crate) const ALL: [State; 5] = [
        State::Unloaded,
        State::Loading,
        State::Loaded,
        State::Unloading,
        State::Failed,
    ];
}

/// A model in memory, with what the server keeps beside it.
pub(crate) struct Served {
    pub(crate) model: Model,
    /// Made by the first request that needs one, on a thread that may wait; or ahead, in the background.
    grammars: OnceLock<Result<Grammars, String>>,
}

impl Served {
    fn new(model: Model) -> Arc<Served> {
        Arc::new(Served {
            model,
            grammars: OnceLock::new(),
        })
    }

    /// Reads the vocabulary into the form that grammars need: a second for a real one. Blocks.
    pub(crate) fn grammars(&self) -> Result<&Grammars, ApiError> {
        let made = self.grammars.get_or_init(|| {
            let tokenizer = Arc::clone(self.model.chat.tokenizer());
            Grammars::new(tokenizer).map_err(|error| error.to_string())
        });
        made.as_ref().map_err(|error| {
            ApiError::new(
                Kind::NotSupported,
                format!("this model's vocabulary takes no grammars: {error}"),
            )
        })
    }

    pub(crate) fn grammars_if_made(&self) -> Option<&Grammars> {
        self.grammars.get()?.as_ref().ok()
    }
}

/// A model in use: it stays in memory until the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Use(Arc<Held>);

struct Held {
    /// Dropped before the place hears of it, so that a place without users holds the only reference.
    served: Arc<Served>,
    _release: Release,
}

impl Deref for Use {
    type Target = Served;

    fn deref(&self) -> &Served {
        &self.0.served
    }
}

struct Release {
    shared: Arc<Shared>,
    slot: usize,
    counts: Counts,
}

/// Uses that a model stays in memory for, and those that it does not.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Counts {
    AsUse,
    /// A look at figures: models that are watched are idle all the same.
    AsLook,
}

impl Drop for Release {
    fn drop(&mut self) {
        let mut slots = self.shared.lock();
        let slot = &mut slots.list[self.slot];
        slot.users -= 1;
        if self.counts == Counts::AsUse {
            slot.used = Instant::now();
        }
        drop(slots);
        self.shared.wake.notify_one();
    }
}

/// A model as it is told of.
pub(crate) struct Status {
    pub(crate) info: ModelInfo,
    pub(crate) sampling: Sampling,
    pub(crate) parallel: usize,
    pub(crate) max_unfinished: usize,
    pub(crate) state: State,
    /// Reason it could not be loaded.
    pub(crate) failure: Option<String>,
    pub(crate) memory_bytes: u64,
    /// Requests that wait for it to be loaded.
    pub(crate) waiting: usize,
    pub(crate) counts: LoadCounts,
    /// Time since it was used.
    pub(crate) idle: Duration,
    /// Its engine's figures; sums go on from load to load.
    pub(crate) snapshot: Snapshot,
    /// For a look at it, if it is loaded.
    pub(crate) look: Option<Use>,
}

/// Memory that counts against the budget.
pub(crate) fn held_bytes(models: &[Status]) -> u64 {
    let held = models.iter().filter(|model| model.takes_memory());
    held.map(|model| model.memory_bytes).sum()
}

impl Status {
    /// Whether it counts against the budget.
    pub(crate) fn takes_memory(&self) -> bool {
        !matches!(self.state, State::Unloaded | State::Failed)
    }
}

/// Comings and goings of a model.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LoadCounts {
    pub(crate) loads: u64,
    pub(crate) failures: u64,
    pub(crate) unloads: u64,
    /// Time that all loads took.
    pub(crate) load_time: Duration,
}

type Told = Result<Use, ApiError>;

struct Slot {
    offer: Offer,
    state: State,
    served: Option<Arc<Served>>,
    users: usize,
    /// No new requests: others need the room.
    closed: bool,
    waiters: Vec<Waiter>,
    used: Instant,
    stays_until: Instant,
    /// Reason the latest load failed, and the time from which it may be tried again.
    failure: Option<(String, Instant)>,
    counts: LoadCounts,
    /// Totals of the engines of earlier loads.
    past: Totals,
}

struct Waiter {
    number: u64,
    told: oneshot::Sender<Told>,
}

struct Slots {
    list: Vec<Slot>,
    last_waiter: u64,
    ended: bool,
}

struct Shared {
    slots: Mutex<Slots>,
    /// Something has changed that the keeper may act on.
    wake: Condvar,
    /// None where the one model stays.
    residency: Option<Residency>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Result of a request for a model.
pub(crate) enum Asked {
    /// It is in memory.
    Now(Use),
    /// It is to be loaded first.
    Later(Pending),
}

/// A place in the line for a model that is not in memory.
pub(crate) struct Pending {
    told: oneshot::Receiver<Told>,
    _left: Left,
}

/// Tells the keeper that a request no longer waits.
struct Left(Arc<Shared>);

impl Drop for Left {
    fn drop(&mut self) {
        // With the lock taken once, so that the keeper is either before its look at the line or asleep.
        drop(self.0.lock());
        self.0.wake.notify_one();
    }
}

impl Pending {
    /// Waits for the model.
    pub(crate) async fn wait(&mut self) -> Told {
        let told = (&mut self.told).await;
        told.unwrap_or_else(|_| {
            Err(ApiError::new(
                Kind::Draining,
                "this server is shutting down; ask another",
            ))
        })
    }
}

/// All models of a server.
pub(crate) struct Models {
    shared: Arc<Shared>,
}

impl Drop for Models {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.wake.notify_one();
    }
}

impl Models {
    /// One that is in memory and stays there.
    pub(crate) fn one(model: Model) -> Models {
        let limits = model.chat.engine().limits().config();
        let offer = Offer {
            info: model.info.clone(),
            sampling: model.sampling.clone(),
            parallel: limits.max_sequences,
            max_unfinished: limits.max_unfinished,
            memory_bytes: model.info.bytes,
            load: Arc::new(|| Err("it is loaded with the server".to_owned())),
        };
        let mut slot = Slot::new(offer);
        slot.state = State::Loaded;
        slot.served = Some(Served::new(model));
        Models::of(vec![slot], None)
    }

    /// Models that come and go.
    pub(crate) fn offered(offers: Vec<Offer>, residency: Residency) -> std::io::Result<Models> {
        let slots = offers.into_iter().map(Slot::new).collect();
        let models = Models::of(slots, Some(residency));
        let shared = Arc::clone(&models.shared);
        thread::Builder::new()
            .name("carat-models".to_owned())
            .spawn(move || keeper::run(&shared, &residency))?;
        Ok(models)
    }

    fn of(list: Vec<Slot>, residency: Option<Residency>) -> Models {
        let slots = Slots {
            list,
            last_waiter: 0,
            ended: false,
        };
        Models {
            shared: Arc::new(Shared {
                slots: Mutex::new(slots),
                wake: Condvar::new(),
                residency,
            }),
        }
    }

    /// The budget and its rules, where models come and go.
    pub(crate) fn residency(&self) -> Option<&Residency> {
        self.shared.residency.as_ref()
    }

    /// Number of the model with this name; Ollama's clients write `:latest` after it.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        let slots = self.shared.lock();
        let of = |name: &str| slots.list.iter().position(|s| s.offer.info.name == name);
        of(name).or_else(|| of(name.strip_suffix(":latest")?))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let slots = self.shared.lock();
        let names = slots.list.iter().map(|slot| slot.offer.info.name.clone());
        names.collect()
    }

    /// Begins to use a model.
    pub(crate) fn ask(&self, number: usize) -> Result<Asked, ApiError> {
        let mut slots = self.shared.lock();
        let Slots {
            list, last_waiter, ..
        } = &mut *slots;
        let slot = &mut list[number];
        if let Some(served) = slot.served.as_ref().filter(|_| !slot.closed) {
            let served = Arc::clone(served);
            slot.users += 1;
            return Ok(Asked::Now(self.hold(served, number, Counts::AsUse)));
        }
        let name = &slot.offer.info.name;
        if let Some(residency) = &self.shared.residency
            && slot.offer.memory_bytes > residency.memory_bytes
        {
            return Err(ApiError::new(
                Kind::OverBudget,
                format!(
                    "model `{name}` takes {} of memory and --models-memory is {}: give more, or a smaller --context or --parallel",
                    size(slot.offer.memory_bytes),
                    size(residency.memory_bytes)
                ),
            ));
        }
        let now = Instant::now();
        if let Some((reason, retry)) = &slot.failure
            && *retry > now
        {
            return Err(load_failed(name, reason, *retry - now));
        }
        slot.waiters.retain(|waiter| !waiter.told.is_closed());
        let waiting = slot.waiters.len();
        if waiting + slot.users >= slot.offer.max_unfinished {
            return Err(ApiError::new(
                Kind::QueueFull,
                format!("{waiting} requests wait for model `{name}` to be loaded; try again later"),
            ));
        }
        let (told, receiver) = oneshot::channel();
        *last_waiter += 1;
        slot.waiters.push(Waiter {
            number: *last_waiter,
            told,
        });
        drop(slots);
        self.shared.wake.notify_one();
        Ok(Asked::Later(Pending {
            told: receiver,
            _left: Left(Arc::clone(&self.shared)),
        }))
    }

    /// Reason an engine takes no more requests.
    pub(crate) fn failure(&self) -> Option<EngineError> {
        let slots = self.shared.lock();
        let mut loaded = slots.list.iter().filter_map(|slot| slot.served.as_ref());
        loaded.find_map(|served| served.model.chat.engine().snapshot().failure)
    }

    /// All of them, in the order they were given.
    pub(crate) fn statuses(&self) -> Vec<Status> {
        let mut slots = self.shared.lock();
        let each = slots.list.iter_mut().enumerate();
        each.map(|(number, slot)| {
            let served = slot.served.clone();
            let look = served.map(|served| {
                slot.users += 1;
                self.hold(served, number, Counts::AsLook)
            });
            Status {
                info: slot.offer.info.clone(),
                sampling: slot.offer.sampling.clone(),
                parallel: slot.offer.parallel,
                max_unfinished: slot.offer.max_unfinished,
                state: slot.state,
                failure: slot.failure.as_ref().map(|(reason, _)| reason.clone()),
                memory_bytes: slot.offer.memory_bytes,
                waiting: slot.waiting(),
                counts: slot.counts,
                snapshot: slot.snapshot(),
                idle: if slot.users > usize::from(look.is_some()) {
                    Duration::ZERO
                } else {
                    slot.used.elapsed()
                },
                look,
            }
        })
        .collect()
    }

    fn hold(&self, served: Arc<Served>, slot: usize, counts: Counts) -> Use {
        hold(&self.shared, served, slot, counts)
    }
}

/// The slot's count of users includes it already.
fn hold(shared: &Arc<Shared>, served: Arc<Served>, slot: usize, counts: Counts) -> Use {
    let release = Release {
        shared: Arc::clone(shared),
        slot,
        counts,
    };
    Use(Arc::new(Held {
        served,
        _release: release,
    }))
}

impl Slot {
    fn new(offer: Offer) -> Slot {
        let now = Instant::now();
        Slot {
            offer,
            state: State::Unloaded,
            served: None,
            users: 0,
            closed: false,
            waiters: Vec::new(),
            used: now,
            stays_until: now,
            failure: None,
            counts: LoadCounts::default(),
            past: Totals::default(),
        }
    }

    fn snapshot(&self) -> Snapshot {
        let served = self.served.as_ref();
        let now = served.map_or_else(Snapshot::default, |served| {
            served.model.chat.engine().snapshot()
        });
        Snapshot {
            totals: sum(&self.past, &now.totals),
            ..now
        }
    }

    fn waiting(&self) -> usize {
        let waiters = self.waiters.iter();
        waiters.filter(|waiter| !waiter.told.is_closed()).count()
    }
}

fn load_failed(name: &str, reason: &str, retry: Duration) -> ApiError {
    ApiError {
        retry_after: Some(retry),
        ..ApiError::new(
            Kind::LoadFailed,
            format!(
                "model `{name}` could not be loaded: {reason}; the next try is in {} s at the earliest",
                retry.as_secs_f64().ceil()
            ),
        )
    }
}

fn sum(a: &Totals, b: &Totals) -> Totals {
    let mut sum = *a;
    sum.batches += b.batches;
    sum.failed_batches += b.failed_batches;
    sum.requests += b.requests;
    sum.prompt_tokens += b.prompt_tokens;
    sum.cached_tokens += b.cached_tokens;
    sum.cached_in_host += b.cached_in_host;
    sum.cached_on_disk += b.cached_on_disk;
    sum.generated_tokens += b.generated_tokens;
    sum.preemptions += b.preemptions;
    sum.drafts.add(&b.drafts);
    sum
}

/// Sums of all models.
pub(crate) fn totals(models: &[Status]) -> Totals {
    let each = models.iter().map(|model| &model.snapshot.totals);
    each.fold(Totals::default(), |all, one| sum(&all, one))
}

/// Bytes as people read them.
fn size(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 {
        format!("{mib:.1} MiB")
    } else {
        format!("{:.2} GiB", mib / 1024.0)
    }
}
