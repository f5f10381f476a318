//! Products of wide batches by our own kernels, which every card since Ampere runs: bytes over packed weights; halves where
//! weights are floats, or of a format that has no packed form.

use carat_model::{plan::Value, weights::Weight};

use super::{
    Lowering, ScratchBytes,
    wide::{Kind, Target},
};
use crate::{
    compile::{
        fuse::{Input, Op, Part, Product},
        rows::buckets,
    },
    kernel::{
        Form, Gemm, GemmEpilogue, GemmInput, GemmOutput, GemmShape, GemmWeights, Packed, Place,
        Q8Places, WeightForm,
        panels::{PanelFormat, STRIP},
    },
};

impl Lowering<'_> {
    /// What a product reads, if all its matrices agree.
    pub(super) fn own_kind(&self, product: &Product) -> Option<Kind> {
        let kind = |part: &Part| match PanelFormat::of(self.weights.matrix(part.w).quant) {
            Some(_) => Kind::Bytes,
            None => Kind::Halves,
        };
        let first = kind(product.parts.first()?);
        let columns = self.weights.matrix(product.parts[0].w).columns;
        let fits = columns.is_multiple_of(32);
        let alike = product.parts.iter().all(|p| kind(p) == first);
        // Exponentials of scores make much of a small difference: over a whole model, bytes that queries and keys are made
        // of are the largest error of all.
        let normed = match &product.input {
            Input::Value(_) => false,
            Input::Norm(_) => true,
            Input::NormAdd(norm_add) => norm_add.next.is_some(),
        };
        let finer = normed && columns.is_multiple_of(64) && self.attended(product);
        (fits && alike).then_some(match first {
            Kind::Bytes if finer => Kind::TwoBytes,
            _ => first,
        })
    }

    /// Parts side by side, as f32; neighbours of one format in one launch.
    pub(super) fn own_products(
        &mut self,
        label: &str,
        op: &Op,
        parts: &[Part],
        (form, factor): (Form, Option<Place>),
        target: Target,
    ) {
        let rows = |part: &Part| self.weights.matrix(part.w).rows;
        let format = |part: &Part| PanelFormat::of(self.weights.matrix(part.w).quant);
        // Padding between parts would be columns of the result.
        let joins = |a: &Part, b: &Part| format(a) == format(b) && rows(a).is_multiple_of(STRIP);
        let runs: Vec<Vec<Part>> = parts.chunk_by(joins).map(<[Part]>::to_vec).collect();
        let mut column = 0;
        for run in runs {
            let outputs = run.iter().map(&rows).sum();
            let (weights, weight_form) = match format(&run[0]) {
                Some(format) => (GemmWeights::Panels(format), WeightForm::Panels),
                None => (GemmWeights::Halves, WeightForm::Half),
            };
            let matrices: Vec<Weight> = run.iter().map(|p| p.w).collect();
            let shape = GemmShape {
                terms: if matches!(form, Form::Q16 { .. }) {
                    2
                } else {
                    1
                },
                ..self.gemm_shape(weights, GemmEpilogue::Floats, run[0].w, outputs)
            };
            let out = GemmOutput::Floats {
                out: target.place,
                column,
                stride: target.stride,
            };
            let packed = Packed::stacked(&matrices, weight_form);
            let kernel = self.gemm(shape, input(form, factor), packed, out);
            self.call(label, op.rows, kernel);
            column += outputs;
        }
    }

    /// `gelu(gate) * up` as bytes; `None` if it cannot be made so.
    pub(super) fn own_gelu_pair(
        &mut self,
        op: &Op,
        product: &Product,
        out: Value,
        form: Form,
    ) -> Option<Form> {
        let [gate, up] = product.parts.as_slice() else {
            return None;
        };
        let format = |part: &Part| PanelFormat::of(self.weights.matrix(part.w).quant);
        let columns = self.plan.columns(out);
        let gate_format = format(gate)?;
        if format(up) != Some(gate_format) || !columns.is_multiple_of(32) {
            return None;
        }
        let products = self.bytes(["gated codes", "gated scales", "gated sums"], columns);
        let weights = GemmWeights::Panels(gate_format);
        let shape = self.gemm_shape(weights, GemmEpilogue::GeluPair, gate.w, 2 * columns);
        let packed = Packed::interleaved(&[gate.w, up.w]);
        let out = GemmOutput::Products(products);
        let kernel = self.gemm(shape, input(form, None), packed, out);
        let label = self.product_label(op, &product.parts);
        self.call(&label, op.rows, kernel);
        Some(Form::Q8(products))
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
        }
    }

    pub(super) fn gemm(
        &mut self,
        shape: GemmShape,
        x: GemmInput,
        w: Packed,
        out: GemmOutput,
    ) -> Gemm {
        let (mut partials, mut tickets) = (0, 0);
        for rows in buckets(self.target.max_rows) {
            let needed = shape.scratch(rows);
            partials = partials.max(needed.partials);
            tickets = tickets.max(needed.tickets);
        }
        let fixed = |fixed: usize| ScratchBytes { per_row: 0, fixed };
        Gemm {
            shape,
            x,
            w,
            out,
            partials: self.scratch.place("product partials", fixed(partials)),
            tickets: self.scratch.place("product tickets", fixed(tickets)),
            groups: None,
        }
    }

    /// Room for bytes of this width, with their scales and sums.
    pub(super) fn bytes(
        &mut self,
        [codes, scales, sums]: [&'static str; 3],
        columns: usize,
    ) -> Q8Places {
        Q8Places {
            codes: self.scratch(codes, columns),
            scales: self.scratch_floats(scales, columns.div_ceil(32)),
            sums: self.scratch_floats(sums, columns.div_ceil(32)),
        }
    }
}

fn input(form: Form, factors: Option<Place>) -> GemmInput {
    match form {
        Form::F16(values) => GemmInput::Halves { values, factors },
        Form::Q8(places) | Form::Q16 { both: places, .. } => GemmInput::Bytes(places),
    }
}
