//! Native GEMM, by model, format and rows.

use crate::{
    config::Tier,
    device::{Address, Buffer, Module, launch},
    kernel::{
        ExpertGroups, ExpertTiles, GemmEpilogue, GemmShape, GemmWeights, RowsAt,
        fragment::FragmentFormat,
        linear::gemm::{
            GemmParams,
            tests::{Matrix, f16_bits, group, quantize, shape},
        },
        params::Params,
    },
    testing::{Card, normals},
};

/// A buffer of `bytes` that repeats `part`.
pub(crate) fn repeated(card: &Card, part: &[u8], bytes: usize) -> Buffer {
    let buffer = card.device.allocate("test", bytes).expect("memory");
    let mut host = card
        .device
        .allocate_host("test", part.len())
        .expect("memory");
    host.bytes_mut()[..part.len()].copy_from_slice(part);
    for start in (0..bytes).step_by(part.len()) {
        let length = part.len().min(bytes - start);
        card.device
            .copy_in(&host, &buffer, start, length)
            .expect("copies");
    }
    card.device.wait("copying").expect("copies");
    buffer
}

/// A product to be timed, with random operands and weights that rotate.
struct Timed<'a> {
    card: &'a Card,
    shape: GemmShape,
    module: Module,
    w: Buffer,
    matrices: usize,
    matrix_bytes: usize,
    x: Buffer,
    x_scales: Buffer,
    x_sums: Buffer,
    values: Buffer,
    scales: Buffer,
    sums: Buffer,
}

impl Timed<'_> {
    /// `w_rows` are those of all experts together; `x_rows` and `out_rows` the most there will be.
    fn new(
        card: &Card,
        shape: GemmShape,
        w_rows: usize,
        x_rows: usize,
        out_rows: usize,
    ) -> Timed<'_> {
        let GemmShape {
            columns, outputs, ..
        } = shape;
        let weights = Matrix::new(shape.weights, 64, columns, 3).bytes;
        let matrix_bytes = weights.len() / 64 * w_rows;
        // More than four times a large L2.
        let matrices = (300usize << 20).div_ceil(matrix_bytes);
        let x = normals(5, 64 * columns);
        let q8 = quantize(&x);
        let bytes_of =
            |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| v.to_ne_bytes()).collect() };
        let x: Vec<u8> = match shape.weights {
            GemmWeights::Fragments(_) => q8.codes.iter().map(|&c| c.cast_unsigned()).collect(),
            GemmWeights::F16 => f16_bits(&x).iter().flat_map(|v| v.to_ne_bytes()).collect(),
        };
        let out_bytes = match shape.epilogue {
            GemmEpilogue::F32 => out_rows * outputs * 4,
            GemmEpilogue::Geglu => out_rows * outputs / 2,
        };
        let allocate = |bytes| card.device.allocate("test", bytes).expect("memory");
        Timed {
            card,
            shape,
            module: card.load(&shape.specialization()),
            w: repeated(card, &weights, matrices * matrix_bytes),
            matrices,
            matrix_bytes,
            x: repeated(card, &x, x_rows * (x.len() / 64)),
            x_scales: repeated(card, &bytes_of(&q8.scales), x_rows * columns / 8),
            x_sums: repeated(card, &bytes_of(&q8.sums), x_rows * columns / 8),
            values: allocate(out_bytes),
            scales: allocate(out_rows * outputs / 16),
            sums: allocate(out_rows * outputs / 16),
        }
    }

    /// Seconds of a launch.
    fn time(&self, bucket: usize, rows: usize, change: &dyn Fn(&mut GemmParams)) -> f64 {
        let Timed { card, shape, .. } = self;
        let count = card.upload(&[rows as u32]);
        let scratch = shape.scratch(bucket);
        let allocate = |bytes| card.device.allocate("test", bytes).expect("memory");
        let (partials, arrivals) = (allocate(scratch.partials), allocate(scratch.arrivals));
        let none = Address::NULL;
        let scaled = shape.weights != GemmWeights::F16;
        let mut params = GemmParams {
            rows: RowsAt {
                count: count.address(),
                index: none,
            },
            w: self.w.address(),
            x: self.x.address(),
            x_scales: if scaled {
                self.x_scales.address()
            } else {
                none
            },
            x_sums: self.x_sums.address(),
            out: self.values.address(),
            codes: self.values.address(),
            scales: self.scales.address(),
            sums: self.sums.address(),
            partials: partials.address(),
            arrivals: arrivals.address(),
            tiles: none,
            tile_count: none,
            sorted: none,
            columns: shape.columns as u32,
            outputs: shape.outputs as u32,
            out_stride: shape.outputs as u32,
            x_share: 1,
        };
        change(&mut params);
        let grid = shape.grid(bucket);
        let taken = card.time(50, |i| {
            params.w = self
                .w
                .address()
                .offset(i % self.matrices * self.matrix_bytes);
            launch(&self.module, grid, &params.bytes()).expect("launches");
        });
        taken.as_secs_f64()
    }
}

fn time(card: &Card, name: &str, shape: GemmShape, rows: &[usize]) {
    let GemmShape {
        columns, outputs, ..
    } = shape;
    let most = *rows.iter().max().expect("some");
    let timed = Timed::new(card, shape, outputs, most, most);
    for &rows in rows {
        let seconds = timed.time(rows, rows, &|_| ());
        let tops = 2.0 * (rows * outputs * columns) as f64 / seconds / 1e12;
        let rate = timed.matrix_bytes as f64 / seconds / 1e9;
        let (us, splits) = (seconds * 1e6, shape.splits(rows));
        println!(
            "gemm {name} {outputs}x{columns} rows {rows} splits {splits}: {us:.1} us, {tops:.1} TOPS, {rate:.0} GB/s"
        );
    }
}

const ROWS: [usize; 5] = [16, 64, 128, 512, 2048];

pub(crate) fn e4b_q8() {
    let card = Card::open(Tier::Portable);
    let weights = GemmWeights::Fragments(FragmentFormat::Q8);
    let of = |epilogue, sizes| shape(weights, epilogue, sizes);
    time(
        &card,
        "e4b q8 qkv",
        of(GemmEpilogue::F32, (3072, 2560)),
        &ROWS,
    );
    time(
        &card,
        "e4b q8 o",
        of(GemmEpilogue::F32, (2560, 2048)),
        &ROWS,
    );
    time(
        &card,
        "e4b q8 gate|up",
        of(GemmEpilogue::Geglu, (20480, 2560)),
        &ROWS,
    );
    time(
        &card,
        "e4b q8 down",
        of(GemmEpilogue::F32, (2560, 10240)),
        &ROWS,
    );
}

pub(crate) fn dense_12b_q4() {
    let card = Card::open(Tier::Portable);
    let weights = GemmWeights::Fragments(FragmentFormat::Q4);
    let of = |epilogue, sizes| shape(weights, epilogue, sizes);
    time(
        &card,
        "12b q4 qkv",
        of(GemmEpilogue::F32, (8192, 3840)),
        &ROWS,
    );
    time(
        &card,
        "12b q4 o",
        of(GemmEpilogue::F32, (3840, 4096)),
        &ROWS,
    );
    time(
        &card,
        "12b q4 gate|up",
        of(GemmEpilogue::Geglu, (30720, 3840)),
        &ROWS,
    );
    time(
        &card,
        "12b q4 down",
        of(GemmEpilogue::F32, (3840, 15360)),
        &ROWS,
    );
}

pub(crate) fn others() {
    let card = Card::open(Tier::Portable);
    for format in [FragmentFormat::K4, FragmentFormat::K5, FragmentFormat::K6] {
        let shape = shape(
            GemmWeights::Fragments(format),
            GemmEpilogue::F32,
            (2560, 10240),
        );
        time(
            &card,
            &format!("{format:?} down"),
            shape,
            &[16, 128, 512, 2048],
        );
    }
    let f16 = |sizes| shape(GemmWeights::F16, GemmEpilogue::F32, sizes);
    time(&card, "f16 ple gate", f16((256, 2560)), &ROWS);
    time(&card, "f16 ple proj", f16((2560, 256)), &ROWS);
    time(&card, "f16 ple model", f16((5888, 2560)), &ROWS);
}

/// Both products of a layer of the 26B-A4B.
pub(crate) fn grouped() {
    let card = Card::open(Tier::Portable);
    let groups = ExpertGroups {
        experts: 128,
        top_k: 8,
        tiles: ExpertTiles::ByShare,
    };
    let weights = GemmWeights::Fragments(FragmentFormat::Q4);
    for (epilogue, outputs, columns, share) in [
        (GemmEpilogue::Geglu, 1408, 2816, 8),
        (GemmEpilogue::F32, 2816, 704, 1),
    ] {
        let shape = GemmShape {
            groups: Some(groups),
            ..shape(weights, epilogue, (outputs, columns))
        };
        for rows in [16, 64, 512, 2048] {
            let grouped = group(&card, groups, rows, rows, 3);
            let timed = Timed::new(&card, shape, outputs * 128, rows * 8 / share, rows * 8);
            let seconds = timed.time(rows, rows, &|params| {
                params.sorted = grouped.sorted.address();
                params.tiles = grouped.tiles.address();
                params.tile_count = grouped.tile_count.address();
                params.x_share = share as u32;
            });
            let tops = 2.0 * (rows * 8 * outputs * columns) as f64 / seconds / 1e12;
            let rate = timed.matrix_bytes as f64 / seconds / 1e9;
            println!(
                "gemm grouped q4 {outputs}x{columns} rows {rows}: {:.1} us, {tops:.1} TOPS, {rate:.0} GB/s",
                seconds * 1e6
            );
        }
    }
}
