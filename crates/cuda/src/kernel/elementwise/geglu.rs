//! Twin of `kernels/elementwise/geglu.cu`: `gelu(gate) * up` in f16, between two products of cuBLASLt.

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

/// Eights of columns that a thread holds, or blocks of a row of which each has an equal share of them.
const HOLD: usize = 4;
/// The most rows that are spread over several blocks.
const SPREAD_ROWS: usize = 64;
/// The widest row that a block's threads hold.
pub(crate) const MAX_COLUMNS: usize = 768 * HOLD * 8;

params! {
    struct GegluParams {
        rows: RowsAt,
        x: Address,
        out: Address,
        factor: Address,
        columns: u32,
        x_scale: f32,
        tiles: u32,
        reserved: u32,
    }
}

/// `out * factor = gelu(gate) * up`, f16 in and out.
#[derive(Debug)]
pub(crate) struct Geglu {
    /// F16 `[rows, 2 * columns]`: gate, then up.
    pub(crate) x: Operand,
    /// Factor of the values of `x`.
    pub(crate) x_scale: f32,
    /// A multiple of 8, at most [`MAX_COLUMNS`].
    pub(crate) columns: usize,
    /// F16 `[rows, columns]`, or token tiles.
    pub(crate) out: Operand,
    pub(crate) tiles: bool,
    /// `[rows]` powers of two.
    pub(crate) factor: Operand,
    /// Launched with PDL.
    pub(crate) pdl: bool,
}

/// Of token tiles, which are Hopper's, rows may be spread.
pub(crate) fn specialization(tiles: bool) -> Specialization {
    let entries: &[_] = if tiles {
        &["geglu", "geglu_spread"]
    } else {
        &["geglu"]
    };
    Specialization {
        kernel: "geglu",
        entries,
        constants: vec![("SPREAD", u32::from(tiles).to_string())],
        params_bytes: GegluParams::BYTES,
    }
}

impl Kernel for Geglu {
    fn specialization(&self) -> Specialization {
        let columns = self.columns;
        assert!(
            columns.is_multiple_of(8) && columns <= MAX_COLUMNS,
            "{columns} columns"
        );
        specialization(self.tiles)
    }

    fn grid(&self, rows: usize) -> Grid {
        let threads = self.columns.div_ceil(8 * HOLD).next_multiple_of(32);
        let spread = self.tiles && rows <= SPREAD_ROWS;
        let blocks = if spread { HOLD } else { 1 };
        Grid {
            entry: usize::from(spread),
            cluster: blocks,
            pdl: self.pdl,
            ..Grid::new((rows * blocks, 1), threads)
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        GegluParams {
            rows,
            x: at.operand(self.x),
            out: at.operand(self.out),
            factor: at.operand(self.factor),
            columns: self.columns as u32,
            x_scale: self.x_scale,
            tiles: u32::from(self.tiles),
            reserved: 0,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out, self.factor]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kernel::activation::{tile_bytes, tile_index},
        kernel::testing::{Table, gelu},
        testing::{f16_bits, f16_value, normals},
    };

    #[test]
    #[ignore = "needs a card"]
    fn geglu_is_gelu_times_up_at_any_size_of_values() {
        let mut table = Table::new();
        let sizes = [8, 72, 2112, 6144, 10240, 21504].map(|columns| (columns, false));
        for (columns, tiles) in sizes.into_iter().chain([(64, true), (10240, true)]) {
            let (rows, padded_rows) = (4, 5);
            // A row of zeros, an ordinary one, a tiny one, and one whose products leave the range of f16 by far.
            let sizes = [0.0, 1.0, 1e-3, 3e3, 1.0];
            let values = normals(columns as u64, padded_rows * 2 * columns);
            let scaled = |i: usize| values[i] * sizes[i / (2 * columns)] / 64.0;
            let x: Vec<f32> = (0..values.len()).map(scaled).collect();
            let x = f16_bits(&x);
            let x_at = table.put(&x);
            let held = if tiles {
                tile_bytes(columns) / 2
            } else {
                padded_rows * columns
            };
            let out = table.put(&vec![0x7e00u16; held]);
            let factor = table.poison(padded_rows);
            table.run(
                rows,
                padded_rows,
                &Geglu {
                    x: x_at,
                    x_scale: 64.0,
                    columns,
                    out,
                    tiles,
                    factor,
                    pdl: false,
                },
            );
            let held: Vec<u16> = table.get(out, held);
            let index = |i: usize| {
                if tiles {
                    tile_index(i / columns, i % columns)
                } else {
                    i
                }
            };
            let found: Vec<f32> = (0..padded_rows * columns)
                .map(|i| f16_value(held[index(i)]))
                .collect();
            let factors = table.get::<f32>(factor, padded_rows);
            assert!(found[rows * columns..].iter().all(|v| v.is_nan()) && factors[rows].is_nan());
            for row in 0..rows {
                let at = |i: usize| f64::from(f16_value(x[2 * row * columns + i])) * 64.0;
                let expected = (0..columns).map(|i| gelu(at(i)) * at(columns + i));
                let expected: Vec<f64> = expected.collect();
                let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
                let found = &found[row * columns..][..columns];
                let factor = factors[row];
                assert_eq!(factor.to_bits() << 9, 0, "a power of two");
                let stored = found.iter().fold(0f32, |a, b| a.max(b.abs()));
                assert!(stored <= 16384.0 && (stored >= 8192.0 || largest == 0.0));
                for (found, expected) in found.iter().zip(expected) {
                    let error = (f64::from(*found) * f64::from(factor) - expected).abs();
                    // Half a unit in the last place of an f16, the smallest of which is 2^-24 of the factor.
                    let bound = expected.abs() * 5.1e-4 + f64::from(factor) * 6e-8;
                    assert!(
                        error <= bound,
                        "{columns} columns, row {row}: {found} {expected}"
                    );
                }
            }
            table.clear();
        }
    }
}
