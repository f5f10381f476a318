//! Shares of a GEMV's work: warps of a block, stages of their rings, blocks of a grid, and whether they fit.

use super::{
    ALONE_FORMAT, ALONE_STAGES, FragmentFormat, GemvWeights, MAX_CLUSTER, MAX_ROWS, USUAL_STAGES,
};
use crate::{
    device::{ClusterCapacity, Grid},
    kernel::HOPPER_MULTIPROCESSORS,
};

/// Shared memory beyond what a launch asks for: what the kernel declares, and the driver's share, which a block's most leaves aside.
const DECLARED_BYTES: usize = 2048;
const SYSTEM_BYTES: usize = 1024;
/// What `gemv_grouped` declares, and how many slots and experts it has room for. Mirrored by the kernel.
const GROUPS_BYTES: usize = 7 << 10;
const MAX_GROUPED_SLOTS: usize = 512;
const MAX_GROUPED_EXPERTS: usize = 256;
/// Columns of a normed row that a thread holds: `VALUES` fours.
const NORM_COLUMNS: usize = 4 * 3;
/// The most warps of a block, and as many as let two blocks share a multiprocessor.
const MAX_WARPS: usize = 16;
const USUAL_WARPS: usize = 10;
/// The most weights of a product that has multiprocessors to itself: one that takes long has little use of the launches around it.
const MAX_WEIGHTS_ALONE: usize = 256 << 20;

/// Everything that a grid depends on.
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that have nothing to do with each other"
)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemvShape {
    pub(crate) weights: GemvWeights,
    pub(crate) columns: usize,
    /// Output rows of the joined matrix up to the last part's end; of a pair, of one of the two.
    pub(crate) outputs: usize,
    pub(crate) pair: bool,
    /// Whether a pair's outputs are written as prepared rows, in whole blocks of 32.
    pub(crate) codes: bool,
    /// Of a stack of experts, how many a row is routed to.
    pub(crate) top_k: Option<usize>,
    /// Whether a launch before prepares its input.
    pub(crate) ready: bool,
    /// Whether the input is normed, by this launch or by one before: a block's threads hold a row then.
    pub(crate) normed: bool,
    pub(crate) card: GemvDevice,
}

/// Facts of the card that grids depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemvDevice {
    pub(crate) multiprocessors: usize,
    /// The most shared memory a block may have; a multiprocessor has hardly more.
    pub(crate) shared_bytes: usize,
    /// Clusters of blocks, in which each prepares some of the rows for all of them.
    pub(crate) clusters: Option<ClusterCapacity>,
    /// Stages that the cp.async ring of a warp should have. Sums do not depend on it.
    pub(crate) ring: usize,
}

/// What `gemv_grouped` is compiled with, so that most bytes are on their way.
#[derive(Clone, Copy)]
pub(super) struct GroupedSize {
    /// Stages of a warp's ring.
    pub(super) ring: usize,
    /// The most registers of a thread.
    pub(super) registers: usize,
}

impl GroupedSize {
    /// Gate and up of 26B-A4B have blocks of 11 warps: two on a multiprocessor with 88 registers, which other formats than the plainest need more
    /// of, so that they have one, and a longer ring. Blocks of down have 6 warps, and whole rows to prepare.
    pub(super) fn of(weights: GemvWeights, ready: bool) -> GroupedSize {
        use FragmentFormat as F;
        let GemvWeights::Fragments(format) = weights else {
            unreachable!("experts are packed")
        };
        let (ring, registers) = match (ready, format) {
            (true, F::Q8 | F::Q4 | F::Q5 | F::N4) => (2, 88),
            (true, _) => (4, 128),
            (false, _) if format.k_block_inputs() == 64 => (3, 112),
            (false, _) => (3, 160),
        };
        GroupedSize { ring, registers }
    }
}

impl GemvShape {
    /// M-tiles that must stay together.
    pub(crate) fn granule(self) -> usize {
        match (self.pair, self.codes) {
            (false, _) => 1,
            (true, false) => 2,
            (true, true) => 4,
        }
    }

    pub(crate) fn m_tiles(self) -> usize {
        self.outputs.div_ceil(self.weights.m_tile()) * (1 + usize::from(self.pair))
    }

    /// Stages of an M-tile.
    pub(super) fn stages(self) -> usize {
        self.columns.div_ceil(self.weights.stage().0)
    }

    /// Columns of the whole input up to the end of its last stage.
    pub(crate) fn padded(self) -> usize {
        self.stages() * self.weights.stage().0
    }

    /// Warps that share an M-tile, and how many such teams a block has.
    pub(super) fn teams(self) -> (usize, usize) {
        let stages = self.stages();
        // A norm's row is held by the block's threads.
        let least = match self.columns.div_ceil(32 * NORM_COLUMNS) {
            warps if self.normed && warps <= MAX_WARPS => warps,
            _ => 1,
        };
        if self.weights.are_packed() || self.m_tiles() < 8 * HOPPER_MULTIPROCESSORS {
            // As many teams as a block has M-tiles for, and threads enough for a row.
            let most = self
                .m_tiles()
                .div_ceil(HOPPER_MULTIPROCESSORS * (1 + usize::from(self.pair)));
            let teams = |split: usize| (8 / split).min(most).max(least.div_ceil(split)).max(1);
            // The least idle warps; of equals, about as many warps as let two blocks share a multiprocessor.
            let few = stages.min(4);
            return (few..=stages.min(least.max(12)))
                .map(|split| (split, teams(split)))
                .filter(|&(split, teams)| split * teams <= MAX_WARPS && teams <= most.max(1))
                .min_by_key(|&(split, teams)| {
                    let idle = stages.div_ceil(split) * split;
                    (idle, (split * teams).abs_diff(USUAL_WARPS))
                })
                .unwrap_or((stages.min(MAX_WARPS), 1));
        }
        // A reduction over lanes is dear beside a stage of floats: a warp takes several stages before.
        let split = stages.div_ceil(5);
        (split, (10 / split).max(least.div_ceil(split)).max(1))
    }

    pub(crate) fn warps(self) -> usize {
        let (split, teams) = self.teams();
        split * teams
    }

    /// Whether a block's threads can hold a row to norm it.
    pub(crate) fn can_norm(self) -> bool {
        self.columns <= self.warps() * 32 * NORM_COLUMNS
    }

    /// M-tiles of a block, the most of them.
    pub(super) fn a_block(self, blocks: usize) -> usize {
        (self.m_tiles() / self.granule()).div_ceil(blocks) * self.granule()
    }

    /// Of one row alone: how many blocks, the first of the grid, have as many, and 2^16 times how many fewer the others have.
    pub(super) fn shares(self, blocks: usize) -> u32 {
        let full = match self.m_tiles() / self.granule() % blocks {
            0 => blocks,
            full => full,
        };
        (full | self.granule() << 16) as u32
    }

    /// Whether one row has one block on each multiprocessor, with so long rings that a block of another large product finds no room beside
    /// it. Launches that overlap take multiprocessors as they find them, so that some have three blocks and others none. E4B in Q8_0
    /// decodes 5 % faster alone, 12B 1 %; formats that take more instructions for a byte want more warps than one block has.
    pub(crate) fn alone(self) -> bool {
        let fits = || {
            let needed = self.shared_bytes(ALONE_STAGES, 1, self.blocks_alone());
            needed + DECLARED_BYTES <= self.card.shared_bytes
        };
        self.card.clusters.is_some()
            && self.weights == GemvWeights::Fragments(ALONE_FORMAT)
            && self.top_k.is_none()
            && self.columns * self.outputs <= MAX_WEIGHTS_ALONE
            && fits()
    }

    fn blocks_alone(self) -> usize {
        let granules = self.m_tiles() / self.granule();
        self.card.multiprocessors.min(granules)
    }

    /// Stages of a warp's ring: as chosen, where as many rows share a block then as with the usual number. That one is less where a
    /// small card has no room for it: of 31B in Q4_0, of Q6_K in E4B.
    pub(super) fn ring(self, rows: usize) -> usize {
        if rows == 1 && self.alone() {
            return ALONE_STAGES;
        }
        let chosen = self.card.ring;
        let is_roomy = |ring: usize| {
            let most = self.shared_bytes(ring, MAX_ROWS, 1) + DECLARED_BYTES;
            most <= self.card.shared_bytes + SYSTEM_BYTES
        };
        // Most often there is nothing to search for.
        if is_roomy(chosen.max(USUAL_STAGES)) {
            return chosen;
        }
        let fits = |ring: usize, rows: usize| self.block_counts(ring, rows).next().is_some();
        // Routed rows have no other blocks to go to.
        let most_rows = if self.top_k.is_some() { MAX_ROWS } else { 1 };
        let mut rings = (2..=USUAL_STAGES).rev();
        let usual = rings.find(|ring| fits(*ring, most_rows)).unwrap_or(1);
        let mut all_rows = [1, 2, 4, 8].into_iter();
        if chosen != USUAL_STAGES && all_rows.all(|rows| fits(chosen, rows) || !fits(usual, rows)) {
            chosen
        } else {
            usual
        }
    }

    fn shared_bytes(self, ring: usize, rows: usize, blocks: usize) -> usize {
        let (split, teams) = self.teams();
        let partials = 2 * self.batch(rows, blocks) * split * rows * self.weights.m_tile() * 4;
        split * teams * ring * self.weights.stage().1
            + partials
            + self.weights.input_bytes(self.padded(), rows)
    }

    /// Whether the outputs of a pair come in whole blocks of 32 from every block and batch of M-tiles, for as many rows as an entry has.
    pub(crate) fn ends_in_blocks(self, rows: usize) -> bool {
        const M_TILES: usize = 4;
        self.blocks(rows).is_some_and(|blocks| {
            let whole = self.m_tiles().is_multiple_of(M_TILES)
                && self.a_block(blocks).is_multiple_of(M_TILES);
            whole && self.batch(rows, blocks).is_multiple_of(M_TILES)
        })
    }

    /// M-tiles that a block sums up before it reduces them.
    pub(super) fn batch(self, rows: usize, blocks: usize) -> usize {
        let (_, teams) = self.teams();
        let batch = match rows {
            1 | 2 => 8,
            4 => 4,
            _ => 2,
        };
        (batch * teams).min(self.a_block(blocks))
    }

    /// Blocks that prepare rows for each other, for as many rows as an entry has.
    pub(crate) fn cluster(self, rows: usize) -> usize {
        if self.card.clusters.is_some() && self.top_k.is_none() && !self.ready {
            rows.min(MAX_CLUSTER)
        } else {
            1
        }
    }

    /// Matrices that so many rows multiply with: of experts, about as many as are distinct among those rows are routed to.
    fn matrices(self, rows: usize) -> usize {
        match (self.top_k, rows) {
            (None, _) => 1,
            (Some(top_k), 1) => top_k,
            (Some(top_k), _) => (rows * top_k * 13).div_ceil(16),
        }
    }

    /// The most registers of a thread, for as many rows as an entry has. Mirrors the kernel's `__maxnreg__`.
    fn registers(self, rows: usize) -> usize {
        let packed = self.weights.are_packed();
        let little = self.ready || self.card.clusters.is_some() || self.top_k.is_some();
        let few = rows == 1 || packed && little;
        if few { 96 } else { 128 }
    }

    /// Blocks for as many rows as an entry has (of routed experts, for one row): all resident, and with equal work. `None` if the
    /// input of so many rows does not fit.
    pub(super) fn blocks(self, rows: usize) -> Option<usize> {
        let ring = self.ring(rows);
        if rows == 1 && self.alone() {
            return Some(self.blocks_alone());
        }
        let multiprocessors = self.card.multiprocessors;
        let granules = self.m_tiles() / self.granule();
        let in_flight = self.warps() * ring * self.weights.stage().1;
        // Measured on an H200: the more bytes are in flight the more of the bandwidth is drawn, whichever multiprocessor has
        // them; yet one that has more blocks than others is a little late.
        let matrices = self.matrices(rows);
        let cost = |blocks: usize| {
            let (share, blocks) = (granules.div_ceil(blocks), blocks * matrices);
            let in_flight = (blocks * in_flight) as f64 / (36e3 * multiprocessors as f64);
            let drawn = 1.0 - (-1.2 * in_flight).exp();
            let latest = share * blocks.div_ceil(multiprocessors) * multiprocessors;
            0.8 * (share * blocks) as f64 / drawn + 0.2 * latest as f64
        };
        self.block_counts(ring, rows)
            .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
    }

    /// Numbers of blocks with equal work that are all resident with rings of so many stages.
    fn block_counts(self, ring: usize, rows: usize) -> impl Iterator<Item = usize> {
        let GemvDevice {
            multiprocessors,
            shared_bytes,
            clusters,
            ring: _,
        } = self.card;
        let cluster = self.cluster(rows);
        let at_once = move |each: usize| match clusters {
            Some(capacity) if cluster > 1 => capacity.blocks(cluster, each),
            _ => multiprocessors * each,
        };
        let usable = at_once(1);
        let granules = self.m_tiles() / self.granule();
        let resident = move |blocks: usize| {
            let by_shared = (shared_bytes + SYSTEM_BYTES)
                / (self.shared_bytes(ring, rows, blocks) + DECLARED_BYTES);
            let by_registers = 65536 / (self.registers(rows) * 32 * self.warps());
            at_once(by_shared.min(by_registers.max(1)))
        };
        let matrices = self.matrices(rows);
        let even =
            (1..=granules).map(move |share| granules.div_ceil(share).next_multiple_of(cluster));
        let some = move |b: &usize| (*b * matrices).min(usable) <= resident(*b);
        let all = move |b: &usize| *b == cluster || *b * matrices <= resident(*b);
        even.filter(some).filter(all)
    }

    /// The grid of a bucket with a given number of blocks.
    pub(crate) fn grid_of(self, rows: usize, blocks: usize) -> Grid {
        Grid {
            entry: rows.trailing_zeros() as usize,
            shared_bytes: self.shared_bytes(self.ring(rows), rows, blocks),
            cluster: self.cluster(rows),
            ..Grid::new((blocks, 1), 32 * self.warps())
        }
    }

    /// The grid of a bucket; past [`MAX_ROWS`], so many rows at a time.
    pub(crate) fn grid(self, rows: usize) -> Grid {
        if rows > MAX_ROWS {
            let grid = self.grid(MAX_ROWS);
            return Grid {
                blocks: (grid.blocks.0, grid.blocks.1 * rows.div_ceil(MAX_ROWS)),
                ..grid
            };
        }
        let bucket = rows.next_power_of_two();
        let mut entries = [8, 4, 2, 1].into_iter().filter(|&rows| rows <= bucket);
        let (rows, blocks) = entries
            .find_map(|rows| Some((rows, self.blocks(rows)?)))
            .expect("one row fits");
        let grid = self.grid_of(rows, blocks);
        Grid {
            blocks: (blocks, bucket / rows),
            ..grid
        }
    }

    /// Blocks of `gemv_grouped` on a multiprocessor with a ring of so many stages.
    fn grouped_blocks(self, ring: usize) -> usize {
        let shared = self.shared_bytes(ring, MAX_ROWS, 1) + GROUPS_BYTES;
        let by_shared = (self.card.shared_bytes + SYSTEM_BYTES) / (shared + SYSTEM_BYTES);
        by_shared.min(65536 / (self.grouped_registers() * 32 * self.warps()))
    }

    fn grouped_registers(self) -> usize {
        GroupedSize::of(self.weights, self.ready).registers
    }

    /// Stages of its ring.
    pub(super) fn grouped_ring(self) -> usize {
        GroupedSize::of(self.weights, self.ready).ring
    }

    /// Whether `gemv_grouped` takes batches of up to so many rows.
    pub(crate) fn groups(self, rows: usize, experts: usize) -> bool {
        let slots = rows * self.top_k.unwrap_or(1);
        slots <= MAX_GROUPED_SLOTS
            && experts <= MAX_GROUPED_EXPERTS
            && self.grouped_blocks(self.grouped_ring()) > 0
    }

    /// The grid of `gemv_grouped`, for any number of rows.
    pub(crate) fn grouped_grid(self) -> Grid {
        let ring = self.grouped_ring();
        let blocks = self.card.multiprocessors * self.grouped_blocks(ring);
        Grid {
            entry: 8,
            shared_bytes: self.shared_bytes(ring, MAX_ROWS, 1),
            ..Grid::new((blocks, 1), 32 * self.warps())
        }
    }

    /// The grid of `gemv_routed_*`.
    pub(crate) fn routed_grid(self, rows: usize) -> Grid {
        let bucket = rows.next_power_of_two();
        let blocks = self.blocks(bucket).expect("rows of experts fit");
        let grid = self.grid_of(bucket, blocks);
        Grid {
            entry: 4 + grid.entry,
            blocks: (blocks, rows * self.top_k.unwrap_or(1)),
            ..grid
        }
    }
}

#[cfg(test)]
mod tests;
