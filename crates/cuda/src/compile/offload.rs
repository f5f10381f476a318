//! Offloading: matrices that lie in host memory because the card is too small for them, in which order they leave it, and what that
//! costs.
//!
//! What a token reads the smallest share of leaves first: experts, of which it reads a few; then feed-forward matrices, which need
//! no cache beside them; then all else, the output matrix last. Within a kind, layers leave spread over the model (bit reversal), so
//! that the copies of one layer overlap with the work of layers that stayed. Each list begins with every shorter one.

use std::collections::{BTreeSet, HashSet};

use carat_model::{
    phase::Phase,
    plan::{Plan, Step},
    weights::{Weight, Weights},
};

use super::{
    fit::size,
    weights::{HostWeights, WeightLayout},
};
use crate::config::TableMemory;

/// Kinds of matrices, in the order in which they leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Experts,
    Ffn,
    Attention,
    Ple,
    Head,
}

impl Kind {
    const ALL: [Kind; 5] = [
        Kind::Experts,
        Kind::Ffn,
        Kind::Attention,
        Kind::Ple,
        Kind::Head,
    ];

    fn of(phase: Phase) -> Kind {
        match phase {
            Phase::Experts => Kind::Experts,
            Phase::Ffn => Kind::Ffn,
            Phase::Ple | Phase::Embed => Kind::Ple,
            Phase::Head => Kind::Head,
            _ => Kind::Attention,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Experts => "experts",
            Kind::Ffn => "feed-forward matrices",
            Kind::Attention => "attention matrices",
            Kind::Ple => "per-layer matrices",
            Kind::Head => "the output matrix",
        }
    }
}

/// Matrices that leave the card together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Unit {
    kind: Kind,
    layer: Option<usize>,
    pub(crate) weights: Vec<Weight>,
    /// The part of them that a token reads.
    read_share: f64,
}

/// Everything that may leave the card, in the order in which it does.
pub(crate) fn leaving_order(plan: &Plan, weights: &Weights) -> Vec<Unit> {
    let mut units = Vec::new();
    for step in &plan.steps {
        let origin = plan.origin(step);
        let mut add = |parts: &[Weight], read_share: f64| {
            units.push(Unit {
                kind: Kind::of(origin.phase),
                layer: origin.layer,
                weights: parts.to_vec(),
                read_share,
            });
        };
        match step.step {
            Step::Linear { w, .. } => add(&[w], 1.0),
            Step::Experts {
                route,
                gate,
                up,
                down,
                ..
            } => {
                let chosen = plan.columns(route) / 2;
                let share = chosen as f64 / weights.matrix(gate).count as f64;
                add(&[gate, up], share);
                add(&[down], share);
            }
            _ => {}
        }
    }
    // Stable, so that the matrices of a layer stay in the order of their products.
    units.sort_by_key(|unit| (unit.kind, unit.layer.map(spread)));
    units
}

/// Numbers that bring the middle of any count first, then the middles of its halves, and so on.
fn spread(layer: usize) -> usize {
    (layer + 1).reverse_bits()
}

/// The placement that the first units in host memory make, with all tables there.
pub(crate) fn host_weights(gone: &[Unit]) -> HostWeights {
    HostWeights {
        tables: TableMemory::Host,
        matrices: gone.iter().flat_map(|u| u.weights.clone()).collect(),
    }
}

/// The fewest units at the head of a list that free so many bytes, or all of them.
pub(crate) fn fewest_that_free(units: &[Unit], layout: &WeightLayout, bytes: u64) -> usize {
    let mut gone = HashSet::new();
    for (i, unit) in units.iter().enumerate() {
        gone.extend(unit.weights.iter().copied());
        if layout.device_bytes_of(&gone) as u64 >= bytes {
            return i + 1;
        }
    }
    units.len()
}

/// Bytes of offloaded matrices that one token reads through the bus.
pub(crate) fn read_per_token(gone: &[Unit], layout: &WeightLayout) -> usize {
    let mut seen = HashSet::new();
    let shares = gone.iter().map(|unit| {
        let bytes = layout.host_matrix_bytes(&unit.weights, &mut seen);
        (bytes as f64 * unit.read_share) as usize
    });
    shares.sum()
}

/// Lines for a person that say what lies in host memory, and what that costs.
pub(crate) fn describe(gone: &[Unit], layout: &WeightLayout) -> Vec<String> {
    let mut lines = Vec::new();
    let mut seen = HashSet::new();
    for kind in Kind::ALL {
        let units: Vec<&Unit> = gone.iter().filter(|u| u.kind == kind).collect();
        if units.is_empty() {
            continue;
        }
        let bytes = units
            .iter()
            .map(|u| layout.host_matrix_bytes(&u.weights, &mut seen));
        let bytes = size(bytes.sum());
        let layers: BTreeSet<usize> = units.iter().filter_map(|u| u.layer).collect();
        let of_layers = match layers.len() {
            0 => String::new(),
            1 => " of 1 layer".to_owned(),
            count => format!(" of {count} layers"),
        };
        lines.push(format!(
            "{}{of_layers} in host memory, read through the bus: {bytes}",
            kind.name()
        ));
    }
    if !lines.is_empty() {
        let read = size(read_per_token(gone, layout));
        lines.push(format!(
            "each token of an answer reads {read} through the bus"
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_model::gemma4;
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;

    #[test]
    fn layers_are_spread_over_the_model_however_many_leave() {
        let mut order: Vec<usize> = (0..30).collect();
        order.sort_by_key(|layer| spread(*layer));
        assert_eq!(order[..7], [15, 7, 23, 3, 19, 11, 27]);
        for count in 2..=30 {
            let mut gone = order[..count].to_vec();
            gone.sort_unstable();
            let widest = gone.windows(2).map(|w| w[1] - w[0]).max().unwrap();
            assert!(widest <= 2 * 30usize.div_ceil(count), "{gone:?}");
        }
    }

    #[test]
    fn experts_leave_first_and_the_output_matrix_last() {
        let model = Tiny::new(Variant::Moe26b, QuantType::Q8_0).model();
        let plan = gemma4::plan(&model);
        let units = leaving_order(&plan, &model.weights);
        let kinds: Vec<Kind> = units.iter().map(|u| u.kind).collect();
        assert!(kinds.is_sorted());
        assert_eq!(
            (kinds[0], kinds[kinds.len() - 1]),
            (Kind::Experts, Kind::Head)
        );
        let experts = units.iter().filter(|u| u.kind == Kind::Experts);
        assert!(experts.clone().count() > 0);
        assert!(experts.clone().all(|u| u.read_share < 1.0));
        let others = units.iter().filter(|u| u.kind != Kind::Experts);
        assert!(others.clone().all(|u| u.read_share == 1.0));
        // All that is multiplied, each once.
        let all: Vec<Weight> = units.iter().flat_map(|u| u.weights.clone()).collect();
        let distinct: BTreeSet<Weight> = all.iter().copied().collect();
        assert_eq!(all.len(), distinct.len());
        assert!(distinct.contains(&model.layers[0].o));
    }
}
