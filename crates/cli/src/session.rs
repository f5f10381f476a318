//! A model that is ready to talk: loaded, sized to memory, with an engine running.

use std::{
    fs,
    hash::{BuildHasher, RandomState},
    path::Path,
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use carat_engine::{
    EngineConfig, Limits, ModelShape,
    chat::{Chat, Conversation, Generation},
};
use carat_gguf::Metadata;
use carat_model::{
    backend::Need,
    kv::{KvGroup, pages_of},
    layout,
};
use carat_text::{ChatTemplate, Tokenizer, Tool};

use crate::{
    args::GenerateArgs,
    draft,
    load::Loaded,
    settings::Settings,
    shape::{Asked, Preparation, Shape},
    terminal::{Terminal, bytes, thousands},
};

/// A conversation needs this much, however short memory is.
const SMALLEST_CONTEXT: usize = 2048;

pub(crate) struct Session {
    pub(crate) chat: Chat,
    pub(crate) generation: Generation,
    shape: Shape,
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
        let loaded = Loaded::open_with_drafts(settings, terminal)?;
        let metadata = loaded.file.metadata();
        let sampling = settings.sampling.resolve(metadata, fresh_seed())?;
        for note in settings.sampling.overrides(metadata)? {
            terminal.note(note);
        }
        if args.stop.iter().any(String::is_empty) {
            bail!("--stop with an empty text would stop every answer before it begins");
        }
        let tokenizer =
            Tokenizer::from_metadata(metadata).context("cannot use the file's tokenizer")?;
        let tokenizer = Arc::new(tokenizer);
        let template = template(args.chat_template.as_deref(), metadata, &tokenizer)?;
        let tools = args
            .tools
            .as_deref()
            .map(read_tools)
            .transpose()?
            .unwrap_or_default();
        let shape = Preparation::begin(&args.format, &tools, &tokenizer)?;
        let context = choose_context(&loaded, 1, settings.context, terminal)?;
        let config = engine_config(&loaded, 1, context);
        loaded.warm_up(terminal);
        let model_name = loaded.model.config.name.clone();
        let engine = draft::start(loaded, config).context("cannot start the model")?;
        let thinking = settings.think.unwrap_or(false);
        if thinking {
            terminal.note(
                "thinking is on; it is off by default, as small models answer better without",
            );
        }
        Ok(Session {
            chat: Chat::new(engine, tokenizer, Arc::new(template)),
            shape: shape.finish()?,
            generation: Generation {
                sampling,
                max_tokens: settings.max_tokens,
                stop: args.stop.clone(),
                ignore_eos: args.ignore_eos,
                logprobs: None,
                constraint: None,
                without_drafts: false,
            },
            thinking,
            tools,
            context,
            model_name,
        })
    }

    /// Settings for the answer to a conversation.
    pub(crate) fn generation_of(
        &self,
        conversation: &Conversation,
        terminal: Terminal,
    ) -> Result<Generation> {
        self.constrained(
            &Asked {
                prompt: &self.chat.prompt(conversation)?,
                tools: &conversation.tools,
                thinking: conversation.thinking,
            },
            terminal,
        )
    }

    /// Settings for plain text that is continued.
    pub(crate) fn generation_of_text(&self, terminal: Terminal) -> Result<Generation> {
        self.constrained(
            &Asked {
                prompt: &[],
                tools: &[],
                thinking: false,
            },
            terminal,
        )
    }

    fn constrained(&self, asked: &Asked<'_>, terminal: Terminal) -> Result<Generation> {
        let mut generation = self.generation.clone();
        if !generation.ignore_eos {
            let tokenizer = self.chat.tokenizer();
            generation.constraint = self.shape.constraint(asked, tokenizer, terminal)?;
        }
        Ok(generation)
    }
}

/// The file's chat template, or the one that is given instead.
pub(crate) fn template(
    path: Option<&Path>,
    metadata: &Metadata,
    tokenizer: &Tokenizer,
) -> Result<ChatTemplate> {
    match path {
        Some(path) => ChatTemplate::new(&read(path)?, tokenizer.vocab())
            .with_context(|| format!("cannot use the chat template `{}`", path.display())),
        None => ChatTemplate::from_metadata(metadata, tokenizer.vocab())
            .context("cannot use the file's chat template; --chat-template FILE gives another"),
    }
}

/// The most whole contexts that pages are held for. Requests that run side by side rarely fill theirs, and pages that run out
/// only make somebody wait.
const WHOLE_CONTEXTS: usize = 4;

/// For so many requests side by side.
pub(crate) fn engine_config(loaded: &Loaded, parallel: usize, context: usize) -> EngineConfig {
    let rows = loaded.backend.chunk_rows();
    let shape = ModelShape::from(&loaded.plan);
    // Drafts reach beyond the window.
    let reaching = ModelShape {
        window: shape.window.map(|window| window + loaded.drafts.most),
        ..shape
    };
    let mut config = EngineConfig {
        kv: loaded.kv,
        batching: loaded.batching,
        ..EngineConfig::comfortable(context, parallel, rows, reaching)
    };
    loaded.drafts.configure(&mut config);
    config.pages.full = config
        .pages
        .full
        .min(pages_of(context) * WHOLE_CONTEXTS.min(parallel));
    config
}

fn kv_bytes(loaded: &Loaded, parallel: usize, context: usize) -> u64 {
    let (pages, page) = (
        engine_config(loaded, parallel, context).pages,
        layout::page_bytes(&loaded.plan, loaded.kv),
    );
    KvGroup::ALL
        .iter()
        .map(|g| (pages.get(*g) * page.get(*g)) as u64)
        .sum()
}

/// What was asked for, or as much context as the model knows and memory allows.
pub(crate) fn choose_context(
    loaded: &Loaded,
    parallel: usize,
    asked: Option<usize>,
    terminal: Terminal,
) -> Result<usize> {
    let trained = loaded.model.config.context;
    if let Some(context) = asked
        && context > trained
    {
        bail!(
            "a context of {context} tokens is more than the {trained} this model was trained for; give at most {trained}"
        );
    }
    let fit = Fit::new(loaded, parallel)?;
    if let Some(context) = asked {
        if let Some(problem) = fit.problem(context)? {
            bail!("{problem}; give a smaller -c");
        }
        fit.describe(context, terminal)?;
        return Ok(context);
    }
    let least = trained.min(SMALLEST_CONTEXT);
    let mut context = trained;
    while context > least && !fit.comfortable(context)? {
        context = (context / 2).max(least);
    }
    if fit.on_device
        && let Some(problem) = fit.problem(context)?
    {
        bail!("{problem}; a smaller quantization or --backend cpu may do");
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
        bytes(kv_bytes(loaded, parallel, context))
    ));
    fit.describe(context, terminal)?;
    Ok(context)
}

/// What contexts fit.
struct Fit<'a> {
    loaded: &'a Loaded,
    parallel: usize,
    free: u64,
    /// The weights are copied to a device's own memory, so everything must fit there.
    on_device: bool,
}

impl Fit<'_> {
    fn new(loaded: &Loaded, parallel: usize) -> Result<Fit<'_>> {
        let mut fit = Fit {
            loaded,
            parallel,
            free: loaded.backend.memory()?.free_bytes,
            on_device: false,
        };
        fit.on_device = fit.need(1)?.is_some();
        Ok(fit)
    }

    fn need(&self, context: usize) -> Result<Option<Need>> {
        let loaded = self.loaded;
        let config = engine_config(loaded, self.parallel, context);
        let options = Limits::new(config, ModelShape::from(&loaded.plan))?.compile_options();
        let weights = &loaded.model.weights;
        Ok(loaded.backend.need(&loaded.plan, weights, &options)?)
    }

    /// Whether a context fits without being asked for.
    ///
    /// On the CPU the model's file can leave memory and come back, keys and values cannot: so they get half of what is free
    /// beside the file, and at least an eighth of what is free at all.
    fn comfortable(&self, context: usize) -> Result<bool> {
        if self.on_device {
            return Ok(self.problem(context)?.is_none());
        }
        let file = self.loaded.file.file_bytes() as u64;
        let budget = self.free.saturating_sub(file).max(self.free / 4) / 2;
        Ok(kv_bytes(self.loaded, self.parallel, context) <= budget)
    }

    /// Why a context does not fit at all.
    fn problem(&self, context: usize) -> Result<Option<String>> {
        let (needed, what) = match self.need(context)? {
            Some(need) => (need.bytes, "of device memory"),
            None => (
                kv_bytes(self.loaded, self.parallel, context),
                "for keys and values",
            ),
        };
        let problem = || {
            format!(
                "a context of {context} tokens needs {} {what}, {} are free",
                bytes(needed),
                bytes(self.free)
            )
        };
        Ok((needed > self.free).then(problem))
    }

    /// What goes where, on devices that have their own memory.
    fn describe(&self, context: usize, terminal: Terminal) -> Result<()> {
        if let Some(need) = self.need(context)? {
            terminal.note(need.parts.trim_end());
        }
        Ok(())
    }
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
pub(crate) fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0u8)
}

/// Now, for templates that write the date.
pub(crate) fn unix_time() -> Option<i64> {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .ok()?;
    i64::try_from(since.as_secs()).ok()
}
