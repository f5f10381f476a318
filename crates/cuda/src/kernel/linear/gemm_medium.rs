//! Twin of `kernels/linear/gemm_medium.cu` and, on Hopper, `gemm_medium_sm90.cu`: products of 9 to 64 rows, weights packed,
//! activations in f16.
//!
//! A shape and a bucket of rows decide how M-tiles and inputs are shared among blocks and warps; nothing else does, so rows come
//! out the same in every batch of their bucket. Split-K `partials` and `arrivals` are scratch that all products of a program may
//! share, since they run one after another; arrivals must be zero before the first and are left so.

#[cfg(test)]
pub(crate) mod tests;
mod warpgroups;

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization};
use crate::{
    device::{Address, ClusterCapacity, Grid},
    kernel::weights::WeightOperand,
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
const HOPPER_ENTRIES: &[&str] = &[
    "gemm_medium_sm90_16",
    "gemm_medium_sm90_32",
    "gemm_medium_sm90_48",
    "gemm_medium_sm90_64",
];
/// Rows of the first entry point, and from each to the next.
const ENTRY_ROWS: usize = 16;
/// Shared memory that the kernel declares, with room for its alignment.
const DECLARED_BYTES: usize = 1 << 10;
/// Blocks with this much shared memory have deep rings.
const LARGE_SHARED_BYTES: usize = 160 << 10;

params! {
    struct TilingParams {
        run: u32,
        split_stages: u32,
        sharing: u32,
    }
}

params! {
    struct WarpsParams {
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

/// Where a launch finds its operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) rows: RowsAt,
    pub(crate) w: Address,
    pub(crate) x: Address,
    pub(crate) out: Address,
    /// From row to row, in numbers.
    pub(crate) out_stride: usize,
    pub(crate) scale: f32,
    pub(crate) partials: Address,
    pub(crate) arrivals: Address,
}

/// Epilogue: what becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmMediumEpilogue {
    F32,
    /// M-tiles alternate gates and ups: either in f16, all gates of a row before its ups.
    F16Pair,
}

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
    pub(crate) clusters: Option<ClusterCapacity>,
    pub(crate) kernel: GemmMediumKernel,
}

/// Kernel that multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmMediumKernel {
    /// `gemm_medium.cu`: a warp multiplies pairs of M-tiles.
    Warps,
    /// `gemm_medium_sm90.cu`: a warpgroup multiplies four M-tiles at a time, by wgmma.
    Warpgroups,
}

/// M-tiles of a tile, which a warp of `gemm_medium.cu` multiplies at a time.
const TILE_M_TILES: usize = 2;
const TILE_ROWS: usize = TILE_M_TILES * M_TILE;
/// Warps of a block there, each with equally many stages.
const WARPS: usize = 8;

impl GemmMediumKernel {
    fn threads(self) -> usize {
        match self {
            GemmMediumKernel::Warps => WARPS * 32,
            GemmMediumKernel::Warpgroups => warpgroups::THREADS,
        }
    }

    /// Bytes of a token's sums in shared memory: those of a tile, or of a warpgroup, and a gap, so that a warp's stores meet all banks.
    fn slot_token_bytes(self) -> usize {
        match self {
            GemmMediumKernel::Warps => 4 * (TILE_ROWS + 4),
            GemmMediumKernel::Warpgroups => 4 * (4 * M_TILE + 4),
        }
    }
}

/// Bytes behind each token's activations in the shared memory of `gemm_medium.cu`, so that neighbours' operands meet all banks.
fn token_padding_bytes(format: FragmentFormat) -> usize {
    if format.has_short_steps() { 32 } else { 64 }
}

/// Shares of blocks and warps in a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Tiles of a block, or M-tiles at a time of warpgroups, and blocks that have one split of the inputs.
    pub(crate) run: usize,
    pub(crate) runs: usize,
    /// Stages of a split (of warpgroups twice as long), and splits.
    pub(crate) split_stages: usize,
    pub(crate) splits: usize,
    pub(crate) sharing: Sharing,
}

/// How workers of a block share its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Warps have equal pieces.
    Pieces,
    /// Warps have whole tiles: nothing to add up, at the price of unequal pieces.
    WholeTiles,
    /// So many warpgroups have M-tiles of their own, the others other stages of theirs.
    Groups(usize),
}

impl Sharing {
    /// Of warpgroups.
    fn m_groups(self) -> usize {
        match self {
            Sharing::Groups(m_groups) => m_groups,
            Sharing::Pieces | Sharing::WholeTiles => 1,
        }
    }
}

/// Scratch that a product needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmMediumScratch {
    pub(crate) partials: usize,
    pub(crate) arrivals: usize,
}

/// Stages of a warp's cp.async ring: as many as keep the memory busy, or as small cards have room for.
fn ring(format: FragmentFormat, shared_bytes: usize) -> usize {
    use FragmentFormat::{F4, K2, K4, K5, K6, M4, M5, N4, Q4, Q5, Q8, T1, T2, T3, T4};
    let (large, small) = match format {
        Q8 => (4, 2),
        Q5 | M5 | K5 | K6 | T4 | F4 => (5, 3),
        Q4 | N4 | M4 | K2 | K4 | T3 | T2 | T1 => (6, 3),
    };
    if shared_bytes >= LARGE_SHARED_BYTES {
        large
    } else {
        small
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
        let stages = ring(self.format, self.shared_bytes);
        WARPS * stages * self.unit_bytes()
    }

    /// Bytes of weights of a stage of a tile.
    fn unit_bytes(&self) -> usize {
        TILE_M_TILES * self.format.part_bytes()
    }

    fn tiles(&self) -> usize {
        self.m_tiles().div_ceil(TILE_M_TILES)
    }

    /// Dynamic shared memory, of warps: rings, sums of workers that go on to another tile, and activations, in whose place all workers'
    /// last sums lie in the end.
    fn shared_bytes(&self, entry: usize, tiling: &Tiling) -> usize {
        if self.kernel == GemmMediumKernel::Warpgroups {
            return warpgroups::SHARED_BYTES;
        }
        let rows = (entry + 1) * ENTRY_ROWS;
        let token = 2 * STAGE_INPUTS * tiling.split_stages + token_padding_bytes(self.format);
        let slot = rows * self.kernel.slot_token_bytes();
        let (crossing, last) = if tiling.sharing == Sharing::WholeTiles {
            (0, 0)
        } else {
            ((tiling.run - 1).min(WARPS), WARPS)
        };
        let sums = crossing * slot + (rows * token).max(last * slot);
        self.ring_bytes() + sums
    }

    /// Estimated time of the slowest block, in bytes of weights. What comes from L2, activations and partials, is about two and
    /// a half times as fast; meeting at a counter takes as long as some stages.
    fn cost(&self, entry: usize, tiling: &Tiling) -> f64 {
        const L2: f64 = 0.4;
        const MEETING: f64 = 60_000.0;
        let rows = (entry + 1) * ENTRY_ROWS;
        let units = tiling.run * tiling.split_stages;
        let slowest = if tiling.sharing == Sharing::WholeTiles {
            tiling.run.div_ceil(WARPS) * tiling.split_stages
        } else {
            units.div_ceil(WARPS)
        };
        let weights = (slowest * WARPS * self.unit_bytes()) as f64;
        let activations = (rows * tiling.split_stages * STAGE_INPUTS * 2) as f64;
        let reduction = if tiling.splits > 1 {
            let sums = (tiling.run * TILE_ROWS * rows * 4) as f64;
            MEETING + L2 * sums * (1.0 + tiling.splits as f64)
        } else {
            0.0
        };
        weights + L2 * activations + reduction
    }

    /// The tiling of least cost whose blocks are all resident at once. Where activations do not fit such, blocks take turns: no
    /// block waits for another.
    pub(crate) fn tiling(&self, entry: usize) -> Tiling {
        if self.kernel == GemmMediumKernel::Warpgroups {
            return warpgroups::tiling(self, entry);
        }
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
                for sharing in [Sharing::WholeTiles, Sharing::Pieces] {
                    let tiling = Tiling {
                        run,
                        runs,
                        split_stages,
                        splits,
                        sharing,
                    };
                    if self.shared_bytes(entry, &tiling) > available {
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
        let (blocks, cluster) = match self.kernel {
            GemmMediumKernel::Warps => ((tiling.runs, tiling.splits), 1),
            GemmMediumKernel::Warpgroups => ((tiling.runs * tiling.splits, 1), tiling.splits),
        };
        Grid {
            entry,
            shared_bytes: self.shared_bytes(entry, &tiling),
            pdl,
            cluster,
            ..Grid::new(blocks, self.kernel.threads())
        }
    }

    /// Enough for every bucket of up to this many rows.
    pub(crate) fn scratch(&self, max_rows: usize) -> GemmMediumScratch {
        let mut scratch = GemmMediumScratch {
            partials: 0,
            arrivals: 0,
        };
        // Warpgroups add sums up in shared memory.
        if self.kernel == GemmMediumKernel::Warpgroups {
            return scratch;
        }
        for entry in 0..=entry(max_rows) {
            let tiling = self.tiling(entry);
            if tiling.splits > 1 {
                let rows = (entry + 1) * ENTRY_ROWS;
                let tile = TILE_ROWS * rows * size_of::<f32>();
                let partials = tiling.runs * tiling.splits * tiling.run * tile;
                scratch.partials = scratch.partials.max(partials);
                scratch.arrivals = scratch.arrivals.max(tiling.runs * size_of::<u32>());
            }
        }
        scratch
    }

    pub(crate) fn params(&self, at: &Places) -> Vec<u8> {
        if self.kernel == GemmMediumKernel::Warpgroups {
            return warpgroups::params(self, at);
        }
        let tiling = |entry| {
            let tiling = self.tiling(entry);
            TilingParams {
                run: tiling.run as u32,
                split_stages: tiling.split_stages as u32,
                sharing: u32::from(tiling.sharing == Sharing::WholeTiles),
            }
        };
        WarpsParams {
            rows: at.rows,
            w: at.w,
            x: at.x,
            out: at.out,
            partials: at.partials,
            arrivals: at.arrivals,
            columns: self.columns as u32,
            outputs: self.outputs as u32,
            out_stride: at.out_stride as u32,
            m_tiles: self.m_tiles() as u32,
            scale: at.scale,
            of_16_rows: tiling(0),
            of_32_rows: tiling(1),
            of_48_rows: tiling(2),
            of_64_rows: tiling(3),
        }
        .bytes()
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
        ("M_TILE_STAGE_BYTES", format.part_bytes().to_string()),
        ("SLOT_TOKEN_BYTES", kernel.slot_token_bytes().to_string()),
    ];
    let (kernel, entries, params_bytes) = match kernel {
        GemmMediumKernel::Warps => {
            let padding = token_padding_bytes(format);
            constants.push(("RING", ring(format, shared_bytes).to_string()));
            constants.push(("TOKEN_PADDING_BYTES", padding.to_string()));
            ("gemm_medium", ENTRIES, WarpsParams::BYTES)
        }
        GemmMediumKernel::Warpgroups => {
            constants.push(("MAX_SLOTS", warpgroups::MAX_SLOTS.to_string()));
            ("gemm_medium_sm90", HOPPER_ENTRIES, warpgroups::PARAMS_BYTES)
        }
    };
    Specialization {
        kernel,
        entries,
        constants,
        params_bytes,
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
        shape.params(&Places {
            rows,
            w: at.matrix(&self.w).start,
            x: at.operand(self.x),
            out,
            out_stride,
            scale,
            partials: at.operand(self.partials),
            arrivals: at.operand(self.arrivals),
        })
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
