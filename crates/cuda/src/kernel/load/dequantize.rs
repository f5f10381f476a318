//! Twin of `kernels/load/dequantize.cu`: rows of the file to f16 or bf16. Part of loading, so a job is given addresses and no
//! batch.

use carat_gguf::QuantType;

use crate::kernel::{Specialization, grid::elementwise_grid, specialization::format_constant};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

params! {
    struct DequantizeParams {
        from: Address,
        row_bytes: u64,
        to: Address,
        columns: u32,
    }
}

/// The 16-bit float that values become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HalfKind {
    /// Rounded.
    F16,
    /// Exact, of F32 whose lower 16 bits are zero.
    Bf16,
}

/// Rows of a matrix to 16-bit floats, row-major.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dequantize {
    pub(crate) quant: QuantType,
    /// Packed rows, as in the file.
    pub(crate) from: Address,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) to: Address,
}

impl Dequantize {
    pub(crate) fn specialization(quant: QuantType, to: HalfKind) -> Specialization {
        let to = match to {
            HalfKind::F16 => "f16",
            HalfKind::Bf16 => "bf16",
        };
        Specialization {
            kernel: "dequantize",
            entries: &["dequantize"],
            constants: vec![format_constant(quant), ("TO", to.to_owned())],
            params_bytes: DequantizeParams::BYTES,
        }
    }

    pub(crate) fn grid(&self) -> Grid {
        elementwise_grid(self.rows, self.columns)
    }

    pub(crate) fn params(&self) -> Vec<u8> {
        DequantizeParams {
            from: self.from,
            row_bytes: self.quant.row_bytes(self.columns) as u64,
            to: self.to,
            columns: self.columns as u32,
        }
        .bytes()
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::quant::random_blocks;

    use super::*;
    use crate::{config::Tier, testing::Card};

    fn f16_value(bits: u16) -> f32 {
        let mut value = [0.0];
        QuantType::F16.dequantize(&bits.to_le_bytes(), &mut value);
        value[0]
    }

    /// No f16 is nearer, and of two that are as near this is the even one.
    fn is_nearest(bits: u16, value: f32) -> bool {
        let distance = |bits: u16| f64::from(f16_value(bits) - value).abs();
        let others = [bits.wrapping_sub(1), bits + 1];
        others.into_iter().all(|other| {
            let (own, other) = (distance(bits), distance(other));
            own < other || own == other && bits.is_multiple_of(2) || other.is_nan()
        })
    }

    #[test]
    #[ignore = "needs a card"]
    fn dequantize_gives_the_nearest_f16_of_every_format() {
        let card = Card::open(Tier::Best);
        for quant in QuantType::all() {
            let module = card.load(&Dequantize::specialization(quant, HalfKind::F16));
            let (rows, columns) = (3, 5 * quant.block_len().max(67));
            let columns = columns.next_multiple_of(quant.block_len());
            let mut bytes = vec![0; rows * quant.row_bytes(columns)];
            random_blocks(quant, 8, 0.05, &mut bytes);
            let mut expected = vec![0.0; rows * columns];
            quant.dequantize(&bytes, &mut expected);
            let from = card.upload(&bytes);
            let to = card.upload(&vec![0x7e00u16; rows * columns + 1]);
            let job = Dequantize {
                quant,
                from: from.address(),
                rows,
                columns,
                to: to.address(),
            };
            card.run(&module, job.grid(), &job.params());
            let found: Vec<u16> = card.download(&to, rows * columns + 1);
            assert_eq!(found.last(), Some(&0x7e00), "{quant}");
            for (i, (bits, value)) in found.iter().zip(&expected).enumerate() {
                assert!(is_nearest(*bits, *value), "{quant} {i}: {bits:x} {value}");
            }
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn dequantize_to_bf16_keeps_the_upper_bits() {
        let card = Card::open(Tier::Best);
        let values: Vec<u32> = (0..700u32)
            .map(|i| i.wrapping_mul(0x9e37_79b9) & 0xffff_0000)
            .collect();
        let from = card.upload(&values);
        let to = card.upload(&vec![0u16; values.len()]);
        let job = Dequantize {
            quant: QuantType::F32,
            from: from.address(),
            rows: 2,
            columns: 350,
            to: to.address(),
        };
        let module = card.load(&Dequantize::specialization(QuantType::F32, HalfKind::Bf16));
        card.run(&module, job.grid(), &job.params());
        let expected: Vec<u16> = values.iter().map(|v| (v >> 16) as u16).collect();
        assert_eq!(card.download::<u16>(&to, values.len()), expected);
    }
}
