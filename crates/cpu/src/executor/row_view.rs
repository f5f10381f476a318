//! A batch, seen from its rows.

use carat_model::{
    TokenId,
    backend::{Batch, KvGroup, PerGroup, RowRef},
    plan::{Plan, Rows},
};

use crate::op::{
    attention::QuerySpan,
    kv::{self, KvWrites},
};

/// The rows of a batch, and where their keys and values go.
pub(super) struct RowView<'a> {
    pub(super) batch: &'a Batch<'a>,
    /// Of all rows, those that were drawn before included.
    pub(super) tokens: Vec<TokenId>,
    pub(super) all: Vec<RowRef>,
    pub(super) sampled: Vec<RowRef>,
    pub(super) writes: PerGroup<KvWrites>,
    /// `[rows, width]`, for a drafter's plan.
    pub(super) states: &'a [f32],
}

impl<'a> RowView<'a> {
    /// Of a batch that fits `plan` and its pages, where `sampled` is what the batch in flight was given.
    pub(super) fn new(
        batch: &'a Batch<'a>,
        plan: &Plan,
        pages: PerGroup<usize>,
        sampled: &[TokenId],
    ) -> RowView<'a> {
        let feeds = batch.feeds.iter();
        RowView {
            batch,
            tokens: feeds.map(|feed| feed.resolve(sampled)).collect(),
            all: batch.all_rows().collect(),
            sampled: batch.sampled_rows().collect(),
            writes: kv::writes(batch, |group| plan.uses(group), pages),
            states: &[],
        }
    }

    /// Of a batch of drafts that go on from these states. Nothing is written.
    pub(super) fn of_drafts(batch: &'a Batch<'a>, states: &'a [f32]) -> RowView<'a> {
        RowView {
            batch,
            tokens: batch.feeds.iter().map(|feed| feed.resolve(&[])).collect(),
            all: batch.all_rows().collect(),
            sampled: batch.sampled_rows().collect(),
            writes: PerGroup::default(),
            states,
        }
    }

    /// The rows that an operation works on.
    pub(super) fn of(&self, rows: Rows) -> &[RowRef] {
        match rows {
            Rows::All => &self.all,
            Rows::Sampled => &self.sampled,
        }
    }

    /// The rows of each run among `rows`, where it has any.
    pub(super) fn spans(&self, rows: Rows, group: KvGroup) -> impl Iterator<Item = QuerySpan<'_>> {
        let mut next = 0;
        self.batch.runs.iter().filter_map(move |run| {
            let count = match rows {
                Rows::All => run.rows.len(),
                Rows::Sampled => run.sampled,
            };
            let first = next;
            next += count;
            let visible_end = run.visible_end.filter(|_| group == KvGroup::Sliding);
            (count > 0).then(|| QuerySpan {
                rows: first..next,
                position: run.position + run.rows.len() - count,
                pages: run.pages.get(group),
                visible_end: visible_end.map(|ends| &ends[ends.len() - count..]),
            })
        })
    }
}
