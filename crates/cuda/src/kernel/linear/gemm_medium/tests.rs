use carat_gguf::{QuantType, quant::random_blocks};

use super::*;
use crate::kernel::HOPPER_MULTIPROCESSORS;
use crate::{
    config::Tier,
    kernel::{
        activation::{tile_bytes, tile_index},
        fragment::pack,
    },
    testing::{Card, f16_bits, f16_value, normals, relative_error},
};

/// Shared memory of a block on Hopper, and on the smallest supported cards.
const HOPPER_SHARED: usize = 227 << 10;
const SMALL_SHARED: usize = 99 << 10;

/// A value that no result has.
const POISON: f32 = -1.5e30;
const POISON_F16: u16 = 0x7e5a;
const PAIR_SCALE: f32 = 0.25;

const FORMATS: [(FragmentFormat, QuantType); 15] = [
    (FragmentFormat::Q8, QuantType::Q8_0),
    (FragmentFormat::Q4, QuantType::Q4_0),
    (FragmentFormat::Q5, QuantType::Q5_0),
    (FragmentFormat::N4, QuantType::IQ4_NL),
    (FragmentFormat::M4, QuantType::Q4_1),
    (FragmentFormat::M5, QuantType::Q5_1),
    (FragmentFormat::K2, QuantType::Q2_K),
    (FragmentFormat::K4, QuantType::Q4_K),
    (FragmentFormat::K5, QuantType::Q5_K),
    (FragmentFormat::K6, QuantType::Q6_K),
    (FragmentFormat::T4, QuantType::IQ3_S),
    (FragmentFormat::F4, QuantType::NVFP4),
    (FragmentFormat::T3, QuantType::IQ2_S),
    (FragmentFormat::T2, QuantType::TQ1_0),
    (FragmentFormat::T1, QuantType::Q1_0),
];

/// A matrix as the kernel takes it, and its values.
pub(crate) struct Matrix {
    pub(crate) bytes: Vec<u8>,
    values: Vec<f32>,
}

impl Matrix {
    pub(crate) fn new(format: FragmentFormat, outputs: usize, columns: usize, seed: u64) -> Matrix {
        let found = FORMATS.iter().find(|(f, _)| *f == format);
        let quant = found.expect("one of each").1;
        let row_bytes = quant.row_bytes(columns);
        let mut file = vec![0; outputs * row_bytes];
        random_blocks(quant, seed, 0.1, &mut file);
        let row = |r: usize| &file[r * row_bytes..(r + 1) * row_bytes];
        let mut values = vec![0.0; outputs * columns];
        for (r, values) in values.chunks_exact_mut(columns).enumerate() {
            quant.dequantize(row(r), values);
        }
        Matrix {
            bytes: pack(quant, outputs, columns, row),
            values,
        }
    }
}

const KERNELS: [GemmMediumKernel; 2] = [GemmMediumKernel::Warps, GemmMediumKernel::Warpgroups];

pub(crate) fn shape(
    kernel: GemmMediumKernel,
    format: FragmentFormat,
    sizes: (usize, usize),
    multiprocessors: usize,
) -> GemmMediumShape {
    GemmMediumShape {
        format,
        epilogue: GemmMediumEpilogue::F32,
        columns: sizes.1,
        outputs: sizes.0,
        multiprocessors,
        shared_bytes: HOPPER_SHARED,
        clusters: Some(ClusterCapacity::assumed(multiprocessors)),
        kernel,
    }
}

fn entries(kernel: GemmMediumKernel) -> &'static [&'static str] {
    match kernel {
        GemmMediumKernel::Warps => ENTRIES,
        GemmMediumKernel::Warpgroups => HOPPER_ENTRIES,
    }
}

/// Every kernel with every format.
fn kernels() -> impl Iterator<Item = (GemmMediumKernel, FragmentFormat)> {
    let formats = FORMATS.map(|(format, _)| format);
    (KERNELS.into_iter()).flat_map(move |kernel| formats.map(|format| (kernel, format)))
}

/// Products of the published sizes: outputs and inputs.
const SIZES: [(usize, usize); 12] = [
    (3072, 2560),
    (2560, 2048),
    (20480, 2560),
    (2560, 10240),
    (262_144, 2560),
    (8192, 3840),
    (3840, 4096),
    (30720, 3840),
    (3840, 15360),
    (262_144, 3840),
    (43008, 5376),
    (5376, 21504),
];

#[test]
fn blocks_of_published_sizes_are_resident_and_miss_little() {
    for (kernel, format) in kernels() {
        let (tile_rows, stage_inputs) = match kernel {
            GemmMediumKernel::Warps => (TILE_ROWS, STAGE_INPUTS),
            GemmMediumKernel::Warpgroups => (M_TILE, 2 * STAGE_INPUTS),
        };
        for sizes in SIZES {
            let shape = shape(kernel, format, sizes, HOPPER_MULTIPROCESSORS);
            for (entry, name) in entries(kernel).iter().enumerate() {
                let case = format!("{kernel:?} {format:?} {sizes:?} {name}");
                let tiling = shape.tiling(entry);
                assert!(
                    tiling.runs * tiling.splits <= shape.multiprocessors,
                    "{case}"
                );
                let tiles = sizes.0.div_ceil(tile_rows);
                let rounds = tiles.div_ceil(tiling.run * tiling.runs);
                let takes_turns = kernel == GemmMediumKernel::Warpgroups && tiling.splits == 1;
                assert!(rounds == 1 || takes_turns, "{case}");
                let stages = sizes.1.div_ceil(stage_inputs);
                assert!(tiling.split_stages * tiling.splits >= stages, "{case}");
                assert!(tiling.split_stages * (tiling.splits - 1) < stages, "{case}");
                let bytes = shape.shared_bytes(entry, &tiling);
                assert!(bytes + DECLARED_BYTES <= HOPPER_SHARED, "{case}: {bytes}");
                if kernel == GemmMediumKernel::Warpgroups {
                    let (slots, _) = warpgroups::ring(&shape, entry, &tiling);
                    assert!(
                        slots >= 4,
                        "{case}: places for what comes before the input, and more"
                    );
                }
                if sizes.0 * sizes.1 < 20_000_000 {
                    continue; // over before more blocks could meet
                }
                let busiest = rounds * tiling.run * tiling.split_stages * shape.multiprocessors;
                let equal = (tiles * stages) as f64;
                assert!(busiest as f64 / equal < 1.35, "{case}: {tiling:?}");
            }
        }
    }
}

#[test]
fn every_card_has_room_for_a_tiling() {
    for (format, _) in FORMATS {
        for sizes in SIZES {
            let shape = GemmMediumShape {
                shared_bytes: SMALL_SHARED,
                ..shape(GemmMediumKernel::Warps, format, sizes, 46)
            };
            for entry in 0..ENTRIES.len() {
                let tiling = shape.tiling(entry);
                let bytes = shape.shared_bytes(entry, &tiling);
                assert!(
                    bytes + DECLARED_BYTES <= SMALL_SHARED,
                    "{format:?} {sizes:?}"
                );
            }
        }
    }
}

/// `x . w^T` in f64.
fn product(x: &[f32], w: &[f32], columns: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for x in x.chunks_exact(columns) {
        for w in w.chunks_exact(columns) {
            let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
            out.push(terms.sum::<f64>() as f32);
        }
    }
    out
}

/// Rows of f16 in token tiles.
fn in_tiles(rows: &[u16], columns: usize) -> Vec<u16> {
    let mut tiles = vec![POISON_F16; tile_bytes(columns) / 2];
    for (i, &value) in rows.iter().enumerate() {
        tiles[tile_index(i / columns, i % columns)] = value;
    }
    tiles
}

/// Runs a product as in a bucket of `bucket` rows, of which `x` are there. Pairs come back as rows of gates, then ups, unscaled.
fn run(card: &Card, shape: &GemmMediumShape, w: &[u8], x: &[f32], bucket: usize) -> Vec<f32> {
    let module = card.load(&shape.specialization());
    let count = x.len() / shape.columns;
    let stride = match shape.epilogue {
        GemmMediumEpilogue::F32 => shape.outputs + 3,
        GemmMediumEpilogue::F16Pair => shape.outputs,
    };
    let scratch = shape.scratch(bucket);
    let rows = card.upload(&[count as u32]);
    let partials = card.upload(&vec![POISON; scratch.partials / 4]);
    let arrivals = card.upload(&vec![0u32; scratch.arrivals / 4]);
    // What lies behind the rows that there are does not matter.
    let mut x = f16_bits(x);
    x.resize(bucket * shape.columns, POISON_F16);
    if shape.kernel == GemmMediumKernel::Warpgroups {
        x = in_tiles(&x, shape.columns);
    }
    let (w, x) = (card.upload(w), card.upload(&x));
    let out = match shape.epilogue {
        GemmMediumEpilogue::F32 => card.upload(&vec![POISON; bucket * stride]),
        GemmMediumEpilogue::F16Pair => card.upload(&vec![POISON_F16; bucket * stride]),
    };
    let places = Places {
        rows: RowsAt {
            count: rows.address(),
            index: Address::NULL,
        },
        w: w.address(),
        x: x.address(),
        out: out.address(),
        partials: partials.address(),
        arrivals: arrivals.address(),
        out_stride: stride,
        scale: PAIR_SCALE,
    };
    // Twice, because the first run must leave the arrivals as it found them.
    for _ in 0..2 {
        card.run(&module, shape.grid(bucket, false), &shape.params(&places));
    }
    match shape.epilogue {
        GemmMediumEpilogue::F32 => {
            let all: Vec<f32> = card.download(&out, bucket * stride);
            for (r, row) in all.chunks_exact(stride).enumerate() {
                let written = if r < count { shape.outputs } else { 0 };
                assert!(row[written..].iter().all(|&v| v == POISON), "past the end");
            }
            let rows = all.chunks_exact(stride).take(count);
            rows.flat_map(|r| r[..shape.outputs].to_vec()).collect()
        }
        GemmMediumEpilogue::F16Pair => {
            let all: Vec<u16> = card.download(&out, bucket * stride);
            let (written, beyond) = all.split_at(count * stride);
            assert!(beyond.iter().all(|&v| v == POISON_F16), "past the end");
            let value = |bits: &u16| f16_value(*bits) / PAIR_SCALE;
            written.iter().map(value).collect()
        }
    }
}

/// Whole buckets and others.
const BUCKETS: [(usize, usize); 4] = [(16, 9), (32, 31), (48, 48), (64, 50)];

/// Against f64 of the same f16 activations, rows in company and alone.
fn check(shape: &GemmMediumShape, seed: u64) {
    let card = Card::open(match shape.kernel {
        GemmMediumKernel::Warps => Tier::Portable,
        GemmMediumKernel::Warpgroups => Tier::Best,
    });
    let GemmMediumShape {
        format,
        columns,
        outputs,
        ..
    } = *shape;
    let w = Matrix::new(format, outputs, columns, seed);
    let (bytes, values) = match shape.epilogue {
        GemmMediumEpilogue::F32 => (w.bytes, w.values),
        GemmMediumEpilogue::F16Pair => {
            // M-tiles of two matrices alternate.
            let up = Matrix::new(format, outputs / 2, columns, seed + 1);
            let gate = Matrix::new(format, outputs / 2, columns, seed + 2);
            let tile = format.m_tile_bytes(columns);
            let tiles = gate
                .bytes
                .chunks_exact(tile)
                .zip(up.bytes.chunks_exact(tile));
            let bytes = tiles.flat_map(|(gate, up)| [gate, up].concat()).collect();
            (bytes, [gate.values, up.values].concat())
        }
    };
    for (bucket, count) in BUCKETS {
        let case = format!("{shape:?}, {count} of {bucket} rows");
        let x: Vec<f32> = f16_bits(&normals((bucket * count) as u64, count * columns))
            .into_iter()
            .map(f16_value)
            .collect();
        let found = run(&card, shape, &bytes, &x, bucket);
        let error = relative_error(&found, &product(&x, &values, columns));
        assert!(error < 5e-4, "{case}: {error}");
        let alone = run(&card, shape, &bytes, &x[(count - 1) * columns..], bucket);
        assert!(
            found[(count - 1) * outputs..] == alone[..],
            "{case}: a row alone"
        );
    }
}

/// Cards of several sizes, so that warps share tiles, cross from one to the next, have whole ones, and inputs are split.
fn warps_cases(format: FragmentFormat) -> Vec<GemmMediumShape> {
    let shape =
        |sizes, multiprocessors| shape(GemmMediumKernel::Warps, format, sizes, multiprocessors);
    let (columns, small) = match format {
        FragmentFormat::Q8 | FragmentFormat::Q4 => (320, 352),
        _ => (256, 256),
    };
    vec![
        shape((136, small), 1),
        shape((200, small), 1),
        shape((1032, small), 1),
        shape((37, 12 * columns), 8),
        GemmMediumShape {
            epilogue: GemmMediumEpilogue::F16Pair,
            ..shape((2 * 72, small), 3)
        },
        GemmMediumShape {
            shared_bytes: SMALL_SHARED,
            ..shape((200, 2 * columns), 5)
        },
    ]
}

#[test]
fn cases_have_every_kind_of_tiling_of_warps() {
    for (format, _) in FORMATS {
        let tilings: Vec<Tiling> = warps_cases(format)
            .iter()
            .flat_map(|shape| (0..ENTRIES.len()).map(|entry| shape.tiling(entry)))
            .collect();
        let has = |kind: &dyn Fn(&Tiling) -> bool| tilings.iter().any(kind);
        let pieces = |t: &Tiling| t.sharing == Sharing::Pieces;
        assert!(has(&|t| t.splits > 1), "{format:?}");
        assert!(has(&|t| t.splits == 1), "{format:?}");
        assert!(has(&|t| t.sharing == Sharing::WholeTiles), "{format:?}");
        let few = |t: &Tiling| pieces(t) && t.run > 1 && t.run <= WARPS;
        assert!(has(&few), "{format:?}");
        assert!(has(&|t| pieces(t) && t.run > WARPS), "{format:?}");
    }
}

/// Cards of several sizes, so that warpgroups share M-tiles or stages or neither, M-tiles lack, blocks take turns, and inputs are split.
fn warpgroups_cases(format: FragmentFormat) -> Vec<GemmMediumShape> {
    let shape = |sizes, multiprocessors| {
        shape(GemmMediumKernel::Warpgroups, format, sizes, multiprocessors)
    };
    // An odd number of parts where the format has such.
    let odd = match format {
        FragmentFormat::Q8 | FragmentFormat::Q4 => 320,
        _ => 256,
    };
    vec![
        shape((136, odd), 1),
        shape((1032, odd), 1),
        shape((1032, odd), 3),
        shape((37, 12 * odd), 8),
        shape((100, 8 * odd), 2),
        shape((200, 8 * odd), 6),
        GemmMediumShape {
            epilogue: GemmMediumEpilogue::F16Pair,
            ..shape((2 * 72, odd), 3)
        },
    ]
}

#[test]
fn cases_have_every_kind_of_tiling_of_warpgroups() {
    for (format, _) in FORMATS {
        let tilings: Vec<(Tiling, usize)> = warpgroups_cases(format)
            .iter()
            .flat_map(|shape| {
                let m_tiles = shape.m_tiles();
                (0..HOPPER_ENTRIES.len()).map(move |entry| (shape.tiling(entry), m_tiles))
            })
            .collect();
        let has = |kind: &dyn Fn(&Tiling) -> bool| tilings.iter().any(|(t, _)| kind(t));
        for m_groups in 1..=4 {
            let kind = |t: &Tiling| t.sharing == Sharing::Groups(m_groups);
            assert!(has(&kind), "{format:?} {m_groups}: {tilings:?}");
        }
        assert!(has(&|t| t.splits > 2), "{format:?}");
        assert!(has(&|t| t.splits == 2), "{format:?}");
        assert!(has(&|t| !t.run.is_multiple_of(4)), "{format:?}");
        let in_turns = |(t, m_tiles): &(Tiling, usize)| t.run * t.runs < *m_tiles;
        assert!(tilings.iter().any(in_turns), "{format:?}");
    }
}

fn cases(kernel: GemmMediumKernel, format: FragmentFormat) -> Vec<GemmMediumShape> {
    match kernel {
        GemmMediumKernel::Warps => warps_cases(format),
        GemmMediumKernel::Warpgroups => warpgroups_cases(format),
    }
}

fn check_format(kernel: GemmMediumKernel, format: FragmentFormat) {
    for (i, shape) in cases(kernel, format).iter().enumerate() {
        check(shape, 7 + 10 * i as u64);
    }
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_q8() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::Q8);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_q4() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::Q4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_q5_and_n4() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::Q5);
    check_format(GemmMediumKernel::Warps, FragmentFormat::N4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_m4_and_m5() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::M4);
    check_format(GemmMediumKernel::Warps, FragmentFormat::M5);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_k2() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::K2);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_k4() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::K4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_k5() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::K5);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_k6() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::K6);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_q8() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::Q8);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_q4() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::Q4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_q5_and_n4() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::Q5);
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::N4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_m4_and_m5() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::M4);
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::M5);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_k2() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::K2);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_k4() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::K4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_k5() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::K5);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_k6() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::K6);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_t4() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::T4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_t4() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::T4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_f4() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::F4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_f4() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::F4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_t3() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::T3);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_t2_and_t1() {
    check_format(GemmMediumKernel::Warps, FragmentFormat::T2);
    check_format(GemmMediumKernel::Warps, FragmentFormat::T1);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_t3() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::T3);
}

#[test]
#[ignore = "needs a card"]
fn gemm_medium_sm90_t2_and_t1() {
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::T2);
    check_format(GemmMediumKernel::Warpgroups, FragmentFormat::T1);
}
