//! Lookups by token: embeddings and per-layer inputs.

pub(crate) mod embed_rows;
pub(crate) mod feed_samples;
pub(crate) mod ple_inputs;
