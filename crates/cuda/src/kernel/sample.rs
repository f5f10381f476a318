//! Twin of the kernels in `kernels/sample`, which share their params. No steps of a plan: `crate::run::sample` launches them behind
//! the program.

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
/// Blocks that share a row where all of its logits are read, at most.
const SHARES: usize = 64;
/// Blocks that are enough for any card. With more rows than that takes, a row has fewer: each block begins by finding the largest logit.
const ENOUGH_BLOCKS: usize = 1024;
/// Buckets of the histogram that truncates the whole vocabulary.
const BUCKETS: usize = 4096;

pub(crate) const MAX_VOCAB: usize = 262_144;
/// The largest top-k whose survivors one block sorts; above it the whole vocabulary is truncated.
pub(crate) const MAX_TOP_K: usize = 1024;
/// The most tokens per row that are reported with their log-probabilities.
pub(crate) const MAX_LOGPROBS: usize = 20;
/// A row without mask, or without log-probabilities.
pub(crate) const NONE: u32 = u32::MAX;

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
        masks: Address,
        maxima: Address,
        best: Address,
        weights: Address,
        counts: Address,
        cuts: Address,
        sums: Address,
        norms: Address,
        arrived: Address,
        samples: Address,
        results: Address,
        reports: Address,
        in_flight: Address,
        vocab: u32,
        max_rows: u32,
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
        mask: u32,
        logprobs: u32,
    }
}

params! {
    /// A penalty or bias of one logit, applied before anything else.
    pub(crate) struct Change {
        token: u32,
        seen: u32,
        by: f32,
        // The device's to write.
        original: f32,
    }
}

/// Words of a row's log-probabilities: the drawn token's, a count, then as many tokens and log-probabilities as there may be.
pub(crate) const REPORT_WORDS: usize = 2 + 2 * MAX_LOGPROBS;

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
    /// Draws from what top-p, or a top-k above [`MAX_TOP_K`], leave of the whole vocabulary.
    Truncated,
}

/// The kernels, in the order of [`specializations`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SampleKernel {
    Sample,
    Truncate,
    Logprobs,
}

pub(crate) fn specializations() -> [Specialization; 3] {
    let of = |kernel, entries| Specialization {
        kernel,
        entries,
        constants: vec![],
        params_bytes: SampleParams::BYTES,
    };
    [
        of("sample", &["sample_scan", "sample_pick"]),
        of("sample_truncate", &["sample_truncate"]),
        of("logprobs", &["logprobs_scan", "logprobs_pick"]),
    ]
}

/// The launches, in order. Log-probabilities come first: they are of the logits before anything changes them.
pub(crate) fn grids(
    draw: Draw,
    logprobs: bool,
    rows: usize,
    vocab: usize,
) -> impl Iterator<Item = (SampleKernel, Grid)> {
    let scan = Grid::new((vocab.div_ceil(CHUNK * SCAN_CHUNKS), rows), SCAN_THREADS);
    let shared = |entry, shares| Grid {
        entry,
        ..Grid::new((shares, rows), PICK_THREADS)
    };
    let shares = (ENOUGH_BLOCKS / rows.max(1)).clamp(1, SHARES);
    let pick = match draw {
        Draw::Greedy => None,
        Draw::Best => Some(shared(1, 1)),
        Draw::All | Draw::Truncated => Some(shared(1, shares)),
    };
    // A sum of exponentials depends on how it is cut, so that their number is the same in any company.
    let report = [scan, shared(1, SHARES)].map(|grid| (SampleKernel::Logprobs, grid));
    let truncate = (SampleKernel::Truncate, shared(0, shares));
    let report = report.into_iter().filter(move |_| logprobs);
    report
        .chain([(SampleKernel::Sample, scan)])
        .chain((draw == Draw::Truncated).then_some(truncate))
        .chain(pick.map(|grid| (SampleKernel::Sample, grid)))
}

/// Words of one row's mask.
pub(crate) fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// Offsets of the sampler's arrays in its device memory, and the end of them.
pub(crate) struct ScratchAt {
    pub(crate) best: usize,
    pub(crate) sums: usize,
    pub(crate) weights: usize,
    pub(crate) cuts: usize,
    pub(crate) counts: usize,
    pub(crate) maxima: usize,
    pub(crate) norms: usize,
    pub(crate) arrived: usize,
    /// One set per batch in flight.
    pub(crate) masks: usize,
    pub(crate) bytes: usize,
}

impl ScratchAt {
    pub(crate) fn new(vocab: usize, max_rows: usize) -> ScratchAt {
        let rows = max_rows.min(MAX_DRAWN_ROWS);
        let mut next = 0;
        let mut part = |bytes: usize| {
            let start = next;
            next = (next + bytes).next_multiple_of(16);
            start
        };
        ScratchAt {
            best: part(rows * SHARES * 8),
            sums: part(rows * SHARES * 8),
            weights: part(rows * BUCKETS * 8),
            cuts: part(rows * 8),
            counts: part(rows * BUCKETS * 4),
            maxima: part(rows * vocab.div_ceil(CHUNK) * 4),
            norms: part(rows * 4),
            arrived: part(rows * 4),
            masks: part(MASK_SETS * rows * mask_words(vocab) * 4),
            bytes: part(0),
        }
    }
}

/// Batches that may have masks on the device at a time.
pub(crate) const MASK_SETS: usize = 2;

/// Bytes of device memory that a sampler takes.
pub(crate) fn sampler_bytes(vocab: usize, max_rows: usize) -> usize {
    ScratchAt::new(vocab, max_rows).bytes
}
