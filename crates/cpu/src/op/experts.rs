//! Mixture of experts: the experts a row uses, and their feed-forward networks with each expert's weights read once.
//!
//! Every (row, choice) pair is an own row here. Pairs are permuted by expert, so an expert's pairs are neighbours and one
//! grouped GEMM over a stack of matrices serves them all. A row's sum then takes its pairs in the order of its choices: it
//! does not depend on the other rows.

use carat_model::weights::{Weight, Weights};

use super::{
    linear::{self, ExpertGroup, Input, Product},
    quantize,
    workers::Workers,
};
use carat_cpu_kernels::gemm::{
    activations::{ActivationRows, Activations},
    row_class::RowClasses,
};

/// Keeps the renormalisation finite when the chosen share underflows.
const MIN_SHARE: f64 = 6.103_515_625e-5;

/// The `top_k` experts of one row, then their weights. Ties go to the lower number.
pub(crate) fn route(scores: &[f32], expert_scale: Option<&[f32]>, out: &mut [f32]) {
    let (experts, weights) = out.split_at_mut(out.len() / 2);
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let share = |expert: usize| f64::from(scores[expert] - largest).exp();
    let all: f64 = (0..scores.len()).map(share).sum();
    let mut chosen = 0.0;
    for rank in 0..experts.len() {
        let taken = &experts[..rank];
        let best = (0..scores.len())
            .filter(|expert| !taken.contains(&(*expert as f32)))
            .reduce(|a, b| if scores[b] > scores[a] { b } else { a })
            .expect("no more choices than experts");
        experts[rank] = best as f32;
        chosen += share(best) / all;
    }
    for (weight, expert) in weights.iter_mut().zip(experts) {
        let expert = *expert as usize;
        let renormalised = share(expert) / all / chosen.max(MIN_SHARE);
        *weight = renormalised as f32 * expert_scale.map_or(1.0, |scale| scale[expert]);
    }
}

/// The three matrices of the experts of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertWeights {
    pub(crate) gate: Weight,
    pub(crate) up: Weight,
    pub(crate) down: Weight,
}

/// Memory for the pairs of a batch, all of it in the order of [`Permutation`].
pub(crate) struct MoeBuffers {
    permutation: Permutation,
    gate: Vec<f32>,
    up: Vec<f32>,
    inner: Vec<f32>,
    /// The quantized copy of `inner`, where the weights that read it are quantized.
    quantized: Option<Activations>,
    down: Vec<f32>,
}

impl MoeBuffers {
    /// Memory for `rows` with `top_k` choices each; one set serves all layers of a plan, whose experts are alike.
    pub(crate) fn new(
        classes: RowClasses,
        weights: &Weights,
        experts: ExpertWeights,
        (rows, top_k): (usize, usize),
    ) -> MoeBuffers {
        let pairs = rows * top_k;
        let (gate, down) = (weights.matrix(experts.gate), weights.matrix(experts.down));
        let inner = pairs * gate.rows;
        let quantized = || {
            let rows = ActivationRows::for_batches(classes, rows, top_k);
            Activations::new(rows, down.columns)
        };
        MoeBuffers {
            permutation: Permutation::default(),
            gate: vec![0.0; inner],
            up: vec![0.0; inner],
            inner: vec![0.0; inner],
            quantized: (!down.quant.is_float()).then(quantized),
            down: vec![0.0; pairs * down.rows],
        }
    }

    /// Fills `out` with the weighted sums for rows whose choices are `route`, `[rows, 2 * top_k]`.
    pub(crate) fn run(
        &mut self,
        workers: &mut Workers,
        weights: &Weights,
        experts: ExpertWeights,
        x: Input<'_>,
        (route, top_k): (&[f32], usize),
        out: &mut [f32],
    ) {
        let permutation = &mut self.permutation;
        permutation.sort(route, top_k);
        let pairs = permutation.order.len();
        let class = workers.classes.of(pairs / top_k);
        let (inner, dim) = (
            weights.matrix(experts.gate).rows,
            weights.matrix(experts.down).rows,
        );
        let of_rows = [experts.gate, experts.up].map(|weight| Product {
            class,
            weights,
            weight,
            input: x,
            gather: Some(&permutation.rows),
            row_bounds: &permutation.row_bounds,
            groups: &permutation.groups,
        });
        let outs = [&mut self.gate, &mut self.up];
        let mut outs = outs.map(|out| &mut out[..pairs * inner]);
        linear::run(&of_rows, workers, &mut outs);
        let (gate, up, kernels) = (&self.gate, &self.up, workers.kernels);
        workers.each_part(&mut self.inner[..pairs * inner], |start, out| {
            let range = start..start + out.len();
            kernels.gelu_mul(&gate[range.clone()], &up[range], out);
        });
        let input = match &mut self.quantized {
            Some(quantized) => {
                let values = (&mut self.inner[..pairs * inner], inner);
                quantize::each_row(workers, class, values, quantized, |_, _| {});
                Input::Quantized(quantized)
            }
            None => Input::F32 {
                data: &self.inner,
                columns: inner,
            },
        };
        let product = Product {
            class,
            weights,
            weight: experts.down,
            input,
            gather: None,
            row_bounds: &permutation.row_bounds,
            groups: &permutation.groups,
        };
        linear::run(&[product], workers, &mut [&mut self.down[..pairs * dim]]);
        let (down, inverse) = (&self.down, &permutation.inverse);
        workers.each_row(out, dim, |row, out| {
            out.fill(0.0);
            let weights = &route[row * 2 * top_k + top_k..][..top_k];
            for (choice, weight) in weights.iter().enumerate() {
                let pair = inverse[row * top_k + choice];
                kernels.add_weighted(&down[pair * dim..][..dim], *weight, out);
            }
        });
    }
}

/// The permutation of a batch's pairs by expert.
#[derive(Default)]
pub(crate) struct Permutation {
    /// Pairs in order of experts, as `row * top_k + choice`.
    pub(crate) order: Vec<usize>,
    /// The index of each pair in that order.
    pub(crate) inverse: Vec<usize>,
    /// The row of each pair in that order.
    pub(crate) rows: Vec<usize>,
    /// Starts of the pairs of each group, and the end of the last.
    pub(crate) row_bounds: Vec<usize>,
    pub(crate) groups: Vec<ExpertGroup>,
}

impl Permutation {
    /// Rows that all meet one matrix, as they are.
    pub(crate) fn one_group(&mut self, rows: usize) {
        for indices in [&mut self.order, &mut self.inverse, &mut self.rows] {
            indices.clear();
            indices.extend(0..rows);
        }
        self.groups.clear();
        self.groups.push(ExpertGroup { matrix: 0 });
        self.row_bounds.clear();
        self.row_bounds.extend([0, rows]);
    }

    /// Orders the pairs by expert and notes where each expert's begin.
    pub(crate) fn sort(&mut self, route: &[f32], top_k: usize) {
        let expert = |pair: usize| route[pair / top_k * 2 * top_k + pair % top_k] as usize;
        let pairs = route.len() / 2;
        self.order.clear();
        self.order.extend(0..pairs);
        self.order.sort_by_key(|&pair| expert(pair));
        self.rows.clear();
        self.rows.extend(self.order.iter().map(|pair| pair / top_k));
        self.inverse.resize(pairs, 0);
        self.groups.clear();
        self.row_bounds.clear();
        for (index, &pair) in self.order.iter().enumerate() {
            self.inverse[pair] = index;
            let matrix = expert(pair);
            if self
                .groups
                .last()
                .is_none_or(|group| group.matrix != matrix)
            {
                self.groups.push(ExpertGroup { matrix });
                self.row_bounds.push(index);
            }
        }
        self.row_bounds.push(pairs);
    }
}
