//! Gemma 4 as data: what the model computes, never how fast.
//!
//! - [`config`]: hyper-parameters from GGUF metadata, every per-layer fact resolved once
//! - [`weights`]: the tensors a model needs, bound to a file with precise errors
//! - [`plan`]: steps, values and the shape-checked builder
//! - [`gemma4`]: the forward pass, as a plan
//! - [`layout`]: which values may share a buffer; page geometry of the KV groups
//! - [`backend`]: the two traits a device implements, and the batch they run
//! - [`sampling`]: what the sampling parameters mean
//! - [`reference`]: the scalar interpreter every backend is compared with

pub mod backend;
pub mod config;
pub mod gemma4;
pub mod layout;
pub mod plan;
pub mod reference;
pub mod sampling;
pub mod weights;

/// An index into the vocabulary.
pub type TokenId = u32;
