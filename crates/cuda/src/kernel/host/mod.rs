//! Steps that the host computes: what it is sent, and what it sends back.

pub(crate) mod host_receive;
pub(crate) mod host_send;

use crate::device::Address;

/// A part of a network that the host is asked for. The numbers are the kernels'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostStage {
    /// Its part of `gelu(gate . x) * (up . x)`.
    Gated = 0,
    /// Its part of the output, from what gate and up gave.
    Down = 1,
    /// The output, from the input.
    Whole = 2,
}

impl HostStage {
    pub(crate) fn of(number: u32) -> Option<HostStage> {
        let all = [HostStage::Gated, HostStage::Down, HostStage::Whole];
        all.into_iter().find(|stage| *stage as u32 == number)
    }
}

/// Memory that card and host share, by stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostAt {
    pub(crate) words: Address,
    pub(crate) inputs: [Address; 2],
    pub(crate) routes: [Address; 2],
    pub(crate) outputs: [Address; 2],
}

impl HostAt {
    /// Where the host computes nothing.
    pub(crate) const NONE: HostAt = HostAt {
        words: Address::NULL,
        inputs: [Address::NULL; 2],
        routes: [Address::NULL; 2],
        outputs: [Address::NULL; 2],
    };

    /// Where the input of a stage goes, and the route.
    fn input(&self, stage: HostStage) -> (Address, Address) {
        let i = usize::from(stage == HostStage::Down);
        (self.inputs[i], self.routes[i])
    }

    /// Where its output is found.
    fn output(&self, stage: HostStage) -> Address {
        self.outputs[usize::from(stage != HostStage::Gated)]
    }
}
