//! Speeds of single GEMM kernels, each instruction set beside the others: `cargo bench -p carat-cpu-kernels --bench gemm [part]`, where the
//! part is `large`, `small` or `float`.
//!
//! Whole steps through the public traits are measured by `examples/kernels.rs`. Here a kernel is called alone, on weights
//! that stay in the nearest caches, so that two kernels for the same rows can be compared.
#![expect(clippy::print_stdout, reason = "printing figures is its purpose")]

use std::time::Instant;

use carat_cpu_kernels::{
    aligned::Aligned,
    gemm::{
        WeightRows,
        activations::{ActivationRows, Activations, Row},
        amx_bf16::{self, TileOperands, TileRows},
        amx_int8, float, gemv_transposed,
        packed_int8::{self, FourRows, Panel},
    },
    isa::Isa,
    matrix::MatrixMut,
    simd::{Accumulate, Tile},
    table::{Kernels, TileKernels},
};
use carat_gguf::QuantType;
use carat_testkit::numbers::Random;

fn main() {
    let levels = Isa::ALL.into_iter().filter(|isa| isa.available());
    let tables: Vec<&Kernels> = levels.map(Kernels::for_isa).collect();
    let part = std::env::args().skip(1).find(|part| !part.starts_with('-'));
    let is_wanted = |name: &str| part.as_ref().is_none_or(|part| part == name);
    if is_wanted("large") {
        large(&tables);
    }
    if is_wanted("small") {
        small(&tables);
    }
    if is_wanted("float") {
        float_weights(&tables);
    }
}

fn large(tables: &[&Kernels]) {
    println!("large batches: GOPS, and ns per weight of unpacking");
    for (quant, columns) in [
        (QuantType::Q4_0, 1536),
        (QuantType::Q4_0, 6144),
        (QuantType::Q8_0, 1536),
        (QuantType::Q4_K, 1536),
        (QuantType::Q6_K, 1536),
    ] {
        for kernels in tables {
            let (gops, unpack) = match kernels.tiles() {
                Some(tiles) => bf16_tiles(tiles, quant, columns),
                None => packed_panels(kernels, quant, columns),
            };
            let isa = kernels.isa();
            println!("{quant} {columns} {isa:?}: {gops:.0} GOPS; unpacking {unpack:.3} ns");
        }
    }
}

fn small(tables: &[&Kernels]) {
    println!("small batches: ns per weight by gemv / packed_int8 / gemv_transposed / amx_int8");
    for quant in QuantType::all().filter(|quant| !quant.is_float()) {
        for kernels in tables.iter().filter(|table| table.isa() != Isa::Scalar) {
            // Long rows, and some that are no whole chunk.
            for columns in [1536, 768, 256] {
                let times = [1, 2, 3, 4, 5, 6, 8, 16, 32]
                    .map(|rows| small_batch(kernels, (quant, columns), rows));
                println!(
                    "{quant} {columns} {:?}:  {}",
                    kernels.isa(),
                    times.join("  ")
                );
            }
        }
    }
}

fn float_weights(tables: &[&Kernels]) {
    println!("float weights: GOPS as they lie, GOPS widened, ns per weight of widening");
    for quant in [QuantType::F32, QuantType::F16, QuantType::BF16] {
        for kernels in tables {
            println!("{quant} {:?}: {}", kernels.isa(), floats(kernels, quant));
        }
    }
}

/// Seconds of the shortest of many calls: short ones fit between the turns of whatever else the machine does.
fn shortest(mut call: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    };
    (0..400).map(time).fold(f64::INFINITY, f64::min)
}

/// Random weights and activations.
struct Problem {
    quant: QuantType,
    columns: usize,
    weights: Vec<u8>,
    weight_rows: usize,
    x: Vec<f32>,
}

impl Problem {
    fn new(quant: QuantType, weight_rows: usize, columns: usize, rows: usize) -> Problem {
        let mut random = Random::new(columns as u64);
        Problem {
            quant,
            columns,
            weights: random.weights(quant, weight_rows, columns),
            weight_rows,
            x: random.normals(rows * columns),
        }
    }

    fn rows(&self) -> WeightRows<'_> {
        let bytes = self.quant.row_bytes(self.columns);
        WeightRows::new(&self.weights, bytes, bytes, self.weight_rows)
    }

    fn activations(&self, kernels: &Kernels) -> Activations {
        let rows = ActivationRows {
            int8: self.x.len() / self.columns,
            bf16: 0,
        };
        let mut activations = Activations::new(rows, self.columns);
        let (chunks, row_chunks) = activations.chunks_mut();
        let rows = self.x.chunks(self.columns);
        for (x, row) in rows.zip(chunks.chunks_mut(row_chunks)) {
            kernels.quantize(x, row);
        }
        activations
    }
}

/// Operations per second, in thousand millions.
fn gops(weight_rows: usize, columns: usize, rows: usize, seconds: f64) -> f64 {
    (2 * weight_rows * columns * rows) as f64 / seconds / 1e9
}

/// 256 rows times 256 weight rows in BF16 tiles: GOPS, and ns per weight of packing.
fn bf16_tiles(kernels: &TileKernels, quant: QuantType, columns: usize) -> (f64, f64) {
    const ROWS: usize = 256;
    let problem = Problem::new(quant, ROWS, columns, ROWS);
    let steps = amx_bf16::k_steps(columns);
    let tiles = || vec![Tile::ZERO; ROWS / amx_bf16::ROWS * steps];
    let (mut left, mut right) = (tiles(), tiles());
    let x: Vec<&[f32]> = problem.x.chunks(columns).collect();
    for (x, tiles) in x.chunks(amx_bf16::ROWS).zip(left.chunks_mut(steps)) {
        kernels.to_bf16(x, tiles);
    }
    let pack = shortest(|| {
        for (index, tiles) in right.chunks_mut(steps).enumerate() {
            let rows = index * amx_bf16::ROWS..(index + 1) * amx_bf16::ROWS;
            kernels.pack_bf16(quant, problem.rows().slice(rows), 0, tiles);
        }
    });
    let rows_of = |tiles| TileRows {
        tiles,
        row: steps,
        first: 0,
    };
    let operands = TileOperands {
        left: rows_of(&left),
        terms: 1,
        right: rows_of(&right),
        steps,
    };
    let mut out = vec![0.0; ROWS * ROWS];
    let multiply = shortest(|| {
        let mut out = MatrixMut::new(&mut out, ROWS);
        kernels.gemm_bf16(&operands, Accumulate::FromZero, &mut out);
    });
    (
        gops(ROWS, columns, ROWS, multiply),
        pack / (ROWS * columns) as f64 * 1e9,
    )
}

/// As many rows as a call takes times as many panels: GOPS, and ns per weight of packing.
fn packed_panels(kernels: &Kernels, quant: QuantType, columns: usize) -> (f64, f64) {
    let weight_rows = packed_int8::ROWS * packed_int8::MAX_PANELS;
    let rows = packed_int8::MAX_BLOCKS * packed_int8::MAX_ROWS;
    let problem = Problem::new(quant, weight_rows, columns, rows);
    let activations = problem.activations(kernels);
    let x: Vec<Row<'_>> = (0..rows).map(|row| activations.row(row)).collect();
    let mut panels: [Panel; packed_int8::MAX_PANELS] = Default::default();
    let mut sums = packed_int8::Accumulators::default();
    let x = arranged(kernels, (quant, columns), &x);
    let pack = shortest(|| pack_panels(kernels, &problem, &mut panels));
    let multiply = shortest(|| kernels.gemm_packed_int8(&panels, &x, &mut sums));
    (
        gops(weight_rows, columns, rows, multiply),
        pack / (weight_rows * columns) as f64 * 1e9,
    )
}

fn arranged(
    kernels: &Kernels,
    (quant, columns): (QuantType, usize),
    x: &[Row<'_>],
) -> Vec<FourRows> {
    let block = FourRows::count(columns);
    let mut arranged = vec![FourRows::ZERO; block * x.len().div_ceil(packed_int8::MAX_ROWS)];
    let blocks = arranged.chunks_mut(block);
    for (x, arranged) in x.chunks(packed_int8::MAX_ROWS).zip(blocks) {
        kernels.arrange_int8(x, amx_int8::group_of(quant), arranged);
    }
    arranged
}

fn pack_panels(kernels: &Kernels, problem: &Problem, panels: &mut [Panel]) {
    for (p, panel) in panels.iter_mut().enumerate() {
        let rows = p * packed_int8::ROWS..(p + 1) * packed_int8::ROWS;
        kernels.pack_int8(problem.quant, problem.rows().slice(rows), panel);
    }
}

/// `x4 0.123/0.456/...`: ns per weight of each kernel that takes the format.
fn small_batch(kernels: &Kernels, (quant, columns): (QuantType, usize), rows: usize) -> String {
    if !columns.is_multiple_of(quant.block_len()) {
        return String::new();
    }
    let weight_rows = packed_int8::ROWS * packed_int8::MAX_PANELS;
    let problem = Problem::new(quant, weight_rows, columns, rows);
    let activations = problem.activations(kernels);
    let x: Vec<Row<'_>> = (0..rows).map(|row| activations.row(row)).collect();
    let mut out = vec![0.0; rows * weight_rows];
    let nanoseconds = |seconds: f64| seconds * 1e9 / (weight_rows * columns) as f64;

    let gemv = shortest(|| kernels.gemv(quant, problem.rows(), &x, &mut out));
    let mut panels: [Panel; packed_int8::MAX_PANELS] = Default::default();
    let mut sums = packed_int8::Accumulators::default();
    let packed = shortest(|| {
        pack_panels(kernels, &problem, &mut panels);
        let x = arranged(kernels, (quant, columns), &x);
        for x in x.chunks(packed_int8::MAX_BLOCKS * FourRows::count(columns)) {
            kernels.gemm_packed_int8(&panels, x, &mut sums);
        }
    });
    let mut column = format!(
        "x{rows} {:.4}/{:.4}",
        nanoseconds(gemv),
        nanoseconds(packed)
    );
    if gemv_transposed::takes(quant) {
        let mut sums = gemv_transposed::Accumulators::default();
        let most = gemv_transposed::MAX_ROWS;
        let transposed = shortest(|| {
            for (x, out) in x.chunks(most).zip(out.chunks_mut(most * weight_rows)) {
                kernels.gemv_transposed(quant, problem.rows(), x, &mut sums, out);
            }
        });
        column += &format!("/{:.4}", nanoseconds(transposed));
    } else {
        column += "/-";
    }
    if let Some(kernels) = kernels.tiles() {
        let mut arranged = amx_int8::ActivationColumns::default();
        let mut scratch = amx_int8::Scratch::default();
        let sets = arranged.add(quant, columns, x.iter().copied());
        let tiles = shortest(|| {
            let (weights, sets) = (problem.rows(), sets.clone());
            kernels.gemm_int8(quant, weights, &arranged, sets, &mut scratch, &mut out);
        });
        column += &format!("/{:.4}", nanoseconds(tiles));
    }
    column
}

fn floats(kernels: &Kernels, quant: QuantType) -> String {
    let (weight_rows, columns, rows) = (32, 1536, float::MAX_ROWS);
    let problem = Problem::new(quant, weight_rows, columns, rows);
    let mut values = Aligned::new(problem.x.len());
    values.copy_from_slice(&problem.x);
    let x: Vec<&[f32]> = values.chunks(columns).collect();
    let mut out = vec![0.0; weight_rows * rows];
    let mut wide = Aligned::new(weight_rows * columns * size_of::<f32>());
    let direct = shortest(|| kernels.gemm_float(quant, problem.rows(), &x, &mut out));
    let widen = shortest(|| kernels.widen(quant, problem.rows(), &mut wide));
    let row_bytes = columns * size_of::<f32>();
    let weights = WeightRows::new(&wide, row_bytes, row_bytes, weight_rows);
    let widened = shortest(|| kernels.gemm_float(QuantType::F32, weights, &x, &mut out));
    format!(
        "{:.0} {:.0} {:.2}",
        gops(weight_rows, columns, rows, direct),
        gops(weight_rows, columns, rows, widened),
        widen / (weight_rows * columns) as f64 * 1e9
    )
}
