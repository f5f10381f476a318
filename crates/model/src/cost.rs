//! Bytes and products that a batch cannot do without: the bounds that speeds are measured against.

use std::{iter::Sum, ops::AddAssign};

use crate::{
    kv::{KvGroup, KvType, PerGroup},
    plan::{Plan, Rows, Step},
    weights::{Weight, Weights},
};

/// A batch, as far as its cost goes.
#[derive(Clone, Copy, Debug)]
pub struct BatchShape {
    /// Rows of the batch.
    pub rows: usize,
    /// Of these the sampled ones.
    pub sampled: usize,
    /// Sequences that share the rows equally, each at this depth.
    pub sequences: usize,
    /// Positions already in the cache before the first row.
    pub depth: usize,
    /// Format of keys and values.
    pub kv: PerGroup<KvType>,
}

impl BatchShape {
    /// One sequence that decodes one token at a depth.
    pub fn decode(depth: usize, kv: PerGroup<KvType>) -> BatchShape {
        BatchShape {
            rows: 1,
            sampled: 1,
            sequences: 1,
            depth,
            kv,
        }
    }
}

/// Bytes and multiplications, at the least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Weights read once, and the embedding rows that are looked up.
    pub weight_bytes: u64,
    /// Keys and values read once, as they are kept.
    pub kv_bytes: u64,
    /// Of all products together.
    pub multiply_adds: u64,
}

impl Cost {
    /// All of them.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes + self.kv_bytes
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.weight_bytes += other.weight_bytes;
        self.kv_bytes += other.kv_bytes;
        self.multiply_adds += other.multiply_adds;
    }
}

impl Sum for Cost {
    fn sum<I: Iterator<Item = Cost>>(costs: I) -> Cost {
        costs.fold(Cost::default(), |mut total, cost| {
            total += cost;
            total
        })
    }
}

/// The least that one batch costs, whatever runs it.
pub fn of(plan: &Plan, weights: &Weights, batch: BatchShape) -> Cost {
    let tied = !plan.tied_keys().is_empty();
    let steps = plan.steps.iter();
    let costs = steps.map(|s| of_step_with(plan, weights, &s.step, batch, tied));
    costs.sum()
}

/// One step's share of that.
pub fn of_step(plan: &Plan, weights: &Weights, step: &Step, batch: BatchShape) -> Cost {
    let tied = !plan.tied_keys().is_empty();
    of_step_with(plan, weights, step, batch, tied)
}

/// `tied` is whether full-attention slots hold values alone: looked up once for all steps.
fn of_step_with(
    plan: &Plan,
    weights: &Weights,
    step: &Step,
    batch: BatchShape,
    tied: bool,
) -> Cost {
    let mut cost = Cost::default();
    let rows = match plan.step_rows(step) {
        Rows::All => batch.rows,
        Rows::Sampled => batch.sampled,
    };
    if rows == 0 {
        return cost;
    }
    let size = |w: Weight| {
        let m = weights.matrix(w);
        (m.rows * m.columns) as u64
    };
    match *step {
        Step::Embed { table, .. } => {
            cost.weight_bytes = (rows * weights.matrix(table).row_bytes()) as u64;
        }
        Step::ClusterLogits {
            centroids, w, top, ..
        } => {
            let (near, head) = (weights.matrix(centroids), weights.matrix(w));
            let tokens = head.rows / near.rows * top;
            cost.weight_bytes = (near.bytes() + rows * tokens * head.row_bytes()) as u64;
            cost.multiply_adds = rows as u64 * (size(centroids) + (tokens * head.columns) as u64);
        }
        Step::Linear { w, .. } | Step::Route { w, .. } => {
            cost.weight_bytes = weights.least_bytes(w) as u64;
            cost.multiply_adds = rows as u64 * size(w);
        }
        Step::Experts {
            route,
            gate,
            up,
            down,
            ..
        } => {
            let used = plan.columns(route) / 2;
            for w in [gate, up, down] {
                let m = weights.matrix(w);
                let touched = expected_experts(m.count, used, rows);
                cost.weight_bytes += ((m.row_bytes() * m.rows) as f64 * touched).round() as u64;
                cost.multiply_adds += (rows * used) as u64 * size(w);
            }
        }
        Step::Attend { q, slot, .. } => {
            let spec = plan.slot(slot);
            let seen = |position: usize| spec.window.map_or(position + 1, |w| w.min(position + 1));
            let last = batch.depth + batch.rows / batch.sequences;
            let first = last - rows / batch.sequences;
            let pairs: usize = (first..last).map(seen).sum();
            cost.multiply_adds = 2 * (batch.sequences * pairs * plan.columns(q)) as u64;
            let cells = (last - first + seen(first) - 1).min(last);
            let head_bytes = batch.kv.get(spec.group).head_bytes(spec.head_dim);
            let alone = tied && spec.group == KvGroup::Full;
            let tensors = if alone { 1 } else { 2 };
            cost.kv_bytes = (tensors * batch.sequences * cells * spec.kv_heads * head_bytes) as u64;
        }
        _ => {}
    }
    cost
}

/// Distinct experts that rows touch on average, where each row is routed to `used` of `count` and rows know nothing of each other.
fn expected_experts(count: usize, used: usize, rows: usize) -> f64 {
    let untouched_by_one = 1.0 - used as f64 / count as f64;
    count as f64 * (1.0 - untouched_by_one.powi(rows as i32))
}

/// Peak rates of a device: the bounds that speeds are set against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Sequential reads of memory.
    pub read_bytes_per_second: f64,
    /// Products, added up, of the kind that matrices are multiplied with.
    pub multiply_adds_per_second: f64,
}

impl Roofline {
    /// The least time that something takes.
    pub fn bound(&self, cost: &Cost) -> Bound {
        let reading = cost.bytes() as f64 / self.read_bytes_per_second;
        let multiplying = cost.multiply_adds as f64 / self.multiply_adds_per_second;
        Bound {
            seconds: reading.max(multiplying),
            by: if reading > multiplying {
                Limit::Memory
            } else {
                Limit::Compute
            },
        }
    }
}

/// Time that something would take if memory or arithmetic alone limited it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// At the least.
    pub seconds: f64,
    /// By what it is limited.
    pub by: Limit,
}

/// Resource that a batch waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Reading bytes.
    Memory,
    /// Multiplying.
    Compute,
}

impl Limit {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Memory => "memory",
            Limit::Compute => "compute",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_share_experts_more_the_more_there_are() {
        assert_eq!(expected_experts(128, 8, 1), 8.0);
        let rounded = [8, 32, 1000].map(|rows| expected_experts(128, 8, rows).round());
        assert_eq!(rounded, [52.0, 112.0, 128.0]);
        assert_eq!(expected_experts(4, 4, 3), 4.0);
    }
}
