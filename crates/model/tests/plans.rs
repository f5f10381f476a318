//! The plan of every variant, whole, and what a file must hold to have one.
//!
//! `UPDATE_EXPECT=1 cargo test -p carat-model --test plans` rewrites the snapshots; read their diff.

use std::{collections::HashSet, sync::Arc};

use carat_gguf::{
    Gguf, QuantType,
    writer::{Field, Writer, write_tensor},
};
use carat_model::{
    Model, ModelError, gemma4,
    kv::{KvGroup, KvType, PAGE_TOKENS},
    layout::{self, Layout},
    plan::{KvSlot, Listing, Plan, Rows},
    synthetic::Dimensions,
};
use carat_testkit::tiny::{Tiny, Variant};
use expect_test::{ExpectFile, expect_file};

fn check(variant: Variant, expected: &ExpectFile) {
    let model = Tiny::new(variant, QuantType::Q8_0).model();
    let plan = gemma4::plan(&model);
    expected.assert_eq(&Listing(&plan, &model.weights).to_string());
}

#[test]
fn plan_of_e2b() {
    check(Variant::E2b, &expect_file!["snapshots/e2b.txt"]);
}

#[test]
fn plan_of_e4b() {
    check(Variant::E4b, &expect_file!["snapshots/e4b.txt"]);
}

#[test]
fn plan_of_12b() {
    check(Variant::Dense12b, &expect_file!["snapshots/12b.txt"]);
}

#[test]
fn plan_of_26b_a4b() {
    check(Variant::Moe26b, &expect_file!["snapshots/26b-a4b.txt"]);
}

#[test]
fn plan_of_31b() {
    check(Variant::Dense31b, &expect_file!["snapshots/31b.txt"]);
}

/// Heads of 32 and more fill whole groups; smaller ones have one to themselves.
#[test]
fn pages_have_the_bytes_of_the_type_they_are_of() {
    for variant in Variant::ALL {
        let mut tiny = Tiny::new(variant, QuantType::F32);
        (
            tiny.dimensions.head_dim.sliding,
            tiny.dimensions.head_dim.full,
        ) = (64, 128);
        let plan = gemma4::plan(&tiny.model());
        let (halves, codes) = (
            layout::page_bytes(&plan, KvType::F16.into()),
            layout::page_bytes(&plan, KvType::Q8_0.into()),
        );
        // Keys of the larger models follow from values in full layers.
        let tensors = match variant {
            Variant::E2b | Variant::E4b => 2,
            Variant::Dense12b | Variant::Moe26b | Variant::Dense31b => 1,
        };
        let full = plan.slots.iter().filter(|slot| slot.head_dim == 128);
        let values: usize = full
            .map(|slot| tensors * slot.kv_heads * slot.head_dim)
            .sum();
        assert_eq!(halves.full, 2 * values * PAGE_TOKENS);
        assert_eq!(codes.full, 34 * (values / 32) * PAGE_TOKENS);
        assert_eq!(codes.sliding * 64, halves.sliding * 34);
    }
    assert_eq!(KvType::Q8_0.head_bytes(16), 34);
    assert_eq!(KvType::Q8_0.head_bytes(33), 68);
}

#[test]
fn keys_follow_from_values_where_both_are_one_projection() {
    for variant in Variant::ALL {
        let mut tiny = Tiny::new(variant, QuantType::F32);
        if matches!(variant, Variant::E2b | Variant::E4b) {
            assert_eq!(gemma4::plan(&tiny.model()).tied_keys(), [], "{variant:?}");
            continue;
        }
        tiny.dimensions.kinds = Dimensions::pattern(9, 3);
        tiny.dimensions.ffn = vec![64; 9];
        let model = tiny.model();
        let plan = gemma4::plan(&model);
        let tied = plan.tied_keys();
        assert_eq!(tied.len(), 3, "{variant:?}");
        let full = |slot: &KvSlot| plan.slot(*slot).group == KvGroup::Full;
        let expected: Vec<KvSlot> = (0..plan.slots.len() as u32)
            .map(KvSlot)
            .filter(full)
            .collect();
        let slots: Vec<KvSlot> = tied.iter().map(|(slot, _)| *slot).collect();
        assert_eq!(slots, expected, "{variant:?}");
        for (slot, keys) in &tied {
            let own = model.layers[slot.0 as usize].own_kv.as_ref();
            assert_eq!(Some(keys.weight), own.map(|kv| kv.k_norm));
            // A quarter of a head turns.
            let rope = plan.rope(keys.rope);
            assert_eq!(rope.turning_pairs(), rope.head_dim / 8);
        }
        assert_eq!(
            plan.with_products_gathered().tied_keys(),
            tied,
            "{variant:?}"
        );

        // A table that turns nothing.
        let mut still = plan.clone();
        for rope in &mut still.ropes {
            rope.frequencies.fill(0.0);
        }
        assert_eq!(still.tied_keys(), [], "{variant:?}");

        // One layer of another shape, and all have keys.
        let mut other = plan.clone();
        other.slots[tied[1].0.0 as usize].kv_heads *= 2;
        assert_eq!(other.tied_keys(), [], "{variant:?}");
    }
}

#[test]
fn nothing_after_the_last_kv_layer_runs_for_rows_that_are_not_sampled() {
    for variant in Variant::ALL {
        let model = Tiny::new(variant, QuantType::F32).model();
        let plan = gemma4::plan(&model);
        let cut = plan
            .steps
            .iter()
            .position(|s| s.step.name() == "select_sampled")
            .expect("every plan selects its sampled rows");
        let store = plan
            .steps
            .iter()
            .rposition(|s| s.step.name() == "store_kv")
            .expect("every plan stores");
        assert!(store < cut, "{variant:?} stores after rows ended");
        let after = plan.steps[cut..]
            .iter()
            .filter(|s| plan.step_rows(&s.step) == Rows::All);
        assert_eq!(after.count(), 0, "{variant:?}");
    }
}

#[test]
fn gathering_puts_products_of_one_value_together_and_nothing_else_moves() {
    for variant in Variant::ALL {
        let plan = gemma4::plan(&Tiny::new(variant, QuantType::F32).model());
        let gathered = plan.with_products_gathered();
        let labels =
            |plan: &Plan| -> Vec<String> { plan.steps.iter().map(|s| s.label.clone()).collect() };
        let at = |label: &str| labels(&gathered).iter().position(|l| l == label);
        let q = at("L0.attn.q").expect("every layer has queries");
        assert_eq!(at("L0.attn.k"), Some(q + 1), "{variant:?}");
        // Behind the cut queries are of other rows, and stay where they are.
        let cut = at(&format!("L{}.attn.select_normed", plan_cut(&plan)));
        assert!(
            at(&format!("L{}.attn.q", plan_cut(&plan))) > cut,
            "{variant:?}"
        );
        let without = |plan: &Plan| -> Vec<String> {
            let moved = |label: &String| !label.ends_with(".attn.q");
            labels(plan).into_iter().filter(moved).collect()
        };
        assert_eq!(without(&plan), without(&gathered));
        let mut written = HashSet::new();
        for labelled in &gathered.steps {
            for input in labelled.step.inputs() {
                assert!(written.contains(&input), "{variant:?}: {}", labelled.label);
            }
            written.extend(labelled.step.out());
        }
    }
}

/// The layer in which rows that are not sampled end.
fn plan_cut(plan: &Plan) -> usize {
    let select = plan
        .steps
        .iter()
        .find(|s| s.step.name() == "select_sampled");
    let section = select.and_then(|s| s.section).expect("every plan selects");
    section.layer().expect("in a layer")
}

#[test]
fn values_that_live_at_the_same_time_never_share_a_buffer() {
    for variant in Variant::ALL {
        let plan = gemma4::plan(&Tiny::new(variant, QuantType::F32).model());
        let layout = Layout::shared(&plan);
        // Replays the plan, remembering which value each buffer holds.
        let mut holds = vec![None; layout.buffers.len()];
        for labelled in &plan.steps {
            for input in labelled.step.inputs() {
                assert_eq!(
                    holds[layout.buffer(input)],
                    Some(input),
                    "{variant:?} {}",
                    labelled.label
                );
            }
            if let Some(out) = labelled.step.out() {
                assert!(
                    labelled
                        .step
                        .inputs()
                        .all(|i| layout.buffer(i) != layout.buffer(out))
                );
                let buffer = layout.buffers[layout.buffer(out)];
                assert!(buffer.columns >= plan.columns(out) && buffer.rows == plan.rows(out));
                holds[layout.buffer(out)] = Some(out);
            }
        }
        for kept in [plan.hidden, plan.logits] {
            assert_eq!(holds[layout.buffer(kept)], Some(kept));
        }
        assert!(
            layout.buffers.len() < plan.value_count() / 4,
            "{variant:?} shares hardly anything"
        );
    }
}

/// A tiny model whose file has one text replaced by another of the same length.
fn edited(variant: Variant, from: &str, to: &str) -> Result<Model, ModelError> {
    assert_eq!(from.len(), to.len());
    let mut bytes = Tiny::new(variant, QuantType::F32).bytes();
    let at = bytes
        .windows(from.len())
        .position(|w| w == from.as_bytes())
        .expect("the file has it");
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    Model::load(Arc::new(Gguf::from_bytes("edited", bytes)?))
}

fn refusal(variant: Variant, from: &str, to: &str) -> String {
    edited(variant, from, to)
        .err()
        .expect("refused")
        .to_string()
}

#[test]
fn a_missing_tensor_is_named_with_its_kind_of_layer() {
    assert_eq!(
        refusal(
            Variant::Dense12b,
            "blk.1.attn_q.weight",
            "blk.1.attn_x.weight"
        ),
        "tensor `blk.1.attn_q.weight` is missing (needed by a sliding-window layer)"
    );
    assert_eq!(
        refusal(
            Variant::E2b,
            "per_layer_token_embd.weight",
            "per_layer_token_embx.weight"
        ),
        "tensor `per_layer_token_embd.weight` is missing"
    );
}

#[test]
fn another_architecture_is_named() {
    let error = refusal(Variant::E2b, "gemma4", "llama4");
    assert!(error.contains("architecture is `llama4`"), "{error}");
}

#[test]
fn a_missing_setting_is_named() {
    let error = refusal(
        Variant::E2b,
        "gemma4.embedding_length",
        "gemma4.embedding_lengtx",
    );
    assert!(
        error.contains("`gemma4.embedding_length` is missing"),
        "{error}"
    );
}

#[test]
fn a_wrong_shape_gives_both_shapes() {
    let mut tiny = Tiny::new(Variant::Dense12b, QuantType::F32);
    let narrow = tiny.model();
    tiny.dimensions.dim *= 2;
    let wide = tiny.bytes();
    // The wide model's data under the narrow model's width.
    let key = b"gemma4.embedding_length";
    let at = wide
        .windows(key.len())
        .position(|w| w == key)
        .expect("there")
        + key.len()
        + 4;
    let mut bytes = wide;
    bytes[at..at + 4].copy_from_slice(&(narrow.config.dim as u32).to_le_bytes());
    let error = Model::load(Arc::new(Gguf::from_bytes("edited", bytes).expect("opens")))
        .err()
        .expect("refused");
    assert!(matches!(error, ModelError::Shape { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("in the file") && text.contains("expected"),
        "{text}"
    );
}

#[test]
fn keys_and_values_of_sharing_layers_are_not_bound() {
    let model = Tiny::new(Variant::E2b, QuantType::F32).model();
    let first_shared = model.config.kv_layers;
    assert!(
        model.layers[first_shared..]
            .iter()
            .all(|l| l.own_kv.is_none())
    );
    // The last of the same kind, not merely the one before.
    for (i, layer) in model.config.layers.iter().enumerate().skip(first_shared) {
        let source = layer.kv_source;
        assert!(source < first_shared && model.config.layers[source].kind == layer.kind);
        let later = &model.config.layers[source + 1..first_shared];
        assert!(later.iter().all(|l| l.kind != layer.kind), "layer {i}");
    }
}

#[test]
fn heads_of_a_sharing_layer_must_divide_by_those_of_its_source() {
    let mut tiny = Tiny::new(Variant::E4b, QuantType::F32);
    tiny.dimensions.kv_heads.sliding = 2;
    tiny.dimensions.kv_heads.full = 2;
    let file = tiny.file();
    let layers = tiny.dimensions.kinds.len();
    // The last layer has one KV head by its own account, and shares a layer that has two.
    let (mut heads, mut kv_heads) = (vec![4; layers], vec![2; layers]);
    (heads[layers - 1], kv_heads[layers - 1]) = (3, 1);
    let mut writer = Writer::default();
    for (key, value) in file.metadata().iter() {
        match key {
            "gemma4.attention.head_count" => writer.field(key, &Field::U32s(&heads)),
            "gemma4.attention.head_count_kv" => writer.field(key, &Field::U32s(&kv_heads)),
            _ => writer.copy(key, value),
        }
    }
    let mut data = Vec::new();
    for info in file.tensors() {
        writer.tensor(&info.name, &info.shape, QuantType::F32);
        let tensor = file.tensor(&info.name).unwrap().unwrap();
        let mut values = vec![0.0; info.shape.iter().product()];
        tensor.quant.dequantize(tensor.bytes, &mut values);
        let bytes: Vec<u8> = values.iter().flat_map(|v: &f32| v.to_le_bytes()).collect();
        write_tensor(&mut data, &bytes).unwrap();
    }
    let mut bytes = Vec::new();
    writer.write_head(&mut bytes).unwrap();
    bytes.extend(data);
    let error = Model::load(Arc::new(Gguf::from_bytes("odd heads", bytes).unwrap()))
        .err()
        .expect("refused")
        .to_string();
    assert!(
        error.contains("head_count_kv` is 2") && error.contains("3 query heads"),
        "{error}"
    );
}
