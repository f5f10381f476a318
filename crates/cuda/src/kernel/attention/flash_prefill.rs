//! Twin of `kernels/attention/flash_prefill.cu`, flash attention of large batches on any card, and of two that do the same on Hopper
//! for heads of published models: `kernels/attention/flash_prefill_sm90.cu`, and `kernels/attention/flash_prefill_multicast.cu` for
//! heads of 512 whose keys and values are in f16.

mod multicast;

use carat_model::{
    kv::KvType,
    plan::{KvSlot, Rows},
};

use crate::kernel::{
    Addresses, HOPPER_MULTIPROCESSORS, Int8Operands, Kernel, Operand, RowRefsAt, RowsAt, RunsAt,
    SlotAt, Specialization, specialization::kv_constants,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

/// Head sizes that are compiled for. The kernel takes any multiple of 16 up to 512.
const HEAD_DIMS: [usize; 6] = [16, 32, 64, 128, 256, 512];

/// Shared memory that a block may have on every card since Ampere.
#[cfg(test)]
const PORTABLE_BYTES: usize = 99 << 10;

/// Blocks beyond those that one run needs, so that in a batch of some runs each takes one tile.
const MORE_TILES: usize = 16;

params! {
    struct FlashPrefillParams {
        rows: RowsAt,
        row_refs: RowRefsAt,
        runs: RunsAt,
        slot: SlotAt,
        q: Address,
        out: Address,
        scales: Address,
        sums: Address,
        heads: u32,
        window: u32,
    }
}

/// The output, in the format its reader wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionOut {
    F32(Operand),
    F16(Operand),
    /// Blocks of 32 columns: codes, scales, and scale times sum of codes.
    Int8(Int8Operands),
}

/// Output formats as the kernel's constant `OUT` names them.
const OUT_FORMATS: [&str; 3] = ["OUT_F32", "OUT_F16", "OUT_INT8"];

impl AttentionOut {
    fn format(self) -> &'static str {
        match self {
            AttentionOut::F32(_) => OUT_FORMATS[0],
            AttentionOut::F16(_) => OUT_FORMATS[1],
            AttentionOut::Int8(_) => OUT_FORMATS[2],
        }
    }
}

/// The type of values, and whether keys are made from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeysAndValues {
    pub(crate) kv: KvType,
    pub(crate) tied: bool,
}

impl KeysAndValues {
    /// Those that a head size is compiled ahead for: the larger models have values alone in heads of 512.
    fn ahead(kv: KvType, head_dim: usize) -> Vec<KeysAndValues> {
        let tied = (head_dim == 512 && kv != KvType::F16).then_some(true);
        let each = [false].into_iter().chain(tied);
        each.map(|tied| KeysAndValues { kv, tied }).collect()
    }
}

/// The tiling of a block: the constants of `flash_prefill.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortableTiling {
    head_dim: usize,
    rows: usize,
    keys: usize,
    warps: usize,
    row_steps: usize,
    k_columns: usize,
    v_keys: usize,
    slots: usize,
}

impl PortableTiling {
    fn of(head_dim: usize) -> PortableTiling {
        let (rows, keys, warps, row_steps, columns, v_keys, slots) = match head_dim {
            ..=128 => (64, 64, 4, 1, 128, 64, 3),
            129..=256 => (64, 64, 8, 2, 128, 32, 3),
            _ => (32, 64, 8, 1, 128, 16, 3),
        };
        let fits = |c: &usize| head_dim.is_multiple_of(*c);
        let k_columns = (16..=columns).rev().step_by(16).find(fits);
        PortableTiling {
            head_dim,
            rows,
            keys,
            warps,
            row_steps,
            k_columns: k_columns.expect("heads are multiples of 16"),
            v_keys,
            slots,
        }
    }

    /// Q, the pipeline of chunks, weights, and one number per row and warp; rows padded by 16 bytes.
    fn shared_bytes(&self) -> usize {
        let chunk = (self.keys * (self.k_columns + 8)).max(self.v_keys * (self.head_dim + 8));
        let column_warps = self.warps / (self.rows / (16 * self.row_steps));
        let a_row = (self.head_dim + 8) + (self.keys + 8) + 2 * column_warps;
        2 * (self.rows * a_row + self.slots * chunk)
    }

    fn specialization(&self, format: &str, kv: KeysAndValues) -> Specialization {
        let numbers = [
            ("HEAD_DIM", self.head_dim),
            ("ROWS", self.rows),
            ("KEYS", self.keys),
            ("WARPS", self.warps),
            ("ROW_STEPS", self.row_steps),
            ("K_COLUMNS", self.k_columns),
            ("V_KEYS", self.v_keys),
            ("SLOTS", self.slots),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        specialization("flash_prefill", &["flash_prefill"], (format, kv), &numbers)
    }
}

/// The blocks of `flash_prefill_sm90.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sm90Tiling {
    /// Heads of 256: two warpgroups have rows of their own, or there is but one.
    Single,
    /// Heads of 512: two warpgroups share their rows.
    Double,
}

impl Sm90Tiling {
    fn of(head_dim: usize) -> Option<Sm90Tiling> {
        match head_dim {
            256 => Some(Sm90Tiling::Single),
            512 => Some(Sm90Tiling::Double),
            _ => None,
        }
    }

    /// Warpgroups that share rows.
    fn column_groups(self) -> usize {
        match self {
            Sm90Tiling::Single => 1,
            Sm90Tiling::Double => 2,
        }
    }

    fn max_row_groups(self) -> usize {
        2 / self.column_groups()
    }

    /// Q, weights of two tiles and statistics per row; the pipeline of chunks; padding that aligns them; pages of four tiles.
    fn shared_bytes(self, row_groups: usize) -> usize {
        let columns = self.column_groups();
        64 * row_groups * columns * (512 + 2 * 128 + 4) + 4 * (32 << 10) + 1024 + 64
    }

    fn specialization(self, format: &str, kv: KeysAndValues) -> Specialization {
        let numbers = [
            ("HEAD_DIM", 256 * self.column_groups()),
            ("SHARED_BYTES", self.shared_bytes(self.max_row_groups())),
            ("FEW_BYTES", self.shared_bytes(1)),
        ];
        let entries = &["flash_prefill_sm90", "flash_prefill_sm90_few"];
        specialization("flash_prefill_sm90", entries, (format, kv), &numbers)
    }
}

fn specialization(
    kernel: &'static str,
    entries: &'static [&'static str],
    (format, kv): (&str, KeysAndValues),
    numbers: &[(&'static str, usize)],
) -> Specialization {
    let out = [("OUT", format.to_owned())];
    let numbers = numbers
        .iter()
        .map(|(name, value)| (*name, value.to_string()));
    Specialization {
        kernel,
        entries,
        constants: out
            .into_iter()
            .chain(numbers)
            .chain(kv_constants(kv.kv, kv.tied))
            .collect(),
        params_bytes: FlashPrefillParams::BYTES,
    }
}

/// Specializations that [`FlashPrefill::new`] may choose on any card.
pub(crate) fn specializations(kv: KvType) -> Vec<Specialization> {
    let each = |head_dim| {
        let ahead = KeysAndValues::ahead(kv, head_dim).into_iter();
        let tiling = PortableTiling::of(head_dim);
        ahead.flat_map(move |kv| OUT_FORMATS.map(|format| tiling.specialization(format, kv)))
    };
    HEAD_DIMS.into_iter().flat_map(each).collect()
}

/// Specializations that it may choose on Hopper besides.
pub(crate) fn hopper_specializations(kv: KvType) -> Vec<Specialization> {
    let each = |head_dim| {
        let ahead = KeysAndValues::ahead(kv, head_dim).into_iter();
        let tilings = ahead.filter_map(move |kv| Some((BlockTiling::hopper(head_dim, kv)?, kv)));
        tilings.flat_map(|(tiling, kv)| OUT_FORMATS.map(|out| tiling.specialization(out, kv)))
    };
    HEAD_DIMS.into_iter().flat_map(each).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockTiling {
    Portable(PortableTiling),
    Hopper(Sm90Tiling),
    /// Heads of 512 in f16, by `flash_prefill_multicast.cu`.
    Multicast,
}

impl BlockTiling {
    /// What code for `sm_90a` takes such heads by, if it does.
    fn hopper(head_dim: usize, kv: KeysAndValues) -> Option<BlockTiling> {
        if multicast::takes(head_dim, kv) {
            return Some(BlockTiling::Multicast);
        }
        Sm90Tiling::of(head_dim).map(BlockTiling::Hopper)
    }

    fn specialization(self, format: &str, kv: KeysAndValues) -> Specialization {
        match self {
            BlockTiling::Portable(tiling) => tiling.specialization(format, kv),
            BlockTiling::Hopper(tiling) => tiling.specialization(format, kv),
            BlockTiling::Multicast => multicast::specialization(format, kv),
        }
    }

    /// Rows of a block's tile, at the least.
    fn rows(self) -> usize {
        match self {
            BlockTiling::Portable(tiling) => tiling.rows,
            BlockTiling::Hopper(_) => 64,
            BlockTiling::Multicast => multicast::ROWS,
        }
    }

    /// The params that it takes.
    fn params(self, attention: FlashPrefillParams) -> Vec<u8> {
        match self {
            BlockTiling::Multicast => multicast::params(attention),
            BlockTiling::Portable(_) | BlockTiling::Hopper(_) => attention.bytes(),
        }
    }
}

/// Heads and window of an attention step, and the type of its keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionShape {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) window: Option<usize>,
    pub(crate) kv: KeysAndValues,
}

#[derive(Debug)]
pub(crate) struct FlashPrefill {
    /// The rows whose runs are attended.
    rows: Rows,
    /// F16.
    q: Operand,
    slot: KvSlot,
    heads: AttentionShape,
    block: BlockTiling,
    out: AttentionOut,
}

impl FlashPrefill {
    /// `hopper` is whether code is made for `sm_90a`. `None` for what the kernels do not take.
    pub(crate) fn new(
        rows: Rows,
        (q, out): (Operand, AttentionOut),
        slot: KvSlot,
        heads: AttentionShape,
        hopper: bool,
    ) -> Option<FlashPrefill> {
        let head_dim = heads.head_dim;
        let group = heads.heads / heads.kv_heads;
        let portable = || {
            HEAD_DIMS
                .contains(&head_dim)
                .then(|| PortableTiling::of(head_dim))
        };
        let block = match BlockTiling::hopper(head_dim, heads.kv) {
            Some(block) if hopper => block,
            _ => BlockTiling::Portable(portable()?),
        };
        let blocks_of_32 = head_dim >= 32 || group.is_multiple_of(2);
        let writes = !matches!(out, AttentionOut::Int8(_)) || blocks_of_32;
        (group <= block.rows() && writes).then_some(FlashPrefill {
            rows,
            q,
            slot,
            heads,
            block,
            out,
        })
    }
}

impl Kernel for FlashPrefill {
    fn specialization(&self) -> Specialization {
        self.block.specialization(self.out.format(), self.heads.kv)
    }

    /// Enough blocks for one run of all rows and some more; where runs are many and short, blocks take several tiles.
    fn grid(&self, rows: usize) -> Grid {
        let kv_heads = self.heads.kv_heads;
        let tiles_of = |block_rows: usize| {
            let tokens = block_rows / (self.heads.heads / kv_heads);
            rows.div_ceil(tokens)
        };
        let (entry, tiles, warps, shared_bytes) = match self.block {
            BlockTiling::Portable(shape) => {
                (0, tiles_of(shape.rows), shape.warps, shape.shared_bytes())
            }
            BlockTiling::Hopper(block) => {
                let few = tiles_of(64) * kv_heads <= HOPPER_MULTIPROCESSORS;
                let row_groups = if few { 1 } else { block.max_row_groups() };
                let warps = 4 * row_groups * block.column_groups();
                let tiles = tiles_of(64 * row_groups);
                (
                    usize::from(few),
                    tiles,
                    warps,
                    block.shared_bytes(row_groups),
                )
            }
            BlockTiling::Multicast => {
                let tiles = tiles_of(multicast::CLUSTER * multicast::ROWS);
                return multicast::grid(rows.min(tiles + MORE_TILES) * kv_heads);
            }
        };
        Grid {
            pdl: false,
            cluster: 1,
            entry,
            blocks: (kv_heads, rows.min(tiles + MORE_TILES)),
            threads: warps * 32,
            shared_bytes,
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let (out, scales, sums) = match self.out {
            AttentionOut::F32(out) | AttentionOut::F16(out) => {
                (at.operand(out), Address::NULL, Address::NULL)
            }
            AttentionOut::Int8(out) => (
                at.operand(out.codes),
                at.operand(out.scales),
                at.operand(out.sums),
            ),
        };
        self.block.params(FlashPrefillParams {
            rows,
            row_refs: at.batch.row_refs,
            runs: at.runs(self.rows),
            slot: at.slot(self.slot),
            q: at.operand(self.q),
            out,
            scales,
            sums,
            heads: self.heads.heads as u32,
            window: self.heads.window.unwrap_or(0) as u32,
        })
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.q]
    }

    fn writes(&self) -> Vec<Operand> {
        match self.out {
            AttentionOut::F32(out) | AttentionOut::F16(out) => vec![out],
            AttentionOut::Int8(out) => out.all().to_vec(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
