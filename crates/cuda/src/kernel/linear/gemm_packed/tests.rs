use super::*;
use crate::kernel::{
    ExpertTiles, GemmWeights, HOPPER_MULTIPROCESSORS,
    activation::permuted_index,
    linear::gemm::tests::{Grouped, Matrix, geglu, group, product},
};
use crate::{
    config::Tier,
    testing::{Card, f16_bits, f16_value, normals, relative_error},
};

/// A value that no result has.
const POISON: f32 = -1.5e30;
const POISON_F16: u16 = 0x7e5a;
const SCALE: f32 = 0.25;

#[test]
fn rings_fit_and_have_stages_to_spare() {
    for format in FragmentFormat::ALL {
        for epilogue in [
            GemmPackedEpilogue::F32,
            GemmPackedEpilogue::F16,
            GemmPackedEpilogue::Geglu,
        ] {
            for rows in TiledRows::ALL {
                let (stages, stage, staged) = shared(format, epilogue, rows);
                assert!((4..=MAX_STAGES).contains(&stages), "{format:?} {stages}");
                assert!(stages * stage + staged <= SHARED_BYTES);
                assert!(stage.is_multiple_of(16), "{format:?}");
            }
        }
    }
}

#[test]
fn no_block_is_without_work() {
    let shape = |groups| GemmPackedShape {
        format: FragmentFormat::Q4,
        epilogue: GemmPackedEpilogue::F32,
        columns: 704,
        outputs: 2816,
        multiprocessors: HOPPER_MULTIPROCESSORS,
        groups,
    };
    assert_eq!(shape(None).grid(100).blocks, (11, 1));
    assert_eq!(shape(None).grid(129).blocks, (22, 1));
    assert_eq!(shape(None).grid(4096).blocks, (132, 1));
    let groups = ExpertGroups {
        experts: 128,
        top_k: 8,
        tiles: ExpertTiles::Of(GROUPED_TOKENS),
    };
    assert_eq!(shape(Some(groups)).grid(1).blocks, (88, 1));
}

/// Rows with their columns in the kernel's order.
fn permuted(rows: &[u16], columns: usize) -> Vec<u16> {
    let mut out = vec![0; rows.len()];
    for (i, &value) in rows.iter().enumerate() {
        out[permuted_index(i / columns, columns, i % columns)] = value;
    }
    out
}

/// Outputs of rows that are there; all that should not be written is still poison.
fn written<T: Copy + PartialEq>(
    all: &[T],
    stride: usize,
    outputs: usize,
    count: usize,
    poison: T,
) -> impl Iterator<Item = &T> {
    for (r, row) in all.chunks_exact(stride).enumerate() {
        let written = if r < count { outputs } else { 0 };
        assert!(row[written..].iter().all(|v| *v == poison), "past the end");
    }
    let rows = all.chunks_exact(stride).take(count);
    rows.flat_map(move |row| &row[..outputs])
}

/// Runs a product of rows, of which `count` are there and `capacity` could be written.
fn run(
    card: &Card,
    shape: &GemmPackedShape,
    w: &[u8],
    x: &[f32],
    (count, capacity, bucket): (usize, usize, usize),
    grouped: Option<(&Grouped, usize)>,
) -> Vec<f32> {
    let module = card.load(&shape.specialization());
    let rows = card.upload(&[count as u32]);
    let (w, x) = (
        card.upload(w),
        card.upload(&permuted(&f16_bits(x), shape.columns)),
    );
    let products = shape.outputs / 2;
    let padded = shape.outputs + 4;
    let (out, stride) = match shape.epilogue {
        GemmPackedEpilogue::F32 => (card.upload(&vec![POISON; capacity * padded]), padded),
        GemmPackedEpilogue::F16 => (card.upload(&vec![POISON_F16; capacity * padded]), padded),
        GemmPackedEpilogue::Geglu => (
            card.upload(&vec![POISON_F16; capacity * products]),
            products,
        ),
    };
    let none = Address::NULL;
    let params = GemmPackedParams {
        rows: RowsAt {
            count: rows.address(),
            index: none,
        },
        w: w.address(),
        x: x.address(),
        out: out.address(),
        tiles: grouped.map_or(none, |(g, _)| g.tiles.address()),
        tile_count: grouped.map_or(none, |(g, _)| g.tile_count.address()),
        sorted: grouped.map_or(none, |(g, _)| g.sorted.address()),
        columns: shape.columns as u32,
        outputs: shape.outputs as u32,
        m_tiles: shape.m_tiles() as u32,
        out_stride: stride as u32,
        x_share: grouped.map_or(1, |(_, share)| share as u32),
        scale: SCALE,
    };
    card.run(&module, shape.grid(bucket), &params.bytes());
    match shape.epilogue {
        GemmPackedEpilogue::F32 => {
            let all: Vec<f32> = card.download(&out, capacity * stride);
            let written = written(&all, stride, shape.outputs, count, POISON);
            written.map(|v| v / SCALE).collect()
        }
        GemmPackedEpilogue::F16 => {
            let all: Vec<u16> = card.download(&out, capacity * stride);
            let written = written(&all, stride, shape.outputs, count, POISON_F16);
            written.map(|v| f16_value(*v) / SCALE).collect()
        }
        GemmPackedEpilogue::Geglu => {
            let all: Vec<u16> = card.download(&out, capacity * products);
            let (written, beyond) = all.split_at(count * products);
            assert!(beyond.iter().all(|&v| v == POISON_F16), "past the end");
            let of = |i: usize| written[permuted_index(i / products, products, i % products)];
            (0..written.len())
                .map(|i| f16_value(of(i)) / SCALE)
                .collect()
        }
    }
}

/// What f16 holds of normal numbers.
fn inputs(seed: u64, count: usize) -> Vec<f32> {
    let bits = f16_bits(&normals(seed, count));
    bits.into_iter().map(f16_value).collect()
}

fn shape(
    format: FragmentFormat,
    epilogue: GemmPackedEpilogue,
    (outputs, columns): (usize, usize),
    multiprocessors: usize,
) -> GemmPackedShape {
    GemmPackedShape {
        format,
        epilogue,
        columns,
        outputs,
        multiprocessors,
        groups: None,
    }
}

fn expected(epilogue: GemmPackedEpilogue, sums: Vec<f32>, outputs: usize) -> Vec<f32> {
    match epilogue {
        GemmPackedEpilogue::F32 | GemmPackedEpilogue::F16 => sums,
        GemmPackedEpilogue::Geglu => geglu(&sums, outputs),
    }
}

/// Against f64 of the same f16 activations, rows in company and alone; a card so small that blocks have item after item.
fn check_dense(format: FragmentFormat, epilogue: GemmPackedEpilogue, sizes: (usize, usize)) {
    let card = Card::open(Tier::Best);
    let (outputs, columns) = sizes;
    let shape = shape(format, epilogue, sizes, 3);
    let w = Matrix::new(GemmWeights::Fragments(format), outputs, columns, 7);
    for count in [9, 31, 100, 128, 300] {
        let case = format!("{shape:?}, {count} rows");
        let x = inputs(count as u64, count * columns);
        let found = run(
            &card,
            &shape,
            &w.bytes,
            &x,
            (count, count + 2, count + 2),
            None,
        );
        let sums = product(&x, &w.values, columns);
        let error = relative_error(&found, &expected(epilogue, sums, outputs));
        assert!(error < 6e-4, "{case}: {error}");
        let last = &x[(count - 1) * columns..];
        let alone = run(&card, &shape, &w.bytes, last, (1, 2, count), None);
        assert!(
            found[found.len() - alone.len()..] == alone[..],
            "{case}: a row alone"
        );
    }
}

/// Both products of a layer of experts against f64, for rows that are routed unevenly.
fn check_grouped(format: FragmentFormat, (dim, width): (usize, usize)) {
    let card = Card::open(Tier::Best);
    let groups = ExpertGroups {
        experts: 7,
        top_k: 3,
        tiles: ExpertTiles::Of(GROUPED_TOKENS),
    };
    let sizes = [
        (GemmPackedEpilogue::Geglu, (2 * width, dim), groups.top_k),
        (GemmPackedEpilogue::F32, (dim, width), 1),
        (GemmPackedEpilogue::F16, (dim, width), 1),
    ];
    for (epilogue, (outputs, columns), share) in sizes {
        let shape = GemmPackedShape {
            groups: Some(groups),
            ..shape(format, epilogue, (outputs, columns), 5)
        };
        let matrix = |e| Matrix::new(GemmWeights::Fragments(format), outputs, columns, 100 + e);
        let experts: Vec<Matrix> = (0..groups.experts as u64).map(matrix).collect();
        let stacked: Vec<u8> = experts.iter().flat_map(|m| m.bytes.clone()).collect();
        for (bucket, count) in [(9, 9), (40, 33), (300, 280), (900, 900)] {
            let case = format!("{format:?} {epilogue:?}, {count} of {bucket} rows");
            let grouped = group(&card, groups, bucket, count, (bucket + count) as u64);
            let pairs = count * groups.top_k;
            let x = inputs(count as u64, pairs / share * columns);
            let capacity = bucket * groups.top_k;
            let sizes = (pairs, capacity, bucket);
            let found = run(&card, &shape, &stacked, &x, sizes, Some((&grouped, share)));
            let mut sums = Vec::new();
            for pair in 0..pairs {
                let at = pair / groups.top_k * 2 * groups.top_k + pair % groups.top_k;
                let expert = &experts[grouped.route[at] as usize];
                let x = &x[pair / share * columns..][..columns];
                sums.extend(product(x, &expert.values, columns));
            }
            let error = relative_error(&found, &expected(epilogue, sums, outputs));
            assert!(error < 6e-4, "{case}: {error}");
        }
    }
}

fn check_format(format: FragmentFormat) {
    // Blocks that are not whole, by M-tiles and by warpgroups.
    check_dense(format, GemmPackedEpilogue::F32, (36, 256));
    check_dense(format, GemmPackedEpilogue::F32, (520, 768));
    check_dense(format, GemmPackedEpilogue::Geglu, (2 * 96, 512));
    check_grouped(format, (256, 256));
}

#[test]
#[ignore = "needs a card"]
fn f16_is_cut_off_at_its_largest_and_keeps_what_is_no_number() {
    let card = Card::open(Tier::Best);
    let groups = ExpertGroups {
        experts: 1,
        top_k: 1,
        tiles: ExpertTiles::Of(GROUPED_TOKENS),
    };
    let (format, columns) = (FragmentFormat::Q8, 512);
    let shape = GemmPackedShape {
        groups: Some(groups),
        ..shape(format, GemmPackedEpilogue::F16, (32, columns), 3)
    };
    let w = Matrix::new(GemmWeights::Fragments(format), 32, columns, 7);
    // A row whose first output is too large, one with what is no number, one as any other.
    let first_output = &w.values[..columns];
    let mut x: Vec<f32> = first_output.iter().map(|w| w.signum() * 60000.0).collect();
    x.extend(vec![f32::NAN; columns]);
    x.extend(inputs(1, columns));
    let grouped = group(&card, groups, 3, 3, 1);
    let found = run(&card, &shape, &w.bytes, &x, (3, 3, 3), Some((&grouped, 1)));
    let largest = 65504.0 / SCALE;
    let (large, rest) = found.split_at(32);
    assert!(large.iter().all(|v| v.abs() <= largest), "{large:?}");
    assert_eq!(large[0], largest, "{large:?}");
    let (no_numbers, others) = rest.split_at(32);
    assert!(no_numbers.iter().all(|v| v.is_nan()), "{no_numbers:?}");
    assert!(others.iter().all(|v| v.abs() < largest), "{others:?}");
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_q8() {
    check_format(FragmentFormat::Q8);
    check_grouped(FragmentFormat::Q8, (320, 192));
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_q4() {
    check_format(FragmentFormat::Q4);
    check_grouped(FragmentFormat::Q4, (192, 64));
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_q5_and_n4() {
    check_format(FragmentFormat::Q5);
    check_grouped(FragmentFormat::Q5, (192, 64));
    check_format(FragmentFormat::N4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_m4_and_m5() {
    check_format(FragmentFormat::M4);
    check_format(FragmentFormat::M5);
    check_grouped(FragmentFormat::M5, (192, 64));
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_k2() {
    check_format(FragmentFormat::K2);
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_k4() {
    check_format(FragmentFormat::K4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_k5() {
    check_format(FragmentFormat::K5);
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_k6() {
    check_format(FragmentFormat::K6);
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_t4() {
    check_format(FragmentFormat::T4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_f4() {
    check_format(FragmentFormat::F4);
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_t3() {
    check_format(FragmentFormat::T3);
}

#[test]
#[ignore = "needs a card"]
fn gemm_packed_t2_and_t1() {
    check_format(FragmentFormat::T2);
    check_format(FragmentFormat::T1);
}
