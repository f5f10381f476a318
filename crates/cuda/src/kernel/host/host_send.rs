//! Twin of `kernels/host/host_send.cu`: asks the host for a step.

use super::HostStage;
use crate::{
    device::{Address, Grid},
    kernel::{
        Addresses, Kernel, Operand, RowsAt, Specialization,
        params::{Params, params},
    },
};

params! {
    struct HostSendParams {
        rows: RowsAt,
        x: Address,
        route: Address,
        x_to: Address,
        route_to: Address,
        words: Address,
        number: Address,
        row_fours: u32,
        route_columns: u32,
        network: u32,
        stage: u32,
    }
}

/// Sends the input of a stage of a network.
#[derive(Debug)]
pub(crate) struct HostSend {
    pub(crate) x: Operand,
    /// A multiple of 4.
    pub(crate) columns: usize,
    /// Of a mixture, with its columns.
    pub(crate) route: Option<(Operand, usize)>,
    /// The number of the last request, which outlives batches.
    pub(crate) number: Operand,
    pub(crate) network: usize,
    pub(crate) stage: HostStage,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "host_send",
        entries: &["host_send"],
        constants: vec![],
        params_bytes: HostSendParams::BYTES,
    }
}

impl Kernel for HostSend {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, _rows: usize) -> Grid {
        Grid::new((1, 1), 1024)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let (x_to, route_to) = at.host.input(self.stage);
        HostSendParams {
            rows,
            x: at.operand(self.x),
            route: self.route.map_or(Address::NULL, |(r, _)| at.operand(r)),
            x_to,
            route_to,
            words: at.host.words,
            number: at.operand(self.number),
            row_fours: (self.columns / 4) as u32,
            route_columns: self.route.map_or(0, |(_, columns)| columns) as u32,
            network: self.network as u32,
            stage: self.stage as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        let route = self.route.map(|(route, _)| route);
        [self.x, self.number].into_iter().chain(route).collect()
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.number]
    }

    fn asks_host(&self) -> bool {
        true
    }
}
