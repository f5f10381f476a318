//! What is given up where memory is short, cheapest first, and why: lines for a person say so.
//!
//! 1. Tables that are only looked up go to host memory: a few kilobytes per token cross the bus.
//! 2. Layers lose the f16 copies of their weights that cuBLASLt multiplies, the last layers first: their prompts go through the
//!    native GEMM, which reads packed weights.
//! 3. All layers do.
//! 4. Matrices go to host memory, those that a token reads the smallest share of first ([`offload`]). They are read in place, through
//!    the bus: slow, but the results are the same bits.
//!
//! Where the caller says what lies in host memory ([`Placement`]), 2 and 3 are all that is left to give up.
//!
//! Each step is tried with those before it in force. Keys and values stay as they were asked for: their type is the caller's.

use carat_model::{
    backend::{BackendError, CompileOptions},
    kv::{KvType, PerGroup},
    layout::kv_bytes,
    plan::Plan,
    weights::Weights,
};

use super::{
    lower::weights_from_layer,
    offload::{self, Rates, fewest_that_free, host_weights, leaving_order, named_units, placement},
    prepare::{Prepared, prepare},
    target::{GemmImpl, Target},
    weights::HostWeights,
};
use crate::{
    config::{Fusion, TableMemory},
    placement::Placement,
};

/// The first choice that fits into so many bytes. The last one is returned whether it does or not.
pub(crate) fn fitting(
    plan: &Plan,
    weights: &Weights,
    options: &CompileOptions,
    (target, tables, placement): (Target, TableMemory, &Placement),
    free_bytes: u64,
    rates: &dyn Fn() -> Rates,
) -> Result<Prepared, BackendError> {
    let fit = Fit {
        plan,
        weights,
        options,
        target,
        tables,
        placement,
        rates,
    };
    let Fitted {
        mut prepared,
        mut given_up,
        missing,
    } = fit.within(free_bytes)?;
    if missing > 0 {
        let kv = smaller_kv(plan, options);
        given_up.push(format!(
            "with {} more of device memory nothing would be given up{}",
            size(missing as usize),
            match kv {
                0 => String::new(),
                saved => format!("; --kv-type q8_0 would free {}", size(saved)),
            }
        ));
        if prepared.memory.host_weights > 0 && *placement == Placement::Auto {
            let more = [("1 GiB more", 1 << 30), ("--kv-type q8_0", kv as u64)];
            for (what, bytes) in more.into_iter().filter(|(_, bytes)| *bytes > 0) {
                let left = fit.within(free_bytes + bytes)?.prepared.memory.host_weights;
                given_up.push(format!(
                    "with {what}, {} of weights would lie in host memory instead of {}",
                    size(left),
                    size(prepared.memory.host_weights)
                ));
            }
            given_up.extend(smaller_file(weights));
        }
    }
    prepared.memory.given_up = given_up;
    Ok(prepared)
}

/// A plan to be fitted into memory.
struct Fit<'a> {
    plan: &'a Plan,
    weights: &'a Weights,
    options: &'a CompileOptions,
    target: Target,
    tables: TableMemory,
    placement: &'a Placement,
    /// What weights in host memory are read at.
    rates: &'a dyn Fn() -> Rates,
}

/// A plan that fits, or nearly does.
struct Fitted {
    prepared: Prepared,
    /// What was given up, in lines for a person.
    given_up: Vec<String>,
    /// Bytes more with which nothing would have been.
    missing: u64,
}

impl Fit<'_> {
    fn compile(&self, target: Target, host: &HostWeights) -> Result<Prepared, BackendError> {
        prepare(self.plan, self.weights, self.options, host.clone(), target)
    }

    /// Of a hundred rows of networks in host memory, those that the host multiplies.
    fn cpu_share(&self) -> u8 {
        let given = match self.placement {
            Placement::Given(parts) => parts.cpu,
            Placement::Auto | Placement::Card => None,
        };
        match self.target.fusion {
            Fusion::On => given.unwrap_or_else(|| (self.rates)().cpu_share()),
            // Plain kernels are the card's alone.
            Fusion::Off => 0,
        }
    }

    fn within(&self, free_bytes: u64) -> Result<Fitted, BackendError> {
        let over = |prepared: &Prepared| prepared.memory.device_bytes().saturating_sub(free_bytes);
        let units = leaving_order(self.plan, self.weights);
        let (mut host, named) = match self.placement {
            Placement::Auto | Placement::Card => (self.tables.into(), Vec::new()),
            Placement::Given(parts) => {
                let named = named_units(units.clone(), parts)?;
                let tables = if parts.tables {
                    TableMemory::Host
                } else {
                    TableMemory::Device
                };
                let cpu_share = if named.is_empty() {
                    0
                } else {
                    self.cpu_share()
                };
                (host_weights(tables, &named, cpu_share), named)
            }
        };
        let mut target = self.target;
        if !named.is_empty() {
            // Where weights are not on the card, copies of others are not worth their place, and those of these even less.
            target.gemm = GemmImpl::Native;
        }
        let mut prepared = self.compile(target, &host)?;
        let missing = over(&prepared);
        let mut given_up = Vec::new();
        let all_copies = prepared.memory.expanded_weights;
        let may_leave = *self.placement == Placement::Auto;
        if missing > 0 && may_leave && host.tables == TableMemory::Device {
            host.tables = TableMemory::Host;
            prepared = self.compile(target, &host)?;
            if prepared.memory.host_tables > 0 {
                given_up.push(format!(
                    "tables are looked up in host memory: {}, a few kilobytes per token over the bus",
                    size(prepared.memory.host_tables)
                ));
            }
        }
        if missing > 0 && target.gemm == GemmImpl::CublasLt {
            let layers = layer_count(self.plan);
            let mut first = layers;
            while first > 0 && over(&prepared) > 0 {
                let copies = |first| {
                    let behind = weights_from_layer(self.plan, first).collect();
                    prepared.weights.copies_of(&behind) as u64
                };
                first = (0..first)
                    .rev()
                    .find(|first| copies(*first) >= over(&prepared))
                    .unwrap_or(0);
                target.first_uncopied_layer = (first > 0).then_some(first);
                if first == 0 {
                    target.gemm = GemmImpl::Native;
                }
                prepared = self.compile(target, &host)?;
            }
            let gone = size(all_copies.saturating_sub(prepared.memory.expanded_weights));
            if first == 0 {
                given_up.push(format!(
                    "no layer has f16 copies of its weights ({gone}): prompts are read somewhat slower"
                ));
            } else if first < layers {
                given_up.push(format!(
                    "layers {first} to {} have no f16 copies of their weights ({gone}): prompts are read somewhat slower there",
                    layers - 1
                ));
            }
        }
        let mut gone = 0;
        while may_leave && gone < units.len() && over(&prepared) > 0 {
            gone += fewest_that_free(&units[gone..], &prepared.weights, over(&prepared));
            host = host_weights(TableMemory::Host, &units[..gone], self.cpu_share());
            prepared = self.compile(target, &host)?;
        }
        let gone = match self.placement {
            Placement::Given(_) => &named,
            _ => &units[..gone],
        };
        let lines = offload::describe(gone, &prepared.weights, host.cpu_share, self.rates);
        given_up.extend(lines);
        let cpu = (host.cpu_share > 0).then_some(host.cpu_share);
        let given = match self.placement {
            Placement::Given(parts) => parts.cpu,
            Placement::Auto | Placement::Card => None,
        };
        prepared.memory.placement = placement(gone, prepared.memory.host_tables > 0, given.or(cpu));
        Ok(Fitted {
            prepared,
            given_up,
            missing,
        })
    }
}

fn layer_count(plan: &Plan) -> usize {
    let layers = plan.steps.iter().filter_map(|s| plan.origin(s).layer);
    layers.max().map_or(0, |last| last + 1)
}

/// A line for a person about the same model in Q4_0, where that is much smaller.
fn smaller_file(weights: &Weights) -> Option<String> {
    let tensors = weights.file().tensors();
    let (mut now, mut then) = (0, 0);
    for tensor in tensors {
        now += tensor.bytes;
        then += match tensor.shape.as_slice() {
            [columns, _, ..] if columns.is_multiple_of(32) => {
                tensor.shape.iter().product::<usize>() / 32 * 18
            }
            _ => tensor.bytes,
        };
    }
    (then < now / 5 * 4).then(|| {
        format!(
            "a file of this model in Q4_0 would have {} of weights instead of {}",
            size(then),
            size(now)
        )
    })
}

/// The bytes that keys and values in Q8_0 would save.
fn smaller_kv(plan: &Plan, options: &CompileOptions) -> usize {
    let bytes = |kv: PerGroup<KvType>| {
        let bytes = kv_bytes(
            plan,
            &CompileOptions {
                kv,
                ..options.clone()
            },
        );
        bytes.full + bytes.sliding
    };
    bytes(options.kv).saturating_sub(bytes(KvType::Q8_0.into()))
}

pub(crate) fn size(bytes: usize) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    match mib {
        ..1024.0 => format!("{mib:.1} MiB"),
        _ => format!("{:.2} GiB", mib / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use carat_gguf::QuantType;
    use carat_model::{Model, backend::Batching, gemma4, host_steps::HostNetwork};
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;
    use crate::{
        choices::{Alternative, Alternatives},
        compile::weights::Memory,
        config::Fusion,
        kernel::{WeightFormat, WeightOperand},
        placement::WeightKind,
    };

    const ROWS: usize = 64;

    fn options() -> CompileOptions {
        CompileOptions {
            pages: PerGroup {
                full: 8,
                sliding: 8,
            },
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: ROWS,
            max_sampled: 8,
            probe: false,
            batching: Batching::Fast,
        }
    }

    /// All products have f16 copies.
    fn cublaslt() -> Target {
        Target {
            gemm: GemmImpl::CublasLt,
            alternatives: Alternatives::default().with(Alternative::PackedFrom(usize::MAX)),
            ..Target::hopper(Fusion::On, ROWS)
        }
    }

    fn fitted(
        model: &Model,
        choice: (Target, TableMemory, &Placement),
        free_bytes: u64,
    ) -> Result<Prepared, BackendError> {
        let plan = gemma4::plan(model);
        fitting(
            &plan,
            &model.weights,
            &options(),
            choice,
            free_bytes,
            &Rates::default,
        )
    }

    /// The model compiled for so many bytes less than it would like.
    fn less(variant: Variant, missing: u64) -> (Prepared, u64) {
        let model = Tiny::new(variant, QuantType::Q8_0).model();
        let within = |free_bytes| {
            let choice = (cublaslt(), TableMemory::Device, &Placement::Auto);
            fitted(&model, choice, free_bytes).unwrap()
        };
        let all = within(u64::MAX).memory.device_bytes();
        let free_bytes = all - missing;
        (within(free_bytes), free_bytes)
    }

    #[test]
    fn nothing_is_given_up_where_all_fits() {
        let (prepared, _) = less(Variant::E4b, 0);
        assert_eq!(prepared.target.gemm, GemmImpl::CublasLt);
        assert_eq!(prepared.memory.host_tables, 0);
        assert!(prepared.memory.given_up.is_empty());
    }

    #[test]
    fn tables_leave_the_card_before_any_copy_does() {
        let (all, _) = less(Variant::E4b, 0);
        let (prepared, free_bytes) = less(Variant::E4b, 1);
        assert!(prepared.memory.device_bytes() <= free_bytes);
        assert!(prepared.memory.host_tables > 0);
        assert_eq!(
            prepared.memory.expanded_weights,
            all.memory.expanded_weights
        );
        let lines = &prepared.memory.given_up;
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("host memory"), "{lines:?}");
        assert!(lines[1].contains("--kv-type q8_0"), "{lines:?}");
    }

    #[test]
    fn the_last_layers_lose_their_copies_first_and_the_first_keep_theirs() {
        let (all, _) = less(Variant::Dense12b, 0);
        let copies = all.memory.expanded_weights as u64;
        let tables = less(Variant::Dense12b, 1).0.memory.host_tables as u64;
        let (prepared, free_bytes) = less(Variant::Dense12b, tables + copies / 4);
        assert!(prepared.memory.device_bytes() <= free_bytes);
        assert_eq!(prepared.target.gemm, GemmImpl::CublasLt);
        let kept = prepared.memory.expanded_weights as u64;
        assert!(0 < kept && kept < copies, "{kept} of {copies}");
        let lines = &prepared.memory.given_up;
        assert!(lines.iter().any(|l| l.starts_with("layers ")), "{lines:?}");
    }

    /// Operands in host memory, tables aside.
    fn offloaded(prepared: &Prepared) -> BTreeSet<WeightOperand> {
        let named = prepared.weights.named();
        let there =
            named.filter(|(w, p)| p.memory == Memory::Host && w.format != WeightFormat::Table);
        there.map(|(operand, _)| operand.clone()).collect()
    }

    #[test]
    fn matrices_leave_as_far_as_the_budget_asks_and_no_further() {
        for variant in [Variant::E4b, Variant::Dense12b, Variant::Moe26b] {
            let model = Tiny::new(variant, QuantType::Q8_0).model();
            for target in [cublaslt(), Target::hopper(Fusion::On, ROWS)] {
                let within = |free_bytes| {
                    let choice = (target, TableMemory::Device, &Placement::Auto);
                    fitted(&model, choice, free_bytes).unwrap()
                };
                let all = within(u64::MAX).memory.device_bytes();
                let smallest = within(0).memory;
                let least = smallest.device_bytes();
                // From where copies of weights, if any, are gone.
                let most = least + (smallest.host_weights + smallest.host_tables) as u64;
                assert!(most <= all, "{variant:?}: {most} of {all}");
                let mut before = BTreeSet::new();
                let mut sizes = BTreeSet::new();
                for part in 0..=64 {
                    let free_bytes = most - (most - least) * part / 64;
                    let prepared = within(free_bytes);
                    let memory = &prepared.memory;
                    assert!(memory.device_bytes() <= free_bytes, "{variant:?} {part}");
                    let there = offloaded(&prepared);
                    assert!(there.is_superset(&before), "{variant:?} {part}");
                    assert_eq!(there.is_empty(), memory.host_weights == 0);
                    if !there.is_empty() {
                        assert_eq!(prepared.target.gemm, GemmImpl::Native);
                        assert!(
                            memory
                                .given_up
                                .iter()
                                .any(|l| l.contains("through the bus")),
                            "{:?}",
                            memory.given_up
                        );
                    }
                    sizes.insert(there.len());
                    before = there;
                }
                assert!(sizes.len() > 6, "{variant:?}: {sizes:?}");
                assert!(within(least - 1).memory.device_bytes() > least - 1);
            }
        }
    }

    #[test]
    fn a_byte_too_few_moves_the_experts_of_one_layer() {
        let model = Tiny::new(Variant::Moe26b, QuantType::Q8_0).model();
        let within = |free_bytes| {
            let target = Target::hopper(Fusion::On, ROWS);
            let choice = (target, TableMemory::Host, &Placement::Auto);
            fitted(&model, choice, free_bytes).unwrap()
        };
        let all = within(u64::MAX).memory.device_bytes();
        let prepared = within(all - 1);
        let experts = model.layers[1].moe.as_ref().expect("has experts");
        let expected = WeightOperand::interleaved(&[experts.gate, experts.up]);
        assert_eq!(offloaded(&prepared), [expected].into());
        let lines = &prepared.memory.given_up;
        assert!(
            lines[0].starts_with("experts of 1 layer in host memory"),
            "{lines:?}"
        );
        assert!(
            lines[1].starts_with("each token of an answer reads"),
            "{lines:?}"
        );
        let [.., more, kv, _] = lines.as_slice() else {
            panic!("{lines:?}");
        };
        assert!(more.contains("1 GiB more, 0.0 MiB of weights"), "{more}");
        assert!(kv.contains("--kv-type q8_0, 0.0 MiB of weights"), "{kv}");
    }

    #[test]
    fn what_does_not_fit_at_all_is_the_smallest_there_is() {
        let model = Tiny::new(Variant::Dense12b, QuantType::Q8_0).model();
        let choice = (cublaslt(), TableMemory::Device, &Placement::Auto);
        let prepared = fitted(&model, choice, 0).unwrap();
        assert_eq!(prepared.target.gemm, GemmImpl::Native);
        let lines = &prepared.memory.given_up;
        assert!(lines.iter().any(|l| l.contains("no layer")), "{lines:?}");
        assert!(
            lines.iter().any(|l| l.contains("the output matrix")),
            "{lines:?}"
        );
    }

    #[test]
    fn a_smaller_quantization_is_mentioned_where_it_would_help() {
        let told = |quant: QuantType, free_bytes: u64| {
            let model = Tiny::new(Variant::Dense12b, quant).model();
            let choice = (cublaslt(), TableMemory::Device, &Placement::Auto);
            let prepared = fitted(&model, choice, free_bytes);
            let lines = prepared.unwrap().memory.given_up;
            lines.iter().any(|line| line.contains("in Q4_0 would have"))
        };
        assert!(told(QuantType::Q8_0, 0) && told(QuantType::F16, 0));
        assert!(!told(QuantType::Q4_0, 0) && !told(QuantType::Q8_0, u64::MAX));
    }

    #[test]
    fn what_is_named_lies_in_host_memory_and_nothing_else() {
        let model = Tiny::new(Variant::Moe26b, QuantType::Q8_0).model();
        let plan = gemma4::plan(&model);
        let place = |text: &str, free_bytes: u64| {
            let placement = Placement::Given(text.parse().unwrap());
            let choice = (cublaslt(), TableMemory::Device, &placement);
            let prepared = fitted(&model, choice, free_bytes);
            prepared.map_err(|error| error.to_string())
        };
        let all = place("", u64::MAX).unwrap();
        assert!(offloaded(&all).is_empty() && all.memory.given_up.is_empty());
        let some = place("tables\nexperts 1", u64::MAX).unwrap();
        let experts = leaving_order(&plan, &model.weights).into_iter();
        let experts = experts.filter(|u| u.kind == WeightKind::Experts && u.layer == Some(1));
        let named: BTreeSet<_> = experts.flat_map(|unit| unit.weights).collect();
        let there = offloaded(&some).into_iter().flat_map(|o| o.parts);
        assert_eq!(there.collect::<BTreeSet<_>>(), named);
        // It has no tables.
        assert_eq!(some.memory.placement.to_string(), "experts 1\n");
        assert!(some.memory.given_up[0].starts_with("experts of 1 layer in host memory"));
        // However little there is, nothing follows.
        let tight = place("experts 1", 0).unwrap();
        assert_eq!(offloaded(&tight).len(), offloaded(&some).len());
        assert!(tight.memory.device_bytes() > 0 && tight.memory.expanded_weights == 0);

        let problem = |text: &str| place(text, u64::MAX).err().unwrap_or_default();
        assert_eq!(
            problem("experts 70"),
            "the placement names what is not there: this model has no `experts` weights in a layer 70"
        );
        assert_eq!(
            problem("per-layer"),
            "the placement names what is not there: this model has no `per-layer` weights"
        );
    }

    #[test]
    fn what_a_card_gets_by_itself_is_a_placement_that_fits_it() {
        for variant in [Variant::E4b, Variant::Dense12b, Variant::Moe26b] {
            let model = Tiny::new(variant, QuantType::Q8_0).model();
            let within = |placement: &Placement, free_bytes| {
                let choice = (
                    Target::hopper(Fusion::On, ROWS),
                    TableMemory::Device,
                    placement,
                );
                fitted(&model, choice, free_bytes).unwrap()
            };
            let all = within(&Placement::Card, u64::MAX).memory.device_bytes();
            assert_eq!(within(&Placement::Card, 0).memory.device_bytes(), all);
            let least = within(&Placement::Auto, 0).memory.device_bytes();
            for part in 0..=8 {
                let free_bytes = least + (all - least) * part / 8;
                let auto = within(&Placement::Auto, free_bytes).memory;
                let given = Placement::Given(auto.placement.to_string().parse().unwrap());
                let memory = within(&given, free_bytes).memory;
                assert!(memory.device_bytes() <= free_bytes, "{variant:?}");
                assert_eq!(memory.placement, auto.placement);
            }
        }
    }

    #[test]
    fn the_cpu_has_the_share_that_rates_or_the_caller_give_it() {
        let model = Tiny::new(Variant::Moe26b, QuantType::Q8_0).model();
        let place = |text: &str, rates: Rates| {
            let placement = Placement::Given(text.parse().unwrap());
            let choice = (cublaslt(), TableMemory::Device, &placement);
            let plan = gemma4::plan(&model);
            let weights = &model.weights;
            fitting(&plan, weights, &options(), choice, u64::MAX, &|| rates).unwrap()
        };
        let known = Rates {
            bus: Some(50e9),
            host: Some(75e9),
        };
        let shared = place("experts", known);
        assert_eq!(shared.memory.placement.cpu, Some(60));
        assert_eq!(shared.host_networks.len(), model.layers.len());
        let lines = &shared.memory.given_up;
        assert!(
            lines[0].contains("60 % of them multiplied by the CPU in answers"),
            "{lines:?}"
        );
        assert!(lines[1].contains("by the CPU and"), "{lines:?}");
        assert!(lines[1].ends_with("at 75.0 and 50.0 GB/s"), "{lines:?}");
        // What a caller says stands, also where nothing is known.
        let given = place("experts 0\ncpu 100", Rates::default());
        assert_eq!(given.memory.placement.to_string(), "experts 0\ncpu 100\n");
        assert!(given.host_networks.iter().all(HostNetwork::is_whole));
        for (text, rates) in [("experts\ncpu 0", known), ("experts", Rates::default())] {
            assert!(place(text, rates).host_networks.is_empty());
        }
        let plain = Target::hopper(Fusion::Off, ROWS);
        let placement = Placement::Given("experts\ncpu 60".parse().unwrap());
        let plain = fitted(&model, (plain, TableMemory::Device, &placement), u64::MAX).unwrap();
        let lines = &plain.memory.given_up;
        assert!(plain.host_networks.is_empty() && !lines[0].contains("CPU"));
        // Attention is the card's.
        assert!(place("attention\noutput", known).host_networks.is_empty());
    }
}
