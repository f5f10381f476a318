//! `bench --streams`: answers side by side through the engine, as a server has them: their speed and the gaps between tokens.
//!
//! With a sampling or a schema the same is measured plainly as well, by turns, and so is a prompt that comes while others decode and
//! alone, in the chunks that it has beside them.

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use carat::Loaded;
use carat_engine::{
    ConstraintSource, EngineError, EngineHandle, Event, PrefixReuse, Request, Usage,
};
use carat_grammar::{Answer, Format, Grammars, Start, Thinking};
use carat_model::{
    TokenId,
    kv::pages_of,
    sampling::{self, Sampling},
};
use carat_text::Tokenizer;
use serde::Serialize;

use crate::{
    args::{BenchArgs, BenchFormat},
    input, load,
    settings::Settings,
    terminal::{Terminal, say},
};

/// Tokens of the prompt of each stream.
const PROMPT: usize = 64;
/// Tokens that every stream has before a prompt comes beside them.
const BEFORE_PROMPT: usize = 16;
/// The longest that one event may let wait.
const PATIENCE: Duration = Duration::from_mins(30);

/// One line of the results. Of a prompt beside others the speed is the prompt's, the gaps are those of the others while it was read.
#[derive(Debug, Serialize)]
struct Report {
    test: String,
    tokens_per_second_median: f64,
    samples_tokens_per_second: Vec<f64>,
    gap_ms_p50: Option<f64>,
    gap_ms_p99: Option<f64>,
    gap_ms_max: Option<f64>,
    /// Of the plain test, or of the prompt alone.
    percent_of_plain: Option<f64>,
}

/// Samples of one test.
#[derive(Default)]
struct Samples {
    rates: Vec<f64>,
    gaps: Vec<f64>,
}

impl Samples {
    fn median(&self) -> f64 {
        at(&sorted(&self.rates), 0.5)
    }

    fn report(self, test: String, plain: Option<f64>) -> Report {
        let gaps = sorted(&self.gaps);
        let gap = |share| (!gaps.is_empty()).then(|| at(&gaps, share));
        let median = self.median();
        Report {
            test,
            tokens_per_second_median: median,
            gap_ms_p50: gap(0.5),
            gap_ms_p99: gap(0.99),
            gap_ms_max: gap(1.0),
            percent_of_plain: plain.map(|plain| 100.0 * median / plain),
            samples_tokens_per_second: self.rates,
        }
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// The value that so much of the sorted ones is no larger than.
fn at(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted[(last as f64 * share).round() as usize]
}

/// Moments of a stream: its tokens, then its end.
enum Moment {
    Token { stream: usize, at: Instant },
    End { usage: Box<Usage> },
    Failed(EngineError),
}

/// A way to ask.
struct Wish {
    /// As the test's name has it.
    name: String,
    sampling: Sampling,
    constraint: Option<ConstraintSource>,
}

struct Bench<'a> {
    engine: EngineHandle,
    vocab: usize,
    args: &'a BenchArgs,
    asked: u64,
}

pub(super) fn run(args: &BenchArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    let loaded = load::open_model(settings, terminal)?;
    let wish = wish(args, &loaded, terminal)?;
    let generate = args.generate.iter().copied().max().unwrap_or(0).max(2);
    let most = args.streams.iter().copied().max().unwrap_or(1);
    let beside = args.beside.unwrap_or(0);
    let context = (PROMPT + generate).max(beside + 2);
    if context > loaded.model.config.context {
        bail!(
            "{context} tokens are more than the model's context of {}",
            loaded.model.config.context
        );
    }
    let mut config = loaded.engine_config(most + usize::from(beside > 0), context);
    config.prefix_reuse = PrefixReuse::Disabled;
    // Nobody is to wait for pages.
    config.pages.full = pages_of(context) * config.max_sequences;
    if beside > 0 {
        // Alone, a prompt would otherwise have longer chunks.
        config.max_rows = config.prefill_rows.min(config.max_rows).max(most + 1);
    }
    let vocab = loaded.plan.vocab();
    load::warm_up(&loaded, terminal);
    let engine = loaded.start(config).context("cannot start the model")?;
    let mut bench = Bench {
        engine,
        vocab,
        args,
        asked: 0,
    };
    let mut reports = Vec::new();
    for &streams in &args.streams {
        if beside > 0 {
            reports.extend(bench.prompt_beside(streams, beside, wish.as_ref())?);
        } else {
            reports.extend(bench.side_by_side(streams, generate, wish.as_ref())?);
        }
    }
    print(args.output, &reports)
}

/// Everything but the plain way, if it is asked for.
fn wish(args: &BenchArgs, loaded: &Loaded, terminal: Terminal) -> Result<Option<Wish>> {
    let mut name = Vec::new();
    let mut sampling = Sampling::greedy();
    if args.temp.is_some() || args.top_p.is_some() {
        sampling = Sampling {
            temperature: args.temp.unwrap_or(1.0),
            top_p: args.top_p.unwrap_or(1.0),
            // Nothing that was not asked for: among 64 tokens the rest costs nothing.
            top_k: 0,
            ..Sampling::default()
        };
        name.push(format!("temp {}", sampling.temperature));
        name.extend(args.top_p.map(|p| format!("top-p {p}")));
    }
    let constraint = match &args.schema {
        None => None,
        Some(path) => {
            name.push("schema".to_owned());
            Some(constraint(&input::text(path, terminal)?, loaded)?)
        }
    };
    Ok((!name.is_empty()).then(|| Wish {
        name: name.join(", "),
        sampling,
        constraint,
    }))
}

fn constraint(schema: &str, loaded: &Loaded) -> Result<ConstraintSource> {
    let schema = serde_json::from_str(schema).context("the schema is not JSON")?;
    let tokenizer = Tokenizer::from_metadata(loaded.file.metadata())
        .context("cannot use the file's tokenizer")?;
    let start = Start::after(&tokenizer, &[]);
    let grammars = Grammars::new(Arc::new(tokenizer));
    let grammars = grammars.context("answers of this model cannot be constrained")?;
    let compiled = grammars.compile(&Answer {
        format: Some(Format::JsonSchema {
            schema,
            strict: false,
        }),
        tools: None,
        thinking: Thinking::Off,
        start,
    })?;
    Ok(compiled.context("the schema asks for nothing")?.source)
}

impl Bench<'_> {
    /// Some streams at a time, plainly and as wished for.
    fn side_by_side(
        &mut self,
        streams: usize,
        generate: usize,
        wish: Option<&Wish>,
    ) -> Result<Vec<Report>> {
        let (mut plain, mut wished) = (Samples::default(), Samples::default());
        for repetition in 0..=self.args.repetitions {
            let plainly = std::iter::once((None, &mut plain));
            let as_wished = wish.map(|wish| (Some(wish), &mut wished));
            for (wish, samples) in plainly.chain(as_wished) {
                let timed = self.stream_all(streams, generate, wish)?;
                // The first time fills caches.
                if repetition > 0 && !timed.add_to(samples) {
                    bail!(
                        "the answers of {generate} tokens were over before all {streams} ran side by side; give -n more"
                    );
                }
            }
        }
        let name = format!("tg{generate} x{streams}");
        let plain_rate = plain.median();
        let mut reports = vec![plain.report(name.clone(), None)];
        if let Some(wish) = wish {
            reports.push(wished.report(format!("{name}, {}", wish.name), Some(plain_rate)));
        }
        Ok(reports)
    }

    fn stream_all(
        &mut self,
        streams: usize,
        generate: usize,
        wish: Option<&Wish>,
    ) -> Result<Timed> {
        let (sender, moments) = mpsc::channel();
        for stream in 0..streams {
            let request = self.request(PROMPT, generate, wish);
            self.submit(request, stream, &sender, None)?;
        }
        drop(sender);
        Timed::until_all_end(&moments, streams)
    }

    /// A prompt alone, and while streams decode.
    fn prompt_beside(
        &mut self,
        streams: usize,
        tokens: usize,
        wish: Option<&Wish>,
    ) -> Result<Vec<Report>> {
        let (mut alone, mut beside) = (Samples::default(), Samples::default());
        for repetition in 0..=self.args.repetitions {
            let (sender, moments) = mpsc::channel();
            let request = self.request(tokens, 1, None);
            self.submit(request, 0, &sender, None)?;
            let rate = tokens as f64 / prefill_seconds(&moments)?;
            let (rate_beside, gaps) = self.read_beside(streams, tokens, wish)?;
            if repetition > 0 {
                alone.rates.push(rate);
                beside.rates.push(rate_beside);
                beside.gaps.extend(gaps);
            }
        }
        let alone_rate = alone.median();
        let name = format!("pp{tokens}");
        Ok(vec![
            alone.report(format!("{name} alone"), None),
            beside.report(format!("{name} beside x{streams}"), Some(alone_rate)),
        ])
    }

    /// Speed of a prompt beside streams, and the gaps between their tokens meanwhile.
    fn read_beside(
        &mut self,
        streams: usize,
        tokens: usize,
        wish: Option<&Wish>,
    ) -> Result<(f64, Vec<f64>)> {
        let (sender, moments) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        for stream in 0..streams {
            let mut request = self.request(PROMPT, 1, wish);
            request.max_tokens = None;
            self.submit(request, stream, &sender, Some(&stop))?;
        }
        let mut timed = Timed::new(streams);
        while timed.tokens.iter().any(|t| t.len() < BEFORE_PROMPT) {
            timed.take(&moments)?;
        }
        let (prompt_sender, prompt_moments) = mpsc::channel();
        let request = self.request(tokens, 1, None);
        let from = Instant::now();
        self.submit(request, 0, &prompt_sender, None)?;
        let seconds = prefill_seconds(&prompt_moments)?;
        let to = Instant::now();
        stop.store(true, Ordering::Relaxed);
        drop(sender);
        while timed.ended < streams {
            timed.take(&moments)?;
        }
        Ok((tokens as f64 / seconds, timed.gaps(from, to)))
    }

    /// Noise of so many tokens, which is answered in full.
    fn request(&mut self, prompt: usize, generate: usize, wish: Option<&Wish>) -> Request {
        self.asked += 1;
        let (asked, vocab) = (self.asked, self.vocab as u64);
        let token = |i| (sampling::random(asked, i, 0) % vocab) as TokenId;
        let mut request = Request {
            max_tokens: Some(generate),
            ignore_eos: true,
            sampling: Sampling::greedy(),
            ..Request::new((0..prompt as u64).map(token).collect())
        };
        if let Some(wish) = wish {
            request.sampling = Sampling {
                seed: asked,
                ..wish.sampling.clone()
            };
            request.constraint.clone_from(&wish.constraint);
        }
        request
    }

    /// Asks, and has the moments of the answer sent. A stream that is to stop ends at its next token.
    fn submit(
        &self,
        request: Request,
        stream: usize,
        moments: &Sender<Moment>,
        stop: Option<&Arc<AtomicBool>>,
    ) -> Result<()> {
        let moments = moments.clone();
        let stop = stop.cloned();
        let sink = move |event: Result<Event, EngineError>| {
            let moment = match event {
                Ok(Event::Token { .. }) => Moment::Token {
                    stream,
                    at: Instant::now(),
                },
                Ok(Event::Finished { usage, .. }) => Moment::End { usage },
                Ok(_) => return ControlFlow::Continue(()),
                Err(error) => Moment::Failed(error),
            };
            let _ = moments.send(moment);
            match &stop {
                Some(stop) if stop.load(Ordering::Relaxed) => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        self.engine.submit_to(request, Box::new(sink))?;
        Ok(())
    }
}

/// Seconds from the start of a single request to its first token.
fn prefill_seconds(moments: &Receiver<Moment>) -> Result<f64> {
    loop {
        match moments.recv_timeout(PATIENCE)? {
            Moment::Token { .. } => {}
            Moment::End { usage } => return Ok(usage.prefill.as_secs_f64()),
            Moment::Failed(error) => return Err(error.into()),
        }
    }
}

/// Moments of the tokens of each stream.
struct Timed {
    tokens: Vec<Vec<Instant>>,
    ended: usize,
}

impl Timed {
    fn new(streams: usize) -> Timed {
        Timed {
            tokens: vec![Vec::new(); streams],
            ended: 0,
        }
    }

    fn until_all_end(moments: &Receiver<Moment>, streams: usize) -> Result<Timed> {
        let mut timed = Timed::new(streams);
        while timed.ended < streams {
            timed.take(moments)?;
        }
        Ok(timed)
    }

    fn take(&mut self, moments: &Receiver<Moment>) -> Result<()> {
        match moments.recv_timeout(PATIENCE)? {
            Moment::Token { stream, at } => self.tokens[stream].push(at),
            Moment::End { .. } => self.ended += 1,
            Moment::Failed(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Milliseconds between tokens of a stream that came within some time.
    fn gaps(&self, from: Instant, to: Instant) -> Vec<f64> {
        let of = |tokens: &Vec<Instant>| -> Vec<f64> {
            let within = tokens.iter().filter(|at| (from..=to).contains(at));
            let within: Vec<&Instant> = within.collect();
            let gaps = within.windows(2).map(|pair| *pair[1] - *pair[0]);
            gaps.map(|gap| gap.as_secs_f64() * 1e3).collect()
        };
        self.tokens.iter().flat_map(of).collect()
    }

    /// Adds the speed and the gaps of the time in which all streams decoded, if there was any.
    fn add_to(&self, samples: &mut Samples) -> bool {
        let from = self.tokens.iter().filter_map(|t| t.first()).max();
        let to = self.tokens.iter().filter_map(|t| t.last()).min();
        let (Some(&from), Some(&to)) = (from, to) else {
            return false;
        };
        let within = |at: &&Instant| **at > from && **at <= to;
        let tokens = self.tokens.iter().flatten().filter(within).count();
        let seconds = to.saturating_duration_since(from).as_secs_f64();
        let some = tokens > 0 && seconds > 0.0;
        if some {
            samples.rates.push(tokens as f64 / seconds);
            samples.gaps.extend(self.gaps(from, to));
        }
        some
    }
}

fn print(format: BenchFormat, reports: &[Report]) -> Result<()> {
    let cell = |value: Option<f64>| value.map_or(String::new(), |v| format!("{v:.2}"));
    match format {
        BenchFormat::Json => {
            for report in reports {
                say(serde_json::to_string(report)?)?;
            }
        }
        BenchFormat::Md => {
            say(
                "| test | t/s | spread | gap p50, ms | gap p99, ms | longest gap, ms | of plain or alone |",
            )?;
            say("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")?;
            for r in reports {
                let rates = sorted(&r.samples_tokens_per_second);
                let spread = (rates[rates.len() - 1] - rates[0]) / 2.0;
                let percent = r.percent_of_plain.map(|p| format!("{p:.1} %"));
                say(format!(
                    "| {} | {:.2} | ± {spread:.2} | {} | {} | {} | {} |",
                    r.test,
                    r.tokens_per_second_median,
                    cell(r.gap_ms_p50),
                    cell(r.gap_ms_p99),
                    cell(r.gap_ms_max),
                    percent.unwrap_or_default()
                ))?;
            }
        }
        BenchFormat::Csv => {
            say("test,tokens_per_second_median,gap_ms_p50,gap_ms_p99,gap_ms_max,percent_of_plain")?;
            for r in reports {
                say(format!(
                    "\"{}\",{},{},{},{},{}",
                    r.test,
                    r.tokens_per_second_median,
                    cell(r.gap_ms_p50),
                    cell(r.gap_ms_p99),
                    cell(r.gap_ms_max),
                    cell(r.percent_of_plain)
                ))?;
            }
        }
    }
    Ok(())
}
