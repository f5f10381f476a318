//! Drafts of the sequences that run: who proposes how much behind which of them.
//!
//! Decided when results are in ([`Scheduler::apply`]) and made before the next step is planned. Lookups are made here; for the
//! draft model the executor is asked ([`Scheduler::draft_runs`]).

use carat_model::{TokenId, backend::DraftRun, kv::PerGroup};

use super::{
    super::draft::{DraftPolicy, Load, Source, StepCosts},
    Scheduler,
};

/// A draft that the model is to make.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// Among the running sequences.
    index: usize,
    row: usize,
    length: usize,
}

impl Scheduler {
    /// Takes what rows cost, if drafts are on: lengths follow from it.
    pub fn set_costs(&mut self, costs: StepCosts) {
        if let Some(policy) = &mut self.draft_policy {
            policy.costs = costs;
        }
    }

    /// No draft model answers any more.
    pub fn drop_draft_model(&mut self) {
        if let Some(policy) = &mut self.draft_policy {
            policy.model = false;
        }
        for sequence in &mut self.running {
            sequence.forget_decision();
        }
    }

    /// Makes the drafts of the next step that need no model. Says whether there are some that do. Nothing may be under way.
    pub fn plan_drafts(&mut self) -> bool {
        self.wanted.clear();
        if self.draft_policy.is_none() || !self.steps.is_empty() {
            return false;
        }
        let (most, vocab) = (self.limits.config().max_draft, self.limits.model().vocab);
        for (index, sequence) in self.running.iter_mut().enumerate() {
            let Some(decision) = sequence.draftable() else {
                continue;
            };
            match decision.source {
                Source::Lookup(_) => {
                    let draft = sequence.look_up(decision.length);
                    sequence.draft(&draft, most, vocab);
                }
                Source::Model => {
                    let last = sequence.last_result;
                    // The state of an earlier step is gone.
                    let row = last.filter(|(step, _)| *step == self.last_applied);
                    self.wanted.extend(row.map(|(_, row)| Wanted {
                        index,
                        row,
                        length: decision.length,
                    }));
                }
            }
        }
        !self.wanted.is_empty()
    }

    /// The drafts that the model is to make, for an executor.
    pub fn draft_runs(&self) -> Vec<DraftRun<'_>> {
        let run = |wanted: &Wanted| {
            let sequence = &self.running[wanted.index];
            let tokens = sequence.content().tokens;
            DraftRun {
                row: wanted.row,
                token: tokens[tokens.len() - 1],
                position: tokens.len() - 1,
                pages: PerGroup {
                    full: &sequence.table.pages.full,
                    sliding: &sequence.table.pages.sliding,
                },
                length: wanted.length,
            }
        };
        self.wanted.iter().map(run).collect()
    }

    /// Takes the model's drafts, in the order they were asked for.
    pub fn take_drafts(&mut self, drafts: &[Vec<TokenId>]) {
        let (most, vocab) = (self.limits.config().max_draft, self.limits.model().vocab);
        for (wanted, draft) in self.wanted.drain(..).zip(drafts) {
            self.running[wanted.index].draft(draft, most, vocab);
        }
    }

    /// Decides what to draft next behind those that were in the step just applied.
    pub(super) fn decide_drafts(&mut self) {
        let Some(policy) = &self.draft_policy else {
            return;
        };
        let decode = |drafts: bool| {
            let all = self.running.iter();
            all.filter(|s| s.has_begun && s.drafts == drafts).count()
        };
        let load = Load {
            drafting: decode(true),
            others: decode(false),
        };
        for sequence in &mut self.running {
            if sequence
                .last_result
                .is_some_and(|(step, _)| step == self.last_applied)
            {
                sequence.decide_draft(policy, load);
            }
        }
    }

    /// Rows of drafts that a step of so many decoding sequences may have.
    pub(super) fn draft_rows(&self, decoding: usize) -> usize {
        let policy = self.draft_policy.as_ref();
        policy.map_or(usize::MAX, |policy| policy.rows.saturating_sub(decoding))
    }
}

/// Policy that a configuration asks for; `None` if only callers propose drafts.
pub(super) fn policy(limits: &crate::config::Limits) -> Option<DraftPolicy> {
    let config = limits.config();
    let drafts = config.drafts.as_ref().filter(|_| config.max_draft > 0)?;
    let costs = drafts.costs.clone().unwrap_or_else(StepCosts::assumed);
    Some(DraftPolicy::new(
        (drafts.model, drafts.lookup),
        (drafts.rows, config.max_draft),
        costs,
    ))
}
