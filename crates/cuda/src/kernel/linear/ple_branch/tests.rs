//! On a card: against f64, and rows in tiles of every size.

use super::*;
use crate::{
    kernel::{
        WeightFormat,
        testing::{Table, gelu},
    },
    testing::{f16_bits, f16_value, normals, relative_error},
};

const SLICE_COLUMNS: usize = 3 * WIDTH;
const SLICE_COLUMN: usize = WIDTH;

/// A product on the table, of random numbers.
struct Random {
    x: Vec<f32>,
    w: Vec<f32>,
    slices: Vec<f32>,
    kernel: PleBranch,
}

fn rounded(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    let values: Vec<f32> = normals(seed, count).iter().map(|v| v * scale).collect();
    f16_bits(&values).into_iter().map(f16_value).collect()
}

impl Random {
    fn gate(table: &mut Table, columns: usize) -> Random {
        let slices = normals(4, MAX_TOKENS * SLICE_COLUMNS);
        let slice = ColumnSlice {
            operand: table.put(&slices),
            columns: SLICE_COLUMNS,
            column: SLICE_COLUMN,
        };
        Random::new(table, columns, (PleProduct::Gate(slice), slices))
    }

    fn proj(table: &mut Table, columns: usize) -> Random {
        Random::new(table, columns, (PleProduct::Proj, Vec::new()))
    }

    fn new(table: &mut Table, columns: usize, (product, slices): (PleProduct, Vec<f32>)) -> Random {
        let mut kernel = PleBranch {
            product,
            x: Operand::Scratch(0),
            w: WeightOperand::stacked(&[], WeightFormat::F16),
            out: table.poison((MAX_TOKENS + 1) * columns),
            columns,
            pdl: false,
        };
        let inputs = kernel.inputs();
        let x = rounded(1, MAX_TOKENS * inputs, 1.0);
        let w = rounded(2, kernel.outputs() * inputs, 1.5 / (inputs as f32).sqrt());
        kernel.x = table.put(&f16_bits(&x));
        kernel.w = table.f16_matrix(&w);
        Random {
            x,
            w,
            slices,
            kernel,
        }
    }

    fn expected(&self, rows: usize) -> Vec<f32> {
        let inputs = self.kernel.inputs();
        let outputs = |row: usize| {
            let x = &self.x[row * inputs..][..inputs];
            self.w.chunks_exact(inputs).enumerate().map(move |(i, w)| {
                let products = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                let sum: f64 = products.sum();
                match self.kernel.product {
                    PleProduct::Gate(_) => {
                        let by = self.slices[row * SLICE_COLUMNS + SLICE_COLUMN + i];
                        (gelu(sum) * f64::from(by)) as f32
                    }
                    PleProduct::Proj => sum as f32,
                }
            })
        };
        (0..rows).flat_map(outputs).collect()
    }

    /// What a bucket of so many rows writes, and nothing behind its rows.
    fn run(&self, table: &Table, rows: usize, bucket: usize) -> Vec<f32> {
        let count = rows * self.kernel.outputs();
        table.run(rows, bucket, &self.kernel);
        let (found, behind): (Vec<f32>, Vec<f32>) = match self.kernel.product {
            PleProduct::Gate(_) => {
                let mut found: Vec<u16> = table.get(self.kernel.out, count + 2);
                let behind = found.split_off(count);
                // Half of a poisoned float is one, too; the other half is nothing.
                let poison = f32::from_bits(u32::from(behind[1]) << 16);
                (found.into_iter().map(f16_value).collect(), vec![poison])
            }
            PleProduct::Proj => {
                let mut found: Vec<f32> = table.get(self.kernel.out, count + 1);
                let behind = found.split_off(count);
                (found, behind)
            }
        };
        assert!(behind[0].is_nan(), "wrote behind {rows} rows");
        found
    }
}

const BUCKETS: [(usize, usize); 5] = [(1, 16), (16, 16), (17, 32), (41, 48), (64, 64)];

#[test]
fn grids_have_a_block_for_each_part() {
    let kernel = |product, columns| PleBranch {
        product,
        x: Operand::Scratch(0),
        w: WeightOperand::stacked(&[], WeightFormat::F16),
        out: Operand::Scratch(0),
        columns,
        pdl: false,
    };
    let slice = ColumnSlice {
        operand: Operand::Scratch(0),
        columns: WIDTH,
        column: 0,
    };
    let grid = kernel(PleProduct::Gate(slice), 2560).grid(48);
    assert_eq!((grid.entry, grid.blocks, grid.cluster), (2, (32, 1), 8));
    let grid = kernel(PleProduct::Proj, 1536).grid(16);
    assert_eq!((grid.entry, grid.blocks, grid.cluster), (4, (24, 1), 1));
}

#[test]
#[ignore = "needs a card"]
fn ple_products_are_those_of_f64() {
    for columns in PUBLISHED {
        let mut table = Table::new();
        for random in [
            Random::gate(&mut table, columns),
            Random::proj(&mut table, columns),
        ] {
            for (rows, bucket) in BUCKETS {
                let found = random.run(&table, rows, bucket);
                let error = relative_error(&found, &random.expected(rows));
                let case = format!("{columns} columns, {rows} rows");
                assert!(error < 1e-3, "{case}: {:?}: {error}", random.kernel.product);
            }
        }
    }
}

#[test]
#[ignore = "needs a card"]
fn ple_products_have_the_same_bits_in_tiles_of_every_size() {
    let mut table = Table::new();
    for random in [
        Random::gate(&mut table, 2560),
        Random::proj(&mut table, 2560),
    ] {
        // Fewer rows first: what is behind them is poison still.
        let found = BUCKETS.map(|(rows, bucket)| random.run(&table, rows, bucket));
        let all = found.last().expect("some buckets");
        for some in &found {
            assert!(*some == all[..some.len()], "{} numbers", some.len());
        }
    }
}
