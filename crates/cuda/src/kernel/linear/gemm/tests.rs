use carat_gguf::{QuantType, quant::random_blocks};

use super::*;
use crate::kernel::{HOPPER_MULTIPROCESSORS, moe::permute};
use crate::{
    config::Tier,
    device::{Buffer, Module},
    kernel::fragment::pack,
    testing::{Card, normals, relative_error},
};

const FORMATS: [QuantType; 15] = [
    QuantType::Q8_0,
    QuantType::Q4_0,
    QuantType::Q5_0,
    QuantType::IQ4_NL,
    QuantType::Q4_1,
    QuantType::Q5_1,
    QuantType::Q2_K,
    QuantType::Q4_K,
    QuantType::Q5_K,
    QuantType::Q6_K,
    QuantType::IQ4_XS,
    QuantType::NVFP4,
    QuantType::Q3_K,
    QuantType::TQ2_0,
    QuantType::Q1_0,
];

/// A value that no result has.
const POISON: f32 = -1.5e30;
const POISON_CODE: i8 = -128;

/// Int8 activations, and the values they stand for.
pub(crate) struct Q8 {
    pub(crate) codes: Vec<i8>,
    pub(crate) scales: Vec<f32>,
    pub(crate) sums: Vec<f32>,
}

pub(crate) fn quantize(x: &[f32]) -> Q8 {
    let mut q8 = Q8 {
        codes: Vec::new(),
        scales: Vec::new(),
        sums: Vec::new(),
    };
    for block in x.chunks_exact(32) {
        let largest = block.iter().fold(0f32, |m, v| m.max(v.abs()));
        let scale = largest / 127.0;
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let codes = block.iter().map(|v| (v * inverse).round_ties_even() as i8);
        let codes: Vec<i8> = codes.collect();
        let sum: i32 = codes.iter().map(|&c| i32::from(c)).sum();
        q8.codes.extend(codes);
        q8.scales.push(scale);
        q8.sums.push(scale * sum as f32);
    }
    q8
}

/// Each row in int8, and with two terms the int8 of its residual behind it.
fn quantize_terms(x: &[f32], columns: usize, terms: usize) -> Q8 {
    if terms == 1 {
        return quantize(x);
    }
    let with_rest = x.chunks_exact(columns).flat_map(|row| {
        let held = quantize(row).values();
        let rest: Vec<f32> = row.iter().zip(held).map(|(x, held)| x - held).collect();
        [row, &rest].concat()
    });
    quantize(&with_rest.collect::<Vec<f32>>())
}

impl Q8 {
    fn values(&self) -> Vec<f32> {
        let value = |(i, &code)| f32::from(code) * self.scales[i / 32];
        self.codes.iter().enumerate().map(value).collect()
    }
}

/// A matrix as the kernel takes it, and its values.
pub(crate) struct Matrix {
    pub(crate) bytes: Vec<u8>,
    pub(crate) values: Vec<f32>,
}

impl Matrix {
    pub(crate) fn new(weights: GemmWeights, outputs: usize, columns: usize, seed: u64) -> Matrix {
        let quant = match weights {
            GemmWeights::F16 => QuantType::F16,
            GemmWeights::Fragments(format) => quant_of(format),
        };
        let row_bytes = quant.row_bytes(columns);
        let mut file = vec![0; outputs * row_bytes];
        random_blocks(quant, seed, 0.1, &mut file);
        let row = |r: usize| &file[r * row_bytes..(r + 1) * row_bytes];
        let mut values = vec![0.0; outputs * columns];
        for (r, values) in values.chunks_exact_mut(columns).enumerate() {
            quant.dequantize(row(r), values);
        }
        let bytes = match weights {
            GemmWeights::F16 => file.clone(),
            GemmWeights::Fragments(_) => pack(quant, outputs, columns, row),
        };
        Matrix { bytes, values }
    }
}

fn quant_of(format: FragmentFormat) -> QuantType {
    let found = FORMATS
        .into_iter()
        .find(|&q| FragmentFormat::of(q) == Some(format));
    found.expect("one of each")
}

/// `x . w^T` in f64.
pub(crate) fn product(x: &[f32], w: &[f32], columns: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for x in x.chunks_exact(columns) {
        for w in w.chunks_exact(columns) {
            let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
            out.push(terms.sum::<f64>() as f32);
        }
    }
    out
}

fn gelu(z: f32) -> f32 {
    let z = f64::from(z);
    let inner = 0.797_884_560_802_865_4 * (z + 0.044_715 * z * z * z);
    (0.5 * z * (1.0 + inner.tanh())) as f32
}

/// Products of gates and ups from sums whose M-tiles alternate.
pub(crate) fn geglu(sums: &[f32], outputs: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for row in sums.chunks_exact(outputs) {
        for pair in row.chunks_exact(2 * M_TILE) {
            let (gates, ups) = pair.split_at(M_TILE);
            out.extend(gates.iter().zip(ups).map(|(&g, &u)| gelu(g) * u));
        }
    }
    out
}

/// Output of a product on the card.
enum Out {
    Floats(Vec<f32>),
    GemmImpl(Q8),
}

/// A product on a card.
struct Setup<'a> {
    card: &'a Card,
    shape: GemmShape,
    module: Module,
    w: Buffer,
}

fn setup<'a>(card: &'a Card, shape: GemmShape, w: &[u8]) -> Setup<'a> {
    Setup {
        card,
        shape,
        module: card.load(&shape.specialization()),
        w: card.upload(w),
    }
}

impl Setup<'_> {
    /// Runs as in a bucket of `bucket` rows, of which `x` are there.
    fn run(&self, x: &[f32], bucket: usize) -> Out {
        let grid = self.shape.grid(bucket);
        let scratch = self.shape.scratch(bucket);
        self.launch(x, bucket, x.len() / self.shape.columns, grid, scratch, None)
    }

    /// The same for token-expert pairs: `most` of them in the bucket.
    fn run_grouped(
        &self,
        x: &[f32],
        most: usize,
        pairs: usize,
        grouped: &Grouped,
        share: usize,
    ) -> Out {
        let bucket = most / self.shape.groups.expect("has groups").top_k;
        let grid = self.shape.grid(bucket);
        let scratch = self.shape.scratch(bucket);
        self.launch(x, most, pairs, grid, scratch, Some((grouped, share)))
    }

    fn launch(
        &self,
        x: &[f32],
        bucket: usize,
        count: usize,
        grid: Grid,
        scratch: GemmScratch,
        grouped: Option<(&Grouped, usize)>,
    ) -> Out {
        let Setup { card, shape, .. } = self;
        let stride = shape.outputs + 3;
        let none = Address::NULL;
        let rows = card.upload(&[count as u32]);
        let partials = card.upload(&vec![POISON; scratch.partials / 4]);
        let arrivals = card.upload(&vec![0u32; scratch.arrivals / 4]);
        let q8 = quantize_terms(x, shape.columns, shape.terms);
        let x = match shape.weights {
            GemmWeights::Fragments(_) => [
                card.upload(&q8.codes),
                card.upload(&q8.scales),
                card.upload(&q8.sums),
            ],
            GemmWeights::F16 => [
                card.upload(&f16_bits(x)),
                card.upload(&factors(x, shape.columns)),
                card.upload(&[0f32]),
            ],
        };
        let products = shape.outputs / 2;
        let out = card.upload(&vec![POISON; bucket * stride]);
        let codes = card.upload(&vec![POISON_CODE; bucket * products]);
        let scales = card.upload(&vec![POISON; bucket * products / 32 + 1]);
        let sums = card.upload(&vec![POISON; bucket * products / 32 + 1]);
        let params = GemmParams {
            rows: RowsAt {
                count: rows.address(),
                index: none,
            },
            w: self.w.address(),
            x: x[0].address(),
            x_scales: x[1].address(),
            x_sums: x[2].address(),
            out: out.address(),
            codes: codes.address(),
            scales: scales.address(),
            sums: sums.address(),
            partials: partials.address(),
            arrivals: arrivals.address(),
            tiles: grouped.map_or(none, |(g, _)| g.tiles.address()),
            tile_count: grouped.map_or(none, |(g, _)| g.tile_count.address()),
            sorted: grouped.map_or(none, |(g, _)| g.sorted.address()),
            columns: shape.columns as u32,
            outputs: shape.outputs as u32,
            out_stride: stride as u32,
            x_share: grouped.map_or(1, |(_, share)| share as u32),
        };
        // Twice, because the first run must leave the arrivals as it found them.
        for _ in 0..2 {
            card.run(&self.module, grid, &params.bytes());
        }
        match shape.epilogue {
            GemmEpilogue::F32 => {
                let all: Vec<f32> = card.download(&out, bucket * stride);
                for (r, row) in all.chunks_exact(stride).enumerate() {
                    let written = if r < count { shape.outputs } else { 0 };
                    assert!(row[written..].iter().all(|&v| v == POISON), "past the end");
                }
                let rows = all.chunks_exact(stride).take(count);
                Out::Floats(rows.flat_map(|r| r[..shape.outputs].to_vec()).collect())
            }
            GemmEpilogue::Geglu => {
                let mut q8 = Q8 {
                    codes: card.download(&codes, bucket * products),
                    scales: card.download(&scales, bucket * products / 32),
                    sums: card.download(&sums, bucket * products / 32),
                };
                let beyond = q8.codes.split_off(count * products);
                assert!(beyond.iter().all(|&c| c == POISON_CODE), "past the end");
                for values in [&mut q8.scales, &mut q8.sums] {
                    let beyond = values.split_off(count * products / 32);
                    assert!(beyond.iter().all(|&v| v == POISON), "past the end");
                }
                Out::GemmImpl(q8)
            }
        }
    }
}

/// Cut, not rounded: a test only needs values that f16 holds exactly.
pub(crate) fn f16_bits(x: &[f32]) -> Vec<u16> {
    let bits = |v: &f32| {
        let bits = v.to_bits();
        let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
        assert!(exponent < 31, "too large for f16");
        let size = if exponent > 0 {
            (exponent as u32) << 10 | bits >> 13 & 0x3ff
        } else {
            0
        };
        (bits >> 16 & 0x8000 | size) as u16
    };
    x.iter().map(bits).collect()
}

fn f16_values(x: &[f32]) -> Vec<f32> {
    let value = |bits: u16| {
        let mut value = [0.0];
        QuantType::F16.dequantize(&bits.to_le_bytes(), &mut value);
        value[0]
    };
    f16_bits(x).into_iter().map(value).collect()
}

/// One factor per row, which depends on the row alone.
fn factors(x: &[f32], columns: usize) -> Vec<f32> {
    let rows = x.chunks_exact(columns);
    rows.map(|row| if row[0] < 0.0 { 4.0 } else { 0.5 })
        .collect()
}

pub(crate) fn shape(
    weights: GemmWeights,
    epilogue: GemmEpilogue,
    (outputs, columns): (usize, usize),
) -> GemmShape {
    GemmShape {
        weights,
        epilogue,
        columns,
        terms: 1,
        outputs,
        // As many as a large card has, so that small products are split.
        multiprocessors: HOPPER_MULTIPROCESSORS,
        largest: GemmTile::default(),
        groups: None,
    }
}

/// Against f64, with the same quantized activations and with what they were made from; rows alone and among others.
fn check(
    weights: GemmWeights,
    epilogue: GemmEpilogue,
    sizes: (usize, usize),
    buckets: &[(usize, usize)],
) {
    check_shape(shape(weights, epilogue, sizes), buckets);
}

/// Products of two terms have the rounding of the smaller; offsets of blocks have that of bf16 beside int8 activations of one.
fn bound(weights: GemmWeights, terms: usize) -> f64 {
    match weights {
        _ if terms == 2 => 4e-5,
        GemmWeights::Fragments(format) if format.has_minimums() => 2.5e-3,
        _ => 1e-5,
    }
}

/// The same for scales of products of two such, and once they are int8: some have the code beside theirs.
fn geglu_bounds(weights: GemmWeights) -> (f64, f64) {
    let bound = bound(weights, 1);
    (2.0 * bound, 1e-3 + 3.0 * bound)
}

fn check_shape(shape: GemmShape, buckets: &[(usize, usize)]) {
    let card = Card::open(Tier::Portable);
    let GemmShape {
        weights,
        columns,
        outputs,
        terms,
        ..
    } = shape;
    let w = Matrix::new(weights, outputs, columns, 7);
    let setup = setup(&card, shape, &w.bytes);
    for &(bucket, count) in buckets {
        let x = normals((bucket * count) as u64, count * columns);
        let case = format!("{shape:?}, {count} of {bucket} rows");
        let found = setup.run(&x, bucket);
        let exact = match weights {
            // Two int8 terms hold a value to 2^-15 of its block's largest.
            GemmWeights::Fragments(_) if terms == 2 => x.clone(),
            GemmWeights::Fragments(_) => quantize(&x).values(),
            GemmWeights::F16 => {
                let factors = factors(&x, columns);
                let scaled = |(i, v): (usize, &f32)| v * factors[i / columns];
                f16_values(&x).iter().enumerate().map(scaled).collect()
            }
        };
        let expected = product(&exact, &w.values, columns);
        match &found {
            Out::Floats(found) => {
                let error = relative_error(found, &expected);
                assert!(error < bound(weights, terms), "{case}: {error}");
                if weights != GemmWeights::F16 {
                    let error = relative_error(found, &product(&x, &w.values, columns));
                    assert!(error < 1.2e-2, "{case}: {error} of floats");
                }
            }
            Out::GemmImpl(found) => {
                let products = geglu(&expected, outputs);
                let q8 = quantize(&products);
                let error = relative_error(&found.scales, &q8.scales);
                assert!(error < geglu_bounds(weights).0, "{case}: scales {error}");
                let error = relative_error(&found.values(), &q8.values());
                assert!(error < geglu_bounds(weights).1, "{case}: {error}");
                for (i, (sum, scale)) in found.sums.iter().zip(&found.scales).enumerate() {
                    let codes = &found.codes[32 * i..32 * i + 32];
                    let codes: i32 = codes.iter().map(|&c| i32::from(c)).sum();
                    assert_eq!(*sum, scale * codes as f32, "{case}: sum {i}");
                }
            }
        }
        // The last row alone, in the same bucket.
        let alone = setup.run(&x[(count - 1) * columns..], bucket);
        match (&found, &alone) {
            (Out::Floats(all), Out::Floats(one)) => {
                let same = all[(count - 1) * outputs..] == one[..];
                assert!(same, "{case}: a row alone");
            }
            (Out::GemmImpl(all), Out::GemmImpl(one)) => {
                let products = outputs / 2;
                let last = (count - 1) * products;
                let same =
                    all.codes[last..] == one.codes[..] && all.scales[last / 32..] == one.scales[..];
                assert!(same, "{case}: a row alone");
            }
            _ => unreachable!("the same epilogue"),
        }
    }
}

/// Every tile, whole and in part; with and without splits.
const BUCKETS: [(usize, usize); 6] = [(1, 1), (16, 9), (32, 31), (64, 50), (130, 129), (300, 270)];

fn check_format(format: FragmentFormat, columns: [usize; 2]) {
    let weights = GemmWeights::Fragments(format);
    check(weights, GemmEpilogue::F32, (200, columns[0]), &BUCKETS);
    check(
        weights,
        GemmEpilogue::F32,
        (37, columns[1]),
        &[(16, 16), (64, 64), (200, 3)],
    );
    check(weights, GemmEpilogue::Geglu, (192, columns[0]), &BUCKETS);
    let finer = GemmShape {
        terms: 2,
        ..shape(weights, GemmEpilogue::F32, (200, 768))
    };
    check_shape(finer, &BUCKETS);
}

#[test]
fn every_tile_fits_every_card_and_has_a_stage_in_flight() {
    for weights in FragmentFormat::ALL
        .map(GemmWeights::Fragments)
        .into_iter()
        .chain([GemmWeights::F16])
    {
        for (entry, tile) in TILES.into_iter().enumerate() {
            for largest in [GemmTile::TwoOf64, GemmTile::OneOf64, GemmTile::Of32] {
                let (stages, bytes) = weights.stages(entry, largest);
                assert!(stages == 3 || stages >= 4 && stages.is_multiple_of(2));
                assert!(bytes <= SHARED_BYTES, "{weights:?} {entry}");
                let shares = tile == 64 && largest != GemmTile::OneOf64;
                let half = !shares || weights == GemmWeights::F16 || bytes <= HALF_SHARED_BYTES;
                assert!(half, "{weights:?}");
            }
        }
    }
}

#[test]
fn splits_are_few_where_there_are_tiles_enough() {
    let of = |sizes, rows| {
        let weights = GemmWeights::Fragments(FragmentFormat::Q8);
        shape(weights, GemmEpilogue::F32, sizes).splits(rows)
    };
    assert_eq!(of((20480, 2560), 2048), 1);
    assert!(of((2560, 10240), 512) > 1);
    assert!(of((2560, 10240), 16) > 2);
    assert_eq!(of((2560, 64), 16), 1, "a stage cannot be split");
}

#[test]
#[ignore = "needs a card"]
fn gemm_q8() {
    check_format(FragmentFormat::Q8, [352, 1120]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_q4() {
    check_format(FragmentFormat::Q4, [352, 1120]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_q5_and_n4() {
    check_format(FragmentFormat::Q5, [352, 1120]);
    check_format(FragmentFormat::N4, [352, 1120]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_m4_and_m5() {
    check_format(FragmentFormat::M4, [352, 1120]);
    check_format(FragmentFormat::M5, [352, 1120]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_k2() {
    check_format(FragmentFormat::K2, [256, 768]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_k4() {
    check_format(FragmentFormat::K4, [256, 768]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_k5() {
    check_format(FragmentFormat::K5, [256, 768]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_k6() {
    check_format(FragmentFormat::K6, [256, 768]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_t4() {
    check_format(FragmentFormat::T4, [256, 768]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_f4() {
    check_format(FragmentFormat::F4, [256, 768]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_t3() {
    check_format(FragmentFormat::T3, [256, 768]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_t2_and_t1() {
    check_format(FragmentFormat::T2, [256, 768]);
    check_format(FragmentFormat::T1, [128, 640]);
}

#[test]
#[ignore = "needs a card"]
fn gemm_f16() {
    check(GemmWeights::F16, GemmEpilogue::F32, (200, 352), &BUCKETS);
    check(
        GemmWeights::F16,
        GemmEpilogue::F32,
        (37, 1120),
        &[(16, 16), (64, 64)],
    );
}

/// Rows' routed experts, permuted into tiles on the card.
pub(crate) struct Grouped {
    pub(crate) route: Vec<f32>,
    pub(crate) sorted: Buffer,
    pub(crate) tiles: Buffer,
    pub(crate) tile_count: Buffer,
}

pub(crate) fn group(
    card: &Card,
    groups: ExpertGroups,
    bucket: usize,
    count: usize,
    seed: u64,
) -> Grouped {
    let route = permute::tests::route(count, groups, seed);
    let (sorted, tiles, tile_count) = permute::tests::sort(card, groups, bucket, &route);
    Grouped {
        route,
        sorted,
        tiles,
        tile_count,
    }
}

/// Both products of a layer of experts against f64, for rows that are routed unevenly.
fn check_grouped(format: FragmentFormat, (dim, width): (usize, usize), groups: ExpertGroups) {
    let card = Card::open(Tier::Portable);
    let weights = GemmWeights::Fragments(format);
    let sizes = [
        (GemmEpilogue::Geglu, (2 * width, dim), ExpertInput::PerToken),
        (GemmEpilogue::F32, (dim, width), ExpertInput::PerExpert),
    ];
    for (epilogue, (outputs, columns), x_rows) in sizes {
        let shape = GemmShape {
            groups: Some(groups),
            ..shape(weights, epilogue, (outputs, columns))
        };
        let experts: Vec<Matrix> = (0..groups.experts)
            .map(|e| Matrix::new(weights, outputs, columns, 100 + e as u64))
            .collect();
        let stacked: Vec<u8> = experts.iter().flat_map(|m| m.bytes.clone()).collect();
        let setup = setup(&card, shape, &stacked);
        for (bucket, count) in [(9, 9), (40, 33), (150, 149), (300, 280)] {
            let case = format!("{format:?} {epilogue:?}, {count} of {bucket} rows");
            let grouped = group(&card, groups, bucket, count, (bucket + count) as u64);
            let pairs = count * groups.top_k;
            let share = match x_rows {
                ExpertInput::PerToken => groups.top_k,
                ExpertInput::PerExpert => 1,
            };
            let x = normals(count as u64, pairs / share * columns);
            let found = setup.run_grouped(&x, bucket * groups.top_k, pairs, &grouped, share);
            let exact = quantize(&x).values();
            let mut expected = Vec::new();
            for pair in 0..pairs {
                let at = pair / groups.top_k * 2 * groups.top_k + pair % groups.top_k;
                let expert = &experts[grouped.route[at] as usize];
                let x = &exact[pair / share * columns..][..columns];
                expected.extend(product(x, &expert.values, columns));
            }
            match found {
                Out::Floats(found) => {
                    let error = relative_error(&found, &expected);
                    assert!(error < bound(weights, 1), "{case}: {error}");
                }
                Out::GemmImpl(found) => {
                    let q8 = quantize(&geglu(&expected, outputs));
                    let error = relative_error(&found.scales, &q8.scales);
                    assert!(error < geglu_bounds(weights).0, "{case}: scales {error}");
                    let error = relative_error(&found.values(), &q8.values());
                    assert!(error < geglu_bounds(weights).1, "{case}: {error}");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a card"]
fn gemm_grouped() {
    let groups = ExpertGroups {
        experts: 7,
        top_k: 3,
        tiles: ExpertTiles::ByShare,
    };
    check_grouped(FragmentFormat::Q4, (160, 96), groups);
    check_grouped(FragmentFormat::Q8, (96, 96), groups);
    check_grouped(FragmentFormat::K4, (256, 256), groups);
    check_grouped(FragmentFormat::T4, (256, 256), groups);
}
