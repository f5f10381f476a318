//! From a plan to a list of operations over buffers: everything that can be decided before a batch comes.
//!
//! Values become buffers (shared where lifetimes allow), and a value that quantized weights read gets one quantized copy, made
//! right after the value itself and shared by all those readers.

use carat_model::{
    layout::Layout,
    plan::{Plan, Step, Value},
    weights::{Weight, Weights},
};

use super::{
    copies::QuantizedCopies,
    program::{LoweredOp, Op, Operand, ProductInput, Program, VectorId},
};
use crate::op::experts::ExpertWeights;

/// Whether operations that go better together become one. The results are the same bits; off for bisecting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fusion {
    /// Norms and gates quantize a row while it is near, and products of one value go in one round of the threads.
    #[default]
    On,
    /// One operation per step, and one for each quantized copy.
    Off,
}

/// Lowers a plan, looking at the formats and shapes of weights but not at their values. With [`Layout::separate`] every
/// value can be looked at afterwards.
#[expect(clippy::too_many_lines, reason = "one arm per kind of step")]
pub(crate) fn lower(plan: &Plan, weights: &Weights, layout: Layout, fusion: Fusion) -> Program {
    let operand = |value: Value| Operand {
        buffer: layout.buffer(value),
        columns: plan.columns(value),
        rows: plan.rows(value),
    };
    let mut quantized = QuantizedCopies::new(plan, weights);
    let mut ops = Vec::new();
    let mut vectors = Vec::new();
    let mut experts = None;
    for (i, labelled) in plan.steps.iter().enumerate() {
        let input = |quantized: &QuantizedCopies, x: Value, weight: Weight| {
            if weights.matrix(weight).quant.is_float() {
                ProductInput::F32(operand(x))
            } else {
                ProductInput::Quantized(quantized.of(x))
            }
        };
        let op = match labelled.step {
            Step::Embed { table, scale, out } => Op::Embed {
                table,
                scale,
                is_input: plan.is_input(table),
                out: operand(out),
            },
            Step::State { out } => Op::State { out: operand(out) },
            Step::Norm {
                x,
                weight,
                group,
                eps,
                out,
            } => Op::Norm {
                x: operand(x),
                weight: weight.map(|w| vector_id(&mut vectors, w)),
                group,
                eps,
                out: operand(out),
                quantized: None,
            },
            Step::Linear { x, w, out } => Op::Linear {
                x: input(&quantized, x, w),
                products: vec![(w, operand(out))],
            },
            Step::Rope { x, rope, out } => Op::Rope {
                x: operand(x),
                rope,
                out: operand(out),
            },
            Step::StoreKv { k, v, slot } => Op::StoreKv {
                k: operand(k),
                v: operand(v),
                slot,
            },
            Step::Attend { q, slot, out } => {
                let spec = plan.slot(slot);
                Op::Attend {
                    q: operand(q),
                    slot: spec.borrowed.unwrap_or(slot),
                    window: spec.window,
                    out: operand(out),
                }
            }
            Step::GeluMul {
                gate,
                up,
                up_column,
                out,
            } => Op::GeluMul {
                gate: operand(gate),
                up: operand(up),
                up_column,
                out: operand(out),
                quantized: None,
            },
            Step::Add { a, b, out } => Op::Add {
                a: operand(a),
                b: operand(b),
                out: operand(out),
            },
            Step::Scale { x, by, out } => Op::Scale {
                x: operand(x),
                by,
                out: operand(out),
            },
            Step::SelectSampled { x, out } => Op::SelectSampled {
                x: operand(x),
                out: operand(out),
            },
            Step::Route {
                x,
                w,
                expert_scale,
                out,
                ..
            } => Op::Route {
                x: input(&quantized, x, w),
                weight: w,
                expert_scale: expert_scale.map(|w| vector_id(&mut vectors, w)),
                out: operand(out),
            },
            Step::Experts {
                x,
                route,
                gate,
                up,
                down,
                out,
            } => {
                let all = ExpertWeights { gate, up, down };
                experts.get_or_insert((all, plan.columns(route) / 2));
                Op::Experts {
                    x: input(&quantized, x, gate),
                    route: operand(route),
                    experts: all,
                    out: operand(out),
                }
            }
            Step::ClusterLogits {
                x,
                centroids,
                w,
                clusters,
                top,
                out,
            } => Op::ClusterLogits {
                x: input(&quantized, x, w),
                weight: w,
                near: input(&quantized, x, centroids),
                centroids,
                clusters,
                top,
                out: operand(out),
            },
            Step::Softcap { x, cap, out } => Op::Softcap {
                x: operand(x),
                cap,
                out: operand(out),
            },
        };
        ops.push(LoweredOp { steps: vec![i], op });
        if let Some(out) = labelled.step.out()
            && let Some(quantized) = quantized.begin(out, plan)
        {
            let x = operand(out);
            ops.push(LoweredOp {
                steps: vec![i],
                op: Op::Quantize { x, quantized },
            });
        }
        quantized.end(i);
    }
    Program {
        ops: match fusion {
            Fusion::On => coalesce(ops),
            Fusion::Off => ops,
        },
        quantized: quantized.shapes,
        vectors,
        hidden: operand(plan.hidden),
        logits: operand(plan.logits),
        experts,
        layout,
    }
}

fn vector_id(vectors: &mut Vec<Weight>, weight: Weight) -> VectorId {
    vectors.push(weight);
    VectorId(vectors.len() - 1)
}

/// Makes one operation of what goes better together. Products that follow each other and read the same: queries, keys and
/// values; gate and up. The buffer of none of them may be that of what the others read, because all of it is read until the
/// last one. And what is computed row by row with its quantized copy.
fn coalesce(ops: Vec<LoweredOp>) -> Vec<LoweredOp> {
    let mut all: Vec<LoweredOp> = Vec::with_capacity(ops.len());
    for LoweredOp { steps, op } in ops {
        let Some(last) = all.last_mut() else {
            all.push(LoweredOp { steps, op });
            continue;
        };
        match (&mut last.op, op) {
            (
                Op::Linear { x, products },
                Op::Linear {
                    x: same,
                    products: more,
                },
            ) if *x == same && products[0].1.rows == more[0].1.rows => {
                products.extend(more);
                last.steps.extend(steps);
            }
            (
                Op::Norm { out, quantized, .. } | Op::GeluMul { out, quantized, .. },
                Op::Quantize { x, quantized: into },
            ) if *out == x => *quantized = Some(into),
            (_, op) => all.push(LoweredOp { steps, op }),
        }
    }
    all
}
