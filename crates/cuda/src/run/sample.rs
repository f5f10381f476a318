//! Sampling on the device: which rows it takes, their settings as words of a batch, and the launches.
//!
//! The device takes rows that want a token alone, each either greedily, among at most 1024 best (top-k), or from the whole
//! vocabulary without a top-p. Left to the host, with their logits copied to it, are rows that have a mask, want
//! log-probabilities or logits, have a top-k above 1024 or a top-p over the whole vocabulary; and all rows of a batch with more
//! sampled rows, or more penalties and biases, than there is room for.
//!
//! [`carat_model::sampling`] defines a draw. Its logarithms are taken in double precision on both sides, so a draw can
//! only differ where two scores are the same to all but the last bit.

use std::sync::Arc;

use carat_model::{
    TokenId,
    backend::{self as model, RowOutput},
    sampling::Sampling,
};

use crate::{
    device::{Buffer, Device, HostBuffer, Module, launch},
    error::CudaError,
    kernel::{
        CHANGE, CHANGE_WORDS, Change, Draw, MAX_DRAWN_ROWS, MAX_TOP_K, MAX_VOCAB, SETTING_WORDS,
        SampleParams, SamplerInputs, Setting, grids,
        params::{Field, Params},
        sampler_bytes, scratch_bytes,
    },
};

/// Batches that may be in flight: each slot has results of its own.
pub(crate) const IN_FLIGHT: usize = 2;

/// A row to be sampled.
#[derive(Clone, Copy)]
pub(crate) struct RowToSample<'a> {
    pub(crate) sampling: &'a Sampling,
    pub(crate) history: &'a [TokenId],
    pub(crate) position: usize,
}

impl<'a> RowToSample<'a> {
    /// A row as the device could sample it; `None` if it is the host's.
    pub(crate) fn of(draw: &model::Draw<'a>, position: usize) -> Option<RowToSample<'a>> {
        let is_taken = draw.output == RowOutput::Token && draw.mask.is_none();
        (is_taken && kind(draw.sampling).is_some()).then_some(RowToSample {
            sampling: draw.sampling,
            history: draw.history,
            position,
        })
    }
}

/// Offsets of the settings among a batch's words.
pub(crate) struct SettingsAt {
    /// The first word of the rows' settings.
    pub(crate) settings: usize,
    pub(crate) most_rows: usize,
    /// The first word of the changes of their logits.
    pub(crate) changes: usize,
}

/// Writes the settings of rows. Returns the kind of work and the end of the words in use; `None` leaves the batch to the host.
pub(crate) fn write(
    rows_to_sample: &[RowToSample<'_>],
    vocab: usize,
    at: &SettingsAt,
    words: &mut [u32],
) -> Option<(Draw, usize)> {
    if rows_to_sample.len() > at.most_rows || vocab > MAX_VOCAB {
        return None;
    }
    let kinds: Option<Vec<Draw>> = rows_to_sample
        .iter()
        .map(|row_to_sample| kind(row_to_sample.sampling))
        .collect();
    let draw = kinds?.into_iter().max()?;
    let mut end = at.changes;
    for (r, row_to_sample) in rows_to_sample.iter().enumerate() {
        let RowToSample {
            sampling, position, ..
        } = *row_to_sample;
        let changes = changes(row_to_sample, vocab);
        if end + changes.len() * CHANGE > at.changes + CHANGE_WORDS {
            return None;
        }
        let setting = Setting {
            temperature: sampling.temperature,
            top_k: sampling.top_k as u32,
            top_p: sampling.top_p,
            floor: sampling.min_p.ln(),
            repeat_penalty: sampling.repeat_penalty,
            position: position as u32,
            seed: sampling.seed,
            changes: end as u32,
            change_count: changes.len() as u32,
        };
        put(&setting, &mut words[at.settings + r * SETTING_WORDS..]);
        for change in &changes {
            put(change, &mut words[end..]);
            end += CHANGE;
        }
    }
    Some((draw, end))
}

fn kind(sampling: &Sampling) -> Option<Draw> {
    match sampling {
        Sampling { temperature, .. } if *temperature == 0.0 => Some(Draw::Greedy),
        Sampling {
            top_k: 0, top_p, ..
        } if *top_p >= 1.0 => Some(Draw::All),
        Sampling {
            top_k: 1..=MAX_TOP_K,
            ..
        } => Some(Draw::Best),
        _ => None,
    }
}

/// Penalties of the tokens seen recently, then biases, sorted by token.
fn changes(row_to_sample: &RowToSample<'_>, vocab: usize) -> Vec<Change> {
    let RowToSample {
        sampling, history, ..
    } = row_to_sample;
    let mut changes = Vec::new();
    if sampling.penalizes() {
        let window = history.len().saturating_sub(sampling.penalty_window);
        let mut recent = history[window..].to_vec();
        recent.sort_unstable();
        changes.extend(recent.chunk_by(|a, b| a == b).map(|same| Change {
            token: same[0],
            seen: 1,
            by: sampling.presence_penalty + sampling.frequency_penalty * same.len() as f32,
        }));
    }
    let biases = sampling.logit_bias.iter();
    changes.extend(biases.map(|&(token, by)| Change { token, seen: 0, by }));
    changes.retain(|change| (change.token as usize) < vocab);
    // Stable: changes of one token are applied in this order.
    changes.sort_by_key(|change| change.token);
    changes
}

fn put<F: Field + Params>(value: &F, words: &mut [u32]) {
    for (word, bytes) in words.iter_mut().zip(value.bytes().as_chunks().0) {
        *word = u32::from_ne_bytes(*bytes);
    }
}

/// The loaded kernel with its memory.
pub(crate) struct Sampler {
    module: Arc<Module>,
    params: Vec<u8>,
    vocab: usize,
    most_rows: usize,
    results: HostBuffer,
    _scratch: Buffer,
}

impl Sampler {
    pub(crate) fn new(
        device: &Arc<Device>,
        module: Arc<Module>,
        vocab: usize,
        most_rows: usize,
        inputs: &SamplerInputs,
    ) -> Result<Sampler, CudaError> {
        let most_rows = most_rows.min(MAX_DRAWN_ROWS);
        let (maxima, best) = scratch_bytes(vocab);
        let scratch = device.allocate("sampling", sampler_bytes(vocab, most_rows))?;
        let results = device.allocate_host("samples", IN_FLIGHT * most_rows * 4)?;
        let best_at = scratch.address();
        let maxima_at = best_at.offset(best * most_rows);
        let arrived = maxima_at.offset(maxima * most_rows);
        let params = SampleParams {
            rows: inputs.rows,
            logits: inputs.logits,
            settings: inputs.settings,
            words: inputs.words,
            maxima: maxima_at,
            best: best_at,
            arrived,
            samples: inputs.samples,
            results: results.address(),
            in_flight: inputs.in_flight,
            vocab: vocab as u32,
            most_rows: most_rows as u32,
        };
        Ok(Sampler {
            module,
            params: params.bytes(),
            vocab,
            most_rows,
            results,
            _scratch: scratch,
        })
    }

    /// Queues the sampling of up to so many rows, and calls `queued` after each launch.
    pub(crate) fn run(
        &self,
        draw: Draw,
        rows: usize,
        mut queued: impl FnMut() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let rows = rows.min(self.most_rows);
        grids(draw, rows, self.vocab).try_for_each(|grid| {
            launch(&self.module, grid, &self.params)?;
            queued()
        })
    }

    /// The first tokens of the batch in a slot, which has been waited for.
    pub(crate) fn tokens(&self, in_flight: usize, count: usize) -> impl Iterator<Item = TokenId> {
        let words = self.results.bytes().as_chunks().0;
        let start = in_flight * self.most_rows;
        words[start..start + count]
            .iter()
            .map(|word| u32::from_ne_bytes(*word))
    }
}

#[cfg(test)]
mod tests;
