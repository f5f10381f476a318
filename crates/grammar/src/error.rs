//! Reasons an answer cannot be constrained as asked, in words for whoever asked.

use std::time::Duration;

/// Reason a grammar was refused. All but [`GrammarError::Busy`] are the request's own fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// More text than is compiled for one request.
    #[error("the {what} has {bytes} bytes; at most {most} are allowed")]
    TooLong {
        /// Schema, grammar and the like.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// Longest that is allowed.
        most: usize,
    },
    /// Nested past what is compiled.
    #[error("the {what} is nested more than {most} levels deep")]
    TooDeep {
        /// Schema, grammar and the like.
        what: &'static str,
        /// Deepest that is allowed.
        most: usize,
    },
    /// A keyword of JSON schema that cannot be enforced.
    #[error(
        "`{keyword}` at `{path}` of the schema is not supported; remove it, or send `strict: false` to have it ignored"
    )]
    Unsupported {
        /// The keyword, with its value where that is the trouble.
        keyword: String,
        /// JSON pointer to the schema it stands in.
        path: String,
    },
    /// A schema that is wrong, or that nothing can fulfil.
    #[error("the schema cannot be used: {reason} (at `{path}`)")]
    Schema {
        /// JSON pointer to the part in question; `#` where that is not known.
        path: String,
        /// Its fault.
        reason: String,
    },
    /// A regular expression, choice or grammar that is wrong.
    #[error("the {what} cannot be used: {reason}")]
    Grammar {
        /// Name of its kind.
        what: &'static str,
        /// Its fault.
        reason: String,
    },
    /// More tools than are compiled for one request.
    #[error("{count} tools are given; at most {most} are allowed")]
    ToolCount {
        /// Tools given.
        count: usize,
        /// Most that are allowed.
        most: usize,
    },
    /// A tool that no call can name, or whose parameters make no sense.
    #[error("the tool `{name}` cannot be called: {reason}")]
    Tool {
        /// Name of the tool.
        name: String,
        /// Its fault.
        reason: String,
    },
    /// A call was demanded of a tool that is not there.
    #[error("a call of the tool `{name}` is required, but no such tool is given")]
    UnknownTool {
        /// Name that was asked for.
        name: String,
    },
    /// A call was demanded, but there is nothing to call.
    #[error("a tool call is required, but no tools are given")]
    NoTools,
    /// The model's vocabulary lacks a mark that this kind of answer needs.
    #[error("the model has no `{text}` token, without which such answers cannot be constrained")]
    MissingToken {
        /// Text of the mark.
        text: &'static str,
    },
    /// Compiling was given up.
    #[error("the {what} took longer than {} s to compile; make it simpler", limit.as_secs_f32())]
    TooSlow {
        /// Schema, grammar and the like.
        what: &'static str,
        /// Time it was given.
        limit: Duration,
    },
    /// Too many grammars that were given up still compile. Worth trying again.
    #[error("too many grammars are being compiled; try again later")]
    Busy,
}
