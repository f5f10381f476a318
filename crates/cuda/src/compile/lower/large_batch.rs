//! Large and medium batches: products are GEMMs, and each kernel writes what they read in the format they want.
//!
//! A value that only products read is materialized in their format alone. Raw queries, keys and values lie side by side in one
//! buffer, as one product writes them. Where cuBLASLt multiplies, the product of gate and up is stored in f16 with a factor per
//! row, which goes along with what is computed from it until a norm takes it in.

use std::collections::{HashMap, HashSet};

use carat_model::{
    backend::BackendError,
    plan::{Labelled, Plan, Rows, Step, Value},
    weights::Weight,
};

use super::{Lowering, large_attention::raw_inputs};
use crate::{
    compile::{
        call::{Buckets, Call, CublasLtGemm, Launch},
        fuse::{self, Epilogue, LinearPart, Op, Product, Prologue, ResidualNorm, RowNorm, Work},
        target::{GemmImpl, Target},
    },
    device::cublaslt::Out,
    kernel::{
        Activation, BranchNorms, ColumnSlice, Convert, FusedNorm, FusedResidualNorm,
        GELU_MAX_COLUMNS, Geglu, GemmMediumKernel, NORM_MAX_COLUMNS, NormOut, Operand,
        WeightFormat, WeightOperand,
    },
};

/// Factor of gate and up in f16, so that none overflows; GELU's kernel divides by it again.
const GATE_UP_SCALE: f32 = 1.0 / 64.0;

/// Format that a product of a large batch reads its input in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActivationFormat {
    F16,
    /// F16 in token tiles.
    F16Tiles,
    /// K-permuted f16.
    F16Permuted,
    Int8,
    /// Two-term int8: codes, and the codes of their residual.
    Int8HiLo,
}

impl ActivationFormat {
    fn is_of(self, activation: &Activation) -> bool {
        match activation {
            Activation::F16(_) => self == ActivationFormat::F16,
            Activation::F16Tiles(_) => self == ActivationFormat::F16Tiles,
            Activation::F16Permuted(_) => self == ActivationFormat::F16Permuted,
            Activation::Int8(_) => self == ActivationFormat::Int8,
            Activation::Int8HiLo { .. } => self == ActivationFormat::Int8HiLo,
        }
    }
}

/// Facts of values, collected while ops of large batches are lowered.
#[derive(Default)]
pub(super) struct State {
    /// The ops that read a value, by their number.
    readers: HashMap<Value, Vec<usize>>,
    /// Values that are read behind these ops, too, as they are in the plan.
    kept: HashSet<Value>,
    /// Values that are materialized in a product's format.
    pub(super) materialized: HashMap<Value, Materialized>,
    /// Values that are columns of a wider buffer.
    pub(super) columns: HashMap<Value, Columns>,
    /// Values that must still be multiplied by one factor per row.
    factors: HashMap<Value, Operand>,
    /// Weights that have no f16 copies for cuBLASLt.
    uncopied: HashSet<Weight>,
}

impl State {
    pub(super) fn of(plan: &Plan, ops: &[Op], target: Target) -> State {
        let steps = match ops {
            [first, .., last] => first.steps.start..last.steps.end,
            [only] => only.steps.clone(),
            [] => 0..0,
        };
        let behind = plan.steps.iter().skip(steps.end);
        let kept = behind.flat_map(|s| s.step.inputs());
        let mut state = State {
            kept: kept.chain([plan.hidden, plan.logits]).collect(),
            uncopied: match target.first_uncopied_layer {
                Some(first) => weights_from_layer(plan, first).collect(),
                None => HashSet::new(),
            },
            ..State::default()
        };
        for (i, op) in ops.iter().enumerate() {
            let steps = &plan.steps[op.steps.clone()];
            for value in steps.iter().flat_map(|s| s.step.inputs()) {
                let readers = state.readers.entry(value).or_default();
                if readers.last() != Some(&i) {
                    readers.push(i);
                }
            }
        }
        state
    }
}

/// Weights of products in a layer and those behind it.
pub(crate) fn weights_from_layer(plan: &Plan, first: usize) -> impl Iterator<Item = Weight> {
    let steps = plan.steps.iter();
    let behind = steps.filter(move |s| plan.origin(s).layer.is_some_and(|layer| layer >= first));
    behind.filter_map(|s| match s.step {
        Step::Linear { w, .. } => Some(w),
        _ => None,
    })
}

#[derive(Clone, Copy)]
pub(super) struct Materialized {
    pub(super) activation: Activation,
    pub(super) factor: Option<Operand>,
    /// What all values were multiplied by besides.
    pub(super) scale: f32,
}

#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) of: Operand,
    pub(super) stride: usize,
    pub(super) column: usize,
}

impl Lowering<'_> {
    pub(super) fn large_batch(&mut self, op: &Op) -> Result<(), BackendError> {
        let done = match &op.work {
            Work::Product(product) => self.large_product(op, product),
            Work::ResidualNorm(residual_norm) => self.large_residual_norm(op, residual_norm),
            Work::StoreKv(store) => self.large_qkv(op, None, Some(store)),
            Work::Attend(attend) => self.large_attend(op, attend),
            Work::LayerInputs(inputs) => {
                self.ple_inputs(op, inputs);
                Some(())
            }
            Work::Route(routing) => self.route(op, routing),
            Work::Experts(experts) => self.large_experts(op, experts),
            Work::Step(Step::Norm { .. }) => self.large_norm(op),
            Work::Step(_) => None,
        };
        if done.is_none() {
            self.plainly(op)?;
        }
        Ok(())
    }

    fn readers(&self, value: Value) -> impl Iterator<Item = &Op> {
        let readers = self.large.readers.get(&value);
        readers.into_iter().flatten().map(|i| &self.ops[*i])
    }

    /// Whether nobody reads a value but ops of this kind.
    pub(super) fn only_for(&self, value: Value, of_kind: impl Fn(&Op) -> bool) -> bool {
        !self.large.kept.contains(&value) && self.readers(value).all(of_kind)
    }

    /// What multiplies these matrices in large batches.
    pub(super) fn gemm_impl(&self, parts: &[LinearPart]) -> GemmImpl {
        let uncopied = |part: &LinearPart| self.large.uncopied.contains(&part.w);
        match self.target.gemm {
            GemmImpl::CublasLt if parts.iter().any(uncopied) => GemmImpl::Native,
            gemm => gemm,
        }
    }

    /// Format of a product's input; `None` if it is left to plain kernels.
    fn format(&self, product: &Product) -> Option<ActivationFormat> {
        let matrices = || product.parts.iter().map(|p| self.weights.matrix(p.w));
        let columns = matrices().next()?.columns;
        let single = matrices().all(|m| m.count == 1);
        let fits = columns.is_multiple_of(32) && matrices().all(|m| m.rows.is_multiple_of(8));
        if self.reads_packed(&product.parts) {
            return Some(match self.medium_kernel() {
                GemmMediumKernel::Warps => ActivationFormat::F16,
                GemmMediumKernel::Warpgroups => ActivationFormat::F16Tiles,
            });
        }
        match self.gemm_impl(&product.parts) {
            GemmImpl::CublasLt => (single && fits).then_some(ActivationFormat::F16),
            GemmImpl::Native if self.multiplies_packed(product) => {
                Some(ActivationFormat::F16Permuted)
            }
            GemmImpl::Native => self.native_format(product).filter(|_| single),
        }
    }

    /// The format of a value that only products read, and all alike.
    pub(super) fn sole_format(&self, value: Value) -> Option<ActivationFormat> {
        let mut formats = self.readers(value).map(|op| match &op.work {
            Work::Product(p) if p.input == Prologue::Value(value) => self.format(p),
            _ => None,
        });
        let first = formats.next()??;
        let alike = formats.all(|format| format == Some(first));
        (alike && !self.large.kept.contains(&value)).then_some(first)
    }

    /// Scratch for a value of this width in a format, under names that neighbours do not use.
    pub(super) fn activation(
        &mut self,
        format: ActivationFormat,
        names: [&'static str; 4],
        columns: usize,
    ) -> Activation {
        let [f16, codes, scales, sums] = names;
        match format {
            ActivationFormat::F16 => Activation::F16(self.scratch(f16, 2 * columns)),
            ActivationFormat::F16Tiles => Activation::F16Tiles(self.tile_scratch(f16, columns)),
            ActivationFormat::F16Permuted => {
                Activation::F16Permuted(self.scratch(f16, 2 * columns))
            }
            ActivationFormat::Int8 => {
                Activation::Int8(self.int8_scratch([codes, scales, sums], columns))
            }
            ActivationFormat::Int8HiLo => Activation::Int8HiLo {
                both: self.int8_scratch([codes, scales, sums], 2 * columns),
                columns,
            },
        }
    }

    pub(super) fn large_residual_norm(
        &mut self,
        op: &Op,
        residual_norm: &ResidualNorm,
    ) -> Option<()> {
        let following = residual_norm.following.map(|norm| NormOut {
            weight: norm.weight,
            eps: norm.eps,
            values: Some(Operand::Value(norm.out)),
            activation: None,
        });
        self.residual_norm_call(op, residual_norm, None, following)
    }

    pub(super) fn residual_norm_call(
        &mut self,
        op: &Op,
        residual_norm: &ResidualNorm,
        sum_activation: Option<Activation>,
        following: Option<NormOut>,
    ) -> Option<()> {
        let columns = self.plan.columns(residual_norm.sum);
        if columns > NORM_MAX_COLUMNS || !columns.is_multiple_of(4) {
            return None;
        }
        let branches = residual_norm.branches;
        let x = branches.map_or(residual_norm.norm.x, |b| b.first.x);
        let kernel = FusedResidualNorm {
            x: Operand::Value(x),
            factor: self.large.factors.get(&x).copied(),
            weight: residual_norm.norm.weight,
            eps: residual_norm.norm.eps,
            residual: Operand::Value(residual_norm.residual),
            scale: residual_norm.scale,
            sum: Operand::Value(residual_norm.sum),
            sum_activation,
            following,
            branch: branches.map(|b| BranchNorms {
                x_weight: b.first.weight,
                x_eps: b.first.eps,
                branch: (self.unsummed.get(&b.second.x))
                    .map_or(Operand::Value(b.second.x), |experts| experts.each),
                experts: self.unsummed.get(&b.second.x).map(|e| e.experts),
                branch_weight: b.second.weight,
                branch_eps: b.second.eps,
            }),
            columns,
            pdl: self.pdl(),
        };
        self.call_for_step(self.first_step(op), op.rows, kernel);
        Some(())
    }

    /// A norm of whole rows by itself, with the row factors that its input may have.
    fn large_norm(&mut self, op: &Op) -> Option<()> {
        let Work::Step(Step::Norm {
            x,
            weight,
            group,
            eps,
            out,
        }) = op.work
        else {
            return None;
        };
        let columns = self.plan.columns(x);
        if group != columns || columns > NORM_MAX_COLUMNS || !columns.is_multiple_of(4) {
            return None;
        }
        let kernel = FusedNorm {
            x: Operand::Value(x),
            factor: self.large.factors.get(&x).copied(),
            columns,
            out: NormOut {
                weight,
                eps,
                values: Some(Operand::Value(out)),
                activation: None,
            },
            pdl: self.pdl(),
        };
        self.call(&op.label, op.rows, kernel);
        Some(())
    }

    /// Materializes the input of a product in its format, by whatever kernel comes before it.
    fn product_input(
        &mut self,
        op: &Op,
        input: &Prologue,
        format: ActivationFormat,
    ) -> Option<Materialized> {
        const NORMED: [&str; 4] = ["normed f16", "normed codes", "normed scales", "normed sums"];
        const OTHER: [&str; 4] = ["input f16", "input codes", "input scales", "input sums"];
        let materialized = |activation| Materialized {
            activation,
            factor: None,
            scale: 1.0,
        };
        match *input {
            Prologue::Value(x) => {
                let held = self.large.materialized.get(&x);
                if let Some(materialized) = held.filter(|m| format.is_of(&m.activation)) {
                    return Some(*materialized);
                }
                let columns = self.plan.columns(x);
                let activation = self.activation(format, OTHER, columns);
                let kernel = Convert {
                    a: Operand::Value(x),
                    gelu_mul: None,
                    columns,
                    out: activation,
                    pdl: self.pdl(),
                };
                let label = format!("{} convert", op.label);
                self.call(&label, op.rows, kernel);
                self.large.materialized.insert(x, materialized(activation));
                // The buffer is another value's from the next one on.
                self.large
                    .materialized
                    .retain(|v, m| *v == x || m.activation != activation);
                Some(materialized(activation))
            }
            Prologue::Norm(RowNorm { x, weight, eps }) => {
                let columns = self.plan.columns(x);
                if columns > NORM_MAX_COLUMNS || !columns.is_multiple_of(4) {
                    return None;
                }
                let activation = self.activation(format, NORMED, columns);
                let kernel = FusedNorm {
                    x: Operand::Value(x),
                    factor: self.large.factors.get(&x).copied(),
                    columns,
                    out: NormOut {
                        weight,
                        eps,
                        values: None,
                        activation: Some(activation),
                    },
                    pdl: self.pdl(),
                };
                self.call_for_step(self.first_step(op), op.rows, kernel);
                Some(materialized(activation))
            }
            Prologue::ResidualNorm(residual_norm) => {
                let activation =
                    self.activation(format, NORMED, self.plan.columns(residual_norm.sum));
                let following = residual_norm.following.map(|norm| NormOut {
                    weight: norm.weight,
                    eps: norm.eps,
                    values: None,
                    activation: Some(activation),
                });
                let sum_activation = following.is_none().then_some(activation);
                self.residual_norm_call(op, &residual_norm, sum_activation, following)?;
                Some(materialized(activation))
            }
        }
    }

    fn large_product(&mut self, op: &Op, product: &Product) -> Option<()> {
        let format = self.format(product)?;
        let input = self.product_input(op, &product.input, format)?;
        match product.epilogue {
            Epilogue::Nothing => self.product_parts(op, product, input),
            Epilogue::Geglu { out } if self.geglu_pair(op, product, out, input) => {}
            Epilogue::Geglu { .. } => {
                self.product_parts(op, product, input);
                self.step(self.last_step(op)).ok()?;
            }
            Epilogue::GeluMulSlice { other, column, out } => {
                let slice = ColumnSlice {
                    operand: Operand::Value(other),
                    columns: self.plan.columns(other),
                    column,
                };
                self.gelu_slice(op, product, (slice, out), input);
            }
        }
        Some(())
    }

    /// Whether its parts are queries, keys and values that only kernels of large batches read.
    pub(super) fn attended(&self, product: &Product) -> bool {
        let ours = |value: Value| product.parts.iter().any(|p| p.out == value);
        let reads_ours =
            |reader: &Op| self.takes_columns(reader) && raw_inputs(reader).into_iter().all(ours);
        let mut parts = product.parts.iter();
        parts.all(|part| self.only_for(part.out, reads_ours))
    }

    /// Multiplies every part: side by side in one buffer if those are queries, keys and values, else to a value each.
    fn product_parts(&mut self, op: &Op, product: &Product, input: Materialized) {
        if self.attended(product) {
            let widths = product.parts.iter().map(|p| self.plan.columns(p.out));
            let stride = widths.sum();
            let of = self.scratch_floats("q|k|v", stride);
            let mut column = 0;
            for part in &product.parts {
                let operand = Columns { of, stride, column };
                self.large.columns.insert(part.out, operand);
                column += self.plan.columns(part.out);
            }
            self.multiply(
                op,
                &product.parts,
                input,
                ProductOut {
                    operand: of,
                    stride,
                },
            );
            return;
        }
        for part in &product.parts {
            let target = ProductOut {
                operand: Operand::Value(part.out),
                stride: self.plan.columns(part.out),
            };
            if let Some(factor) = self.multiply(op, &[*part], input, target) {
                self.large.factors.insert(part.out, factor);
            }
        }
    }

    /// Whether all readers of a value are products whose own readers undo a factor per row: norms do.
    fn product_takes_factor(&self, value: Value) -> bool {
        let takes_factor = |value: Value| {
            self.only_for(value, |op| match &op.work {
                Work::ResidualNorm(n)
                | Work::Product(Product {
                    input: Prologue::ResidualNorm(n),
                    ..
                }) => {
                    let branches = n.branches.as_ref();
                    let x = branches.map_or(n.norm.x, |b| b.first.x);
                    let second = branches.map(|b| b.second.x);
                    x == value && n.residual != value && second != Some(value)
                }
                Work::Product(Product {
                    input: Prologue::Norm(n),
                    ..
                }) => n.x == value,
                Work::Step(Step::Norm { x, group, .. }) => {
                    *x == value && *group == self.plan.columns(value)
                }
                _ => false,
            })
        };
        self.only_for(value, |op| match &op.work {
            Work::Product(p) => {
                p.epilogue == Epilogue::Nothing && p.parts.iter().all(|p| takes_factor(p.out))
            }
            _ => false,
        })
    }

    /// `gelu(gate) * up` in the format of its one reader; `false` if that is not possible.
    fn geglu_pair(&mut self, op: &Op, product: &Product, out: Value, input: Materialized) -> bool {
        const GATED: [&str; 4] = ["gated f16", "gated codes", "gated scales", "gated sums"];
        let Some(format) = self.sole_format(out) else {
            return false;
        };
        let columns = self.plan.columns(out);
        let packed = self.packed_pair(&product.parts);
        match (self.gemm_impl(&product.parts), format) {
            (gemm, ActivationFormat::F16 | ActivationFormat::F16Tiles)
                if packed.is_some() || gemm == GemmImpl::CublasLt =>
            {
                let reader_takes = self.product_takes_factor(out);
                if !reader_takes || columns > GELU_MAX_COLUMNS || input.factor.is_some() {
                    return false;
                }
                let tiles = matches!(input.activation, Activation::F16Tiles(_));
                if tiles && packed.is_none() {
                    return false; // cuBLASLt reads rows
                }
                let both = self.scratch("gate|up", 4 * columns);
                let (x, label) = (
                    f16_operand(input.activation),
                    self.product_label(op, &product.parts),
                );
                if let Some(format) = packed {
                    let kernel =
                        self.packed_gate_up(format, &product.parts, x, both, GATE_UP_SCALE);
                    self.buckets = self.packed_buckets();
                    self.call(&label, op.rows, kernel);
                    self.buckets = Buckets::ALL;
                }
                if let Some(buckets) = self.f16_buckets(packed.is_some()) {
                    self.buckets = buckets;
                    let call = CublasLtGemm {
                        x,
                        w: joined(&product.parts, WeightFormat::F16),
                        out: both,
                        kind: Out::F16,
                        alpha: GATE_UP_SCALE,
                        outputs: 2 * columns,
                        columns: self.weights.matrix(product.parts[0].w).columns,
                        stride: 2 * columns,
                        scaled: true,
                    };
                    self.cublaslt_call(&label, op.rows, call);
                    self.buckets = Buckets::ALL;
                }
                let activation = self.activation(format, GATED, columns);
                let factor = self.scratch_floats("gated factor", 1);
                let kernel = Geglu {
                    x: both,
                    x_scale: 1.0 / GATE_UP_SCALE,
                    columns,
                    out: f16_operand(activation),
                    tiles: format == ActivationFormat::F16Tiles,
                    factor,
                    pdl: self.pdl(),
                };
                self.call_for_step(self.last_step(op), op.rows, kernel);
                let materialized = Materialized {
                    activation,
                    factor: Some(factor),
                    scale: 1.0,
                };
                self.large.materialized.insert(out, materialized);
                true
            }
            (GemmImpl::Native, ActivationFormat::F16Permuted)
                if matches!(input.activation, Activation::F16Permuted(_)) =>
            {
                let materialized = self.large_packed_geglu(op, product, out, input);
                if let Some(materialized) = materialized {
                    self.large.materialized.insert(out, materialized);
                }
                materialized.is_some()
            }
            (GemmImpl::Native, ActivationFormat::Int8) => {
                let materialized = self.native_geglu(op, product, out, input.activation);
                if let Some(activation) = materialized {
                    let materialized = Materialized {
                        activation,
                        factor: None,
                        scale: 1.0,
                    };
                    self.large.materialized.insert(out, materialized);
                }
                materialized.is_some()
            }
            _ => false,
        }
    }

    /// `gelu(product) * slice`, in the format of its reader.
    fn gelu_slice(
        &mut self,
        op: &Op,
        product: &Product,
        (slice, out): (ColumnSlice, Value),
        input: Materialized,
    ) {
        const GATED: [&str; 4] = ["slice f16", "slice codes", "slice scales", "slice sums"];
        let columns = self.plan.columns(out);
        let Some(format) = self.sole_format(out).filter(|_| columns.is_multiple_of(32)) else {
            self.product_parts(op, product, input);
            self.step(self.last_step(op))
                .expect("elementwise steps are always supported");
            return;
        };
        let activation = self.activation(format, GATED, columns);
        if let Some(kernel) = self.ple_gate(&product.parts, input, (slice, activation)) {
            let gate = fuse::linears_of(&self.plan.steps[op.steps.clone()]);
            let label = Labelled::joined(gate.chain([self.last_step(op)]));
            self.call(&label, op.rows, kernel);
        } else {
            let gate = self.scratch_floats("slice gate", columns);
            let target = ProductOut {
                operand: gate,
                stride: columns,
            };
            self.multiply(op, &product.parts, input, target);
            let kernel = Convert {
                a: gate,
                gelu_mul: Some(slice),
                columns,
                out: activation,
                pdl: self.pdl(),
            };
            self.call_for_step(self.last_step(op), op.rows, kernel);
        }
        let materialized = Materialized {
            activation,
            factor: None,
            scale: 1.0,
        };
        self.large.materialized.insert(out, materialized);
    }

    /// Parts side by side, as f32. Returns the factor per row that they must still be multiplied by.
    fn multiply(
        &mut self,
        op: &Op,
        parts: &[LinearPart],
        input: Materialized,
        target: ProductOut,
    ) -> Option<Operand> {
        let label = self.product_label(op, parts);
        let packed = self.reads_packed(parts);
        if packed {
            self.buckets = self.packed_buckets();
            self.packed_products(&label, op, parts, input, target);
            self.buckets = Buckets::ALL;
        }
        let Some(buckets) = self.f16_buckets(packed) else {
            return input.factor;
        };
        match self.gemm_impl(parts) {
            GemmImpl::CublasLt => {
                let outputs = parts.iter().map(|p| self.weights.matrix(p.w).rows).sum();
                let call = CublasLtGemm {
                    x: f16_operand(input.activation),
                    w: joined(parts, WeightFormat::F16),
                    out: target.operand,
                    kind: Out::F32,
                    alpha: 1.0,
                    outputs,
                    columns: self.weights.matrix(parts[0].w).columns,
                    stride: target.stride,
                    scaled: input.factor.is_some(),
                };
                self.buckets = buckets;
                match self.ple_proj(parts, input, target) {
                    Some(kernel) => self.call(&label, op.rows, kernel),
                    None => self.cublaslt_call(&label, op.rows, call),
                }
                self.buckets = Buckets::ALL;
                input.factor
            }
            GemmImpl::Native if matches!(input.activation, Activation::F16Permuted(_)) => {
                self.large_packed_products(&label, op, parts, input, target);
                None
            }
            GemmImpl::Native => {
                let x = (input.activation, input.factor);
                self.native_products(&label, op, parts, x, target);
                None
            }
        }
    }

    fn cublaslt_call(&mut self, label: &str, rows: Rows, product: CublasLtGemm) {
        self.calls.push(Call {
            label: label.to_owned(),
            origin: self.origin,
            rows,
            buckets: self.buckets,
            launch: Launch::CublasLt(product),
        });
    }
}

/// Output of a product.
#[derive(Clone, Copy)]
pub(super) struct ProductOut {
    pub(super) operand: Operand,
    pub(super) stride: usize,
}

/// The f16 operand; cuBLASLt and products of packed weights read nothing else.
pub(super) fn f16_operand(activation: Activation) -> Operand {
    match activation {
        Activation::F16(operand)
        | Activation::F16Tiles(operand)
        | Activation::F16Permuted(operand) => operand,
        Activation::Int8(_) | Activation::Int8HiLo { .. } => {
            unreachable!("chosen as the product's format")
        }
    }
}

fn joined(parts: &[LinearPart], format: WeightFormat) -> WeightOperand {
    let weights: Vec<_> = parts.iter().map(|p| p.w).collect();
    WeightOperand::stacked(&weights, format)
}
