//! An executor whose draws agree with drafts as often as one likes: what drafts gain on models of random weights, whose own text
//! nobody could draft.

use std::sync::Arc;

use carat_model::{
    TokenId,
    backend::{
        BackendError, Batch, DraftRun, Draw, Executor, Feed, HostPageId, KvGroup, Outputs,
        PageMove, Ticket,
    },
    plan::{Plan, Value},
    sampling,
    weights::Weights,
};

pub(super) struct SetAcceptance {
    inner: Box<dyn Executor>,
    probability: f64,
    /// Per sampled row of the batch in flight, the token that was drafted behind it.
    drafted: Vec<Option<TokenId>>,
    rows: u64,
}

impl SetAcceptance {
    pub(super) fn new(inner: Box<dyn Executor>, probability: f64) -> SetAcceptance {
        SetAcceptance {
            inner,
            probability,
            drafted: Vec::new(),
            rows: 0,
        }
    }
}

impl Executor for SetAcceptance {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        let ticket = self.inner.submit(batch)?;
        self.drafted.clear();
        for run in batch.runs {
            for row in run.rows.end - run.sampled..run.rows.end {
                let behind = batch.feeds.get(row + 1).filter(|_| row + 1 < run.rows.end);
                self.drafted.push(behind.and_then(Feed::token));
            }
        }
        Ok(ticket)
    }

    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        self.inner.draw(ticket, draws)
    }

    fn lookahead(&self, ticket: &Ticket) -> bool {
        self.inner.lookahead(ticket)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        self.inner.collect(ticket, out)?;
        for (row, drafted) in out.rows.iter_mut().zip(&self.drafted) {
            let Some(drafted) = *drafted else { continue };
            self.rows += 1;
            let drawn = sampling::random(1, self.rows, 0) >> 11;
            let accepted = (drawn as f64) < self.probability * (1u64 << 53) as f64;
            row.token = match (accepted, row.token == drafted) {
                (true, _) => drafted,
                (false, true) => u32::from(drafted == 0),
                (false, false) => row.token,
            };
        }
        Ok(())
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        self.inner.move_pages(moves)
    }

    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError> {
        self.inner.host_page(group, place)
    }

    fn probed(&self, value: Value) -> Option<&[f32]> {
        self.inner.probed(value)
    }

    fn attach_drafter(
        &mut self,
        plan: &Plan,
        weights: Arc<Weights>,
        max_drafts: usize,
    ) -> Result<(), BackendError> {
        self.inner.attach_drafter(plan, weights, max_drafts)
    }

    fn draft(&mut self, drafts: &[DraftRun<'_>]) -> Result<Vec<Vec<TokenId>>, BackendError> {
        self.inner.draft(drafts)
    }
}
