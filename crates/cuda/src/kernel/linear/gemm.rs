//! Twin of `kernels/linear/gemm.cu`: the native GEMM, products of large batches on the tensor cores of any card.
//!
//! A shape and a bucket of rows decide tile, grid and split-K; nothing else does, so rows come out the same in every batch of
//! their bucket. Split-K `partials` and `arrivals` are scratch that all products of a program may share, since they run one
//! after another; arrivals must be zero before the first and are left so.

#[cfg(test)]
pub(crate) mod tests;

use crate::kernel::{
    Addresses, ExpertInput, Int8Operands, Kernel, Operand, RowsAt, Specialization,
};
use crate::{
    device::{Address, Grid},
    kernel::weights::WeightOperand,
    kernel::{
        fragment::{FragmentFormat, M_TILE, PART_INPUTS},
        params::{Params, params},
    },
};

/// Outputs of a block.
const TILE_OUTPUTS: usize = 128;
/// Inputs of a stage.
const STAGE_INPUTS: usize = PART_INPUTS;
const THREADS: usize = 256;
/// Rows of a tile, by entry point.
const TILES: [usize; 3] = [16, 32, 64];
const ENTRIES: &[&str] = &["gemm_16", "gemm_32", "gemm_64"];
/// Constants that give each tile its number of pipeline stages.
const STAGES: [&str; 3] = ["STAGES_16", "STAGES_32", "STAGES_64"];
/// The most stages of a tile: small ones live on bytes in flight.
const MAX_STAGES: [usize; 3] = [8, 8, 4];
/// Half of the shared memory of a multiprocessor of the smaller cards, less what the kernel declares and the system takes.
const HALF_SHARED_BYTES: usize = (50 << 10) - (2 << 10);
/// Shared memory that every supported card gives a block, less what the kernel declares.
const SHARED_BYTES: usize = (99 << 10) - (10 << 10);
/// The fewest stages of a split.
const MIN_STAGES: usize = 4;

params! {
    pub(crate) struct GemmParams {
        rows: RowsAt,
        w: Address,
        x: Address,
        x_scales: Address,
        x_sums: Address,
        out: Address,
        codes: Address,
        scales: Address,
        sums: Address,
        partials: Address,
        arrivals: Address,
        tiles: Address,
        tile_count: Address,
        sorted: Address,
        columns: u32,
        outputs: u32,
        out_stride: u32,
        x_share: u32,
    }
}

/// The largest tile, and the blocks of it that share a multiprocessor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GemmTile {
    /// 64 rows; two blocks, for which there are registers, hide each other's waits.
    #[default]
    TwoOf64,
    /// 64 rows; one block, whose pipeline has all the stages there is shared memory for.
    OneOf64,
    /// 32 rows: more blocks for the same product, each of which reads its weights for fewer rows.
    Of32,
}

impl GemmTile {
    /// Blocks that share a multiprocessor.
    fn blocks_together(self) -> usize {
        match self {
            GemmTile::OneOf64 => 1,
            GemmTile::TwoOf64 | GemmTile::Of32 => 2,
        }
    }

    /// The entry point whose tile suits this many rows.
    fn entry(self, rows: usize) -> usize {
        let tiles = match self {
            GemmTile::Of32 => &TILES[..2],
            GemmTile::TwoOf64 | GemmTile::OneOf64 => &TILES[..],
        };
        let fits = tiles.iter().position(|&tile| rows <= tile);
        fits.unwrap_or(tiles.len() - 1)
    }
}

/// Format of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmWeights {
    Fragments(FragmentFormat),
    /// Row-major.
    F16,
}

impl GemmWeights {
    fn name(self) -> &'static str {
        match self {
            GemmWeights::Fragments(format) => format.name(),
            GemmWeights::F16 => "f16",
        }
    }

    /// Bytes of a stage of an M-tile in shared memory.
    fn m_tile_stage_bytes(self) -> usize {
        match self {
            GemmWeights::Fragments(format) => format.part_bytes(),
            GemmWeights::F16 => M_TILE * STAGE_INPUTS * 2,
        }
    }

    /// Bytes of a stage of a token in shared memory: its values, and of int8 a scale per 32 of them.
    fn token_stage_bytes(self) -> usize {
        match self {
            GemmWeights::Fragments(_) => STAGE_INPUTS + 8,
            GemmWeights::F16 => STAGE_INPUTS * 2,
        }
    }

    /// Stages of a tile's pipeline, and bytes of shared memory. Where two blocks are to share a multiprocessor, two of the largest tile
    /// fit on any card where that leaves three stages.
    fn stages(self, entry: usize, largest: GemmTile) -> (usize, usize) {
        let stage = TILE_OUTPUTS / M_TILE * self.m_tile_stage_bytes()
            + TILES[entry] * self.token_stage_bytes();
        let offsets = self.offset_bytes(entry);
        let fitting = |bytes: usize| ((bytes - offsets) / stage).min(MAX_STAGES[entry]);
        let stages = match fitting(HALF_SHARED_BYTES) {
            half if TILES[entry] == 64 && largest.blocks_together() > 1 && half >= 3 => half,
            _ => fitting(SHARED_BYTES),
        };
        // Two go between barriers where there are four.
        let stages = if stages > 3 { stages & !1 } else { stages };
        (stages, stages * stage + offsets)
    }

    /// Bytes of the offsets of K-blocks on their way, which a pipeline of up to four stages has one of, longer ones two.
    fn offset_bytes(self, entry: usize) -> usize {
        match self {
            GemmWeights::Fragments(format) if format.has_minimums() => {
                let k_blocks = MAX_STAGES[entry].div_ceil(4);
                k_blocks * (TILES[entry] * 32 + TILE_OUTPUTS * 16)
            }
            _ => 0,
        }
    }
}

/// Epilogue: what becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmEpilogue {
    F32,
    /// M-tiles alternate gates and ups: `gelu(gate) * up` in int8.
    Geglu,
}

/// Everything that grids and scratch depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmShape {
    pub(crate) weights: GemmWeights,
    pub(crate) epilogue: GemmEpilogue,
    pub(crate) columns: usize,
    /// Int8 terms that an activation is the sum of: 1, or 2 in `Int8HiLo`.
    pub(crate) terms: usize,
    /// Rows of the weights: gates and ups together.
    pub(crate) outputs: usize,
    /// Of the target.
    pub(crate) multiprocessors: usize,
    pub(crate) largest: GemmTile,
    /// For the grouped GEMM over routed experts.
    pub(crate) groups: Option<ExpertGroups>,
}

/// Experts, stacked one after another, of which `top_k` are routed per row. Outputs have one row per token-expert pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertGroups {
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) tiles: ExpertTiles,
}

/// Token-expert pairs of the tiles that an expert's are cut into; its last may have fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertTiles {
    /// As suits an expert's share of the rows, for a kernel whose tiles cost as much where they are not full.
    ByShare,
    /// Always so many.
    Of(usize),
}

impl ExpertGroups {
    /// The entry point whose tile suits an expert's share of this many rows.
    pub(crate) fn entry(self, rows: usize) -> usize {
        // Experts have unequal shares, and a tile that is not full costs as much as a full one.
        match rows * self.top_k / self.experts {
            0..=6 => 0,
            7..=20 => 1,
            _ => 2,
        }
    }

    /// Token-expert pairs of a tile.
    pub(crate) fn tile(self, rows: usize) -> usize {
        match self.tiles {
            ExpertTiles::ByShare => TILES[self.entry(rows)],
            ExpertTiles::Of(tile) => tile,
        }
    }

    /// As many tiles as there can be: every expert's last may have one pair.
    pub(crate) fn max_tiles(self, rows: usize) -> usize {
        let pairs = rows * self.top_k;
        let experts = self.experts.min(pairs);
        experts + (pairs - experts) / self.tile(rows)
    }
}

/// The permutation of tokens by expert, which `MoePermute` writes: token-expert pairs (one word each), tiles (three words each),
/// and how many there are (one word).
#[derive(Clone, Copy, Debug)]
pub(crate) struct PermutationOperands {
    pub(crate) sorted: Operand,
    pub(crate) tiles: Operand,
    pub(crate) tile_count: Operand,
}

/// Scratch that a product needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmScratch {
    pub(crate) partials: usize,
    pub(crate) arrivals: usize,
}

impl GemmShape {
    fn stages(&self) -> usize {
        (self.terms * self.columns).div_ceil(STAGE_INPUTS)
    }

    fn output_tiles(&self) -> usize {
        self.outputs.div_ceil(TILE_OUTPUTS)
    }

    fn entry(&self, rows: usize) -> usize {
        self.groups
            .map_or_else(|| self.largest.entry(rows), |groups| groups.entry(rows))
    }

    fn row_tiles(&self, rows: usize) -> usize {
        self.groups.map_or_else(
            || rows.div_ceil(TILES[self.largest.entry(rows)]),
            |groups| groups.max_tiles(rows),
        )
    }

    /// Split-K: how often the inputs are split, for the least estimated time. Starting and reducing cost as much as some
    /// stages. Small tiles wait for memory, which multiprocessors share evenly: the one with most blocks is the last. Large
    /// ones compute in waves; a wave that leaves every multiprocessor a block at most is the faster for it.
    pub(crate) fn splits(&self, rows: usize) -> usize {
        if self.groups.is_some() {
            // The number of tiles is not known here, and there are many.
            return 1;
        }
        let tile = TILES[self.entry(rows)];
        let tiles = self.row_tiles(rows) * self.output_tiles();
        let cost = |splits: usize| {
            let (blocks, stages) = (tiles * splits, self.stages().div_ceil(splits) as f64);
            let partials = if splits > 1 { splits as f64 } else { 0.0 };
            if tile <= 32 {
                let busiest = blocks.div_ceil(self.multiprocessors) as f64;
                return busiest * (stages + 2.0) + if splits > 1 { 6.0 + partials } else { 0.0 };
            }
            let together = self.multiprocessors * self.largest.blocks_together();
            let last_wave = match blocks % together {
                0 => 0.0,
                left if left <= self.multiprocessors => 0.6,
                _ => 1.0,
            };
            let reduction = if splits > 1 { 1.5 } else { 0.0 };
            ((blocks / together) as f64 + last_wave) * (stages + 1.0 + reduction + 0.4 * partials)
        };
        let max_splits = (self.stages() / MIN_STAGES).clamp(1, 16);
        (1..=max_splits)
            .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
            .expect("one at least")
    }

    pub(crate) fn grid(&self, rows: usize) -> Grid {
        let entry = self.entry(rows);
        Grid {
            entry,
            blocks: (
                self.row_tiles(rows),
                self.output_tiles() * self.splits(rows),
            ),
            threads: THREADS,
            shared_bytes: self.weights.stages(entry, self.largest).1,
            pdl: false,
            cluster: 1,
        }
    }

    pub(crate) fn scratch(&self, rows: usize) -> GemmScratch {
        let (tile, splits) = (TILES[self.entry(rows)], self.splits(rows));
        if splits == 1 {
            return GemmScratch {
                partials: 0,
                arrivals: 0,
            };
        }
        let tiles = self.row_tiles(rows) * self.output_tiles();
        GemmScratch {
            partials: tiles * splits * tile * TILE_OUTPUTS * 4,
            arrivals: tiles * 4,
        }
    }

    pub(crate) fn specialization(&self) -> Specialization {
        let rows = match self.groups {
            Some(_) => "grouped",
            None => "dense",
        };
        with_largest(
            self.largest,
            (self.weights, self.epilogue),
            rows,
            self.terms,
        )
    }
}

fn specialization(
    weights: GemmWeights,
    epilogue: GemmEpilogue,
    rows: &'static str,
    terms: usize,
) -> Specialization {
    with_largest(GemmTile::default(), (weights, epilogue), rows, terms)
}

/// The same for another tile.
fn with_largest(
    largest: GemmTile,
    (weights, epilogue): (GemmWeights, GemmEpilogue),
    rows: &'static str,
    terms: usize,
) -> Specialization {
    let epilogue = match epilogue {
        GemmEpilogue::F32 => "f32",
        GemmEpilogue::Geglu => "geglu_pair",
    };
    let mut constants = vec![
        ("WEIGHTS", weights.name().to_owned()),
        ("EPILOGUE", epilogue.to_owned()),
        ("ROWS", rows.to_owned()),
        ("TERMS", terms.to_string()),
        (
            "M_TILE_STAGE_BYTES",
            weights.m_tile_stage_bytes().to_string(),
        ),
    ];
    for (entry, name) in STAGES.into_iter().enumerate() {
        constants.push((name, weights.stages(entry, largest).0.to_string()));
    }
    Specialization {
        kernel: "gemm",
        entries: ENTRIES,
        constants,
        params_bytes: GemmParams::BYTES,
    }
}

/// Every specialization that lowering may choose.
pub(crate) fn specializations() -> Vec<Specialization> {
    let f16 = specialization(GemmWeights::F16, GemmEpilogue::F32, "dense", 1);
    let mut all = vec![f16];
    for weights in FragmentFormat::ALL.map(GemmWeights::Fragments) {
        for epilogue in [GemmEpilogue::F32, GemmEpilogue::Geglu] {
            all.extend(["dense", "grouped"].map(|rows| specialization(weights, epilogue, rows, 1)));
        }
        all.push(specialization(weights, GemmEpilogue::F32, "dense", 2));
    }
    all
}

/// Activations: int8 for fragments, f16 for f16 weights.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GemmInput {
    /// `Int8`, or `Int8HiLo` if the shape has two terms.
    Int8(Int8Operands),
    F16 {
        values: Operand,
        /// One factor per row.
        factors: Option<Operand>,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum GemmOutput {
    /// From `column` on, `stride` floats from row to row.
    F32 {
        out: Operand,
        column: usize,
        stride: usize,
    },
    Int8(Int8Operands),
}

#[derive(Debug)]
pub(crate) struct Gemm {
    pub(crate) shape: GemmShape,
    pub(crate) x: GemmInput,
    pub(crate) w: WeightOperand,
    pub(crate) out: GemmOutput,
    pub(crate) partials: Operand,
    pub(crate) arrivals: Operand,
    /// The permutation, and which rows of `x` there are, if the shape has groups.
    pub(crate) groups: Option<(PermutationOperands, ExpertInput)>,
}

impl Kernel for Gemm {
    fn specialization(&self) -> Specialization {
        self.shape.specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        self.shape.grid(rows)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let operand = |operand: Operand| at.operand(operand);
        let (x, x_scales, x_sums) = match self.x {
            GemmInput::Int8(x) => (operand(x.codes), operand(x.scales), operand(x.sums)),
            GemmInput::F16 { values, factors } => {
                let factors = factors.map_or(Address::NULL, operand);
                (operand(values), factors, Address::NULL)
            }
        };
        let none = Address::NULL;
        let (out, out_stride, [codes, scales, sums]) = match self.out {
            GemmOutput::F32 {
                out,
                column,
                stride,
            } => (operand(out).offset(4 * column), stride, [none; 3]),
            GemmOutput::Int8(out) => (none, 0, out.all().map(operand)),
        };
        let ([sorted, tiles, tile_count], x_share) = match self.groups {
            None => ([none; 3], 1),
            Some((groups, x_rows)) => {
                let top_k = self.shape.groups.map_or(1, |groups| groups.top_k);
                let x_share = match x_rows {
                    ExpertInput::PerToken => top_k,
                    ExpertInput::PerExpert => 1,
                };
                let operands = [groups.sorted, groups.tiles, groups.tile_count];
                (operands.map(operand), x_share)
            }
        };
        GemmParams {
            rows,
            w: at.matrix(&self.w).start,
            x,
            x_scales,
            x_sums,
            out,
            codes,
            scales,
            sums,
            partials: operand(self.partials),
            arrivals: operand(self.arrivals),
            tiles,
            tile_count,
            sorted,
            columns: self.shape.columns as u32,
            outputs: self.shape.outputs as u32,
            out_stride: out_stride as u32,
            x_share: x_share as u32,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        vec![self.w.clone()]
    }

    fn reads(&self) -> Vec<Operand> {
        let mut reads = match self.x {
            GemmInput::Int8(x) => x.all().to_vec(),
            GemmInput::F16 { values, factors } => [values].into_iter().chain(factors).collect(),
        };
        if let Some((groups, _)) = self.groups {
            reads.extend([groups.sorted, groups.tiles, groups.tile_count]);
        }
        reads
    }

    fn writes(&self) -> Vec<Operand> {
        match self.out {
            GemmOutput::F32 { out, .. } => vec![out],
            GemmOutput::Int8(out) => out.all().to_vec(),
        }
    }
}
