//! Formats of activations that the GEMMs of large batches read; mirrors `lib/activation.cuh`.
//!
//! A kernel that produces a value writes it in its reader's format, so nothing is converted twice. Small batches need none of
//! this: their products round activations themselves.

use super::{Addresses, Operand};
use crate::{device::Address, kernel::params::params};

/// A value in the format that a product reads, with its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// `[rows, columns]`.
    F16(Operand),
    /// F16, of up to [`TILE_TOKENS`] rows in token tiles (`lib/token_tiles.cuh`), as products by wgmma hold them; of more
    /// `[rows, columns]`.
    F16Tiles(Operand),
    /// K-permuted f16 (`lib/token_tiles.cuh`), `[rows, columns]`, as products by wgmma read them from memory.
    F16Permuted(Operand),
    Int8(Int8Operands),
    /// Two-term int8: of each row its int8 codes, and behind those the codes of the residual that rounding leaves.
    Int8HiLo {
        both: Int8Operands,
        columns: usize,
    },
}

/// Rows of token tiles, whether there are as many or not.
pub(crate) const TILE_TOKENS: usize = 64;

/// Bytes of token tiles, of columns that are a multiple of a tile's 64.
pub(crate) fn tile_bytes(columns: usize) -> usize {
    TILE_TOKENS * columns * 2
}

/// Int8 codes `[rows, columns]`, with an f32 scale and an f32 sum for each 32 of them: `[rows, columns / 32]` each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Int8Operands {
    pub(crate) codes: Operand,
    pub(crate) scales: Operand,
    pub(crate) sums: Operand,
}

impl Int8Operands {
    pub(crate) fn all(self) -> [Operand; 3] {
        [self.codes, self.scales, self.sums]
    }
}

/// Number of a row's column in K-permuted rows, as their definition has it.
#[cfg(test)]
pub(crate) fn permuted_index(row: usize, columns: usize, column: usize) -> usize {
    let chunk = column / 4 % 2 * 2 + column % 2;
    row * columns + column / 32 * 32 + chunk * 8 + column / 8 % 4 * 2 + column / 2 % 2
}

/// Number of a row's column in token tiles, as their definition has it.
#[cfg(test)]
pub(crate) fn tile_index(row: usize, column: usize) -> usize {
    let chunk = column / 32 % 2 * 4 + column / 4 % 2 * 2 + column % 2;
    let line = column / 64 * TILE_TOKENS + row;
    line * 64 + (chunk ^ (row % 8)) * 8 + column / 8 % 4 * 2 + column / 2 % 2
}

params! {
    /// `Activation` in `lib/activation.cuh`.
    pub(crate) struct ActivationAt {
        f16: Address,
        codes: Address,
        scales: Address,
        sums: Address,
        low_offset: u64,
        layout: u64,
    }
}

impl Activation {
    /// Addresses of the operands; all null for `None`.
    pub(crate) fn at(activation: Option<Activation>, at: &Addresses) -> ActivationAt {
        let mut found = ActivationAt {
            f16: Address::NULL,
            codes: Address::NULL,
            scales: Address::NULL,
            sums: Address::NULL,
            low_offset: 0,
            layout: 0,
        };
        let (operands, low_offset) = match activation {
            None => return found,
            Some(Activation::F16(values)) => {
                found.f16 = at.operand(values);
                return found;
            }
            Some(Activation::F16Tiles(tiles)) => {
                found.f16 = at.operand(tiles);
                found.layout = 1;
                return found;
            }
            Some(Activation::F16Permuted(values)) => {
                found.f16 = at.operand(values);
                found.layout = 2;
                return found;
            }
            Some(Activation::Int8(operands)) => (operands, 0),
            Some(Activation::Int8HiLo { both, columns }) => (both, columns),
        };
        [found.codes, found.scales, found.sums] = operands.all().map(|operand| at.operand(operand));
        found.low_offset = low_offset as u64;
        found
    }

    pub(crate) fn operands(&self) -> Vec<Operand> {
        match *self {
            Activation::F16(values)
            | Activation::F16Tiles(values)
            | Activation::F16Permuted(values) => vec![values],
            Activation::Int8(operands) | Activation::Int8HiLo { both: operands, .. } => {
                operands.all().to_vec()
            }
        }
    }
}
