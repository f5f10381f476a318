//! `bench --draft`: the same answers with drafts and without, by one engine.
//!
//! Greedy answers to a few prompts, or, where tokens follow a script, noise after noise: models of random weights have no
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

use super::scripted::{Script, Scripted};
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
/// Tokens of a text that is edited, if the context holds it twice.
const EDITED: usize = 2048;

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
    let mut generate = args.generate.iter().copied().max().unwrap_or(0).max(2);
    let vocab = loaded.plan.vocab();
    let (prompts, script) = if args.draft_edit {
        let text = noise(vocab, 0, EDITED.min(loaded.model.config.context * 2 / 5));
        let tokens = edited(&text, vocab);
        generate = tokens.len();
        let prompt = text.len();
        (vec![text], Some(Script::Text { prompt, tokens }))
    } else if let Some(probability) = args.draft_accept {
        let prompts = (0..2).map(|n| noise(vocab, n, NOISE)).collect();
        (prompts, Some(Script::Agreeing(probability)))
    } else {
        (rendered(&loaded, terminal)?, None)
    };
    let follows_model = script.is_none();
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
    let sequences = args.sequences.first().copied().unwrap_or(1);
    let context = (longest + generate + loaded.drafts.max_tokens).min(loaded.model.config.context);
    let config = loaded.engine_config(sequences, context);
    load::warm_up(&loaded, terminal);
    let engine = match script {
        None => loaded.start(config),
        Some(script) => {
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
                Ok(Box::new(Scripted::new(executor, script)))
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
                    ignore_eos: !follows_model,
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
            return Ok(*usage);
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

fn noise(vocab: usize, seed: u64, tokens: usize) -> Vec<TokenId> {
    (0..tokens as u64)
        .map(|i| (sampling::random(seed, i, 0) % vocab as u64) as TokenId)
        .collect()
}

/// A text with a change every forty tokens or so: some replaced, some left out, some put in.
fn edited(text: &[TokenId], vocab: usize) -> Vec<TokenId> {
    let mut drawn = 0;
    let mut below = |bound: usize| {
        drawn += 1;
        (sampling::random(3, drawn, 0) % bound as u64) as usize
    };
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let kept = (20 + below(40)).min(rest.len());
        out.extend(&rest[..kept]);
        rest = &rest[kept..];
        let (removed, added) = match below(3) {
            0 => (1 + below(4), 1 + below(4)),
            1 => (1 + below(8), 0),
            _ => (0, 1 + below(8)),
        };
        out.extend((0..added).map(|_| below(vocab) as TokenId));
        rest = &rest[removed.min(rest.len())..];
    }
    out
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
