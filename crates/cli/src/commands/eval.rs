//! `eval`: logits of given tokens into a file, perplexity of a text.

use std::process::ExitCode;

use anyhow::{Result, bail};
use carat::Loaded;
use carat_model::{
    TokenId,
    backend::{CompileOptions, Executor, Outputs, RowResult, token_feeds},
    evaluate::{self, Evaluation},
    sampling,
};
use carat_text::{Specials, Tokenizer};
use serde::Deserialize;

use crate::{
    args::{LogitsArgs, PerplexityArgs},
    input,
    interrupt::{INTERRUPTED, Interrupt},
    load,
    output::WholeFile,
    settings::Settings,
    terminal::{Terminal, say, thousands},
};

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenFile {
    Ids(Vec<TokenId>),
    Object { tokens: Vec<TokenId> },
}

pub(crate) fn logits(
    args: &LogitsArgs,
    settings: &Settings,
    terminal: Terminal,
) -> Result<ExitCode> {
    let path = args.tokens.display();
    let text = input::text(&args.tokens, terminal)?;
    let Ok(TokenFile::Ids(tokens) | TokenFile::Object { tokens }) = serde_json::from_str(&text)
    else {
        bail!("`{path}` holds neither an array of token ids nor an object with one under `tokens`");
    };
    if tokens.is_empty() {
        bail!("`{path}` holds no tokens");
    }
    let loaded = load::open_model(settings, terminal)?;
    let mut executor = executor(&loaded, &tokens, args.chunk)?;
    let mut out = WholeFile::create(&args.out)?;
    let interrupt = Interrupt::install()?;
    let mut outputs = Outputs::default();
    let pages = evaluate::options(tokens.len(), args.chunk).pages;
    let mut evaluation = Evaluation::new(executor.as_mut(), &loaded.plan, pages);
    for start in (0..tokens.len()).step_by(args.chunk) {
        let end = tokens.len().min(start + args.chunk);
        let feeds = token_feeds(&tokens[start..end]);
        evaluation.feed(&feeds, start..end, None, &mut outputs)?;
        for row in &outputs.rows {
            let bytes: Vec<u8> = row.logits.iter().flat_map(|l| l.to_le_bytes()).collect();
            out.write(&bytes)?;
        }
        if interrupt.is_set() {
            terminal.note("stopped; nothing was written");
            return Ok(ExitCode::from(INTERRUPTED));
        }
    }
    out.commit()?;
    terminal.note(format_args!(
        "{} positions x {} logits in `{}`",
        thousands(tokens.len() as u64),
        thousands(loaded.plan.vocab() as u64),
        args.out.display()
    ));
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn perplexity(
    args: &PerplexityArgs,
    settings: &Settings,
    terminal: Terminal,
) -> Result<()> {
    let path = args.file.display();
    let text = input::text(&args.file, terminal)?;
    let loaded = load::open_model(settings, terminal)?;
    let tokenizer = Tokenizer::from_metadata(loaded.file.metadata())?;
    // The text is the evaluator's own, and documents in it are often set apart by <eos>.
    let specials = if args.plain {
        Specials::Ignore
    } else {
        Specials::Parse
    };
    let mut tokens = tokenizer.encode(&text, specials);
    let window = args
        .context
        .unwrap_or(loaded.model.config.context)
        .min(loaded.model.config.context);
    if let Some(limit) = args.limit {
        tokens.truncate(limit - 1);
    }
    if tokens.is_empty() || window < 2 {
        bail!(
            "`{path}` gives {} tokens in windows of {window}: nothing to predict",
            tokens.len()
        );
    }
    let (mut sum, mut count) = (0.0f64, 0usize);
    // One cache for all windows: each begins at its start and writes every position before reading it.
    let longest = tokens.len().min(window - 1) + 1;
    let mut executor = load::compile(&loaded, &options(&loaded, longest, args.chunk))?;
    for part in tokens.chunks(window - 1) {
        let mut windowed = vec![tokenizer.vocab().bos()];
        windowed.extend_from_slice(part);
        let each = |position: usize, row: &RowResult| {
            if let Some(&next) = windowed.get(position + 1) {
                sum -= f64::from(sampling::logprobs(&row.logits, next, 0).0);
                count += 1;
            }
        };
        let (executor, plan) = (executor.as_mut(), &loaded.plan);
        evaluate::for_each_position(executor, plan, &windowed, args.chunk, each)?;
    }
    let mean = sum / count as f64;
    say(format_args!(
        "perplexity {:.4} (mean {mean:.6} nats over {count} tokens)",
        mean.exp()
    ))
}

fn executor(loaded: &Loaded, tokens: &[TokenId], chunk: usize) -> Result<Box<dyn Executor>> {
    let vocab = loaded.plan.vocab();
    if let Some(token) = tokens.iter().find(|t| **t as usize >= vocab) {
        bail!("token {token} is outside the model's vocabulary of {vocab}");
    }
    if tokens.len() > loaded.model.config.context {
        bail!(
            "{} tokens are more than the model's context of {}",
            tokens.len(),
            loaded.model.config.context
        );
    }
    load::compile(loaded, &options(loaded, tokens.len(), chunk))
}

fn options(loaded: &Loaded, tokens: usize, chunk: usize) -> CompileOptions {
    CompileOptions {
        kv: loaded.kv,
        batching: loaded.batching,
        ..evaluate::options(tokens, chunk)
    }
}
