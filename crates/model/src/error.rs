//! What keeps a file from being a Gemma 4 model we can run.

use carat_gguf::GgufError;

use crate::config::LayerKind;

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("the model's architecture is `{found}`; Carat runs `gemma4`{hint}")]
    Architecture { found: String, hint: &'static str },
    #[error("metadata key `{key}` is {value}: {problem}")]
    Setting {
        key: String,
        value: String,
        problem: String,
    },
    #[error("tensor `{name}` is missing{}", .layer.map(|k| format!(" (needed by a {k} layer)")).unwrap_or_default())]
    MissingTensor {
        name: String,
        layer: Option<LayerKind>,
    },
    #[error(
        "tensor `{name}`: shape {found:?} in the file, {expected:?} expected{}",
        .layer.map(|k| format!(" for a {k} layer")).unwrap_or_default()
    )]
    Shape {
        name: String,
        found: Vec<usize>,
        expected: Vec<usize>,
        layer: Option<LayerKind>,
    },
    #[error(
        "the vocabulary has {tokens} tokens, but `token_embd.weight` has {rows} rows; the file is inconsistent"
    )]
    Vocabulary { tokens: usize, rows: usize },
}
