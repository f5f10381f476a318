//! Calls on a card: weights brought there, calls bound to addresses, batches queued, graphs replayed.

pub(crate) mod batch;
pub(crate) mod executor;
pub(crate) mod graph;
pub(crate) mod program;
pub(crate) mod roofline;
pub(crate) mod sample;
pub(crate) mod upload;
