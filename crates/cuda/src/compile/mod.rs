//! A plan to calls of kernels: pure, so that all of it is tested without a card.

pub(crate) mod fuse;
pub(crate) mod lower;
pub(crate) mod memory;
pub(crate) mod weights;
