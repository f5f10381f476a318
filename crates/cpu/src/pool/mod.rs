//! Worker threads, and the ways they may write to one matrix.

mod grid;
#[cfg(test)]
mod tests;
mod threads;

pub(crate) use grid::{Block, Cell, Grid};
pub(crate) use threads::Pool;
