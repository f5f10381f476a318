//! Structured output: formats by flags, tool calls by the tools' own schemas.

use std::{
    cell::Cell,
    sync::Arc,
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, anyhow};
use carat_engine::ConstraintSource;
use carat_grammar::{Answer, Format, GrammarError, Grammars, Start, Thinking, ToolChoice, Tools};
use carat_text::{TokenId, Tokenizer, Tool};

use crate::{args::FormatArgs, input, misuse::Misuse, terminal::Terminal};

/// Grammars that are being prepared while the model loads.
pub(crate) struct Preparation {
    format: Option<Format>,
    is_typed: bool,
    tools: bool,
    grammars: Option<JoinHandle<Result<Grammars, GrammarError>>>,
}

impl Preparation {
    /// Begins if there is anything to constrain.
    pub(crate) fn begin(
        args: &FormatArgs,
        tools: &[Tool],
        tokenizer: &Arc<Tokenizer>,
        terminal: Terminal,
    ) -> Result<Preparation> {
        let format = format(args, terminal)?;
        let tools = !tools.is_empty() && !args.no_tool_grammar;
        let grammars = (format.is_some() || tools).then(|| {
            let tokenizer = Arc::clone(tokenizer);
            thread::spawn(|| Grammars::new(tokenizer))
        });
        Ok(Preparation {
            format,
            is_typed: args.json_schema.is_some() || args.grammar.is_some(),
            tools,
            grammars,
        })
    }

    /// Waits until they are ready.
    pub(crate) fn finish(self) -> Result<StructuredOutput> {
        let grammars = match self.grammars {
            Some(thread) => {
                let grammars = thread.join();
                let grammars = grammars.map_err(|_| anyhow!("the grammars cannot be prepared"))?;
                Some(grammars.context("answers of this model cannot be constrained")?)
            }
            None => None,
        };
        Ok(StructuredOutput {
            format: self.format,
            is_typed: self.is_typed,
            tools: self.tools,
            grammars,
            told: Cell::new(false),
        })
    }
}

/// Structure of all answers of a session.
pub(crate) struct StructuredOutput {
    format: Option<Format>,
    /// The format is the value of a flag, not a file's.
    is_typed: bool,
    /// Calls must fit the schemas of their tools.
    tools: bool,
    /// `None` where nothing is asked for.
    grammars: Option<Grammars>,
    /// Set once it is said what cannot be enforced.
    told: Cell<bool>,
}

/// An answer that is about to begin.
pub(crate) struct Asked<'a> {
    pub(crate) prompt: &'a [TokenId],
    pub(crate) tools: &'a [Tool],
    pub(crate) thinking: bool,
}

impl StructuredOutput {
    /// The constraint of an answer. Says, once, what of it cannot be enforced.
    pub(crate) fn constraint(
        &self,
        asked: &Asked<'_>,
        tokenizer: &Tokenizer,
        terminal: Terminal,
    ) -> Result<Option<ConstraintSource>> {
        let Some(grammars) = &self.grammars else {
            return Ok(None);
        };
        let tools = (self.tools && !asked.tools.is_empty()).then_some(Tools {
            tools: asked.tools,
            choice: ToolChoice::Auto,
            parallel: true,
        });
        let thinking = if asked.thinking {
            Thinking::Allowed { budget: None }
        } else {
            Thinking::Off
        };
        let compiled = grammars.compile(&Answer {
            format: self.format.clone(),
            tools,
            thinking,
            start: Start::after(tokenizer, asked.prompt),
        });
        let compiled = compiled.map_err(|error| match error {
            GrammarError::Schema { .. }
            | GrammarError::Grammar { .. }
            | GrammarError::Unsupported { .. }
            | GrammarError::TooLong { .. }
            | GrammarError::TooDeep { .. }
                if self.is_typed =>
            {
                Misuse::error(error)
            }
            error => error.into(),
        })?;
        let Some(compiled) = compiled else {
            return Ok(None);
        };
        if !self.told.replace(true) {
            for keyword in &compiled.ignored {
                terminal.note(format_args!("{keyword} is not enforced"));
            }
        }
        Ok(Some(compiled.source))
    }
}

fn format(args: &FormatArgs, terminal: Terminal) -> Result<Option<Format>> {
    let schema = |text: &str, origin: &str| -> Result<Format> {
        let schema = serde_json::from_str(text);
        Ok(Format::JsonSchema {
            schema: schema.with_context(|| format!("{origin} is not JSON"))?,
            strict: false,
        })
    };
    Ok(if let Some(path) = &args.schema {
        Some(schema(
            &input::text(path, terminal)?,
            &format!("`{}`", path.display()),
        )?)
    } else if let Some(text) = &args.json_schema {
        Some(schema(text, "the schema").map_err(|error| Misuse::error(format_args!("{error:#}")))?)
    } else if let Some(path) = &args.grammar_file {
        Some(Format::Gbnf(input::text(path, terminal)?))
    } else {
        args.grammar.clone().map(Format::Gbnf)
    })
}
