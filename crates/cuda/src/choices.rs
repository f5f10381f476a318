//! The few choices that depend on the card at hand: what was measured on one card need not be best on another.
//!
//! The model of the card decides each of them: rules and figures that were measured on an H200. Alternatives replace it, one by one:
//! those that `carat tune` has found faster on a card (`tuned_models.rs`), or that a caller gives. No alternative changes which sums are
//! made for batches of up to 8 rows, so these have the same bits whatever is chosen; larger batches are the same whoever the neighbours are.

use std::fmt;

use carat_model::{
    plan::{Labelled, Plan, Step},
    weights::Weights,
};

use crate::{
    compile::target::GemmImpl,
    config::Fusion,
    kernel::{GemmTile, USUAL_STAGES},
};

/// Bytes of a matrix, on average, up to which medium batches gain from PDL: 12B Q4_0 (20 MB) has 2.6 % more tokens/s with 32 rows; larger
/// ones were not measured.
const MAX_MEDIUM_BYTES_FOR_PDL: usize = 32 << 20;
/// Two rows take longer where a launch of its own prepares them than in clusters of two.
const PREPARED_FROM: usize = 3;
/// 26B-A4B on an H200: four rows 1.08 to 1.12 times as fast, 8 to 64 rows 1.01 to 1.28 times.
const GROUPED_FROM: usize = 3;
/// Measured on an H200 (E4B and 12B): at 32 rows, products of so many weights and more take 0.5 to 0.9 of cuBLASLt's time, smaller
/// ones 1.3.
const PACKED_FROM: usize = 15_000_000;

/// Something to be chosen for a card and a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Choice {
    /// Programmatic dependent launch in batches of up to 8 rows: a launch fetches weights while the one before it ends, and takes room
    /// from that one meanwhile. Pays where launches are short.
    SmallPdl,
    /// The same in batches of 9 to 64 rows.
    MediumPdl,
    /// Rows from which on a launch of its own prepares the input of a packed product: one launch more for each product, and no block
    /// prepares rows that others prepare, too.
    PreparedFrom,
    /// Stages of the ring through which each warp of a GEMV streams weights: more bytes in flight, and more shared memory, so
    /// fewer blocks on a multiprocessor.
    GemvStages,
    /// Rows from which on, up to 64, blocks share all experts that rows are routed to, and each goes on from one to the next; before, each
    /// routed expert has blocks of its own, and from 9 rows on tiles of the native GEMM.
    GroupedFrom,
    /// Weights of a product from which on batches of 9 to 64 rows multiply them as they are packed: a fraction of the bytes of their f16
    /// copies, and more instructions than cuBLASLt takes for those.
    PackedFrom,
    /// The largest tile of the native GEMM, and blocks of it that share a multiprocessor: a weight read for more rows or more blocks at
    /// once, a deep pipeline or another block to hide each other's waits.
    GemmTile,
}

/// A batch to measure a choice by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// So many sequences that generate together.
    Decode(usize),
    /// A prompt of so many tokens.
    Prompt(usize),
}

/// One value of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alternative {
    SmallPdl(bool),
    MediumPdl(bool),
    PreparedFrom(usize),
    GemvStages(usize),
    GroupedFrom(usize),
    PackedFrom(usize),
    GemmTile(GemmTile),
}

impl Choice {
    /// All of them, in the order in which they are measured.
    pub const ALL: [Choice; 7] = [
        Choice::SmallPdl,
        Choice::PreparedFrom,
        Choice::GemvStages,
        Choice::GroupedFrom,
        Choice::MediumPdl,
        Choice::PackedFrom,
        Choice::GemmTile,
    ];

    /// As tables and files have it.
    pub fn name(self) -> &'static str {
        match self {
            Choice::SmallPdl => "small-pdl",
            Choice::MediumPdl => "medium-pdl",
            Choice::PreparedFrom => "prepared-from",
            Choice::GemvStages => "gemv-stages",
            Choice::GroupedFrom => "grouped-from",
            Choice::PackedFrom => "packed-from",
            Choice::GemmTile => "gemm-tile",
        }
    }

    /// The choice of this name.
    pub fn named(name: &str) -> Option<Choice> {
        Choice::ALL.into_iter().find(|choice| choice.name() == name)
    }

    /// Its subject, in a few words.
    pub fn subject(self) -> &'static str {
        match self {
            Choice::SmallPdl => "programmatic dependent launch, up to 8 rows",
            Choice::MediumPdl => "programmatic dependent launch, 9 to 64 rows",
            Choice::PreparedFrom => "rows from which on a launch of its own prepares inputs",
            Choice::GemvStages => "stages of a warp's ring, up to 8 rows",
            Choice::GroupedFrom => "rows, up to 64, from which on blocks share all routed experts",
            Choice::PackedFrom => "weights from which on 9 to 64 rows multiply them packed",
            Choice::GemmTile => "blocks and rows of the native GEMM's tile",
        }
    }

    /// The values that there are.
    pub fn alternatives(self) -> &'static [Alternative] {
        use Alternative as A;
        match self {
            Choice::SmallPdl => &[A::SmallPdl(true), A::SmallPdl(false)],
            Choice::MediumPdl => &[A::MediumPdl(true), A::MediumPdl(false)],
            Choice::PreparedFrom => &[A::PreparedFrom(2), A::PreparedFrom(3), A::PreparedFrom(5)],
            Choice::GemvStages => &[A::GemvStages(2), A::GemvStages(3), A::GemvStages(4)],
            Choice::GroupedFrom => &[
                A::GroupedFrom(3),
                A::GroupedFrom(5),
                A::GroupedFrom(9),
                A::GroupedFrom(65),
            ],
            Choice::PackedFrom => &[
                A::PackedFrom(0),
                A::PackedFrom(5_000_000),
                A::PackedFrom(15_000_000),
                A::PackedFrom(40_000_000),
            ],
            Choice::GemmTile => &[
                A::GemmTile(GemmTile::TwoOf64),
                A::GemmTile(GemmTile::OneOf64),
                A::GemmTile(GemmTile::Of32),
            ],
        }
    }

    /// The batches that it concerns.
    pub fn workloads(self) -> &'static [Workload] {
        use Workload::{Decode, Prompt};
        match self {
            Choice::SmallPdl | Choice::GemvStages => &[Decode(1), Decode(4), Decode(8)],
            Choice::PreparedFrom => &[Decode(2), Decode(4), Decode(8)],
            Choice::GroupedFrom => &[Decode(4), Decode(8), Decode(16), Decode(32), Decode(64)],
            Choice::MediumPdl | Choice::PackedFrom => &[Decode(16), Decode(32), Decode(64)],
            Choice::GemmTile => &[Decode(64), Prompt(512), Prompt(2048)],
        }
    }

    /// The value of this name.
    pub(crate) fn parse(self, text: &str) -> Option<Alternative> {
        let mut values = self.alternatives().iter().copied();
        values.find(|value| value.to_string() == text)
    }

    /// Whether it makes a difference to these kernels.
    fn concerns(self, kernels: Kernels) -> bool {
        kernels.fusion == Fusion::On
            && match self {
                Choice::SmallPdl | Choice::MediumPdl => kernels.pdl,
                Choice::PreparedFrom | Choice::GemvStages | Choice::GroupedFrom => true,
                Choice::PackedFrom => kernels.gemm == GemmImpl::CublasLt,
                Choice::GemmTile => kernels.gemm == GemmImpl::Native,
            }
    }
}

/// Kernels that a card gets, as far as choices depend on them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    pub(crate) fusion: Fusion,
    /// Whether they may be launched with PDL.
    pub(crate) pdl: bool,
    pub(crate) gemm: GemmImpl,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Workload::Decode(sequences) => write!(f, "tg x{sequences}"),
            Workload::Prompt(tokens) => write!(f, "pp{tokens}"),
        }
    }
}

impl Alternative {
    /// Whose value it is.
    pub fn choice(self) -> Choice {
        match self {
            Alternative::SmallPdl(_) => Choice::SmallPdl,
            Alternative::MediumPdl(_) => Choice::MediumPdl,
            Alternative::PreparedFrom(_) => Choice::PreparedFrom,
            Alternative::GemvStages(_) => Choice::GemvStages,
            Alternative::GroupedFrom(_) => Choice::GroupedFrom,
            Alternative::PackedFrom(_) => Choice::PackedFrom,
            Alternative::GemmTile(_) => Choice::GemmTile,
        }
    }

    /// Whether it takes kernels that are not among those compiled ahead.
    pub(crate) fn needs_compiler(self) -> bool {
        match self {
            Alternative::GemvStages(stages) => stages != USUAL_STAGES,
            Alternative::GemmTile(tile) => tile == GemmTile::OneOf64,
            _ => false,
        }
    }
}

/// The value, as tables and files have it.
impl fmt::Display for Alternative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Alternative::SmallPdl(on) | Alternative::MediumPdl(on) => {
                f.pad(if on { "on" } else { "off" })
            }
            Alternative::PreparedFrom(n)
            | Alternative::GemvStages(n)
            | Alternative::GroupedFrom(n) => f.pad(&n.to_string()),
            Alternative::PackedFrom(weights) => {
                let millions = weights / 1_000_000;
                if millions * 1_000_000 == weights && weights > 0 {
                    f.pad(&format!("{millions}M"))
                } else {
                    f.pad(&weights.to_string())
                }
            }
            Alternative::GemmTile(tile) => f.pad(match tile {
                GemmTile::TwoOf64 => "2x64",
                GemmTile::OneOf64 => "1x64",
                GemmTile::Of32 => "2x32",
            }),
        }
    }
}

/// Values that replace those of the model of the card; of a choice one at the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alternatives([Option<Alternative>; Choice::ALL.len()]);

impl Alternatives {
    /// The same with this value, in place of another of its choice.
    #[must_use]
    pub fn with(mut self, value: Alternative) -> Alternatives {
        self.0[value.choice() as usize] = Some(value);
        self
    }

    /// The same with all of these.
    #[must_use]
    pub fn with_all(self, values: Alternatives) -> Alternatives {
        values.iter().fold(self, Alternatives::with)
    }

    /// The value of a choice, where it is not left to the model of the card.
    pub fn get(self, choice: Choice) -> Option<Alternative> {
        self.0[choice as usize]
    }

    /// All there are.
    pub fn iter(self) -> impl Iterator<Item = Alternative> {
        self.0.into_iter().flatten()
    }

    /// The same without those that take kernels that are not among those compiled ahead.
    pub(crate) fn of_kernels_ahead(self) -> Alternatives {
        let kept = self.iter().filter(|value| !value.needs_compiler());
        kept.fold(Alternatives::default(), Alternatives::with)
    }
}

/// All choices made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choices {
    pub(crate) small_pdl: bool,
    pub(crate) medium_pdl: bool,
    pub(crate) prepared_from: usize,
    pub(crate) gemv_stages: usize,
    pub(crate) grouped_from: usize,
    pub(crate) packed_from: usize,
    pub(crate) gemm_tile: GemmTile,
}

impl Choices {
    /// Those of the model of the card, but for some.
    pub(crate) fn new(plan: &Plan, weights: &Weights, others: Alternatives) -> Choices {
        let by_model = Choices {
            small_pdl: true,
            medium_pdl: matrix_bytes(plan, weights) <= MAX_MEDIUM_BYTES_FOR_PDL,
            prepared_from: PREPARED_FROM,
            gemv_stages: USUAL_STAGES,
            grouped_from: GROUPED_FROM,
            packed_from: PACKED_FROM,
            gemm_tile: GemmTile::default(),
        };
        others.iter().fold(by_model, Choices::with)
    }

    fn with(mut self, value: Alternative) -> Choices {
        match value {
            Alternative::SmallPdl(on) => self.small_pdl = on,
            Alternative::MediumPdl(on) => self.medium_pdl = on,
            Alternative::PreparedFrom(rows) => self.prepared_from = rows.max(1),
            Alternative::GemvStages(stages) => self.gemv_stages = stages.max(1),
            Alternative::GroupedFrom(rows) => self.grouped_from = rows,
            Alternative::PackedFrom(weights) => self.packed_from = weights,
            Alternative::GemmTile(tile) => self.gemm_tile = tile,
        }
        self
    }

    pub(crate) fn get(self, choice: Choice) -> Alternative {
        match choice {
            Choice::SmallPdl => Alternative::SmallPdl(self.small_pdl),
            Choice::MediumPdl => Alternative::MediumPdl(self.medium_pdl),
            Choice::PreparedFrom => Alternative::PreparedFrom(self.prepared_from),
            Choice::GemvStages => Alternative::GemvStages(self.gemv_stages),
            Choice::GroupedFrom => Alternative::GroupedFrom(self.grouped_from),
            Choice::PackedFrom => Alternative::PackedFrom(self.packed_from),
            Choice::GemmTile => Alternative::GemmTile(self.gemm_tile),
        }
    }
}

/// Bytes of the matrices that every row is multiplied with, on average.
fn matrix_bytes(plan: &Plan, weights: &Weights) -> usize {
    let steps = plan.steps.iter();
    let sizes = steps.filter_map(|labelled| match labelled.step {
        Step::Linear { w, .. } => Some(weights.bytes(w).len()),
        _ => None,
    });
    let (count, sum) = sizes.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes));
    sum / count.max(1)
}

/// A choice that makes a difference on a card, as it is made for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChoiceInForce {
    pub choice: Choice,
    pub value: Alternative,
    /// What the model of the card says.
    pub by_model: Alternative,
    pub origin: ChoiceOrigin,
}

/// Who made a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChoiceOrigin {
    /// Rules and figures that were measured on an H200.
    ModelOfCard,
    /// `carat tune`, on this card.
    Tuned,
    /// The caller.
    Given,
}

impl fmt::Display for ChoiceOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ChoiceOrigin::ModelOfCard => "model of the card",
            ChoiceOrigin::Tuned => "tuned",
            ChoiceOrigin::Given => "given",
        })
    }
}

/// Choices that make a difference on a card.
pub(crate) fn in_force(
    plan: &Plan,
    weights: &Weights,
    kernels: Kernels,
    (kept, given): (Alternatives, Alternatives),
) -> Vec<ChoiceInForce> {
    let by_model = Choices::new(plan, weights, Alternatives::default());
    let made = Choices::new(plan, weights, kept.with_all(given));
    let is_expert = |labelled: &Labelled| matches!(labelled.step, Step::Experts { .. });
    let has_experts = plan.steps.iter().any(is_expert);
    let of_model = |choice: Choice| choice != Choice::GroupedFrom || has_experts;
    let open = (Choice::ALL.into_iter()).filter(|c| c.concerns(kernels) && of_model(*c));
    let each = open.map(|choice| ChoiceInForce {
        choice,
        value: made.get(choice),
        by_model: by_model.get(choice),
        origin: match (given.get(choice), kept.get(choice)) {
            (Some(_), _) => ChoiceOrigin::Given,
            (None, Some(_)) => ChoiceOrigin::Tuned,
            (None, None) => ChoiceOrigin::ModelOfCard,
        },
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_model::gemma4;
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;

    const HOPPER: Kernels = Kernels {
        fusion: Fusion::On,
        pdl: true,
        gemm: GemmImpl::CublasLt,
    };

    fn of_model(others: Alternatives) -> Choices {
        let model = Tiny::new(Variant::E4b, QuantType::Q8_0).model();
        Choices::new(&gemma4::plan(&model), &model.weights, others)
    }

    #[test]
    fn the_model_of_the_card_is_what_was_measured_on_an_h200() {
        assert_eq!(
            of_model(Alternatives::default()),
            Choices {
                small_pdl: true,
                medium_pdl: true,
                prepared_from: 3,
                gemv_stages: 3,
                grouped_from: 3,
                packed_from: 15_000_000,
                gemm_tile: GemmTile::TwoOf64,
            }
        );
        // What it says is among the values that are measured.
        for choice in Choice::ALL {
            let value = of_model(Alternatives::default()).get(choice);
            assert!(choice.alternatives().contains(&value), "{choice} {value}");
        }
    }

    #[test]
    fn every_value_takes_effect_and_is_read_as_it_is_written() {
        for choice in Choice::ALL {
            for &value in choice.alternatives() {
                assert_eq!(value.choice(), choice);
                assert_eq!(choice.parse(&value.to_string()), Some(value), "{choice}");
                let others = Alternatives::default().with(value);
                let made = of_model(others);
                assert_eq!(made.get(choice), value);
                for other in Choice::ALL.into_iter().filter(|c| *c != choice) {
                    let by_model = of_model(Alternatives::default()).get(other);
                    assert_eq!(made.get(other), by_model, "{value} leaves {other} alone");
                }
                let ahead = others.of_kernels_ahead().get(choice).is_some();
                assert_eq!(ahead, !value.needs_compiler(), "{choice} {value}");
            }
            assert_eq!(choice.parse("7"), None);
        }
    }

    #[test]
    fn who_made_a_choice_is_told_and_what_is_given_wins() {
        let model = Tiny::new(Variant::E4b, QuantType::Q8_0).model();
        let plan = gemma4::plan(&model);
        let none = Alternatives::default();
        let kept = none
            .with(Alternative::PreparedFrom(5))
            .with(Alternative::GemvStages(4));
        let given = none.with(Alternative::GemvStages(2));
        let made = |kernels| in_force(&plan, &model.weights, kernels, (kept, given));
        let told: Vec<String> = made(HOPPER)
            .iter()
            .map(|c| {
                format!(
                    "{} {} ({}), else {}",
                    c.choice, c.value, c.origin, c.by_model
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                "small-pdl on (model of the card), else on",
                "prepared-from 5 (tuned), else 3",
                "gemv-stages 2 (given), else 3",
                "medium-pdl on (model of the card), else on",
                "packed-from 15M (model of the card), else 15M",
            ]
        );
        let portable = Kernels {
            pdl: false,
            gemm: GemmImpl::Native,
            ..HOPPER
        };
        let names = |kernels| {
            made(kernels)
                .iter()
                .map(|c| c.choice.name())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names(portable),
            ["prepared-from", "gemv-stages", "gemm-tile"]
        );
        let plain = Kernels {
            fusion: Fusion::Off,
            ..HOPPER
        };
        assert_eq!(names(plain), [""; 0]);
    }
}
