//! A batch, seen from its rows.

use carat_model::{
    backend::{Batch, KvGroup, PerGroup, RowPlace},
    plan::{Plan, Rows},
};

use crate::op::{
    attention::QuerySpan,
    kv::{self, KvWrites},
};

/// The rows of a batch, and where their keys and values go.
pub(super) struct RowView<'a> {
    pub(super) batch: &'a Batch<'a>,
    pub(super) all: Vec<RowPlace>,
    pub(super) sampled: Vec<RowPlace>,
    pub(super) writes: PerGroup<KvWrites>,
}

impl<'a> RowView<'a> {
    /// Of a batch that fits `plan`.
    pub(super) fn new(batch: &'a Batch<'a>, plan: &Plan) -> RowView<'a> {
        RowView {
            batch,
            all: batch.all_rows().collect(),
            sampled: batch.sampled_rows().collect(),
            writes: kv::writes(batch, |group| plan.uses(group)),
        }
    }

    /// The rows that an operation works on.
    pub(super) fn of(&self, rows: Rows) -> &[RowPlace] {
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
            (count > 0).then(|| QuerySpan {
                rows: first..next,
                position: run.position + run.rows.len() - count,
                pages: run.pages.get(group),
            })
        })
    }
}
