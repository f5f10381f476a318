//! Routers, and experts in fragments: small batches stream each row's routed experts (GEMV), large ones permute tokens by expert and run a
//! grouped GEMM. Experts in other formats are left to plain kernels.

use carat_model::{plan::Value, weights::Weight};

use super::{Lowering, ScratchBytes};
use crate::{
    compile::{
        call::Buckets,
        fuse::{Experts, Op, Product, Prologue, Routing, RowNorm, Work},
        rows::{MEDIUM_ROWS, RowClass, SMALL_ROWS, buckets},
    },
    kernel::{
        Activation, BranchExperts, ExpertGroups, ExpertInput, ExpertTiles, ExpertsSum, FusedNorm,
        GemmEpilogue, GemmInput, GemmOutput, GemmShape, GemmWeights, Gemv, GemvEpilogue,
        GemvPrologue, GemvShape, GemvWeights, MAX_EXPERTS, MoePermute, NORM_MAX_COLUMNS, NormOut,
        Operand, OutputRows, Overlap, PARTS, PermutationOperands, PrepareRows, PreparedRows, Route,
        RoutedExperts, RouterScores, RouterWeights, ScoreParts, WeightFormat, WeightOperand,
        fragment::FragmentFormat,
    },
};

/// Outputs of each row's routed experts.
#[derive(Clone, Copy)]
pub(super) struct Unsummed {
    pub(super) each: Operand,
    pub(super) experts: BranchExperts,
}

/// A step of experts, all of whose weights have fragments.
#[derive(Clone, Copy)]
pub(super) struct PackedExperts {
    pub(super) norm: RowNorm,
    pub(super) route: Operand,
    /// Of gate and up.
    gated: GemvShape,
    pub(super) gate: Weight,
    pub(super) up: Weight,
    pub(super) down: Weight,
    /// Of gate and up, and of down.
    formats: (FragmentFormat, FragmentFormat),
    pub(super) count: usize,
    pub(super) top_k: usize,
    pub(super) columns: usize,
    pub(super) inner: usize,
    pub(super) outputs: usize,
}

impl PackedExperts {
    fn down_shape(&self) -> GemvShape {
        GemvShape {
            weights: GemvWeights::Fragments(self.formats.1),
            columns: self.inner,
            outputs: self.outputs,
            pair: false,
            ..self.gated
        }
    }

    /// Of gate and up, and of down, where blocks share all experts.
    fn grouped_shapes(&self) -> [GemvShape; 2] {
        let gated = GemvShape {
            ready: true,
            ..self.gated
        };
        [gated, self.down_shape()]
    }
}

impl Lowering<'_> {
    /// Experts whose weights have fragments, and whose rows the class's kernels can norm; others are left to plain kernels.
    fn packed_experts(&self, experts: &Experts) -> Option<PackedExperts> {
        let Experts {
            norm,
            route,
            gate,
            up,
            down,
            ..
        } = *experts;
        let format = |w: Weight| FragmentFormat::of(self.weights.matrix(w).quant);
        let formats = (format(gate)?, format(down)?);
        let matrix = self.weights.matrix(down);
        let top_k = self.plan.columns(route) / 2;
        let columns = self.plan.columns(norm.x);
        let gated = GemvShape {
            weights: GemvWeights::Fragments(formats.0),
            columns,
            outputs: matrix.columns,
            pair: true,
            codes: false,
            top_k: Some(top_k),
            ready: false,
            normed: true,
            card: self.card(),
        };
        let normed = match self.class {
            RowClass::Small => gated.can_norm(),
            RowClass::Medium | RowClass::Large => {
                let whole = columns.is_multiple_of(32) && matrix.columns.is_multiple_of(32);
                whole && columns <= NORM_MAX_COLUMNS
            }
        };
        (normed && format(up) == Some(formats.0)).then_some(PackedExperts {
            norm,
            route: self
                .routes
                .get(&route)
                .copied()
                .unwrap_or(Operand::Value(route)),
            gated,
            gate,
            up,
            down,
            formats,
            count: matrix.count,
            top_k,
            columns,
            inner: matrix.columns,
            outputs: matrix.rows,
        })
    }

    /// Routes go to scratch if they are for packed experts alone: the sum over experts, which may be a later op's, reads them, too.
    fn route_operand(&mut self, routing: &Routing) -> Operand {
        let packed = self.only_for(
            routing.out,
            |op| matches!(&op.work, Work::Experts(e) if self.packed_experts(e).is_some()),
        );
        if !packed {
            return Operand::Value(routing.out);
        }
        let operand = self.scratch_floats("route", 2 * routing.top_k);
        self.routes.insert(routing.out, operand);
        operand
    }

    /// Scores and their top-k.
    pub(super) fn route(&mut self, op: &Op, routing: &Routing) -> Option<()> {
        let experts = self.weights.matrix(routing.w).rows;
        if experts > MAX_EXPERTS {
            return None;
        }
        let (scores, parts) = self.router_scores(op, routing)?;
        let kernel = Route {
            scores,
            parts,
            scale: routing.scale,
            expert_scale: routing.expert_scale,
            experts,
            top_k: routing.top_k,
            out: self.route_operand(routing),
            pdl: self.pdl(),
        };
        self.call(&op.label, op.rows, kernel);
        Some(())
    }

    /// Scores by a GEMV, or for many rows, from a router in floats, in parts by a kernel of their own.
    fn router_scores(
        &mut self,
        op: &Op,
        routing: &Routing,
    ) -> Option<(Operand, Option<ScoreParts>)> {
        let experts = self.weights.matrix(routing.w).rows;
        let columns = self.plan.columns(routing.norm.x);
        let weights = match self.gemv_format(routing.w)? {
            (GemvWeights::F32, format) => Some((RouterWeights::F32, format)),
            (GemvWeights::BF16, format) => Some((RouterWeights::BF16, format)),
            _ => None,
        };
        let in_parts = matches!(self.class, RowClass::Large) && RouterScores::takes(columns);
        let Some((weights, format)) = weights.filter(|_| in_parts) else {
            let scores = self.scratch_floats("router scores", experts);
            self.gemv_scores(op, routing, scores)?;
            return Some((scores, None));
        };
        let parts = ScoreParts {
            squares: self.scratch_floats("router squares", PARTS),
            parts: PARTS,
            columns,
            eps: routing.norm.eps,
        };
        let kernel = RouterScores {
            x: Operand::Value(routing.norm.x),
            norm_weight: routing.norm.weight,
            w: WeightOperand::one(routing.w, format),
            weights,
            columns,
            experts,
            out: self.scratch_floats("router scores", PARTS * experts),
            squares: parts.squares,
        };
        let scores = kernel.out;
        self.call(&format!("{} scores", op.label), op.rows, kernel);
        Some((scores, Some(parts)))
    }

    /// Scores by a GEMV with the router's norm as its prologue, eight rows at a time.
    fn gemv_scores(&mut self, op: &Op, routing: &Routing, scores: Operand) -> Option<()> {
        let Routing { norm, w, .. } = *routing;
        let experts = self.weights.matrix(w).rows;
        let (gemv, format) = self.gemv_format(w)?;
        let shape = GemvShape {
            weights: gemv,
            columns: self.plan.columns(norm.x),
            outputs: experts,
            pair: false,
            codes: false,
            top_k: None,
            ready: false,
            normed: true,
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
            w: WeightOperand::one(w, format),
            shape,
            epilogue: GemvEpilogue::Plain(vec![OutputRows {
                out: scores,
                first: 0,
                rows: experts,
            }]),
            routed: None,
            pdl: self.pdl(),
            overlap: Overlap {
                early_input: self.pdl() && self.settle(norm.x),
                ..Overlap::default()
            },
        };
        self.call(&format!("{} scores", op.label), op.rows, kernel);
        Some(())
    }

    /// Routed experts of a small batch: gate, up and their product in one launch, down in another.
    pub(super) fn small_experts(&mut self, op: &Op, step: &Experts) -> Option<()> {
        let experts = self.packed_experts(step)?;
        let buckets = self.buckets;
        let from = self.choices.grouped_from;
        let each = if from <= SMALL_ROWS && self.groups(&experts) {
            self.buckets = Buckets::up_to(from - 1);
            self.routed_experts(op, &experts);
            self.buckets = Buckets::above(from - 1);
            self.grouped_experts(op, &experts)
        } else {
            self.routed_experts(op, &experts)
        };
        self.buckets = buckets;
        let experts = BranchExperts {
            route: experts.route,
            top_k: experts.top_k,
            f16_factor: None,
        };
        self.sum_experts(op, step.out, Unsummed { each, experts });
        Some(())
    }

    /// Whether blocks may share all experts that the rows of a batch of this class are routed to.
    fn groups(&self, experts: &PackedExperts) -> bool {
        let rows = match self.class {
            RowClass::Small => SMALL_ROWS,
            RowClass::Medium => MEDIUM_ROWS,
            RowClass::Large => return false,
        };
        let [gated, down] = experts.grouped_shapes();
        let all = |shape: GemvShape| shape.groups(rows, experts.count);
        experts.gated.can_norm() && all(gated) && all(down)
    }

    /// Routed experts, each read once, by blocks that share them all. Returns each expert's output.
    fn grouped_experts(&mut self, op: &Op, experts: &PackedExperts) -> Operand {
        let [gated_shape, down_shape] = experts.grouped_shapes();
        let padded = gated_shape.padded();
        let rows = match self.class {
            RowClass::Small => SMALL_ROWS,
            RowClass::Medium | RowClass::Large => MEDIUM_ROWS,
        };
        let bytes = ScratchBytes {
            per_row: 0,
            fixed: PreparedRows::bytes_of(rows, padded),
        };
        let prepared = PreparedRows {
            at: self.scratch.operand("experts prepared rows", bytes),
            padded,
        };
        let norm = experts.norm;
        let prepare = PrepareRows {
            prologue: GemvPrologue::Norm {
                x: Operand::Value(norm.x),
                weight: norm.weight,
                eps: norm.eps,
            },
            columns: experts.columns,
            out: prepared,
            threads: 32 * gated_shape.warps(),
            sums: experts.formats.0.has_minimums(),
            pdl: self.pdl(),
            early: self.settled == Some(norm.x),
        };
        let label = |what: &str| format!("{} {what}", op.label);
        self.call(&label("input"), op.rows, prepare);
        let routed = |input| {
            Some(RoutedExperts {
                route: experts.route,
                input,
                grouped: true,
            })
        };
        let gated = self.scratch_floats("experts gated", experts.top_k * experts.inner);
        let kernel = Gemv {
            prologue: GemvPrologue::Ready(prepared),
            w: WeightOperand::interleaved(&[experts.gate, experts.up]),
            shape: gated_shape,
            epilogue: GemvEpilogue::Geglu {
                out: gated,
                up: None,
            },
            routed: routed(ExpertInput::PerToken),
            pdl: self.pdl(),
            overlap: Overlap {
                late_trigger: true,
                ..Overlap::default()
            },
        };
        self.call(&label("gate+up"), op.rows, kernel);
        let each = self.scratch_floats("experts down", experts.top_k * experts.outputs);
        let part = OutputRows {
            out: each,
            first: 0,
            rows: experts.outputs,
        };
        let kernel = Gemv {
            prologue: GemvPrologue::None { x: gated },
            w: WeightOperand::one(experts.down, WeightFormat::Fragments),
            shape: down_shape,
            epilogue: GemvEpilogue::Plain(vec![part]),
            routed: routed(ExpertInput::PerExpert),
            pdl: self.pdl(),
            overlap: Overlap {
                early_route: true,
                ..Overlap::default()
            },
        };
        self.call(&label("down"), op.rows, kernel);
        each
    }

    /// Routed experts of few rows, each by blocks of its own. Returns each expert's output.
    fn routed_experts(&mut self, op: &Op, experts: &PackedExperts) -> Operand {
        let PackedExperts {
            norm,
            route,
            inner,
            outputs,
            top_k,
            ..
        } = *experts;
        let routed = |input| RoutedExperts {
            route,
            input,
            grouped: false,
        };
        let gated = self.scratch_floats("experts gated", top_k * inner);
        let shape = experts.gated;
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
            routed: Some(routed(ExpertInput::PerToken)),
            pdl: self.pdl(),
            overlap: Overlap {
                late_trigger: true,
                early_input: self.settled == Some(norm.x),
                ..Overlap::default()
            },
        };
        let label = format!("{} gate+up", op.label);
        self.call(&label, op.rows, kernel);
        let each = self.scratch_floats("experts down", top_k * outputs);
        let part = OutputRows {
            out: each,
            first: 0,
            rows: outputs,
        };
        let kernel = Gemv {
            prologue: GemvPrologue::None { x: gated },
            w: WeightOperand::one(experts.down, WeightFormat::Fragments),
            shape: experts.down_shape(),
            epilogue: GemvEpilogue::Plain(vec![part]),
            routed: Some(routed(ExpertInput::PerExpert)),
            pdl: self.pdl(),
            overlap: Overlap {
                early_route: true,
                ..Overlap::default()
            },
        };
        let label = format!("{} down", op.label);
        self.call(&label, op.rows, kernel);
        each
    }

    /// The weighted sum, by whoever reads it where that can be, else by a kernel of its own.
    fn sum_experts(&mut self, op: &Op, out: Value, unsummed: Unsummed) {
        if self.reader_sums(out) {
            self.unsummed.insert(out, unsummed);
            return;
        }
        let Unsummed { each, experts } = unsummed;
        let sum = ExpertsSum {
            x: each,
            route: experts.route,
            columns: self.plan.columns(out),
            top_k: experts.top_k,
            out: Operand::Value(out),
        };
        self.call(&format!("{} sum", op.label), op.rows, sum);
    }

    /// Whether a norm alone reads the sum, which adds up outputs as it loads them.
    fn reader_sums(&self, out: Value) -> bool {
        self.only_for(out, |op| match &op.work {
            Work::ResidualNorm(n)
            | Work::Product(Product {
                input: Prologue::ResidualNorm(n),
                ..
            }) => n.branches.is_some_and(|b| b.second.x == out) && n.residual != out,
            _ => false,
        })
    }

    /// Routed experts of a large batch: tokens are permuted by expert, and each expert multiplies its own.
    pub(super) fn large_experts(&mut self, op: &Op, step: &Experts) -> Option<()> {
        let experts = self.packed_experts(step)?;
        // The kernel that only sums takes floats.
        let may_be_f16 = self.reader_sums(step.out);
        let grouped = self.class == RowClass::Medium
            && self.choices.grouped_from <= MEDIUM_ROWS
            && self.groups(&experts);
        if grouped {
            let each = self.grouped_experts(op, &experts);
            let experts = BranchExperts {
                route: experts.route,
                top_k: experts.top_k,
                f16_factor: None,
            };
            self.sum_experts(op, step.out, Unsummed { each, experts });
            return Some(());
        }
        let (each, f16_factor) = match self.hopper_experts(op, &experts, may_be_f16) {
            Some(outputs) => outputs,
            None => (self.native_experts(op, &experts), None),
        };
        let experts = BranchExperts {
            route: experts.route,
            top_k: experts.top_k,
            f16_factor,
        };
        self.sum_experts(op, step.out, Unsummed { each, experts });
        Some(())
    }

    /// The same by the native GEMM, in int8. Returns each expert's output.
    fn native_experts(&mut self, op: &Op, experts: &PackedExperts) -> Operand {
        let PackedExperts {
            columns,
            inner,
            outputs,
            top_k,
            ..
        } = *experts;
        let (gate_format, down_format) = experts.formats;
        let groups = ExpertGroups {
            experts: experts.count,
            top_k,
            tiles: ExpertTiles::ByShare,
        };
        let operands = self.permute(op, experts, groups);
        let label = |what: &str| format!("{} {what}", op.label);
        let codes = self.int8_scratch(["experts codes", "experts scales", "experts sums"], columns);
        self.norm_for_experts(op, experts, Activation::Int8(codes));
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
        each
    }

    /// Tokens by expert, in tiles of the groups.
    pub(super) fn permute(
        &mut self,
        op: &Op,
        experts: &PackedExperts,
        groups: ExpertGroups,
    ) -> PermutationOperands {
        let out = self.group_operands(groups);
        let kernel = MoePermute {
            groups,
            route: experts.route,
            out,
        };
        self.call(&format!("{} permute", op.label), op.rows, kernel);
        out
    }

    /// What experts multiply.
    pub(super) fn norm_for_experts(
        &mut self,
        op: &Op,
        experts: &PackedExperts,
        activation: Activation,
    ) {
        let norm = FusedNorm {
            x: Operand::Value(experts.norm.x),
            factor: None,
            columns: experts.columns,
            out: NormOut {
                weight: experts.norm.weight,
                eps: experts.norm.eps,
                values: None,
                activation: Some(activation),
            },
            pdl: self.pdl(),
        };
        self.call_for_step(self.first_step(op), op.rows, norm);
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
