//! What part of the forward pass a launch or a step belongs to, told by its label.
//!
//! Labels are a section (`embed`, `L12`, `head`) and what is done: matrices by their names in the file, such as
//! `L12.attn_q+attn_k+attn_v`, anything else by a word, such as `L12.attend sliding`. Steps that a backend did not join with
//! others keep the plan's own label, such as `L12.ffn.gelu_mul`.

use std::collections::HashSet;

use carat_model::{
    cost::{self, BatchShape, Cost},
    plan::{Plan, Step},
    weights::{Weight, Weights},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Embed,
    /// Per-layer embeddings: their inputs and every layer's branch.
    Ple,
    /// Norms, residual adds and scales that are launches of their own.
    Norm,
    /// Queries, keys and values: products, norms, turns and the cache.
    Qkv,
    AttentionSliding,
    AttentionFull,
    O,
    Ffn,
    Experts,
    Head,
    Sample,
    Other,
}

impl Phase {
    pub(super) const ALL: [Phase; 12] = [
        Phase::Embed,
        Phase::Ple,
        Phase::Norm,
        Phase::Qkv,
        Phase::AttentionSliding,
        Phase::AttentionFull,
        Phase::O,
        Phase::Ffn,
        Phase::Experts,
        Phase::Head,
        Phase::Sample,
        Phase::Other,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Phase::Embed => "embed",
            Phase::Ple => "ple",
            Phase::Norm => "norm",
            Phase::Qkv => "qkv",
            Phase::AttentionSliding => "attention sliding",
            Phase::AttentionFull => "attention full",
            Phase::O => "o",
            Phase::Ffn => "ffn",
            Phase::Experts => "experts",
            Phase::Head => "head",
            Phase::Sample => "sample",
            Phase::Other => "other",
        }
    }
}

/// The part of a label that says where: `L3` of `L3.attn.linear`.
pub(super) fn section(label: &str) -> &str {
    label.split('.').next().unwrap_or(label)
}

/// Whether a launch is a layer's.
pub(super) fn in_layer(label: &str) -> bool {
    section(label)
        .strip_prefix('L')
        .is_some_and(|number| number.bytes().all(|b| b.is_ascii_digit()))
}

/// A plan's phases.
pub(super) struct Phases<'a> {
    plan: &'a Plan,
    weights: &'a Weights,
    /// Sections whose attention has no window.
    full: HashSet<&'a str>,
}

impl<'a> Phases<'a> {
    pub(super) fn new(plan: &'a Plan, weights: &'a Weights) -> Phases<'a> {
        let steps = plan.steps.iter();
        let full = steps.filter_map(|labelled| match labelled.step {
            Step::Attend { slot, .. } if plan.slot(slot).window.is_none() => {
                Some(section(&labelled.label))
            }
            _ => None,
        });
        Phases {
            plan,
            weights,
            full: full.collect(),
        }
    }

    /// Of launches in their order. What prepares another launch, or finishes it, counts with that one.
    pub(super) fn of_launches(&self, labels: &[&str]) -> Vec<Phase> {
        let mut phases: Vec<Phase> = Vec::with_capacity(labels.len());
        for (i, label) in labels.iter().enumerate() {
            let phase = match label.rsplit('.').next() {
                Some("gelu") => phases.last().copied().unwrap_or(Phase::Other),
                Some("convert") => labels.get(i + 1).map_or(Phase::Other, |next| self.of(next)),
                _ => self.of(label),
            };
            phases.push(phase);
        }
        phases
    }

    /// The least that each phase costs.
    pub(super) fn costs(&self, batch: BatchShape) -> impl Iterator<Item = (Phase, Cost)> {
        self.plan.steps.iter().map(move |labelled| {
            let cost = cost::of_step(self.plan, self.weights, &labelled.step, batch);
            (self.of_step(&labelled.label, &labelled.step), cost)
        })
    }

    fn of_step(&self, label: &str, step: &Step) -> Phase {
        let matrix = |w: Weight| {
            let name = self.weights.matrix(w).name.as_str();
            let name = name.split('[').next().unwrap_or(name);
            let name = name.strip_suffix(".weight").unwrap_or(name);
            let name = name.rsplit('.').next().unwrap_or(name);
            self.of(&format!("{}.{name}", section(label)))
        };
        match *step {
            Step::Linear { w, .. } | Step::Embed { table: w, .. } => matrix(w),
            _ => self.of(label),
        }
    }

    fn of(&self, label: &str) -> Phase {
        let (section, rest) = label.split_once('.').unwrap_or(("", label));
        let (branch, what) = rest.rsplit_once('.').unwrap_or(("", rest));
        let starts = |names: &[&str]| names.iter().any(|name| what.starts_with(name));
        if what == "sample" {
            Phase::Sample
        } else if section == "head" {
            Phase::Head
        } else if branch == "ple" || starts(&["per_layer", "layer_inputs", "inp_gate", "proj"]) {
            Phase::Ple
        } else if what == "embed" || what == "token_embd" {
            Phase::Embed
        } else if starts(&["attn_output"]) {
            Phase::O
        } else if starts(&["attn_", "qkv", "store", "rope"]) {
            Phase::Qkv
        } else if starts(&["attend"]) {
            if self.full.contains(section) {
                Phase::AttentionFull
            } else {
                Phase::AttentionSliding
            }
        } else if starts(&["experts", "route", "ffn_gate_inp"]) || what.ends_with("_exps") {
            Phase::Experts
        } else if starts(&["norm", "add", "scale"]) {
            Phase::Norm
        } else if branch == "ffn" || starts(&["ffn_"]) {
            Phase::Ffn
        } else {
            Phase::Other
        }
    }
}

#[cfg(test)]
mod tests;
