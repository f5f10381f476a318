use carat_model::backend::Batching;

use carat_cpu_kernels::{
    gemm::{
        choice::{
            KernelChoice::{self, AmxBf16, AmxInt8, Float, Gemv, GemvTransposed, PackedInt8},
            WeightFormat, choose,
        },
        row_class::{RowClass, RowClasses},
    },
    isa::Isa,
};
use carat_gguf::QuantType;

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
        Gemv, Gemv, AmxInt8, AmxInt8, AmxInt8, AmxInt8, AmxInt8, AmxInt8, AmxInt8, AmxBf16, AmxBf16,
    ];
    for quant in QuantType::all().filter(|quant| !quant.is_float()) {
        let in_runs = matches!(
            quant,
            QuantType::Q4_0 | QuantType::Q4_1 | QuantType::Q8_0 | QuantType::Q4_K | QuantType::Q6_K
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
