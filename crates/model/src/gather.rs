//! Products that read one value, brought together.
//!
//! A plan is written in the order that reads best; a backend computes products of one input better side by side (q, k and v
//! as one matrix). Every value is written once, so a product may move up to the first one that reads what it reads: nothing
//! in between can change its input. Both backends start with this, so that the model's text need not care.

use crate::plan::{Labelled, Plan, Step, Value};

impl Plan {
    /// The same plan with every product beside the first one of its input; of several, the one with most outputs first.
    #[must_use]
    pub fn with_products_gathered(&self) -> Plan {
        let mut steps: Vec<Labelled> = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let at = match step.step {
                Step::Linear { x, out, .. } => self.place_of_product(&steps, x, out),
                _ => None,
            };
            steps.insert(at.unwrap_or(steps.len()), step.clone());
        }
        Plan {
            steps,
            ..self.clone()
        }
    }

    /// Index among the products of `x` before which one that writes `out` goes; `None` if there is none yet.
    fn place_of_product(&self, steps: &[Labelled], x: Value, out: Value) -> Option<usize> {
        let reads_x = |s: &Labelled| matches!(s.step, Step::Linear { x: read, .. } if read == x);
        let first = steps.iter().position(reads_x)?;
        let products = steps[first..].iter().take_while(|s| reads_x(s));
        let narrower = |s: &Labelled| {
            let columns = s.step.out().map_or(0, |other| self.columns(other));
            columns < self.columns(out)
        };
        let before = products.take_while(|s| !narrower(s)).count();
        Some(first + before)
    }
}
