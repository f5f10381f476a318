//! Products against f64, and against the exact meaning of int8 activations; bits between buckets; timings.

use carat_gguf::{QuantType, quant::random_blocks};

use super::*;
use crate::kernel::linear::prepare_rows::{self, PrepareRowsParams};
use crate::{
    config::Tier,
    device::{Buffer, ClusterCapacity},
    testing::{Card, normals, relative_error},
};

/// One product to test.
#[derive(Clone, Copy, Debug)]
struct Case {
    quant: QuantType,
    columns: usize,
    /// Output rows of parts; of a pair or a slice, the first alone.
    parts: [usize; 3],
    prologue: u32,
    epilogue: u32,
    rows: usize,
    /// Forced, to give a block many M-tiles.
    blocks: Option<usize>,
    /// Whether a launch before prepares the rows.
    prepared: bool,
    /// Whether outputs are prepared for the product that follows, too.
    codes: bool,
}

pub(crate) const EPS: f32 = 1e-6;
pub(crate) const BY: f32 = 0.7;
/// Columns of the operand of a slice, and the first it takes.
const SLICE: (usize, usize) = (3, 2);

fn gemv_weights(quant: QuantType) -> GemvWeights {
    match quant {
        QuantType::F16 => GemvWeights::F16,
        QuantType::BF16 => GemvWeights::BF16,
        QuantType::F32 => GemvWeights::F32,
        _ => GemvWeights::Fragments(FragmentFormat::of(quant).expect("fragments")),
    }
}

/// A random matrix: its rows in the file's format, and their values.
struct Matrix {
    rows: usize,
    columns: usize,
    quant: QuantType,
    bytes: Vec<u8>,
}

impl Matrix {
    fn random(quant: QuantType, rows: usize, columns: usize, seed: u64) -> Matrix {
        let mut bytes = vec![0; rows * quant.row_bytes(columns)];
        random_blocks(quant, seed, 0.5, &mut bytes);
        Matrix {
            rows,
            columns,
            quant,
            bytes,
        }
    }

    fn row(&self, r: usize) -> &[u8] {
        let bytes = self.quant.row_bytes(self.columns);
        &self.bytes[r * bytes..(r + 1) * bytes]
    }

    /// As it lies on the device.
    fn packed(&self) -> Vec<u8> {
        match gemv_weights(self.quant) {
            GemvWeights::Fragments(_) => {
                fragment::pack(self.quant, self.rows, self.columns, |r| self.row(r))
            }
            _ => self.bytes.clone(),
        }
    }

    /// `[inputs, rows]` of `x`, `[inputs, columns]`.
    fn product(&self, x: &[f64]) -> Vec<f64> {
        let mut values = vec![0.0; self.columns];
        let inputs = x.len() / self.columns;
        let mut out = vec![0.0; inputs * self.rows];
        for r in 0..self.rows {
            self.quant.dequantize(self.row(r), &mut values);
            for (i, x) in x.chunks_exact(self.columns).enumerate() {
                let products = x.iter().zip(&values).map(|(x, &w)| x * f64::from(w));
                out[i * self.rows + r] = products.sum();
            }
        }
        out
    }
}

/// M-tiles of two matrices, alternating.
fn interleaved(gate: &[u8], up: &[u8], m_tile_bytes: usize) -> Vec<u8> {
    let pairs = gate
        .chunks_exact(m_tile_bytes)
        .zip(up.chunks_exact(m_tile_bytes));
    pairs.flat_map(|(g, u)| [g, u].concat()).collect()
}

fn gelu(z: f64) -> f64 {
    0.5 * z * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * z * (1.0 + 0.044_715 * z * z)).tanh())
}

/// The norm of one row.
fn normed(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    x.iter()
        .zip(weight)
        .map(|(x, &w)| x * scale * f64::from(w))
        .collect()
}

/// Values that int8 codes in blocks of 32 stand for.
fn quantized(x: &[f64]) -> Vec<f64> {
    let blocks = x.chunks(32).flat_map(|block| {
        let most = block.iter().fold(0f32, |m, &x| m.max((x as f32).abs()));
        let scale = most * (1.0 / 127.0);
        let per = if most > 0.0 { 1.0 / scale } else { 0.0 };
        let code = move |&x: &f64| f64::from((x as f32).mul_add(per, 12_582_912.0) - 12_582_912.0);
        block
            .iter()
            .map(move |x| code(x) * f64::from(scale))
            .collect::<Vec<_>>()
    });
    blocks.collect()
}

fn doubles(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn floats(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

pub(crate) fn facts(card: &Card) -> GemvDevice {
    GemvDevice {
        multiprocessors: card.device.multiprocessors,
        shared_bytes: card.device.shared_bytes,
        clusters: (card.device.capability.major == 9)
            .then(|| ClusterCapacity::of(&card.device).unwrap()),
        ring: USUAL_STAGES,
    }
}

fn poisoned(card: &Card, count: usize) -> Buffer {
    card.upload(&vec![f32::NAN; count])
}

impl GemvParams {
    pub(crate) fn force_blocks(&mut self, shape: GemvShape, blocks: usize) {
        let a_block = shape.a_block(blocks) as u32;
        (self.a_block_1, self.a_block_2) = (a_block, a_block);
        (self.a_block_4, self.a_block_8) = (a_block, a_block);
        self.alone = shape.shares(blocks);
    }
}

impl Case {
    fn shape(&self, card: &Card) -> GemvShape {
        let weights = gemv_weights(self.quant);
        let padded = |rows: usize| match weights {
            GemvWeights::Fragments(_) => rows.next_multiple_of(fragment::M_TILE),
            _ => rows,
        };
        let outputs = match self.epilogue {
            0 => padded(self.parts[0]) + padded(self.parts[1]) + self.parts[2],
            _ => self.parts[0],
        };
        // Prepared rows take no clusters, so that any card can have what Hopper has of them: blocks of one row alone.
        let mut device = facts(card);
        if self.prepared {
            let assumed = ClusterCapacity::assumed(device.multiprocessors);
            device.clusters.get_or_insert(assumed);
        }
        GemvShape {
            weights,
            columns: self.columns,
            outputs,
            pair: self.epilogue == 1,
            codes: self.codes,
            top_k: None,
            ready: self.prepared,
            normed: true,
            card: device,
        }
    }

    /// Prepares rows by a launch of their own.
    fn prepare(&self, card: &Card, input: GemvPrologueParams, rows: RowsAt) -> Buffer {
        let shape = self.shape(card);
        let padded = shape.padded();
        let prepared = card.upload(&vec![0xffu8; PreparedRows::bytes(padded)]);
        let [codes, scales, sums] = prepare_rows::addresses(prepared.address(), padded);
        let params = PrepareRowsParams {
            input,
            codes,
            scales,
            sums,
            columns: self.columns as u32,
            padded: padded as u32,
            rows,
            early: 0,
            reserved: 0,
        };
        let GemvWeights::Fragments(format) = shape.weights else {
            panic!("rows of packed products are prepared")
        };
        let kind = INPUTS[self.prologue.min(1) as usize];
        let module = card.load(&prepare_rows::specialization(kind, format.has_minimums()));
        let threads = (self.prologue > 0).then_some(32 * shape.warps());
        let grid = prepare_rows::grid(self.rows.next_power_of_two(), padded, threads);
        card.run(&module, grid, &params.bytes());
        prepared
    }

    /// Runs it and compares. Gives the first part's rows.
    #[expect(
        clippy::too_many_lines,
        reason = "operands, params and expectations of every kind of case, in that order"
    )]
    fn check(&self, card: &Card) -> Vec<f32> {
        let Case { columns, rows, .. } = *self;
        let bucket = rows.next_power_of_two();
        let seed = columns as u64;
        // Rows are the same whatever their number; those behind the count are not numbers.
        let some_rows = |seed: u64, size: f32| {
            let mut values: Vec<f32> = normals(seed, MAX_ROWS * columns)[..rows * columns].to_vec();
            for value in &mut values {
                *value *= size;
            }
            values.resize(bucket * columns, f32::NAN);
            values
        };
        let x = some_rows(1, 3.0);
        let a = some_rows(2, 2.0);
        let norm_weight = |seed: u64| {
            normals(seed, columns)
                .iter()
                .map(|v| 1.0 + 0.3 * v)
                .collect()
        };
        let (weight, following_weight): (Vec<f32>, Vec<f32>) = (norm_weight(3), norm_weight(4));
        let shape = self.shape(card);
        let matrices: Vec<Matrix> = match self.epilogue {
            1 => (0..2)
                .map(|i| Matrix::random(self.quant, self.parts[0], columns, seed + i))
                .collect(),
            2 => vec![Matrix::random(self.quant, self.parts[0], columns, seed)],
            _ => {
                let parts = self.parts.iter().zip(seed..);
                parts
                    .map(|(&n, s)| Matrix::random(self.quant, n, columns, s))
                    .collect()
            }
        };
        let packed: Vec<Vec<u8>> = matrices.iter().map(Matrix::packed).collect();
        let is_fragments = matches!(shape.weights, GemvWeights::Fragments(_));
        let (w, up) = match (self.epilogue, is_fragments) {
            (1, true) => (
                interleaved(&packed[0], &packed[1], shape.weights.m_tile_bytes(columns)),
                vec![],
            ),
            (1, false) => (packed[0].clone(), packed[1].clone()),
            _ => (packed.concat(), vec![]),
        };
        let other_columns = SLICE.0 * self.parts[0] + SLICE.1;
        let other = normals(5, bucket * other_columns);

        let count = card.upload(&[rows as u32]);
        let [x_at, a_at, other_at] = [&x, &a, &other].map(|v| card.upload(v));
        let [weight_at, next_at] = [&weight, &following_weight].map(|v| card.upload(v));
        let [w_at, up_at] = [&w, &up].map(|v| card.upload(v));
        let sum_at = poisoned(card, bucket * columns);
        let outs: Vec<Buffer> = self
            .parts
            .iter()
            .map(|n| poisoned(card, bucket * n))
            .collect();
        let at = RowsAt {
            count: count.address(),
            index: Address::NULL,
        };
        let input = GemvPrologueParams {
            x: x_at.address(),
            weight: weight_at.address(),
            following_weight: next_at.address(),
            residual: a_at.address(),
            sum: sum_at.address(),
            kind: self.prologue,
            per_column: 1.0 / columns as f32,
            eps: EPS,
            scale: BY,
            following_eps: EPS,
            reserved: 0,
        };
        let prepared = self.prepared.then(|| self.prepare(card, input, at));
        let mut params = shape.params(at, input, w_at.address());
        if let Some(prepared) = &prepared {
            let [codes, scales, sums] = prepare_rows::addresses(prepared.address(), shape.padded());
            params.input.x = codes;
            params.input.weight = scales;
            params.input.following_weight = sums;
        }
        params.up = up_at.address();
        params.epilogue = self.epilogue;
        params.other = other_at.address();
        params.other_columns = other_columns as u32;
        params.other_column = SLICE.1 as u32;
        let mut first = 0;
        let parts = [&mut params.part_0, &mut params.part_1, &mut params.part_2];
        for (i, part) in parts.into_iter().enumerate() {
            if self.epilogue != 0 && i > 0 {
                continue;
            }
            *part = OutputRowsParams {
                out: outs[i].address(),
                first: first as u32,
                rows: self.parts[i] as u32,
            };
            first += if is_fragments {
                self.parts[i].next_multiple_of(fragment::M_TILE)
            } else {
                self.parts[i]
            };
        }
        let kind = if self.prepared {
            READY
        } else {
            INPUTS[self.prologue.min(1) as usize]
        };
        let of = |codes: bool| GemvShape { codes, ..shape }.specialization(kind);
        let module = card.load(&of(false));
        let mut grid = shape.grid(rows);
        if let Some(blocks) = self.blocks {
            let blocks = blocks.next_multiple_of(shape.cluster(bucket));
            params.force_blocks(shape, blocks);
            grid = shape.grid_of(bucket, blocks);
        }
        card.run(&module, grid, &params.bytes());
        if self.codes {
            let columns = self.parts[0];
            let of_outputs = Case {
                columns,
                parts: [16, 0, 0],
                prologue: 0,
                epilogue: 0,
                ..*self
            };
            let input = GemvPrologueParams {
                x: outs[0].address(),
                ..input
            };
            let expected = of_outputs.prepare(card, input, at);
            let found = card.upload(&vec![0xffu8; PreparedRows::bytes(columns)]);
            params.part_0.out = found.address();
            params.other_columns = columns as u32;
            let module = card.load(&of(true));
            card.run(&module, grid, &params.bytes());
            // Sums are written for products that want them.
            let sums = matches!(shape.weights, GemvWeights::Fragments(f) if f.has_minimums());
            let bytes = (9 + usize::from(sums)) * columns;
            let [expected, found] =
                [&expected, &found].map(|rows| card.download::<u8>(rows, bytes));
            assert_eq!(expected, found, "{self:?}");
        }

        let mut inputs = Vec::new();
        let mut sums = Vec::new();
        for (x, a) in x
            .chunks_exact(columns)
            .zip(a.chunks_exact(columns))
            .take(rows)
        {
            let (x, a) = (doubles(x), doubles(a));
            let branch = normed(&x, &weight);
            let sum = a.iter().zip(&branch).map(|(a, b)| (a + b) * f64::from(BY));
            let sum: Vec<f64> = sum.collect();
            inputs.extend(match self.prologue {
                0 => x,
                1 => branch,
                2 => sum.clone(),
                _ => normed(&sum, &following_weight),
            });
            sums.extend(sum);
        }
        if self.prologue >= 2 {
            let found = card.download::<f32>(&sum_at, bucket * columns);
            let error = relative_error(&found[..rows * columns], &floats(&sums));
            assert!(error < 1e-6, "{self:?}: sum {error}");
            assert!(
                found[rows * columns..].iter().all(|v| v.is_nan()),
                "{self:?}"
            );
        }
        let expected = |inputs: &[f64]| -> Vec<Vec<f64>> {
            let products: Vec<Vec<f64>> = matrices.iter().map(|m| m.product(inputs)).collect();
            match self.epilogue {
                1 => {
                    let pairs = products[0].iter().zip(&products[1]);
                    vec![pairs.map(|(&g, u)| gelu(g) * u).collect()]
                }
                2 => {
                    let n = self.parts[0];
                    let other =
                        |i: usize| f64::from(other[i / n * other_columns + SLICE.1 + i % n]);
                    let values = products[0].iter().enumerate();
                    vec![values.map(|(i, &y)| gelu(y) * other(i)).collect()]
                }
                _ => products,
            }
        };
        let plain = expected(&inputs);
        let exact = if is_fragments {
            let rows = inputs.chunks_exact(columns);
            expected(&rows.flat_map(quantized).collect::<Vec<f64>>())
        } else {
            plain.clone()
        };
        let mut all = Vec::new();
        for (i, (plain, exact)) in plain.iter().zip(&exact).enumerate() {
            let n = self.parts[i];
            if n == 0 {
                continue;
            }
            let found = card.download::<f32>(&outs[i], bucket * n);
            let error = relative_error(&found[..rows * n], &floats(exact));
            let of_plain = relative_error(&found[..rows * n], &floats(plain));
            assert!(
                error < 1e-5,
                "{self:?} part {i}: {error} of exact, {of_plain} of plain"
            );
            // Few outputs may be unlucky; weights of norms and GELU may add to the error.
            let many = rows * n >= 100 && self.epilogue + self.prologue == 0;
            let bound = if many { 8e-3 } else { 3e-2 };
            assert!(of_plain < bound, "{self:?} part {i}: {of_plain}");
            assert!(
                found[rows * n..].iter().all(|v| v.is_nan()),
                "{self:?} wrote more"
            );
            all.push(found);
        }
        all.swap_remove(0)
    }
}

const QUANTS: [QuantType; 18] = [
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
    QuantType::MXFP4,
    QuantType::IQ2_XS,
    QuantType::TQ2_0,
    QuantType::Q1_0,
    QuantType::F16,
    QuantType::BF16,
    QuantType::F32,
];

/// Columns that are no multiple of a K-block, where the format allows it.
fn odd_columns(quant: QuantType) -> usize {
    match quant.block_len() {
        256 => 768,
        128 => 640,
        32 => 352,
        _ => 328,
    }
}

#[test]
#[ignore = "needs a card"]
fn gemv_is_the_product_with_all_that_surrounds_it() {
    let card = Card::open(Tier::Best);
    card.compile(&specializations(facts(&card).clusters.is_some()).collect::<Vec<_>>());
    let mut rows = [1, 2, 3, 5, 8].into_iter().cycle();
    for quant in QUANTS {
        for (prologue, epilogue) in (0..4).flat_map(|p| (0..3).map(move |e| (p, e))) {
            let case = Case {
                quant,
                columns: odd_columns(quant),
                parts: if epilogue == 0 {
                    [36, 20, 13]
                } else {
                    [43, 0, 0]
                },
                prologue,
                epilogue,
                rows: rows.next().expect("endless"),
                blocks: None,
                prepared: false,
                codes: false,
            };
            case.check(&card);
            if matches!(gemv_weights(quant), GemvWeights::Fragments(_)) {
                let prepared = true;
                Case { prepared, ..case }.check(&card);
            }
        }
    }
}

#[test]
#[ignore = "needs a card"]
fn gemv_gives_a_row_the_same_bits_in_every_bucket_and_grid() {
    let card = Card::open(Tier::Best);
    for (i, quant) in QUANTS.into_iter().enumerate() {
        let of = |rows: usize, blocks: Option<usize>, prepared: bool| {
            let case = Case {
                quant,
                columns: odd_columns(quant),
                parts: [75, 0, 0],
                prologue: i as u32 % 4,
                epilogue: 0,
                rows,
                blocks,
                prepared,
                codes: false,
            };
            case.check(&card)[..75].to_vec()
        };
        let alone = of(1, None, false);
        for rows in [2, 3, 5, 8] {
            assert_eq!(alone, of(rows, None, false), "{quant}, {rows} rows");
        }
        assert_eq!(alone, of(1, Some(1), false), "{quant}");
        if matches!(gemv_weights(quant), GemvWeights::Fragments(_)) {
            // Five M-tiles: blocks of one row alone have different shares.
            for (rows, blocks) in [(1, None), (1, Some(4)), (2, None), (4, None), (7, None)] {
                let found = of(rows, blocks, true);
                assert_eq!(alone, found, "{quant}, {rows} prepared, {blocks:?}");
            }
        }
    }
}

#[test]
#[ignore = "needs a card"]
fn gemv_blocks_take_many_m_tiles_and_long_rows() {
    let card = Card::open(Tier::Best);
    let case = |quant, columns, outputs, epilogue, rows, blocks| Case {
        quant,
        columns,
        parts: [outputs, 0, 0],
        prologue: 0,
        epilogue,
        rows,
        blocks: Some(blocks),
        prepared: false,
        codes: false,
    };
    for rows in [1, 3, 8] {
        case(QuantType::Q8_0, 64, 16 * 41, 0, rows, 2).check(&card);
        case(QuantType::Q4_0, 64, 16 * 23, 1, rows, 2).check(&card);
        case(QuantType::BF16, 64, 4 * 150 + 1, 1, rows, 3).check(&card);
        case(QuantType::Q8_0, 2560, 16, 0, rows, 1).check(&card);
        case(QuantType::Q4_0, 2816, 32, 1, rows, 1).check(&card);
        case(QuantType::Q6_K, 3840, 16, 0, rows, 1).check(&card);
        case(QuantType::BF16, 3840, 8, 0, rows, 1).check(&card);
    }
    // Rows that do not fit shared memory together.
    let case = case(QuantType::Q8_0, 21504, 16, 0, 7, 1);
    for prepared in [false, true] {
        let blocks = None;
        Case {
            blocks,
            prepared,
            ..case
        }
        .check(&card);
    }
}

/// Bit for bit what a launch of its own makes of the outputs, in rows that are there; nothing in others.
#[test]
#[ignore = "needs a card"]
fn gemv_prepares_the_rows_of_the_product_that_follows() {
    let card = Card::open(Tier::Best);
    for (quant, prepared) in [QuantType::Q8_0, QuantType::Q4_0, QuantType::Q4_K]
        .into_iter()
        .flat_map(|quant| [false, true].map(|prepared| (quant, prepared)))
    {
        for rows in [1, 2, 3, 8] {
            let case = Case {
                quant,
                columns: 1024,
                // So many that blocks have two teams of warps.
                parts: [256 * 10, 0, 0],
                prologue: 0,
                epilogue: 1,
                rows,
                // As many as clusters of eight take.
                blocks: Some(40),
                prepared,
                codes: true,
            };
            let (shape, bucket) = (case.shape(&card), rows.next_power_of_two());
            assert_eq!((shape.a_block(40), shape.batch(bucket, 40) % 4), (8, 0));
            case.check(&card);
        }
    }
}

#[test]
#[ignore = "needs a card"]
#[expect(clippy::too_many_lines, reason = "two products, one after the other")]
fn gemv_multiplies_with_routed_experts() {
    let card = Card::open(Tier::Best);
    let (experts, top_k, dim, width) = (5, 3, 320, 192);
    let mut alone: Vec<f32> = Vec::new();
    for (quant, rows, grouped) in [
        (QuantType::Q8_0, 1, false),
        (QuantType::Q4_0, 2, false),
        (QuantType::Q4_0, 3, false),
        (QuantType::Q8_0, 8, false),
        (QuantType::Q8_0, 8, true),
        (QuantType::Q4_0, 5, true),
        (QuantType::Q4_1, 7, true),
        // More rows of an expert than go together.
        (QuantType::Q8_0, 19, true),
        (QuantType::Q5_0, 64, true),
    ] {
        let weights = gemv_weights(quant);
        let shape = |columns: usize, outputs: usize, pair: bool| GemvShape {
            weights,
            columns,
            outputs,
            pair,
            codes: false,
            top_k: Some(top_k),
            ready: grouped && pair,
            normed: true,
            card: facts(&card),
        };
        let stack = |rows, columns, seed: u64| -> Vec<Matrix> {
            (0..experts)
                .map(|e| Matrix::random(quant, rows, columns, seed + e as u64))
                .collect()
        };
        let (gates, ups, downs) = (
            stack(width, dim, 1),
            stack(width, dim, 11),
            stack(dim, width, 21),
        );
        let m_tile_bytes = weights.m_tile_bytes(dim);
        let pairs = gates
            .iter()
            .zip(&ups)
            .map(|(g, u)| interleaved(&g.packed(), &u.packed(), m_tile_bytes));
        let (pairs, packed_downs): (Vec<_>, Vec<_>) =
            (pairs.collect(), downs.iter().map(Matrix::packed).collect());
        let mut route = Vec::new();
        for r in 0..rows {
            // Most experts are routed from several rows, at different places.
            route.extend((0..top_k).map(|k| ((r * 2 + k * 3) % experts) as f32));
            route.extend([0.5; 3]);
        }
        // Rows that are not there are routed to matrices that are not there.
        route.extend([1e9; 6]);
        let x = normals(5, rows * dim);
        let [x_at, route_at] = [&x, &route].map(|v| card.upload(v));
        let [pairs_at, downs_at] =
            [&pairs, &packed_downs].map(|v: &Vec<Vec<u8>>| card.upload(&v.concat()));
        let count = card.upload(&[rows as u32]);
        let middle_at = poisoned(&card, (rows + 1) * top_k * width);
        let out_at = poisoned(&card, (rows + 1) * top_k * dim);
        let at = RowsAt {
            count: count.address(),
            index: Address::NULL,
        };
        let plain = |x: &Buffer| GemvPrologueParams {
            x: x.address(),
            weight: Address::NULL,
            following_weight: Address::NULL,
            residual: Address::NULL,
            sum: Address::NULL,
            kind: 0,
            per_column: 0.0,
            eps: EPS,
            scale: 1.0,
            following_eps: EPS,
            reserved: 0,
        };
        let part = |out: &Buffer, rows: usize| OutputRowsParams {
            out: out.address(),
            first: 0,
            rows: rows as u32,
        };
        let first = shape(dim, width, true);
        let clusters = facts(&card).clusters.is_some();
        let kernel = |shape: GemvShape| {
            if grouped {
                (shape.grouped_specialization(), shape.grouped_grid())
            } else {
                let routed = specialization(weights, "plain", clusters, false);
                (routed, shape.routed_grid(rows))
            }
        };
        let padded = first.padded();
        let prepared = card.upload(&vec![0xffu8; PreparedRows::bytes_of(rows, padded)]);
        let mut input = plain(&x_at);
        if grouped {
            let [codes, scales, sums] = prepare_rows::addresses(prepared.address(), padded);
            let GemvWeights::Fragments(format) = weights else {
                panic!("experts are packed")
            };
            let params = PrepareRowsParams {
                input,
                codes,
                scales,
                sums,
                columns: dim as u32,
                padded: padded as u32,
                rows: at,
                early: 0,
                reserved: 0,
            };
            let kind = prepare_rows::specialization("plain", format.has_minimums());
            let grid = prepare_rows::grid(rows + 1, padded, None);
            card.run(&card.load(&kind), grid, &params.bytes());
            [input.x, input.weight, input.following_weight] = [codes, scales, sums];
        }
        let mut params = first.params(at, input, pairs_at.address());
        params.part_0 = part(&middle_at, width);
        params.epilogue = 1;
        params.route = route_at.address();
        params.matrix_bytes = pairs[0].len() as u64;
        params.top_k = top_k as u32;
        let (specialization_of, grid) = kernel(first);
        card.run(&card.load(&specialization_of), grid, &params.bytes());
        let second = shape(width, dim, false);
        let mut params = second.params(at, plain(&middle_at), downs_at.address());
        params.part_0 = part(&out_at, dim);
        params.route = route_at.address();
        params.matrix_bytes = packed_downs[0].len() as u64;
        params.top_k = top_k as u32;
        params.input_per_expert = 1;
        let (specialization_of, grid) = kernel(second);
        card.run(&card.load(&specialization_of), grid, &params.bytes());

        let middle = card.download::<f32>(&middle_at, (rows + 1) * top_k * width);
        let out = card.download::<f32>(&out_at, (rows + 1) * top_k * dim);
        let (mut expected_middle, mut expected) = (Vec::new(), Vec::new());
        for r in 0..rows {
            let x = quantized(&doubles(&x[r * dim..(r + 1) * dim]));
            for k in 0..top_k {
                let expert = route[r * 2 * top_k + k] as usize;
                let (gate, up) = (gates[expert].product(&x), ups[expert].product(&x));
                expected_middle.extend(gate.iter().zip(&up).map(|(&g, u)| gelu(g) * u));
                // From what was found: a code that falls to the other side would hide what is compared.
                let found = doubles(&middle[(r * top_k + k) * width..][..width]);
                expected.extend(downs[expert].product(&quantized(&found)));
            }
        }
        let error = relative_error(&middle[..rows * top_k * width], &floats(&expected_middle));
        assert!(error < 1e-5, "{quant} {rows}: {error}");
        let error = relative_error(&out[..rows * top_k * dim], &floats(&expected));
        assert!(error < 1e-5, "{quant} {rows}: {error}");
        assert!(middle[rows * top_k * width..].iter().all(|v| v.is_nan()));
        assert!(out[rows * top_k * dim..].iter().all(|v| v.is_nan()));
        // Whether blocks share experts or not.
        match (quant, rows, grouped) {
            (QuantType::Q8_0, 8, false) => alone = out,
            (QuantType::Q8_0, 8, true) => {
                assert_eq!(out[..rows * top_k * dim], alone[..rows * top_k * dim]);
            }
            _ => {}
        }
    }
}
