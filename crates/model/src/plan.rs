//! A model as a straight list of coarse steps over values that are written once.
//!
//! The builder takes `&self`, so steps nest like formulas and are recorded in evaluation order. It checks every shape,
//! so an executor may rely on them. No control flow, views, strides or broadcasting: a step exists because the
//! mathematics needs it, never because a kernel would like it.

mod builder;
mod listing;
mod tied_keys;

use crate::{
    TokenId,
    kv::{self, KvGroup},
    phase::{Origin, Phase, Section},
    weights::Weight,
};

pub use self::{builder::Builder, listing::Listing, tied_keys::TiedKeys};

/// Batch rows that a value has: every token fed in, or only those that will be sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// Every row of the batch.
    All,
    /// Those that will be sampled.
    Sampled,
}

/// A matrix of f32 `[rows, columns]`, written by one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(u32);

impl Value {
    /// Counted in the order of writing.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Keys and values of one layer, perhaps read by others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvSlot(pub u32);

/// A rotary table, shared by the layers that turn alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RopeId(pub u32);

/// A table that lists all tokens, cluster by cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClusterId(pub u32);

/// One operation on whole values.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// `out = scale * table[token]`, for the rows of `out`. Where the plan says that the table is its input, a row that is fed an
    /// embedding has that instead, as it is.
    Embed {
        /// Rows by token.
        table: Weight,
        /// Of each row.
        scale: f32,
        /// Result.
        out: Value,
    },
    /// A vector per row that comes with the batch: the state that a drafter goes on from.
    State {
        /// Result.
        out: Value,
    },
    /// RMS over each `group` columns, then the weight (of `group` columns) if there is one.
    Norm {
        /// Input.
        x: Value,
        /// By column; missing where it is 1.
        weight: Option<Weight>,
        /// Columns that are normalised together.
        group: usize,
        /// Added to the mean square.
        eps: f32,
        /// Result.
        out: Value,
    },
    /// `out = x * transpose(w)`.
    Linear {
        /// Input.
        x: Value,
        /// Matrix.
        w: Weight,
        /// Result.
        out: Value,
    },
    /// Turns pairs `(j, j + head_dim / 2)` of each head by `position * frequency[j]`.
    Rope {
        /// Input.
        x: Value,
        /// Table of frequencies.
        rope: RopeId,
        /// Result.
        out: Value,
    },
    /// Appends rows to the slot at their positions.
    StoreKv {
        /// Keys.
        k: Value,
        /// Values.
        v: Value,
        /// Slot they go to.
        slot: KvSlot,
    },
    /// Attention with scale 1 over the slot, within its window: causal, but for rows that see ahead in sliding-window layers
    /// ([`Run::visible_end`](crate::batch::Run)).
    Attend {
        /// Queries.
        q: Value,
        /// Keys and values.
        slot: KvSlot,
        /// Result.
        out: Value,
    },
    /// `gelu(gate) * up[up_column ..]`, with the tanh form of GELU.
    GeluMul {
        /// Goes through GELU.
        gate: Value,
        /// Is multiplied with it.
        up: Value,
        /// The first column that is.
        up_column: usize,
        /// Result.
        out: Value,
    },
    /// `out = a + b`.
    Add {
        /// Input.
        a: Value,
        /// Input.
        b: Value,
        /// Result.
        out: Value,
    },
    /// `out = x * by`.
    Scale {
        /// Input.
        x: Value,
        /// Factor.
        by: f32,
        /// Result.
        out: Value,
    },
    /// Keeps the rows that will be sampled.
    SelectSampled {
        /// Input, of all rows.
        x: Value,
        /// Result, of sampled rows.
        out: Value,
    },
    /// Softmax over all experts, the `top_k` largest renormalised, times each expert's scale.
    /// `out` holds `top_k` expert numbers, then their `top_k` weights.
    Route {
        /// Input.
        x: Value,
        /// Scores of experts.
        w: Weight,
        /// By expert; missing where it is 1.
        expert_scale: Option<Weight>,
        /// Experts per row.
        top_k: usize,
        /// Result.
        out: Value,
    },
    /// The weighted sum of the chosen experts' feed-forward outputs.
    Experts {
        /// Input.
        x: Value,
        /// Experts and weights, as [`Step::Route`] gives them.
        route: Value,
        /// By expert: goes through GELU.
        gate: Weight,
        /// By expert: is multiplied with the gate.
        up: Weight,
        /// By expert: back to the width of `x`.
        down: Weight,
        /// Result.
        out: Value,
    },
    /// Logits of the tokens in the `top` clusters whose centroids `x` is nearest to, as a dense head would give them; negative
    /// infinity for all others.
    ClusterLogits {
        /// Input.
        x: Value,
        /// A row per cluster.
        centroids: Weight,
        /// The dense head.
        w: Weight,
        /// The tokens of each cluster.
        clusters: ClusterId,
        /// Clusters per row.
        top: usize,
        /// Result.
        out: Value,
    },
    /// `cap * tanh(x / cap)`.
    Softcap {
        /// Input.
        x: Value,
        /// No result is larger.
        cap: f32,
        /// Result.
        out: Value,
    },
}

impl Step {
    /// As labels and listings have it.
    pub fn name(&self) -> &'static str {
        match self {
            Step::Embed { .. } => "embed",
            Step::State { .. } => "state",
            Step::Norm { .. } => "norm",
            Step::Linear { .. } => "linear",
            Step::Rope { .. } => "rope",
            Step::StoreKv { .. } => "store_kv",
            Step::Attend { .. } => "attend",
            Step::GeluMul { .. } => "gelu_mul",
            Step::Add { .. } => "add",
            Step::Scale { .. } => "scale",
            Step::SelectSampled { .. } => "select_sampled",
            Step::Route { .. } => "route",
            Step::Experts { .. } => "experts",
            Step::ClusterLogits { .. } => "cluster_logits",
            Step::Softcap { .. } => "softcap",
        }
    }

    /// The value this step writes; `None` for [`Step::StoreKv`].
    pub fn out(&self) -> Option<Value> {
        match *self {
            Step::StoreKv { .. } => None,
            Step::Embed { out, .. }
            | Step::State { out }
            | Step::Norm { out, .. }
            | Step::Linear { out, .. }
            | Step::Rope { out, .. }
            | Step::Attend { out, .. }
            | Step::GeluMul { out, .. }
            | Step::Add { out, .. }
            | Step::Scale { out, .. }
            | Step::SelectSampled { out, .. }
            | Step::Route { out, .. }
            | Step::Experts { out, .. }
            | Step::ClusterLogits { out, .. }
            | Step::Softcap { out, .. } => Some(out),
        }
    }

    /// The values this step reads.
    pub fn inputs(&self) -> impl Iterator<Item = Value> {
        let (first, second) = match *self {
            Step::Embed { .. } | Step::State { .. } => (None, None),
            Step::Norm { x, .. }
            | Step::Linear { x, .. }
            | Step::Rope { x, .. }
            | Step::Attend { q: x, .. }
            | Step::Scale { x, .. }
            | Step::SelectSampled { x, .. }
            | Step::Route { x, .. }
            | Step::ClusterLogits { x, .. }
            | Step::Softcap { x, .. } => (Some(x), None),
            Step::StoreKv { k: a, v: b, .. }
            | Step::GeluMul { gate: a, up: b, .. }
            | Step::Add { a, b, .. }
            | Step::Experts { x: a, route: b, .. } => (Some(a), Some(b)),
        };
        first.into_iter().chain(second)
    }
}

/// Extent of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows it has.
    pub rows: Rows,
    /// Values per row.
    pub columns: usize,
}

/// Keys and values that one layer stores.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotSpec {
    /// The pages they lie in.
    pub group: KvGroup,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions a row sees, itself included; `None` sees all.
    pub window: Option<usize>,
    /// Slot of the target that a drafter reads through this one; `None` for keys and values of the plan's own.
    pub borrowed: Option<KvSlot>,
}

/// A rotary table.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Width of a head.
    pub head_dim: usize,
    /// Radians a position turns pair `j`: `head_dim / 2` entries.
    pub frequencies: Vec<f32>,
    /// Added to the position of a row. A drafter's rows stand at the last position that is cached, and turn as the next.
    pub shift: usize,
}

/// A step of a plan, and its place in the model.
#[derive(Clone, Debug)]
pub struct Labelled {
    /// Such as `L12.attn.q`: unique in its plan, and the same in listings, profiles and errors.
    pub label: String,
    /// `None` in plans that are no model's, such as a test's.
    pub section: Option<Section>,
    /// The operation.
    pub step: Step,
}

impl Labelled {
    /// One label for steps of one section: `L3.attn.q+k+v` of `L3.attn.q`, `L3.attn.k` and `L3.attn.v`.
    pub fn joined<'a>(steps: impl Iterator<Item = &'a Labelled>) -> String {
        let mut joined = String::new();
        for Labelled { label, .. } in steps {
            if joined.is_empty() {
                joined.push_str(label);
            } else {
                joined.push('+');
                joined.push_str(label.rsplit('.').next().unwrap_or(label));
            }
        }
        joined
    }
}

/// The finished description of a model.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In order of evaluation.
    pub steps: Vec<Labelled>,
    /// By [`KvSlot`].
    pub slots: Vec<SlotSpec>,
    /// By [`RopeId`].
    pub ropes: Vec<Rope>,
    /// By [`ClusterId`]: all tokens, those of the first cluster first.
    pub clusters: Vec<Vec<TokenId>>,
    pub(crate) shapes: Vec<Shape>,
    pub(crate) vocab: usize,
    /// Table of the model's own token embeddings, and its width.
    pub(crate) input: Option<(Weight, usize)>,
    /// Output of the last layer for the head, normalised: also what a drafter reads. In a drafter's own plan, what its next step
    /// reads.
    pub hidden: Value,
    /// Of the sampled rows, before they are drawn.
    pub logits: Value,
}

impl Plan {
    /// Extent of a value.
    pub fn shape(&self, value: Value) -> Shape {
        self.shapes[value.index()]
    }

    /// Columns of a value.
    pub fn columns(&self, value: Value) -> usize {
        self.shape(value).columns
    }

    /// Rows of a value.
    pub fn rows(&self, value: Value) -> Rows {
        self.shape(value).rows
    }

    /// Values of the plan.
    pub fn value_count(&self) -> usize {
        self.shapes.len()
    }

    /// Extent of a slot.
    pub fn slot(&self, slot: KvSlot) -> &SlotSpec {
        &self.slots[slot.0 as usize]
    }

    /// The slots of a group that are not another plan's.
    pub fn own_slots(&self, group: KvGroup) -> impl Iterator<Item = &SlotSpec> + Clone {
        let own = self.slots.iter().filter(|s| s.borrowed.is_none());
        own.filter(move |s| s.group == group)
    }

    /// Frequencies of a table.
    pub fn rope(&self, rope: RopeId) -> &Rope {
        &self.ropes[rope.0 as usize]
    }

    /// Token ids below this can be embedded.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Whether steps that embed from this table take the row of [`Feed::Embedding`](crate::batch::Feed) instead, unscaled.
    pub fn is_input(&self, table: Weight) -> bool {
        self.input.is_some_and(|(input, _)| input == table)
    }

    /// Columns of an embedding that a row may be fed; `None` if this plan takes tokens alone.
    pub fn input_width(&self) -> Option<usize> {
        self.input.map(|(_, width)| width)
    }

    /// The sliding window of the model's sliding layers.
    pub fn window(&self) -> Option<usize> {
        self.slots.iter().filter_map(|s| s.window).max()
    }

    /// First page of a group that the row at `position` sees.
    pub fn first_visible_page(&self, group: KvGroup, position: usize) -> usize {
        match (group, self.window()) {
            (KvGroup::Sliding, Some(window)) => kv::first_visible_page(position, window),
            _ => 0,
        }
    }

    /// Whether sliding-window layers can have pages at the same place, one after another: those of the plan's own are of one shape,
    /// and none is read when another has stored.
    pub fn sliding_layers_take_turns(&self) -> bool {
        let shape = |slot: &SlotSpec| (slot.kv_heads, slot.head_dim);
        let mut own = self.own_slots(KvGroup::Sliding).map(shape);
        let first = own.next();
        let mut stored = None;
        let reads_what_was_stored_last = |step: &Labelled| match step.step {
            Step::StoreKv { slot, .. } if self.slot(slot).group == KvGroup::Sliding => {
                stored = Some(slot);
                true
            }
            Step::Attend { slot, .. } if self.slot(slot).group == KvGroup::Sliding => {
                stored == Some(slot)
            }
            _ => true,
        };
        own.all(|shape| Some(shape) == first) && self.steps.iter().all(reads_what_was_stored_last)
    }

    /// Whether any layer stores into this group.
    pub fn uses(&self, group: KvGroup) -> bool {
        self.slots.iter().any(|s| s.group == group)
    }

    /// Layer and phase that a step's work is counted with.
    pub fn origin(&self, step: &Labelled) -> Origin {
        Origin {
            layer: step.section.and_then(Section::layer),
            phase: Phase::of(self, step.section, &step.step),
        }
    }

    /// The rows a step works on: those of its output, or of what it stores.
    pub fn step_rows(&self, step: &Step) -> Rows {
        match (step.out(), step) {
            (Some(out), _) => self.rows(out),
            (None, Step::StoreKv { k, .. }) => self.rows(*k),
            (None, _) => Rows::All,
        }
    }
}
