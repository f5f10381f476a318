//! Models in too little memory: the same answers, and never more than the limit.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_cuda::{
    CudaBackend, CudaConfig, Graphs, HostParts, MemoryLimit, Placement, PlacementError, Tier,
    WeightKind,
};
use carat_gguf::QuantType;
use carat_model::{
    backend::{Backend, BackendError},
    evaluate, gemma4,
    host_steps::{HostBackend, HostNetwork, HostSteps},
    reference::Reference,
    weights::Weights,
};
use carat_testkit::tiny::{Tiny, Variant};

use super::{harness, logits, same_bits, within};

/// Limits of memory between all that a model would take and the least it can do with.
const STEPS_OF_LIMIT: u64 = 16;

/// Whatever is given up for want of memory, logits stay within the bound of int8, and memory within the limit.
pub(super) fn short_of_memory(card: &CudaBackend, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q8_0);
    let (model, tokens) = (tiny.model(), tiny.prompt(45));
    let expected = logits(&Reference, &model, &tokens, 45)?;
    let options = evaluate::options(tokens.len(), 13);
    let plan = gemma4::plan(&model);
    let all = card
        .memory_plan(&plan, &model.weights, &options)
        .map_err(|e| e.to_string())?;
    let copies = all.expanded_weights as u64;
    // A byte too few, half of the copies, and more than there are of them.
    for missing in [1, copies / 2 + 1, copies + 1] {
        let limit = all.device_bytes() - missing.min(all.device_bytes() / 2);
        let less = harness::open(|config| config.memory_limit = Some(MemoryLimit::Buffers(limit)))?;
        let planned = less
            .memory_plan(&plan, &model.weights, &options)
            .map_err(|e| e.to_string())?;
        if planned.given_up.is_empty() {
            return Err(format!("nothing was given up for {missing} bytes"));
        }
        if planned.device_bytes() > limit {
            continue; // no smaller form is there: refused, which `backend` checks
        }
        let found = logits(less.as_ref(), &model, &tokens, 13)?;
        // A rounded score may choose another expert.
        let bound = match variant {
            Variant::Moe26b => 1.2e-1,
            _ => 5e-2,
        };
        within(&found, &expected, bound)
            .map_err(|e| format!("{missing} bytes too few: {e}; {:?}", planned.given_up))?;
        if less.peak_bytes() > limit {
            return Err(format!("{} of {limit} bytes held", less.peak_bytes()));
        }
    }
    Ok(())
}

/// A limit for the process leaves room for what the driver takes, now and later.
pub(super) fn limit_of_process() -> Result<(), String> {
    const LIMIT: u64 = 1 << 30;
    let card = harness::open(|config| config.memory_limit = Some(MemoryLimit::Process(LIMIT)))?;
    let driver: u64 = card.held_bytes().map(|(_, bytes)| bytes).sum();
    let free = card.memory().map_err(|e| e.to_string())?.free_bytes;
    if driver < 16 << 20 {
        return Err(format!("the driver is said to take {driver} bytes"));
    }
    if free == 0 || free + driver + LIMIT / 16 > LIMIT {
        return Err(format!("{free} bytes free beside the driver's {driver}"));
    }
    if card.peak_bytes() != driver {
        return Err(format!(
            "{} bytes at the peak, {driver} held",
            card.peak_bytes()
        ));
    }
    Ok(())
}

/// Wherever weights lie, logits are the same bits: matrices leave the card one after another as the limit falls, until none is left.
/// In small, medium and large batches, graphs and single launches.
pub(super) fn offloaded(tier: Tier, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q4_0);
    let (model, tokens) = (tiny.model(), tiny.prompt(230));
    let plan = gemma4::plan(&model);
    let open = |limit: Option<u64>, graphs: Graphs| {
        harness::open(|config| {
            config.tier = tier;
            config.graphs = graphs;
            config.memory_limit = limit.map(MemoryLimit::Buffers);
        })
    };
    // A graph is replayed from the third batch of its bucket on.
    for chunk in [5, 40, 75] {
        let options = evaluate::options(tokens.len(), chunk);
        let planned = |card: &CudaBackend| {
            let memory = card.memory_plan(&plan, &model.weights, &options);
            memory.map_err(|e| e.to_string())
        };
        let smallest = planned(open(Some(1), Graphs::On)?.as_ref())?;
        let least = smallest.device_bytes();
        // From where tables, and copies of weights, are the only thing that is not on the card.
        let most = least + smallest.host_weights as u64;
        let (mut on_card, mut there) = (None, BTreeSet::new());
        for part in 0..=STEPS_OF_LIMIT {
            let limit = most - (most - least) * part / STEPS_OF_LIMIT;
            let card = open(Some(limit), Graphs::On)?;
            let memory = planned(card.as_ref())?;
            // With f16 copies of weights, products are others.
            if memory.expanded_weights > 0 && memory.workspace > 0 {
                continue;
            }
            let found = logits(card.as_ref(), &model, &tokens, chunk)?;
            if card.peak_bytes() > limit {
                return Err(format!("{} of {limit} bytes held", card.peak_bytes()));
            }
            let expected = on_card.get_or_insert_with(|| found.clone());
            let what = format!("chunks of {chunk}, {:?}", memory.given_up);
            same_bits(&what, expected, &found)?;
            if there.insert(memory.host_weights) && part % 4 == 0 {
                let eager = logits(
                    open(Some(limit), Graphs::Off)?.as_ref(),
                    &model,
                    &tokens,
                    chunk,
                )?;
                same_bits(&format!("no graphs, {what}"), expected, &eager)?;
            }
        }
        if there.len() < 4 {
            return Err(format!("bytes in host memory: {there:?}"));
        }
    }
    Ok(())
}

/// Whatever is named to lie in host memory, logits are those of a card that has all; where that one multiplies f16 copies, those of
/// one without the output matrix.
pub(super) fn placed(tier: Tier, variant: Variant) -> Result<(), String> {
    let tiny = Tiny::new(variant, QuantType::Q4_0);
    let (model, tokens) = (tiny.model(), tiny.prompt(120));
    let on = |placement: Placement, chunk: usize| {
        let card = harness::open(|config| {
            config.tier = tier;
            config.placement = placement;
        })?;
        logits(card.as_ref(), &model, &tokens, chunk)
    };
    let read = |text: &str| text.parse().map_err(|e: PlacementError| e.to_string());
    let mut names = Vec::from(WeightKind::ALL.map(|kind| kind.name().to_owned()));
    names.extend(["experts 0", "feed-forward 1", "attention 0,2"].map(str::to_owned));
    names.push("tables\nattention 1".to_owned());
    for chunk in [1, 40] {
        let all_there = match tier {
            Tier::Best => Placement::Given(read("output")?),
            Tier::Portable => Placement::Card,
        };
        let expected = on(all_there, chunk)?;
        let mut placed = Vec::new();
        for name in &names {
            let given = Placement::Given(read(name)?);
            match on(given, chunk) {
                Ok(found) => same_bits(&format!("{name} in chunks of {chunk}"), &expected, &found)?,
                // Not every model has every kind.
                Err(error) if error.contains("what is not there") => continue,
                Err(error) => return Err(error),
            }
            placed.push(name.clone());
        }
        if placed.len() < 5 {
            return Err(format!("only {placed:?} could be placed"));
        }
        let all = placed.join("\n");
        let given = Placement::Given(read(&all)?);
        same_bits("all of them", &expected, &on(given, chunk)?)?;
    }
    Ok(())
}

/// Whatever the CPU computes beside the card, logits stay within the bound of int8; and for one placement they are the same bits,
/// for one row or several, with graphs or without, and however slow the CPU is.
pub(super) fn shared(tier: Tier, (variant, quant): (Variant, QuantType)) -> Result<(), String> {
    let tiny = Tiny::new(variant, quant);
    let (model, tokens) = (tiny.model(), tiny.prompt(24));
    let expected = logits(&Reference, &model, &tokens, 24)?;
    let on = |text: &str, chunk: usize, change: &dyn Fn(&mut CudaConfig)| {
        let card = harness::open(|config| {
            config.tier = tier;
            config.placement = Placement::Given(read(text));
            change(config);
        })?;
        let card = with_host(card, CpuBackend::new(&CpuConfig::default()));
        logits(&card, &model, &tokens, chunk)
    };
    let kinds = match variant {
        Variant::Moe26b => &[
            "experts",
            "experts 1\nfeed-forward 0",
            "experts\nfeed-forward",
        ][..],
        _ => &["feed-forward", "feed-forward 1"],
    };
    let bound = match variant {
        Variant::Moe26b => 1.2e-1,
        _ => 5e-2,
    };
    let all = on("output\ncpu 0", 1, &|_| ())?;
    for (i, kind) in kinds.iter().enumerate() {
        // Matrices that the card takes as a whole are the CPU's as a whole.
        let shares = match (i, quant.is_float()) {
            (0, false) => &[100, 60, 40][..],
            _ => &[60],
        };
        for share in shares {
            let text = format!("{kind}\ncpu {share}");
            let what = |how: &str| format!("{}, {how}", text.replace('\n', ", "));
            let found = on(&text, 1, &|_| ())?;
            within(&found, &expected, bound).map_err(|e| what(&e))?;
            if found == all {
                return Err(what("the CPU computes nothing"));
            }
            // A graph is replayed from the third batch of its bucket on.
            let rows = on(&text, 8, &|_| ())?;
            same_bits(&what("8 rows at a time"), &found, &rows)?;
            if *share != 60 {
                continue;
            }
            let eager = on(&text, 8, &|config| config.graphs = Graphs::Off)?;
            same_bits(&what("no graphs"), &found, &eager)?;
            let slow = harness::open(|config| {
                config.tier = tier;
                config.placement = Placement::Given(read(&text));
            })?;
            let slow = with_host(slow, SlowHost(CpuBackend::new(&CpuConfig::default())));
            let slow = logits(&slow, &model, &tokens, 8)?;
            same_bits(&what("a slow CPU"), &found, &slow)?;
        }
    }
    // Larger batches are the card's alone.
    let some = on(&format!("{}\ncpu 60", kinds[0]), 24, &|_| ())?;
    let none = on(&format!("{}\ncpu 0", kinds[0]), 24, &|_| ())?;
    same_bits("a prompt", &none, &some)
}

/// A failure of the CPU is an error of its batch, and the card does not wait for ever.
pub(super) fn failing_host(tier: Tier) -> Result<(), String> {
    let tiny = Tiny::new(Variant::Moe26b, QuantType::Q4_0);
    let (model, tokens) = (tiny.model(), tiny.prompt(10));
    let card = harness::open(|config| {
        config.tier = tier;
        config.placement = Placement::Given(read("experts\ncpu 60"));
    })?;
    let card = with_host(card, FailingHost);
    match logits(&card, &model, &tokens, 2) {
        Err(error) if error.contains("the CPU failed") => Ok(()),
        Err(error) => Err(format!("another error: {error}")),
        Ok(_) => Err("no error".to_owned()),
    }
}

fn read(placement: &str) -> HostParts {
    placement.parse().expect("a placement")
}

fn with_host(card: Arc<CudaBackend>, host: impl HostBackend + 'static) -> CudaBackend {
    let card = Arc::into_inner(card).expect("nobody else has it");
    card.with_host(Arc::new(host))
}

/// A CPU that takes its time.
struct SlowHost(CpuBackend);

struct SlowSteps(Box<dyn HostSteps>);

impl HostBackend for SlowHost {
    fn identity(&self) -> String {
        self.0.identity()
    }

    fn read_rate(&self) -> Option<f64> {
        None
    }

    fn host_steps(
        &self,
        weights: &Weights,
        networks: &[HostNetwork],
        max_rows: usize,
    ) -> Result<Box<dyn HostSteps>, BackendError> {
        let steps = self.0.host_steps(weights, networks, max_rows)?;
        Ok(Box::new(SlowSteps(steps)))
    }
}

#[expect(clippy::disallowed_methods, reason = "being late is what it is for")]
impl HostSteps for SlowSteps {
    fn gated(&mut self, network: usize, x: &[f32], route: &[f32], out: &mut [f32]) {
        std::thread::sleep(Duration::from_millis(2));
        self.0.gated(network, x, route, out);
    }

    fn down(&mut self, network: usize, inner: &[f32], route: &[f32], out: &mut [f32]) {
        std::thread::sleep(Duration::from_millis(2));
        self.0.down(network, inner, route, out);
    }
}

/// One that fails in the second layer.
struct FailingHost;

impl HostBackend for FailingHost {
    fn identity(&self) -> String {
        String::new()
    }

    fn read_rate(&self) -> Option<f64> {
        None
    }

    fn host_steps(
        &self,
        _weights: &Weights,
        _networks: &[HostNetwork],
        _max_rows: usize,
    ) -> Result<Box<dyn HostSteps>, BackendError> {
        Ok(Box::new(FailingHost))
    }
}

impl HostSteps for FailingHost {
    fn gated(&mut self, network: usize, _x: &[f32], _route: &[f32], out: &mut [f32]) {
        assert!(network == 0, "fails as it is told to");
        out.fill(0.0);
    }

    fn down(&mut self, _network: usize, _inner: &[f32], _route: &[f32], out: &mut [f32]) {
        out.fill(0.0);
    }
}
