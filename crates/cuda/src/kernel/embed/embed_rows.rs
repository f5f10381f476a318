//! Twin of `kernels/embed/embed_rows.cu` and `kernels/embed/embed_fragments.cu`: embeddings of tokens, from a table as it is in the
//! file or packed for tensor cores.

use carat_gguf::QuantType;
use carat_model::weights::Weight;

use crate::kernel::{
    Addresses, InputsAt, Kernel, Operand, RowsAt, Specialization, fragment::fragment_constants,
    grid::elementwise_grid, specialization::format_constant,
};
use crate::{
    device::{Address, Grid},
    kernel::weights::{WeightFormat, WeightOperand},
    kernel::{
        fragment::FragmentFormat,
        params::{Params, params},
    },
};

params! {
    struct EmbedRowsParams {
        rows: RowsAt,
        tokens: Address,
        inputs: InputsAt,
        table: Address,
        // Of an M-tile in fragments.
        row_bytes: u64,
        out: Address,
        columns: u32,
        scale: f32,
    }
}

#[derive(Debug)]
pub(crate) struct EmbedRows {
    pub(crate) table: Weight,
    /// Rows of the file, or the fragments that an output head is multiplied with, too.
    pub(crate) format: TableFormat,
    pub(crate) quant: QuantType,
    pub(crate) columns: usize,
    pub(crate) scale: f32,
    pub(crate) out: Operand,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableFormat {
    Rows,
    Fragments,
}

pub(crate) fn specialization(quant: QuantType) -> Specialization {
    Specialization {
        kernel: "embed_rows",
        entries: &["embed_rows"],
        constants: vec![format_constant(quant)],
        params_bytes: EmbedRowsParams::BYTES,
    }
}

pub(crate) fn fragments_specialization(format: FragmentFormat) -> Specialization {
    Specialization {
        kernel: "embed_fragments",
        entries: &["embed_fragments"],
        constants: fragment_constants(format).into(),
        params_bytes: EmbedRowsParams::BYTES,
    }
}

impl EmbedRows {
    fn packed(&self) -> WeightOperand {
        let format = match self.format {
            TableFormat::Rows => WeightFormat::Table,
            TableFormat::Fragments => WeightFormat::Fragments,
        };
        WeightOperand::one(self.table, format)
    }
}

impl Kernel for EmbedRows {
    fn specialization(&self) -> Specialization {
        match self.format {
            TableFormat::Rows => specialization(self.quant),
            TableFormat::Fragments => {
                let format =
                    FragmentFormat::of(self.quant).expect("lowering knows which have fragments");
                fragments_specialization(format)
            }
        }
    }

    fn grid(&self, rows: usize) -> Grid {
        elementwise_grid(rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let table = at.matrix(&self.packed());
        EmbedRowsParams {
            rows,
            tokens: at.batch.tokens,
            inputs: if at.plan.is_input(self.table) {
                at.batch.inputs
            } else {
                InputsAt::NONE
            },
            table: table.start,
            row_bytes: table.row_bytes as u64,
            out: at.operand(self.out),
            columns: self.columns as u32,
            scale: self.scale,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        vec![self.packed()]
    }

    fn reads(&self) -> Vec<Operand> {
        vec![]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::quant::random_blocks;

    use super::*;
    use crate::{
        config::Tier,
        kernel::{fragment::pack, load::pack::tests::packed},
        testing::Card,
    };

    #[test]
    #[ignore = "needs a card"]
    fn embed_fragments_gives_the_values_of_the_file_bit_for_bit() {
        let card = Card::open(Tier::Best);
        for quant in packed() {
            let layout = FragmentFormat::of(quant).unwrap();
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
            // The second row is fed an embedding, as it is.
            let fed: Vec<f32> = (0..2 * columns).map(|i| i as f32).collect();
            let inputs = card.upload(&fed);
            let start = card.upload(&[inputs.address().0]);
            let numbers = card.upload(&[u32::MAX, 1, u32::MAX, u32::MAX]);
            let params = EmbedRowsParams {
                rows: RowsAt {
                    count: count.address(),
                    index: index.address(),
                },
                tokens: given.address(),
                inputs: InputsAt {
                    index: numbers.address(),
                    start: start.address(),
                },
                table: table.address(),
                row_bytes: layout.m_tile_bytes(columns) as u64,
                out: out.address(),
                columns: columns as u32,
                scale,
            };
            let module = card.load(&fragments_specialization(layout));
            card.run(&module, elementwise_grid(4, columns), &params.bytes());
            let found: Vec<f32> = card.download(&out, 4 * columns);
            assert_eq!(found[columns..2 * columns], fed[columns..]);
            let each = found.chunks_exact(columns).zip(&tokens[..3]);
            for (found, token) in each.step_by(2) {
                let mut values = vec![0.0; columns];
                quant.dequantize(row(*token as usize), &mut values);
                let same = |(a, b): (&f32, &f32)| a.to_bits() == (b * scale).to_bits();
                assert!(found.iter().zip(&values).all(same), "{quant} {token}");
            }
            assert!(found[3 * columns..].iter().all(|v| *v == -1.0));
        }
    }
}
