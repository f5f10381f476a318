//! Twin of `kernels/linear/gemm_medium.cu` and, on Hopper, `gemm_medium_sm90.cu`: products of 9 to 64 rows (there to 32), weights
//! packed, activations in f16. A worker is a warp with pairs of M-tiles there, a warpgroup with slabs of four here; either is a tile.
//!
//! A shape and a bucket of rows decide how M-tiles and inputs are shared among blocks and warps; nothing else does, so rows come
//! out the same in every batch of their bucket. Split-K `partials` and `arrivals` are scratch that all products of a program may
//! share, since they run one after another; arrivals must be zero before the first and are left so.

#[cfg(test)]
pub(crate) mod tests;

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization};
use crate::{
    device::{Address, Grid},
    kernel::{activation::TILE_TOKENS, weights::WeightOperand},
    kernel::{
        fragment::{FragmentFormat, M_TILE, PART_INPUTS},
        params::{Params, params},
    },
};

/// The most rows of a launch.
pub(crate) const MAX_ROWS: usize = 64;
/// Inputs of a stage.
const STAGE_INPUTS: usize = PART_INPUTS;
const ENTRIES: &[&str] = &[
    "gemm_medium_16",
    "gemm_medium_32",
    "gemm_medium_48",
    "gemm_medium_64",
];
const HOPPER_ENTRIES: &[&str] = &["gemm_medium_sm90_16", "gemm_medium_sm90_32"];
/// Rows of the first entry point, and from each to the next.
const ENTRY_ROWS: usize = 16;
/// Shared memory that the kernel declares, with room for its alignment.
const DECLARED_BYTES: usize = 1 << 10;
/// Blocks with this much shared memory have deep rings.
const LARGE_SHARED_BYTES: usize = 160 << 10;

params! {
    pub(crate) struct TilingParams {
        run: u32,
        split_stages: u32,
        whole_tiles: u32,
    }
}

params! {
    pub(crate) struct GemmMediumParams {
        rows: RowsAt,
        w: Address,
        x: Address,
        out: Address,
        partials: Address,
        arrivals: Address,
        columns: u32,
        outputs: u32,
        out_stride: u32,
        m_tiles: u32,
        scale: f32,
        of_16_rows: TilingParams,
        of_32_rows: TilingParams,
        of_48_rows: TilingParams,
        of_64_rows: TilingParams,
    }
}

/// Epilogue: what becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmMediumEpilogue {
    F32,
    /// M-tiles alternate gates and ups: either in f16, all gates of a row before its ups.
    F16Pair,
}

/// The most stages of a split that warpgroups take.
const MAX_SPLIT_STAGES: usize = 128;

/// Everything that grids and scratch depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmMediumShape {
    pub(crate) format: FragmentFormat,
    pub(crate) epilogue: GemmMediumEpilogue,
    pub(crate) columns: usize,
    /// Rows of the weights: gates and ups together.
    pub(crate) outputs: usize,
    /// Of the target, as the shared memory of a block.
    pub(crate) multiprocessors: usize,
    pub(crate) shared_bytes: usize,
    pub(crate) kernel: GemmMediumKernel,
}

/// Kernel that multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmMediumKernel {
    /// `gemm_medium.cu`: a warp multiplies pairs of M-tiles.
    Warps,
    /// `gemm_medium_sm90.cu`: a warpgroup multiplies slabs of four M-tiles, by wgmma.
    Warpgroups,
}

impl GemmMediumKernel {
    /// M-tiles of a tile, which a worker multiplies at a time.
    fn m_tiles(self) -> usize {
        match self {
            GemmMediumKernel::Warps => 2,
            GemmMediumKernel::Warpgroups => 4,
        }
    }

    fn tile_rows(self) -> usize {
        self.m_tiles() * M_TILE
    }

    /// The most rows of a launch.
    pub(crate) fn max_rows(self) -> usize {
        match self {
            GemmMediumKernel::Warps => MAX_ROWS,
            GemmMediumKernel::Warpgroups => TILE_TOKENS,
        }
    }

    /// Workers of a block, each with equally many stages.
    fn workers(self) -> usize {
        match self {
            GemmMediumKernel::Warps => 8,
            GemmMediumKernel::Warpgroups => 4,
        }
    }

    fn threads(self) -> usize {
        match self {
            GemmMediumKernel::Warps => 8 * 32,
            GemmMediumKernel::Warpgroups => 4 * 128,
        }
    }

    /// Bytes of a token in a slot of sums: a tile's rows and a gap, so that a warp's stores meet all banks.
    fn slot_token_bytes(self) -> usize {
        4 * (self.tile_rows() + 4)
    }

    /// Bytes behind each token's activations in shared memory, so that neighbours' operands meet all banks; wgmma takes lines of
    /// a stage that are swizzled.
    fn token_padding_bytes(self, format: FragmentFormat) -> usize {
        match (self, format) {
            (GemmMediumKernel::Warpgroups, _) => 0,
            (GemmMediumKernel::Warps, format) if format.has_short_steps() => 32,
            (GemmMediumKernel::Warps, _) => 64,
        }
    }

    /// What it takes for activations to start where the kernel wants them.
    fn alignment_bytes(self) -> usize {
        match self {
            GemmMediumKernel::Warps => 0,
            GemmMediumKernel::Warpgroups => 1 << 10,
        }
    }
}

/// Shares of blocks and warps in a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Tiles of a block, and blocks that have one split of the inputs.
    pub(crate) run: usize,
    pub(crate) runs: usize,
    /// Stages of a split, and splits.
    pub(crate) split_stages: usize,
    pub(crate) splits: usize,
    /// Whether a worker's piece is whole tiles: nothing to add up, at the price of unequal pieces.
    pub(crate) whole_tiles: bool,
}

/// Scratch that a product needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmMediumScratch {
    pub(crate) partials: usize,
    pub(crate) arrivals: usize,
}

/// Stages of a warp's cp.async ring: as many as keep the memory busy, or as small cards have room for. Sixteen warps need fewer
/// each than eight, and leave more room for activations.
fn ring(kernel: GemmMediumKernel, format: FragmentFormat, shared_bytes: usize) -> usize {
    use FragmentFormat::{F4, K2, K4, K5, K6, M4, M5, N4, Q4, Q5, Q8, T3, T4};
    let (warpgroups, large, small) = match format {
        Q8 => (3, 4, 2),
        Q5 | M5 | K5 | K6 | T4 | F4 => (4, 5, 3),
        Q4 | N4 | M4 | K2 | K4 | T3 => (5, 6, 3),
    };
    match kernel {
        GemmMediumKernel::Warpgroups => warpgroups,
        GemmMediumKernel::Warps if shared_bytes >= LARGE_SHARED_BYTES => large,
        GemmMediumKernel::Warps => small,
    }
}

/// Number of the entry point for this many rows.
pub(crate) fn entry(rows: usize) -> usize {
    rows.clamp(1, MAX_ROWS).div_ceil(ENTRY_ROWS) - 1
}

impl GemmMediumShape {
    pub(crate) fn m_tiles(&self) -> usize {
        match self.epilogue {
            GemmMediumEpilogue::F32 => self.outputs.div_ceil(M_TILE),
            GemmMediumEpilogue::F16Pair => 2 * (self.outputs / 2).div_ceil(M_TILE),
        }
    }

    fn stages(&self) -> usize {
        self.columns.div_ceil(STAGE_INPUTS)
    }

    fn ring_bytes(&self) -> usize {
        let stages = ring(self.kernel, self.format, self.shared_bytes);
        self.kernel.workers() * stages * self.unit_bytes()
    }

    /// Bytes of weights of a stage of a tile.
    fn unit_bytes(&self) -> usize {
        self.kernel.m_tiles() * self.format.part_bytes()
    }

    fn tiles(&self) -> usize {
        self.m_tiles().div_ceil(self.kernel.m_tiles())
    }

    /// Dynamic shared memory: rings, sums of workers that go on to another tile, and activations, in whose place all workers'
    /// last sums lie in the end.
    fn shared_bytes(&self, entry: usize, tiling: &Tiling) -> usize {
        let rows = (entry + 1) * ENTRY_ROWS;
        let padding = self.kernel.token_padding_bytes(self.format);
        let token = 2 * STAGE_INPUTS * tiling.split_stages + padding;
        let slot = rows * self.kernel.slot_token_bytes();
        let workers = self.kernel.workers();
        let (crossing, last) = if tiling.whole_tiles {
            (0, 0)
        } else {
            ((tiling.run - 1).min(workers), workers)
        };
        let sums = crossing * slot + (rows * token).max(last * slot);
        self.ring_bytes() + sums + self.kernel.alignment_bytes()
    }

    /// Estimated time of the slowest block, in bytes of weights. What comes from L2, activations and partials, is about two and
    /// a half times as fast; meeting at a counter takes as long as some stages.
    fn cost(&self, entry: usize, tiling: &Tiling) -> f64 {
        const L2: f64 = 0.4;
        const MEETING: f64 = 60_000.0;
        let rows = (entry + 1) * ENTRY_ROWS;
        let units = tiling.run * tiling.split_stages;
        let workers = self.kernel.workers();
        let slowest = if tiling.whole_tiles {
            tiling.run.div_ceil(workers) * tiling.split_stages
        } else {
            units.div_ceil(workers)
        };
        let weights = (slowest * workers * self.unit_bytes()) as f64;
        let activations = (rows * tiling.split_stages * STAGE_INPUTS * 2) as f64;
        let reduction = if tiling.splits > 1 {
            let sums = (tiling.run * self.kernel.tile_rows() * rows * 4) as f64;
            MEETING + L2 * sums * (1.0 + tiling.splits as f64)
        } else {
            0.0
        };
        weights + L2 * activations + reduction
    }

    /// The tiling of least cost whose blocks are all resident at once. Where activations do not fit such, blocks take turns: no
    /// block waits for another.
    pub(crate) fn tiling(&self, entry: usize) -> Tiling {
        let turns = [1, 2, 4, 8, 16, 32, 64];
        let found = turns
            .into_iter()
            .find_map(|turns| self.tiling_in(turns, entry));
        found.expect("a split of one stage fits")
    }

    fn tiling_in(&self, turns: usize, entry: usize) -> Option<Tiling> {
        let (tiles, stages) = (self.tiles(), self.stages());
        let available = self.shared_bytes - DECLARED_BYTES;
        let mut best: Option<(f64, Tiling)> = None;
        for wanted_runs in 1..=tiles.min(self.multiprocessors) {
            let run = tiles.div_ceil(wanted_runs);
            let runs = tiles.div_ceil(run);
            for wanted_splits in 1..=(turns * self.multiprocessors / runs).min(stages) {
                let split_stages = stages.div_ceil(wanted_splits);
                let splits = stages.div_ceil(split_stages);
                for whole_tiles in [true, false] {
                    let tiling = Tiling {
                        run,
                        runs,
                        split_stages,
                        splits,
                        whole_tiles,
                    };
                    if self.shared_bytes(entry, &tiling) > available
                        || split_stages > MAX_SPLIT_STAGES
                    {
                        continue;
                    }
                    let cost = self.cost(entry, &tiling);
                    if best.is_none_or(|(least, _)| cost < least) {
                        best = Some((cost, tiling));
                    }
                }
            }
        }
        best.map(|(_, tiling)| tiling)
    }

    pub(crate) fn grid(&self, rows: usize, pdl: bool) -> Grid {
        let entry = entry(rows);
        let tiling = self.tiling(entry);
        Grid {
            entry,
            shared_bytes: self.shared_bytes(entry, &tiling),
            pdl,
            ..Grid::new((tiling.runs, tiling.splits), self.kernel.threads())
        }
    }

    /// Enough for every bucket of up to this many rows.
    pub(crate) fn scratch(&self, max_rows: usize) -> GemmMediumScratch {
        let mut scratch = GemmMediumScratch {
            partials: 0,
            arrivals: 0,
        };
        for entry in 0..=entry(max_rows.min(self.kernel.max_rows())) {
            let tiling = self.tiling(entry);
            if tiling.splits > 1 {
                let rows = (entry + 1) * ENTRY_ROWS;
                let tile = self.kernel.tile_rows() * rows * size_of::<f32>();
                let partials = tiling.runs * tiling.splits * tiling.run * tile;
                scratch.partials = scratch.partials.max(partials);
                scratch.arrivals = scratch.arrivals.max(tiling.runs * size_of::<u32>());
            }
        }
        scratch
    }

    /// Of an entry point; of the last where the kernel has no such.
    pub(crate) fn tiling_params(&self, number: usize) -> TilingParams {
        let tiling = self.tiling(number.min(entry(self.kernel.max_rows())));
        TilingParams {
            run: tiling.run as u32,
            split_stages: tiling.split_stages as u32,
            whole_tiles: u32::from(tiling.whole_tiles),
        }
    }

    pub(crate) fn specialization(&self) -> Specialization {
        specialization(self.kernel, self.format, self.epilogue, self.shared_bytes)
    }
}

fn specialization(
    kernel: GemmMediumKernel,
    format: FragmentFormat,
    epilogue: GemmMediumEpilogue,
    shared_bytes: usize,
) -> Specialization {
    let epilogue = match epilogue {
        GemmMediumEpilogue::F32 => "f32",
        GemmMediumEpilogue::F16Pair => "f16_pair",
    };
    let mut constants = vec![
        ("WEIGHTS", format.name().to_owned()),
        ("EPILOGUE", epilogue.to_owned()),
        ("RING", ring(kernel, format, shared_bytes).to_string()),
        ("M_TILE_STAGE_BYTES", format.part_bytes().to_string()),
        ("SLOT_TOKEN_BYTES", kernel.slot_token_bytes().to_string()),
    ];
    let (kernel, entries) = match kernel {
        GemmMediumKernel::Warps => {
            let padding = kernel.token_padding_bytes(format);
            constants.push(("TOKEN_PADDING_BYTES", padding.to_string()));
            ("gemm_medium", ENTRIES)
        }
        GemmMediumKernel::Warpgroups => ("gemm_medium_sm90", HOPPER_ENTRIES),
    };
    Specialization {
        kernel,
        entries,
        constants,
        params_bytes: GemmMediumParams::BYTES,
    }
}

/// Every specialization that lowering may choose, on Hopper or not.
pub(crate) fn specializations(hopper: bool) -> Vec<Specialization> {
    let (kernel, shared) = if hopper {
        (GemmMediumKernel::Warpgroups, &[LARGE_SHARED_BYTES][..])
    } else {
        (GemmMediumKernel::Warps, &[0, LARGE_SHARED_BYTES][..])
    };
    let mut all = Vec::new();
    for format in FragmentFormat::ALL {
        for epilogue in [GemmMediumEpilogue::F32, GemmMediumEpilogue::F16Pair] {
            all.extend(
                (shared.iter()).map(|&shared| specialization(kernel, format, epilogue, shared)),
            );
        }
    }
    all
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum GemmMediumOut {
    /// From `column` on, `stride` floats from row to row.
    F32 {
        out: Operand,
        column: usize,
        stride: usize,
    },
    /// `scale` times gates and ups, rows of as many f16 as the shape has outputs.
    F16Pair { out: Operand, scale: f32 },
}

#[derive(Debug)]
pub(crate) struct GemmMedium {
    pub(crate) shape: GemmMediumShape,
    /// F16 `[rows, columns]`; token tiles for warpgroups.
    pub(crate) x: Operand,
    pub(crate) w: WeightOperand,
    pub(crate) out: GemmMediumOut,
    pub(crate) partials: Operand,
    pub(crate) arrivals: Operand,
    /// `x` has one factor per row that is still missing, hence the output, too.
    pub(crate) scaled: bool,
    /// Launched with PDL.
    pub(crate) pdl: bool,
}

impl Kernel for GemmMedium {
    fn specialization(&self) -> Specialization {
        self.shape.specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        self.shape.grid(rows, self.pdl)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let shape = &self.shape;
        let (out, out_stride, scale) = match self.out {
            GemmMediumOut::F32 {
                out,
                column,
                stride,
            } => (at.operand(out).offset(4 * column), stride, 1.0),
            GemmMediumOut::F16Pair { out, scale } => (at.operand(out), shape.outputs, scale),
        };
        GemmMediumParams {
            rows,
            w: at.matrix(&self.w).start,
            x: at.operand(self.x),
            out,
            partials: at.operand(self.partials),
            arrivals: at.operand(self.arrivals),
            columns: shape.columns as u32,
            outputs: shape.outputs as u32,
            out_stride: out_stride as u32,
            m_tiles: shape.m_tiles() as u32,
            scale,
            of_16_rows: shape.tiling_params(0),
            of_32_rows: shape.tiling_params(1),
            of_48_rows: shape.tiling_params(2),
            of_64_rows: shape.tiling_params(3),
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        vec![self.w.clone()]
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Operand> {
        match self.out {
            GemmMediumOut::F32 { out, .. } | GemmMediumOut::F16Pair { out, .. } => vec![out],
        }
    }

    fn is_scaled(&self) -> bool {
        self.scaled
    }
}
