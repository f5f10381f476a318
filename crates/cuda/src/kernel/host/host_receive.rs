//! Twin of `kernels/host/host_receive.cu`: the card's columns and those of the host, when it has answered.

use super::HostStage;
use crate::{
    device::{Address, Grid},
    kernel::{
        Addresses, Kernel, Operand, RowsAt, Specialization,
        params::{Params, params},
    },
};

params! {
    struct HostReceiveParams {
        rows: RowsAt,
        own: Address,
        host: Address,
        out: Address,
        words: Address,
        number: Address,
        own_fours: u32,
        host_fours: u32,
        each: u32,
        behind: u32,
    }
}

/// Waits for a stage of a network and joins both parts of its output.
#[derive(Debug)]
pub(crate) struct HostReceive {
    /// `None` where all columns are the host's.
    pub(crate) own: Option<Operand>,
    /// Columns of both parts, multiples of 4.
    pub(crate) columns: (usize, usize),
    /// Such pairs of parts of a row.
    pub(crate) each: usize,
    pub(crate) out: Operand,
    /// Of the last request.
    pub(crate) number: Operand,
    pub(crate) stage: HostStage,
    /// Whether another request has been sent behind that of this stage.
    pub(crate) asked_behind: bool,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "host_receive",
        entries: &["host_receive"],
        constants: vec![],
        params_bytes: HostReceiveParams::BYTES,
    }
}

impl Kernel for HostReceive {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, 1), 1024)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        HostReceiveParams {
            rows,
            own: self.own.map_or(Address::NULL, |own| at.operand(own)),
            host: at.host.output(self.stage),
            out: at.operand(self.out),
            words: at.host.words,
            number: at.operand(self.number),
            own_fours: (self.columns.0 / 4) as u32,
            host_fours: (self.columns.1 / 4) as u32,
            each: self.each as u32,
            behind: u32::from(self.asked_behind),
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        self.own.into_iter().chain([self.number]).collect()
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}
