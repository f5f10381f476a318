//! Attention over the paged KV cache.
//!
//! - [`attend`]: queries and KV splits shared out over the threads
//! - [`partial`]: the result of one split, and how splits are merged

mod attend;
mod partial;
#[cfg(test)]
mod tests;

pub(crate) use attend::{Attention, QuerySpan, SplitKvScratch};
