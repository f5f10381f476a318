//! Scheduling as a pure, synchronous state machine over tokens and pages.
//!
//! No thread, clock, text, weight or tensor: whole serving histories run in a unit test in microseconds.

mod chain;
mod constraint;
mod draft;
mod forgotten;
mod kv;
mod masks;
mod media;
mod moves;
mod pages;
mod pipeline;
mod prefix;
mod queue;
mod request;
mod scheduler;
mod sequence;
mod store;

#[cfg(test)]
mod histories;
#[cfg(test)]
pub(crate) mod testing;

pub use chain::{BlockContents, ChainKey, Piece};
pub use constraint::{Constraint, ConstraintSource};
pub use draft::StepCosts;
pub use kv::MissReason;
pub use media::{Media, MediaAttention};
pub use pages::PageCounts;
pub use pipeline::Pipeline;
pub use request::{Counts, DraftCounts, FinishReason, LaneId, Rejected, Request, RequestId};
pub use scheduler::{Draws, Scheduler, Stats, StepMemory, Update, Work};
pub use store::{PageBytes, PageStore, ReadPages, Segment, StoreStats, StoredBlock, WantedPage};
