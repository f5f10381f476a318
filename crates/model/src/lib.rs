//! Gemma 4 as data: what the model computes, never how fast.
//!
//! - [`config`]: hyper-parameters from GGUF metadata, every per-layer fact resolved once
//! - [`weights`]: weights as views of a file's tensors
//! - [`bind`]: the tensors a model needs, found in a file, with precise errors
//! - [`phase`]: sections of a plan, and the phases that time is counted with
//! - [`plan`]: steps, values and the shape-checked builder
//! - [`gemma4`]: the forward pass, as a plan
//! - [`drafter`]: a draft model, bound beside its target; [`gemma4_assistant`]: its forward pass
//! - `gather`: products of one input brought together, for backends
//! - [`cost`]: bytes and multiplications a batch needs at the least
//! - [`kv`]: KV groups, page ids and page arithmetic
//! - [`layout`]: which values may share a buffer; bytes of a page
//! - [`backend`]: the two traits a device implements
//! - [`batch`]: what an executor runs: rows, what they are fed, and whose they are
//! - [`draft`]: what a drafter is asked for
//! - [`draw`]: how a sampled row becomes a token, and what is reported of it
//! - [`sampling`]: what the sampling parameters and masks mean
//! - [`synthetic`]: files of random values in any shape, for tests and speed runs
//! - [`evaluate`]: logits of every position of a text, through any backend
//! - [`mod@reference`]: the scalar interpreter every backend is compared with

#![warn(missing_docs)]

pub mod backend;
pub mod batch;
pub mod bind;
pub mod config;
pub mod cost;
pub mod draft;
pub mod drafter;
pub mod draw;
mod error;
pub mod evaluate;
mod gather;
pub mod gemma4;
pub mod gemma4_assistant;
pub mod host_steps;
pub mod kv;
pub mod layout;
pub mod phase;
pub mod plan;
pub mod reference;
pub mod sampling;
pub mod synthetic;
pub mod weights;

pub use bind::Model;
pub use drafter::Drafter;
pub use error::ModelError;

/// An index into the vocabulary.
pub type TokenId = u32;
