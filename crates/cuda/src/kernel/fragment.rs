//! The MMA-fragment-major layout: quantized matrices in the order in which tensor cores take them.
//!
//! 16 output rows are an M-tile. An M-tile is cut along its inputs into K-blocks; K-block follows K-block, M-tile follows
//! M-tile. Rows are padded to an M-tile and inputs to a K-block with zero bytes, which stand for zeros. Within a K-block, a
//! warp's lane `4 * group + quad` finds its operands side by side: rows `group` and `group + 8`, and of every 32 inputs (16 in
//! K2, K6, F4, T3, T2 and T1) the quarter `quad`. Scales lie behind the codes.
//!
//! Sizes follow from a few numbers per format; `kernels/lib/fragment.cuh` has the same, and kernels are told the results to
//! compare. `fragment/plain.rs` defines the order within a K-block: a plain packer, and the value at every position, bit for
//! bit what `carat-gguf` makes of the file. `kernels/load/pack.cu` packs on the device, `kernels/lib/fragment_value.cuh` reads
//! there; both are compared with it.

use carat_gguf::QuantType;

mod code_table;
#[cfg(test)]
mod plain;

pub(crate) use code_table::table_constants;
#[cfg(test)]
pub(crate) use plain::pack;

/// Rows of an M-tile.
pub(crate) const M_TILE: usize = 16;

/// Inputs of a part: what a lane's 16 bytes of nibbles cover.
pub(crate) const PART_INPUTS: usize = 64;

/// Order of codes and scales in a K-block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum FragmentFormat {
    /// Signed 8-bit codes, one f16 scale per 32 inputs: Q8_0.
    Q8,
    /// Signed nibbles, one f16 scale per 32 inputs: Q4_0.
    Q4,
    /// Q4 with fifth bits apart: Q5_0.
    Q5,
    /// Nibbles that index the table of IQ4_NL, one f16 scale per 32 inputs.
    N4,
    /// Q4 with an f16 minimum beside each scale: Q4_1.
    M4,
    /// Q5 with an f16 minimum beside each scale: Q5_1.
    M5,
    /// Q2_K: codes of two bits, a scale and a minimum of four bits per 16 inputs.
    K2,
    /// Q4_K: nibbles, a scale and one minimum per 32 inputs.
    K4,
    /// Q5_K: K4 with fifth bits apart.
    K5,
    /// Q6_K: signed 6-bit codes in two planes, a signed scale per 16 inputs.
    K6,
    /// Nibbles that index a table of the matrix ([`code_table`]), a signed sub-scale per 32 inputs.
    T4,
    /// Nibbles that index such a table, a small float as sub-scale per 16 inputs.
    F4,
    /// Codes of three bits that index such a table, in two planes, a signed sub-scale per 16 inputs.
    T3,
    /// Codes of two bits that index such a table, one f16 scale per 256 inputs.
    T2,
    /// Codes of one bit that index such a table, one f16 scale per 128 inputs.
    T1,
}

impl FragmentFormat {
    pub(crate) const ALL: [FragmentFormat; 15] = [
        FragmentFormat::Q8,
        FragmentFormat::Q4,
        FragmentFormat::Q5,
        FragmentFormat::N4,
        FragmentFormat::M4,
        FragmentFormat::M5,
        FragmentFormat::K2,
        FragmentFormat::K4,
        FragmentFormat::K5,
        FragmentFormat::K6,
        FragmentFormat::T4,
        FragmentFormat::F4,
        FragmentFormat::T3,
        FragmentFormat::T2,
        FragmentFormat::T1,
    ];

    /// `None` for formats that have no fragments: floats, and those that become f16.
    pub(crate) fn of(quant: QuantType) -> Option<FragmentFormat> {
        Some(match quant {
            QuantType::Q8_0 => FragmentFormat::Q8,
            QuantType::Q4_0 => FragmentFormat::Q4,
            QuantType::Q5_0 => FragmentFormat::Q5,
            QuantType::IQ4_NL => FragmentFormat::N4,
            QuantType::Q4_1 => FragmentFormat::M4,
            QuantType::Q5_1 => FragmentFormat::M5,
            QuantType::Q2_K => FragmentFormat::K2,
            QuantType::Q4_K => FragmentFormat::K4,
            QuantType::Q5_K => FragmentFormat::K5,
            QuantType::Q6_K => FragmentFormat::K6,
            QuantType::IQ4_XS | QuantType::IQ3_XXS | QuantType::IQ3_S => FragmentFormat::T4,
            QuantType::MXFP4 | QuantType::NVFP4 => FragmentFormat::F4,
            QuantType::Q3_K
            | QuantType::IQ2_XXS
            | QuantType::IQ2_XS
            | QuantType::IQ2_S
            | QuantType::IQ1_S
            | QuantType::IQ1_M => FragmentFormat::T3,
            QuantType::TQ1_0 | QuantType::TQ2_0 => FragmentFormat::T2,
            QuantType::Q1_0 => FragmentFormat::T1,
            _ => return None,
        })
    }

    /// The format's name in kernels.
    pub(crate) fn name(self) -> &'static str {
        match self {
            FragmentFormat::Q8 => "q8",
            FragmentFormat::Q4 => "q4",
            FragmentFormat::Q5 => "q5",
            FragmentFormat::N4 => "n4",
            FragmentFormat::M4 => "m4",
            FragmentFormat::M5 => "m5",
            FragmentFormat::K2 => "k2",
            FragmentFormat::K4 => "k4",
            FragmentFormat::K5 => "k5",
            FragmentFormat::K6 => "k6",
            FragmentFormat::T4 => "t4",
            FragmentFormat::F4 => "f4",
            FragmentFormat::T3 => "t3",
            FragmentFormat::T2 => "t2",
            FragmentFormat::T1 => "t1",
        }
    }

    pub(crate) fn k_block_inputs(self) -> usize {
        match self {
            FragmentFormat::Q8
            | FragmentFormat::Q4
            | FragmentFormat::Q5
            | FragmentFormat::N4
            | FragmentFormat::M4
            | FragmentFormat::M5 => 64,
            FragmentFormat::K2
            | FragmentFormat::K4
            | FragmentFormat::K5
            | FragmentFormat::K6
            | FragmentFormat::T4
            | FragmentFormat::F4
            | FragmentFormat::T3
            | FragmentFormat::T2
            | FragmentFormat::T1 => 256,
        }
    }

    /// Bits of a code: those that lie together in bytes or nibbles, and those above, in a plane of their own.
    fn code_bits(self) -> (u32, u32) {
        match self {
            FragmentFormat::Q8 => (8, 0),
            FragmentFormat::Q4
            | FragmentFormat::N4
            | FragmentFormat::M4
            | FragmentFormat::K4
            | FragmentFormat::T4
            | FragmentFormat::F4 => (4, 0),
            FragmentFormat::K2 | FragmentFormat::T2 => (2, 0),
            FragmentFormat::T1 => (1, 0),
            FragmentFormat::T3 => (2, 1),
            FragmentFormat::Q5 | FragmentFormat::M5 | FragmentFormat::K5 => (4, 1),
            FragmentFormat::K6 => (4, 2),
        }
    }

    /// Bytes of a row's scales in a K-block: 8-bit sub-scales (and minimums), then f16.
    fn scale_bytes(self) -> (usize, usize) {
        match self {
            FragmentFormat::Q8
            | FragmentFormat::Q4
            | FragmentFormat::Q5
            | FragmentFormat::N4
            | FragmentFormat::T1 => (0, 4),
            FragmentFormat::M4 | FragmentFormat::M5 => (0, 8),
            FragmentFormat::K2 | FragmentFormat::K4 | FragmentFormat::K5 => (16, 4),
            FragmentFormat::T4 => (8, 2),
            FragmentFormat::K6 | FragmentFormat::F4 | FragmentFormat::T3 => (16, 2),
            FragmentFormat::T2 => (0, 2),
        }
    }

    /// Bytes of the matrix's code table, which lies in every K-block.
    fn table_bytes(self) -> usize {
        match self {
            FragmentFormat::T4
            | FragmentFormat::F4
            | FragmentFormat::T3
            | FragmentFormat::T2
            | FragmentFormat::T1 => code_table::TABLE_BYTES,
            _ => 0,
        }
    }

    /// Whether a step of the tensor core has 16 inputs, each such group a scale of its own.
    pub(crate) fn has_short_steps(self) -> bool {
        use FragmentFormat::{F4, K2, K6, T1, T2, T3};
        matches!(self, K2 | K6 | F4 | T3 | T2 | T1)
    }

    /// Whether codes are looked up, so that the four of an operand lie side by side, each in a nibble.
    #[cfg(test)]
    fn is_looked_up(self) -> bool {
        self == FragmentFormat::N4 || self.table_bytes() > 0
    }

    /// Whether rows have minimums that are multiplied by sums of tokens' codes, which the product is given. M4, M5 and K2 make do
    /// without.
    pub(crate) fn has_minimums(self) -> bool {
        matches!(self, FragmentFormat::K4 | FragmentFormat::K5)
    }

    /// Bytes of a part's codes.
    fn part_code_bytes(self) -> usize {
        let (low, high) = self.code_bits();
        M_TILE * PART_INPUTS * (low + high) as usize / 8
    }

    fn parts(self) -> usize {
        self.k_block_inputs() / PART_INPUTS
    }

    /// Bytes of a part by itself: its codes, its share of the sub-scales, the f16 scales (of T1 those of its inputs), the table.
    pub(crate) fn part_bytes(self) -> usize {
        let (sub_scales, mut scales) = self.scale_bytes();
        if self.table_bytes() > 0 {
            scales = 2;
        }
        let rows = M_TILE * (sub_scales / self.parts() + scales);
        self.part_code_bytes() + rows + self.table_bytes()
    }

    pub(crate) fn k_block_bytes(self) -> usize {
        let (sub_scales, scales) = self.scale_bytes();
        let rows = M_TILE * (sub_scales + scales);
        self.parts() * self.part_code_bytes() + rows + self.table_bytes()
    }

    /// K-blocks of an M-tile.
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

/// Constants that choose a layout in `lib/fragment_value.cuh` and let it compare sizes.
pub(super) fn fragment_constants(format: FragmentFormat) -> [(&'static str, String); 2] {
    [
        ("FRAGMENT", format.name().to_owned()),
        ("K_BLOCK_BYTES", format.k_block_bytes().to_string()),
    ]
}
