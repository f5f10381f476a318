//! Models and measures for tests: a dev-dependency only.
//!
//! - [`fixtures`]: tiny models of every variant with logits from a published implementation
//! - [`tiny`]: random models of every variant in any format and size, made on the spot
//! - [`cases`]: every step as a tiny plan, for conformance
//! - [`contract`]: what an executor promises beyond the steps of a plan
//! - [`pairs`]: targets with their drafters, and what a published implementation drafts; [`drafting`]: the same on any backend
//! - [`close`]: how far two results are apart
//! - [`numbers`]: random inputs of kernels and how far their results are off
//! - [`allocation`]: how much memory something took; [`work`]: how long a thread worked

pub mod allocation;
pub mod cases;
pub mod close;
pub mod contract;
pub mod drafting;
pub mod fixtures;
pub mod numbers;
pub mod pairs;
pub mod tiny;
pub mod work;
