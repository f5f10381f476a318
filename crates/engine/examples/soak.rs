//! Random everything on the CPU for as long as one likes: arrivals, cancellations, deadlines, masks, refused batches, pages that
//! run out.
//!
//!     cargo run --release -p carat-engine --example soak [MINUTES] [THREADS]
//!
//! Every answer is compared with the one that the same request gets alone, token by token: the mode is batch-invariant, so company
//! is no excuse. Fails on another token, on memory that grows, and on threads that are left behind.
#![expect(clippy::print_stdout, reason = "printing what happened is its purpose")]

use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{
    Constraint, ConstraintSource, EngineConfig, EngineHandle, Event, FinishReason, LaneId,
    ModelFacts, Rejected, Request, TokenStream,
};
use carat_gguf::{Gguf, quant::SplitMix64};
use carat_model::{
    Model, TokenId,
    backend::{
        Backend, BackendError, Batch, Batching, Draw, Executor, HostPageId, Interrupt, KvGroup,
        Outputs, PageMove, Ticket,
    },
    gemma4,
    plan::{Plan, Value},
    sampling::{Sampling, TokenMask},
};

const CONTEXT: usize = 512;
const KINDS: usize = 40;
const SIDE_BY_SIDE: usize = 8;
/// Streams that are open at a time, at most: more than run side by side.
const OPEN: usize = 20;
/// Growth of memory from the first third of the time to the end.
const GROWTH: f64 = 1.05;

/// Engines of this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One request at a time, without faults.
    Solo,
    Soak,
}

/// Allows two tokens in three, others at each place.
#[derive(Clone)]
struct Sieve {
    seed: usize,
    accepted: usize,
    vocab: usize,
}

impl Constraint for Sieve {
    fn accept(&mut self, _: TokenId) {
        self.accepted += 1;
    }

    fn mask(&mut self, mask: &mut TokenMask) {
        for token in 0..self.vocab {
            if !(token * 7 + self.seed + self.accepted).is_multiple_of(3) {
                mask.allow(token as TokenId);
            }
        }
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Refuses a batch now and then.
struct Faulty {
    executor: Box<dyn Executor>,
    random: SplitMix64,
}

impl Executor for Faulty {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        if self.random.below(50) == 0 {
            let what = "a fault, as this program wants".to_owned();
            return Err(BackendError::Unsupported { what });
        }
        self.executor.submit(batch)
    }

    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        self.executor.draw(ticket, draws)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        self.executor.collect(ticket, out)
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        self.executor.move_pages(moves)
    }

    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError> {
        self.executor.host_page(group, place)
    }

    fn interrupt_by(&mut self, interrupt: Interrupt) {
        self.executor.interrupt_by(interrupt);
    }

    fn probed(&self, value: Value) -> Option<&[f32]> {
        self.executor.probed(value)
    }
}

fn request(kind: usize, vocab: usize) -> Request {
    let length = 2 + kind * 61 % 300;
    // Every fourth begins like others.
    let family = if kind.is_multiple_of(4) { 1 } else { kind };
    let token = |i: usize| {
        let own = if i < length / 2 { family } else { kind };
        (300 + (i * i * 3 + own * 977) % 3500) as TokenId
    };
    let seed = kind;
    let constraint = ConstraintSource::new(move || {
        Box::new(Sieve {
            seed,
            accepted: 0,
            vocab,
        })
    });
    Request {
        max_tokens: Some(4 + kind * 5 % 60),
        sampling: Sampling {
            temperature: (kind % 3) as f32 * 0.7,
            repeat_penalty: if kind % 5 == 1 { 1.2 } else { 1.0 },
            seed: kind as u64,
            ..Sampling::default()
        },
        constraint: (kind % 3 == 2).then_some(constraint),
        lane: Some(LaneId(kind as u64 % 3)),
        ignore_eos: kind % 2 == 1,
        ..Request::new((0..length).map(token).collect())
    }
}

fn start(
    plan: &Plan,
    model: &Model,
    threads: Option<usize>,
    engine: Kind,
) -> Result<EngineHandle, Box<dyn Error>> {
    let is_soak = engine == Kind::Soak;
    let side_by_side = if is_soak { SIDE_BY_SIDE } else { 1 };
    let facts = ModelFacts::from(plan);
    let mut config = EngineConfig::comfortable(CONTEXT, side_by_side, 256, facts);
    config.batching = Batching::Invariant;
    if is_soak {
        config.max_unfinished = OPEN;
        config.prefill_rows = 90;
        // A third of what they would like to have.
        config.pages.full = SIDE_BY_SIDE * CONTEXT / 32 / 3;
    }
    let backend = CpuBackend::new(&CpuConfig {
        threads,
        ..CpuConfig::default()
    });
    let (plan, weights) = (plan.clone(), Arc::clone(&model.weights));
    let engine = EngineHandle::start_with(config, facts, move |limits| {
        let executor = backend.compile(&plan, weights, &limits.compile_options())?;
        Ok(if is_soak {
            let random = SplitMix64::new(11);
            Box::new(Faulty { executor, random })
        } else {
            executor
        })
    });
    Ok(engine?)
}

/// Of this process: resident bytes, and threads.
fn process() -> Result<(f64, usize), Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let number = |name: &str| -> Result<usize, Box<dyn Error>> {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|rest| rest.split_whitespace().next());
        Ok(number.ok_or("this system does not tell")?.parse()?)
    };
    Ok((number("VmRSS:")? as f64 * 1024.0, number("Threads:")?))
}

/// Threads of this process once there are no more than `expected`, or after five seconds: the last one to end is nobody's to wait
/// for.
fn settled_threads(expected: usize) -> Result<usize, Box<dyn Error>> {
    let begun = Instant::now();
    loop {
        let (_, threads) = process()?;
        if threads <= expected || begun.elapsed() > Duration::from_secs(5) {
            return Ok(threads);
        }
        std::thread::yield_now();
    }
}

/// A stream under way, and what has come of it.
struct Open {
    kind: usize,
    stream: TokenStream,
    tokens: Vec<TokenId>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let minutes: f64 = arguments.next().map_or(Ok(30.0), |text| text.parse())?;
    let threads = arguments.next().map(|text| text.parse()).transpose()?;
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/pip-q8_0.gguf");
    let model = Model::load(Arc::new(Gguf::open(Path::new(demo))?))?;
    let plan = gemma4::plan(&model);
    let vocab = plan.vocab();

    let alone = answers_alone(&plan, &model, threads)?;
    let (_, threads_before) = process()?;

    let engine = start(&plan, &model, threads, Kind::Soak)?;
    let mut random = SplitMix64::new(5);
    let mut open: Vec<Open> = Vec::new();
    let mut ends: BTreeMap<String, usize> = BTreeMap::new();
    let (time, begun) = (Duration::from_secs_f64(minutes * 60.0), Instant::now());
    let (mut warm, mut largest, mut slowest) = (None, 0.0_f64, Duration::ZERO);
    while begun.elapsed() < time || !open.is_empty() {
        let goes_on = begun.elapsed() < time;
        if goes_on && open.len() < OPEN && random.below(3) == 0 {
            let kind = random.below(KINDS);
            let mut asked = request(kind, vocab);
            if random.below(20) == 0 {
                asked.deadline = Some(Duration::from_millis(random.below(400) as u64));
            }
            // Those that have left count until the engine has heard of it.
            match engine.submit(asked) {
                Ok(stream) => open.push(Open {
                    kind,
                    stream,
                    tokens: Vec::new(),
                }),
                Err(Rejected::Busy { .. }) => {
                    *ends.entry("turned away".to_owned()).or_default() += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if !open.is_empty() && random.below(60) == 0 {
            let left = random.below(open.len());
            if random.below(2) == 0 {
                drop(open.swap_remove(left));
                *ends.entry("left".to_owned()).or_default() += 1;
            } else {
                slowest = slowest.max(cancel(open.swap_remove(left), &alone)?);
                *ends.entry("cancelled".to_owned()).or_default() += 1;
            }
        }
        let mut i = 0;
        while i < open.len() {
            let one = &mut open[i];
            let mut end = None;
            while let Some(event) = one.stream.wait(Duration::from_micros(50)) {
                match event {
                    Ok(Event::Token { id, .. }) => one.tokens.push(id),
                    Ok(Event::Started { .. }) => {}
                    Ok(Event::PromptToken { .. }) => return Err("nobody asked for it".into()),
                    Ok(Event::Finished { reason, .. }) => end = Some(Ok(reason)),
                    Err(error) => end = Some(Err(error)),
                }
            }
            let Some(end) = end else {
                i += 1;
                continue;
            };
            let Open { kind, tokens, .. } = open.swap_remove(i);
            check(&tokens, &alone[kind], kind)?;
            let name = match end {
                Ok(FinishReason::Deadline) => "deadline",
                Ok(_) if tokens.len() < alone[kind].len() => {
                    return Err(format!("request {kind} ended early").into());
                }
                Ok(_) => "finished",
                Err(_) => "failed by a fault",
            };
            *ends.entry(name.to_owned()).or_default() += 1;
        }
        let (resident, _) = process()?;
        if begun.elapsed() > time / 3 {
            warm.get_or_insert(resident);
            largest = largest.max(resident);
        }
    }
    let totals = engine.snapshot().totals;
    drop(engine);
    let threads_after = settled_threads(threads_before)?;
    println!("{ends:?}");
    println!("{totals:?}");
    println!("slowest cancellation {slowest:?}");
    let warm = warm.ok_or("too short a time")?;
    let mib = f64::from(1 << 20);
    println!(
        "resident {:.1} MiB after a third, {:.1} at most",
        warm / mib,
        largest / mib
    );
    println!("threads {threads_before} before, {threads_after} after");
    if largest > GROWTH * warm || threads_after != threads_before {
        return Err("memory grew, or threads were left".into());
    }
    Ok(())
}

/// The answers to every kind of request when nothing else runs.
fn answers_alone(
    plan: &Plan,
    model: &Model,
    threads: Option<usize>,
) -> Result<Vec<Vec<TokenId>>, Box<dyn Error>> {
    let solo = start(plan, model, threads, Kind::Solo)?;
    let mut alone = Vec::new();
    for kind in 0..KINDS {
        let mut tokens = Vec::new();
        for event in solo.submit(request(kind, plan.vocab()))? {
            if let Event::Token { id, .. } = event? {
                tokens.push(id);
            }
        }
        alone.push(tokens);
    }
    Ok(alone)
}

/// Ends a stream early; returns how long that took.
fn cancel(one: Open, alone: &[Vec<TokenId>]) -> Result<Duration, Box<dyn Error>> {
    let Open {
        kind,
        mut stream,
        mut tokens,
    } = one;
    let begun = Instant::now();
    stream.cancel();
    for event in &mut stream {
        if let Ok(Event::Token { id, .. }) = event {
            tokens.push(id);
        }
    }
    let taken = begun.elapsed();
    check(&tokens, &alone[kind], kind)?;
    Ok(taken)
}

/// The tokens so far are those of the same request alone.
fn check(tokens: &[TokenId], alone: &[TokenId], kind: usize) -> Result<(), Box<dyn Error>> {
    if alone.starts_with(tokens) {
        return Ok(());
    }
    Err(format!("request {kind} parted: {tokens:?}, alone {alone:?}").into())
}
