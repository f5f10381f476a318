//! Sampling on the device: which rows it takes, their settings as words of a batch, and the launches.
//!
//! The device takes rows of every sampling, masked or not, that want a token or its log-probability with those of at most 20
//! others. Left to the host, with their logits copied to it, are rows that want more, or whole logits; and the last rows of a
//! batch with more sampled rows, or more penalties and biases, than there is room for.
//!
//! [`carat_model::sampling`] defines a draw. Its logarithms are taken in double precision on both sides, so a draw can
//! only differ where two scores are the same to all but the last bit; or, where top-p truncates the whole vocabulary, by the error
//! of the definition's own sum, which is of 32-bit floats.

use std::sync::Arc;

use carat_model::{
    TokenId,
    backend::{self as model, RowOutput, RowResult},
    sampling::{Sampling, TokenMask},
};

use crate::{
    device::{Address, Buffer, Device, HostBuffer, Module, launch},
    error::CudaError,
    kernel::{
        CHANGE, CHANGE_WORDS, Change, Draw, MASK_SETS, MAX_DRAWN_ROWS, MAX_LOGPROBS, MAX_TOP_K,
        MAX_VOCAB, NONE, REPORT_WORDS, SETTING_WORDS, SampleParams, SamplerInputs, ScratchAt,
        Setting, grids, mask_words,
        params::{Field, Params},
    },
};

/// Batches that may be in flight: each slot has masks and results of its own.
pub(crate) const IN_FLIGHT: usize = MASK_SETS;

/// A row to be sampled.
#[derive(Clone, Copy)]
pub(crate) struct RowToSample<'a> {
    pub(crate) sampling: &'a Sampling,
    pub(crate) history: &'a [TokenId],
    pub(crate) position: usize,
    pub(crate) mask: Option<&'a TokenMask>,
    /// Likeliest tokens to report beside the drawn one; `None` if no log-probability is wanted.
    pub(crate) logprobs: Option<usize>,
}

impl<'a> RowToSample<'a> {
    /// A row as the device could sample it; `None` if it is the host's.
    pub(crate) fn of(draw: &model::Draw<'a>, position: usize) -> Option<RowToSample<'a>> {
        let logprobs = match draw.output {
            RowOutput::Token => None,
            RowOutput::Logprobs { top } if top <= MAX_LOGPROBS => Some(top),
            RowOutput::Logprobs { .. } | RowOutput::Logits => return None,
        };
        Some(RowToSample {
            sampling: draw.sampling,
            history: draw.history,
            position,
            mask: draw.mask,
            logprobs,
        })
    }
}

/// Offsets of the settings among a batch's words.
pub(crate) struct SettingsAt {
    /// The first word of the rows' settings.
    pub(crate) settings: usize,
    pub(crate) max_rows: usize,
    /// The first word of the changes of their logits.
    pub(crate) changes: usize,
}

/// The launches that a batch's rows need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) draw: Draw,
    pub(crate) logprobs: bool,
}

/// Settings as they were written.
pub(crate) struct Written<'a> {
    pub(crate) work: Work,
    /// The end of the words in use.
    pub(crate) end: usize,
    /// Per row, whether the device samples it.
    pub(crate) taken: Vec<bool>,
    /// In the order that settings number them.
    pub(crate) masks: Vec<&'a TokenMask>,
}

/// Writes the settings of the rows that the device could sample. `None` leaves all of them to the host.
pub(crate) fn write<'a>(
    rows_to_sample: &[Option<RowToSample<'a>>],
    vocab: usize,
    at: &SettingsAt,
    words: &mut [u32],
) -> Option<Written<'a>> {
    if vocab > MAX_VOCAB {
        return None;
    }
    let greedy = Sampling::greedy();
    // Takes the place of a row of the host, whose logits it leaves as they are.
    let stand_in = RowToSample {
        sampling: &greedy,
        history: &[],
        position: 0,
        mask: None,
        logprobs: None,
    };
    let mut written = Written {
        work: Work {
            draw: Draw::Greedy,
            logprobs: false,
        },
        end: at.changes,
        taken: vec![false; rows_to_sample.len()],
        masks: Vec::new(),
    };
    for (r, row) in rows_to_sample.iter().take(at.max_rows).enumerate() {
        let fitting = row.as_ref().and_then(|row| {
            let changes = changes(row, vocab);
            let end = written.end + changes.len() * CHANGE;
            (end <= at.changes + CHANGE_WORDS).then_some((row, changes))
        });
        let mut mask = NONE;
        if let Some((row, _)) = &fitting {
            written.taken[r] = true;
            written.work.draw = written.work.draw.max(kind(row.sampling));
            written.work.logprobs |= row.logprobs.is_some();
            if let Some(allowed) = row.mask {
                mask = written.masks.len() as u32;
                written.masks.push(allowed);
            }
        }
        let (row, changes) = fitting.unwrap_or((&stand_in, Vec::new()));
        let sampling = row.sampling;
        let setting = Setting {
            temperature: sampling.temperature,
            top_k: u32::try_from(sampling.top_k).unwrap_or(u32::MAX),
            top_p: sampling.top_p,
            floor: sampling.min_p.ln(),
            repeat_penalty: sampling.repeat_penalty,
            position: row.position as u32,
            seed: sampling.seed,
            changes: written.end as u32,
            change_count: changes.len() as u32,
            mask,
            logprobs: row.logprobs.map_or(NONE, |top| top as u32),
        };
        put(&setting, &mut words[at.settings + r * SETTING_WORDS..]);
        for change in &changes {
            put(change, &mut words[written.end..]);
            written.end += CHANGE;
        }
    }
    written.taken.contains(&true).then_some(written)
}

fn kind(sampling: &Sampling) -> Draw {
    match sampling {
        Sampling { temperature, .. } if *temperature == 0.0 => Draw::Greedy,
        Sampling {
            top_k: 0, top_p, ..
        } if *top_p >= 1.0 => Draw::All,
        Sampling {
            top_k: 1..=MAX_TOP_K,
            ..
        } => Draw::Best,
        _ => Draw::Truncated,
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
            original: 0.0,
        }));
    }
    let biases = sampling.logit_bias.iter();
    changes.extend(biases.map(|&(token, by)| Change {
        token,
        seen: 0,
        by,
        original: 0.0,
    }));
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

/// The loaded kernels with their memory.
pub(crate) struct Sampler {
    /// In the order of `SampleKernel`.
    modules: [Arc<Module>; 3],
    params: Vec<u8>,
    vocab: usize,
    max_rows: usize,
    results: HostBuffer,
    reports: HostBuffer,
    /// Masks on their way to the device, per slot in flight.
    masks: [HostBuffer; IN_FLIGHT],
    masks_at: usize,
    scratch: Buffer,
}

impl Sampler {
    pub(crate) fn new(
        device: &Arc<Device>,
        modules: [Arc<Module>; 3],
        vocab: usize,
        max_rows: usize,
        inputs: &SamplerInputs,
    ) -> Result<Sampler, CudaError> {
        let max_rows = max_rows.min(MAX_DRAWN_ROWS);
        let at = ScratchAt::new(vocab, max_rows);
        let scratch = device.allocate("sampling", at.bytes)?;
        let on_host = |words: usize| device.allocate_host("samples", words * 4);
        let results = on_host(IN_FLIGHT * max_rows)?;
        let reports = on_host(IN_FLIGHT * max_rows * REPORT_WORDS)?;
        let mask_set = max_rows * mask_words(vocab);
        let part = |offset: usize| -> Address { scratch.address().offset(offset) };
        let params = SampleParams {
            rows: inputs.rows,
            logits: inputs.logits,
            settings: inputs.settings,
            words: inputs.words,
            masks: part(at.masks),
            maxima: part(at.maxima),
            best: part(at.best),
            weights: part(at.weights),
            counts: part(at.counts),
            cuts: part(at.cuts),
            sums: part(at.sums),
            norms: part(at.norms),
            arrived: part(at.arrived),
            samples: inputs.samples,
            results: results.address(),
            reports: reports.address(),
            in_flight: inputs.in_flight,
            vocab: vocab as u32,
            max_rows: max_rows as u32,
        };
        Ok(Sampler {
            modules,
            params: params.bytes(),
            vocab,
            max_rows,
            results,
            reports,
            masks: [on_host(mask_set)?, on_host(mask_set)?],
            masks_at: at.masks,
            scratch,
        })
    }

    /// Starts the copy of a batch's masks, beside the work under way. The batch that had the slot before has been waited for.
    pub(crate) fn copy_masks(
        &mut self,
        device: &Device,
        in_flight: usize,
        masks: &[&TokenMask],
    ) -> Result<(), CudaError> {
        if masks.is_empty() {
            return Ok(());
        }
        let mask_bytes = mask_words(self.vocab) * 4;
        let host = &mut self.masks[in_flight];
        for (bytes, mask) in host.bytes_mut().chunks_exact_mut(mask_bytes).zip(masks) {
            for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(mask.words()) {
                *to = word.to_ne_bytes();
            }
        }
        let to = self.masks_at + in_flight * self.max_rows * mask_bytes;
        device.copy_ahead(host, 0..masks.len() * mask_bytes, &self.scratch, to)
    }

    /// Queues the sampling of up to so many rows, and calls `queued` after each launch.
    pub(crate) fn run(
        &self,
        work: Work,
        rows: usize,
        mut queued: impl FnMut() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let rows = rows.min(self.max_rows);
        let mut grids = grids(work.draw, work.logprobs, rows, self.vocab);
        grids.try_for_each(|(kernel, grid)| {
            launch(&self.modules[kernel as usize], grid, &self.params)?;
            queued()
        })
    }

    /// Result of a row of the batch in a slot, which has been waited for; with log-probabilities if it wanted them.
    pub(crate) fn result(&self, in_flight: usize, row: usize, logprobs: bool) -> RowResult {
        let at = in_flight * self.max_rows + row;
        let mut result = RowResult {
            token: word(&self.results, at),
            ..RowResult::default()
        };
        if logprobs {
            let report = at * REPORT_WORDS;
            let (tokens, of_tokens) = (report + 2, report + 2 + MAX_LOGPROBS);
            let logprob = |at| f32::from_bits(word(&self.reports, at));
            let each = 0..word(&self.reports, report + 1) as usize;
            result.logprob = Some(logprob(report));
            result.top = each
                .map(|i| (word(&self.reports, tokens + i), logprob(of_tokens + i)))
                .collect();
        }
        result
    }
}

fn word(host: &HostBuffer, at: usize) -> u32 {
    u32::from_ne_bytes(host.bytes().as_chunks().0[at])
}

#[cfg(test)]
pub(crate) mod tests;
