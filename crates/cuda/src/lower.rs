//! Ops to calls: which kernel, on which operands, with which scratch. Pure: the plan and the weights' formats are all it
//! looks at.

use std::fmt::Write;

use carat_gguf::QuantType;
use carat_model::{
    backend::BackendError,
    plan::{Plan, Rows, Step, Value},
    weights::{Weight, Weights},
};

use crate::{
    config::Fusion,
    fuse::{Op, Work, fuse},
    kernel::{
        Attend, Elementwise, Embed, ExpertsLinear, ExpertsSum, Function, Kernel, Linear,
        MOST_EXPERTS, Narrow, NextNorm, Norm, NormAdd, NormRope, NormRopeStore, Place, Rope, Route,
        Second, StoreKv, XRows,
    },
};

/// One kernel launch, not yet bound to a device.
#[derive(Debug)]
pub(crate) struct Call {
    /// Of the step it belongs to.
    pub(crate) label: String,
    pub(crate) rows: Rows,
    pub(crate) kernel: Box<dyn Kernel>,
}

/// A plan as calls.
#[derive(Debug)]
pub(crate) struct Lowered {
    pub(crate) calls: Vec<Call>,
    /// Columns of each scratch buffer; they have all rows of a batch.
    pub(crate) scratch: Vec<usize>,
}

pub(crate) fn lower(plan: &Plan, weights: &Weights, ops: &[Op]) -> Result<Lowered, BackendError> {
    let mut lowering = Lowering {
        plan,
        weights,
        calls: Vec::new(),
        scratch: Vec::new(),
    };
    for op in ops {
        lowering.lower(op)?;
    }
    Ok(Lowered {
        calls: lowering.calls,
        scratch: lowering.scratch,
    })
}

/// What a plan becomes on CUDA, one line a launch: label, kernel, operands.
pub fn listing(plan: &Plan, weights: &Weights, fusion: Fusion) -> Result<String, BackendError> {
    let lowered = lower(plan, weights, &fuse(plan, fusion))?;
    let mut out = String::new();
    for Call {
        label,
        rows,
        kernel,
    } in &lowered.calls
    {
        let list = |places: Vec<Place>| {
            let names: Vec<String> = places.iter().map(Place::to_string).collect();
            names.join(" ")
        };
        let rows = match rows {
            Rows::All => "all",
            Rows::Sampled => "sampled",
        };
        let specialization = kernel.specialization();
        let entry = specialization.entries[kernel.grid(2).entry];
        let constants: Vec<&str> = specialization
            .constants
            .iter()
            .map(|(_, value)| value.as_str())
            .collect();
        let name = [&[entry], constants.as_slice()].concat().join(".");
        let (reads, writes) = (list(kernel.reads()), list(kernel.writes()));
        let line = format!("{label:<20} {rows:<7} {name:<22} {reads} -> {writes}");
        writeln!(out, "{}", line.trim_end()).expect("strings take all writes");
    }
    Ok(out)
}

struct Lowering<'a> {
    plan: &'a Plan,
    weights: &'a Weights,
    calls: Vec<Call>,
    scratch: Vec<usize>,
}

impl Lowering<'_> {
    /// Scratch buffer `index`, at least this wide.
    fn scratch(&mut self, index: usize, columns: usize) -> Place {
        if self.scratch.len() <= index {
            self.scratch.resize(index + 1, 0);
        }
        self.scratch[index] = self.scratch[index].max(columns);
        Place::Scratch(index)
    }

    fn call(&mut self, op: &Op, rows: Rows, kernel: impl Kernel + 'static) {
        self.calls.push(Call {
            label: op.label.clone(),
            rows,
            kernel: Box::new(kernel),
        });
    }

    fn lower(&mut self, op: &Op) -> Result<(), BackendError> {
        match &op.work {
            Work::Step(step) => return self.lower_step(op, step),
            Work::NormAdd {
                norm,
                a,
                by,
                sum,
                next,
            } => {
                let kernel = NormAdd {
                    x: Place::Value(norm.x),
                    weight: norm.weight,
                    eps: norm.eps,
                    a: Place::Value(*a),
                    by: *by,
                    sum: Place::Value(*sum),
                    next: next.map(|(norm, out)| NextNorm {
                        weight: norm.weight,
                        eps: norm.eps,
                        out: Place::Value(out),
                    }),
                    columns: self.plan.columns(*sum),
                };
                self.call(op, self.plan.rows(*sum), kernel);
            }
            Work::NormRope { norm, rope, out } => {
                let kernel = NormRope {
                    x: Place::Value(norm.x),
                    weight: norm.weight,
                    eps: norm.eps,
                    rope: *rope,
                    columns: self.plan.columns(*out),
                    head_dim: self.plan.rope(*rope).head_dim,
                    out: Place::Value(*out),
                };
                self.call(op, self.plan.rows(*out), kernel);
            }
            Work::NormRopeStore { k, rope, v, slot } => {
                let spec = self.plan.slot(*slot);
                let kernel = NormRopeStore {
                    k: Place::Value(k.x),
                    k_weight: k.weight,
                    k_eps: k.eps,
                    v: Place::Value(v.x),
                    v_weight: v.weight,
                    v_eps: v.eps,
                    rope: *rope,
                    slot: *slot,
                    kv_heads: spec.kv_heads,
                    head_dim: spec.head_dim,
                };
                self.call(op, self.plan.rows(k.x), kernel);
            }
        }
        Ok(())
    }

    #[expect(
        clippy::too_many_lines,
        reason = "one arm a step kind: the list of plain kernels"
    )]
    fn lower_step(&mut self, op: &Op, step: &Step) -> Result<(), BackendError> {
        let plan = self.plan;
        let rows = plan.step_rows(step);
        let at = Place::Value;
        let columns = |v: Value| plan.columns(v);
        let second = |v: Value, column: usize| Second {
            place: at(v),
            columns: columns(v),
            column,
        };
        let elementwise = |function: Function, a: Value, out: Value| Elementwise {
            function,
            a: at(a),
            columns: columns(out),
            out: at(out),
        };
        match *step {
            Step::Embed { table, scale, out } => {
                let kernel = Embed {
                    table,
                    quant: self.quant(table),
                    columns: columns(out),
                    scale,
                    out: at(out),
                };
                self.call(op, rows, kernel);
            }
            Step::Norm {
                x,
                weight,
                group,
                eps,
                out,
            } => {
                let kernel = Norm {
                    x: at(x),
                    weight,
                    columns: columns(out),
                    group,
                    eps,
                    out: at(out),
                };
                self.call(op, rows, kernel);
            }
            Step::Linear { x, w, out } => {
                let kernel = self.linear(at(x), w, at(out));
                self.call(op, rows, kernel);
            }
            Step::Rope { x, rope, out } => {
                let kernel = Rope {
                    x: at(x),
                    table: rope,
                    columns: columns(out),
                    head_dim: plan.rope(rope).head_dim,
                    out: at(out),
                };
                self.call(op, rows, kernel);
            }
            Step::StoreKv { k, v, slot } => {
                let kernel = StoreKv {
                    k: at(k),
                    v: at(v),
                    slot,
                    columns: columns(k),
                };
                self.call(op, rows, kernel);
            }
            Step::Attend { q, slot, out } => {
                let spec = plan.slot(slot);
                let heads = (columns(q) / spec.head_dim, spec.head_dim);
                let kernel = Attend::new((at(q), at(out)), slot, heads, spec.window);
                let Some(kernel) = kernel else {
                    return Err(BackendError::Unsupported {
                        what: format!(
                            "{}: heads of {} are not among those the attention kernel takes",
                            op.label, spec.head_dim
                        ),
                    });
                };
                self.call(op, rows, kernel);
            }
            Step::GeluMul {
                gate,
                up,
                up_column,
                out,
            } => {
                let function = Function::GeluMul(second(up, up_column));
                self.call(op, rows, elementwise(function, gate, out));
            }
            Step::Add { a, b, out } => {
                let function = Function::Add(second(b, 0));
                self.call(op, rows, elementwise(function, a, out));
            }
            Step::Scale { x, by, out } => {
                self.call(op, rows, elementwise(Function::Scale { by }, x, out));
            }
            Step::Softcap { x, cap, out } => {
                self.call(op, rows, elementwise(Function::Softcap { cap }, x, out));
            }
            Step::Narrow { x, out } => {
                let kernel = Narrow {
                    x: at(x),
                    columns: columns(out),
                    out: at(out),
                };
                self.call(op, rows, kernel);
            }
            Step::Route {
                x,
                w,
                expert_scale,
                top_k,
                out,
            } => {
                let experts = self.weights.matrix(w).rows;
                if experts > MOST_EXPERTS {
                    return Err(BackendError::Unsupported {
                        what: format!("{}: {experts} experts, at most {MOST_EXPERTS}", op.label),
                    });
                }
                let scores = self.scratch(0, experts);
                let linear = self.linear(at(x), w, scores);
                self.call(op, rows, linear);
                let kernel = Route {
                    scores,
                    expert_scale,
                    experts,
                    top_k,
                    out: at(out),
                };
                self.call(op, rows, kernel);
            }
            Step::Experts {
                x,
                route,
                gate,
                up,
                down,
                out,
            } => self.experts(op, rows, (at(x), at(route), at(out)), [gate, up, down]),
        }
        Ok(())
    }

    /// Gate, up, their product, down and the weighted sum: each by itself.
    fn experts(
        &mut self,
        op: &Op,
        rows: Rows,
        (x, route, out): (Place, Place, Place),
        [gate, up, down]: [Weight; 3],
    ) {
        let Work::Step(Step::Experts { route: choices, .. }) = &op.work else {
            unreachable!("called for experts alone");
        };
        let top_k = self.plan.columns(*choices) / 2;
        let (inner, outputs) = {
            let matrix = self.weights.matrix(down);
            (top_k * matrix.columns, matrix.rows)
        };
        let gated = self.scratch(0, inner);
        let upped = self.scratch(1, inner);
        let each = self.scratch(2, top_k * outputs);
        let linear = |this: &Self, x, x_rows, w, out| {
            let matrix = this.weights.matrix(w);
            ExpertsLinear {
                x,
                x_rows,
                route,
                w,
                quant: matrix.quant,
                columns: matrix.columns,
                outputs: matrix.rows,
                top_k,
                out,
            }
        };
        self.call(op, rows, linear(self, x, XRows::One, gate, gated));
        self.call(op, rows, linear(self, x, XRows::One, up, upped));
        let product = Elementwise {
            function: Function::GeluMul(Second {
                place: upped,
                columns: inner,
                column: 0,
            }),
            a: gated,
            columns: inner,
            // In place: each value is read by the thread that writes it.
            out: gated,
        };
        self.call(op, rows, product);
        self.call(op, rows, linear(self, gated, XRows::EachChoice, down, each));
        let sum = ExpertsSum {
            x: each,
            route,
            columns: outputs,
            top_k,
            out,
        };
        self.call(op, rows, sum);
    }

    fn linear(&self, x: Place, w: Weight, out: Place) -> Linear {
        let matrix = self.weights.matrix(w);
        Linear {
            x,
            w,
            quant: matrix.quant,
            columns: matrix.columns,
            outputs: matrix.rows,
            out,
        }
    }

    fn quant(&self, w: Weight) -> QuantType {
        self.weights.matrix(w).quant
    }
}

#[cfg(test)]
#[expect(
    clippy::needless_raw_string_hashes,
    reason = "as expect-test writes them"
)]
mod tests;
