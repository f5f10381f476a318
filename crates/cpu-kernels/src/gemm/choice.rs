//! The choice of the kernel that multiplies rows of a batch with a weight matrix: one pure function of the weight format, the
//! rows and the instruction set.
//!
//! All but [`KernelChoice::AmxBf16`] give the same bits, so choosing among them is free. BF16 has results of its own: there
//! the class of the whole batch decides, and never how many of its rows chose an expert.

use carat_gguf::QuantType;

use super::{
    amx_int8, gemv, gemv_transposed,
    row_class::{RowClass, SMALL_ROWS},
};
use crate::{isa::Isa, simd::LANES};

/// Facts about a weight matrix that the choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightFormat {
    pub quant: QuantType,
    /// Whether float weights are all BF16 values; of no concern for quantized ones.
    pub is_exact_bf16: bool,
    /// Values of a row.
    pub columns: usize,
}

impl WeightFormat {
    /// Activation rows from which on sixteen weight rows at a time are faster than [`gemv`] or tiles; `None` where a format cannot be
    /// transposed.
    ///
    /// The others work on whole chunks of a row, of sixteen groups. They compute 512 products for 256 values and fold sixteen lanes
    /// for every output, which takes longer than to transpose: in the cache, with AVX-512 and Q8_0, 0.24 against 0.15 ns per weight
    /// for one activation row, and 0.45 against 0.23 for four. Of 768 values a quarter is lost, and it takes three rows to make
    /// up for transposing; of whole chunks none, and it takes five.
    fn transposed_from(self) -> Option<usize> {
        if !gemv_transposed::takes(self.quant) {
            return None;
        }
        let chunk = amx_int8::group_of(self.quant) * LANES;
        let has_tail = !self.columns.is_multiple_of(chunk);
        Some(match self.columns / chunk {
            0 => 1,
            1 if has_tail => 3,
            _ => gemv_transposed::MIN_ROWS,
        })
    }

    /// Whether tiles lose against transposing where both could multiply: rows are no longer than a chunk and its tail.
    fn is_short(self) -> bool {
        self.transposed_from()
            .is_some_and(|rows| rows < gemv_transposed::MIN_ROWS)
    }
}

/// The kernels that multiply, by the names of their files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// Few rows, weights read packed.
    Gemv,
    /// The same, sixteen weight rows transposed in registers.
    GemvTransposed,
    /// Weights unpacked once into panels that all rows pass by.
    PackedInt8,
    /// A small batch in int8 tiles.
    AmxInt8,
    /// A large batch in BF16 tiles.
    AmxBf16,
    /// Float weights with f32 activations.
    Float,
}

impl KernelChoice {
    /// The name of the kernel and of its file.
    pub fn name(self) -> &'static str {
        match self {
            KernelChoice::Gemv => "gemv",
            KernelChoice::GemvTransposed => "gemv_transposed",
            KernelChoice::PackedInt8 => "packed_int8",
            KernelChoice::AmxInt8 => "amx_int8",
            KernelChoice::AmxBf16 => "amx_bf16",
            KernelChoice::Float => "float",
        }
    }
}

/// The kernel for `rows` rows that meet one matrix: all rows of a batch of that class, or those that chose an expert.
pub fn choose(weights: WeightFormat, class: RowClass, rows: usize, isa: Isa) -> KernelChoice {
    let WeightFormat {
        quant,
        is_exact_bf16,
        ..
    } = weights;
    if quant.is_float() {
        return match class {
            RowClass::Large if is_exact_bf16 => KernelChoice::AmxBf16,
            _ => KernelChoice::Float,
        };
    }
    if class == RowClass::Large {
        return KernelChoice::AmxBf16;
    }
    let most = gemv_transposed::MAX_ROWS;
    let transposed = weights.transposed_from().map(|least| least..=most);
    let transposes = transposed.is_some_and(|range| range.contains(&rows));
    let has_tiles = isa.has_tiles() && (amx_int8::MIN_ROWS..=SMALL_ROWS).contains(&rows);
    let most_packed = match weights.transposed_from() {
        Some(_) => most,
        None => gemv::MAX_ROWS,
    };
    if transposes && (!has_tiles || weights.is_short()) {
        KernelChoice::GemvTransposed
    } else if has_tiles {
        KernelChoice::AmxInt8
    } else if rows > most_packed {
        KernelChoice::PackedInt8
    } else {
        KernelChoice::Gemv
    }
}
