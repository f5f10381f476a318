//! Failures between messages and tokens, by what the caller can do about them.

use carat_gguf::GgufError;

/// Reason a tokenizer or template cannot be made, or a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The file's metadata is incomplete or has unexpected types.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// A file of another model family.
    #[error(
        "the file's tokenizer is `{found}`; only `gemma4` is supported, so this is not a Gemma 4 model or was converted by an old tool"
    )]
    TokenizerModel {
        /// Tokenizer the file names.
        found: String,
    },
    /// Lists of the vocabulary that differ in length.
    #[error(
        "metadata key `{key}` has {found} entries, but the vocabulary has {expected} tokens; the file is damaged"
    )]
    VocabularySize {
        /// Metadata key of the list.
        key: &'static str,
        /// Entries in it.
        found: usize,
        /// Tokens of the vocabulary.
        expected: usize,
    },
    /// A vocabulary past what token ids and text offsets can express.
    #[error(
        "the vocabulary has {tokens} tokens in {bytes} bytes, more than 32-bit ids can address"
    )]
    VocabularyTooLarge {
        /// Tokens read so far.
        tokens: usize,
        /// Bytes of their texts.
        bytes: usize,
    },
    /// A token id past the end of the vocabulary.
    #[error("metadata key `{key}` names token {id}, but the vocabulary has {count} tokens")]
    UnknownTokenId {
        /// Metadata key that holds the id.
        key: &'static str,
        /// Id in the file.
        id: u32,
        /// Tokens of the vocabulary.
        count: usize,
    },
    /// A token without which no text can be encoded.
    #[error("the vocabulary has no token `{text}`, which every Gemma 4 vocabulary has")]
    MissingToken {
        /// Text the token would have.
        text: String,
    },
    /// A merge that cannot be applied.
    #[error("merge {rank} is `{text}`: {reason}; the file is damaged")]
    Merge {
        /// Place in the list of merges, from 0.
        rank: usize,
        /// The merge as the file has it.
        text: String,
        /// Fault, to follow a colon.
        reason: &'static str,
    },
    /// The template cannot be used at all; every conversation would fail.
    #[error("the chat template cannot be read, line {line}: {reason}")]
    TemplateSyntax {
        /// Line of the template, from 1; 0 where none is to blame.
        line: usize,
        /// Fault, to follow a colon.
        reason: String,
        /// Error of the template engine.
        cause: minijinja::Error,
    },
    /// The template is sound, but of a size or form that no conversation needs and the engine cannot bear.
    #[error("the chat template cannot be used, line {line}: {reason}; use another template")]
    TemplateRejected {
        /// Line of the template, from 1; 0 where none is to blame.
        line: usize,
        /// Fault, to follow a colon.
        reason: String,
    },
    /// The template said no, with its own words: the conversation is of a form it does not support.
    #[error("the chat template refuses this conversation, line {line}: {message}")]
    TemplateRefused {
        /// Line of the template, from 1.
        line: usize,
        /// Words of the template.
        message: String,
    },
    /// The template broke off: it does not fit this conversation, or asks for something unknown.
    #[error("the chat template failed, line {line}: {reason}")]
    TemplateFailed {
        /// Line of the template, from 1; 0 where none is to blame.
        line: usize,
        /// Fault, to follow a colon.
        reason: String,
        /// Error of the template engine.
        cause: minijinja::Error,
    },
    /// The template ran into a bound that protects this process: steps, bytes or nesting.
    #[error(
        "the chat template takes more than any template needs, line {line}: {excess}; shorten the conversation or use another template"
    )]
    TemplateExcess {
        /// Line of the template, from 1; 0 where none is to blame.
        line: usize,
        /// Bound, to follow a colon.
        excess: String,
    },
    /// More messages than a conversation may have.
    #[error(
        "the conversation has {found} messages, more than the {} that can be rendered; leave out the oldest",
        crate::template::MAX_MESSAGES
    )]
    TooManyMessages {
        /// Messages of the conversation.
        found: usize,
    },
    /// More text than a conversation may have.
    #[error(
        "the conversation has {bytes} bytes of text, more than the {} that can be rendered; shorten its messages or leave out the oldest",
        crate::template::MAX_INPUT_BYTES
    )]
    ConversationTooLarge {
        /// Bytes of its messages and tools.
        bytes: usize,
    },
    /// No character is left to mark text of users with.
    #[error(
        "the conversation uses every private-use character, so its text cannot be told from the template's"
    )]
    NoGuardCharacter,
}
