//! The state of a compiled model: buffers, quantized copies, KV pages; and one operation on it.

use std::sync::Arc;

use carat_model::{
    TokenId,
    backend::{CompileOptions, Feed, HostPageId, KvGroup, PageMove, PerGroup},
    draft,
    plan::{Plan, Rows},
    weights::{Weight, Weights},
};

use super::row_view::RowView;
use crate::{
    lower::{Op, Operand, ProductInput, Program},
    op::{
        attention::{Attention, SplitKvScratch},
        experts::{self, MoeBuffers},
        kv::{self, PagedKv},
        linear::{self, ExpertGroup, Input, Product},
        quantize,
        rope::Angles,
        workers::Workers,
    },
};
use carat_cpu_kernels::{
    aligned::Aligned,
    gemm::{
        activations::{ActivationRows, Activations},
        row_class::RowClasses,
    },
};

/// Threads and KV pages: what a model and its drafter use together.
pub(super) struct Shared {
    pub(super) workers: Workers,
    /// By slot of the model.
    caches: Vec<PagedKv>,
    /// Pages that all sliding slots have at the same place, one after another.
    chunk_pages: Aligned<u8>,
    /// Pages in memory of their own, where they are saved: of each slot of the group in turn.
    saved: PerGroup<Vec<u8>>,
    saved_page_bytes: PerGroup<usize>,
}

impl Shared {
    pub(super) fn new(
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
        workers: Workers,
    ) -> Shared {
        let slots = plan.slots.iter().zip(kv::tied_keys(plan, weights));
        let caches: Vec<PagedKv> = slots
            .map(|(spec, tied)| {
                let (kv, pages) = (options.kv.get(spec.group), options.pages.get(spec.group));
                PagedKv::new(spec, *kv, tied, *pages)
            })
            .collect();
        let page_bytes = |group: KvGroup| -> usize {
            let slots = caches.iter().filter(|cache| cache.spec.group == group);
            slots.map(PagedKv::page_bytes).sum()
        };
        let saved_page_bytes = PerGroup {
            full: page_bytes(KvGroup::Full),
            sliding: page_bytes(KvGroup::Sliding),
        };
        let saved = |group| vec![0; options.host_pages.get(group) * saved_page_bytes.get(group)];
        Shared {
            workers,
            caches,
            chunk_pages: Aligned::new(options.chunk_pages * kv::chunk_page_bytes(plan, options.kv)),
            saved: PerGroup {
                full: saved(KvGroup::Full),
                sliding: saved(KvGroup::Sliding),
            },
            saved_page_bytes,
        }
    }

    /// Copies pages that [`PageMove::check`] has seen.
    pub(super) fn move_pages(&mut self, moves: &[PageMove]) {
        for step in moves {
            let (group, page, place) = step.places();
            let bytes = *self.saved_page_bytes.get(group);
            let mut saved = &mut self.saved.get_mut(group)[place.0 as usize * bytes..][..bytes];
            for cache in self.caches.iter_mut().filter(|c| c.spec.group == group) {
                let page = cache.page_mut(page.0 as usize);
                let (host, rest) = saved.split_at_mut(page.len());
                match step {
                    PageMove::Save { .. } => host.copy_from_slice(page),
                    PageMove::Load { .. } => page.copy_from_slice(host),
                }
                saved = rest;
            }
        }
    }

    /// A page where it is saved, which [`PageMove::check_place`] has seen.
    pub(super) fn saved_page(&mut self, group: KvGroup, place: HostPageId) -> &mut [u8] {
        let bytes = *self.saved_page_bytes.get(group);
        &mut self.saved.get_mut(group)[place.0 as usize * bytes..][..bytes]
    }
}

/// All else that operations of one plan read and change.
pub(super) struct State {
    weights: Arc<Weights>,
    /// Weights that are read as f32, in the order of the program.
    vectors: Vec<Vec<f32>>,
    buffers: Vec<Aligned<f32>>,
    quantized: Vec<Activations>,
    /// By cluster table: all tokens, cluster by cluster.
    clusters: Vec<Vec<TokenId>>,
    angles: Vec<Angles>,
    moe: Option<MoeBuffers>,
    router_scores: Vec<f32>,
    split_kv: SplitKvScratch,
}

impl State {
    pub(super) fn new(
        plan: &Plan,
        weights: Arc<Weights>,
        (max_rows, max_sampled): (usize, usize),
        program: &Program,
        classes: RowClasses,
    ) -> State {
        let count = |rows: Rows| match rows {
            Rows::All => max_rows,
            Rows::Sampled => max_sampled,
        };
        let buffers = program.layout.buffers.iter();
        let vectors = program.vectors.iter();
        let quantized = program.quantized.iter();
        State {
            buffers: buffers
                .map(|shape| Aligned::new(count(shape.rows) * shape.columns))
                .collect(),
            quantized: quantized
                .map(|shape| {
                    let rows = ActivationRows::for_batches(classes, count(shape.rows), 1);
                    Activations::new(rows, shape.columns)
                })
                .collect(),
            vectors: vectors.map(|weight| weights.vector(*weight)).collect(),
            clusters: plan.clusters.clone(),
            angles: plan
                .ropes
                .iter()
                .map(|rope| Angles::new(rope, max_rows))
                .collect(),
            moe: program.experts.map(|(experts, top_k)| {
                let rows = max_rows.max(max_sampled);
                MoeBuffers::new(classes, &weights, experts, (rows, top_k))
            }),
            router_scores: Vec::new(),
            split_kv: SplitKvScratch::default(),
            weights,
        }
    }

    pub(super) fn buffer(&self, index: usize) -> &[f32] {
        &self.buffers[index]
    }

    /// Fills the RoPE angles of a batch.
    pub(super) fn fill_angles(&mut self, on: &Shared, plan: &Plan, view: &RowView<'_>) {
        for (angles, rope) in self.angles.iter_mut().zip(&plan.ropes) {
            angles.fill(&on.workers, rope, &view.all);
        }
    }

    /// Runs one operation on the rows of a batch.
    pub(super) fn run(&mut self, on: &mut Shared, op: &Op, view: &RowView<'_>) {
        let rows = view.of(op.rows());
        match op {
            Op::Quantize { x, quantized } => {
                let data = &mut self.buffers[x.buffer][..rows.len() * x.columns];
                let data = (data, x.columns);
                each_row(
                    &on.workers,
                    &mut self.quantized,
                    Some(*quantized),
                    data,
                    |_, _| {},
                );
            }
            Op::Linear { x, products } => self.multiply(on, *x, products, rows.len()),
            Op::StoreKv { k, v, slot } => {
                let cache = &mut on.caches[slot.0 as usize];
                let writes = view.writes.get(cache.spec.group);
                let kv = (&*self.buffers[k.buffer], &*self.buffers[v.buffer]);
                cache.store(&mut on.chunk_pages, &on.workers, writes, kv);
            }
            Op::Embed { out, .. }
            | Op::Norm { out, .. }
            | Op::Rope { out, .. }
            | Op::Attend { out, .. }
            | Op::GeluMul { out, .. }
            | Op::Add { out, .. }
            | Op::Scale { out, .. }
            | Op::SelectSampled { out, .. }
            | Op::Route { out, .. }
            | Op::Experts { out, .. }
            | Op::State { out }
            | Op::ClusterLogits { out, .. }
            | Op::Softcap { out, .. } => {
                // The layout never gives a step's output the buffer of an input, so it may leave the list meanwhile.
                let mut buffer = std::mem::take(&mut self.buffers[out.buffer]);
                let data = &mut buffer[..rows.len() * out.columns];
                self.compute(on, op, *out, view, data);
                self.buffers[out.buffer] = buffer;
            }
        }
    }

    /// Computes products of one value with some matrices.
    fn multiply(
        &mut self,
        on: &mut Shared,
        x: ProductInput,
        products: &[(Weight, Operand)],
        rows: usize,
    ) {
        // As in `run`: no output has the buffer of an input.
        let mut buffers: Vec<Aligned<f32>> = products
            .iter()
            .map(|(_, out)| std::mem::take(&mut self.buffers[out.buffer]))
            .collect();
        let mut outs: Vec<&mut [f32]> = buffers
            .iter_mut()
            .zip(products)
            .map(|(buffer, (_, out))| &mut buffer[..rows * out.columns])
            .collect();
        let row_bounds = [0, rows];
        let all: Vec<Product<'_>> = products
            .iter()
            .map(|(weight, _)| Product {
                class: on.workers.classes.of(rows),
                weights: &self.weights,
                weight: *weight,
                input: input(x, &self.buffers, &self.quantized),
                gather: None,
                row_bounds: &row_bounds,
                groups: &[ExpertGroup { matrix: 0 }],
            })
            .collect();
        linear::run(&all, &mut on.workers, &mut outs);
        for (buffer, (_, out)) in buffers.into_iter().zip(products) {
            self.buffers[out.buffer] = buffer;
        }
    }

    /// Computes the rows of an operation that writes a value.
    #[expect(clippy::too_many_lines, reason = "one arm per kind of operation")]
    fn compute(
        &mut self,
        on: &mut Shared,
        op: &Op,
        operand: Operand,
        view: &RowView<'_>,
        out: &mut [f32],
    ) {
        let rows = view.of(operand.rows);
        let kernels = on.workers.kernels;
        let buffers = &self.buffers;
        let value = |x: &Operand| &*buffers[x.buffer];
        let row = |x: &Operand, row: usize| &buffers[x.buffer][row * x.columns..][..x.columns];
        match op {
            Op::Embed {
                table,
                scale,
                is_input,
                ..
            } => {
                let (weights, quant) = (&self.weights, self.weights.matrix(*table).quant);
                on.workers.each_row(out, operand.columns, |r, out| {
                    let fed = rows[r].row;
                    if let Feed::Embedding { row, .. } = view.batch.feeds[fed]
                        && *is_input
                    {
                        out.copy_from_slice(row);
                        return;
                    }
                    let token = view.tokens[fed] as usize;
                    kernels.dequantize(quant, weights.row(*table, 0, token), *scale, out);
                });
            }
            Op::State { .. } => out.copy_from_slice(view.states),
            Op::Norm {
                x,
                weight,
                group,
                eps,
                quantized,
                ..
            } => {
                let weight = weight.map(|id| self.vectors[id.0].as_slice());
                let out = (out, operand.columns);
                each_row(
                    &on.workers,
                    &mut self.quantized,
                    *quantized,
                    out,
                    |r, out| {
                        let groups = row(x, r).chunks(*group).zip(out.chunks_mut(*group));
                        for (x, out) in groups {
                            kernels.norm(x, weight, *eps, out);
                        }
                    },
                );
            }
            Op::Rope { x, rope, .. } => {
                let angles = &self.angles[rope.0 as usize];
                on.workers.each_row(out, operand.columns, |r, out| {
                    let (cos, sin) = angles.row(rows[r].row);
                    let head_dim = 2 * cos.len();
                    let heads = row(x, r).chunks(head_dim).zip(out.chunks_mut(head_dim));
                    for (x, out) in heads {
                        kernels.rotate(x, cos, sin, out);
                    }
                });
            }
            Op::GeluMul {
                gate,
                up,
                up_column,
                quantized,
                ..
            } => {
                let out = (out, operand.columns);
                each_row(
                    &on.workers,
                    &mut self.quantized,
                    *quantized,
                    out,
                    |r, out| {
                        let up = &row(up, r)[*up_column..][..out.len()];
                        kernels.gelu_mul(row(gate, r), up, out);
                    },
                );
            }
            Op::Add { a, b, .. } => on.workers.each_part(out, |start, out| {
                let range = start..start + out.len();
                kernels.add(&value(a)[range.clone()], &value(b)[range], out);
            }),
            Op::Scale { x, by, .. } => on.workers.each_part(out, |start, out| {
                kernels.scale(&value(x)[start..start + out.len()], *by, out);
            }),
            Op::Softcap { x, cap, .. } => on.workers.each_part(out, |start, out| {
                kernels.softcap(&value(x)[start..start + out.len()], *cap, out);
            }),
            Op::SelectSampled { x, .. } => on.workers.each_row(out, operand.columns, |r, out| {
                out.copy_from_slice(row(x, rows[r].row));
            }),
            Op::Route { .. }
            | Op::Experts { .. }
            | Op::ClusterLogits { .. }
            | Op::Attend { .. } => {
                self.compute_product(on, op, operand, view, out);
            }
            Op::Linear { .. } | Op::Quantize { .. } | Op::StoreKv { .. } => {
                unreachable!("these write no value, or several")
            }
        }
    }

    /// Scores every row of a small matrix, a router's or centroids, for each of some rows; returns how many that has.
    fn score(
        &mut self,
        on: &mut Shared,
        (x, weight): (ProductInput, Weight),
        rows: usize,
    ) -> usize {
        let count = self.weights.matrix(weight).rows;
        self.router_scores.resize(rows * count, 0.0);
        let product = Product {
            class: on.workers.classes.of(rows),
            weights: &self.weights,
            weight,
            input: input(x, &self.buffers, &self.quantized),
            gather: None,
            row_bounds: &[0, rows],
            groups: &[ExpertGroup { matrix: 0 }],
        };
        linear::run(&[product], &mut on.workers, &mut [&mut self.router_scores]);
        count
    }

    /// Computes the rows of an operation that multiplies with weights or with the cache.
    fn compute_product(
        &mut self,
        on: &mut Shared,
        op: &Op,
        operand: Operand,
        view: &RowView<'_>,
        out: &mut [f32],
    ) {
        let rows = view.of(operand.rows);
        match op {
            Op::Attend {
                q, slot, window, ..
            } => {
                let cache = &on.caches[slot.0 as usize];
                let spans = view.spans(operand.rows, cache.spec.group);
                let queries = (&*self.buffers[q.buffer], q.columns);
                Attention::new((cache, &on.chunk_pages), *window, queries, spans).run(
                    &mut on.workers,
                    &mut self.split_kv,
                    out,
                );
            }
            Op::Route {
                x,
                weight,
                expert_scale,
                ..
            } => {
                let experts = self.score(on, (*x, *weight), rows.len());
                let scores = &self.router_scores;
                let expert_scale = expert_scale.map(|id| self.vectors[id.0].as_slice());
                on.workers.each_row(out, operand.columns, |r, out| {
                    let scores = &scores[r * experts..][..experts];
                    experts::route(scores, expert_scale, out);
                });
            }
            Op::Experts {
                x, route, experts, ..
            } => {
                let moe = self.moe.as_mut().expect("made where a plan has experts");
                moe.run(
                    &mut on.workers,
                    &self.weights,
                    *experts,
                    input(*x, &self.buffers, &self.quantized),
                    (
                        &self.buffers[route.buffer][..rows.len() * route.columns],
                        route.columns / 2,
                    ),
                    out,
                );
            }
            Op::ClusterLogits {
                x,
                weight,
                near,
                centroids,
                clusters,
                top,
                ..
            } => {
                let count = self.score(on, (*near, *centroids), rows.len());
                let scores = &self.router_scores;
                let tokens = &self.clusters[clusters.0 as usize];
                let x = input(*x, &self.buffers, &self.quantized);
                let (weights, kernels) = (&self.weights, on.workers.kernels);
                on.workers.each_row(out, operand.columns, |r, out| {
                    out.fill(f32::NEG_INFINITY);
                    let scores = &scores[r * count..][..count];
                    for token in draft::nearest(scores, tokens, *top) {
                        let token = token as usize;
                        linear::logit(kernels, weights, (*weight, token), x, r, &mut out[token]);
                    }
                });
            }
            _ => unreachable!("not a product"),
        }
    }
}

/// Computes every row of a value, and its quantized copy where one is asked for.
fn each_row(
    workers: &Workers,
    all_quantized: &mut [Activations],
    quantized: Option<usize>,
    (out, columns): (&mut [f32], usize),
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    match quantized {
        None => workers.each_row(out, columns, f),
        Some(quantized) => {
            let class = workers.classes.of(out.len() / columns);
            quantize::each_row(
                workers,
                class,
                (out, columns),
                &mut all_quantized[quantized],
                f,
            );
        }
    }
}

fn input<'a>(
    input: ProductInput,
    buffers: &'a [Aligned<f32>],
    quantized: &'a [Activations],
) -> Input<'a> {
    match input {
        ProductInput::Quantized(i) => Input::Quantized(&quantized[i]),
        ProductInput::F32(operand) => Input::F32 {
            data: &buffers[operand.buffer],
            columns: operand.columns,
        },
    }
}
