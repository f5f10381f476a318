//! What can go wrong between messages and tokens, by what the caller can do about it.

use carat_gguf::GgufError;

#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The file's metadata is incomplete or has unexpected types.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    #[error(
        "the file's tokenizer is `{found}`; only `gemma4` is supported, so this is not a Gemma 4 model or was converted by an old tool"
    )]
    TokenizerModel { found: String },
    #[error(
        "metadata key `{key}` has {found} entries, but the vocabulary has {expected} tokens; the file is damaged"
    )]
    VocabularySize {
        key: &'static str,
        found: usize,
        expected: usize,
    },
    #[error(
        "the vocabulary has {tokens} tokens in {bytes} bytes, more than 32-bit ids can address"
    )]
    VocabularyTooLarge { tokens: usize, bytes: usize },
    #[error("metadata key `{key}` names token {id}, but the vocabulary has {count} tokens")]
    UnknownTokenId {
        key: &'static str,
        id: u32,
        count: usize,
    },
    #[error("the vocabulary has no token `{text}`, which every Gemma 4 vocabulary has")]
    MissingToken { text: String },
    #[error("merge {rank} is `{text}`: {reason}; the file is damaged")]
    Merge {
        rank: usize,
        text: String,
        reason: &'static str,
    },
    /// The template cannot be used at all; every conversation would fail.
    #[error("the chat template cannot be read, line {line}: {reason}")]
    TemplateSyntax {
        line: usize,
        reason: String,
        cause: minijinja::Error,
    },
    /// The template said no, with its own words: the conversation is of a form it does not support.
    #[error("the chat template refuses this conversation, line {line}: {message}")]
    TemplateRefused { line: usize, message: String },
    #[error("the chat template failed, line {line}: {reason}")]
    TemplateFailed {
        line: usize,
        reason: String,
        cause: minijinja::Error,
    },
    #[error(
        "the conversation uses every private-use character, so its text cannot be told from the template's"
    )]
    NoGuardCharacter,
}
