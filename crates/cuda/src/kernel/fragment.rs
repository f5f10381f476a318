//! Panels: how quantized matrices lie on the device, in the order in which tensor cores take them.
//!
//! 16 output rows are an M-tile. An M-tile is cut along its inputs into K-blocks; K-block follows K-block, M-tile follows M-tile. Rows
//! are padded to an M-tile and inputs to a K-block with zero bytes, which stand for zeros. Within a K-block, a warp's lane
//! `4 * group + quad` finds its operands side by side: rows `group` and `group + 8`, and of every 32 inputs (16 in K6)
//! the quarter `quad`. Scales lie behind the codes.
//!
//! `fragments/plain.rs` is the definition: a plain packer, and the value of every place, bit for bit what `carat-gguf`
//! makes of the file. `kernels/load/pack.cu` packs on the device, `kernels/lib/fragment.cuh` reads there; both are compared with
//! it.

use carat_gguf::QuantType;

#[cfg(test)]
mod plain;

#[cfg(test)]
pub(crate) use plain::pack;

/// Rows of an M-tile.
pub(crate) const M_TILE: usize = 16;

/// How codes and scales lie in a K-block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum FragmentFormat {
    /// Signed bytes, one half scale per 32 inputs: Q8_0, and Q5_0 and IQ4_NL, whose codes fit a byte.
    Q8,
    /// Signed nibbles, one half scale per 32 inputs: Q4_0.
    Q4,
    /// Q4_K: nibbles, a scale and one minimum per 32 inputs.
    K4,
    /// Q5_K: K4 with fifth bits apart.
    K5,
    /// Q6_K: signed 6-bit codes in two planes, a signed scale per 16 inputs.
    K6,
}

impl FragmentFormat {
    pub(crate) const ALL: [FragmentFormat; 5] = [
        FragmentFormat::Q8,
        FragmentFormat::Q4,
        FragmentFormat::K4,
        FragmentFormat::K5,
        FragmentFormat::K6,
    ];

    /// `None` for formats that have no fragments: floats, and those that become halves.
    pub(crate) fn of(quant: QuantType) -> Option<FragmentFormat> {
        Some(match quant {
            QuantType::Q8_0 | QuantType::Q5_0 | QuantType::IQ4_NL => FragmentFormat::Q8,
            QuantType::Q4_0 => FragmentFormat::Q4,
            QuantType::Q4_K => FragmentFormat::K4,
            QuantType::Q5_K => FragmentFormat::K5,
            QuantType::Q6_K => FragmentFormat::K6,
            _ => return None,
        })
    }

    /// What kernels call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            FragmentFormat::Q8 => "q8",
            FragmentFormat::Q4 => "q4",
            FragmentFormat::K4 => "k4",
            FragmentFormat::K5 => "k5",
            FragmentFormat::K6 => "k6",
        }
    }

    pub(crate) fn k_block_inputs(self) -> usize {
        match self {
            FragmentFormat::Q8 | FragmentFormat::Q4 => 64,
            FragmentFormat::K4 | FragmentFormat::K5 | FragmentFormat::K6 => 256,
        }
    }

    pub(crate) fn k_block_bytes(self) -> usize {
        match self {
            FragmentFormat::Q8 => 1088,
            FragmentFormat::Q4 => 576,
            FragmentFormat::K4 => 2368,
            FragmentFormat::K5 => 2880,
            FragmentFormat::K6 => 3360,
        }
    }

    /// Units of an M-tile.
    pub(crate) fn k_blocks(self, columns: usize) -> usize {
        columns.div_ceil(self.k_block_inputs())
    }

    /// Bytes of an M-tile.
    pub(crate) fn m_tile_bytes(self, columns: usize) -> usize {
        self.k_blocks(columns) * self.k_block_bytes()
    }

    /// Bytes of a matrix.
    #[cfg(test)]
    pub(crate) fn fragment_bytes(self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(M_TILE) * self.m_tile_bytes(columns)
    }
}

/// The constant that chooses a layout in `lib/fragment.cuh`.
pub(super) fn fragment_constant(format: FragmentFormat) -> (&'static str, String) {
    ("FRAGMENT", format.name().to_owned())
}
