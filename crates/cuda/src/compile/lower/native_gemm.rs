//! Products of large batches by the native GEMM, which every card since Ampere runs: int8 over fragments; f16 where weights are
//! floats, or of a format that has no fragments.

use carat_model::{plan::Value, weights::Weight};

use super::{
    Lowering, ScratchBytes,
    large_batch::{ActivationFormat, ProductOut},
};
use crate::{
    compile::{
        fuse::{LinearPart, Op, Product, Prologue},
        rows::buckets,
    },
    kernel::{
        Activation, Gemm, GemmEpilogue, GemmInput, GemmOutput, GemmShape, GemmWeights,
        Int8Operands, Operand, WeightFormat, WeightOperand,
        fragment::{FragmentFormat, M_TILE},
    },
};

impl Lowering<'_> {
    /// Format that a product reads its input in, if all its matrices agree.
    pub(super) fn native_format(&self, product: &Product) -> Option<ActivationFormat> {
        let format = |part: &LinearPart| match FragmentFormat::of(self.weights.matrix(part.w).quant)
        {
            Some(_) => ActivationFormat::Int8,
            None => ActivationFormat::F16,
        };
        let first = format(product.parts.first()?);
        let columns = self.weights.matrix(product.parts[0].w).columns;
        let fits = columns.is_multiple_of(32);
        let alike = product.parts.iter().all(|p| format(p) == first);
        // Exponentials of scores amplify small differences: over a whole model, the int8 rounding of what queries and keys are
        // computed from is the largest error of all.
        let normed = match &product.input {
            Prologue::Value(_) => false,
            Prologue::Norm(_) => true,
            Prologue::ResidualNorm(residual_norm) => residual_norm.following.is_some(),
        };
        let finer = normed && columns.is_multiple_of(64) && self.attended(product);
        (fits && alike).then_some(match first {
            ActivationFormat::Int8 if finer => ActivationFormat::Int8HiLo,
            _ => first,
        })
    }

    /// Parts that one launch multiplies: neighbours of one format. Padding between others would be columns of the result.
    pub(super) fn joined_parts<'p>(&self, parts: &'p [LinearPart]) -> Vec<&'p [LinearPart]> {
        let matrix = |part: &LinearPart| self.weights.matrix(part.w);
        let format = |part: &LinearPart| FragmentFormat::of(matrix(part).quant);
        let joins = |a: &LinearPart, b: &LinearPart| {
            format(a) == format(b) && matrix(a).rows.is_multiple_of(M_TILE)
        };
        parts.chunk_by(joins).collect()
    }

    /// Parts side by side, as f32; neighbours of one format in one launch.
    pub(super) fn native_products(
        &mut self,
        label: &str,
        op: &Op,
        parts: &[LinearPart],
        (activation, factor): (Activation, Option<Operand>),
        target: ProductOut,
    ) {
        let rows = |part: &LinearPart| self.weights.matrix(part.w).rows;
        let format = |part: &LinearPart| FragmentFormat::of(self.weights.matrix(part.w).quant);
        let mut column = 0;
        for run in self.joined_parts(parts) {
            let outputs = run.iter().map(&rows).sum();
            let (weights, weight_format) = match format(&run[0]) {
                Some(format) => (GemmWeights::Fragments(format), WeightFormat::Fragments),
                None => (GemmWeights::F16, WeightFormat::F16),
            };
            let matrices: Vec<Weight> = run.iter().map(|p| p.w).collect();
            let shape = GemmShape {
                terms: if matches!(activation, Activation::Int8HiLo { .. }) {
                    2
                } else {
                    1
                },
                ..self.gemm_shape(weights, GemmEpilogue::F32, run[0].w, outputs)
            };
            let out = GemmOutput::F32 {
                out: target.operand,
                column,
                stride: target.stride,
            };
            let w = WeightOperand::stacked(&matrices, weight_format);
            let kernel = self.gemm(shape, input(activation, factor), w, out);
            self.call(label, op.rows, kernel);
            column += outputs;
        }
    }

    /// `gelu(gate) * up` in int8, as the epilogue of one GEMM; `None` if that is not possible.
    pub(super) fn native_geglu(
        &mut self,
        op: &Op,
        product: &Product,
        out: Value,
        activation: Activation,
    ) -> Option<Activation> {
        let [gate, up] = product.parts.as_slice() else {
            return None;
        };
        let format = |part: &LinearPart| FragmentFormat::of(self.weights.matrix(part.w).quant);
        let columns = self.plan.columns(out);
        let gate_format = format(gate)?;
        if format(up) != Some(gate_format) || !columns.is_multiple_of(32) {
            return None;
        }
        let products = self.int8_scratch(["gated codes", "gated scales", "gated sums"], columns);
        let weights = GemmWeights::Fragments(gate_format);
        let shape = self.gemm_shape(weights, GemmEpilogue::Geglu, gate.w, 2 * columns);
        let w = WeightOperand::interleaved(&[gate.w, up.w]);
        let out = GemmOutput::Int8(products);
        let kernel = self.gemm(shape, input(activation, None), w, out);
        let label = self.product_label(op, &product.parts);
        self.call(&label, op.rows, kernel);
        Some(Activation::Int8(products))
    }

    pub(super) fn gemm_shape(
        &self,
        weights: GemmWeights,
        epilogue: GemmEpilogue,
        w: Weight,
        outputs: usize,
    ) -> GemmShape {
        GemmShape {
            weights,
            epilogue,
            columns: self.weights.matrix(w).columns,
            terms: 1,
            outputs,
            groups: None,
            multiprocessors: self.target.multiprocessors,
            largest: self.choices.gemm_tile,
        }
    }

    pub(super) fn gemm(
        &mut self,
        shape: GemmShape,
        x: GemmInput,
        w: WeightOperand,
        out: GemmOutput,
    ) -> Gemm {
        let (mut partials, mut arrivals) = (0, 0);
        for rows in buckets(self.target.max_rows) {
            let needed = shape.scratch(rows);
            partials = partials.max(needed.partials);
            arrivals = arrivals.max(needed.arrivals);
        }
        let fixed = |fixed: usize| ScratchBytes { per_row: 0, fixed };
        Gemm {
            shape,
            x,
            w,
            out,
            partials: self.scratch.operand("product partials", fixed(partials)),
            arrivals: self.scratch.operand("product arrivals", fixed(arrivals)),
            groups: None,
        }
    }

    /// Scratch for int8 codes of this width, with their scales and sums.
    pub(super) fn int8_scratch(
        &mut self,
        [codes, scales, sums]: [&'static str; 3],
        columns: usize,
    ) -> Int8Operands {
        Int8Operands {
            codes: self.scratch(codes, columns),
            scales: self.scratch_floats(scales, columns.div_ceil(32)),
            sums: self.scratch_floats(sums, columns.div_ceil(32)),
        }
    }
}

fn input(activation: Activation, factors: Option<Operand>) -> GemmInput {
    match activation {
        Activation::F16(values) => GemmInput::F16 { values, factors },
        Activation::F16Tiles(_) | Activation::F16Permuted(_) => {
            unreachable!("only products by wgmma read them")
        }
        Activation::Int8(operands) | Activation::Int8HiLo { both: operands, .. } => {
            GemmInput::Int8(operands)
        }
    }
}
