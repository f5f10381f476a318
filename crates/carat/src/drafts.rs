//! Drafts for a model: who makes them, and an engine that verifies them.

use std::{path::PathBuf, sync::Arc};

use carat_engine::{DraftConfig, EngineConfig, EngineHandle, KeptCosts, StartError};
use carat_model::{
    Drafter,
    backend::DraftPlan,
    gemma4_assistant::{self, Head},
    plan::Listing,
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
    /// A folder to keep measured costs in, on devices where they hold for later starts; `None` measures at each.
    pub costs_folder: Option<PathBuf>,
}

impl Drafts {
    /// The drafter's plan, for so many drafts at a time.
    pub fn plan(&self, max_drafts: usize) -> Option<DraftPlan> {
        let drafter = self.drafter.as_ref()?;
        Some(DraftPlan {
            plan: gemma4_assistant::plan(drafter, Head::Clusters),
            weights: Arc::clone(&drafter.weights),
            max_drafts,
        })
    }

    /// Tells an engine of it.
    pub(crate) fn configure(&self, loaded: &Loaded, config: &mut EngineConfig) {
        if self.max_tokens > 0 {
            config.max_draft = self.max_tokens;
            config.drafts = Some(DraftConfig {
                model: self.drafter.is_some(),
                lookup: self.lookup,
                rows: self.rows,
                costs: None,
                kept_costs: self.kept_costs(loaded),
            });
        }
    }
}

impl Drafts {
    /// Where costs are kept, and all that they depend on.
    fn kept_costs(&self, loaded: &Loaded) -> Option<KeptCosts> {
        let folder = self.costs_folder.clone()?;
        let device = loaded.backend.timing_identity()?;
        let model = Listing(&loaded.plan, &loaded.model.weights);
        let drafter = self.plan(1).map_or(String::new(), |drafter| {
            Listing(&drafter.plan, &drafter.weights).to_string()
        });
        Some(KeptCosts {
            folder,
            holds_for: format!("{device}\n{model}\n{drafter}"),
        })
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
        match drafts.plan(config.max_sequences) {
            Some(drafter) => {
                let target = (plan, model.weights);
                EngineHandle::start_with_drafter(config, backend, target, drafter)
            }
            None => EngineHandle::start(config, backend, plan, model.weights),
        }
    }
}
