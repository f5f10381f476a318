//! A model that is ready to talk: loaded, sized to memory, with an engine running.

use std::{
    fs,
    hash::{BuildHasher, RandomState},
    path::Path,
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use carat_engine::{
    EngineConfig, EngineHandle, ModelShape,
    chat::{Chat, Generation},
};
use carat_model::{backend::KvGroup, layout};
use carat_text::{ChatTemplate, Tokenizer, Tool};

use crate::{
    args::GenerateArgs,
    load::Loaded,
    settings::Settings,
    terminal::{Terminal, bytes, thousands},
};

/// Rows of a prompt that run at once.
const MAX_ROWS: usize = 512;
/// A conversation needs this much, however short memory is.
const SMALLEST_CONTEXT: usize = 2048;

pub(crate) struct Session {
    pub(crate) chat: Chat,
    pub(crate) generation: Generation,
    pub(crate) thinking: bool,
    pub(crate) tools: Vec<Tool>,
    pub(crate) context: usize,
    pub(crate) model_name: String,
}

impl Session {
    pub(crate) fn start(
        args: &GenerateArgs,
        settings: &Settings,
        terminal: Terminal,
    ) -> Result<Session> {
        let loaded = Loaded::open(settings, terminal)?;
        let metadata = loaded.file.metadata();
        let sampling = settings.sampling.resolve(metadata, fresh_seed())?;
        for note in settings.sampling.overridden_habits(metadata)? {
            terminal.note(note);
        }
        if args.stop.iter().any(String::is_empty) {
            bail!("--stop with an empty text would stop every answer before it begins");
        }
        let tokenizer =
            Tokenizer::from_metadata(metadata).context("cannot use the file's tokenizer")?;
        let template = match &args.chat_template {
            Some(path) => ChatTemplate::new(&read(path)?, tokenizer.vocab())
                .with_context(|| format!("cannot use the chat template `{}`", path.display()))?,
            None => ChatTemplate::from_metadata(metadata, tokenizer.vocab()).context(
                "cannot use the file's chat template; --chat-template FILE gives another",
            )?,
        };
        let tools = args
            .tools
            .as_deref()
            .map(read_tools)
            .transpose()?
            .unwrap_or_default();
        let context = choose_context(&loaded, settings.context, terminal)?;
        let config = engine_config(&loaded, context);
        loaded.warm_up(terminal);
        let model_name = loaded.model.config.name.clone();
        let engine = EngineHandle::start(config, loaded.backend, loaded.plan, loaded.model.weights)
            .context("cannot start the model")?;
        let thinking = settings.think.unwrap_or(false);
        if thinking {
            terminal.note(
                "thinking is on; it is off by default, as small models answer better without",
            );
        }
        Ok(Session {
            chat: Chat::new(engine, Arc::new(tokenizer), Arc::new(template)),
            generation: Generation {
                sampling,
                max_tokens: settings.max_tokens,
                stop: args.stop.clone(),
                ignore_eos: args.ignore_eos,
                logprobs: None,
            },
            thinking,
            tools,
            context,
            model_name,
        })
    }
}

/// One conversation at a time.
fn engine_config(loaded: &Loaded, context: usize) -> EngineConfig {
    EngineConfig::comfortable(context, 1, MAX_ROWS, ModelShape::from(&loaded.plan))
}

fn kv_bytes(loaded: &Loaded, context: usize) -> u64 {
    let (pages, page) = (
        engine_config(loaded, context).pages,
        layout::page_bytes(&loaded.plan, 2),
    );
    KvGroup::ALL
        .iter()
        .map(|g| (pages.get(*g) * page.get(*g)) as u64)
        .sum()
}

/// What was asked for, or as much context as the model knows and memory allows.
///
/// The model's file can leave memory and come back, keys and values cannot: so they get what is free beside the file, and
/// at least a quarter of what is free at all.
fn choose_context(loaded: &Loaded, asked: Option<usize>, terminal: Terminal) -> Result<usize> {
    let trained = loaded.model.config.context;
    let free = loaded.backend.memory()?.free_bytes;
    if let Some(context) = asked {
        if context > trained {
            bail!(
                "a context of {context} tokens is more than the {trained} this model was trained for; give at most {trained}"
            );
        }
        let needed = kv_bytes(loaded, context);
        if needed > free {
            bail!(
                "a context of {context} tokens needs {} for keys and values, {} are free; give a smaller -c",
                bytes(needed),
                bytes(free)
            );
        }
        return Ok(context);
    }
    let budget = free
        .saturating_sub(loaded.file.file_bytes() as u64)
        .max(free / 4)
        / 2;
    let least = trained.min(SMALLEST_CONTEXT);
    let mut context = trained;
    while context > least && kv_bytes(loaded, context) > budget {
        context = (context / 2).max(least);
    }
    let short = if context < trained {
        "; -c asks for more"
    } else {
        ""
    };
    terminal.note(format_args!(
        "context {} of {} tokens, {} for keys and values{short}",
        thousands(context as u64),
        thousands(trained as u64),
        bytes(kv_bytes(loaded, context))
    ));
    Ok(context)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))
}

fn read_tools(path: &Path) -> Result<Vec<Tool>> {
    serde_json::from_str(&read(path)?).with_context(|| {
        format!(
            "`{}` is not a list of tools; an array of objects with `name`, `description` and `parameters` is expected",
            path.display()
        )
    })
}

/// Another number each time, from the source of randomness the standard library has.
fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0u8)
}

/// Now, for templates that write the date.
pub(crate) fn unix_time() -> Option<i64> {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .ok()?;
    i64::try_from(since.as_secs()).ok()
}
