use carat_cpu_kernels::{
    gemm::{
        WeightRows,
        activations::{ActivationRows, Activations, Row},
        amx_bf16, amx_int8, gemv, gemv_transposed, packed_int8,
    },
    isa::Isa,
    matrix::MatrixMut,
    simd::{Accumulate, Tile},
    table::{Kernels, TileKernels},
};
use carat_gguf::QuantType;
use carat_testkit::numbers::{Random, bits, relative_error};
use half::bf16;

use crate::plain_tiles;

fn quantized() -> impl Iterator<Item = QuantType> {
    QuantType::all().filter(|quant| !quant.is_float())
}

/// Formats that have code of their own, and of those that share it one per length of block.
fn bodies() -> impl Iterator<Item = QuantType> {
    let shared = [QuantType::NVFP4, QuantType::Q1_0, QuantType::IQ2_XXS];
    quantized().filter(move |quant| quant.codes().is_none() || shared.contains(quant))
}

/// Widths with whole, short and single chunks.
fn widths(quant: QuantType) -> &'static [usize] {
    match quant.block_len() {
        32 => &[32, 96, 512, 704, 2112],
        64 => &[64, 192, 512, 704, 2112],
        128 => &[128, 384, 512, 2816],
        _ => &[256, 512, 768, 2816],
    }
}

struct Problem {
    quant: QuantType,
    columns: usize,
    weights: Vec<u8>,
    weight_rows: usize,
    x: Vec<f32>,
}

impl Problem {
    fn new(quant: QuantType, weight_rows: usize, columns: usize, rows: usize) -> Problem {
        let mut random = Random::new(columns as u64 * 31 + quant as u64);
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
        let rows = self.x.len() / self.columns;
        let rows = ActivationRows {
            int8: rows,
            bf16: 0,
        };
        let mut activations = Activations::new(rows, self.columns);
        let (chunks, row_chunks) = activations.chunks_mut();
        for (x, row) in self
            .x
            .chunks(self.columns)
            .zip(chunks.chunks_mut(row_chunks))
        {
            kernels.quantize(x, row);
        }
        activations
    }

    /// `[rows, weight_rows]` in f64, on the weights as the format defines them.
    fn exact(&self) -> Vec<f64> {
        let mut dense = vec![0.0; self.weight_rows * self.columns];
        self.quant.dequantize(&self.weights, &mut dense);
        let dot = |x: &[f32], w: &[f32]| {
            x.iter()
                .zip(w)
                .map(|(x, w)| f64::from(*x) * f64::from(*w))
                .sum()
        };
        self.x
            .chunks(self.columns)
            .flat_map(|x| dense.chunks(self.columns).map(move |w| dot(x, w)))
            .collect()
    }

    fn by_gemv(&self, kernels: &Kernels, together: usize) -> Vec<f32> {
        let activations = self.activations(kernels);
        let rows: Vec<Row<'_>> = (0..self.x.len() / self.columns)
            .map(|row| activations.row(row))
            .collect();
        let mut out = vec![f32::NAN; rows.len() * self.weight_rows];
        for (rows, out) in rows
            .chunks(together)
            .zip(out.chunks_mut(together * self.weight_rows))
        {
            kernels.gemv(self.quant, self.rows(), rows, out);
        }
        out
    }

    fn by_gemv_transposed(&self, kernels: &Kernels, together: usize) -> Vec<f32> {
        let activations = self.activations(kernels);
        let rows: Vec<Row<'_>> = (0..self.x.len() / self.columns)
            .map(|row| activations.row(row))
            .collect();
        let mut out = vec![f32::NAN; rows.len() * self.weight_rows];
        let mut sums = gemv_transposed::Accumulators::default();
        for (rows, out) in rows
            .chunks(together)
            .zip(out.chunks_mut(together * self.weight_rows))
        {
            kernels.gemv_transposed(self.quant, self.rows(), rows, &mut sums, out);
        }
        out
    }

    /// With so many rows in a product.
    fn by_amx_int8(&self, kernels: &TileKernels, together: usize) -> Vec<f32> {
        let activations = self.activations(Kernels::all()[0]);
        let mut out = vec![f32::NAN; self.x.len() / self.columns * self.weight_rows];
        // One for all, as a worker has: what a call leaves behind must not matter to the next.
        let mut scratch = amx_int8::Scratch::default();
        let mut columns = amx_int8::ActivationColumns::default();
        for (block, out) in out.chunks_mut(together * self.weight_rows).enumerate() {
            let first = block * together;
            let rows = first..first + out.len() / self.weight_rows;
            let rows = rows.map(|row| activations.row(row));
            let sets = columns.add(self.quant, self.columns, rows);
            kernels.gemm_int8(self.quant, self.rows(), &columns, sets, &mut scratch, out);
        }
        out
    }

    fn by_packed_int8(&self, kernels: &Kernels) -> Vec<f32> {
        let activations = self.activations(kernels);
        let rows: Vec<Row<'_>> = (0..self.x.len() / self.columns)
            .map(|row| activations.row(row))
            .collect();
        let mut out = vec![f32::NAN; rows.len() * self.weight_rows];
        let width = packed_int8::ROWS * packed_int8::MAX_PANELS;
        // One for all, as a worker has: what a call leaves behind must not matter to the next.
        let mut sums = packed_int8::Accumulators::default();
        let block = packed_int8::FourRows::count(self.columns);
        let blocks = rows.len().div_ceil(packed_int8::MAX_ROWS);
        let mut arranged = vec![packed_int8::FourRows::ZERO; blocks * block];
        for (rows, arranged) in rows
            .chunks(packed_int8::MAX_ROWS)
            .zip(arranged.chunks_mut(block))
        {
            kernels.arrange_int8(rows, amx_int8::group_of(self.quant), arranged);
        }
        let together = packed_int8::MAX_BLOCKS * packed_int8::MAX_ROWS;
        for first in (0..self.weight_rows).step_by(width) {
            let weights = self
                .rows()
                .slice(first..self.weight_rows.min(first + width));
            let mut panels: [_; packed_int8::MAX_PANELS] = Default::default();
            let count = weights.len().div_ceil(packed_int8::ROWS);
            for (p, panel) in panels.iter_mut().enumerate().take(count) {
                let rows = p * packed_int8::ROWS..weights.len().min((p + 1) * packed_int8::ROWS);
                kernels.pack_int8(self.quant, weights.slice(rows), panel);
            }
            for (call, x) in arranged.chunks(packed_int8::MAX_BLOCKS * block).enumerate() {
                kernels.gemm_packed_int8(&panels[..count], x, &mut sums);
                for row in call * together..rows.len().min((call + 1) * together) {
                    let start = row * self.weight_rows + first;
                    sums.copy_row(row % together, &mut out[start..start + weights.len()]);
                }
            }
        }
        out
    }

    /// The first rows in tiles: rounded, or split where the weights are floats.
    fn left(&self, kernels: &TileKernels, rows: usize) -> (Vec<Tile>, usize) {
        let terms = if self.quant.is_float() {
            amx_bf16::TERMS
        } else {
            1
        };
        let left_row = terms * amx_bf16::k_steps(self.columns);
        let x: Vec<&[f32]> = self.x.chunks(self.columns).take(rows).collect();
        let mut left = vec![Tile::ZERO; x.len().div_ceil(amx_bf16::ROWS) * left_row];
        for (x, tiles) in x.chunks(amx_bf16::ROWS).zip(left.chunks_mut(left_row)) {
            if terms == 1 {
                kernels.to_bf16(x, tiles);
            } else {
                kernels.split_bf16(x, tiles);
            }
        }
        (left, terms)
    }

    /// Weights in tiles, `[rows of tiles, steps]`, from value `first` on.
    fn right(&self, kernels: &TileKernels, first: usize, steps: usize) -> Vec<Tile> {
        let tile_rows = self.weight_rows.div_ceil(amx_bf16::ROWS);
        let mut right = vec![Tile::ZERO; tile_rows * steps];
        for (tile_row, tiles) in right.chunks_mut(steps).enumerate() {
            let rows =
                tile_row * amx_bf16::ROWS..self.weight_rows.min((tile_row + 1) * amx_bf16::ROWS);
            kernels.pack_bf16(self.quant, self.rows().slice(rows), first, tiles);
        }
        right
    }

    /// The products of the first rows, with K blocks of `block` values.
    fn by_amx_bf16(&self, kernels: &TileKernels, rows: usize, block: usize) -> Vec<f32> {
        let (left, terms) = self.left(kernels, rows);
        let mut out = vec![f32::NAN; rows * self.weight_rows];
        for first in (0..self.columns).step_by(block) {
            let steps = amx_bf16::k_steps(block.min(self.columns - first));
            let operands = amx_bf16::TileOperands {
                left: amx_bf16::TileRows {
                    tiles: &left,
                    row: terms * amx_bf16::k_steps(self.columns),
                    first: terms * amx_bf16::k_steps(first),
                },
                terms,
                right: amx_bf16::TileRows {
                    tiles: &self.right(kernels, first, steps),
                    row: steps,
                    first: 0,
                },
                steps,
            };
            let accumulate = if first == 0 {
                Accumulate::FromZero
            } else {
                Accumulate::OntoOutput
            };
            kernels.gemm_bf16(
                &operands,
                accumulate,
                &mut MatrixMut::new(&mut out, self.weight_rows),
            );
        }
        out
    }
}

/// The plain kernels for tiles, and the others where this processor has them.
fn tile_kernels() -> Vec<&'static TileKernels> {
    let others = Kernels::for_isa(Isa::Amx).tiles();
    std::iter::once(plain_tiles::kernels())
        .chain(others)
        .collect()
}

#[test]
fn what_lies_behind_a_row_does_not_matter() {
    for quant in [QuantType::Q4_0, QuantType::Q4_1, QuantType::Q8_0] {
        let one = Problem::new(quant, 1, 96, 1);
        let mut two = Problem::new(quant, 2, 96, 1);
        two.x.clone_from(&one.x);
        // Of the second row, everything is the largest there is: its scales are no numbers.
        let (first, second) = two.weights.split_at_mut(one.weights.len());
        first.copy_from_slice(&one.weights);
        second.fill(0xff);
        for kernels in Kernels::all() {
            let (alone, beside) = (one.by_gemv(kernels, 1), two.by_gemv(kernels, 1));
            assert_eq!(alone[0].to_bits(), beside[0].to_bits(), "{quant}");
            assert!(beside[1].is_nan(), "{quant}");
        }
    }
}

#[test]
fn interleaved_rows_are_visited_once_each_a_quarter_apart() {
    let bytes: Vec<u8> = (0..40).collect();
    let rows = WeightRows::new(&bytes, 5, 3, 8).interleaved();
    let visited = |rows: WeightRows<'_>| -> Vec<u8> {
        (0..rows.len()).map(|row| rows.row(row)[0] / 5).collect()
    };
    assert_eq!(visited(rows), [0, 2, 4, 6, 1, 3, 5, 7]);
    assert_eq!(visited(rows.slice(4..8)), [1, 3, 5, 7]);
}

#[test]
fn unpacking_has_the_bits_of_the_definition() {
    for quant in QuantType::all() {
        for &columns in widths(quant) {
            let bytes = Random::new(5).weights(quant, 1, columns);
            let mut expected = vec![0.0; columns];
            quant.dequantize(&bytes, &mut expected);
            for kernels in Kernels::all() {
                let mut found = vec![f32::NAN; columns];
                kernels.dequantize(quant, &bytes, 1.0, &mut found);
                assert_eq!(
                    bits(&found),
                    bits(&expected),
                    "{quant} {columns} {:?}",
                    kernels.isa()
                );
            }
        }
    }
}

#[test]
fn products_are_close_to_exact_ones_and_equal_on_every_instruction_set() {
    for quant in quantized() {
        for &columns in widths(quant) {
            let problem = Problem::new(quant, 67, columns, 8);
            let expected = problem.by_gemv(Kernels::all()[0], 1);
            let error = relative_error(&expected, &problem.exact());
            // A dot product of one or three groups may cancel, which says nothing about the format.
            let bound = if columns < 512 { 1e-2 } else { 6.2e-3 };
            assert!(error < bound, "{quant} {columns}: {error}");
            for kernels in Kernels::all() {
                let found = problem.by_gemv(kernels, 1);
                assert_eq!(
                    bits(&found),
                    bits(&expected),
                    "{quant} {columns} {:?}",
                    kernels.isa()
                );
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_in_company_and_in_packed_panels() {
    for quant in bodies() {
        for &columns in widths(quant) {
            for kernels in Kernels::all() {
                let problem = Problem::new(quant, 37, columns, 11);
                let alone = problem.by_gemv(kernels, 1);
                for together in 2..=gemv::MAX_ROWS {
                    assert_eq!(bits(&problem.by_gemv(kernels, together)), bits(&alone));
                }
                assert_eq!(
                    bits(&problem.by_packed_int8(kernels)),
                    bits(&alone),
                    "{quant} {columns} {:?}",
                    kernels.isa()
                );
                for together in (1..=3).chain([gemv_transposed::MAX_ROWS]) {
                    assert!(
                        !gemv_transposed::takes(quant)
                            || bits(&problem.by_gemv_transposed(kernels, together)) == bits(&alone),
                        "{quant} {columns} {together} {:?}",
                        kernels.isa()
                    );
                }
            }
        }
    }
}

#[test]
fn rows_in_int8_tiles_have_the_bits_of_rows_alone() {
    for quant in bodies() {
        for &columns in widths(quant) {
            let problem = Problem::new(quant, 37, columns, 32);
            let alone = bits(&problem.by_gemv(Kernels::all()[0], 1));
            for kernels in tile_kernels() {
                for together in [1, 2, 3, 5, 8, 13, 16, 17, 26, 32] {
                    let found = bits(&problem.by_amx_int8(kernels, together));
                    assert!(found == alone, "{quant} {columns} {together}");
                }
            }
        }
    }
}

#[test]
fn the_formats_that_matter_most_are_transposed() {
    for quant in [QuantType::Q4_0, QuantType::Q8_0, QuantType::Q4_K] {
        assert!(gemv_transposed::takes(quant), "{quant}");
    }
    assert!(!gemv_transposed::takes(QuantType::BF16));
}

#[test]
fn weights_in_bf16_tiles_are_those_of_the_definition_rounded() {
    for quant in bodies().chain([QuantType::BF16]) {
        for &columns in widths(quant) {
            let problem = Problem::new(quant, 21, columns, 0);
            let mut dense = vec![0.0; 21 * columns];
            quant.dequantize(&problem.weights, &mut dense);
            for kernels in tile_kernels() {
                let first = (columns - 1) / amx_bf16::K_BLOCK_MULTIPLE * amx_bf16::K_BLOCK_MULTIPLE;
                let steps = amx_bf16::k_steps(columns - first);
                let tiles = problem.right(kernels, first, steps);
                for row in 0..32 {
                    for k in first..columns {
                        let tile = &tiles[row / amx_bf16::ROWS * steps + (k - first) / 32];
                        let line = &tile.0[k % 32 / 2].0;
                        let found = line[4 * (row % 16) + 2 * (k % 2)..].first_chunk();
                        let found = bf16::from_le_bytes(*found.expect("two bytes"));
                        let weight = dense.get(row * columns + k).copied().unwrap_or(0.0);
                        assert_eq!(found, bf16::from_f32(weight), "{quant} {row} {k}");
                    }
                }
            }
        }
    }
}

#[test]
fn bf16_tiles_have_the_bits_of_plain_ones_and_are_nearer_to_exact_products() {
    for quant in bodies() {
        for &columns in widths(quant) {
            let problem = Problem::new(quant, 37, columns, 19);
            let exact = problem.exact();
            let eight_bit = relative_error(&problem.by_gemv(Kernels::all()[0], 1), &exact);
            let plain = problem.by_amx_bf16(plain_tiles::kernels(), 19, columns);
            let error = relative_error(&plain, &exact);
            assert!(error < 3e-3, "{quant} {columns}: {error}");
            assert!(error < eight_bit, "{quant} {columns}: {error} {eight_bit}");
            for kernels in tile_kernels() {
                let found = problem.by_amx_bf16(kernels, 19, columns);
                assert_eq!(bits(&found), bits(&plain), "{quant} {columns}");
            }
        }
    }
}

#[test]
fn a_row_in_bf16_tiles_has_the_same_bits_in_any_company_and_any_k_blocks() {
    for kernels in tile_kernels() {
        for quant in [QuantType::Q4_0, QuantType::Q6_K, QuantType::BF16] {
            let problem = Problem::new(quant, 34, 1792, 50);
            let all = bits(&problem.by_amx_bf16(kernels, 50, 1792));
            for rows in [1, 15, 16, 17, 32, 33, 49] {
                let found = bits(&problem.by_amx_bf16(kernels, rows, amx_bf16::K_BLOCK_MULTIPLE));
                assert_eq!(found, all[..rows * 34], "{quant} {rows}");
            }
        }
    }
}

#[test]
fn floats_in_bf16_tiles_are_as_exact_as_floats() {
    for columns in [1, 16, 40, 256, 1000, 1536] {
        let problem = Problem::new(QuantType::BF16, 35, columns, 18);
        let mut wide = Problem::new(QuantType::F32, 35, columns, 18);
        wide.weights = vec![0; 35 * columns * 4];
        Kernels::all()[0].widen(QuantType::BF16, problem.rows(), &mut wide.weights);
        wide.x.copy_from_slice(&problem.x);
        let plain = problem.by_amx_bf16(plain_tiles::kernels(), 18, 512);
        let error = relative_error(&plain, &problem.exact());
        assert!(error < 1e-6, "{columns}: {error}");
        for kernels in tile_kernels() {
            for problem in [&problem, &wide] {
                let found = problem.by_amx_bf16(kernels, 18, 512);
                assert_eq!(bits(&found), bits(&plain), "{columns}");
            }
        }
    }
}

#[test]
fn every_batch_size_agrees() {
    for rows in 1..=70 {
        let kernels = Kernels::for_isa(Isa::detect());
        let problem = Problem::new(QuantType::Q4_K, 18, 512, rows);
        let alone = bits(&problem.by_gemv(kernels, 1));
        assert_eq!(bits(&problem.by_packed_int8(kernels)), alone);
    }
}

#[test]
fn float_weights_are_multiplied_as_floats() {
    for quant in [QuantType::F32, QuantType::F16, QuantType::BF16] {
        for columns in [1, 16, 40, 256, 1000] {
            for rows in [1, 3, 4, 9, 13] {
                let problem = Problem::new(quant, 7, columns, rows);
                let x: Vec<&[f32]> = problem.x.chunks(columns).collect();
                let mut all: Vec<Vec<u32>> = Vec::new();
                for kernels in Kernels::all() {
                    let mut found = vec![f32::NAN; rows * 7];
                    kernels.gemm_float(quant, problem.rows(), &x, &mut found);
                    let error = relative_error(&found, &problem.exact());
                    assert!(error < 1e-6, "{quant} {columns}: {error}");
                    let alone: Vec<f32> = x
                        .iter()
                        .flat_map(|x| {
                            let mut out = vec![f32::NAN; 7];
                            kernels.gemm_float(quant, problem.rows(), &[x], &mut out);
                            out
                        })
                        .collect();
                    assert_eq!(bits(&alone), bits(&found));
                    let mut wide = vec![0; 7 * 4 * columns];
                    kernels.widen(quant, problem.rows(), &mut wide);
                    let wide = WeightRows::new(&wide, 4 * columns, 4 * columns, 7);
                    let mut widened = vec![f32::NAN; rows * 7];
                    kernels.gemm_float(QuantType::F32, wide, &x, &mut widened);
                    assert_eq!(bits(&widened), bits(&found));
                    all.push(bits(&found));
                }
                assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
            }
        }
    }
}
