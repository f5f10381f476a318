//! `bench --draft`: the same answers with drafts and without, by one engine.
//!
//! Greedy answers to a few prompts, or, where acceptance is set by hand, noise after noise: models of random weights have no
//! text that could be drafted. Plain and drafted answers take turns, so that a machine that slows down slows both.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use carat::Loaded;
use carat_engine::{DraftCounts, EngineHandle, Event, ModelFacts, Request, TokenStream, Usage};
use carat_model::{
    TokenId,
    sampling::{self, Sampling},
};
use carat_text::{Message, RenderOptions, Tokenizer};
use serde_json::json;

use super::acceptance::SetAcceptance;
use crate::{
    answer,
    args::{BenchArgs, BenchFormat},
    draft, load, session,
    settings::Settings,
    terminal::{Terminal, say},
};

/// Prompts of the test.
const PROMPTS: [&str; 6] = [
    "Tell me a story about a fox.",
    "Tell me a story about a girl and her boat.",
    "Tell me a story about an old man and a dog.",
    "What is 347 + 285?",
    "What is the capital of France?",
    "Explain what a river is.",
];
/// Tokens of a prompt of noise.
const NOISE: usize = 64;

/// Sums over some answers.
#[derive(Default)]
struct Sum {
    tokens: usize,
    seconds: f64,
    drafts: DraftCounts,
}

impl Sum {
    fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }
}

pub(super) fn run(args: &BenchArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    let mut settings = settings.clone();
    settings.draft.clone_from(&args.draft);
    settings.draft_max = args.draft_max.or(settings.draft_max);
    let loaded = draft::open_model(&settings, terminal)?;
    if loaded.drafts.max_tokens == 0 {
        bail!("nothing is drafted: --draft off, or --draft-max 0; leave them out");
    }
    let (name, backend) = (load::describe(&loaded), loaded.backend.name());
    let generate = args.generate.iter().copied().max().unwrap_or(0).max(2);
    let prompts = match args.draft_accept {
        Some(_) => noise(loaded.plan.vocab()),
        None => rendered(&loaded, terminal)?,
    };
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
    let sequences = args.sequences.first().copied().unwrap_or(1);
    let context = (longest + generate + loaded.drafts.max_tokens).min(loaded.model.config.context);
    let config = loaded.engine_config(sequences, context);
    load::warm_up(&loaded, terminal);
    let engine = match args.draft_accept {
        None => loaded.start(config),
        Some(probability) => {
            let Loaded {
                model,
                plan,
                backend,
                drafts,
                ..
            } = loaded;
            let facts = ModelFacts::with_costs(&plan, &model.weights);
            EngineHandle::start_with(config, facts, move |limits| {
                let options = limits.compile_options();
                let executor = match drafts.plan(sequences) {
                    Some(drafter) => {
                        backend.compile_with_drafter(&plan, model.weights, &options, drafter)?
                    }
                    None => backend.compile(&plan, model.weights, &options)?,
                };
                Ok(Box::new(SetAcceptance::new(executor, probability)))
            })
        }
    };
    let engine = engine.context("cannot start the model")?;
    let (mut plain, mut drafted) = (Sum::default(), Sum::default());
    for repetition in 0..=args.repetitions {
        let mut sums = (Sum::default(), Sum::default());
        for prompt in &prompts {
            for (drafts, sum) in [(false, &mut sums.0), (true, &mut sums.1)] {
                let request = Request {
                    max_tokens: Some(generate),
                    sampling: Sampling::greedy(),
                    stop_tokens: vec![1, 106, 50],
                    ignore_eos: args.draft_accept.is_some(),
                    drafts,
                    ..Request::new(prompt.clone())
                };
                ask(&engine, &request, sequences, sum)?;
            }
        }
        // The first time fills caches.
        if repetition > 0 {
            add(&mut plain, &sums.0);
            add(&mut drafted, &sums.1);
        }
    }
    report(args, &format!("{name} on {backend}"), &plain, &drafted)
}

fn add(total: &mut Sum, one: &Sum) {
    total.tokens += one.tokens;
    total.seconds += one.seconds;
    total.drafts.add(&one.drafts);
}

/// Answers of several streams at a time.
fn ask(engine: &EngineHandle, request: &Request, streams: usize, sum: &mut Sum) -> Result<()> {
    let mut asked = Vec::new();
    for _ in 0..streams {
        asked.push(engine.submit(request.clone())?);
    }
    let mut longest = Duration::ZERO;
    for stream in asked {
        let usage = finish(stream)?;
        longest = longest.max(usage.decode);
        sum.tokens += usage.counts.generated_tokens.saturating_sub(1);
        sum.drafts.add(&usage.counts.drafts);
    }
    sum.seconds += longest.as_secs_f64();
    Ok(())
}

fn finish(stream: TokenStream) -> Result<Usage> {
    for event in stream {
        if let Event::Finished { usage, .. } = event? {
            return Ok(usage);
        }
    }
    bail!("an answer ended without a word")
}

fn rendered(loaded: &Loaded, terminal: Terminal) -> Result<Vec<Vec<TokenId>>> {
    let metadata = loaded.file.metadata();
    let tokenizer =
        Tokenizer::from_metadata(metadata).context("cannot use the file's tokenizer")?;
    let template = session::template(None, metadata, &tokenizer, terminal)?;
    let options = RenderOptions {
        thinking: false,
        unix_time: None,
        add_generation_prompt: true,
    };
    let prompt = |text: &str| -> Result<Vec<TokenId>> {
        let rendered = template.render(&[Message::user(text)], &[], &options)?;
        Ok(tokenizer.encode_rendered(&rendered))
    };
    PROMPTS.into_iter().map(prompt).collect()
}

fn noise(vocab: usize) -> Vec<Vec<TokenId>> {
    let token = |n, i| (sampling::random(n, i, 0) % vocab as u64) as TokenId;
    (0..2)
        .map(|n| (0..NOISE as u64).map(|i| token(n, i)).collect())
        .collect()
}

fn report(args: &BenchArgs, what: &str, plain: &Sum, drafted: &Sum) -> Result<()> {
    let gain = drafted.rate() / plain.rate();
    let counts = &drafted.drafts;
    match args.output {
        BenchFormat::Json => say(json!({
            "model": what,
            "plain_tokens_per_second": plain.rate(),
            "drafted_tokens_per_second": drafted.rate(),
            "gain": gain,
            "tokens_per_pass": counts.tokens_per_pass(),
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "drafted_at": counts.drafted_at,
            "accepted_at": counts.accepted_at,
        }))?,
        BenchFormat::Md => say(format!(
            "| model | plain t/s | drafted t/s | gain | drafts |\n| --- | ---: | ---: | ---: | --- |\n\
             | {what} | {:.1} | {:.1} | {gain:.2} | {} |",
            plain.rate(),
            drafted.rate(),
            answer::drafts(counts)
        ))?,
        BenchFormat::Csv => say(format!(
            "model,plain,drafted,gain,tokens_per_pass,drafted_tokens,accepted_tokens\n\"{what}\",{},{},{gain},{},{},{}",
            plain.rate(),
            drafted.rate(),
            counts.tokens_per_pass(),
            counts.drafted,
            counts.accepted
        ))?,
    }
    Ok(())
}
