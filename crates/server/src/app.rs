//! State that all requests share: the models, the limits, the counters; and the way from an [`Ask`] to an [`Answer`].

use std::{
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use carat_engine::{
    EngineError, EngineHandle, LaneId, Rejected, Reservation,
    chat::{Chat, Generation, Prepared},
};
use carat_grammar::{Answer as AnswerSyntax, Start, Thinking, Tools};
use carat_model::sampling::Sampling;
use carat_text::{Specials, TokenId};
use tokio::sync::Semaphore;

use crate::{
    answer::Answer,
    ask::{Ask, Ends, Prompt, Text},
    config::{Config, Lanes},
    error::{ApiError, Kind, too_long},
    http::Call,
    lanes::{self, Full, Lines, Place},
    metrics::Metrics,
    models::{self, Asked, Models, Offer, Residency, Served, Use},
    watch::{Entry, Watch},
};

/// Time without requests after which there is time for what is not asked for.
const IDLE: Duration = Duration::from_secs(1);

/// A model that is ready to answer, and what clients are told about it.
pub struct Model {
    /// Answers.
    pub chat: Chat,
    /// Sampling for requests that do not say.
    pub sampling: Sampling,
    /// Facts about it.
    pub info: ModelInfo,
}

/// Facts about a model, for those who ask.
#[derive(Clone, Debug, Default)]
pub struct ModelInfo {
    /// By which requests name it.
    pub name: String,
    /// The most tokens of a request, prompt and answer.
    pub context: usize,
    /// The most tokens it was trained for.
    pub trained_context: usize,
    /// Numbers in it.
    pub parameters: u64,
    /// Of the file.
    pub bytes: u64,
    /// Such as `Q4_K_M`.
    pub quantization: String,
    /// Backend that computes it.
    pub backend: String,
    /// Source of its chat template.
    pub template: Option<String>,
    /// Changes whenever the same request may get another answer: file, backend, KV type, version.
    pub fingerprint: String,
    /// Seconds since 1970 when it was loaded.
    pub loaded: u64,
}

/// Progress of the models: loading, ready, failed.
enum Status {
    Loading,
    Ready(Arc<Models>),
    Failed(String),
}

/// Everything that requests share.
pub struct App {
    pub(crate) config: Config,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) watch: Arc<Watch>,
    status: RwLock<Status>,
    draining: AtomicBool,
    lines: Arc<Lines>,
    /// Rendering, encoding and compiling of schemas: as many at a time as there are cores.
    permits: Semaphore,
    /// Prompts that are only counted: few at a time, so that they never crowd out those to be answered.
    pub(crate) counting: Semaphore,
}

impl App {
    /// Without a model yet.
    pub fn new(config: Config) -> Arc<App> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Arc::new(App {
            config,
            metrics: Arc::new(Metrics::new()),
            watch: Arc::default(),
            status: RwLock::new(Status::Loading),
            draining: AtomicBool::new(false),
            lines: Arc::default(),
            permits: Semaphore::new(cores),
            counting: Semaphore::new(4),
        })
    }

    /// The model is there: the only one, and it stays.
    pub fn ready(&self, model: Model) {
        self.set(Status::Ready(Arc::new(Models::one(model))));
    }

    /// Models that are loaded when they are asked for. A request that names none gets the first.
    pub fn offer(&self, offers: Vec<Offer>, residency: Residency) -> std::io::Result<()> {
        let models = Models::offered(offers, residency)?;
        self.set(Status::Ready(Arc::new(models)));
        Ok(())
    }

    /// There will be no model.
    pub fn failed(&self, reason: impl Into<String>) {
        self.set(Status::Failed(reason.into()));
    }

    /// Makes ready for grammars as soon as nobody has asked for anything for a second: where the model computes on all cores, answers
    /// under way would be half as fast meanwhile.
    pub async fn prepare_grammars_when_idle(self: Arc<App>) {
        let mut ended = self.metrics.ended_total();
        loop {
            tokio::time::sleep(IDLE).await;
            let before = std::mem::replace(&mut ended, self.metrics.ended_total());
            if self.unfinished() == 0 && before == ended {
                break;
            }
        }
        let _ = tokio::task::spawn_blocking(move || self.prepare_grammars()).await;
    }

    /// Makes ready for grammars now instead of with the first request that has one, for models in memory. Blocks for a second
    /// with a real vocabulary.
    pub fn prepare_grammars(&self) {
        let models = self.models().ok();
        let statuses = models.map_or_else(Vec::new, |models| models.statuses());
        for served in statuses.into_iter().filter_map(|one| one.look) {
            // What cannot be made is told to who asks for it.
            let _ = served.grammars();
        }
    }

    fn set(&self, status: Status) {
        *self.status.write().unwrap_or_else(PoisonError::into_inner) = status;
    }

    /// No new requests; those under way end.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether the end has begun.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Requests that run or wait, for models that are being loaded as well.
    pub fn unfinished(&self) -> usize {
        let models = self.models().ok();
        let statuses = models.map_or_else(Vec::new, |models| models.statuses());
        statuses.iter().map(unfinished).sum()
    }

    /// Reason the engine of a model that was ready takes no more requests.
    pub fn failure(&self) -> Option<EngineError> {
        self.models().ok()?.failure()
    }

    /// The models, or why there are none.
    pub(crate) fn models(&self) -> Result<Arc<Models>, ApiError> {
        match &*self.status.read().unwrap_or_else(PoisonError::into_inner) {
            Status::Ready(models) => Ok(Arc::clone(models)),
            Status::Loading => Err(ApiError::new(
                Kind::Loading,
                "the model is being loaded; try again in a moment",
            )),
            Status::Failed(reason) => Err(ApiError::new(
                Kind::EngineFailed,
                format!("the model could not be loaded: {reason}"),
            )),
        }
    }

    /// Number of the model for a request that names one, or none. A model that is alone answers to any name, unless the operator
    /// is strict.
    pub(crate) fn choose(&self, models: &Models, name: Option<&str>) -> Result<usize, ApiError> {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return Ok(0);
        };
        if let Some(number) = models.position(name) {
            return Ok(number);
        }
        let names = models.names();
        if names.len() == 1 && !self.config.strict_model {
            return Ok(0);
        }
        let shown: String = name.chars().take(128).collect();
        Err(ApiError {
            param: Some("model".to_owned()),
            ..ApiError::new(
                Kind::UnknownModel,
                format!(
                    "there is no model `{}` here; this server has `{}`",
                    shown.escape_debug(),
                    names.join("`, `")
                ),
            )
        })
    }

    /// The facts about a model, loaded or not.
    pub(crate) fn told(&self, name: Option<&str>) -> Result<models::Status, ApiError> {
        let models = self.models()?;
        let number = self.choose(&models, name)?;
        Ok(models.statuses().swap_remove(number))
    }

    /// The model for a request with this key, in memory: at once, or when it has been loaded. `later` is called where it has to be
    /// waited for.
    pub(crate) async fn model(
        &self,
        name: Option<&str>,
        key: Option<&str>,
        later: impl FnOnce(),
    ) -> Result<Use, ApiError> {
        let models = self.models()?;
        let number = self.choose(&models, name)?;
        let mut pending = match models.ask(number) {
            Ok(Asked::Now(served)) => return Ok(served),
            Ok(Asked::Later(_)) | Err(_) if self.is_draining() => return Err(draining()),
            Ok(Asked::Later(pending)) => pending,
            Err(error) => {
                if error.kind == Kind::QueueFull {
                    self.metrics.rejected("queue_full");
                }
                return Err(error);
            }
        };
        let _place = match self.config.lanes {
            Lanes::Key => {
                let status = models.statuses().swap_remove(number);
                let queue = status.max_unfinished.saturating_sub(status.parallel);
                let limit = self.lane_limit(queue);
                limit.map(|most| self.enter(key, 1, most)).transpose()?
            }
            // Who the user is shows when the request is read.
            Lanes::User => None,
        };
        later();
        let Some(most) = self.config.queue_timeout else {
            return pending.wait().await;
        };
        let told = tokio::time::timeout(most, pending.wait()).await;
        told.unwrap_or_else(|_| {
            self.metrics.rejected("timeout");
            Err(ApiError::new(
                Kind::QueueTimeout,
                format!(
                    "the request's model was not in memory within {} s; try again later",
                    most.as_secs()
                ),
            ))
        })
    }

    /// Runs something that takes a core for a while, apart from the threads that serve connections.
    pub(crate) async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let _permit = self.permits.acquire().await;
        tokio::task::spawn_blocking(work).await.map_err(|_| {
            ApiError::new(
                Kind::EngineFailed,
                "this request ran into a mistake in the server; its log says more",
            )
        })
    }

    /// Begins to answer.
    pub(crate) async fn answer(
        &self,
        served: &Use,
        mut ask: Ask,
        call: &Call,
        call_prefix: &'static str,
    ) -> Result<(Answer, Notes), ApiError> {
        if self.is_draining() {
            return Err(draining());
        }
        ask.check()?;
        // Whoever has a key of his own shares nothing with others: neither his turn nor what tells of his prompts.
        let lane = match self.config.lanes {
            Lanes::Key => call.key.clone(),
            Lanes::User => ask.user.take().or_else(|| call.key.clone()),
        };
        if self.config.keys.len() > 1 && !self.config.share_prefixes {
            // Beside what the request says, not instead: nobody gets at another's by naming it.
            let (key, asked) = (call.key.as_deref(), ask.cache_salt.as_deref());
            ask.cache_salt = Some(format!("{}\0{}", key.unwrap_or(""), asked.unwrap_or("")));
        }
        let its = served.clone();
        let tool_grammar = self.config.tool_grammar;
        let deadline = self.deadline(call)?;
        let engine = served.model.chat.engine();
        // Whoever is to be turned away costs no core before.
        let places = self.line_up(served, lane.as_deref(), ask.answers())?;
        let reserved = reserve(engine, ask.answers());
        let prepared = match reserved {
            Ok(reserved) => self
                .compute(move || prepare(&its, &ask, tool_grammar))
                .await?
                .map(|prepared| (reserved, prepared)),
            Err(busy) => Err(busy),
        };
        let started = prepared.and_then(|(reserved, (mut prepared, notes))| {
            for one in &mut prepared {
                one.request.lane = lane.as_deref().map(lane_id);
                one.request.deadline = deadline;
                one.request.queue_limit = self.config.queue_timeout;
            }
            let mut answer = Answer::start(
                served,
                prepared.into_iter().zip(reserved).collect(),
                places,
                &self.metrics,
                call.arrived,
                call_prefix,
                &call.cache,
            )?;
            answer.show(&self.watch, |prompt_tokens, generated, cancels| Entry {
                request_id: call.request_id.clone(),
                lane: lane.clone(),
                key: call.key.clone(),
                route: call.route,
                arrived: call.arrived,
                prompt_tokens,
                generated,
                cancels,
            });
            Ok((answer, notes))
        });
        started.map_err(|mut error| {
            match error.kind {
                Kind::QueueFull => {
                    self.metrics.rejected("queue_full");
                    error.retry_after = Some(self.wait_estimate(served));
                }
                Kind::ContextLength => self.metrics.rejected("too_long"),
                _ => {}
            }
            error
        })
    }

    /// Places in the line of a lane for so many answers, where lanes have a limit. Those that can be started at once need not wait.
    fn line_up(
        &self,
        served: &Served,
        lane: Option<&str>,
        answers: usize,
    ) -> Result<Vec<Place>, ApiError> {
        let engine = served.model.chat.engine();
        let config = engine.limits().config();
        let side_by_side = config.max_sequences;
        let Some(most) = self.lane_limit(config.max_unfinished.saturating_sub(side_by_side)) else {
            return Ok(Vec::new());
        };
        if answers > most.saturating_add(side_by_side) {
            return Err(ApiError::new(
                Kind::InvalidValue,
                format!(
                    "a request for {answers} answers; {most} of one client may wait and {side_by_side} run (--lane-queue, \
                     --parallel): ask for fewer at a time"
                ),
            ));
        }
        let free = side_by_side.saturating_sub(engine.snapshot().stats.running);
        self.enter(lane, answers, most.saturating_add(free))
            .map_err(|mut error| {
                error.retry_after = Some(self.wait_estimate(served));
                error
            })
    }

    /// The most answers of a lane that may wait in a queue of so many; `None` if there is no limit but the queue's.
    fn lane_limit(&self, queue: usize) -> Option<usize> {
        let usual = || self.config.has_lanes().then(|| lanes::usual_most(queue));
        self.config.lane_queue.or_else(usual)
    }

    fn enter(
        &self,
        lane: Option<&str>,
        answers: usize,
        most: usize,
    ) -> Result<Vec<Place>, ApiError> {
        let entered = self.lines.enter(lane.unwrap_or(""), answers, most);
        entered.map_err(|Full { waiting }| {
            self.metrics.rejected("lane_full");
            ApiError::new(
                Kind::QueueFull,
                format!(
                    "{waiting} answers of yours wait, as many as one client may have waiting; try again later"
                ),
            )
        })
    }

    /// The time the operator allows, or a proxy in front of us, whichever is less.
    fn deadline(&self, call: &Call) -> Result<Option<Duration>, ApiError> {
        let most = self.config.request_timeout;
        let Some(header) = call.parts.headers.get("x-request-timeout") else {
            return Ok(most);
        };
        let seconds = header
            .to_str()
            .ok()
            .and_then(|text| text.parse::<f64>().ok());
        let asked = seconds
            .filter(|s| *s > 0.0)
            .and_then(|s| Duration::try_from_secs_f64(s).ok())
            .ok_or_else(|| {
                ApiError::invalid(
                    "x-request-timeout",
                    "x-request-timeout is a number of seconds above 0",
                )
            })?;
        Ok(Some(most.map_or(asked, |most| most.min(asked))))
    }

    /// Time until there is room: what waits, at the pace that tokens have come at.
    fn wait_estimate(&self, served: &Served) -> Duration {
        // An answer is taken to be this long where nobody knows.
        const USUAL_TOKENS: f64 = 128.0;
        let engine = served.model.chat.engine();
        let stats = engine.snapshot().stats;
        let side_by_side = engine.limits().config().max_sequences as f64;
        let gap = self.metrics.inter_token.mean().unwrap_or(0.0);
        let seconds = (stats.waiting + 1) as f64 / side_by_side * USUAL_TOKENS * gap;
        Duration::from_secs_f64(seconds.clamp(1.0, 60.0))
    }
}

/// Requests of a model that run or wait.
pub(crate) fn unfinished(status: &models::Status) -> usize {
    let stats = &status.snapshot.stats;
    stats.running + stats.waiting + status.waiting
}

fn draining() -> ApiError {
    ApiError::new(Kind::Draining, "this server is shutting down; ask another")
}

/// Remarks for a client besides the answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notes {
    /// Parts of the request that were passed over.
    pub(crate) ignored: Vec<String>,
}

/// Room for all answers of a request, or for none.
fn reserve(engine: &EngineHandle, answers: usize) -> Result<Vec<Reservation>, ApiError> {
    let most = engine.limits().config().max_unfinished;
    if answers > most {
        return Err(ApiError::new(
            Kind::InvalidValue,
            format!(
                "a request for {answers} answers; at most {most} run or wait here (--parallel, --queue): ask for fewer at a time"
            ),
        ));
    }
    let reserved: Result<_, _> = (0..answers).map(|_| engine.reserve()).collect();
    Ok(reserved?)
}

/// Renders, encodes and compiles. Takes a core for a while.
fn prepare(
    served: &Served,
    ask: &Ask,
    tool_grammar: bool,
) -> Result<(Vec<Prepared>, Notes), ApiError> {
    let chat = &served.model.chat;
    let sampling = ask.sampling.resolve(&served.model.sampling)?;
    let mut generation = Generation {
        sampling,
        max_tokens: None,
        stop: ask.stop.clone(),
        ignore_eos: ask.ends == Ends::Never,
        logprobs: ask.logprobs,
        constraint: None,
        without_drafts: !ask.draft,
    };
    let mut notes = Notes::default();
    let mut prepared = Vec::new();
    let seed = generation.sampling.seed;
    let prompts: Vec<Vec<TokenId>> = match &ask.prompt {
        Prompt::Chat(conversation) => {
            let prompt = chat.prompt(conversation)?;
            let syntax = AnswerSyntax {
                format: ask.format.clone(),
                tools: (!conversation.tools.is_empty() && tool_grammar).then(|| Tools {
                    tools: &conversation.tools,
                    choice: ask.tool_choice.clone(),
                    parallel: ask.parallel_calls,
                }),
                thinking: if conversation.thinking {
                    Thinking::Allowed {
                        budget: ask.thinking_budget,
                    }
                } else {
                    Thinking::Off
                },
                start: Start::after(chat.tokenizer(), &prompt),
            };
            constrain(served, &syntax, &mut generation, &mut notes)?;
            vec![prompt]
        }
        Prompt::Texts(texts) => {
            let syntax = AnswerSyntax {
                format: ask.format.clone(),
                ..AnswerSyntax::default()
            };
            if ask.format.is_some() {
                constrain(served, &syntax, &mut generation, &mut notes)?;
            }
            let encode = |text: &Text| match text {
                Text::Plain(text) => chat.tokenizer().encode_prompt(text, Specials::Ignore),
                Text::Tokens(tokens) => tokens.clone(),
            };
            texts.iter().map(encode).collect()
        }
    };
    let limits = chat.engine().limits();
    for prompt in prompts {
        let room = limits.room(prompt.len());
        if room == 0 {
            return Err(too_long(prompt.len(), limits.config().context));
        }
        generation.max_tokens = Some(ask.max_tokens.unwrap_or(room).min(room));
        for n in 0..ask.n {
            generation.sampling.seed = seed.wrapping_add(n as u64);
            prepared.push(match &ask.prompt {
                Prompt::Chat(conversation) => {
                    chat.prepare(prompt.clone(), conversation, &generation)
                }
                Prompt::Texts(_) => chat.prepare_text(prompt.clone(), &generation),
            });
        }
    }
    for one in &mut prepared {
        one.request.cache_salt = ask.cache_salt.as_deref().map(salt);
        one.request.prompt_logprobs = ask.prompt_logprobs;
        one.request.ignore_eos |= ask.ends == Ends::Shown;
        limits
            .check(&one.request)
            .map_err(|rejected: Rejected| ApiError::from(rejected))?;
    }
    Ok((prepared, notes))
}

fn constrain(
    served: &Served,
    syntax: &AnswerSyntax<'_>,
    generation: &mut Generation,
    notes: &mut Notes,
) -> Result<(), ApiError> {
    let needs_nothing = syntax.format.is_none()
        && syntax.tools.is_none()
        && !matches!(syntax.thinking, Thinking::Allowed { budget: Some(_) });
    if needs_nothing || generation.ignore_eos {
        return Ok(());
    }
    let compiled = served.grammars()?.compile(syntax);
    let compiled = compiled.map_err(|error| ApiError {
        param: Some(if syntax.format.is_some() {
            "response_format".to_owned()
        } else {
            "tools".to_owned()
        }),
        ..ApiError::new(Kind::UnsupportedSchema, error.to_string())
    })?;
    if let Some(compiled) = compiled {
        generation.constraint = Some(compiled.source);
        notes.ignored.extend(compiled.ignored);
    }
    Ok(())
}

/// The lane of somebody's requests.
fn lane_id(name: &str) -> LaneId {
    let [a, b, c, d, e, f, g, h, ..] = salt(name);
    LaneId(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}

/// Sixteen bytes of a tenant's name.
fn salt(name: &str) -> [u8; 16] {
    use sha2::Digest;
    let digest = sha2::Sha256::digest(name.as_bytes());
    let mut salt = [0; 16];
    salt.copy_from_slice(&digest[..16]);
    salt
}
