//! Parts of a forward pass, as values: the section a step stands in, and the phase its time is counted with.
//!
//! A section gives a label its prefix (`L12.attn`); a phase is a row of a profile. Both are told once, where the plan is
//! written, and travel with steps and launches, so nobody has to read them out of a label again.

use std::fmt;

use crate::plan::{Labelled, Plan, Rows, Step};

/// Part of the plan that a step stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Token embeddings of all rows, or again of the sampled ones.
    Embed(Rows),
    /// Per-layer inputs made of a token and its embedding.
    PleInputs(Rows),
    /// Attention branch of a layer.
    Attention(usize),
    /// Feed-forward branch of a layer, dense and mixture of experts.
    Ffn(usize),
    /// Per-layer-embedding branch of a layer.
    Ple(usize),
    /// Final norm, output matrix and softcap.
    Head,
}

impl Section {
    /// Index of the layer, for sections of layers.
    pub fn layer(self) -> Option<usize> {
        match self {
            Section::Attention(layer) | Section::Ffn(layer) | Section::Ple(layer) => Some(layer),
            Section::Embed(_) | Section::PleInputs(_) | Section::Head => None,
        }
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Section::Embed(Rows::All) => f.write_str("embed"),
            Section::Embed(Rows::Sampled) => f.write_str("embed.sampled"),
            Section::PleInputs(Rows::All) => f.write_str("ple"),
            Section::PleInputs(Rows::Sampled) => f.write_str("ple.sampled"),
            Section::Attention(layer) => write!(f, "L{layer}.attn"),
            Section::Ffn(layer) => write!(f, "L{layer}.ffn"),
            Section::Ple(layer) => write!(f, "L{layer}.ple"),
            Section::Head => f.write_str("head"),
        }
    }
}

/// Row of a profile: what the time of a step or launch is counted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Lookup of token embeddings.
    Embed,
    /// Per-layer embeddings: their inputs and every layer's branch.
    Ple,
    /// Norms, residual adds and scales of whole rows.
    Norm,
    /// Queries, keys and values: products, head norms, RoPE and the write to the cache.
    Qkv,
    /// Attention within a window.
    AttentionSliding,
    /// Attention to everything before.
    AttentionFull,
    /// Output projection of attention.
    O,
    /// Dense feed-forward products and their activation.
    Ffn,
    /// Router and experts.
    Experts,
    /// Output norm, matrix and softcap.
    Head,
    /// Drawing tokens.
    Sample,
    /// Anything else, such as dropping rows that are not sampled.
    Other,
}

/// Layer and phase that a launch comes from: what is counted of it, whatever its label says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Index of the layer, for work of layers.
    pub layer: Option<usize>,
    /// Row of a profile.
    pub phase: Phase,
}

impl Phase {
    /// Every phase, in the order of a profile.
    pub const ALL: [Phase; 12] = [
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

    /// Name in reports.
    pub fn name(self) -> &'static str {
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

    /// Phase of a step of `plan` that stands in `section`.
    pub fn of(plan: &Plan, section: Option<Section>, step: &Step) -> Phase {
        let attended = |x| {
            let writes = |s: &&Labelled| s.step.out() == Some(x);
            let writer = plan.steps.iter().find(writes);
            writer.is_some_and(|s| matches!(s.step, Step::Attend { .. }))
        };
        match (section, step) {
            (_, Step::SelectSampled { .. }) | (None, _) => Phase::Other,
            (Some(Section::Embed(_)), _) => Phase::Embed,
            (Some(Section::PleInputs(_) | Section::Ple(_)), _) => Phase::Ple,
            (Some(Section::Head), _) => Phase::Head,
            (_, Step::Attend { slot, .. }) => match plan.slot(*slot).window {
                Some(_) => Phase::AttentionSliding,
                None => Phase::AttentionFull,
            },
            (_, Step::Norm { x, group, .. }) if *group == plan.columns(*x) => Phase::Norm,
            (_, Step::Add { .. } | Step::Scale { .. }) => Phase::Norm,
            (Some(Section::Attention(_)), Step::Linear { x, .. }) if attended(*x) => Phase::O,
            (Some(Section::Attention(_)), _) => Phase::Qkv,
            (_, Step::Route { .. } | Step::Experts { .. }) => Phase::Experts,
            (Some(Section::Ffn(_)), _) => Phase::Ffn,
        }
    }
}
