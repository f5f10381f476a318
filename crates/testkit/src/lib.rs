//! Models and measures for tests: a dev-dependency only.
//!
//! - [`fixtures`]: tiny models of every variant with logits from a published implementation
//! - [`close`]: how far two results are apart

pub mod close;
pub mod fixtures;
