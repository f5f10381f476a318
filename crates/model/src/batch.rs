//! A ragged batch: what its rows are fed, and which of them belong to which sequence.

use std::ops::Range;

use crate::{
    TokenId,
    backend::{BackendError, CompileOptions},
    kv::{KvGroup, PageId, PerGroup, pages_of},
    plan::Plan,
};

/// Input of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Feed<'a> {
    /// A token.
    Token(TokenId),
    /// The token that a sampled row of the batch in flight is given by its draw, counted among that batch's sampled rows.
    /// The draw has been queued; its result need not be known to the host.
    Sampled(u32),
    /// A row of an image or a sound in place of a token's embedding.
    Embedding {
        /// As wide as the model, and not scaled: it becomes the first value of the stream as it is.
        row: &'a [f32],
        /// The token whose rows the per-layer tables give, and that penalties see.
        token: TokenId,
    },
}

/// A ragged batch: prompt chunks and single decode tokens side by side.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// One per row.
    pub feeds: &'a [Feed<'a>],
    /// In order, covering `feeds` without gaps. Each run belongs to another sequence.
    pub runs: &'a [Run<'a>],
}

/// One sequence's share of a batch.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// Into [`Batch::feeds`]; never empty.
    pub rows: Range<usize>,
    /// Of the first row. Everything before it is already in the KV pages.
    pub position: usize,
    /// Pages by absolute place: entry `i` holds positions `i * PAGE_TOKENS ..`. They cover all rows of this run;
    /// sliding entries wholly behind the window of the first row may be [`PageId::FREED`]. Those that lie within this run as a
    /// whole may be [chunk pages](crate::backend::CompileOptions::chunk_pages), no two of a batch the same.
    pub pages: PerGroup<&'a [PageId]>,
    /// Trailing rows that get logits: 0 in mid-prompt, 1 usually, more for evaluation or to verify a draft.
    pub sampled: usize,
    /// Per row, the position behind the last that it sees in sliding-window layers; `None` where every row sees up to itself,
    /// as it does in full-attention layers in any case. For images, whose rows see each other both ways: the end lies within
    /// the run, rotation keeps the row's own position, and the window still ends what is seen behind.
    pub visible_end: Option<&'a [u32]>,
    /// Name of the tables, and what of them is known from earlier batches, so that not all of them need be read again; `None` for nothing.
    pub table: Option<TableRef>,
}

/// Page tables that go on from batch to batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRef {
    /// Names them. Below the most sequences that run side by side, and another for each run of a batch; a name may be given to
    /// another sequence later, of whose tables then nothing is known.
    pub id: u32,
    /// Entries from the first on that are as they were in the last batch that was taken with this name, but for those that have
    /// become [`PageId::FREED`]. They are not checked again.
    pub unchanged: PerGroup<usize>,
}

/// A row of a batch: the run it belongs to and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRef {
    /// Into [`Batch::runs`].
    pub run: usize,
    /// Into [`Batch::feeds`].
    pub row: usize,
    /// In its sequence.
    pub position: usize,
}

impl Feed<'_> {
    /// The token that is known already; `None` for one that is yet to be drawn.
    pub fn token(&self) -> Option<TokenId> {
        match self {
            Feed::Token(token) | Feed::Embedding { token, .. } => Some(*token),
            Feed::Sampled(_) => None,
        }
    }

    /// The token, where `sampled` is what the batch in flight was given. [`Batch::check`] has seen that it has the row.
    pub fn resolve(&self, sampled: &[TokenId]) -> TokenId {
        match self {
            Feed::Token(token) | Feed::Embedding { token, .. } => *token,
            Feed::Sampled(row) => sampled[*row as usize],
        }
    }
}

/// Tokens as feeds.
pub fn token_feeds(tokens: &[TokenId]) -> Vec<Feed<'static>> {
    tokens.iter().copied().map(Feed::Token).collect()
}

impl Run<'_> {
    /// The position behind the last that a row of the run sees in a sliding-window layer, `row` counted in the batch.
    pub fn sliding_end(&self, row: usize) -> usize {
        let place = row - self.rows.start;
        let own = self.position + place + 1;
        let beyond = self.visible_end.and_then(|ends| ends.get(place));
        beyond.map_or(own, |end| own.max(*end as usize))
    }
}

impl Batch<'_> {
    /// Rows that get logits.
    pub fn sampled_count(&self) -> usize {
        self.runs.iter().map(|run| run.sampled).sum()
    }

    /// Every row, in order.
    pub fn all_rows(&self) -> impl Iterator<Item = RowRef> {
        self.runs.iter().enumerate().flat_map(|(run, r)| {
            r.rows.clone().map(move |row| RowRef {
                run,
                row,
                position: r.position + (row - r.rows.start),
            })
        })
    }

    /// The rows that get logits, in order.
    pub fn sampled_rows(&self) -> impl Iterator<Item = RowRef> {
        self.all_rows().filter(|place| {
            place.row + self.runs[place.run].sampled >= self.runs[place.run].rows.end
        })
    }

    /// Everything that kernels rely on. Each executor checks a batch once, before anything is queued. `in_flight` is how many
    /// rows the batch in flight samples, if its draw is queued: the rows that [`Feed::Sampled`] may name.
    pub fn check(
        &self,
        plan: &Plan,
        options: &CompileOptions,
        in_flight: usize,
    ) -> Result<(), BackendError> {
        let wrong = |what: String| Err(BackendError::Unsupported { what });
        let sampled = self.sampled_count();
        if self.feeds.len() > options.max_rows || sampled > options.max_sampled {
            return wrong(format!(
                "a batch of {} rows with {sampled} sampled is over the compiled limits {} and {}",
                self.feeds.len(),
                options.max_rows,
                options.max_sampled
            ));
        }
        for feed in self.feeds {
            if let Some(what) = complaint(feed, plan, in_flight) {
                return wrong(what);
            }
        }
        let mut next = 0;
        for run in self.runs {
            if run.rows.start != next || run.rows.is_empty() || run.sampled > run.rows.len() {
                return wrong(format!(
                    "run of rows {:?} with {} sampled does not follow row {next}",
                    run.rows, run.sampled
                ));
            }
            next = run.rows.end;
            check_run(run, plan, options)?;
        }
        if next != self.feeds.len() {
            return wrong(format!("{next} rows in runs, {} fed", self.feeds.len()));
        }
        Ok(())
    }
}

fn complaint(feed: &Feed<'_>, plan: &Plan, in_flight: usize) -> Option<String> {
    match feed {
        Feed::Sampled(row) if *row as usize >= in_flight => Some(format!(
            "sampled row {row} of a batch in flight that samples {in_flight}"
        )),
        Feed::Embedding { row, .. } if plan.input_width() != Some(row.len()) => Some(format!(
            "an embedding of {} columns; the model takes {:?}",
            row.len(),
            plan.input_width()
        )),
        _ => feed
            .token()
            .filter(|token| *token as usize >= plan.vocab())
            .map(|token| {
                format!(
                    "token {token} is outside the vocabulary of {}",
                    plan.vocab()
                )
            }),
    }
}

fn check_run(run: &Run<'_>, plan: &Plan, options: &CompileOptions) -> Result<(), BackendError> {
    let wrong = |what: String| Err(BackendError::Unsupported { what });
    let end = run.position + run.rows.len();
    if let Some(ends) = run.visible_end {
        let within = (run.position + 1..).zip(ends);
        if ends.len() != run.rows.len()
            || within
                .into_iter()
                .any(|(own, e)| (*e as usize) < own || *e as usize > end)
        {
            return wrong(format!(
                "rows at {}..{end} see up to {ends:?}, which must lie behind each of them and within the run",
                run.position
            ));
        }
    }
    let pages = pages_of(end);
    for group in KvGroup::ALL {
        let table = run.pages.get(group);
        let first = if plan.uses(group) {
            plan.first_visible_page(group, run.position)
        } else {
            pages
        };
        let held = options.named_pages(group);
        let unchanged = run.table.map_or(0, |table| *table.unchanged.get(group));
        let seen = table.get(first.max(unchanged.min(pages))..pages);
        if first < pages && seen.is_none_or(|seen| !are_held(seen, held)) {
            return wrong(format!(
                "{group:?} pages {first}..{pages} of a run at position {} are not all among the {held} held",
                run.position
            ));
        }
    }
    Ok(())
}

/// Whether all of these are among the pages held. Looks at all of them: a loop without a way out takes several entries at a time.
fn are_held(pages: &[PageId], held: usize) -> bool {
    let held = u32::try_from(held).unwrap_or(u32::MAX);
    let is_beyond = |page: &PageId| u32::from(page.0 >= held);
    pages.iter().fold(0, |any, page| any | is_beyond(page)) == 0
}
