//! A model file, checked and described, on the device that will run it.

use std::sync::Arc;

use carat_engine::{EngineConfig, ModelFacts};
use carat_gguf::Gguf;
use carat_model::{
    Model,
    backend::{Backend, Batching, CompileOptions, Need},
    gemma4,
    kv::{KvType, PerGroup, pages_of},
    plan::{Plan, Step},
};

use crate::{Drafts, Error, PrefixCache, intact::Intact};

/// The most whole contexts that pages are held for. Requests that run side by side rarely fill theirs, and pages that run out
/// only make somebody wait.
const WHOLE_CONTEXTS: usize = 4;

/// A model before it runs.
pub struct Loaded {
    /// Open, and mapped.
    pub file: Arc<Gguf>,
    /// Configuration and weights.
    pub model: Model,
    /// The forward pass.
    pub plan: Plan,
    /// Will compute it, and fails if the file changes.
    pub backend: Box<dyn Backend>,
    /// Number format that keys and values will have, per group of layers.
    pub kv: PerGroup<KvType>,
    /// Independence of a request's tokens from its company.
    pub batching: Batching,
    /// Source of drafts; none at first.
    pub drafts: Drafts,
    /// Stores of prefixes beyond the device; none at first.
    pub prefix: PrefixCache,
    /// The most bytes of the machine's memory to take, the whole file among them, where the processor computes; `None` is all that is
    /// free.
    pub max_ram_bytes: Option<u64>,
}

impl Loaded {
    /// Checks that the file is a model that can be run.
    pub fn new(
        file: Arc<Gguf>,
        backend: Box<dyn Backend>,
        kv: PerGroup<KvType>,
    ) -> Result<Loaded, Error> {
        let model = Model::load(Arc::clone(&file))?;
        Ok(Loaded {
            plan: gemma4::plan(&model),
            backend: Box::new(Intact::new(backend, Arc::clone(&file))),
            kv,
            batching: Batching::default(),
            drafts: Drafts::default(),
            prefix: PrefixCache::default(),
            max_ram_bytes: None,
            model,
            file,
        })
    }

    /// Settings of an engine for so many requests side by side.
    pub fn engine_config(&self, parallel: usize, context: usize) -> EngineConfig {
        let rows = self.backend.chunk_rows(self.batching);
        let facts = ModelFacts::from(&self.plan);
        // Drafts reach beyond the window.
        let reaching = ModelFacts {
            window: facts.window.map(|window| window + self.drafts.max_tokens),
            ..facts
        };
        let mut config = EngineConfig {
            kv: self.kv,
            batching: self.batching,
            ..EngineConfig::comfortable(context, parallel, rows, reaching)
        };
        self.drafts.configure(self, &mut config);
        config.pages.full = config
            .pages
            .full
            .min(pages_of(context) * WHOLE_CONTEXTS.min(parallel));
        self.prefix.configure(self, &mut config);
        config
    }

    /// Device memory that it takes with its drafter, where that can be told.
    pub(crate) fn need(&self, options: &CompileOptions) -> Result<Option<Need>, Error> {
        let weights = &self.model.weights;
        let Some(mut need) = self.backend.need(&self.plan, weights, options)? else {
            return Ok(None);
        };
        // As many as there are requests; a drafter's memory hardly depends on it.
        if let Some(drafter) = self.drafts.plan(options.max_sampled)
            && let Some(beside) = self.backend.drafter_need(&drafter, options)?
        {
            need.bytes += beside.bytes;
            need.parts.push_str("drafter:\n");
            need.parts.push_str(&beside.parts);
        }
        Ok(Some(need))
    }

    /// Brings the weights that every token reads into memory, and tells how many bytes of how many are there: a file that was
    /// not read lately would otherwise make the first token slow without a word. Tables that are looked up row by row stay out.
    pub fn warm_up(&self, mut progress: impl FnMut(u64, u64)) {
        const PAGE: usize = 4096;
        const CHUNK: usize = 16 << 20;
        let weights = &self.model.weights;
        let used = |step: &Step| match *step {
            Step::Linear { w, .. } | Step::Route { w, .. } => vec![w],
            Step::Experts { gate, up, down, .. } => vec![gate, up, down],
            _ => Vec::new(),
        };
        let steps = self.plan.steps.iter();
        let read: Vec<&[u8]> = steps
            .flat_map(|s| used(&s.step))
            .map(|w| weights.bytes(w))
            .collect();
        let total: usize = read.iter().map(|b| b.len()).sum();
        let mut done = 0;
        let mut sum = 0u8;
        for chunk in read.iter().flat_map(|b| b.chunks(CHUNK)) {
            sum = chunk
                .iter()
                .step_by(PAGE)
                .fold(sum, |s, b| s.wrapping_add(*b));
            done += chunk.len() as u64;
            progress(done, total as u64);
        }
        std::hint::black_box(sum);
    }
}
