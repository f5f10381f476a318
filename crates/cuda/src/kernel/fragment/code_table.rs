//! Code tables: what the codes of a matrix in T4, F4, T3, T2 or T1 stand for.
//!
//! A value is `scale * factor * sub-scale * values[code]`: the f16 scale of its block, its group's 8-bit sub-scale, and an
//! entry of the table. All but the last product are exact. A format that is such a product needs an entry here, and its blocks'
//! parts for `kernels/load/pack.cu`; every kernel then has it.

use carat_gguf::{
    QuantType,
    quant::{IQ4_VALUES, MXFP4_VALUES},
};

/// Bytes of a table in a K-block.
pub(super) const TABLE_BYTES: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CodeTable {
    pub(super) values: [i8; 16],
    /// A power of two.
    pub(super) factor: f32,
    /// Of F4: left shift that makes a float's bits of a sub-scale. Those of others are signed bytes.
    pub(super) shift: u32,
}

impl CodeTable {
    fn new<const N: usize>(values: [i8; N], factor: f32, shift: u32) -> CodeTable {
        let mut table = CodeTable {
            values: [0; 16],
            factor,
            shift,
        };
        table.values[..N].copy_from_slice(&values);
        table
    }

    /// `None` for formats that are no such product, or have fragments of their own.
    pub(super) fn of(quant: QuantType) -> Option<CodeTable> {
        Some(match quant {
            QuantType::IQ4_XS => CodeTable::new(IQ4_VALUES, 1.0, 0),
            // An exponent is that of a float; the entries are doubled.
            QuantType::MXFP4 => CodeTable::new(MXFP4_VALUES, 0.5, 23),
            // Four bits of exponent and three of fraction, 120 below a float's; the entries are doubled.
            QuantType::NVFP4 => CodeTable::new(MXFP4_VALUES, 119f32.exp2(), 20),
            QuantType::IQ3_XXS => {
                CodeTable::new(both_signs([4, 12, 20, 28, 36, 44, 52, 62]), 0.25, 0)
            }
            QuantType::IQ3_S => CodeTable::new(both_signs([1, 3, 5, 7, 9, 11, 13, 15]), 1.0, 0),
            QuantType::Q3_K => CodeTable::new([-4, -3, -2, -1, 0, 1, 2, 3], 1.0, 0),
            QuantType::IQ2_XXS | QuantType::IQ2_XS | QuantType::IQ2_S => {
                CodeTable::new([8, 25, 43, -8, -25, -43], 0.125, 0)
            }
            QuantType::IQ1_S | QuantType::IQ1_M => CodeTable::new([-9, -7, -1, 1, 7, 9], 0.125, 0),
            QuantType::TQ1_0 | QuantType::TQ2_0 => CodeTable::new([-1, 0, 1, 2], 1.0, 0),
            QuantType::Q1_0 => CodeTable::new([-1, 1], 1.0, 0),
            _ => return None,
        })
    }

    /// As it lies in a K-block.
    pub(super) fn words(&self) -> [u32; TABLE_BYTES / 4] {
        let mut words = [0; TABLE_BYTES / 4];
        for (word, values) in words.iter_mut().zip(self.values.as_chunks().0) {
            *word = u32::from_le_bytes(values.map(i8::cast_unsigned));
        }
        words[4] = self.factor.to_bits();
        words[5] = self.shift;
        words
    }
}

fn both_signs(magnitudes: [i8; 8]) -> [i8; 16] {
    std::array::from_fn(|code| {
        if code < 8 {
            magnitudes[code]
        } else {
            -magnitudes[code - 8]
        }
    })
}

/// Constants of a table for `pack.cu`; none where the format has no table.
pub(crate) fn table_constants(quant: QuantType) -> Vec<(&'static str, String)> {
    let Some(table) = CodeTable::of(quant) else {
        return Vec::new();
    };
    let names = [
        "TABLE_0",
        "TABLE_1",
        "TABLE_2",
        "TABLE_3",
        "TABLE_FACTOR",
        "TABLE_SHIFT",
    ];
    let words = names.into_iter().zip(table.words());
    let mut constants: Vec<_> = words
        .map(|(name, word)| (name, format!("{word:#x}")))
        .collect();
    constants.push(("BLOCK_LEN", quant.block_len().to_string()));
    constants.push(("BLOCK_BYTES", quant.block_bytes().to_string()));
    constants
}
