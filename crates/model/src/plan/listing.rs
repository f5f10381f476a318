//! A plan as text, one line per step.

use std::fmt;

use super::{Labelled, Plan, Rows, Shape, Step};
use crate::weights::{Weight, Weights};

/// A plan beside the weights it names, for listing.
pub struct Listing<'a>(pub &'a Plan, pub &'a Weights);

impl fmt::Display for Listing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Listing(plan, weights) = self;
        for Labelled { label, step, .. } in &plan.steps {
            write!(f, "{label:<24}")?;
            if let Some(out) = step.out() {
                let Shape { rows, columns } = plan.shape(out);
                let rows = match rows {
                    Rows::All => "all",
                    Rows::Sampled => "sampled",
                };
                write!(f, " %{} [{rows}, {columns}] =", out.0)?;
            }
            write!(f, " {}", step.name())?;
            for input in step.inputs() {
                write!(f, " %{}", input.0)?;
            }
            let matrix = |w: Weight| {
                let m = weights.matrix(w);
                format!("{} {} [{}, {}]", m.name, m.quant, m.rows, m.columns)
            };
            match step {
                Step::Embed { table, scale, .. } => write!(f, " {} * {scale}", matrix(*table))?,
                Step::Norm { weight, group, .. } => {
                    write!(f, " by {group}")?;
                    if let Some(w) = weight {
                        write!(f, " {}", weights.matrix(*w).name)?;
                    }
                }
                Step::Linear { w, .. } => write!(f, " {}", matrix(*w))?,
                Step::Rope { rope, .. } => write!(f, " table {}", rope.0)?,
                Step::StoreKv { slot, .. } | Step::Attend { slot, .. } => {
                    let spec = plan.slot(*slot);
                    write!(f, " slot {} ({} x {}", slot.0, spec.kv_heads, spec.head_dim)?;
                    match spec.window {
                        Some(window) => write!(f, ", window {window})")?,
                        None => write!(f, ", full)")?,
                    }
                }
                Step::GeluMul { up_column, .. } if *up_column > 0 => {
                    write!(f, " from column {up_column}")?;
                }
                Step::Scale { by, .. } => write!(f, " * {by}")?,
                Step::Route { w, top_k, .. } => write!(f, " {} top {top_k}", matrix(*w))?,
                Step::Experts { gate, up, down, .. } => {
                    for w in [gate, up, down] {
                        write!(f, " {}", matrix(*w))?;
                    }
                }
                Step::ClusterLogits {
                    centroids, w, top, ..
                } => write!(f, " {} top {top} {}", matrix(*centroids), matrix(*w))?,
                Step::Softcap { cap, .. } => write!(f, " {cap}")?,
                Step::State { .. }
                | Step::GeluMul { .. }
                | Step::Add { .. }
                | Step::SelectSampled { .. } => {}
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
