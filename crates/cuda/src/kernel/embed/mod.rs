//! Lookups by token: embeddings and per-layer inputs.

pub(crate) mod embed;
pub(crate) mod layer_inputs;
