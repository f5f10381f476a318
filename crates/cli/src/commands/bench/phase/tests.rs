use std::collections::BTreeMap;

use carat_cuda::{Fusion, listing};
use carat_gguf::QuantType;
use carat_model::{gemma4, kv::KvType};
use carat_testkit::tiny::{Tiny, Variant};

use super::*;

/// A model whose heads and columns the fast kernels take, as those of real files.
fn tiny(variant: Variant) -> Tiny {
    let mut tiny = Tiny::new(variant, QuantType::Q8_0);
    let heads = &mut tiny.shape.head_dim;
    (heads.sliding, heads.full) = (256, 512);
    tiny
}

/// Labels of launches as the backend makes them.
fn labels(plan: &Plan, weights: &Weights, rows: usize) -> Vec<String> {
    let listing = listing(plan, weights, Fusion::On, rows).expect("tiny models are supported");
    let label = |line: &str| {
        let cut = [" all ", " sampled "].iter().find_map(|m| line.find(m));
        line[..cut.expect("rows follow the label")]
            .trim_end()
            .to_owned()
    };
    listing.lines().map(label).collect()
}

#[test]
fn every_launch_of_every_variant_has_a_phase() {
    for variant in Variant::ALL {
        let model = tiny(variant).model();
        let plan = gemma4::plan(&model);
        let phases = Phases::new(&plan, &model.weights);
        for rows in [1, 64] {
            let labels = labels(&plan, &model.weights, rows);
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            let found = phases.of_launches(&labels);
            let strange: Vec<_> = (labels.iter().zip(&found))
                .filter(|(label, phase)| **phase == Phase::Other && !label.ends_with(".narrow"))
                .collect();
            assert!(strange.is_empty(), "{variant:?}, {rows} rows: {strange:?}");
            let mut expected = vec![
                Phase::Embed,
                Phase::Qkv,
                Phase::AttentionSliding,
                Phase::AttentionFull,
                Phase::O,
                Phase::Ffn,
                Phase::Head,
            ];
            if model.config.ple.is_some() {
                expected.push(Phase::Ple);
            }
            if model.config.experts.is_some() {
                expected.push(Phase::Experts);
            }
            for phase in Phase::ALL {
                let there = found.contains(&phase);
                let may_be = matches!(phase, Phase::Norm | Phase::Other);
                assert!(may_be || there == expected.contains(&phase), "{phase:?}");
            }
        }
    }
}

#[test]
fn launches_and_steps_agree_on_phases() {
    for variant in Variant::ALL {
        let model = tiny(variant).model();
        let plan = gemma4::plan(&model);
        let phases = Phases::new(&plan, &model.weights);
        let batch = BatchShape {
            rows: 64,
            sampled: 1,
            depth: 0,
            kv: KvType::F16,
        };
        let mut costs: BTreeMap<Phase, Cost> = BTreeMap::new();
        for (phase, cost) in phases.costs(batch) {
            *costs.entry(phase).or_default() += cost;
        }
        let total: Cost = costs.values().copied().sum();
        assert_eq!(total, cost::of(&plan, &model.weights, batch));
        let none = [Phase::Norm, Phase::Sample, Phase::Other];
        for phase in none {
            let cost = costs.get(&phase).copied().unwrap_or_default();
            assert_eq!(cost, Cost::default(), "{variant:?}: {phase:?}");
        }
        let labels = labels(&plan, &model.weights, 64);
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        let launched = phases.of_launches(&labels);
        for (phase, cost) in costs {
            let free = cost == Cost::default();
            assert!(free || launched.contains(&phase), "{variant:?}: {phase:?}");
        }
    }
}

#[test]
fn names_decide() {
    let model = tiny(Variant::E4b).model();
    let plan = gemma4::plan(&model);
    let phases = Phases::new(&plan, &model.weights);
    let labels = [
        ("embed.embed", Phase::Embed),
        ("embed.per_layer_model_proj", Phase::Ple),
        ("embed.layer_inputs", Phase::Ple),
        ("L0.norm", Phase::Norm),
        ("L0.convert", Phase::Qkv),
        ("L0.attn_q+attn_k+attn_v", Phase::Qkv),
        ("L0.qkv norm rope", Phase::Qkv),
        ("L0.attend sliding", Phase::AttentionSliding),
        ("L2.attend full", Phase::AttentionFull),
        ("L2.attn.attend", Phase::AttentionFull),
        ("L0.attn_output", Phase::O),
        ("L0.ffn_gate+ffn_up", Phase::Ffn),
        ("L0.gelu", Phase::Ffn),
        ("L0.ffn_down", Phase::Ffn),
        ("L0.inp_gate", Phase::Ple),
        ("L0.gelu", Phase::Ple),
        ("L0.proj", Phase::Ple),
        ("L0.ffn.route", Phase::Experts),
        ("L0.experts gate+up", Phase::Experts),
        ("head.norm", Phase::Head),
        ("head.token_embd", Phase::Head),
        ("head.softcap", Phase::Head),
        ("sample", Phase::Sample),
        ("L3.attn.narrow", Phase::Other),
    ];
    let (names, expected): (Vec<_>, Vec<_>) = labels.into_iter().unzip();
    assert_eq!(phases.of_launches(&names), expected);
    assert!(in_layer("L17.norm") && !in_layer("head.norm") && !in_layer("sample"));
}
