//! One model compiled several times over with different choices, side by side, to be measured in turns. All of them share the weights on
//! the card as long as they lie there alike.

use std::{rc::Rc, sync::Arc};

use carat_model::{
    backend::{BackendError, CompileOptions, Executor},
    plan::Plan,
    weights::Weights,
};

use crate::{
    backend::CudaBackend,
    choices::Alternatives,
    compile::{prepare::Prepared, weights::WeightLayout},
    run::upload::ResidentWeights,
};

/// A model on a card, to be compiled with one choice or another.
pub struct Tuning<'a> {
    backend: &'a CudaBackend,
    plan: &'a Plan,
    weights: &'a Arc<Weights>,
    options: &'a CompileOptions,
    resident: Option<(WeightLayout, Rc<ResidentWeights>)>,
}

impl<'a> Tuning<'a> {
    pub fn new(
        backend: &'a CudaBackend,
        plan: &'a Plan,
        weights: &'a Arc<Weights>,
        options: &'a CompileOptions,
    ) -> Tuning<'a> {
        Tuning {
            backend,
            plan,
            weights,
            options,
            resident: None,
        }
    }

    /// Whether two sets of choices come to the same launches of this model.
    pub fn are_same(&self, one: Alternatives, other: Alternatives) -> Result<bool, BackendError> {
        let launches = |values| -> Result<Vec<String>, BackendError> {
            let prepared = self.prepared(values)?;
            Ok(prepared.calls().map(|call| format!("{call:?}")).collect())
        };
        Ok(one == other || launches(one)? == launches(other)?)
    }

    /// The model with these choices. The first one brings the weights.
    pub fn executor(&mut self, values: Alternatives) -> Result<Box<dyn Executor>, BackendError> {
        let prepared = self.prepared(values)?;
        let layout = prepared.weights.clone();
        let shared = self.resident.as_ref();
        let resident = shared.filter(|(there, _)| *there == layout);
        let resident = resident.map(|(_, weights)| Rc::clone(weights));
        let executor = self.backend.compile_prepared(
            self.plan,
            Arc::clone(self.weights),
            self.options,
            (prepared, 0),
            resident,
        )?;
        if self.resident.is_none() {
            self.resident = Some((layout, executor.resident_weights()));
        }
        Ok(Box::new(executor))
    }

    /// Placed as if the weights that lie on the card already did not: as they would be without the others beside.
    fn prepared(&self, values: Alternatives) -> Result<Prepared, BackendError> {
        let there = self.resident.as_ref().map(|(layout, _)| layout);
        let there_bytes = there.map_or(0, |l| l.device_bytes + l.expanded_bytes) as u64;
        let free_bytes = self.backend.free_bytes()? + there_bytes;
        let (plan, weights, options) = (self.plan, self.weights, self.options);
        (self.backend).prepare_with(values, plan, weights, options, free_bytes)
    }
}
