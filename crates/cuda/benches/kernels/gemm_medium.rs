//! GEMM of medium batches over packed weights, by model, format and rows; beside it the same product by cuBLASLt over f16.

use crate::{
    config::Tier,
    device::{
        Address, Buffer, ClusterCapacity,
        cublaslt::{Gemm, Library, MatmulShape, Operands, Out},
        launch,
    },
    kernel::{
        GemmMediumEpilogue, GemmMediumKernel, GemmMediumShape, HOPPER_MULTIPROCESSORS, RowsAt,
        activation::tile_bytes,
        fragment::FragmentFormat,
        linear::gemm_medium::{
            MAX_ROWS, Places, entry,
            tests::{Matrix, shape},
        },
    },
    testing::{Card, f16_bits, library_dirs, normals},
};

/// More than four times a large L2.
const POOL: usize = 300 << 20;
const WORKSPACE: usize = 64 << 20;
const ROWS: [usize; 3] = [16, 32, 64];
const LAUNCHES: usize = 100;

/// A buffer of `bytes` that repeats `part`.
fn repeated(card: &Card, part: &[u8], bytes: usize) -> Buffer {
    let device = &card.device;
    let buffer = device.allocate("test", bytes).expect("memory");
    let mut host = device.allocate_host("test", part.len()).expect("memory");
    host.bytes_mut()[..part.len()].copy_from_slice(part);
    for start in (0..bytes).step_by(part.len()) {
        let length = part.len().min(bytes - start);
        device
            .copy_in(&host, &buffer, start, length)
            .expect("copies");
    }
    device.wait("copying").expect("copies");
    buffer
}

/// Random f16.
fn noise(card: &Card, bytes: usize) -> Buffer {
    let values = f16_bits(&normals(5, 1 << 17));
    let part: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
    repeated(card, &part, bytes)
}

fn time_packed(card: &Card, name: &str, shape: &GemmMediumShape) {
    let GemmMediumShape {
        columns, outputs, ..
    } = *shape;
    let module = card.load(&shape.specialization());
    let part = Matrix::new(shape.format, 64, columns, 3).bytes;
    let matrix_bytes = part.len() / 64 * outputs;
    let matrices = POOL.div_ceil(matrix_bytes);
    let w = repeated(card, &part, matrices * matrix_bytes);
    let x = noise(card, tile_bytes(columns));
    let allocate = |bytes| card.device.allocate("test", bytes).expect("memory");
    let out = allocate(MAX_ROWS * outputs * 4);
    let scratch = shape.scratch(MAX_ROWS);
    let partials = allocate(scratch.partials.max(4));
    let arrivals = card.upload(&vec![0u32; scratch.arrivals / 4 + 1]);
    for rows in ROWS {
        let count = card.upload(&[rows as u32]);
        let mut places = Places {
            rows: RowsAt {
                count: count.address(),
                index: Address::NULL,
            },
            w: w.address(),
            x: x.address(),
            out: out.address(),
            partials: partials.address(),
            arrivals: arrivals.address(),
            out_stride: outputs,
            scale: 1.0,
        };
        let mut time = |pdl: bool| {
            let grid = shape.grid(rows, pdl);
            let taken = card.time_captured(LAUNCHES, |i| {
                places.w = w.address().offset(i % matrices * matrix_bytes);
                launch(&module, grid, &shape.params(&places)).expect("launches");
            });
            taken.as_secs_f64() * 1e6
        };
        let (alone, pdl) = (time(false), time(true));
        let rate = |us: f64| matrix_bytes as f64 / us / 1e3;
        let tiling = shape.tiling(entry(rows));
        println!(
            "gemm_medium {name:<14} {outputs:>6} x {columns:>5}, {rows:>2} rows: {alone:>6.1} us {:>5.0} GB/s, with PDL {pdl:>6.1} us \
             {:>5.0} GB/s  {}x{} blocks, {} tiles, {} stages, {:?}",
            rate(alone),
            rate(pdl),
            tiling.runs,
            tiling.splits,
            tiling.run,
            tiling.split_stages,
            tiling.sharing,
        );
    }
}

fn time_f16(card: &Card, name: &str, (outputs, columns): (usize, usize), kind: Out) {
    let library = Library::find(&library_dirs(), &card.device).expect("cuBLASLt");
    let allocate = |bytes| card.device.allocate("test", bytes).expect("memory");
    let (workspace, out) = (allocate(WORKSPACE), allocate(MAX_ROWS * outputs * 4));
    let bytes = outputs * columns * 2;
    let matrices = POOL.div_ceil(bytes);
    let pool = noise(card, matrices * bytes);
    for rows in ROWS {
        let shape = MatmulShape {
            rows,
            outputs,
            columns,
            stride: outputs,
        };
        let gemm = Gemm::new(&library, shape, kind, 1.0, WORKSPACE).expect("an algorithm");
        let time = card.time_captured(LAUNCHES, |i| {
            let operands = Operands {
                weights: pool.address().offset(i % matrices * bytes),
                x: pool.address(),
                out: out.address(),
                workspace: workspace.address(),
            };
            gemm.launch(operands).expect("runs");
        });
        let us = time.as_secs_f64() * 1e6;
        let rate = bytes as f64 / us / 1e3;
        println!(
            "cublaslt f16 {name:<13} {outputs:>6} x {columns:>5}, {rows:>2} rows: {us:>6.1} us {rate:>5.0} GB/s"
        );
    }
}

/// Products of a model: name, outputs, inputs, and whether they are gate and up.
type Products<'a> = &'a [(&'a str, (usize, usize), bool)];

const E4B: Products = &[
    ("q|k|v", (3072, 2560), false),
    ("o", (2560, 2048), false),
    ("gate|up", (20480, 2560), true),
    ("down", (2560, 10240), false),
    ("head", (262_144, 2560), false),
];
const DENSE_12B: Products = &[
    ("q|k|v", (8192, 3840), false),
    ("o", (3840, 4096), false),
    ("gate|up", (30720, 3840), true),
    ("down", (3840, 15360), false),
];

/// Whether cuBLASLt is timed, too.
#[derive(Clone, Copy, PartialEq, Eq)]
enum F16 {
    Beside,
    No,
}

fn time(name: &str, products: Products, formats: &[FragmentFormat], f16: F16) {
    let card = Card::open(Tier::Best);
    let kernel = match card.device.capability.major {
        9 => GemmMediumKernel::Warpgroups,
        _ => GemmMediumKernel::Warps,
    };
    let clusters = ClusterCapacity::of(&card.device).ok();
    for &(product, sizes, pair) in products {
        for &format in formats {
            let epilogue = if pair {
                GemmMediumEpilogue::F16Pair
            } else {
                GemmMediumEpilogue::F32
            };
            let shape = GemmMediumShape {
                epilogue,
                clusters,
                ..shape(kernel, format, sizes, HOPPER_MULTIPROCESSORS)
            };
            time_packed(
                &card,
                &format!("{name} {} {product}", format.name()),
                &shape,
            );
        }
        if f16 == F16::Beside {
            let kind = if pair { Out::F16 } else { Out::F32 };
            time_f16(&card, &format!("{name} {product}"), sizes, kind);
        }
    }
}

pub(super) fn e4b() {
    let formats = [FragmentFormat::Q8, FragmentFormat::Q4, FragmentFormat::K4];
    time("e4b", E4B, &formats, F16::Beside);
}

pub(super) fn dense_12b() {
    let formats = [FragmentFormat::Q4, FragmentFormat::K4, FragmentFormat::Q8];
    time("12b", DENSE_12B, &formats, F16::Beside);
}

pub(super) fn others() {
    let formats = [FragmentFormat::K5, FragmentFormat::K6];
    time("12b", DENSE_12B, &formats, F16::No);
}
