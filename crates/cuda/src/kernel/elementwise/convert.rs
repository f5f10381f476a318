//! Twin of `kernels/elementwise/convert.cu`: f32 values into the format that a product reads.

use crate::kernel::{
    Addresses, ColumnSlice, Kernel, Operand, RowsAt, Specialization,
    activation::{Activation, ActivationAt},
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

/// Fours of columns per block.
const BLOCK_QUADS: usize = THREADS * 2;
const THREADS: usize = 256;

params! {
    struct ConvertParams {
        rows: RowsAt,
        a: Address,
        b: Address,
        out: ActivationAt,
        columns: u32,
        b_columns: u32,
        b_column: u32,
    }
}

/// `out = a`, or `out = gelu(a) * b`, in a product's format. `columns` is a multiple of 32.
#[derive(Debug)]
pub(crate) struct Convert {
    pub(crate) a: Operand,
    pub(crate) gelu_mul: Option<ColumnSlice>,
    pub(crate) columns: usize,
    pub(crate) out: Activation,
    /// Launched with PDL.
    pub(crate) pdl: bool,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "convert",
        entries: &["convert_values", "convert_gelu_mul"],
        constants: vec![],
        params_bytes: ConvertParams::BYTES,
    }
}

impl Kernel for Convert {
    fn specialization(&self) -> Specialization {
        assert!(self.columns.is_multiple_of(32), "{} columns", self.columns);
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        let blocks = (rows * self.columns / 4).div_ceil(BLOCK_QUADS);
        Grid {
            entry: usize::from(self.gelu_mul.is_some()),
            pdl: self.pdl,
            ..Grid::new((blocks, 1), THREADS)
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let b = self.gelu_mul;
        ConvertParams {
            rows,
            a: at.operand(self.a),
            b: b.map_or(Address::NULL, |b| at.operand(b.operand)),
            out: Activation::at(Some(self.out), at),
            columns: self.columns as u32,
            b_columns: b.map_or(0, |b| b.columns) as u32,
            b_column: b.map_or(0, |b| b.column) as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        let b = self.gelu_mul.map(|b| b.operand);
        [self.a].into_iter().chain(b).collect()
    }

    fn writes(&self) -> Vec<Operand> {
        self.out.operands()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kernel::testing::{ActivationBuffers, Kind, Table, gelu},
        testing::normals,
    };

    #[test]
    #[ignore = "needs a card"]
    fn convert_values_keeps_them_to_the_bit_of_the_format() {
        let mut table = Table::new();
        for columns in [32, 96, 2048] {
            for kind in [Kind::F16, Kind::F16Tiles, Kind::Q8] {
                let (rows, padded_rows) = (7, 9);
                let mut values = normals(1, padded_rows * columns);
                // A block of zeros, one of a single value, one of hardly anything.
                values[..32].fill(0.0);
                values[columns..columns + 32].fill(0.0);
                values[columns + 5] = -3.0;
                values[2 * columns..2 * columns + 32].fill(2.7e-43);
                let a = table.put(&values);
                let activation = ActivationBuffers::new(&mut table, kind, padded_rows, columns);
                table.run(
                    rows,
                    padded_rows,
                    &Convert {
                        a,
                        gelu_mul: None,
                        columns,
                        out: activation.activation,
                        pdl: false,
                    },
                );
                activation.check(&table, &values[..rows * columns], rows);
                table.clear();
            }
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn convert_gelu_mul_takes_a_slice() {
        let mut table = Table::new();
        let (columns, wide, column) = (64, 200, 68);
        for kind in [Kind::F16, Kind::F16Tiles, Kind::Q8] {
            let (rows, padded_rows) = (9, 10);
            let gate: Vec<f32> = normals(1, padded_rows * columns)
                .iter()
                .map(|v| v * 4.0)
                .collect();
            let slices = normals(2, padded_rows * wide);
            let (a, operand) = (table.put(&gate), table.put(&slices));
            let activation = ActivationBuffers::new(&mut table, kind, padded_rows, columns);
            table.run(
                rows,
                padded_rows,
                &Convert {
                    a,
                    gelu_mul: Some(ColumnSlice {
                        operand,
                        columns: wide,
                        column,
                    }),
                    columns,
                    out: activation.activation,
                    pdl: false,
                },
            );
            let expected = (0..rows * columns).map(|i| {
                let up = slices[i / columns * wide + column + i % columns];
                (gelu(f64::from(gate[i])) * f64::from(up)) as f32
            });
            activation.check_nearly(&table, &expected.collect::<Vec<f32>>(), rows);
            table.clear();
        }
    }
}
