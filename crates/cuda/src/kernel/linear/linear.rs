//! Twin of `kernels/linear/linear.cu`.

use carat_gguf::QuantType;
use carat_model::weights::Weight;

use crate::kernel::{Addresses, Kernel, Place, RowsAt, Specialization, format};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::{Form, Packed},
};

/// Outputs of a block: a warp each.
pub(crate) const OUTPUTS: usize = 8;
/// Rows that `linear_8` takes together.
const TILE: usize = 8;

params! {
    struct LinearParams {
        rows: RowsAt,
        x: Address,
        w: Address,
        row_bytes: u64,
        out: Address,
        columns: u32,
        outputs: u32,
    }
}

#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) x: Place,
    pub(crate) w: Weight,
    pub(crate) quant: QuantType,
    pub(crate) columns: usize,
    pub(crate) outputs: usize,
    pub(crate) out: Place,
}

pub(crate) fn specialization(quant: QuantType) -> Specialization {
    Specialization {
        kernel: "linear",
        entries: &["linear_1", "linear_8"],
        constants: vec![format(quant)],
        params_bytes: LinearParams::BYTES,
    }
}

impl Kernel for Linear {
    fn specialization(&self) -> Specialization {
        specialization(self.quant)
    }

    fn grid(&self, rows: usize) -> Grid {
        let (entry, tiles) = match rows {
            1 => (0, 1),
            _ => (1, rows.div_ceil(TILE)),
        };
        let blocks = (tiles, self.outputs.div_ceil(OUTPUTS));
        Grid {
            entry,
            ..Grid::new(blocks, 32 * OUTPUTS)
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let w = at.matrix(&Packed::one(self.w, Form::File));
        LinearParams {
            rows,
            x: at.place(self.x),
            w: w.start,
            row_bytes: w.row_bytes as u64,
            out: at.place(self.out),
            columns: self.columns as u32,
            outputs: self.outputs as u32,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<Packed> {
        vec![Packed::one(self.w, Form::File)]
    }

    fn reads(&self) -> Vec<Place> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Place> {
        vec![self.out]
    }
}
