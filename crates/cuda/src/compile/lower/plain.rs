//! The plain kernel of every step, one launch each: the twin that fused ops are compared with.

use carat_model::{
    backend::BackendError,
    plan::{Labelled, Rows, Step, Value},
    weights::Weight,
};

use super::Lowering;
use crate::kernel::{
    Attend, ColumnSlice, EmbedRows, ExpertInput, ExpertsLinear, ExpertsSum, Function, LinearPlain,
    MAX_EXPERTS, Operand, Pointwise, RmsNorm, Rope, Route, SelectSampled, StoreKv, TableFormat,
};
use crate::{config::Fusion, kernel::fragment::FragmentFormat};

impl Lowering<'_> {
    #[expect(
        clippy::too_many_lines,
        reason = "one arm per step kind: the list of plain kernels"
    )]
    pub(super) fn step(&mut self, labelled: &Labelled) -> Result<(), BackendError> {
        let plan = self.plan;
        let Labelled { label, step, .. } = labelled;
        let label = label.as_str();
        let of_op = std::mem::replace(&mut self.origin, plan.origin(labelled));
        let rows = plan.step_rows(step);
        let at = Operand::Value;
        let columns = |v: Value| plan.columns(v);
        let second = |v: Value, column: usize| ColumnSlice {
            operand: at(v),
            columns: columns(v),
            column,
        };
        let elementwise = |function: Function, a: Value, out: Value| Pointwise {
            function,
            a: at(a),
            columns: columns(out),
            out: at(out),
        };
        match *step {
            Step::Embed { table, scale, out } => {
                let kernel = EmbedRows {
                    table,
                    format: self.table_format(table),
                    quant: self.quant(table),
                    columns: columns(out),
                    scale,
                    out: at(out),
                };
                self.call(label, rows, kernel);
            }
            Step::Norm {
                x,
                weight,
                group,
                eps,
                out,
            } => {
                let kernel = RmsNorm {
                    x: at(x),
                    weight,
                    columns: columns(out),
                    group,
                    eps,
                    out: at(out),
                };
                self.call(label, rows, kernel);
            }
            Step::Linear { x, w, out } => {
                let kernel = self.linear(at(x), w, at(out));
                self.call(label, rows, kernel);
            }
            Step::Rope { x, rope, out } => {
                let kernel = Rope {
                    x: at(x),
                    table: rope,
                    columns: columns(out),
                    head_dim: plan.rope(rope).head_dim,
                    out: at(out),
                };
                self.call(label, rows, kernel);
            }
            Step::StoreKv { k, v, slot } => {
                let spec = plan.slot(slot);
                let kernel = StoreKv {
                    k: at(k),
                    v: at(v),
                    slot,
                    kv: self.kv(slot),
                    kv_heads: spec.kv_heads,
                    head_dim: spec.head_dim,
                };
                self.call(label, rows, kernel);
            }
            Step::Attend { q, slot, out } => {
                let spec = plan.slot(slot);
                let heads = (columns(q) / spec.head_dim, spec.head_dim);
                let kv = (slot, self.kv(slot), self.turning_pairs(slot).is_some());
                let kernel = Attend::new((at(q), at(out)), kv, heads, self.window(spec));
                let Some(kernel) = kernel else {
                    return Err(BackendError::Unsupported {
                        what: format!(
                            "{}: heads of {} are not among those the attention kernel takes",
                            label, spec.head_dim
                        ),
                    });
                };
                self.make_keys(label, rows, slot);
                self.call(label, rows, kernel);
            }
            Step::GeluMul {
                gate,
                up,
                up_column,
                out,
            } => {
                let function = Function::GeluMul(second(up, up_column));
                self.call(label, rows, elementwise(function, gate, out));
            }
            Step::Add { a, b, out } => {
                let function = Function::Add(second(b, 0));
                self.call(label, rows, elementwise(function, a, out));
            }
            Step::Scale { x, by, out } => {
                self.call(label, rows, elementwise(Function::Scale { by }, x, out));
            }
            // Written before the program runs, by the target or by the step before.
            Step::State { .. } => {}
            Step::ClusterLogits { .. } => self.cluster_logits(labelled)?,
            Step::Softcap { x, cap, out } => {
                self.call(label, rows, elementwise(Function::Softcap { cap }, x, out));
            }
            Step::SelectSampled { x, out } => {
                let kernel = SelectSampled {
                    x: at(x),
                    columns: columns(out),
                    out: at(out),
                };
                self.call(label, rows, kernel);
            }
            Step::Route {
                x,
                w,
                expert_scale,
                top_k,
                out,
            } => {
                let experts = self.weights.matrix(w).rows;
                if experts > MAX_EXPERTS {
                    return Err(BackendError::Unsupported {
                        what: format!("{label}: {experts} experts, at most {MAX_EXPERTS}"),
                    });
                }
                let scores = self.scratch_floats("router scores", experts);
                let linear = self.linear(at(x), w, scores);
                self.call(&format!("{label} scores"), rows, linear);
                let kernel = Route {
                    scores,
                    parts: None,
                    scale: 1.0,
                    expert_scale,
                    experts,
                    top_k,
                    out: at(out),
                    pdl: false,
                };
                self.call(label, rows, kernel);
            }
            Step::Experts {
                x,
                route,
                gate,
                up,
                down,
                out,
            } => {
                let top_k = columns(route) / 2;
                self.experts(
                    label,
                    rows,
                    (at(x), at(route), at(out)),
                    [gate, up, down],
                    top_k,
                );
            }
        }
        self.origin = of_op;
        Ok(())
    }

    /// A table that is multiplied with, too, is there already, in the format which that wants.
    fn table_format(&self, table: Weight) -> TableFormat {
        if let Some(format) = self.target.borrowed_table
            && self.weights.is_borrowed(table)
        {
            return format;
        }
        let view = |w: Weight| {
            let matrix = self.weights.matrix(w);
            let start = self.weights.bytes(w).as_ptr();
            (start, matrix.rows, matrix.columns, matrix.row_stride)
        };
        let multiplied = self
            .plan
            .steps
            .iter()
            .any(|s| matches!(s.step, Step::Linear { w, .. } if view(w) == view(table)));
        let packed = FragmentFormat::of(self.quant(table)).is_some();
        match self.target.fusion {
            Fusion::On if multiplied && packed => TableFormat::Fragments,
            _ => TableFormat::Rows,
        }
    }

    /// Gate, up, their product, down and the weighted sum: each by itself.
    fn experts(
        &mut self,
        label: &str,
        rows: Rows,
        (x, route, out): (Operand, Operand, Operand),
        [gate, up, down]: [Weight; 3],
        top_k: usize,
    ) {
        let (inner, outputs) = {
            let matrix = self.weights.matrix(down);
            (top_k * matrix.columns, matrix.rows)
        };
        let gated = self.scratch_floats("experts gate", inner);
        let upped = self.scratch_floats("experts up", inner);
        let each = self.scratch_floats("experts down", top_k * outputs);
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
        let named = |what: &str| format!("{label} {what}");
        self.call(
            &named("gate"),
            rows,
            linear(self, x, ExpertInput::PerToken, gate, gated),
        );
        self.call(
            &named("up"),
            rows,
            linear(self, x, ExpertInput::PerToken, up, upped),
        );
        let product = Pointwise {
            function: Function::GeluMul(ColumnSlice {
                operand: upped,
                columns: inner,
                column: 0,
            }),
            a: gated,
            columns: inner,
            // In place: each value is read by the thread that writes it.
            out: gated,
        };
        self.call(&named("gelu_mul"), rows, product);
        self.call(
            &named("down"),
            rows,
            linear(self, gated, ExpertInput::PerExpert, down, each),
        );
        let sum = ExpertsSum {
            x: each,
            route,
            columns: outputs,
            top_k,
            out,
        };
        self.call(&named("sum"), rows, sum);
    }

    pub(super) fn linear(&self, x: Operand, w: Weight, out: Operand) -> LinearPlain {
        let matrix = self.weights.matrix(w);
        LinearPlain {
            x,
            w,
            quant: matrix.quant,
            columns: matrix.columns,
            outputs: matrix.rows,
            out,
        }
    }
}
