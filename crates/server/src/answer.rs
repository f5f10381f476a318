//! The one stream of events that all dialects encode.

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use carat_engine::{
    Cancel, EngineError, Event, RequestId, Reservation, Usage,
    chat::{AnswerReader, ChatEvent, ChatFinish, Prepared, Token},
};
use carat_text::{Part, TokenId, ToolCall, parts::InvalidCall};
use tokio::time::timeout;

use crate::{
    cache::{Asked, CacheNote},
    error::{ApiError, Kind},
    ids,
    lanes::Place,
    mailbox::{Receiver, Sender, mailbox},
    metrics::Metrics,
    models::Use,
    watch::{Entry, Listed, Watch},
};

/// A piece of one choice's answer.
#[derive(Clone, Debug)]
pub(crate) enum Output {
    Content {
        text: String,
        /// The tokens it was made of, if their log-probabilities were asked for.
        tokens: Vec<Token>,
    },
    Thinking(String),
    /// A call has begun; with [`Answer::stream_calls`].
    CallStarted {
        id: String,
        name: String,
    },
    /// The next piece of its arguments, as JSON text.
    CallArguments(String),
    /// Whole, with the id that its beginning had.
    Call(ToolCall),
    /// If one has begun, its pieces break off here.
    InvalidCall(InvalidCall),
    /// The last.
    Finished(Finished),
    /// The last, instead.
    Failed(ApiError),
}

/// End of an answer.
#[derive(Clone, Debug)]
pub(crate) struct Finished {
    pub(crate) reason: ChatFinish,
    /// The stop string that ended it.
    pub(crate) stop: Option<String>,
    pub(crate) usage: Usage,
    /// Of the generated tokens, those of thoughts.
    pub(crate) thinking_tokens: usize,
    /// Log probability of each token of the prompt but the first, if asked for.
    pub(crate) prompt: Vec<Token>,
    /// Tokens at the end that came to no text, such as a mark, if their log-probabilities were asked for.
    pub(crate) unshown: Vec<Token>,
}

type Sent = (usize, Result<Event, EngineError>);

/// The answers to one request, under way. Dropping it cancels what is left.
pub(crate) struct Answer {
    events: Receiver<Sent>,
    /// Events that have come and are read, so that the list is made once.
    arrived: Vec<Sent>,
    choices: Vec<Choice>,
    open: usize,
    started: Instant,
    metrics: Arc<Metrics>,
    /// Seed of the first choice.
    pub(crate) seed: u64,
    /// Tokens of each prompt.
    pub(crate) prompt_tokens: usize,
    /// Prefix of the ids of calls.
    call_prefix: &'static str,
    /// Tokens of all choices so far.
    generated: Arc<AtomicUsize>,
    /// On the list of requests under way.
    listed: Option<Listed>,
    cache: CacheNote,
    /// The prompt that `cache` is told of.
    asked: Asked,
    /// The model stays in memory until the answer has ended.
    _served: Use,
}

/// Soundness of a call that is being written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Calls {
    /// A grammar holds it: what has been written stays sound.
    Constrained,
    /// Known at its end.
    Free,
}

struct Choice {
    reader: AnswerReader,
    cancel: Cancel,
    is_open: bool,
    wants_tokens: bool,
    calls: Calls,
    /// Id of the call that has begun.
    call_id: Option<String>,
    /// Log probabilities of the prompt, if asked for.
    prompt: Vec<Token>,
    /// Tokens that have not shown up as text yet.
    pending: Vec<Token>,
    pending_count: usize,
    thinking_tokens: usize,
    in_thought: bool,
}

impl Answer {
    /// Submits all choices. If one is refused, none runs. Each gives its place in the line back when it is started.
    pub(crate) fn start(
        served: &Use,
        prepared: Vec<(Prepared, Reservation)>,
        places: Vec<Place>,
        metrics: &Arc<Metrics>,
        arrived: Instant,
        call_prefix: &'static str,
        cache: &CacheNote,
    ) -> Result<Answer, ApiError> {
        let marks = served.model.chat.tokenizer().vocab().marks();
        let first = prepared.first().map(|(first, _)| &first.request);
        let (sender, events) = mailbox();
        let mut answer = Answer {
            events,
            arrived: Vec::new(),
            choices: Vec::with_capacity(prepared.len()),
            open: 0,
            started: arrived,
            metrics: Arc::clone(metrics),
            seed: first.map_or(0, |request| request.sampling.seed),
            prompt_tokens: prepared
                .iter()
                .map(|(one, _)| one.request.prompt.len())
                .max()
                .unwrap_or(0),
            call_prefix,
            generated: Arc::default(),
            listed: None,
            cache: cache.clone(),
            asked: Asked::new(
                first.map_or(&[], |request| &request.prompt),
                marks.turn_start,
            ),
            _served: served.clone(),
        };
        let mut before: Option<(Arc<[TokenId]>, RequestId)> = None;
        let mut places = places.into_iter();
        for (n, (prepared, reserved)) in prepared.into_iter().enumerate() {
            let Prepared {
                mut request,
                reader,
            } = prepared;
            // Several answers to one prompt wait for the first of them to compute it.
            match &before {
                Some((prompt, first)) if **prompt == *request.prompt => {
                    request.after = Some(*first);
                }
                _ => before = None,
            }
            let prompt: Option<Arc<[TokenId]>> =
                before.is_none().then(|| request.prompt.as_slice().into());
            let wants_tokens = request.logprobs.is_some();
            let calls = match request.constraint {
                Some(_) => Calls::Constrained,
                None => Calls::Free,
            };
            let observed = Observed {
                metrics: Arc::clone(metrics),
                generated: Arc::clone(&answer.generated),
                arrived,
                place: places.next(),
            };
            let sink = sink(n, sender.clone(), observed);
            let engine = served.model.chat.engine();
            let cancel = engine.submit_reserved(reserved, request, Box::new(sink))?;
            if let Some(prompt) = prompt {
                before = Some((prompt, cancel.id()));
            }
            answer.open += 1;
            answer.choices.push(Choice {
                reader,
                cancel,
                is_open: true,
                wants_tokens,
                calls,
                call_id: None,
                prompt: Vec::new(),
                pending: Vec::new(),
                pending_count: 0,
                thinking_tokens: 0,
                in_thought: false,
            });
        }
        Ok(answer)
    }

    /// Lists the request among those under way, as long as it is.
    pub(crate) fn show(
        &mut self,
        watch: &Arc<Watch>,
        entry: impl FnOnce(usize, Arc<AtomicUsize>, Vec<Cancel>) -> Entry,
    ) {
        let cancels = self.choices.iter().map(|choice| choice.cancel.clone());
        let entry = entry(
            self.prompt_tokens,
            Arc::clone(&self.generated),
            cancels.collect(),
        );
        self.listed = Some(watch.list(entry));
    }

    /// Gives calls piece by piece, where a grammar holds them to their notation: others come whole, when they are known to be sound.
    pub(crate) fn stream_calls(&mut self) {
        for choice in &mut self.choices {
            if choice.calls == Calls::Constrained {
                choice.reader.stream_calls();
            }
        }
    }

    /// Choices of the request.
    pub(crate) fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Ends the answers early; what they came to is still told.
    pub(crate) fn cancel(&self) {
        for choice in self.choices.iter().filter(|c| c.is_open) {
            choice.cancel.cancel();
        }
    }

    /// Everything that has come about since the last call, at least one output; `None` after the end.
    pub(crate) async fn next(&mut self) -> Option<Vec<(usize, Output)>> {
        let mut outputs = Vec::new();
        while outputs.is_empty() {
            if self.open == 0 {
                return None;
            }
            if !self.events.take(&mut self.arrived).await {
                let gone = ApiError::new(Kind::EngineFailed, "the engine has stopped");
                self.open = 0;
                return Some(vec![(0, Output::Failed(gone))]);
            }
            let mut arrived = std::mem::take(&mut self.arrived);
            for event in arrived.drain(..) {
                self.take(event, &mut outputs);
            }
            self.arrived = arrived;
        }
        Some(outputs)
    }

    /// As [`Answer::next`], giving up after a while.
    pub(crate) async fn wait(&mut self, patience: Duration) -> Wait {
        match timeout(patience, self.next()).await {
            Ok(Some(outputs)) => Wait::Outputs(outputs),
            Ok(None) => Wait::Ended,
            Err(_) => Wait::Nothing,
        }
    }

    fn take(&mut self, (n, event): Sent, outputs: &mut Vec<(usize, Output)>) {
        let choice = &mut self.choices[n];
        if !choice.is_open {
            return;
        }
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                choice.is_open = false;
                self.open -= 1;
                self.metrics.finished("error");
                if let Some(listed) = &self.listed {
                    listed.fault(&error.to_string());
                }
                outputs.push((n, Output::Failed(error.into())));
                return;
            }
        };
        let mut read = Vec::new();
        choice.reader.read(event, &mut read);
        for event in read {
            match event {
                ChatEvent::Started(counts) => {
                    let is_told = self.cache.tell(counts, &self.asked) && counts.miss.is_some();
                    if let Some(listed) = self.listed.as_ref().filter(|_| is_told) {
                        listed.miss(counts, self.cache.turn());
                    }
                }
                ChatEvent::PromptToken(token) => choice.prompt.push(token),
                ChatEvent::Token(token) => choice.token(token),
                ChatEvent::Part(part) => {
                    outputs.push((n, choice.part(part, self.call_prefix, &self.metrics)));
                }
                ChatEvent::Finished { reason, usage } => {
                    choice.is_open = false;
                    self.open -= 1;
                    let finished = choice.finish(reason, usage);
                    observe(&self.metrics, &finished, self.started);
                    let nothing_came = finished.usage.counts.generated_tokens == 0;
                    outputs.push((
                        n,
                        match reason {
                            ChatFinish::Deadline if nothing_came => {
                                self.metrics.rejected("timeout");
                                Output::Failed(ApiError::new(
                                    Kind::QueueTimeout,
                                    "the request's time was up before its first token; try again later",
                                ))
                            }
                            _ => Output::Finished(finished),
                        },
                    ));
                }
            }
        }
        if choice.is_open && choice.reader.has_stopped() {
            choice.cancel.cancel();
        }
    }
}

/// Result of waiting.
pub(crate) enum Wait {
    Outputs(Vec<(usize, Output)>),
    Ended,
    Nothing,
}

impl Drop for Answer {
    fn drop(&mut self) {
        if self.open > 0 {
            self.metrics.disconnects.fetch_add(1, Ordering::Relaxed);
            // A sink is asked with the next token only, and a prompt may be long.
            self.cancel();
        }
    }
}

impl Choice {
    fn token(&mut self, token: Token) {
        self.pending_count += 1;
        if self.wants_tokens {
            self.pending.push(token);
        }
    }

    fn part(&mut self, part: Part, call_prefix: &str, metrics: &Metrics) -> Output {
        let tokens = std::mem::take(&mut self.pending);
        let count = std::mem::take(&mut self.pending_count);
        self.in_thought = matches!(part, Part::Thinking(_));
        match part {
            Part::Content(text) => Output::Content { text, tokens },
            Part::Thinking(text) => {
                self.thinking_tokens += count;
                Output::Thinking(text)
            }
            Part::CallStarted(name) => {
                let id = ids::id(call_prefix);
                self.call_id = Some(id.clone());
                Output::CallStarted { id, name }
            }
            Part::CallArguments(json) => Output::CallArguments(json),
            Part::ToolCall(mut call) => {
                let begun = self.call_id.take();
                call.id = Some(begun.unwrap_or_else(|| ids::id(call_prefix)));
                Output::Call(call)
            }
            Part::InvalidCall(call) => {
                self.call_id = None;
                metrics.invalid_calls.fetch_add(1, Ordering::Relaxed);
                Output::InvalidCall(call)
            }
        }
    }

    fn finish(&mut self, reason: ChatFinish, usage: Usage) -> Finished {
        if self.in_thought {
            self.thinking_tokens += self.pending_count;
        }
        Finished {
            reason,
            stop: self.reader.stop_string().map(str::to_owned),
            usage,
            thinking_tokens: self.thinking_tokens,
            prompt: std::mem::take(&mut self.prompt),
            unshown: std::mem::take(&mut self.pending),
        }
    }
}

/// State of a choice that is kept up as its events come, whoever reads them and when.
struct Observed {
    metrics: Arc<Metrics>,
    generated: Arc<AtomicUsize>,
    arrived: Instant,
    /// Until it is started.
    place: Option<Place>,
}

/// Pushes a choice's events to whoever encodes them, and notes when it starts and when tokens come.
fn sink(
    n: usize,
    sender: Sender<Sent>,
    mut observed: Observed,
) -> impl FnMut(Result<Event, EngineError>) -> ControlFlow<()> + Send {
    let mut last: Option<Instant> = None;
    move |event| {
        match &event {
            Ok(Event::Started { .. }) => drop(observed.place.take()),
            Ok(Event::Token { .. }) => {
                observed.generated.fetch_add(1, Ordering::Relaxed);
                let (now, metrics) = (Instant::now(), &observed.metrics);
                match last.replace(now) {
                    None => metrics.first_token.time(now - observed.arrived),
                    Some(before) => metrics.inter_token.time(now - before),
                }
            }
            _ => {}
        }
        if sender.send((n, event)) {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    }
}

fn observe(metrics: &Metrics, finished: &Finished, started: Instant) {
    let usage = &finished.usage;
    metrics.finished(match finished.reason {
        ChatFinish::Stop => "stop",
        ChatFinish::Length => "length",
        ChatFinish::ToolCalls => "tool_calls",
        ChatFinish::Cancelled => "abort",
        ChatFinish::Deadline => "deadline",
    });
    metrics.request.time(started.elapsed());
    metrics.queue.time(usage.queue);
    metrics.prefill.time(usage.prefill);
    metrics.decode.time(usage.decode);
    metrics.prompt_tokens.add(usage.counts.prompt_tokens as f64);
    metrics
        .generated_tokens
        .add(usage.counts.generated_tokens as f64);
    if let Some(miss) = usage.counts.miss {
        metrics.missed(miss);
    }
}
