//! Drafts for a model: who makes them, and an engine that verifies them.

use carat_engine::{DraftConfig, EngineConfig, EngineHandle, StartError};
use carat_model::{
    Drafter,
    gemma4_assistant::{self, Head},
};

use crate::Loaded;

/// Source of drafts for a model; none by default.
#[derive(Default)]
pub struct Drafts {
    /// A draft model, made for the model it drafts for.
    pub drafter: Option<Drafter>,
    /// The text is looked up in itself.
    pub lookup: bool,
    /// The most tokens of a draft; 0 makes none.
    pub max_tokens: usize,
    /// Rows that drafts may bring a step to.
    pub rows: usize,
}

impl Drafts {
    /// Tells an engine of it.
    pub fn configure(&self, config: &mut EngineConfig) {
        if self.max_tokens > 0 {
            config.max_draft = self.max_tokens;
            config.drafts = Some(DraftConfig {
                model: self.drafter.is_some(),
                lookup: self.lookup,
                rows: self.rows,
                costs: None,
            });
        }
    }
}

impl Loaded {
    /// Starts an engine, with the drafter where there is one.
    pub fn start(self, config: EngineConfig) -> Result<EngineHandle, StartError> {
        let Loaded {
            model,
            plan,
            backend,
            drafts,
            ..
        } = self;
        match drafts.drafter {
            Some(drafter) => {
                let draft_plan = gemma4_assistant::plan(&drafter, Head::Clusters);
                let (target, drafter) = ((plan, model.weights), (draft_plan, drafter.weights));
                EngineHandle::start_with_drafter(config, backend, target, drafter)
            }
            None => EngineHandle::start(config, backend, plan, model.weights),
        }
    }
}
