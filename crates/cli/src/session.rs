//! A model that is ready to talk: loaded, sized to memory, with an engine running.

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result, bail};
use carat::{Error, Loaded, context, fresh_seed};
use carat_engine::chat::{Chat, Conversation, Generation};
use carat_gguf::Metadata;
use carat_text::{ChatTemplate, TokenId, Tokenizer, Tool};

use crate::{
    args::GenerateArgs,
    draft, input, load,
    settings::Settings,
    structured::{Asked, Preparation, StructuredOutput},
    terminal::{Terminal, bytes, thousands},
    words,
};

pub(crate) struct Session {
    pub(crate) chat: Chat,
    pub(crate) generation: Generation,
    structure: StructuredOutput,
    pub(crate) thinking: bool,
    pub(crate) tools: Vec<Tool>,
    pub(crate) context: usize,
    /// The most context this model knows.
    pub(crate) trained_context: usize,
    pub(crate) model_name: String,
}

impl Session {
    pub(crate) fn start(
        args: &GenerateArgs,
        settings: &Settings,
        terminal: Terminal,
    ) -> Result<Session> {
        let loaded = draft::open_model(settings, terminal)?;
        let metadata = loaded.file.metadata();
        let sampling = settings.sampling.resolve(metadata, fresh_seed())?;
        for note in settings.sampling.overrides(metadata)? {
            terminal.note(note);
        }
        let tokenizer =
            Tokenizer::from_metadata(metadata).context("cannot use the file's tokenizer")?;
        let tokenizer = Arc::new(tokenizer);
        let template = template(
            args.chat_template.as_deref(),
            metadata,
            &tokenizer,
            terminal,
        )?;
        let tools = args
            .tools
            .as_deref()
            .map(|path| read_tools(path, terminal))
            .transpose()?
            .unwrap_or_default();
        let preparation = Preparation::begin(&args.format, &tools, &tokenizer, terminal)?;
        let context = choose_context(&loaded, 1, settings.context, terminal)?;
        let config = loaded.engine_config(1, context);
        load::warm_up(&loaded, terminal);
        let model_name = loaded.model.config.name.clone();
        let trained_context = loaded.model.config.context;
        let engine = loaded.start(config).context("cannot start the model")?;
        let thinking = settings.think.unwrap_or(false);
        if thinking {
            terminal.note(
                "thinking is on; it is off by default, as small models answer better without",
            );
        }
        Ok(Session {
            chat: Chat::new(engine, tokenizer, Arc::new(template)),
            structure: preparation.finish()?,
            generation: Generation {
                sampling,
                max_tokens: settings.token_limit()?,
                stop: args.stop.clone(),
                ignore_eos: args.ignore_eos,
                logprobs: None,
                constraint: None,
                without_drafts: false,
            },
            thinking,
            tools,
            context,
            trained_context,
            model_name,
        })
    }

    /// An error in words of this program if a prompt fills the context: what would help is said, and nothing else.
    pub(crate) fn check_room(&self, prompt: &[TokenId]) -> Result<()> {
        if prompt.len() < self.context {
            return Ok(());
        }
        bail!(
            "a prompt of {} tokens fills the context of {}; shorten it{}",
            prompt.len(),
            self.context,
            self.more_context(" or give ")
        );
    }

    /// Advice that there is more context, where there is; nothing elsewhere.
    pub(crate) fn more_context(&self, words_before: &str) -> String {
        if self.context < self.trained_context {
            let most = self.trained_context;
            format!("{words_before}-c N, up to {most}, if memory allows")
        } else {
            String::new()
        }
    }

    /// Settings for the answer to a conversation.
    pub(crate) fn generation_of(
        &self,
        conversation: &Conversation,
        terminal: Terminal,
    ) -> Result<Generation> {
        let prompt = self.chat.prompt(conversation)?;
        self.check_room(&prompt)?;
        self.constrained(
            &Asked {
                prompt: &prompt,
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
            generation.constraint = self.structure.constraint(asked, tokenizer, terminal)?;
        }
        Ok(generation)
    }
}

/// The file's chat template, or the one that is given instead.
pub(crate) fn template(
    path: Option<&Path>,
    metadata: &Metadata,
    tokenizer: &Tokenizer,
    terminal: Terminal,
) -> Result<ChatTemplate> {
    match path {
        Some(path) => ChatTemplate::new(&input::text(path, terminal)?, tokenizer.vocab())
            .with_context(|| format!("cannot use the chat template `{}`", path.display())),
        None => ChatTemplate::from_metadata(metadata, tokenizer.vocab())
            .context("cannot use the file's chat template; --chat-template FILE gives another"),
    }
}

/// The context asked for, or as much as the model knows and memory allows; where it does not fit, the way out.
pub(crate) fn fitting_context(
    loaded: &Loaded,
    parallel: usize,
    asked: Option<usize>,
) -> Result<context::Chosen> {
    match context::choose(loaded, parallel, asked) {
        Err(Error::ContextTooLarge { problem, was_asked }) => {
            let way_out = match loaded.max_ram_bytes {
                _ if was_asked => "give a smaller -c",
                Some(_) => "a larger --ram, --kv-type q8_0 or a smaller quantization may do",
                None => {
                    "a smaller quantization, --place auto where weights were to lie elsewhere, or --backend cpu where a card computes, may do"
                }
            };
            bail!("{problem}; {way_out}");
        }
        chosen => Ok(chosen?),
    }
}

/// The same; says which it is.
pub(crate) fn choose_context(
    loaded: &Loaded,
    parallel: usize,
    asked: Option<usize>,
    terminal: Terminal,
) -> Result<usize> {
    let chosen = fitting_context(loaded, parallel, asked)?;
    if asked.is_none() {
        let more = if chosen.more_fits {
            "; -c asks for more"
        } else {
            ""
        };
        terminal.note(format_args!(
            "context {} of {} tokens, {} for keys and values{more}",
            thousands(chosen.tokens as u64),
            thousands(loaded.model.config.context as u64),
            bytes(chosen.kv_bytes)
        ));
    }
    if let Some(placement) = chosen.placement {
        terminal.note(placement);
    }
    Ok(chosen.tokens)
}

fn read_tools(path: &Path, terminal: Terminal) -> Result<Vec<Tool>> {
    words::from_json(&input::text(path, terminal)?).with_context(|| {
        format!(
            "`{}` is not a list of tools; an array of objects with `name`, `description` and `parameters` is expected",
            path.display()
        )
    })
}

/// Now, for templates that write the date.
pub(crate) fn unix_time() -> Option<i64> {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .ok()?;
    i64::try_from(since.as_secs()).ok()
}
