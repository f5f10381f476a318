//! Execution on a card: weights uploaded, calls bound to addresses, batches queued, graphs replayed. Nothing is chosen here;
//! `compile` has done that.

mod addresses;
pub(crate) mod batch;
pub(crate) mod draft_model;
pub(crate) mod executor;
pub(crate) mod graph;
mod groups;
pub(crate) mod host_worker;
mod in_flight;
pub(crate) mod modules;
pub(crate) mod pages;
pub(crate) mod program;
pub(crate) mod roofline;
pub(crate) mod sample;
pub(crate) mod sees_back;
mod stream;
mod tables;
pub(crate) mod upload;
