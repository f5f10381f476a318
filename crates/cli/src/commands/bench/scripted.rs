//! An executor whose tokens follow a script: what drafts gain on models of random weights, whose own text nobody could draft.

use std::{collections::VecDeque, sync::Arc};

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

/// Tokens that are drawn in place of the model's.
#[derive(Clone, Debug)]
pub(super) enum Script {
    /// Those of a draft, each with this probability.
    Agreeing(f64),
    /// A text behind a prompt of `prompt` tokens, whatever was drafted.
    Text { prompt: usize, tokens: Vec<TokenId> },
}

pub(super) struct Scripted {
    inner: Box<dyn Executor>,
    script: Script,
    /// The sampled rows of the batches in flight.
    in_flight: VecDeque<Vec<Sampled>>,
    drawn: u64,
}

/// A sampled row: its position, and the token that was drafted behind it.
#[derive(Clone, Copy, Debug)]
struct Sampled {
    position: usize,
    drafted: Option<TokenId>,
}

impl Scripted {
    pub(super) fn new(inner: Box<dyn Executor>, script: Script) -> Scripted {
        Scripted {
            inner,
            script,
            in_flight: VecDeque::new(),
            drawn: 0,
        }
    }

    /// The token behind a row for which the model has drawn `token`.
    fn token(&mut self, row: Sampled, token: TokenId) -> TokenId {
        match &self.script {
            Script::Agreeing(probability) => {
                let Some(drafted) = row.drafted else {
                    return token;
                };
                self.drawn += 1;
                let drawn = sampling::random(1, self.drawn, 0) >> 11;
                let accepted = (drawn as f64) < probability * (1u64 << 53) as f64;
                match (accepted, token == drafted) {
                    (true, _) => drafted,
                    (false, true) => u32::from(drafted == 0),
                    (false, false) => token,
                }
            }
            Script::Text { prompt, tokens } => {
                let place = (row.position + 1).checked_sub(*prompt);
                let next = place.and_then(|place| tokens.get(place));
                next.copied().unwrap_or(token)
            }
        }
    }
}

impl Executor for Scripted {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        let ticket = self.inner.submit(batch)?;
        let mut sampled = Vec::new();
        for run in batch.runs {
            for row in run.rows.end - run.sampled..run.rows.end {
                let behind = batch.feeds.get(row + 1).filter(|_| row + 1 < run.rows.end);
                sampled.push(Sampled {
                    position: run.position + row - run.rows.start,
                    drafted: behind.and_then(Feed::token),
                });
            }
        }
        self.in_flight.push_back(sampled);
        Ok(ticket)
    }

    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        self.inner.draw(ticket, draws)
    }

    fn lookahead(&self, ticket: &Ticket) -> bool {
        self.inner.lookahead(ticket)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let sampled = self.in_flight.pop_front().unwrap_or_default();
        self.inner.collect(ticket, out)?;
        for (row, of) in out.rows.iter_mut().zip(sampled) {
            row.token = self.token(of, row.token);
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
