//! Routers, and experts in fragments: small batches stream each row's routed experts (GEMV), large ones permute tokens by expert and run a
//! grouped GEMM. Experts in other formats are left to plain kernels.

use carat_model::weights::Weight;

use super::{Lowering, ScratchBytes};
use crate::{
    compile::{
        fuse::{Experts, Op, Routing, RowNorm},
        rows::buckets,
    },
    kernel::{
        Activation, ExpertGroups, ExpertInput, ExpertsSum, FusedNorm, GemmEpilogue, GemmInput,
        GemmOutput, GemmShape, GemmWeights, Gemv, GemvEpilogue, GemvPrologue, GemvShape,
        GemvWeights, MAX_EXPERTS, MoePermute, NORM_MAX_COLUMNS, NormOut, Operand, OutputRows,
        PermutationOperands, Route, RoutedExperts, RoutedOutput, WeightFormat, WeightOperand,
        fragment::FragmentFormat,
    },
};

/// A step of experts, all of whose weights have fragments.
#[derive(Clone, Copy)]
struct PackedExperts {
    norm: RowNorm,
    route: Operand,
    out: Operand,
    gate: Weight,
    up: Weight,
    down: Weight,
    /// Of gate and up, and of down.
    formats: (FragmentFormat, FragmentFormat),
    count: usize,
    top_k: usize,
    columns: usize,
    inner: usize,
    outputs: usize,
}

impl Lowering<'_> {
    fn packed_experts(&self, experts: &Experts) -> Option<PackedExperts> {
        let Experts {
            norm,
            route,
            gate,
            up,
            down,
            out,
        } = *experts;
        let format = |w: Weight| FragmentFormat::of(self.weights.matrix(w).quant);
        let formats = (format(gate)?, format(down)?);
        let matrix = self.weights.matrix(down);
        (format(up) == Some(formats.0)).then_some(PackedExperts {
            norm,
            route: Operand::Value(route),
            out: Operand::Value(out),
            gate,
            up,
            down,
            formats,
            count: matrix.count,
            top_k: self.plan.columns(route) / 2,
            columns: self.plan.columns(norm.x),
            inner: matrix.columns,
            outputs: matrix.rows,
        })
    }

    /// Scores by a GEMV with the router's norm as its prologue, eight rows at a time, and their top-k.
    pub(super) fn route(&mut self, op: &Op, routing: &Routing) -> Option<()> {
        let Routing { norm, w, .. } = *routing;
        let experts = self.weights.matrix(w).rows;
        let (gemv, format) = self.gemv_format(w)?;
        let shape = GemvShape {
            weights: gemv,
            columns: self.plan.columns(norm.x),
            outputs: experts,
            pair: false,
            summed: 1,
            sets: 1,
            card: self.card(),
        };
        if experts > MAX_EXPERTS || !shape.can_norm() {
            return None;
        }
        let scores = self.scratch_floats("router scores", experts);
        let kernel = Gemv {
            prologue: GemvPrologue::Norm {
                x: Operand::Value(norm.x),
                weight: norm.weight,
                eps: norm.eps,
            },
            w: WeightOperand::one(w, format),
            shape,
            epilogue: GemvEpilogue::Plain(vec![OutputRows {
                out: scores,
                first: 0,
                rows: experts,
            }]),
            routed: None,
            pdl: self.pdl(),
        };
        self.call(&format!("{} scores", op.label), op.rows, kernel);
        let kernel = Route {
            scores,
            scale: routing.scale,
            expert_scale: routing.expert_scale,
            experts,
            top_k: routing.top_k,
            out: Operand::Value(routing.out),
            pdl: self.pdl(),
        };
        self.call(&op.label, op.rows, kernel);
        Some(())
    }

    /// Routed experts of a small batch: gate, up and their product in one launch, down and the weighted sum in another.
    pub(super) fn small_experts(&mut self, op: &Op, step: &Experts) -> Option<()> {
        let experts = self.packed_experts(step)?;
        let PackedExperts {
            norm,
            route,
            inner,
            outputs,
            top_k,
            ..
        } = experts;
        let (gate_format, down_format) = experts.formats;
        if !inner.is_multiple_of(down_format.k_block_inputs()) {
            return None;
        }
        let routed = |kind| RoutedExperts { route, top_k, kind };
        let gated = self.scratch_floats("experts gated", top_k * inner);
        let shape = GemvShape {
            weights: GemvWeights::Fragments(gate_format),
            columns: experts.columns,
            outputs: inner,
            pair: true,
            summed: 1,
            sets: top_k,
            card: self.card(),
        };
        if !shape.can_norm() {
            return None;
        }
        let kernel = Gemv {
            prologue: GemvPrologue::Norm {
                x: Operand::Value(norm.x),
                weight: norm.weight,
                eps: norm.eps,
            },
            w: WeightOperand::interleaved(&[experts.gate, experts.up]),
            shape,
            epilogue: GemvEpilogue::Geglu {
                out: gated,
                up: None,
            },
            routed: Some(routed(RoutedOutput::PerExpert)),
            pdl: self.pdl(),
        };
        let label = format!("{} gate+up", op.label);
        self.call(&label, op.rows, kernel);
        let part = OutputRows {
            out: experts.out,
            first: 0,
            rows: outputs,
        };
        let kernel = Gemv {
            prologue: GemvPrologue::None { x: gated },
            w: WeightOperand::one(experts.down, WeightFormat::Fragments),
            shape: GemvShape {
                weights: GemvWeights::Fragments(down_format),
                columns: inner,
                outputs,
                pair: false,
                summed: top_k,
                sets: 1,
                ..shape
            },
            epilogue: GemvEpilogue::Plain(vec![part]),
            routed: Some(routed(RoutedOutput::Summed)),
            pdl: self.pdl(),
        };
        let label = format!("{} down", op.label);
        self.call(&label, op.rows, kernel);
        Some(())
    }

    /// Routed experts of a large batch: tokens are permuted by expert, and each expert multiplies its own.
    pub(super) fn large_experts(&mut self, op: &Op, step: &Experts) -> Option<()> {
        let experts = self.packed_experts(step)?;
        let PackedExperts {
            route,
            columns,
            inner,
            outputs,
            top_k,
            ..
        } = experts;
        let (gate_format, down_format) = experts.formats;
        let whole = columns.is_multiple_of(32) && inner.is_multiple_of(32);
        if !whole || columns > NORM_MAX_COLUMNS {
            return None;
        }
        let groups = ExpertGroups {
            experts: experts.count,
            top_k,
        };
        let operands = self.group_operands(groups);
        let label = |what: &str| format!("{} {what}", op.label);
        self.call(
            &label("permute"),
            op.rows,
            MoePermute {
                groups,
                route,
                out: operands,
            },
        );
        let codes = self.int8_scratch(["experts codes", "experts scales", "experts sums"], columns);
        let norm = FusedNorm {
            x: Operand::Value(experts.norm.x),
            factor: None,
            columns,
            out: NormOut {
                weight: experts.norm.weight,
                eps: experts.norm.eps,
                values: None,
                activation: Some(Activation::Int8(codes)),
            },
            pdl: self.pdl(),
        };
        self.call_for_step(self.first_step(op), op.rows, norm);
        let names = [
            "experts gated codes",
            "experts gated scales",
            "experts gated sums",
        ];
        let gated = self.int8_scratch(names, top_k * inner);
        let grouped = |shape: GemmShape| GemmShape {
            groups: Some(groups),
            ..shape
        };
        let weights = GemmWeights::Fragments(gate_format);
        let shape = self.gemm_shape(weights, GemmEpilogue::Geglu, experts.gate, 2 * inner);
        let w = WeightOperand::interleaved(&[experts.gate, experts.up]);
        let products = GemmOutput::Int8(gated);
        let mut kernel = self.gemm(grouped(shape), GemmInput::Int8(codes), w, products);
        kernel.groups = Some((operands, ExpertInput::PerToken));
        self.call(&label("gate+up"), op.rows, kernel);
        let each = self.scratch_floats("experts down", top_k * outputs);
        let weights = GemmWeights::Fragments(down_format);
        let shape = self.gemm_shape(weights, GemmEpilogue::F32, experts.down, outputs);
        let floats = GemmOutput::F32 {
            out: each,
            column: 0,
            stride: outputs,
        };
        let w = WeightOperand::one(experts.down, WeightFormat::Fragments);
        let mut kernel = self.gemm(grouped(shape), GemmInput::Int8(gated), w, floats);
        kernel.groups = Some((operands, ExpertInput::PerExpert));
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

    fn group_operands(&mut self, groups: ExpertGroups) -> PermutationOperands {
        let tiles = buckets(self.target.max_rows).map(|rows| groups.max_tiles(rows));
        let max_tiles = tiles.max().unwrap_or(0);
        let fixed = |words: usize| ScratchBytes {
            per_row: 0,
            fixed: words * 4,
        };
        PermutationOperands {
            sorted: self.scratch("experts sorted", groups.top_k * 4),
            tiles: self.scratch.operand("experts tiles", fixed(3 * max_tiles)),
            tile_count: self.scratch.operand("experts tile count", fixed(1)),
        }
    }
}
