//! Twin of `kernels/embed.cu`.

use carat_gguf::QuantType;
use carat_model::weights::Weight;

use super::{Addresses, Kernel, Place, RowsAt, Specialization, format, strips};
use crate::{
    device::Address,
    launch::Grid,
    params::{Params, params},
};

params! {
    struct EmbedParams {
        rows: RowsAt,
        tokens: Address,
        table: Address,
        row_bytes: u64,
        out: Address,
        columns: u32,
        scale: f32,
    }
}

#[derive(Debug)]
pub(crate) struct Embed {
    pub(crate) table: Weight,
    pub(crate) quant: QuantType,
    pub(crate) columns: usize,
    pub(crate) scale: f32,
    pub(crate) out: Place,
}

pub(super) fn specialization(quant: QuantType) -> Specialization {
    Specialization {
        kernel: "embed",
        entries: &["embed"],
        constants: vec![format(quant)],
        params_bytes: EmbedParams::BYTES,
    }
}

impl Kernel for Embed {
    fn specialization(&self) -> Specialization {
        specialization(self.quant)
    }

    fn grid(&self, rows: usize) -> Grid {
        strips(rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let table = at.matrix(self.table);
        EmbedParams {
            rows,
            tokens: at.batch.tokens,
            table: table.start,
            row_bytes: table.row_bytes as u64,
            out: at.place(self.out),
            columns: self.columns as u32,
            scale: self.scale,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Place> {
        vec![]
    }

    fn writes(&self) -> Vec<Place> {
        vec![self.out]
    }
}
