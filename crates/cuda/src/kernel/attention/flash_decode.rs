//! Twin of `kernels/attention/flash_decode.cu`: flash attention of small and medium batches, with norms, RoPE and KV store in its prologue.
//!
//! Split-KV: the bucket of rows decides the grid's height, the row's own length how many of those blocks share it. Partials and
//! arrival counters are scratch that all layers may share, since they run one after another.

use carat_model::{
    kv::{KvType, PAGE_TOKENS},
    plan::{KvSlot, RopeId},
    weights::Weight,
};

use crate::kernel::{
    Addresses, HOPPER_MULTIPROCESSORS, Kernel, Operand, PreparedRows, RowRefsAt, RowsAt, SlotAt,
    Specialization, specialization::kv_constant,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::WeightOperand,
};

/// Splits merged at a time where there are many.
const FAN: usize = 8;
/// Bytes of a partial's maxima and totals.
const STATE_BYTES: usize = 16 * 8;
/// The grid's height where nothing bounds what a row sees, so that two KV heads or one fill the card. Fewer starve it on long contexts; more
/// take longer to merge.
const MAX_SPLITS: usize = HOPPER_MULTIPROCESSORS / 2;
/// The same in Q8_0, or for values alone: a step has half the bytes, so it takes twice the blocks to keep as many in flight.
const MAX_SMALL_SPLITS: usize = HOPPER_MULTIPROCESSORS;
/// The least height of a grid of many rows, where a row has that many steps.
const MIN_SPLITS: usize = 4;

/// Query heads, KV heads and head size in layers of the published models.
pub(crate) const SHAPES: [Heads; 16] = [
    Heads::new(8, 1, 256),
    Heads::new(8, 1, 512),
    Heads::new(8, 2, 256),
    Heads::new(8, 2, 512),
    Heads::new(16, 8, 256),
    Heads::new(16, 1, 512).tied(64),
    Heads::new(16, 2, 512).tied(64),
    Heads::new(32, 16, 256),
    Heads::new(32, 4, 512).tied(64),
    // Drafters of E2B and E4B; those of larger models are shaped like their targets.
    Heads::new(4, 1, 256),
    Heads::new(4, 1, 512),
    Heads::new(4, 2, 256),
    Heads::new(4, 2, 512),
    // The demo model.
    Heads::new(4, 2, 64),
    Heads::new(4, 2, 128),
    // A size that needs padding.
    Heads::new(4, 2, 48),
];

params! {
    pub(crate) struct FlashDecodeParams {
        rows: RowsAt,
        row_refs: RowRefsAt,
        slot: SlotAt,
        q: Address,
        q_weight: Address,
        k: Address,
        k_weight: Address,
        v: Address,
        frequencies: Address,
        partials: Address,
        arrivals: Address,
        out: Address,
        q_stride: u32,
        k_stride: u32,
        v_stride: u32,
        window: u32,
        q_eps: f32,
        k_eps: f32,
        v_eps: f32,
        out_kind: u32,
    }
}

/// Columns of a value that holds several projections side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    pub(crate) operand: Operand,
    pub(crate) first: usize,
    /// Columns of the whole value.
    pub(crate) stride: usize,
}

impl Columns {
    fn at(self, at: &Addresses) -> Address {
        at.operand(self.operand)
            .offset(self.first * size_of::<f32>())
    }
}

/// The norm of a head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNorm {
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
}

/// Keys and values that the layer computes itself. Both may be the same columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnKv {
    pub(crate) k: Columns,
    pub(crate) k_norm: HeadNorm,
    pub(crate) v: Columns,
    pub(crate) v_eps: f32,
}

/// The heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) count: usize,
    pub(crate) kv_count: usize,
    pub(crate) head_dim: usize,
    /// Type of the keys and values.
    pub(crate) kv: KvType,
    /// Where pages hold values alone: pairs of a key that turn.
    pub(crate) turning_pairs: Option<usize>,
    /// Whether steps of long heads have two pages, too: half the barriers per key, for much shared memory.
    pub(crate) wide_steps: bool,
}

impl Heads {
    pub(crate) const fn new(count: usize, kv_count: usize, head_dim: usize) -> Heads {
        Heads {
            count,
            kv_count,
            head_dim,
            kv: KvType::F16,
            turning_pairs: None,
            wide_steps: false,
        }
    }

    /// The same heads with steps of two pages.
    pub(crate) const fn wide(self) -> Heads {
        Heads {
            wide_steps: true,
            ..self
        }
    }

    /// The same heads where pages hold values alone.
    pub(crate) const fn tied(self, turning_pairs: usize) -> Heads {
        Heads {
            turning_pairs: Some(turning_pairs),
            ..self
        }
    }

    /// Whether keys are made from values.
    pub(crate) fn is_tied(self) -> bool {
        self.turning_pairs.is_some()
    }

    /// Bytes of the keys that a block makes of a step, whole blocks of 32 pairs, of both halves, in padded rows; and of what they are
    /// made with.
    fn made_bytes(self) -> usize {
        let Some(turning_pairs) = self.turning_pairs else {
            return 0;
        };
        let pairs = turning_pairs.next_multiple_of(32).min(self.head_dim / 2);
        self.step() * (2 * pairs + 8) * 2 + pairs * 12
    }

    /// The same heads with keys and values of this type.
    pub(crate) const fn with_kv(self, kv: KvType) -> Heads {
        Heads { kv, ..self }
    }

    pub(crate) fn group(self) -> usize {
        self.count / self.kv_count
    }

    /// Warps of a block.
    fn warps(self) -> usize {
        if self.group() > 8 { 16 } else { 8 }
    }

    fn threads(self) -> usize {
        32 * self.warps()
    }

    /// Parts that the elements of a head are cut into for scores.
    fn parts(self) -> usize {
        self.warps() / (self.step() / 16)
    }

    /// Whether each warp's outputs are whole blocks of 32, so that it can quantize them.
    pub(crate) fn fill_blocks(self) -> bool {
        self.head_dim.is_multiple_of(32 * self.warps())
    }

    /// Positions that are scored together.
    fn step(self) -> usize {
        match self.head_dim {
            ..=256 => 2 * PAGE_TOKENS,
            _ if self.wide_steps => 2 * PAGE_TOKENS,
            _ => PAGE_TOKENS,
        }
    }

    /// Columns of 8 heads.
    fn tiles(self) -> usize {
        self.group().div_ceil(8)
    }

    fn partial_bytes(self) -> usize {
        let quads = match self.group() {
            group @ ..=8 => group.div_ceil(2),
            _ => 4,
        };
        let share = (self.head_dim / 16).div_ceil(self.warps());
        share * self.tiles() * (self.threads() / 4 * quads * 8) + STATE_BYTES
    }

    fn shared_bytes(self) -> usize {
        let pitch = match self.head_dim % 64 {
            0 => self.head_dim,
            _ => self.head_dim + 8,
        };
        let q_tiles = match self.group() {
            ..=4 => 1,
            _ => 2 * self.tiles(),
        };
        let scores = self.parts() * self.tiles() * 8 * (self.step() + 4) * 4;
        let weights = self.tiles() * 8 * (self.step() + 8) * 2;
        let made = self.made_bytes();
        let common = (8 * q_tiles * pitch * 2)
            .max(scores + weights + made)
            .max(32 * 16 * 4);
        let tile_row = match self.kv {
            KvType::F16 => 2 * pitch,
            KvType::Q8_0 => self.head_dim + 16 + 2 * self.head_dim.div_ceil(KvType::GROUP),
        };
        // Wide steps come with room to merge eight partials at once.
        let merged = if self.wide_steps {
            FAN * (self.partial_bytes() - STATE_BYTES)
        } else {
            0
        };
        (2 * self.step() * tile_row).max(merged) + self.head_dim / 2 * 8 + common + 3 * 16 * 4
    }
}

/// What outputs are written as.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DecodeOut {
    F32(Operand),
    F16(Operand),
    /// F16 in token tiles.
    Tiles(Operand),
    /// The rows of the product that reads them, of small batches; see [`Heads::fill_blocks`].
    Prepared(PreparedRows),
}

impl DecodeOut {
    fn operand(self) -> Operand {
        match self {
            DecodeOut::F32(out) | DecodeOut::F16(out) | DecodeOut::Tiles(out) => out,
            DecodeOut::Prepared(rows) => rows.at,
        }
    }

    /// `AS_*` of the kernel.
    fn kind(self) -> u32 {
        match self {
            DecodeOut::F32(_) => 0,
            DecodeOut::F16(_) => 1,
            DecodeOut::Tiles(_) => 2,
            DecodeOut::Prepared(_) => 3,
        }
    }
}

/// `out = softmax(rope(norm(q)) . K) . V`; before that, where the layer has its own, `rope(norm(k))` and `norm(v)`
/// into their pages.
#[derive(Debug)]
pub(crate) struct FlashDecode {
    pub(crate) q: Columns,
    pub(crate) q_norm: HeadNorm,
    /// Only with the rows of the whole batch.
    pub(crate) own_kv: Option<OwnKv>,
    pub(crate) rope: RopeId,
    pub(crate) slot: KvSlot,
    pub(crate) heads: Heads,
    pub(crate) window: Option<usize>,
    /// [`FlashDecode::partial_columns`] wide.
    pub(crate) partials: Operand,
    /// [`FlashDecode::arrival_columns`] wide, 0 before the first launch; launches leave it so.
    pub(crate) arrivals: Operand,
    pub(crate) out: DecodeOut,
    /// Launched with PDL.
    pub(crate) pdl: bool,
}

impl FlashDecode {
    /// Whether the kernel takes such heads.
    pub(crate) fn takes(heads: Heads) -> bool {
        let Heads {
            count,
            kv_count,
            head_dim,
            kv,
            ..
        } = heads;
        // K-steps that a warp scores: in Q8_0 whole blocks, or half of one; where keys are made, all in one half of the head.
        let part = (head_dim / 16).div_ceil(heads.parts());
        let whole_halves = head_dim.is_multiple_of(32) && (head_dim / 32).is_multiple_of(part);
        // In Q8_0 a warp's pairs of elements must fall into whole blocks, too.
        let pairs = head_dim.is_multiple_of(2 * KvType::GROUP) || head_dim <= KvType::GROUP;
        let whole_blocks = pairs && (part == 1 || part.is_multiple_of(2));
        head_dim.is_multiple_of(16)
            && (kv == KvType::F16 || whole_blocks)
            && (!heads.is_tied() || whole_halves)
            && (16..=512).contains(&head_dim)
            && count.is_multiple_of(kv_count)
            && (1..=16).contains(&heads.group())
    }

    /// Words of split-KV partials, and arrival counters, of batches of so many rows and no fewer.
    pub(crate) fn bucket_words(heads: Heads, window: Option<usize>, rows: usize) -> (usize, usize) {
        let splits = splits(heads, window, rows);
        let blocks = rows * heads.kv_count;
        (
            blocks * splits * heads.partial_bytes() / 4,
            blocks * (1 + splits.div_ceil(FAN)),
        )
    }

    /// Words of split-KV partials per row.
    pub(crate) fn partial_columns(heads: Heads, window: Option<usize>) -> usize {
        heads.kv_count * max_splits(heads, window) * heads.partial_bytes() / 4
    }

    /// Arrival counters per row.
    pub(crate) fn arrival_columns(heads: Heads, window: Option<usize>) -> usize {
        heads.kv_count * (1 + max_splits(heads, window).div_ceil(FAN))
    }
}

/// The grid's height for one row: all steps that a window can touch, wherever it begins in a page.
fn max_splits(heads: Heads, window: Option<usize>) -> usize {
    let steps = |window: usize| (window + PAGE_TOKENS - 1).div_ceil(heads.step());
    let most = match heads.kv {
        KvType::F16 if !heads.is_tied() => MAX_SPLITS,
        KvType::F16 | KvType::Q8_0 => MAX_SMALL_SPLITS,
    };
    window.map_or(most, |w| steps(w).min(most))
}

/// The grid's height for a bucket: many rows fill the card by themselves, and every split has its price.
pub(crate) fn splits(heads: Heads, window: Option<usize>, rows: usize) -> usize {
    let together = match (heads.head_dim, heads.warps()) {
        (..=256, 8) => 3,
        (_, 8) => 2,
        _ => 1,
    };
    let share = together * HOPPER_MULTIPROCESSORS / (rows * heads.kv_count);
    max_splits(heads, window).min(share.max(MIN_SPLITS))
}

pub(crate) fn specialization(heads: Heads) -> Specialization {
    let turning_pairs = heads
        .turning_pairs
        .map(|pairs| ("TURNING_PAIRS", pairs.to_string()));
    let wide_steps = heads.wide_steps.then(|| ("WIDE_STEPS", "1".to_owned()));
    Specialization {
        kernel: "flash_decode",
        entries: &["flash_decode"],
        constants: [
            ("HEAD_DIM", heads.head_dim.to_string()),
            ("KV_HEADS", heads.kv_count.to_string()),
            ("GROUP", heads.group().to_string()),
            ("PARTIAL_BYTES", heads.partial_bytes().to_string()),
            ("SHARED_BYTES", heads.shared_bytes().to_string()),
        ]
        .into_iter()
        .chain(kv_constant(heads.kv))
        .chain(turning_pairs)
        .chain(wide_steps)
        .collect(),
        params_bytes: FlashDecodeParams::BYTES,
    }
}

impl Kernel for FlashDecode {
    fn specialization(&self) -> Specialization {
        specialization(self.heads)
    }

    fn grid(&self, rows: usize) -> Grid {
        let splits = splits(self.heads, self.window, rows);
        Grid {
            pdl: self.pdl,
            shared_bytes: self.heads.shared_bytes(),
            ..Grid::new((rows * self.heads.kv_count, splits), self.heads.threads())
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let own = self.own_kv.as_ref();
        FlashDecodeParams {
            rows,
            row_refs: at.batch.row_refs,
            slot: at.slot(self.slot),
            q: self.q.at(at),
            q_weight: at.vector(self.q_norm.weight),
            k: own.map_or(Address::NULL, |kv| kv.k.at(at)),
            k_weight: at.vector(own.and_then(|kv| kv.k_norm.weight)),
            v: own.map_or(Address::NULL, |kv| kv.v.at(at)),
            frequencies: at.rope(self.rope),
            partials: at.operand(self.partials),
            arrivals: at.operand(self.arrivals),
            out: at.operand(self.out.operand()),
            q_stride: self.q.stride as u32,
            k_stride: own.map_or(0, |kv| kv.k.stride as u32),
            v_stride: own.map_or(0, |kv| kv.v.stride as u32),
            window: self.window.unwrap_or(0) as u32,
            q_eps: self.q_norm.eps,
            k_eps: own.map_or(0.0, |kv| kv.k_norm.eps),
            v_eps: own.map_or(0.0, |kv| kv.v_eps),
            out_kind: self.out.kind(),
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        WeightOperand::vectors([
            self.q_norm.weight,
            self.own_kv.and_then(|kv| kv.k_norm.weight),
        ])
    }

    fn reads(&self) -> Vec<Operand> {
        let own = self
            .own_kv
            .iter()
            .flat_map(|kv| [kv.k.operand, kv.v.operand]);
        [self.q.operand].into_iter().chain(own).collect()
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.partials, self.arrivals, self.out.operand()]
    }
}

#[cfg(test)]
pub(crate) mod tests;
