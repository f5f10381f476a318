//! Everything that can go wrong, by what the caller can do about it.

use carat_cuda::CudaError;
use carat_engine::{ConfigError, EngineError, Rejected, StartError, chat::ChatError};
use carat_gguf::GgufError;
use carat_model::{ModelError, backend::BackendError};
use carat_text::TextError;

/// Reason a model could not be loaded, or did not answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read, or is no model.
    #[error(transparent)]
    File(#[from] GgufError),
    /// The file is a model, but not one that this program runs.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The file's tokenizer or template cannot be used, or a conversation cannot be rendered.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The card cannot be used; [`crate::Device::Cpu`] may.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The device refused, or has too little memory.
    #[error(transparent)]
    Device(#[from] BackendError),
    /// More context than the model was trained for.
    #[error(
        "a context of {asked} tokens is more than the {trained} this model was trained for; give at most {trained}"
    )]
    ContextTooLong {
        /// Tokens asked for.
        asked: usize,
        /// The most there are.
        trained: usize,
    },
    /// The context does not fit into memory.
    #[error("{problem}")]
    ContextTooLarge {
        /// Memory it would take, and memory there is.
        problem: String,
        /// True where a smaller context was possible and another was asked for.
        was_asked: bool,
    },
    /// A sampling parameter is out of its range.
    #[error("{0}")]
    Sampling(String),
    /// The engine's settings do not work together.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The engine could not start.
    #[error("the model cannot be started")]
    Start(#[from] StartError),
    /// The request was not accepted: too long, out of range, or too many at once.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// The engine gave the request up.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl From<ChatError> for Error {
    fn from(error: ChatError) -> Error {
        match error {
            ChatError::Text(error) => Error::Text(error),
            ChatError::Rejected(error) => Error::Rejected(error),
            ChatError::Engine(error) => Error::Engine(error),
        }
    }
}
