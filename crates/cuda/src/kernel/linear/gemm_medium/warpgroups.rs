//! Tilings of `gemm_medium_sm90.cu`, and its argument.

use super::{ENTRY_ROWS, GemmMediumShape, Places, Sharing, Tiling};
use crate::{
    device::Address,
    kernel::{
        RowsAt,
        params::{Params, params},
    },
};

params! {
    struct TilingParams {
        run: u32,
        m_groups: u32,
        k_groups: u32,
        splits: u32,
        split_stages: u32,
        runs: u32,
        rounds: u32,
        longer: u32,
        slots: u32,
        slot_bytes: u32,
    }
}

params! {
    struct WarpgroupsParams {
        rows: RowsAt,
        w: Address,
        x: Address,
        out: Address,
        columns: u32,
        outputs: u32,
        out_stride: u32,
        m_tiles: u32,
        scale: f32,
        of_16_rows: TilingParams,
        of_32_rows: TilingParams,
        of_48_rows: TilingParams,
        of_64_rows: TilingParams,
        reserved: u32,
    }
}
pub(super) const PARAMS_BYTES: usize = WarpgroupsParams::BYTES;

pub(super) const THREADS: usize = 768;
/// Warpgroups of a block that multiply, and M-tiles of each, one per warp.
const GROUPS: usize = 4;
const GROUP_M_TILES: usize = 4;
/// The most blocks that share the inputs of a run: a cluster.
const MAX_SPLITS: usize = 8;
/// Shared memory for a part of zeros and a ring of stages, and the most stages there. Every Hopper card has 227 KiB: what is left is for
/// the blocks of a small launch that follows.
const RING_BYTES: usize = 216 << 10;
pub(super) const MAX_SLOTS: usize = 16;
/// Parts of 64 inputs of a stage.
const STAGE_PARTS: usize = 2;
/// Of a token's inputs of a part, in f16.
const PART_LINE: usize = 128;
/// Activations start where wgmma wants them.
const ALIGNMENT: usize = 1 << 10;
/// Dynamic shared memory.
pub(super) const SHARED_BYTES: usize = RING_BYTES + ALIGNMENT;

/// Estimates, in bytes of weights that a multiprocessor reads meanwhile. What comes from L2 is about two and a half times as fast.
const L2: f64 = 0.4;
/// Of a warp's instructions for a part.
const PART_INSTRUCTIONS: f64 = 2700.0;
/// Of sums that meet within a block, and within a cluster.
const MEETING: f64 = 33_000.0;
const CLUSTER_MEETING: f64 = 40_000.0;

/// Blocks that are resident at once, in clusters of this size.
fn resident(shape: &GemmMediumShape, splits: usize) -> usize {
    match (splits, shape.clusters) {
        (1, _) => shape.multiprocessors,
        (_, None) => 0,
        (_, Some(clusters)) => clusters.blocks(splits, 1).min(shape.multiprocessors),
    }
}

/// The tiling of least cost whose blocks are all resident at once.
pub(super) fn tiling(shape: &GemmMediumShape, entry: usize) -> Tiling {
    let mut best: Option<(f64, Tiling)> = None;
    for m_groups in 1..=GROUPS {
        for run in (m_groups - 1) * GROUP_M_TILES + 1..=m_groups * GROUP_M_TILES {
            for splits in 1..=MAX_SPLITS {
                let Some(found) = candidate(shape, entry, (m_groups, run, splits)) else {
                    continue;
                };
                if best.is_none_or(|(least, _)| found.0 < least) {
                    best = Some(found);
                }
            }
        }
    }
    best.expect("blocks without splits take turns").1
}

/// The tiling of these warpgroups, M-tiles and splits, if there is one, and what it costs the slowest block.
fn candidate(
    shape: &GemmMediumShape,
    entry: usize,
    (m_groups, run, splits): (usize, usize, usize),
) -> Option<(f64, Tiling)> {
    let rows = (entry + 1) * ENTRY_ROWS;
    let k_groups = GROUPS / m_groups;
    let stages = shape.columns.div_ceil(STAGE_PARTS * super::STAGE_INPUTS);
    let split_stages = stages.div_ceil(splits);
    let alone = k_groups * splits == 1;
    let all_runs = shape.m_tiles().div_ceil(run);
    let at_once = resident(shape, splits) / splits;
    if stages.div_ceil(split_stages) != splits || at_once == 0 || (all_runs > at_once && !alone) {
        return None;
    }
    let rounds = all_runs.div_ceil(at_once);
    let tiling = Tiling {
        run,
        runs: all_runs.div_ceil(rounds),
        split_stages,
        splits,
        sharing: Sharing::Groups(m_groups),
    };
    let parts = STAGE_PARTS * split_stages;
    let weights = (run * parts * shape.format.part_bytes()) as f64;
    let activations = L2 * (parts * rows * PART_LINE) as f64;
    let groups = m_groups * k_groups;
    let turns = groups * STAGE_PARTS * split_stages.div_ceil(k_groups);
    let instructions = PART_INSTRUCTIONS * turns as f64;
    let meeting =
        if alone { 0.0 } else { MEETING } + if splits > 1 { CLUSTER_MEETING } else { 0.0 };
    let cost = rounds as f64 * (weights + activations).max(instructions) + meeting;
    Some((cost, tiling))
}

/// Of a slot, activations of all rows and weights of all M-tiles: so many slots of so many bytes.
pub(super) fn ring(shape: &GemmMediumShape, entry: usize, tiling: &Tiling) -> (usize, usize) {
    let zeros = (entry + 1) * ENTRY_ROWS * PART_LINE;
    let part = zeros + tiling.run * shape.format.part_bytes();
    let slot_bytes = (STAGE_PARTS * part).next_multiple_of(ALIGNMENT);
    let slots = (RING_BYTES - zeros) / slot_bytes;
    (slots.min(MAX_SLOTS), slot_bytes)
}

pub(super) fn params(shape: &GemmMediumShape, at: &Places) -> Vec<u8> {
    let tiling = |entry| {
        let tiling = tiling(shape, entry);
        let all_runs = shape.m_tiles().div_ceil(tiling.run);
        let m_groups = tiling.sharing.m_groups();
        let (slots, slot_bytes) = ring(shape, entry, &tiling);
        TilingParams {
            run: tiling.run as u32,
            m_groups: m_groups as u32,
            k_groups: (GROUPS / m_groups) as u32,
            splits: tiling.splits as u32,
            split_stages: tiling.split_stages as u32,
            runs: tiling.runs as u32,
            rounds: (all_runs / tiling.runs) as u32,
            longer: (all_runs % tiling.runs) as u32,
            slots: slots as u32,
            slot_bytes: slot_bytes as u32,
        }
    };
    WarpgroupsParams {
        rows: at.rows,
        w: at.w,
        x: at.x,
        out: at.out,
        columns: shape.columns as u32,
        outputs: shape.outputs as u32,
        out_stride: at.out_stride as u32,
        m_tiles: shape.m_tiles() as u32,
        scale: at.scale,
        of_16_rows: tiling(0),
        of_32_rows: tiling(1),
        of_48_rows: tiling(2),
        of_64_rows: tiling(3),
        reserved: 0,
    }
    .bytes()
}
