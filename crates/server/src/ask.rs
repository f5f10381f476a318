//! The request behind every dialect: one conversation or some prompts, and how to answer.

use carat_engine::chat::Conversation;
use carat_grammar::{Format, ToolChoice};
use carat_model::sampling::Sampling;
use carat_text::TokenId;

use crate::error::ApiError;

/// The most answers to one prompt.
const MAX_CHOICES: u64 = 16;
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
const MAX_TOP_LOGPROBS: u64 = 20;
const MAX_BIASES: usize = 1024;
const MAX_BIAS: f32 = 100.0;
const MAX_TOOLS: usize = 256;
/// As `carat_text` has it; said here so that the answer is a 400 with a path.
pub(crate) const MAX_MESSAGES: usize = 10_000;
const MAX_PROMPTS: usize = 128;

/// What becomes of tokens that end an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    /// They end it.
    Usual,
    /// They are tokens like others: whoever measures a text wants to see them.
    Shown,
    /// They are not drawn.
    Never,
}

impl Ends {
    /// By the parameter that other servers have, too.
    pub(crate) fn ignored(ignore_eos: Option<bool>) -> Ends {
        if ignore_eos == Some(true) {
            Ends::Never
        } else {
            Ends::Usual
        }
    }
}

/// A request, whichever dialect it came in.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) prompt: Prompt,
    /// Answers to each prompt.
    pub(crate) n: usize,
    pub(crate) sampling: SamplingAsk,
    /// A maximum: less room in the context means fewer.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    /// Report log-probabilities, and those of this many of the likeliest.
    pub(crate) logprobs: Option<usize>,
    /// The same of the prompt.
    pub(crate) prompt_logprobs: Option<usize>,
    pub(crate) ends: Ends,
    /// Drafts may be made for it.
    pub(crate) draft: bool,
    pub(crate) format: Option<Format>,
    pub(crate) tool_choice: ToolChoice,
    pub(crate) parallel_calls: bool,
    /// Tokens of thought after which an answer is forced.
    pub(crate) thinking_budget: Option<usize>,
    /// User of the request, as far as it says so itself.
    pub(crate) user: Option<String>,
    pub(crate) cache_salt: Option<String>,
}

/// The thing that is answered.
#[derive(Clone, Debug)]
pub(crate) enum Prompt {
    Chat(Conversation),
    /// Continued as plain text.
    Texts(Vec<Text>),
}

#[derive(Clone, Debug)]
pub(crate) enum Text {
    Plain(String),
    Tokens(Vec<TokenId>),
}

impl Ask {
    pub(crate) fn new(prompt: Prompt) -> Ask {
        Ask {
            prompt,
            n: 1,
            sampling: SamplingAsk::default(),
            max_tokens: None,
            stop: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            ends: Ends::Usual,
            draft: true,
            format: None,
            tool_choice: ToolChoice::Auto,
            parallel_calls: true,
            thinking_budget: None,
            user: None,
            cache_salt: None,
        }
    }

    /// Answers that it comes to.
    pub(crate) fn answers(&self) -> usize {
        let prompts = match &self.prompt {
            Prompt::Chat(_) => 1,
            Prompt::Texts(texts) => texts.len(),
        };
        prompts.saturating_mul(self.n)
    }

    /// Refuses values out of range, before anything is allocated for them.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        match &self.prompt {
            Prompt::Chat(conversation) => {
                let messages = conversation.messages.len();
                if messages == 0 {
                    return Err(ApiError::invalid(
                        "messages",
                        "messages is empty; there is nothing to answer",
                    ));
                }
                at_most("messages", messages, MAX_MESSAGES)?;
                at_most("tools", conversation.tools.len(), MAX_TOOLS)?;
                for (n, tool) in conversation.tools.iter().enumerate() {
                    tool_name(&tool.name, &format!("tools[{n}].function.name"))?;
                    if conversation.tools[..n].iter().any(|t| t.name == tool.name) {
                        return Err(ApiError::invalid(
                            format!("tools[{n}].function.name"),
                            format!("two tools have the name `{}`", tool.name),
                        ));
                    }
                }
            }
            Prompt::Texts(texts) => {
                if texts.is_empty() {
                    return Err(ApiError::invalid(
                        "prompt",
                        "prompt is empty; there is nothing to continue",
                    ));
                }
                at_most("prompt", texts.len(), MAX_PROMPTS)?;
            }
        }
        at_most("stop", self.stop.len(), MAX_STOPS)?;
        for (n, stop) in self.stop.iter().enumerate() {
            if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
                return Err(ApiError::invalid(
                    format!("stop[{n}]"),
                    format!(
                        "a stop string of {} bytes; give 1 to {MAX_STOP_BYTES}",
                        stop.len()
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// A tool's name stands unquoted in the prompt, so it is a plain word.
fn tool_name(name: &str, path: &str) -> Result<(), ApiError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if (1..=64).contains(&name.len()) && name.chars().all(plain) {
        return Ok(());
    }
    let shown: String = name.chars().take(80).collect();
    Err(ApiError::invalid(
        path,
        format!(
            "`{shown}` is no name for a tool; use 1 to 64 letters, digits, underscores, dots and hyphens"
        ),
    ))
}

pub(crate) fn at_most(param: &str, count: usize, most: usize) -> Result<(), ApiError> {
    if count <= most {
        return Ok(());
    }
    Err(ApiError::invalid(
        param,
        format!("{param} has {count} entries; at most {most} are taken"),
    ))
}

/// A number in its range.
pub(crate) fn ranged(
    param: &str,
    value: Option<u64>,
    range: std::ops::RangeInclusive<u64>,
) -> Result<Option<usize>, ApiError> {
    match value {
        Some(value) if !range.contains(&value) => Err(ApiError::invalid(
            param,
            format!(
                "{param} is {value}; it must be from {} to {}",
                range.start(),
                range.end()
            ),
        )),
        value => Ok(value.map(|value| value as usize)),
    }
}

pub(crate) fn choices(value: Option<u64>) -> Result<usize, ApiError> {
    Ok(ranged("n", value, 1..=MAX_CHOICES)?.unwrap_or(1))
}

pub(crate) fn top_logprobs(param: &str, value: Option<u64>) -> Result<Option<usize>, ApiError> {
    ranged(param, value, 0..=MAX_TOP_LOGPROBS)
}

/// The most tokens; past what any context holds it means "as many as fit".
pub(crate) fn max_tokens(param: &str, value: Option<i64>) -> Result<Option<usize>, ApiError> {
    match value {
        // llama.cpp's and Ollama's word for "no limit".
        Some(-1) | None => Ok(None),
        Some(value) if value < 1 => Err(ApiError::invalid(
            param,
            format!("{param} is {value}; ask for at least 1 token"),
        )),
        Some(value) => Ok(Some(usize::try_from(value).unwrap_or(usize::MAX))),
    }
}

/// Sampling that a request asks for; the model's own settings elsewhere.
#[derive(Clone, Debug, Default)]
pub(crate) struct SamplingAsk {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_k: Option<i64>,
    pub(crate) top_p: Option<f32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repeat_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) penalty_window: Option<usize>,
    pub(crate) logit_bias: Vec<(TokenId, f32)>,
    pub(crate) seed: Option<u64>,
}

impl SamplingAsk {
    /// Over the model's own settings. A seed that nobody gave is drawn.
    pub(crate) fn resolve(&self, defaults: &Sampling) -> Result<Sampling, ApiError> {
        let top_k = match self.top_k {
            None => defaults.top_k,
            // Both are said to mean "all".
            Some(k) if k <= 0 => 0,
            Some(k) => usize::try_from(k).unwrap_or(usize::MAX),
        };
        // Zero keeps the likeliest alone, as the limit of small ones does.
        let top_p = self.top_p.unwrap_or(defaults.top_p);
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k,
            top_p: if top_p == 0.0 {
                f32::MIN_POSITIVE
            } else {
                top_p
            },
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(defaults.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            penalty_window: self.penalty_window.unwrap_or(defaults.penalty_window),
            logit_bias: [&defaults.logit_bias[..], &self.logit_bias].concat(),
            seed: self.seed.unwrap_or_else(crate::ids::seed),
        };
        match sampling.complaint() {
            Some(complaint) => Err(ApiError::invalid("sampling", complaint)),
            None => Ok(sampling),
        }
    }
}

/// OpenAI's map from token ids to biases. -100 forbids a token, as their documentation has it.
pub(crate) fn logit_bias(
    map: &serde_json::Map<String, serde_json::Value>,
) -> Result<Vec<(TokenId, f32)>, ApiError> {
    at_most("logit_bias", map.len(), MAX_BIASES)?;
    map.iter()
        .map(|(id, bias)| {
            let path = format!("logit_bias.{}", id.chars().take(20).collect::<String>());
            let token = id
                .parse()
                .map_err(|_| ApiError::invalid(&path, "keys of logit_bias are token ids"))?;
            let value = bias.as_f64().map(|b| b as f32);
            let in_range = value.filter(|b| (-MAX_BIAS..=MAX_BIAS).contains(b));
            let value = in_range.ok_or_else(|| {
                ApiError::invalid(
                    &path,
                    format!("a bias is a number from -100 to 100, not {bias}"),
                )
            })?;
            let forbids = value == -MAX_BIAS;
            Ok((token, if forbids { f32::NEG_INFINITY } else { value }))
        })
        .collect()
}
