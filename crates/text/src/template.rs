//! A conversation to a prompt, by the model file's own Jinja template.
//!
//! Templates differ between model sizes and dates, and the model was trained with its own; so the file's template
//! decides, and the built-in one stands in only where a file has none. What is done here is to hand the conversation
//! over in the form each template generation expects (`context`), to give templates the few Python functions they use
//! (`python`), and to keep text of users apart from the template's marks (`guard`), and integers whole (`integers`).
//!
//! A file can come from anyone, so its template is a program nobody has read. It gets so many steps and so many bytes
//! (`limits`), counted by a meter (`meter`) that is called from its compiled code (`instrument`, `checks`, `slice`) and
//! before each of the engine's filters and functions (`builtins`, `price`). What the compiler itself could not bear is
//! refused before (`source`).

mod builtins;
mod checks;
mod context;
mod date;
mod guard;
mod instrument;
mod integers;
mod limits;
mod meter;
mod price;
mod python;
mod slice;
mod source;

pub use guard::Rendered;
pub(crate) use guard::is_bracketed;
pub use limits::{MAX_INPUT_BYTES, MAX_MESSAGES, TemplateLimits, conversation_bytes};

use std::error::Error as _;

use carat_gguf::Metadata;
use minijinja::{
    AutoEscape, Environment, ErrorKind, Value, machinery, syntax::SyntaxConfig, value::Serde,
};
use serde_json::Map;

use self::{
    context::{Habits, context},
    guard::Guard,
    integers::Unmarked,
};
use crate::{Message, TextError, Tool, Vocab, chat::exact::unused_characters};

const TEMPLATE_KEY: &str = "tokenizer.chat_template";
const EOS_TEXT: &str = "<eos>";
const NAME: &str = "chat_template";
/// A thought that is over before it began.
const EMPTY_THOUGHT: &str = "<|channel>thought\n<channel|>";

/// Used where a file brings no template.
const FALLBACK: &str = include_str!("template/fallback.jinja");

/// Choices about a prompt; `default()` is a plain chat about to be answered.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// Asks the model to think before it answers.
    pub thinking: bool,
    /// Ends the prompt where the model's answer begins.
    pub add_generation_prompt: bool,
    /// Now, in seconds since 1970 (UTC), for templates that mention the date.
    pub unix_time: Option<i64>,
}

impl Default for RenderOptions {
    fn default() -> RenderOptions {
        RenderOptions {
            thinking: false,
            add_generation_prompt: true,
            unix_time: None,
        }
    }
}

/// A chat template, checked and ready to use.
#[derive(Debug)]
pub struct ChatTemplate {
    /// Holds the template, compiled, and nothing else.
    compiled: Environment<'static>,
    /// Holds what templates may use, and no template: one that includes itself would run past the meter.
    environment: Environment<'static>,
    habits: Habits,
    bos_text: String,
}

impl ChatTemplate {
    /// The file's template, or the built-in one where it has none.
    pub fn from_metadata(metadata: &Metadata, vocab: &Vocab) -> Result<ChatTemplate, TextError> {
        ChatTemplate::new(metadata.str(TEMPLATE_KEY)?.unwrap_or(FALLBACK), vocab)
    }

    /// A template from its source, for instance one that repairs an old file's.
    pub fn new(source: &str, vocab: &Vocab) -> Result<ChatTemplate, TextError> {
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(syntax_error)?;
        source::check(source, &syntax).map_err(|fault| TextError::TemplateRejected {
            line: fault.line,
            reason: fault.reason,
        })?;
        let mut compiled = Environment::new();
        compiled.set_syntax(syntax);
        compiled
            .add_template_owned(NAME, source.to_owned())
            .map_err(syntax_error)?;
        let mut environment = Environment::new();
        // So that a fault names the expression, also in programs built without checks.
        environment.set_debug(true);
        builtins::add_to(&mut environment);
        python::add_to(&mut environment);
        integers::add_to(&mut environment);
        checks::add_to(&mut environment);
        Ok(ChatTemplate {
            compiled,
            environment,
            habits: Habits::of(source),
            bos_text: vocab.text(vocab.bos()).unwrap_or_default().to_owned(),
        })
    }

    /// The prompt for a conversation, to be encoded with [`crate::Tokenizer::encode_rendered`].
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Tool],
        options: &RenderOptions,
    ) -> Result<Rendered, TextError> {
        let limits = TemplateLimits::for_conversation(messages, tools)?;
        let (mut context, mark) = self.context(messages, tools)?;
        let guard = Guard::for_strings_of(&context)?;
        if let Some(guard) = &guard {
            guard.apply(&mut context);
            context.insert(python::GUARD.to_owned(), guard.characters().into());
        }
        context.insert("bos_token".to_owned(), self.bos_text.clone().into());
        context.insert("eos_token".to_owned(), EOS_TEXT.into());
        context.insert("enable_thinking".to_owned(), options.thinking.into());
        context.insert(
            "add_generation_prompt".to_owned(),
            options.add_generation_prompt.into(),
        );
        if let Some(unix_time) = options.unix_time {
            context.insert(python::UNIX_TIME.to_owned(), unix_time.into());
        }
        let mut text = self
            .run(
                Value::from(Serde(Unmarked {
                    context: &context,
                    mark,
                })),
                &limits,
            )
            .map_err(|error| render_error(error, &limits))?;
        if text.len() > limits.output_bytes {
            return Err(TextError::TemplateExcess {
                line: 0,
                excess: format!("it writes more than {} bytes", limits.output_bytes),
            });
        }
        // Some templates leave the turn closed, for instance after a tool's result; the model would then answer as
        // nobody. A message cannot fake this end: its brackets are guarded. The model's turn begins as the template begins it
        // elsewhere: models whose prompts end in an empty thought were trained on that.
        if options.add_generation_prompt && text.ends_with("<turn|>\n") {
            text.push_str("<|turn>model\n");
            if self.habits.empty_thought && !options.thinking {
                text.push_str(EMPTY_THOUGHT);
            }
        }
        Ok(Rendered::new(text, guard))
    }

    /// The conversation, and the mark of integers beyond 64 bits if there are such in it.
    fn context(
        &self,
        messages: &[Message],
        tools: &[Tool],
    ) -> Result<(Map<String, serde_json::Value>, Option<char>), TextError> {
        let plain = context(messages, tools, self.habits, None);
        let has_large = messages.iter().any(Message::holds_large_integers)
            || tools.iter().any(Tool::holds_large_integers);
        if !has_large {
            return Ok((plain, None));
        }
        let [mark] = unused_characters(plain.values()).ok_or(TextError::NoGuardCharacter)?;
        let marked = context(messages, tools, self.habits, Some(mark));
        Ok((marked, Some(mark)))
    }

    fn run(&self, context: Value, limits: &TemplateLimits) -> Result<String, minijinja::Error> {
        // Fuel belongs to the environment; a copy shares everything else.
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(limits.steps));
        let template = self.compiled.get_template(NAME)?;
        let compiled = machinery::get_compiled_template(&template);
        let code = instrument::with_checks(&compiled.instructions, Some(limits.work_bytes));
        let blocks = compiled
            .blocks
            .iter()
            .map(|(name, block)| (*name, instrument::with_checks(block, None)))
            .collect();
        let mut text = String::new();
        let mut output = machinery::make_string_output(&mut text);
        machinery::eval(
            &environment,
            &code,
            context,
            &blocks,
            &mut output,
            AutoEscape::None,
        )?;
        drop(output);
        Ok(text)
    }
}

fn reason(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => shortened(detail),
        None => error.kind().to_string(),
    }
}

/// The beginning of a message that a template had a hand in.
fn shortened(message: &str) -> String {
    const LONGEST: usize = 500;
    message.chars().take(LONGEST).collect()
}

fn syntax_error(error: minijinja::Error) -> TextError {
    TextError::TemplateSyntax {
        line: error.line().unwrap_or(0),
        reason: reason(&error),
        cause: error,
    }
}

fn render_error(error: minijinja::Error, limits: &TemplateLimits) -> TextError {
    let line = error.line().unwrap_or(0);
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::TemplateExcess {
            line,
            excess: format!(
                "it takes more than {} steps and may never end",
                limits.steps
            ),
        };
    }
    let mut cause = error.source();
    while let Some(source) = cause {
        if let Some(refusal) = source.downcast_ref::<python::Refusal>() {
            return TextError::TemplateRefused {
                line,
                message: shortened(&refusal.0),
            };
        }
        if let Some(excess) = source.downcast_ref::<meter::Excess>() {
            return TextError::TemplateExcess {
                line,
                excess: excess.to_string(),
            };
        }
        cause = source.source();
    }
    TextError::TemplateFailed {
        line,
        reason: reason(&error),
        cause: error,
    }
}

#[cfg(test)]
mod tests;
