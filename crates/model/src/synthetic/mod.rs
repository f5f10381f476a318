//! Gemma 4 files that nobody trained: what a model of given dimensions holds, with random values.
//!
//! The reverse of [`config`](crate::config) and [`bind`](crate::bind), written apart from them so that each checks the
//! other. `carat synth` makes models of real size this way, for speed; `testkit` makes tiny ones, for tests. Which format
//! each tensor gets is the caller's choice, and so is how the bytes reach a file.
//!
//! - [`dimensions`]: a model's dimensions, and the metadata that states them
//! - [`tensors`]: names, shapes and the kind of values of all its tensors
//! - [`vocabulary`]: tokens and merges that a tokenizer accepts

pub mod dimensions;
pub mod tensors;
pub mod vocabulary;

pub use dimensions::{ByKind, Dimensions};
pub use tensors::{Role, TensorPlan};
pub use vocabulary::Vocabulary;
