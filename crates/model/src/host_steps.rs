//! Steps that the host computes for a device that has no room for their weights: feed-forward networks, dense or of a mixture's
//! experts, while the device computes the rest of them.
//!
//! A network is shared by rows of its matrices. The host has those of gate and up from some row on, and so that part of what
//! they give; the two sides then swap their parts, and the same goes for down. Where a network is the host's alone, the device
//! sees nothing of what is between.

use std::sync::Arc;

use crate::{
    backend::BackendError,
    weights::{Weight, Weights},
};

/// A feed-forward network that host and device share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNetwork {
    /// `[inner, columns]`, each expert's of a mixture.
    pub gate: Weight,
    /// The same.
    pub up: Weight,
    /// `[outputs, inner]`.
    pub down: Weight,
    /// Of a mixture, the experts of a row.
    pub top_k: Option<usize>,
    /// The host's first row of gate and up; `inner` where it has none.
    pub gated_from: usize,
    /// The host's first row of down; `outputs` where it has none.
    pub down_from: usize,
}

impl HostNetwork {
    /// Networks that a row goes through: the experts it is routed to, or one.
    pub fn each(&self) -> usize {
        self.top_k.unwrap_or(1)
    }

    /// Whether all of it is the host's.
    pub fn is_whole(&self) -> bool {
        self.gated_from == 0 && self.down_from == 0
    }
}

/// A host that computes for devices.
pub trait HostBackend: Send + Sync {
    /// All that its rates depend on.
    fn identity(&self) -> String;

    /// Bytes of weights per second that it gets through, measured now; `None` if that cannot be told.
    fn read_rate(&self) -> Option<f64>;

    /// Prepares some networks, for up to `max_rows` rows at a time.
    fn host_steps(
        &self,
        weights: &Weights,
        networks: &[HostNetwork],
        max_rows: usize,
    ) -> Result<Box<dyn HostSteps>, BackendError>;
}

/// Networks, ready to be computed, by their index in the list that they were prepared with. A row's result has the same bits in
/// any company.
pub trait HostSteps: Send {
    /// The host's part of `gelu(gate . x) * (up . x)`, `[rows, each, inner - gated_from]`, for `x` of `[rows, columns]`. Of a
    /// mixture, `route` is `[rows, 2 * top_k]`: experts, then their weights.
    fn gated(&mut self, network: usize, x: &[f32], route: &[f32], out: &mut [f32]);

    /// The host's part of what the network gives, `[rows, outputs - down_from]`, for `inner` of `[rows, each, inner]`.
    fn down(&mut self, network: usize, inner: &[f32], route: &[f32], out: &mut [f32]);
}

/// A host, shared by the devices it computes for.
pub type SharedHost = Arc<dyn HostBackend>;
