//! A card that is not there: what would lie where on one with so much memory. It plans as a card does, and computes nothing.

use std::sync::Arc;

use carat_model::{
    backend::{Backend, BackendError, Batching, CompileOptions, Executor, Memory, Need},
    plan::Plan,
    weights::Weights,
};

use crate::{
    backend::chunk_rows,
    compile::{fit::fitting, memory::MemoryPlan, offload::Rates, target::Target},
    config::CudaConfig,
    device::assumed_free,
};

/// A card of the kind that [`program`](crate::program) is for, with `config.memory_limit` bytes.
#[derive(Clone, Debug)]
pub struct PlannedCard {
    config: CudaConfig,
    total_bytes: u64,
}

impl PlannedCard {
    /// With so much memory, all of which is free but for what a driver takes.
    pub fn new(config: CudaConfig, total_bytes: u64) -> PlannedCard {
        PlannedCard {
            config,
            total_bytes,
        }
    }

    /// Memory that a plan would take.
    pub fn memory_plan(
        &self,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
    ) -> Result<MemoryPlan, BackendError> {
        let target = Target {
            alternatives: self.config.alternatives,
            kv: options.kv,
            ..Target::assumed(
                (self.config.tier, self.config.fusion),
                options.max_rows.max(options.max_sampled),
            )
        };
        let choice = (target, self.config.tables, &self.config.placement);
        let prepared = fitting(
            plan,
            weights,
            options,
            choice,
            self.free_bytes(),
            &Rates::default,
        )?;
        Ok(prepared.memory)
    }

    fn free_bytes(&self) -> u64 {
        assumed_free(self.total_bytes)
    }
}

impl Backend for PlannedCard {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn memory(&self) -> Result<Memory, BackendError> {
        Ok(Memory {
            total_bytes: self.total_bytes,
            free_bytes: self.free_bytes(),
        })
    }

    fn chunk_rows(&self, batching: Batching) -> usize {
        chunk_rows(batching)
    }

    fn need(
        &self,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
    ) -> Result<Option<Need>, BackendError> {
        Ok(Some(self.memory_plan(plan, weights, options)?.need()))
    }

    fn compile(
        &self,
        _plan: &Plan,
        _weights: Arc<Weights>,
        _options: &CompileOptions,
    ) -> Result<Box<dyn Executor>, BackendError> {
        Err(BackendError::Unsupported {
            what: "this card is planned for, and not there".to_owned(),
        })
    }
}
