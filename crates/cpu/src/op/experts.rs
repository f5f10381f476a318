//! Mixture of experts: which experts a row uses, and their feed-forward networks with each expert's weights read once.
//!
//! Every (row, choice) pair is an own row here. Pairs are sorted by expert, so an expert's pairs are neighbours and one
//! product over a stack of matrices serves them all. A row's sum then takes its pairs in the order of its choices: it does
//! not depend on the other rows.

use carat_model::weights::{Weight, Weights};

use super::{
    linear::{self, Band, Class, Input, Product},
    quantize,
    workers::Workers,
};
use crate::kernel::{gemm::activations::Activations, table::Kernels};

/// Keeps the renormalisation finite when the chosen share underflows.
const LEAST_SHARE: f64 = 6.103_515_625e-5;

/// The `top_k` experts of one row, then their weights. Ties go to the lower number.
pub(crate) fn route(scores: &[f32], expert_scale: Option<&[f32]>, out: &mut [f32]) {
    let (experts, weights) = out.split_at_mut(out.len() / 2);
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let share = |expert: usize| f64::from(scores[expert] - largest).exp();
    let all: f64 = (0..scores.len()).map(share).sum();
    let mut chosen = 0.0;
    for place in 0..experts.len() {
        let taken = &experts[..place];
        let best = (0..scores.len())
            .filter(|expert| !taken.contains(&(*expert as f32)))
            .reduce(|a, b| if scores[b] > scores[a] { b } else { a })
            .expect("no more choices than experts");
        experts[place] = best as f32;
        chosen += share(best) / all;
    }
    for (weight, expert) in weights.iter_mut().zip(experts) {
        let expert = *expert as usize;
        let renormalised = share(expert) / all / chosen.max(LEAST_SHARE);
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

/// Memory for the pairs of a batch.
pub(crate) struct Pairs {
    gate: Vec<f32>,
    up: Vec<f32>,
    inner: Vec<f32>,
    down: Vec<f32>,
    codes: Option<Activations>,
    /// Pairs in order of experts, as `row * top_k + choice`.
    order: Vec<usize>,
    /// The row of each pair in that order.
    rows: Vec<usize>,
    /// Where each pair stands in that order.
    place: Vec<usize>,
    /// Which pair is which row of the products among pairs: themselves.
    row_bounds: Vec<usize>,
    bands: Vec<Band>,
}

impl Pairs {
    /// Room for `rows` with `top_k` choices each; one set of memory serves all layers of a plan, whose experts are alike.
    pub(crate) fn new(
        kernels: &Kernels,
        weights: &Weights,
        experts: ExpertWeights,
        (rows, top_k): (usize, usize),
    ) -> Pairs {
        let pairs = rows * top_k;
        let (gate, down) = (weights.matrix(experts.gate), weights.matrix(experts.down));
        let inner = pairs * gate.rows;
        Pairs {
            gate: vec![0.0; inner],
            up: vec![0.0; inner],
            inner: vec![0.0; inner],
            down: vec![0.0; pairs * down.rows],
            codes: (!down.quant.is_float())
                .then(|| Activations::new(Class::room(kernels, rows, top_k), down.columns)),
            order: Vec::new(),
            rows: Vec::new(),
            place: Vec::new(),
            row_bounds: Vec::new(),
            bands: Vec::new(),
        }
    }

    /// Fills `out` with the weighted sums for `rows` rows whose choices are `route`, `[rows, 2 * top_k]`.
    pub(crate) fn run(
        &mut self,
        workers: &mut Workers,
        weights: &Weights,
        experts: ExpertWeights,
        x: Input<'_>,
        (route, top_k): (&[f32], usize),
        out: &mut [f32],
    ) {
        self.sort(route, top_k);
        let pairs = self.order.len();
        let class = Class::of(workers.kernels, pairs / top_k);
        let (inner, dim) = (
            weights.matrix(experts.gate).rows,
            weights.matrix(experts.down).rows,
        );
        let of_rows = [experts.gate, experts.up].map(|weight| Product {
            class,
            weights,
            weight,
            input: x,
            gather: Some(&self.rows),
            row_bounds: &self.row_bounds,
            bands: &self.bands,
        });
        let outs = [&mut self.gate, &mut self.up];
        let mut outs = outs.map(|out| &mut out[..pairs * inner]);
        linear::run(&of_rows, workers, &mut outs);
        let (gate, up, kernels) = (&self.gate, &self.up, workers.kernels);
        workers.each_part(&mut self.inner[..pairs * inner], |start, out| {
            let range = start..start + out.len();
            kernels.gelu_mul(&gate[range.clone()], &up[range], out);
        });
        let input = match &mut self.codes {
            Some(codes) => {
                let values = (&mut self.inner[..pairs * inner], inner);
                quantize::each_row(workers, class, values, codes, |_, _| {});
                Input::Codes(codes)
            }
            None => Input::Floats {
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
            row_bounds: &self.row_bounds,
            bands: &self.bands,
        };
        linear::run(&[product], workers, &mut [&mut self.down[..pairs * dim]]);
        let (down, place) = (&self.down, &self.place);
        workers.each_row(out, dim, |row, out| {
            out.fill(0.0);
            let weights = &route[row * 2 * top_k + top_k..][..top_k];
            for (choice, weight) in weights.iter().enumerate() {
                let pair = place[row * top_k + choice];
                kernels.add_weighted(&down[pair * dim..][..dim], *weight, out);
            }
        });
    }

    /// Orders the pairs by expert and notes where each expert's begin.
    fn sort(&mut self, route: &[f32], top_k: usize) {
        let expert = |pair: usize| route[pair / top_k * 2 * top_k + pair % top_k] as usize;
        let pairs = route.len() / 2;
        self.order.clear();
        self.order.extend(0..pairs);
        self.order.sort_by_key(|&pair| expert(pair));
        self.rows.clear();
        self.rows.extend(self.order.iter().map(|pair| pair / top_k));
        self.place.resize(pairs, 0);
        self.bands.clear();
        self.row_bounds.clear();
        for (place, &pair) in self.order.iter().enumerate() {
            self.place[pair] = place;
            if self
                .bands
                .last()
                .is_none_or(|band| band.matrix != expert(pair))
            {
                self.bands.push(Band {
                    matrix: expert(pair),
                });
                self.row_bounds.push(place);
            }
        }
        self.row_bounds.push(pairs);
    }
}
