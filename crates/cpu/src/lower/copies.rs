//! Buffers for the quantized copies of values.

use carat_model::{
    plan::{Plan, Step, Value},
    weights::Weights,
};

use super::program::QuantizedShape;
use carat_cpu_kernels::gemm::activations::GROUP;

/// Hands out buffers of quantized activations, and takes them back after their last reader.
pub(super) struct QuantizedCopies {
    pub(super) shapes: Vec<QuantizedShape>,
    free: Vec<usize>,
    /// The last step that reads a value's quantized copy.
    last_reader: Vec<Option<usize>>,
    /// Values with a quantized copy now, and its buffer.
    live: Vec<(Value, usize)>,
}

impl QuantizedCopies {
    pub(super) fn new(plan: &Plan, weights: &Weights) -> QuantizedCopies {
        let mut last_reader = vec![None; plan.value_count()];
        for (i, labelled) in plan.steps.iter().enumerate() {
            let (x, read) = match labelled.step {
                Step::Linear { x, w, .. }
                | Step::Route { x, w, .. }
                | Step::Experts { x, gate: w, .. } => (x, [w, w]),
                Step::ClusterLogits {
                    x, centroids, w, ..
                } => (x, [centroids, w]),
                _ => continue,
            };
            if read.iter().any(|w| !weights.matrix(*w).quant.is_float()) {
                debug_assert!(
                    plan.columns(x).is_multiple_of(GROUP),
                    "blocks are 32 or more"
                );
                last_reader[x.index()] = Some(i);
            }
        }
        QuantizedCopies {
            shapes: Vec::new(),
            free: Vec::new(),
            last_reader,
            live: Vec::new(),
        }
    }

    /// The buffer of a value's copy.
    pub(super) fn of(&self, value: Value) -> usize {
        let found = self.live.iter().find(|(live, _)| *live == value);
        found.expect("quantized when it was written").1
    }

    /// A buffer for the copy of `value`, if anything will read one.
    pub(super) fn begin(&mut self, value: Value, plan: &Plan) -> Option<usize> {
        self.last_reader[value.index()]?;
        let shape = QuantizedShape {
            rows: plan.rows(value),
            columns: plan.columns(value),
        };
        // Of the same width only: the zeros that fill a row's last chunk must stay where they are.
        let same = self.free.iter().position(|&b| self.shapes[b] == shape);
        let buffer = same.map_or_else(
            || {
                self.shapes.push(shape);
                self.shapes.len() - 1
            },
            |i| self.free.swap_remove(i),
        );
        self.live.push((value, buffer));
        Some(buffer)
    }

    /// Takes back the buffers whose last reader is this step.
    pub(super) fn end(&mut self, step: usize) {
        let (last_reader, free) = (&self.last_reader, &mut self.free);
        self.live.retain(|(value, buffer)| {
            let ended = last_reader[value.index()] == Some(step);
            if ended {
                free.push(*buffer);
            }
            !ended
        });
    }
}
