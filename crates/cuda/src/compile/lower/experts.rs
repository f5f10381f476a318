//! Experts of packed weights, which rows choose: a few rows stream the matrices they chose, many are sorted by expert first.

use carat_model::{plan::Step, weights::Weight};

use super::{Lowering, ScratchBytes};
use crate::{
    compile::{fuse::Op, rows::buckets},
    kernel::{
        Choices, ChoicesKind, Convert, Epilogue, ExpertTiles, ExpertsSum, Form, GemmEpilogue,
        GemmInput, GemmOutput, GemmShape, GemmWeights, Gemv, GemvForm, GemvPart, GemvShape,
        GroupPlaces, Groups, Packed, Place, Prologue, WeightForm, XRows, panels::PanelFormat,
    },
};

/// A step of experts, all of whose weights are packed.
#[derive(Clone, Copy)]
struct Chosen {
    x: Place,
    route: Place,
    out: Place,
    gate: Weight,
    up: Weight,
    down: Weight,
    /// Of gate and up, and of down.
    formats: (PanelFormat, PanelFormat),
    count: usize,
    top_k: usize,
    columns: usize,
    inner: usize,
    outputs: usize,
}

impl Lowering<'_> {
    fn chosen(&self, step: &Step) -> Option<Chosen> {
        let Step::Experts {
            x,
            route,
            gate,
            up,
            down,
            out,
        } = *step
        else {
            return None;
        };
        let format = |w: Weight| PanelFormat::of(self.weights.matrix(w).quant);
        let formats = (format(gate)?, format(down)?);
        let matrix = self.weights.matrix(down);
        (format(up) == Some(formats.0)).then_some(Chosen {
            x: Place::Value(x),
            route: Place::Value(route),
            out: Place::Value(out),
            gate,
            up,
            down,
            formats,
            count: matrix.count,
            top_k: self.plan.columns(route) / 2,
            columns: self.plan.columns(x),
            inner: matrix.columns,
            outputs: matrix.rows,
        })
    }

    /// The chosen experts: gate, up and their product in one launch, down and the weighted sum in another.
    pub(super) fn narrow_experts(&mut self, op: &Op, step: &Step) -> Option<()> {
        let experts = self.chosen(step)?;
        let Chosen {
            x,
            route,
            inner,
            outputs,
            top_k,
            ..
        } = experts;
        let (gate_format, down_format) = experts.formats;
        if !inner.is_multiple_of(down_format.unit_inputs()) {
            return None;
        }
        let choices = |kind| Choices { route, top_k, kind };
        let gated = self.scratch_floats("experts gated", top_k * inner);
        let shape = GemvShape {
            form: GemvForm::Panel(gate_format),
            columns: experts.columns,
            outputs: inner,
            pair: true,
            summed: 1,
            sets: top_k,
            card: self.card(),
        };
        let kernel = Gemv {
            prologue: Prologue::None { x },
            w: Packed::interleaved(&[experts.gate, experts.up]),
            shape,
            epilogue: Epilogue::GeluPair {
                out: gated,
                up: None,
            },
            choices: Some(choices(ChoicesKind::Each)),
            early: self.target.overlap,
        };
        let label = format!("{} gate+up", op.label);
        self.call(&label, op.rows, kernel);
        let part = GemvPart {
            out: experts.out,
            first: 0,
            rows: outputs,
        };
        let kernel = Gemv {
            prologue: Prologue::None { x: gated },
            w: Packed::one(experts.down, WeightForm::Panels),
            shape: GemvShape {
                form: GemvForm::Panel(down_format),
                columns: inner,
                outputs,
                pair: false,
                summed: top_k,
                sets: 1,
                ..shape
            },
            epilogue: Epilogue::Plain(vec![part]),
            choices: Some(choices(ChoicesKind::Summed)),
            early: self.target.overlap,
        };
        let label = format!("{} down", op.label);
        self.call(&label, op.rows, kernel);
        Some(())
    }

    /// The chosen experts of many rows: choices are sorted by expert, and each expert multiplies those that chose it.
    pub(super) fn wide_experts(&mut self, op: &Op, step: &Step) -> Option<()> {
        let experts = self.chosen(step)?;
        let Chosen {
            route,
            columns,
            inner,
            outputs,
            top_k,
            ..
        } = experts;
        let (gate_format, down_format) = experts.formats;
        if !columns.is_multiple_of(32) || !inner.is_multiple_of(32) {
            return None;
        }
        let groups = Groups {
            experts: experts.count,
            top_k,
        };
        let places = self.group_places(groups);
        let label = |what: &str| format!("{} {what}", op.label);
        self.call(
            &label("permute"),
            op.rows,
            ExpertTiles {
                groups,
                route,
                out: places,
            },
        );
        let codes = self.bytes(["experts codes", "experts scales", "experts sums"], columns);
        self.call(
            &label("convert"),
            op.rows,
            Convert {
                a: experts.x,
                gelu_mul: None,
                columns,
                out: Form::Q8(codes),
            },
        );
        let names = [
            "experts gated codes",
            "experts gated scales",
            "experts gated sums",
        ];
        let gated = self.bytes(names, top_k * inner);
        let grouped = |shape: GemmShape| GemmShape {
            groups: Some(groups),
            ..shape
        };
        let weights = GemmWeights::Panels(gate_format);
        let shape = self.gemm_shape(weights, GemmEpilogue::GeluPair, experts.gate, 2 * inner);
        let packed = Packed::interleaved(&[experts.gate, experts.up]);
        let products = GemmOutput::Products(gated);
        let mut kernel = self.gemm(grouped(shape), GemmInput::Bytes(codes), packed, products);
        kernel.groups = Some((places, XRows::One));
        self.call(&label("gate+up"), op.rows, kernel);
        let each = self.scratch_floats("experts down", top_k * outputs);
        let weights = GemmWeights::Panels(down_format);
        let shape = self.gemm_shape(weights, GemmEpilogue::Floats, experts.down, outputs);
        let floats = GemmOutput::Floats {
            out: each,
            column: 0,
            stride: outputs,
        };
        let packed = Packed::one(experts.down, WeightForm::Panels);
        let mut kernel = self.gemm(grouped(shape), GemmInput::Bytes(gated), packed, floats);
        kernel.groups = Some((places, XRows::EachChoice));
        self.call(&label("down"), op.rows, kernel);
        let sum = ExpertsSum {
            x: each,
            route,
            columns: outputs,
            top_k,
            out: experts.out,
        };
        self.call(&label("sum"), op.rows, sum);
        Some(())
    }

    fn group_places(&mut self, groups: Groups) -> GroupPlaces {
        let most = buckets(self.target.max_rows).map(|rows| groups.most_tiles(rows));
        let most = most.max().unwrap_or(0);
        let fixed = |words: usize| ScratchBytes {
            per_row: 0,
            fixed: words * 4,
        };
        GroupPlaces {
            sorted: self.scratch("experts sorted", groups.top_k * 4),
            tiles: self.scratch.place("experts tiles", fixed(3 * most)),
            tile_count: self.scratch.place("experts tile count", fixed(1)),
        }
    }
}
