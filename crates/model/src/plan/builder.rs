//! Builds a plan step by step, checking shapes against the weights.

use std::{cell::RefCell, collections::HashSet};

use super::{ClusterId, KvSlot, Labelled, Plan, Rope, RopeId, Rows, Shape, SlotSpec, Step, Value};
use crate::{
    TokenId,
    phase::Section,
    weights::{Weight, Weights},
};

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
