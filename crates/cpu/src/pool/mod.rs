//! Worker threads, and the ways they may write to one matrix.
//!
//! - [`threads`]: [`Pool`], which shares out the items of a step
//! - [`grid`]: output tiles of a matrix
//! - [`cores`]: the cores that workers are pinned to

mod cores;
mod grid;
#[cfg(test)]
mod tests;
mod threads;

pub(crate) use grid::{Grid, OutputTile};
pub(crate) use threads::Pool;
