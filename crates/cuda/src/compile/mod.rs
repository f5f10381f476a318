//! A plan to calls of kernels: pure, so that all of it is tested without a card.
//!
//! In order: [`fuse`] joins steps, [`lower`] turns ops into calls for each class of [`rows`], [`prepare`] does both for a whole
//! plan and lays out [`weights`] and [`memory`], [`fit`] chooses what to give up until it fits, with
//! [`offload`] for what leaves the card, [`stream`] for how prompts read it and [`host_networks`] for what the host computes. Nothing here is launched or allocated.

pub(crate) mod batch_layout;
pub(crate) mod call;
pub(crate) mod drafter;
pub(crate) mod fit;
pub(crate) mod fuse;
pub(crate) mod host_networks;
pub(crate) mod listing;
mod lower;
pub(crate) mod memory;
pub(crate) mod offload;
pub(crate) mod prepare;
pub(crate) mod rows;
mod scratch;
pub(crate) mod stream;
pub(crate) mod target;
pub(crate) mod weights;
