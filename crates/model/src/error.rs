//! Reasons that keep a file from being a Gemma 4 model we can run.

use carat_gguf::GgufError;

use crate::config::LayerKind;

/// Reason a file is no model that runs here.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file itself is damaged.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// It is another kind of model.
    #[error("the model's architecture is `{found}`; Carat runs `gemma4`{hint}")]
    Architecture {
        /// Value in the file.
        found: String,
        /// Way out; may be empty.
        hint: &'static str,
    },
    /// A setting has a value that cannot be used.
    #[error("metadata key `{key}` is {value}: {problem}")]
    Setting {
        /// Its key.
        key: String,
        /// Found in the file.
        value: String,
        /// Fault, as part of a sentence.
        problem: String,
    },
    /// A tensor that the model needs is not there.
    #[error("tensor `{name}` is missing{}", .layer.map(|k| format!(" (needed by a {k} layer)")).unwrap_or_default())]
    MissingTensor {
        /// Its name.
        name: String,
        /// The kind of layer that needs it.
        layer: Option<LayerKind>,
    },
    /// A tensor has another shape than the settings say.
    #[error(
        "tensor `{name}`: shape {found:?} in the file, {expected:?} expected{}",
        .layer.map(|k| format!(" for a {k} layer")).unwrap_or_default()
    )]
    Shape {
        /// Its name.
        name: String,
        /// In the file.
        found: Vec<usize>,
        /// By the settings.
        expected: Vec<usize>,
        /// The kind of layer it belongs to.
        layer: Option<LayerKind>,
    },
    /// A drafter is not this model's.
    #[error(
        "the drafter does not belong to this model: {what} is {found} in the drafter's file and {expected} in the model's; \
         give the drafter of this model with --draft, or --draft off"
    )]
    Mismatch {
        /// Name of the quantities that should agree.
        what: String,
        /// Of the drafter.
        found: usize,
        /// Of its target.
        expected: usize,
    },
    /// The tokenizer has tokens that the embedding table has not.
    #[error(
        "the vocabulary has {tokens} tokens, but `token_embd.weight` has {rows} rows; the file is inconsistent"
    )]
    Vocabulary {
        /// Of the tokenizer.
        tokens: usize,
        /// Of the embedding table.
        rows: usize,
    },
}
