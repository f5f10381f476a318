//! Products of large batches on Hopper over packed weights, where cuBLASLt has no f16 copies of them to multiply: experts, and what
//! memory has no room to copy. Medium batches stay with kernels that have less to do for a row. Weights are dequantized on their way to the tensor cores; activations are K-permuted f16.

use carat_model::{plan::Value, weights::Weight};

use super::{
    Lowering,
    experts::PackedExperts,
    large_batch::{Materialized, ProductOut, f16_operand},
};
use crate::{
    compile::{
        fuse::{LinearPart, Op, Product},
        rows::RowClass,
    },
    kernel::{
        Activation, ExpertGroups, ExpertInput, ExpertTiles, GROUPED_TOKENS, GemmPacked,
        GemmPackedEpilogue, GemmPackedOut, GemmPackedShape, Operand, WeightFormat, WeightOperand,
        fragment::FragmentFormat,
    },
};

/// Factor of `gelu(gate) * up` in f16: none that a model computes overflows then, and next to none is too small to count.
const GATED_SCALE: f32 = 1.0 / 16.0;

impl Lowering<'_> {
    /// The format of a matrix that can be multiplied as it is packed.
    fn hopper_format(&self, w: Weight) -> Option<FragmentFormat> {
        let matrix = self.weights.matrix(w);
        let takes = self.target.hopper
            && self.class == RowClass::Large
            && GemmPackedShape::takes(matrix.rows, matrix.columns);
        FragmentFormat::of(matrix.quant).filter(|_| takes)
    }

    /// Whether all matrices of a product, each by itself, are multiplied as they are packed.
    pub(super) fn multiplies_packed(&self, product: &Product) -> bool {
        let takes = |part: &LinearPart| {
            self.weights.matrix(part.w).count == 1 && self.hopper_format(part.w).is_some()
        };
        product.parts.iter().all(takes)
    }

    /// Parts side by side, as f32; neighbours of one format in one launch.
    pub(super) fn large_packed_products(
        &mut self,
        label: &str,
        op: &Op,
        parts: &[LinearPart],
        input: Materialized,
        target: ProductOut,
    ) {
        let rows = |part: &LinearPart| self.weights.matrix(part.w).rows;
        let runs = self.joined_parts(parts);
        let mut column = 0;
        for run in &runs {
            let outputs = run.iter().map(&rows).sum();
            let matrices: Vec<Weight> = run.iter().map(|p| p.w).collect();
            let kernel = GemmPacked {
                shape: self.packed_shape(matrices[0], GemmPackedEpilogue::F32, outputs),
                x: f16_operand(input.activation),
                w: WeightOperand::stacked(&matrices, WeightFormat::Fragments),
                out: GemmPackedOut::Rows {
                    out: target.operand,
                    column,
                    stride: target.stride,
                },
                scale: 1.0 / input.scale,
                groups: None,
            };
            let named = match runs.len() {
                1 => label.to_owned(),
                _ => self.product_label(op, run),
            };
            self.call(&named, op.rows, kernel);
            column += outputs;
        }
    }

    /// `gelu(gate) * up` as the epilogue of one product; `None` if that is not possible.
    pub(super) fn large_packed_geglu(
        &mut self,
        op: &Op,
        product: &Product,
        out: Value,
        input: Materialized,
    ) -> Option<Materialized> {
        let [gate, up] = product.parts.as_slice() else {
            return None;
        };
        let columns = self.plan.columns(out);
        let alike = self.hopper_format(gate.w) == self.hopper_format(up.w)
            && self.weights.matrix(gate.w).rows == self.weights.matrix(up.w).rows;
        if !alike || !columns.is_multiple_of(32) || input.scale != 1.0 {
            return None;
        }
        let gated = self.scratch("gated f16", 2 * columns);
        let kernel = GemmPacked {
            shape: self.packed_shape(gate.w, GemmPackedEpilogue::Geglu, 2 * columns),
            x: f16_operand(input.activation),
            w: WeightOperand::interleaved(&[gate.w, up.w]),
            out: GemmPackedOut::F16Permuted(gated),
            scale: GATED_SCALE,
            groups: None,
        };
        let label = self.product_label(op, &product.parts);
        self.call(&label, op.rows, kernel);
        Some(Materialized {
            activation: Activation::F16Permuted(gated),
            factor: None,
            scale: GATED_SCALE,
        })
    }

    /// Routed experts: tokens are permuted by expert, and each expert multiplies its own. Returns each one's output and, if it may be and
    /// is f16, the factor to what it should be; `None` if the experts cannot be multiplied so.
    pub(super) fn hopper_experts(
        &mut self,
        op: &Op,
        experts: &PackedExperts,
        may_be_f16: bool,
    ) -> Option<(Operand, Option<f32>)> {
        let PackedExperts {
            columns,
            inner,
            outputs,
            top_k,
            ..
        } = *experts;
        self.hopper_format(experts.gate)?;
        self.hopper_format(experts.down)?;
        let groups = ExpertGroups {
            experts: experts.count,
            top_k,
            tiles: ExpertTiles::Of(GROUPED_TOKENS),
        };
        let operands = self.permute(op, experts, groups);
        let label = |what: &str| format!("{} {what}", op.label);
        let x = self.scratch("experts f16", 2 * columns);
        self.norm_for_experts(op, experts, Activation::F16Permuted(x));
        let grouped = |shape: GemmPackedShape| GemmPackedShape {
            groups: Some(groups),
            ..shape
        };
        let gated = self.scratch("experts gated f16", 2 * top_k * inner);
        let geglu = GemmPackedEpilogue::Geglu;
        let kernel = GemmPacked {
            shape: grouped(self.packed_shape(experts.gate, geglu, 2 * inner)),
            x,
            w: WeightOperand::interleaved(&[experts.gate, experts.up]),
            out: GemmPackedOut::F16Permuted(gated),
            scale: GATED_SCALE,
            groups: Some((operands, ExpertInput::PerToken)),
        };
        self.call(&label("gate+up"), op.rows, kernel);
        let (epilogue, bytes, scale, f16_factor) = if may_be_f16 {
            (GemmPackedEpilogue::F16, 2, 1.0, Some(1.0 / GATED_SCALE))
        } else {
            (GemmPackedEpilogue::F32, 4, 1.0 / GATED_SCALE, None)
        };
        let each = self.scratch("experts down", bytes * top_k * outputs);
        let kernel = GemmPacked {
            shape: grouped(self.packed_shape(experts.down, epilogue, outputs)),
            x: gated,
            w: WeightOperand::one(experts.down, WeightFormat::Fragments),
            out: GemmPackedOut::Rows {
                out: each,
                column: 0,
                stride: outputs,
            },
            scale,
            groups: Some((operands, ExpertInput::PerExpert)),
        };
        self.call(&label("down"), op.rows, kernel);
        Some((each, f16_factor))
    }

    fn packed_shape(
        &self,
        w: Weight,
        epilogue: GemmPackedEpilogue,
        outputs: usize,
    ) -> GemmPackedShape {
        GemmPackedShape {
            format: self.hopper_format(w).expect("asked before"),
            epilogue,
            columns: self.weights.matrix(w).columns,
            outputs,
            multiprocessors: self.target.multiprocessors,
            groups: None,
        }
    }
}
