//! Models in too little memory: the same answers, and never more than the limit.

use std::collections::BTreeSet;

use carat_cuda::{CudaBackend, Graphs, Placement, PlacementError, Tier, WeightKind};
use carat_gguf::QuantType;
use carat_model::{evaluate, gemma4, reference::Reference};
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
        let less = harness::open(|config| config.memory_limit = Some(limit))?;
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
            config.memory_limit = limit;
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
