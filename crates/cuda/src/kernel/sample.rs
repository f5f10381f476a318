//! Twin of `kernels/sample/sample.cu`. No step of a plan: `crate::run::sample` launches it behind the program.

use super::{RowsAt, Specialization};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

/// Logits of a chunk, whose largest is kept.
const CHUNK: usize = 128;
/// Chunks per block of the scan.
const SCAN_CHUNKS: usize = 16;
const SCAN_THREADS: usize = 256;
const PICK_THREADS: usize = 1024;
/// Blocks that share a row without top-k.
const SHARES: usize = 64;

pub(crate) const MAX_VOCAB: usize = 262_144;
pub(crate) const MAX_TOP_K: usize = 1024;

/// The most sampled rows per batch that the device takes.
pub(crate) const MAX_DRAWN_ROWS: usize = 256;
/// Words for penalties and biases of a batch.
pub(crate) const CHANGE_WORDS: usize = 16384 * CHANGE;
pub(crate) const SETTING_WORDS: usize = Setting::BYTES / 4;
pub(crate) const CHANGE: usize = Change::BYTES / 4;
params! {
    pub(crate) struct SampleParams {
        rows: RowsAt,
        logits: Address,
        settings: Address,
        words: Address,
        maxima: Address,
        best: Address,
        arrived: Address,
        samples: Address,
        results: Address,
        in_flight: Address,
        vocab: u32,
        most_rows: u32,
    }
}

params! {
    /// Sampling parameters of a row.
    pub(crate) struct Setting {
        temperature: f32,
        top_k: u32,
        top_p: f32,
        floor: f32,
        repeat_penalty: f32,
        position: u32,
        seed: u64,
        changes: u32,
        change_count: u32,
    }
}

params! {
    /// A penalty or bias of one logit, applied before anything else.
    pub(crate) struct Change {
        token: u32,
        seen: u32,
        by: f32,
    }
}

/// Addresses that the sampler shares with the batch.
pub(crate) struct SamplerInputs {
    pub(crate) rows: RowsAt,
    pub(crate) logits: Address,
    pub(crate) settings: Address,
    /// The first word of the batch.
    pub(crate) words: Address,
    /// The word that holds the batch's slot in flight.
    pub(crate) in_flight: Address,
    /// Tokens on the device, where a lookahead batch reads them.
    pub(crate) samples: Address,
}

/// The most work that any row of a batch needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Draw {
    /// The largest logits.
    Greedy,
    /// Draws among the best k.
    Best,
    /// Draws from the whole vocabulary.
    All,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "sample",
        entries: &["sample_scan", "sample_pick"],
        constants: vec![],
        params_bytes: SampleParams::BYTES,
    }
}

/// The launches, in order.
pub(crate) fn grids(draw: Draw, rows: usize, vocab: usize) -> impl Iterator<Item = Grid> {
    let scan = Grid::new((vocab.div_ceil(CHUNK * SCAN_CHUNKS), rows), SCAN_THREADS);
    let shares = match draw {
        Draw::Greedy => None,
        Draw::Best => Some(1),
        Draw::All => Some(SHARES),
    };
    let pick = shares.map(|shares| Grid {
        entry: 1,
        ..Grid::new((shares, rows), PICK_THREADS)
    });
    std::iter::once(scan).chain(pick)
}

/// Bytes per row of `maxima` and of `best`.
pub(crate) fn scratch_bytes(vocab: usize) -> (usize, usize) {
    (vocab.div_ceil(CHUNK) * 4, SHARES * 8)
}

/// Bytes of device memory that a sampler takes.
pub(crate) fn sampler_bytes(vocab: usize, most_rows: usize) -> usize {
    let (maxima, best) = scratch_bytes(vocab);
    most_rows.min(MAX_DRAWN_ROWS) * (maxima + best + 4)
}
