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
use crate::{kernel::isa::Isa, simd::LANES};

/// Facts about a weight matrix that the choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightFormat {
    pub(crate) quant: QuantType,
    /// Whether float weights are all BF16 values; of no concern for quantized ones.
    pub(crate) is_exact_bf16: bool,
    /// Values of a row.
    pub(crate) columns: usize,
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
pub(crate) enum KernelChoice {
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
    pub(crate) fn name(self) -> &'static str {
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
pub(crate) fn choose(
    weights: WeightFormat,
    class: RowClass,
    rows: usize,
    isa: Isa,
) -> KernelChoice {
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

#[cfg(test)]
mod tests {
    use carat_model::backend::Batching;

    use super::{
        KernelChoice::{AmxBf16, AmxInt8, Float, Gemv, GemvTransposed, PackedInt8},
        *,
    };
    use crate::kernel::gemm::row_class::RowClasses;

    /// The choice for a whole batch of so many rows, and weights of some chunks.
    fn for_batch(quant: QuantType, is_exact_bf16: bool, rows: usize, isa: Isa) -> KernelChoice {
        let weights = WeightFormat {
            quant,
            is_exact_bf16,
            columns: 1536,
        };
        let classes = RowClasses::new(isa, Batching::Fast);
        choose(weights, classes.of(rows), rows, isa)
    }

    #[test]
    fn format_rows_and_instructions_decide() {
        let rows = [1, 2, 3, 4, 5, 7, 8, 9, 32, 33, 512];
        // Codes in runs, which can be transposed in registers.
        let runs = [
            Gemv,
            Gemv,
            Gemv,
            Gemv,
            GemvTransposed,
            GemvTransposed,
            GemvTransposed,
            PackedInt8,
            PackedInt8,
            PackedInt8,
            PackedInt8,
        ];
        let other = [
            Gemv, Gemv, Gemv, Gemv, Gemv, Gemv, PackedInt8, PackedInt8, PackedInt8, PackedInt8,
            PackedInt8,
        ];
        let tiles = [
            Gemv, Gemv, AmxInt8, AmxInt8, AmxInt8, AmxInt8, AmxInt8, AmxInt8, AmxInt8, AmxBf16,
            AmxBf16,
        ];
        for quant in QuantType::all().filter(|quant| !quant.is_float()) {
            let in_runs = matches!(
                quant,
                QuantType::Q4_0
                    | QuantType::Q4_1
                    | QuantType::Q8_0
                    | QuantType::Q4_K
                    | QuantType::Q6_K
            );
            for isa in Isa::ALL {
                let expected = match isa {
                    Isa::Amx => tiles,
                    _ if in_runs => runs,
                    _ => other,
                };
                let found = rows.map(|rows| for_batch(quant, false, rows, isa));
                assert_eq!(found, expected, "{quant} {isa:?}");
            }
        }
    }

    /// Short rows are transposed, with tiles and without, unless there are too many activation rows or the format cannot be.
    #[test]
    fn rows_that_fill_no_chunk_are_transposed() {
        let chosen = |quant, columns, rows, isa| {
            let weights = WeightFormat {
                quant,
                is_exact_bf16: false,
                columns,
            };
            choose(weights, RowClass::Small, rows, isa)
        };
        for (columns, least) in [
            (32, 1),
            (256, 1),
            (480, 1),
            (512, 5),
            (768, 3),
            (1024, 5),
            (1280, 5),
        ] {
            for rows in 1..=8 {
                let q8_0 = chosen(QuantType::Q8_0, columns, rows, Isa::Avx512Vnni);
                let expected = if rows < least { Gemv } else { GemvTransposed };
                assert_eq!(q8_0, expected, "{columns} {rows}");
                let with_tiles = chosen(QuantType::Q8_0, columns, rows, Isa::Amx);
                let expected = match rows {
                    _ if rows >= least && least < 5 => GemvTransposed,
                    0..3 => Gemv,
                    _ => AmxInt8,
                };
                assert_eq!(with_tiles, expected, "{columns} {rows} with tiles");
                // Groups of sixteen make chunks half as long.
                let q6_k = chosen(QuantType::Q6_K, columns, rows, Isa::Avx512Vnni);
                let expected = match columns {
                    32 => GemvTransposed,
                    480 if rows >= 3 => GemvTransposed,
                    _ if rows >= 5 => GemvTransposed,
                    _ => Gemv,
                };
                assert_eq!(q6_k, expected, "{columns} {rows}");
                let other = chosen(QuantType::Q5_0, columns, rows, Isa::Avx512Vnni);
                assert_eq!(other, if rows < 8 { Gemv } else { PackedInt8 });
            }
            let many = chosen(QuantType::Q8_0, columns, 9, Isa::Avx512Vnni);
            assert_eq!(many, PackedInt8, "{columns}");
            assert_eq!(chosen(QuantType::Q8_0, columns, 9, Isa::Amx), AmxInt8);
        }
    }

    #[test]
    fn floats_use_tiles_only_where_bf16_holds_them_exactly() {
        for quant in [QuantType::F32, QuantType::F16, QuantType::BF16] {
            for isa in Isa::ALL {
                for rows in [1, 32] {
                    assert_eq!(for_batch(quant, true, rows, isa), Float);
                }
                let many = if isa == Isa::Amx { AmxBf16 } else { Float };
                assert_eq!(for_batch(quant, true, 33, isa), many);
                assert_eq!(for_batch(quant, false, 33, isa), Float);
            }
        }
    }

    /// No batch is multiplied in BF16 where the company must not matter: that has bits of its own.
    #[test]
    fn invariant_batches_of_every_size_are_of_one_class() {
        for quant in QuantType::all() {
            for isa in Isa::ALL {
                for rows in [1, 3, 32, 33, 512, 4096] {
                    let class = RowClasses::new(isa, Batching::Invariant).of(rows);
                    let weights = WeightFormat {
                        quant,
                        is_exact_bf16: true,
                        columns: 1536,
                    };
                    let chosen = choose(weights, class, rows, isa);
                    assert_ne!(chosen, AmxBf16, "{quant} {isa:?} {rows}");
                    // Int8 tiles take two sets of sixteen rows, no more.
                    assert!(chosen != AmxInt8 || rows <= 32, "{quant} {rows}");
                }
            }
        }
    }

    /// However few rows chose an expert.
    #[test]
    fn the_batch_decides_about_bf16_not_an_experts_share() {
        let weights = WeightFormat {
            quant: QuantType::Q4_0,
            is_exact_bf16: false,
            columns: 1536,
        };
        for rows in [1, 4, 40] {
            assert_eq!(choose(weights, RowClass::Large, rows, Isa::Amx), AmxBf16);
            let small = choose(weights, RowClass::Small, rows, Isa::Amx);
            assert_ne!(small, AmxBf16);
        }
    }
}
