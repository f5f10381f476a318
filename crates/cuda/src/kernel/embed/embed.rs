//! Twin of `kernels/embed/embed.cu` and `kernels/embed/embed_panels.cu`.

use carat_gguf::QuantType;
use carat_model::weights::Weight;

use crate::kernel::{Addresses, Kernel, Place, RowsAt, Specialization, format, panel, strips};
use crate::{
    device::{Address, Grid},
    kernel::weights::{Form, Packed},
    kernel::{
        panels::PanelFormat,
        params::{Params, params},
    },
};

params! {
    struct EmbedParams {
        rows: RowsAt,
        tokens: Address,
        table: Address,
        // A strip's in panels.
        row_bytes: u64,
        out: Address,
        columns: u32,
        scale: f32,
    }
}

#[derive(Debug)]
pub(crate) struct Embed {
    pub(crate) table: Weight,
    /// Rows of the file, or panels that a head is multiplied with, too.
    pub(crate) form: TableForm,
    pub(crate) quant: QuantType,
    pub(crate) columns: usize,
    pub(crate) scale: f32,
    pub(crate) out: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableForm {
    Rows,
    Panels,
}

pub(crate) fn specialization(quant: QuantType) -> Specialization {
    Specialization {
        kernel: "embed",
        entries: &["embed"],
        constants: vec![format(quant)],
        params_bytes: EmbedParams::BYTES,
    }
}

pub(crate) fn panels_specialization(layout: PanelFormat) -> Specialization {
    Specialization {
        kernel: "embed_panels",
        entries: &["embed_panels"],
        constants: vec![panel(layout)],
        params_bytes: EmbedParams::BYTES,
    }
}

impl Embed {
    fn packed(&self) -> Packed {
        let form = match self.form {
            TableForm::Rows => Form::Table,
            TableForm::Panels => Form::Panels,
        };
        Packed::one(self.table, form)
    }
}

impl Kernel for Embed {
    fn specialization(&self) -> Specialization {
        match self.form {
            TableForm::Rows => specialization(self.quant),
            TableForm::Panels => {
                let layout = PanelFormat::of(self.quant).expect("lowering knows which have panels");
                panels_specialization(layout)
            }
        }
    }

    fn grid(&self, rows: usize) -> Grid {
        strips(rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let table = at.matrix(&self.packed());
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

    fn weights(&self) -> Vec<Packed> {
        vec![self.packed()]
    }

    fn reads(&self) -> Vec<Place> {
        vec![]
    }

    fn writes(&self) -> Vec<Place> {
        vec![self.out]
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::quant::random_blocks;

    use super::*;
    use crate::{config::Tier, kernel::panels::pack, testing::Card};

    #[test]
    #[ignore = "needs a card"]
    fn embed_panels_gives_the_values_of_the_file_bit_for_bit() {
        let card = Card::open(Tier::Best);
        let quants = [
            QuantType::Q8_0,
            QuantType::Q4_0,
            QuantType::Q4_K,
            QuantType::Q5_K,
            QuantType::Q6_K,
        ];
        for quant in quants {
            let layout = PanelFormat::of(quant).unwrap();
            let (rows, columns, scale) = (41, 3 * quant.block_len(), 7.5);
            let row_bytes = quant.row_bytes(columns);
            let mut bytes = vec![0; rows * row_bytes];
            random_blocks(quant, 2, 0.1, &mut bytes);
            let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
            let table = card.upload(&pack(quant, rows, columns, row));
            let tokens = [40u32, 0, 17, 9];
            // The last of the rows is not there.
            let (count, index) = (card.upload(&[3u32]), card.upload(&[0u32, 1, 2, 3]));
            let (out, given) = (
                card.upload(&vec![-1.0f32; 4 * columns]),
                card.upload(&tokens),
            );
            let params = EmbedParams {
                rows: RowsAt {
                    count: count.address(),
                    index: index.address(),
                },
                tokens: given.address(),
                table: table.address(),
                row_bytes: layout.strip_bytes(columns) as u64,
                out: out.address(),
                columns: columns as u32,
                scale,
            };
            let module = card.load(&panels_specialization(layout));
            card.run(&module, strips(4, columns), &params.bytes());
            let found: Vec<f32> = card.download(&out, 4 * columns);
            for (found, token) in found.chunks_exact(columns).zip(&tokens[..3]) {
                let mut values = vec![0.0; columns];
                quant.dequantize(row(*token as usize), &mut values);
                let same = |(a, b): (&f32, &f32)| a.to_bits() == (b * scale).to_bits();
                assert!(found.iter().zip(&values).all(same), "{quant} {token}");
            }
            assert!(found[3 * columns..].iter().all(|v| *v == -1.0));
        }
    }
}
