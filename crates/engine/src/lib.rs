//! Tokens in, tokens out: scheduler, paged KV, streams.
mod config;
pub mod core;
pub use config::*;
