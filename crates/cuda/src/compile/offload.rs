//! Offloading: matrices that lie in host memory because the card is too small for them, in which order they leave it, and what that
//! costs.
//!
//! What a token reads the smallest share of leaves first: experts, of which it reads a few; then feed-forward matrices, which need
//! no cache beside them; then all else, the output matrix last. Within a kind, layers leave spread over the model (bit reversal), so
//! that the copies of one layer overlap with the work of layers that stayed. Each list begins with every shorter one.

use std::collections::{BTreeSet, HashSet};

use carat_model::{
    backend::BackendError,
    phase::Phase,
    plan::{Plan, Step},
    weights::{Weight, Weights},
};

use super::{
    fit::size,
    weights::{HostWeights, WeightLayout},
};
use crate::{
    config::TableMemory,
    placement::{HostParts, Layers, WeightKind},
};

/// The kind that matrices of a phase are counted with.
fn kind_of(phase: Phase) -> WeightKind {
    match phase {
        Phase::Experts => WeightKind::Experts,
        Phase::Ffn => WeightKind::FeedForward,
        Phase::Ple | Phase::Embed => WeightKind::PerLayer,
        Phase::Head => WeightKind::Output,
        _ => WeightKind::Attention,
    }
}

/// A kind in a sentence.
fn words(kind: WeightKind) -> &'static str {
    match kind {
        WeightKind::Experts => "experts",
        WeightKind::FeedForward => "feed-forward matrices",
        WeightKind::Attention => "attention matrices",
        WeightKind::PerLayer => "per-layer matrices",
        WeightKind::Output => "the output matrix",
    }
}

/// Matrices that leave the card together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Unit {
    pub(crate) kind: WeightKind,
    pub(crate) layer: Option<usize>,
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
                kind: kind_of(origin.phase),
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

/// Units in host memory, where tables are, and the share of rows that the host multiplies.
pub(crate) fn host_weights(tables: TableMemory, gone: &[Unit], cpu_share: u8) -> HostWeights {
    HostWeights {
        tables,
        matrices: gone.iter().flat_map(|u| u.weights.clone()).collect(),
        cpu_share,
    }
}

/// Bytes per second that weights in host memory are read at, where that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    /// By the card, through the bus.
    pub(crate) bus: Option<f64>,
    /// By the CPU; `None` also if it is to compute nothing.
    pub(crate) host: Option<f64>,
}

impl Rates {
    /// Of a hundred rows, those that the CPU multiplies so that both sides take as long.
    pub(crate) fn cpu_share(self) -> u8 {
        match self {
            Rates {
                bus: Some(bus),
                host: Some(host),
            } => (100.0 * host / (host + bus)).round() as u8,
            _ => 0,
        }
    }
}

/// The units that a placement names, or the line of it that names none.
pub(crate) fn named_units(units: Vec<Unit>, parts: &HostParts) -> Result<Vec<Unit>, BackendError> {
    for (kind, layers) in &parts.matrices {
        let of_kind: BTreeSet<Option<usize>> = units
            .iter()
            .filter(|unit| unit.kind == *kind)
            .map(|unit| unit.layer)
            .collect();
        let name = kind.name();
        let missing = match layers {
            Layers::All => of_kind
                .is_empty()
                .then(|| format!("this model has no `{name}` weights")),
            Layers::Some(layers) => {
                let strange = layers
                    .iter()
                    .find(|layer| !of_kind.contains(&Some(**layer)));
                strange
                    .map(|layer| format!("this model has no `{name}` weights in a layer {layer}"))
            }
        };
        if let Some(missing) = missing {
            return Err(BackendError::Unsupported {
                what: format!("the placement names what is not there: {missing}"),
            });
        }
    }
    let is_named = |unit: &Unit| {
        let mut lines = parts.matrices.iter();
        lines.any(|(kind, layers)| *kind == unit.kind && layers.have(unit.layer))
    };
    Ok(units.into_iter().filter(is_named).collect())
}

/// The placement of units in host memory, as a file would have it.
pub(crate) fn placement(gone: &[Unit], tables: bool, cpu: Option<u8>) -> HostParts {
    let of_kind = |kind: WeightKind| {
        let units = gone.iter().filter(move |unit| unit.kind == kind);
        let layers: BTreeSet<Option<usize>> = units.map(|unit| unit.layer).collect();
        let in_layers: BTreeSet<usize> = layers.iter().copied().flatten().collect();
        match layers.len() {
            0 => None,
            count if count == in_layers.len() => Some((kind, Layers::Some(in_layers))),
            _ => Some((kind, Layers::All)),
        }
    };
    HostParts {
        tables,
        matrices: WeightKind::ALL.into_iter().filter_map(of_kind).collect(),
        cpu,
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

/// Whether the host may have a part in matrices of a kind.
fn is_shared(kind: WeightKind) -> bool {
    matches!(kind, WeightKind::Experts | WeightKind::FeedForward)
}

/// Bytes of offloaded matrices that one token reads: those of which the host may have a part, and others.
fn read_per_token(gone: &[Unit], layout: &WeightLayout) -> (f64, f64) {
    let mut seen = HashSet::new();
    let (mut shared, mut others) = (0.0, 0.0);
    for unit in gone {
        let bytes = layout.host_matrix_bytes(&unit.weights, &mut seen) as f64 * unit.read_share;
        *if is_shared(unit.kind) {
            &mut shared
        } else {
            &mut others
        } += bytes;
    }
    (shared, others)
}

/// Lines for a person that say what lies in host memory, and what that costs.
pub(crate) fn describe(
    gone: &[Unit],
    layout: &WeightLayout,
    cpu_share: u8,
    rates: &dyn Fn() -> Rates,
) -> Vec<String> {
    let mut lines = Vec::new();
    let mut seen = HashSet::new();
    for kind in WeightKind::ALL {
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
        let how = match cpu_share {
            1.. if is_shared(kind) => {
                format!(", {cpu_share} % of them multiplied by the CPU in answers")
            }
            _ => ", read through the bus".to_owned(),
        };
        let what = words(kind);
        lines.push(format!("{what}{of_layers} in host memory{how}: {bytes}"));
    }
    if !lines.is_empty() {
        lines.push(cost_of_a_token(gone, layout, cpu_share, rates()));
    }
    lines
}

/// What a token reads of host memory, by whom, and how fast that can be.
fn cost_of_a_token(gone: &[Unit], layout: &WeightLayout, cpu_share: u8, rates: Rates) -> String {
    let (shared, others) = read_per_token(gone, layout);
    let by_cpu = shared * f64::from(cpu_share) / 100.0;
    let through_bus = shared - by_cpu + others;
    let bytes = |bytes: f64| size(bytes as usize);
    let gigabytes = |rate: f64| rate / 1e9;
    if cpu_share == 0 {
        let at_most = rates.bus.map_or(String::new(), |bus| {
            let tokens = bus / through_bus.max(1.0);
            let bus = gigabytes(bus);
            format!(": {tokens:.1} tokens/s at the most, at {bus:.1} GB/s")
        });
        let read = bytes(through_bus);
        return format!("each token of an answer reads {read} through the bus{at_most}");
    }
    let at_most = match rates {
        Rates {
            bus: Some(bus),
            host: Some(host),
        } => {
            // A network's parts are read side by side, other matrices by the card alone.
            let time = (by_cpu / host).max((shared - by_cpu) / bus) + others / bus;
            format!(
                ": {:.1} tokens/s at the most, at {:.1} and {:.1} GB/s",
                1.0 / time.max(f64::MIN_POSITIVE),
                gigabytes(host),
                gigabytes(bus)
            )
        }
        _ => String::new(),
    };
    format!(
        "each token of an answer reads {} by the CPU and {} through the bus{at_most}",
        bytes(by_cpu),
        bytes(through_bus)
    )
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
        let kinds: Vec<WeightKind> = units.iter().map(|u| u.kind).collect();
        assert!(kinds.is_sorted());
        assert_eq!(
            (kinds[0], kinds[kinds.len() - 1]),
            (WeightKind::Experts, WeightKind::Output)
        );
        let experts = units.iter().filter(|u| u.kind == WeightKind::Experts);
        assert!(experts.clone().count() > 0);
        assert!(experts.clone().all(|u| u.read_share < 1.0));
        let others = units.iter().filter(|u| u.kind != WeightKind::Experts);
        assert!(others.clone().all(|u| u.read_share == 1.0));
        // All that is multiplied, each once.
        let all: Vec<Weight> = units.iter().flat_map(|u| u.weights.clone()).collect();
        let distinct: BTreeSet<Weight> = all.iter().copied().collect();
        assert_eq!(all.len(), distinct.len());
        assert!(distinct.contains(&model.layers[0].o));
    }
}
