//! Tokens in, tokens out: continuous batching over paged KV.
//!
//! - [`EngineHandle`], [`Sink`] and [`TokenStream`]: start an engine, submit requests, be told or read their tokens
//! - [`Snapshot`]: how the engine stands, copied without asking it
//! - [`EngineConfig`]: how much it may hold; [`comfortable_pages`] and [`minimum_pages`] tell how many KV pages are
//!   sensible
//! - [`chat`]: messages in, parts of an answer out; what front ends use
//! - [`core`]: the scheduler, a pure state machine over tokens and pages
//! - `measure`: what rows cost on a device, for the lengths of drafts; [`KeptCosts`] has it between runs
//! - `deadlines`: requests that may not wait or run longer
//! - `worker`: the one thread that owns the executor; `watchdog` notices when it hangs
//!
//! ```no_run
//! use std::sync::Arc;
//! use carat_engine::{EngineConfig, EngineHandle, Event, ModelFacts, Request};
//! # use carat_model::{backend::Backend, plan::Plan, weights::Weights};
//! # fn example(backend: Box<dyn Backend>, plan: Plan, weights: Arc<Weights>, prompt: Vec<u32>)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! // Contexts of 8192 tokens, four requests side by side, batches of 512 rows.
//! let config = EngineConfig::comfortable(8192, 4, 512, ModelFacts::from(&plan));
//! let engine = EngineHandle::start(config, backend, plan, weights)?;
//!
//! let stream = engine.submit(Request {
//!     max_tokens: Some(100),
//!     stop_tokens: vec![1, 106],
//!     ..Request::new(prompt)
//! })?;
//! for event in stream {
//!     match event? {
//!         Event::Token { id, .. } => { /* to the detokenizer */ }
//!         Event::Started { .. } => { /* how much of the prompt was cached */ }
//!         Event::PromptToken { .. } => { /* if asked for */ }
//!         Event::Finished { reason, usage } => { /* why, and what it took */ }
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Requests run side by side. Company never changes a row's result within one class and bucket of rows (the "must agree" tables of
//! ARCHITECTURE.md), but may choose which those are: the same request alone and among many is within rounding of itself, and its
//! tokens may part. With [`EngineConfig::batching`] set to invariant they never do, at the cost of slower prompts, and on cards of
//! more than eight streams, wherever there are several classes of kernels. A request whose prompt begins like an earlier one continues from the KV that was computed then;
//! [`Counts::cached_tokens`] says how much, [`Counts::miss`] why not more. Dropping a stream cancels its request, and so does a sink that
//! closes; dropping the last handle stops the engine.

#![warn(missing_docs)]

pub mod chat;
mod config;
pub mod core;
mod deadlines;
mod disk;
mod events;
mod handle;
mod kept_costs;
mod measure;
mod shared;
mod watchdog;
mod worker;

pub use config::{
    ConfigError, DiskConfig, DraftConfig, EngineConfig, Limits, ModelFacts, PrefixReuse,
    chunk_pages, comfortable_pages, minimum_pages,
};
pub use core::{
    Constraint, ConstraintSource, Counts, DraftCounts, FinishReason, LaneId, Media, MediaAttention,
    MissReason, PageCounts, Rejected, Request, RequestId, Stats, StepCosts, StoreStats,
};
pub use disk::{DiskError, Namespace};
pub use events::{Cancel, EngineError, Event, Sink, TokenStream, Usage};
pub use handle::{EngineHandle, StartError};
pub use kept_costs::KeptCosts;
pub use shared::{Reservation, Snapshot, Totals};
