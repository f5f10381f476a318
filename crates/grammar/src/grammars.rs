//! Compiles what answers have to look like, once per text, with a limit on everything.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use carat_engine::ConstraintSource;
use carat_text::Tokenizer;
use llguidance::{
    Matcher, ParserFactory, api::TopLevelGrammar, earley::SlicedBiasComputer,
    toktrie::InferenceCapabilities,
};
use toktrie::{TokEnv, TokenId, TokenizerEnv};

use crate::{
    Answer, Format, GrammarError, Meter, Start, Thinking, ToolChoice, Tools,
    cache::Cache,
    counted::CountedMasks,
    follower::MaskThreads,
    formats,
    guide::{Calls, Content, Guide, Outline},
    meter::count,
    schema, tools,
    vocabulary::Vocabulary,
};

/// Grammars that compile at the same time, those that were given up included.
const MAX_COMPILING: usize = 16;
/// Schemas refer to each other in chains as long as their text allows; compiling follows them by recursion.
const COMPILE_STACK_BYTES: usize = 256 << 20;
/// One to two kilobytes each.
const MAX_LEXER_STATES: usize = 50_000;
/// Longest reason that is passed on, in characters.
const LONGEST_REASON: usize = 300;

/// What a process that compiles grammars can choose.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Masks are computed by threads of their own from the moment a token is taken; otherwise by the thread that asks, when it asks.
    pub masks_ahead: bool,
    /// Time that one grammar may take to compile.
    pub compile_limit: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            masks_ahead: true,
            compile_limit: Duration::from_secs(2),
        }
    }
}

/// Compiles grammars for one model and keeps those used last. Clones share everything.
#[derive(Clone)]
pub struct Grammars {
    shared: Arc<Shared>,
}

struct Shared {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    masks: Arc<CountedMasks>,
    cache: Cache<Grammar>,
    meter: Arc<Meter>,
    mask_threads: Option<Arc<MaskThreads>>,
    compiling: Arc<AtomicUsize>,
    compile_limit: Duration,
}

/// A grammar that is ready to be followed.
#[derive(Clone)]
pub(crate) struct Grammar(Arc<Mutex<Matcher>>);

impl Grammar {
    /// A matcher that has seen nothing yet.
    pub(crate) fn start(&self) -> Matcher {
        let matcher = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        matcher.deep_clone()
    }
}

/// Constraint of an answer.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// For [`Request::constraint`](carat_engine::Request).
    pub source: ConstraintSource,
    /// Keywords of schemas that are not enforced, each with its place.
    pub ignored: Vec<String>,
}

impl Grammars {
    /// Prepares the tokens of a model. Takes about a second and a half for 262,144 of them, and 140 MB.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Result<Grammars, GrammarError> {
        Grammars::with(Settings::default(), tokenizer)
    }

    /// The same, with settings.
    pub fn with(settings: Settings, tokenizer: Arc<Tokenizer>) -> Result<Grammars, GrammarError> {
        let unusable = |error: &dyn std::fmt::Display| GrammarError::Grammar {
            what: "vocabulary",
            reason: reason(error),
        };
        let vocabulary = Arc::new(Vocabulary::new(tokenizer)?);
        let env: TokEnv = Arc::<Vocabulary>::clone(&vocabulary);
        let capabilities = InferenceCapabilities {
            ff_tokens: true,
            ..InferenceCapabilities::default()
        };
        let slices = SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, capabilities, &slices).map_err(|error| unusable(&error))?;
        factory.quiet();
        let masks = CountedMasks::new(vocabulary.tok_trie(), factory.slicer());
        let limits = factory.limits_mut();
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.verbose_errors = false;
        Ok(Grammars {
            shared: Arc::new(Shared {
                vocabulary,
                factory,
                masks: Arc::new(masks),
                cache: Cache::new(),
                meter: Arc::default(),
                mask_threads: settings.masks_ahead.then(MaskThreads::of_machine).flatten(),
                compiling: Arc::default(),
                compile_limit: settings.compile_limit,
            }),
        })
    }

    /// Counters of all that was compiled and followed.
    pub fn meter(&self) -> &Meter {
        &self.shared.meter
    }

    /// The constraint of an answer; `None` where it may be anything. Takes milliseconds, two seconds at most, and blocks.
    pub fn compile(&self, answer: &Answer<'_>) -> Result<Option<Compiled>, GrammarError> {
        let shared = &self.shared;
        let marks = *shared.vocabulary.vocab().marks();
        let mut ignored = Vec::new();
        let calls = match &answer.tools {
            Some(tools) => self.calls(tools, &mut ignored)?,
            None => None,
        };
        let must_call = calls.is_some()
            && answer.tools.as_ref().is_some_and(|tools| {
                matches!(tools.choice, ToolChoice::Required | ToolChoice::Named(_))
            });
        let content = match &answer.format {
            _ if must_call => Content::Nothing,
            Some(format) => Content::Format(self.format(format, &mut ignored)?),
            None => Content::Free,
        };
        let budget = match answer.thinking {
            Thinking::Off => None,
            Thinking::Allowed { budget } => budget,
        };
        let thinks = answer.thinking != Thinking::Off;
        let is_free = matches!(content, Content::Free) && answer.tools.is_none();
        if is_free && budget.is_none() {
            return Ok(None);
        }
        let in_thought = answer.start == Start::InThought;
        if (thinks || in_thought) && marks.channel_end.is_none() {
            return Err(GrammarError::MissingToken { text: "<channel|>" });
        }
        let outline = Arc::new(Outline {
            vocabulary: Arc::clone(&shared.vocabulary),
            meter: Arc::clone(&shared.meter),
            mask_threads: shared.mask_threads.clone(),
            thought: thinks && answer.start == Start::Fresh,
            budget,
            content,
            calls,
        });
        let source =
            ConstraintSource::new(move || Box::new(Guide::new(Arc::clone(&outline), in_thought)));
        Ok(Some(Compiled { source, ignored }))
    }

    fn calls(
        &self,
        tools: &Tools<'_>,
        ignored: &mut Vec<String>,
    ) -> Result<Option<Calls>, GrammarError> {
        let offered: Vec<_> = match &tools.choice {
            ToolChoice::None => return Ok(None),
            ToolChoice::Auto if tools.tools.is_empty() => return Ok(None),
            ToolChoice::Required if tools.tools.is_empty() => return Err(GrammarError::NoTools),
            ToolChoice::Auto | ToolChoice::Required => tools.tools.iter().collect(),
            ToolChoice::Named(name) => {
                let named = tools.tools.iter().find(|tool| tool.name == *name);
                vec![named.ok_or_else(|| GrammarError::UnknownTool { name: name.clone() })?]
            }
        };
        let marks = tools::CallMarks::of(self.shared.vocabulary.vocab())?;
        let call = tools::grammar(&offered, &marks)?;
        ignored.extend(call.ignored);
        let grammar = TopLevelGrammar::from_lark(call.lark.clone());
        let prepared = self.prepare("tools", call.lark, grammar, Some(marks.start));
        let grammar = prepared.map_err(|failure| match failure {
            Failure::Refused(reason) => GrammarError::Grammar {
                what: "parameters of the tools",
                reason,
            },
            Failure::Other(error) => error,
        })?;
        Ok(Some(Calls {
            grammar,
            parallel: tools.parallel && !matches!(tools.choice, ToolChoice::Named(_)),
        }))
    }

    fn format(&self, format: &Format, ignored: &mut Vec<String>) -> Result<Grammar, GrammarError> {
        let (what, lark) = match format {
            Format::JsonObject => {
                let schema = serde_json::json!({"type": "object"});
                return self.schema(&schema, true, ignored);
            }
            Format::JsonSchema { schema, strict } => return self.schema(schema, *strict, ignored),
            Format::Regex(regex) => ("regular expression", formats::regex(regex)?),
            Format::Choice(choices) => ("choice", formats::choice(choices)?),
            Format::Lark(grammar) => ("grammar", formats::lark(grammar)?),
            Format::Gbnf(grammar) => ("grammar", formats::gbnf(grammar)?),
        };
        let grammar = TopLevelGrammar::from_lark(lark.clone());
        let prepared = self.prepare(what, lark, grammar, None);
        prepared.map_err(|failure| match failure {
            Failure::Refused(reason) => GrammarError::Grammar { what, reason },
            Failure::Other(error) => error,
        })
    }

    fn schema(
        &self,
        schema: &serde_json::Value,
        strict: bool,
        ignored: &mut Vec<String>,
    ) -> Result<Grammar, GrammarError> {
        let checked = schema::check(schema)?;
        if let Some(unsupported) = checked.unsupported.first().filter(|_| strict) {
            return Err(unsupported.clone().into());
        }
        let prepare = |mode| {
            let schema = match mode {
                schema::Mode::Exact => schema::with_separators(schema),
                schema::Mode::Lenient => schema::lenient(schema, &checked.unsupported),
            };
            let text = format!("%json {schema}");
            let grammar = TopLevelGrammar::from_json_schema(schema);
            self.prepare("schema", text, grammar, None)
        };
        let refusal = if checked.unsupported.is_empty() {
            match prepare(schema::Mode::Exact) {
                Ok(grammar) => return Ok(grammar),
                Err(Failure::Other(error)) => return Err(error),
                Err(Failure::Refused(reason)) => Some(schema::locate(schema, &reason)),
            }
        } else {
            None
        };
        match refusal {
            Some(error) if strict => Err(error),
            refusal => match prepare(schema::Mode::Lenient) {
                Ok(grammar) => {
                    let refused = refusal.map(|error| error.to_string());
                    let unsupported = checked.unsupported.iter().map(ToString::to_string);
                    ignored.extend(refused.into_iter().chain(unsupported));
                    Ok(grammar)
                }
                Err(Failure::Other(error)) => Err(error),
                Err(Failure::Refused(reason)) => Err(schema::locate(schema, &reason)),
            },
        }
    }

    /// Compiles a grammar unless that has been done, on a thread that is left to itself if it takes too long. `first` is a token
    /// that has been seen by the time the grammar is followed.
    fn prepare(
        &self,
        what: &'static str,
        text: String,
        grammar: TopLevelGrammar,
        first: Option<TokenId>,
    ) -> Result<Grammar, Failure> {
        let shared = &self.shared;
        if let Some(grammar) = shared.cache.get(&text) {
            count(&shared.meter.cached);
            return Ok(grammar);
        }
        let start = Instant::now();
        let permit = Permit::take(&shared.compiling).ok_or(GrammarError::Busy)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let owner = Arc::clone(shared);
        thread::Builder::new()
            .name("grammar".to_owned())
            .stack_size(COMPILE_STACK_BYTES)
            .spawn(move || {
                let matcher = build(&owner, grammar, first);
                drop(permit);
                // Whoever asked may have given up.
                let _ = sender.send(matcher);
            })
            .map_err(|_| GrammarError::Busy)?;
        let built = receiver.recv_timeout(shared.compile_limit);
        shared.meter.compile.add(start.elapsed());
        let matcher = built.map_err(|_| GrammarError::TooSlow {
            what,
            limit: shared.compile_limit,
        })?;
        let grammar = Grammar(Arc::new(Mutex::new(matcher.map_err(Failure::Refused)?)));
        shared.cache.put(text, grammar.clone());
        Ok(grammar)
    }
}

#[cfg(test)]
impl Grammars {
    /// The grammar of a regular expression.
    pub(crate) fn regex(&self, regex: &str) -> Result<Grammar, GrammarError> {
        self.format(&Format::Regex(regex.to_owned()), &mut Vec::new())
    }
}

/// Reason a grammar could not be prepared.
enum Failure {
    /// The grammar is at fault.
    Refused(String),
    Other(GrammarError),
}

impl From<GrammarError> for Failure {
    fn from(error: GrammarError) -> Failure {
        Failure::Other(error)
    }
}

fn build(
    shared: &Shared,
    grammar: TopLevelGrammar,
    first: Option<TokenId>,
) -> Result<Matcher, String> {
    let parser = shared.factory.create_parser(grammar);
    let mut parser = parser.map_err(|error| reason(&error))?;
    parser.bias_computer = Arc::<CountedMasks>::clone(&shared.masks);
    let mut matcher = Matcher::new(Ok(parser));
    if let Some(first) = first {
        matcher.consume_token(first).map_err(|e| reason(&e))?;
    }
    // Answers start with what this has worked out; a grammar that allows nothing shows here.
    matcher.compute_ff_tokens();
    matcher.compute_mask_or_eos().map_err(|e| reason(&e))?;
    Ok(matcher)
}

/// The message of an error, without what only the compiler's authors understand.
fn reason(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default().trim();
    let line = line.rsplit("failed to compile JSON schema: ").next();
    match line.unwrap_or_default() {
        "" | "NoExtensionBias" => "no text can match it".to_owned(),
        line if line.starts_with("panic") => "it is more than can be compiled".to_owned(),
        line => line.chars().take(LONGEST_REASON).collect(),
    }
}

/// The right to compile, given back when dropped.
struct Permit(Arc<AtomicUsize>);

impl Permit {
    fn take(compiling: &Arc<AtomicUsize>) -> Option<Permit> {
        let permit = Permit(Arc::clone(compiling));
        // Dropping it gives back what was taken, also if it was too much.
        (compiling.fetch_add(1, Relaxed) < MAX_COMPILING).then_some(permit)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_run_out_and_come_back() {
        let compiling = Arc::default();
        let mut permits: Vec<_> = (0..MAX_COMPILING)
            .map(|_| Permit::take(&compiling).expect("one is left"))
            .collect();
        assert!(Permit::take(&compiling).is_none());
        assert!(Permit::take(&compiling).is_none(), "asking costs nothing");
        permits.pop();
        assert!(Permit::take(&compiling).is_some());
    }

    #[test]
    fn reasons_are_one_line_in_plain_words() {
        assert_eq!(
            reason(&"NoExtensionBias\n<non-verbose/>"),
            "no text can match it"
        );
        assert_eq!(
            reason(&"panic: overflow\n<backtrace>"),
            "it is more than can be compiled"
        );
        let nested = "at 25(7): failed to compile JSON schema: bad thing\n 23 | open8";
        assert_eq!(reason(&nested), "bad thing");
        assert_eq!(reason(&"x".repeat(1000)).len(), LONGEST_REASON);
    }
}
