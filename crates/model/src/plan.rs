//! A model as a straight list of coarse steps over values that are written once.
//!
//! The builder takes `&self`, so steps nest like formulas and are recorded in evaluation order. It checks every shape,
//! so an executor may rely on them. No control flow, views, strides or broadcasting: a step exists because the
//! mathematics needs it, never because a kernel would like it.

use std::{cell::RefCell, collections::HashSet, fmt};

use crate::{
    TokenId,
    kv::{self, KvGroup},
    phase::{Origin, Phase, Section},
    weights::{Weight, Weights},
};

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

/// Records steps, checking shapes as they come. A wrong shape is a bug in the model's description and panics;
/// what a file holds has been checked by `weights` before.
pub struct Builder<'a> {
    weights: &'a Weights,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    section: Option<Section>,
    steps: Vec<Labelled>,
    labels: HashSet<String>,
    shapes: Vec<Shape>,
    slots: Vec<SlotSpec>,
    ropes: Vec<Rope>,
    clusters: Vec<Vec<TokenId>>,
    /// Rows of the shortest table that is embedded from.
    vocab: Option<usize>,
    input: Option<(Weight, usize)>,
}

impl<'a> Builder<'a> {
    /// Without steps.
    pub fn new(weights: &'a Weights) -> Builder<'a> {
        Builder {
            weights,
            state: RefCell::default(),
        }
    }

    /// Opens the section of the steps that follow.
    pub fn section(&self, section: Section) {
        self.state.borrow_mut().section = Some(section);
    }

    /// Declares keys and values to be stored.
    pub fn slot(&self, spec: SlotSpec) -> KvSlot {
        let mut state = self.state.borrow_mut();
        state.slots.push(spec);
        KvSlot(state.slots.len() as u32 - 1)
    }

    /// Declares a table of frequencies.
    pub fn rope_table(&self, rope: Rope) -> RopeId {
        assert_eq!(
            rope.frequencies.len(),
            rope.head_dim / 2,
            "a frequency a pair"
        );
        let mut state = self.state.borrow_mut();
        state.ropes.push(rope);
        RopeId(state.ropes.len() as u32 - 1)
    }

    /// Declares the tokens of clusters.
    pub fn cluster_table(&self, tokens: Vec<TokenId>) -> ClusterId {
        let mut state = self.state.borrow_mut();
        state.clusters.push(tokens);
        ClusterId(state.clusters.len() as u32 - 1)
    }

    fn shape(&self, value: Value) -> Shape {
        self.state.borrow().shapes[value.index()]
    }

    /// Rows that a value has.
    pub fn rows(&self, value: Value) -> Rows {
        self.shape(value).rows
    }

    fn record(&self, name: &str, step: Step) {
        let mut state = self.state.borrow_mut();
        let section = state.section;
        let label = section.map_or(name.to_owned(), |section| format!("{section}.{name}"));
        assert!(
            state.labels.insert(label.clone()),
            "two steps are called `{label}`"
        );
        state.steps.push(Labelled {
            label,
            section,
            step,
        });
    }

    fn write(
        &self,
        name: &str,
        rows: Rows,
        columns: usize,
        step: impl FnOnce(Value) -> Step,
    ) -> Value {
        let out = {
            let mut state = self.state.borrow_mut();
            state.shapes.push(Shape { rows, columns });
            Value(state.shapes.len() as u32 - 1)
        };
        self.record(name, step(out));
        out
    }

    /// Embeds what rows are fed: tokens from this table, or embeddings as they are. A plan has one such table.
    pub fn embed_input(&self, name: &str, table: Weight, scale: f32, rows: Rows) -> Value {
        let input = (table, self.weights.matrix(table).columns);
        let before = self.state.borrow_mut().input.replace(input);
        assert!(
            before.is_none_or(|before| before == input),
            "`{name}`: a second table of input embeddings"
        );
        self.embed(name, table, scale, rows)
    }

    /// Embeds tokens from any table.
    pub fn embed(&self, name: &str, table: Weight, scale: f32, rows: Rows) -> Value {
        let matrix = self.weights.matrix(table);
        let vocab = self.state.borrow().vocab;
        self.state.borrow_mut().vocab = Some(vocab.map_or(matrix.rows, |v| v.min(matrix.rows)));
        self.write(name, rows, matrix.columns, |out| Step::Embed {
            table,
            scale,
            out,
        })
    }

    /// Embeds the same tokens as `like`, from another table.
    pub fn embed_like(&self, name: &str, table: Weight, scale: f32, like: Value) -> Value {
        self.embed(name, table, scale, self.shape(like).rows)
    }

    /// A vector per row that comes with the batch.
    pub fn state(&self, name: &str, columns: usize) -> Value {
        self.write(name, Rows::All, columns, |out| Step::State { out })
    }

    /// RMS norm over whole rows.
    pub fn norm(&self, name: &str, x: Value, weight: Weight, eps: f32) -> Value {
        self.group_norm(name, x, Some(weight), self.shape(x).columns, eps)
    }

    /// RMS norm over each `group` columns: heads, or slices of a row.
    pub fn group_norm(
        &self,
        name: &str,
        x: Value,
        weight: Option<Weight>,
        group: usize,
        eps: f32,
    ) -> Value {
        let Shape { rows, columns } = self.shape(x);
        assert_eq!(columns % group, 0, "norm of {columns} columns by {group}");
        if let Some(w) = weight {
            assert_eq!(
                self.weights.matrix(w).columns,
                group,
                "norm weight of another width"
            );
        }
        self.write(name, rows, columns, |out| Step::Norm {
            x,
            weight,
            group,
            eps,
            out,
        })
    }

    /// The product with a matrix.
    pub fn linear(&self, name: &str, x: Value, w: Weight) -> Value {
        let Shape { rows, columns } = self.shape(x);
        let matrix = self.weights.matrix(w);
        assert_eq!(
            columns, matrix.columns,
            "linear `{}` of another width",
            matrix.name
        );
        self.write(name, rows, matrix.rows, |out| Step::Linear { x, w, out })
    }

    /// Turns heads by their row's position.
    pub fn rope(&self, name: &str, x: Value, rope: RopeId) -> Value {
        let Shape { rows, columns } = self.shape(x);
        let head_dim = self.state.borrow().ropes[rope.0 as usize].head_dim;
        assert_eq!(
            columns % head_dim,
            0,
            "rope of {columns} columns by {head_dim}"
        );
        self.write(name, rows, columns, |out| Step::Rope { x, rope, out })
    }

    /// Stores keys and values of all rows.
    pub fn store_kv(&self, k: Value, v: Value, slot: KvSlot) {
        let (width, all) = {
            let spec = &self.state.borrow().slots[slot.0 as usize];
            (
                spec.kv_heads * spec.head_dim,
                Shape {
                    rows: Rows::All,
                    columns: spec.kv_heads * spec.head_dim,
                },
            )
        };
        assert_eq!(
            (self.shape(k), self.shape(v)),
            (all, all),
            "KV of {width} columns, all rows"
        );
        self.record("store_kv", Step::StoreKv { k, v, slot });
    }

    /// Attends to a slot.
    pub fn attend(&self, q: Value, slot: KvSlot) -> Value {
        let Shape { rows, columns } = self.shape(q);
        let (kv_heads, head_dim) = {
            let spec = &self.state.borrow().slots[slot.0 as usize];
            (spec.kv_heads, spec.head_dim)
        };
        assert_eq!(
            columns % (kv_heads * head_dim),
            0,
            "query heads share {kv_heads} KV heads evenly"
        );
        self.write("attend", rows, columns, |out| Step::Attend { q, slot, out })
    }

    /// `gelu(gate) * up`, where `up` may be a slice of a wider value that starts at `up_column`.
    pub fn gelu_mul(&self, name: &str, gate: Value, up: Value, up_column: usize) -> Value {
        let (g, u) = (self.shape(gate), self.shape(up));
        assert_eq!(g.rows, u.rows, "gelu_mul of different rows");
        assert!(
            up_column + g.columns <= u.columns,
            "gelu_mul past the end of `up`"
        );
        self.write(name, g.rows, g.columns, |out| Step::GeluMul {
            gate,
            up,
            up_column,
            out,
        })
    }

    /// The sum of two values.
    pub fn add(&self, name: &str, a: Value, b: Value) -> Value {
        let shape = self.shape(a);
        assert_eq!(shape, self.shape(b), "add of different shapes");
        self.write(name, shape.rows, shape.columns, |out| Step::Add {
            a,
            b,
            out,
        })
    }

    /// A value times a factor.
    pub fn scale(&self, name: &str, x: Value, by: f32) -> Value {
        let Shape { rows, columns } = self.shape(x);
        self.write(name, rows, columns, |out| Step::Scale { x, by, out })
    }

    /// The rows of `x` that will be sampled.
    pub fn select_sampled(&self, name: &str, x: Value) -> Value {
        let Shape { rows, columns } = self.shape(x);
        assert_eq!(rows, Rows::All, "`{name}`: sampled rows selected twice");
        self.write(name, Rows::Sampled, columns, |out| Step::SelectSampled {
            x,
            out,
        })
    }

    /// Chooses experts for each row.
    pub fn route(&self, x: Value, w: Weight, expert_scale: Option<Weight>, top_k: usize) -> Value {
        let Shape { rows, columns } = self.shape(x);
        let matrix = self.weights.matrix(w);
        assert_eq!(
            columns, matrix.columns,
            "router `{}` of another width",
            matrix.name
        );
        assert!(
            (1..=matrix.rows).contains(&top_k),
            "top {top_k} of {}",
            matrix.rows
        );
        self.write("route", rows, 2 * top_k, |out| Step::Route {
            x,
            w,
            expert_scale,
            top_k,
            out,
        })
    }

    /// The weighted sum of chosen experts.
    pub fn experts(&self, x: Value, route: Value, [gate, up, down]: [Weight; 3]) -> Value {
        let Shape { rows, columns } = self.shape(x);
        let (g, u, d) = (
            self.weights.matrix(gate),
            self.weights.matrix(up),
            self.weights.matrix(down),
        );
        assert_eq!((g.columns, g.rows, g.count), (u.columns, u.rows, u.count));
        assert_eq!((columns, g.rows, g.count), (g.columns, d.columns, d.count));
        self.write("experts", rows, d.rows, |out| Step::Experts {
            x,
            route,
            gate,
            up,
            down,
            out,
        })
    }

    /// Logits of the tokens in the nearest clusters.
    pub fn cluster_logits(
        &self,
        x: Value,
        [centroids, w]: [Weight; 2],
        clusters: ClusterId,
        top: usize,
    ) -> Value {
        let Shape { rows, columns } = self.shape(x);
        let (near, head) = (self.weights.matrix(centroids), self.weights.matrix(w));
        assert_eq!((columns, columns), (near.columns, head.columns));
        let tokens = self.state.borrow().clusters[clusters.0 as usize].len();
        assert_eq!(tokens, head.rows, "every token is in one cluster");
        assert_eq!(tokens % near.rows, 0, "clusters of one size");
        assert!((1..=near.rows).contains(&top), "top {top} of {}", near.rows);
        self.write("cluster_logits", rows, head.rows, |out| {
            Step::ClusterLogits {
                x,
                centroids,
                w,
                clusters,
                top,
                out,
            }
        })
    }

    /// Squeezes a value below a cap.
    pub fn softcap(&self, x: Value, cap: f32) -> Value {
        let Shape { rows, columns } = self.shape(x);
        self.write("softcap", rows, columns, |out| Step::Softcap {
            x,
            cap,
            out,
        })
    }

    /// Ends the description.
    pub fn finish(self, hidden: Value, logits: Value) -> Plan {
        let State {
            steps,
            shapes,
            slots,
            ropes,
            clusters,
            vocab,
            input,
            ..
        } = self.state.into_inner();
        Plan {
            vocab: vocab.unwrap_or(0),
            input,
            steps,
            slots,
            ropes,
            clusters,
            shapes,
            hidden,
            logits,
        }
    }
}

/// A plan beside the weights it names, for listing.
pub struct Listing<'a>(pub &'a Plan, pub &'a Weights);

impl fmt::Display for Listing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Listing(plan, weights) = self;
        for Labelled { label, step, .. } in &plan.steps {
            write!(f, "{label:<24}")?;
            if let Some(out) = step.out() {
                let Shape { rows, columns } = plan.shape(out);
                let rows = match rows {
                    Rows::All => "all",
                    Rows::Sampled => "sampled",
                };
                write!(f, " %{} [{rows}, {columns}] =", out.0)?;
            }
            write!(f, " {}", step.name())?;
            for input in step.inputs() {
                write!(f, " %{}", input.0)?;
            }
            let matrix = |w: Weight| {
                let m = weights.matrix(w);
                format!("{} {} [{}, {}]", m.name, m.quant, m.rows, m.columns)
            };
            match step {
                Step::Embed { table, scale, .. } => write!(f, " {} * {scale}", matrix(*table))?,
                Step::Norm { weight, group, .. } => {
                    write!(f, " by {group}")?;
                    if let Some(w) = weight {
                        write!(f, " {}", weights.matrix(*w).name)?;
                    }
                }
                Step::Linear { w, .. } => write!(f, " {}", matrix(*w))?,
                Step::Rope { rope, .. } => write!(f, " table {}", rope.0)?,
                Step::StoreKv { slot, .. } | Step::Attend { slot, .. } => {
                    let spec = plan.slot(*slot);
                    write!(f, " slot {} ({} x {}", slot.0, spec.kv_heads, spec.head_dim)?;
                    match spec.window {
                        Some(window) => write!(f, ", window {window})")?,
                        None => write!(f, ", full)")?,
                    }
                }
                Step::GeluMul { up_column, .. } if *up_column > 0 => {
                    write!(f, " from column {up_column}")?;
                }
                Step::Scale { by, .. } => write!(f, " * {by}")?,
                Step::Route { w, top_k, .. } => write!(f, " {} top {top_k}", matrix(*w))?,
                Step::Experts { gate, up, down, .. } => {
                    for w in [gate, up, down] {
                        write!(f, " {}", matrix(*w))?;
                    }
                }
                Step::ClusterLogits {
                    centroids, w, top, ..
                } => write!(f, " {} top {top} {}", matrix(*centroids), matrix(*w))?,
                Step::Softcap { cap, .. } => write!(f, " {cap}")?,
                Step::State { .. }
                | Step::GeluMul { .. }
                | Step::Add { .. }
                | Step::SelectSampled { .. } => {}
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
