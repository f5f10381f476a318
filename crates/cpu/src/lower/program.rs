//! The lowered program: operations over buffers.

use carat_model::{
    layout::Layout,
    plan::{ClusterId, KvSlot, Labelled, Plan, RopeId, Rows},
    weights::Weight,
};

use crate::op::experts::ExpertWeights;

/// A value in its buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Operand {
    pub(crate) buffer: usize,
    pub(crate) columns: usize,
    pub(crate) rows: Rows,
}

/// Activations as a product reads them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ProductInput {
    F32(Operand),
    /// Into [`Program::quantized`].
    Quantized(usize),
}

/// A weight that is read as f32: an index into [`Program::vectors`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct VectorId(pub(crate) usize);

/// An operation over buffers.
#[derive(Debug)]
pub(crate) enum Op {
    Embed {
        table: Weight,
        scale: f32,
        /// Rows that are fed an embedding take it as it is.
        is_input: bool,
        out: Operand,
    },
    /// Takes the states that come with a batch.
    State {
        out: Operand,
    },
    Norm {
        x: Operand,
        weight: Option<VectorId>,
        group: usize,
        eps: f32,
        out: Operand,
        quantized: Option<usize>,
    },
    /// Makes the quantized copy of a value, where the value's own operation does not.
    Quantize {
        x: Operand,
        quantized: usize,
    },
    /// Products of one value with some matrices, each into a value of its own.
    Linear {
        x: ProductInput,
        products: Vec<(Weight, Operand)>,
    },
    Rope {
        x: Operand,
        rope: RopeId,
        out: Operand,
    },
    StoreKv {
        k: Operand,
        v: Operand,
        slot: KvSlot,
    },
    Attend {
        q: Operand,
        /// A drafter's is one of its target.
        slot: KvSlot,
        /// Positions a row sees, itself included; may be fewer than the slot keeps.
        window: Option<usize>,
        out: Operand,
    },
    GeluMul {
        gate: Operand,
        up: Operand,
        up_column: usize,
        out: Operand,
        quantized: Option<usize>,
    },
    Add {
        a: Operand,
        b: Operand,
        out: Operand,
    },
    Scale {
        x: Operand,
        by: f32,
        out: Operand,
    },
    SelectSampled {
        x: Operand,
        out: Operand,
    },
    Route {
        x: ProductInput,
        weight: Weight,
        expert_scale: Option<VectorId>,
        out: Operand,
    },
    Experts {
        x: ProductInput,
        route: Operand,
        experts: ExpertWeights,
        out: Operand,
    },
    ClusterLogits {
        x: ProductInput,
        weight: Weight,
        /// The same value, as the centroids read it.
        near: ProductInput,
        centroids: Weight,
        clusters: ClusterId,
        top: usize,
        out: Operand,
    },
    Softcap {
        x: Operand,
        cap: f32,
        out: Operand,
    },
}

impl Op {
    /// The rows this operation works on.
    pub(crate) fn rows(&self) -> Rows {
        match self {
            Op::Embed { out, .. }
            | Op::State { out }
            | Op::Norm { out, .. }
            | Op::Rope { out, .. }
            | Op::Attend { out, .. }
            | Op::GeluMul { out, .. }
            | Op::Add { out, .. }
            | Op::Scale { out, .. }
            | Op::SelectSampled { out, .. }
            | Op::Route { out, .. }
            | Op::Experts { out, .. }
            | Op::ClusterLogits { out, .. }
            | Op::Softcap { out, .. } => out.rows,
            Op::Linear { products, .. } => products[0].1.rows,
            Op::Quantize { x, .. } | Op::StoreKv { k: x, .. } => x.rows,
        }
    }
}

/// An operation, and the plan's steps it covers.
#[derive(Debug)]
pub(crate) struct LoweredOp {
    /// Indices into the plan's steps. That of a step, and of the quantized copy of what it writes.
    pub(crate) steps: Vec<usize>,
    pub(crate) op: Op,
}

impl LoweredOp {
    pub(crate) fn label(&self, plan: &Plan) -> String {
        Labelled::joined(self.steps.iter().map(|step| &plan.steps[*step]))
    }
}

/// A buffer of quantized activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct QuantizedShape {
    pub(crate) rows: Rows,
    pub(crate) columns: usize,
}

/// A lowered plan: names of weights, no values.
pub(crate) struct Program {
    pub(crate) ops: Vec<LoweredOp>,
    /// Buffers of quantized copies.
    pub(crate) quantized: Vec<QuantizedShape>,
    /// Weights that operations read as f32: those of norms, and scales of experts.
    pub(crate) vectors: Vec<Weight>,
    pub(crate) layout: Layout,
    pub(crate) hidden: Operand,
    pub(crate) logits: Operand,
    /// The experts of a layer, and how many of them a row chooses, if there are any.
    pub(crate) experts: Option<(ExpertWeights, usize)>,
}
