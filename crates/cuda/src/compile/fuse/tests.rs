use carat_gguf::QuantType;
use carat_model::{
    Model, gemma4,
    plan::{Builder, Rope},
};
use carat_testkit::tiny::{Tiny, Variant};

use super::*;

fn model(variant: Variant) -> Model {
    Tiny::new(variant, QuantType::Q4_0).model()
}

/// The ops of one layer.
fn layer(model: &Model, number: usize) -> Vec<Op> {
    let prefix = format!("L{number}.");
    let ops = fuse(&gemma4::plan(model).with_products_gathered(), Fusion::On).into_iter();
    ops.filter(|op| op.label.starts_with(&prefix)).collect()
}

fn products(ops: &[Op]) -> impl Iterator<Item = &Product> {
    ops.iter().filter_map(|op| match &op.work {
        Work::Product(product) => Some(product),
        _ => None,
    })
}

/// The product of these matrices.
fn product_of(ops: &[Op], weights: &[Weight]) -> Product {
    let found = products(ops).find(|p| {
        p.parts
            .iter()
            .map(|part| part.w)
            .eq(weights.iter().copied())
    });
    found.expect("these are one product").clone()
}

/// Ops of a few steps over embedded rows, without the embedding.
fn works(model: &Model, build: impl FnOnce(&Builder<'_>, Value) -> (Value, Value)) -> Vec<Work> {
    let p = Builder::new(&model.weights);
    let x = p.embed("token", model.embedding, 1.0, Rows::All);
    let (hidden, logits) = build(&p, x);
    let ops = fuse(&p.finish(hidden, logits), Fusion::On).into_iter();
    ops.skip(1).map(|op| op.work).collect()
}

#[test]
fn ops_cover_all_steps_in_order() {
    for variant in Variant::ALL {
        let plan = gemma4::plan(&model(variant)).with_products_gathered();
        for fusion in [Fusion::On, Fusion::Off] {
            let mut next = 0;
            for op in fuse(&plan, fusion) {
                assert_eq!(op.steps.start, next);
                next = op.steps.end;
                let rows = plan.steps[op.steps].iter().map(|s| plan.step_rows(&s.step));
                assert!(rows.into_iter().all(|rows| rows == op.rows), "{}", op.label);
            }
            assert_eq!(next, plan.steps.len());
        }
    }
}

#[test]
fn without_fusion_every_step_is_an_op() {
    let plan = gemma4::plan(&model(Variant::E2b)).with_products_gathered();
    let ops = fuse(&plan, Fusion::Off);
    assert_eq!(ops.len(), plan.steps.len());
    assert!(ops.iter().all(|op| matches!(op.work, Work::Step(_))));
}

#[test]
fn queries_keys_and_values_are_one_product_with_their_norm() {
    let model = model(Variant::E4b);
    let first = &model.layers[0];
    let own = first.own_kv.as_ref().expect("the first layer stores");
    let weights = [first.q, own.k, own.v.expect("values of its own")];
    let product = product_of(&layer(&model, 0), &weights);
    assert!(matches!(product.input, Prologue::Norm(_)));
    assert_eq!(product.epilogue, Epilogue::Nothing);
}

#[test]
fn a_later_layer_begins_with_the_end_of_the_one_before() {
    let model = model(Variant::E4b);
    let layers = &model.layers;
    let own = layers[1].own_kv.as_ref().expect("the second layer stores");
    let weights = [layers[1].q, own.k, own.v.expect("values of its own")];
    let product = product_of(&layer(&model, 1), &weights);
    let Prologue::ResidualNorm(ResidualNorm {
        following, scale, ..
    }) = product.input
    else {
        panic!("{product:?}");
    };
    assert!(following.is_some());
    assert_ne!(scale, 1.0);
}

#[test]
fn gate_and_up_are_one_product_with_gelu() {
    let model = model(Variant::Dense12b);
    let ffn = &model.layers[0].ffn;
    let product = product_of(&layer(&model, 0), &[ffn.gate, ffn.up]);
    assert!(matches!(product.epilogue, Epilogue::Geglu { .. }));
    let Prologue::ResidualNorm(residual_norm) = product.input else {
        panic!("{product:?}");
    };
    assert!(residual_norm.following.is_some());
}

#[test]
fn the_per_layer_gate_takes_its_slice_and_reads_the_sum_itself() {
    let model = model(Variant::E2b);
    let plan = gemma4::plan(&model).with_products_gathered();
    let ops = layer(&model, 1);
    let gated = products(&ops).filter_map(|p| match p.epilogue {
        Epilogue::GeluMulSlice { other, column, out } => Some((p, other, column, out)),
        _ => None,
    });
    let [(product, other, column, out)] = gated.collect::<Vec<_>>()[..] else {
        panic!("one gate a layer");
    };
    // The second layer's slice.
    assert_eq!(column, plan.columns(out));
    assert!(plan.columns(other) > column);
    let Prologue::ResidualNorm(ResidualNorm {
        following: None,
        sum,
        ..
    }) = product.input
    else {
        panic!("{product:?}");
    };
    // The sum goes on beside the gate.
    let readers = plan
        .steps
        .iter()
        .filter(|s| s.step.inputs().any(|v| v == sum));
    assert_eq!(readers.count(), 2);
}

#[test]
fn attention_stores_first_where_the_layer_has_keys_of_its_own() {
    let model = model(Variant::E4b);
    let stores = |number: usize| -> Vec<bool> {
        let attends = layer(&model, number)
            .into_iter()
            .filter_map(|op| match op.work {
                Work::Attend(attend) => Some(attend.store.is_some()),
                _ => None,
            });
        attends.collect()
    };
    assert_eq!(stores(0), [true]);
    // Shares the keys of another.
    assert_eq!(stores(model.layers.len() - 1), [false]);
}

#[test]
fn keys_are_stored_alone_where_rows_end() {
    for variant in Variant::ALL {
        let ops = fuse(
            &gemma4::plan(&model(variant)).with_products_gathered(),
            Fusion::On,
        );
        let stores = ops.iter().filter(|op| matches!(op.work, Work::StoreKv(_)));
        let [store] = stores.collect::<Vec<_>>()[..] else {
            panic!("{variant:?}: one layer stores for more rows than attend");
        };
        assert_eq!(store.rows, Rows::All);
        let at = ops.iter().position(|op| std::ptr::eq(op, store));
        let after = &ops[at.expect("one of them") + 1..];
        let attend = after.iter().find(|op| matches!(op.work, Work::Attend(_)));
        assert_eq!(attend.expect("in the same layer").rows, Rows::Sampled);
    }
}

#[test]
fn inputs_of_layers_are_made_at_once() {
    let ops = fuse(
        &gemma4::plan(&model(Variant::E2b)).with_products_gathered(),
        Fusion::On,
    );
    let inputs = ops
        .iter()
        .filter(|op| matches!(op.work, Work::LayerInputs(_)));
    // For the layers before the cut and for those behind it.
    let rows: Vec<Rows> = inputs.map(|op| op.rows).collect();
    assert_eq!(rows, [Rows::All, Rows::Sampled]);
    let ops = fuse(
        &gemma4::plan(&model(Variant::Dense12b)).with_products_gathered(),
        Fusion::On,
    );
    assert!(!ops.iter().any(|op| matches!(op.work, Work::LayerInputs(_))));
}

#[test]
fn a_norm_and_a_sum_are_one_with_the_next_norm_or_without() {
    let model = model(Variant::Dense12b);
    let weight = model.output_norm;
    let without = works(&model, |p, x| {
        let sum = p.add("add", x, p.norm("norm", x, weight, 1e-6));
        (sum, sum)
    });
    assert!(matches!(
        without[..],
        [Work::ResidualNorm(ResidualNorm {
            following: None,
            scale: 1.0,
            ..
        })]
    ));
    let with = works(&model, |p, x| {
        let sum = p.scale(
            "scale",
            p.add("add", p.norm("norm", x, weight, 1e-6), x),
            0.5,
        );
        (sum, p.norm("next", sum, weight, 1e-6))
    });
    assert!(matches!(
        with[..],
        [Work::ResidualNorm(ResidualNorm {
            following: Some(_),
            scale: 0.5,
            ..
        })]
    ));
}

#[test]
fn a_value_with_another_reader_is_not_fused_away() {
    let model = model(Variant::Dense12b);
    let (weight, q) = (model.output_norm, model.layers[0].q);
    let summed = works(&model, |p, x| {
        let normed = p.norm("norm", x, weight, 1e-6);
        (normed, p.add("add", x, normed))
    });
    assert!(summed.iter().all(|work| matches!(work, Work::Step(_))));
    let multiplied = works(&model, |p, x| {
        let normed = p.norm("norm", x, weight, 1e-6);
        (normed, p.linear("q", normed, q))
    });
    let [Work::Step(Step::Norm { .. }), Work::Product(product)] = &multiplied[..] else {
        panic!("{multiplied:?}");
    };
    assert!(matches!(product.input, Prologue::Value(_)));
}

#[test]
fn a_gate_with_another_reader_keeps_its_gelu_apart() {
    let model = model(Variant::Dense12b);
    let ffn = &model.layers[0].ffn;
    let works = works(&model, |p, x| {
        let (gate, up) = (p.linear("gate", x, ffn.gate), p.linear("up", x, ffn.up));
        (gate, p.gelu_mul("gelu_mul", gate, up, 0))
    });
    let [Work::Product(product), Work::Step(Step::GeluMul { .. })] = &works[..] else {
        panic!("{works:?}");
    };
    assert_eq!(
        (product.parts.len(), product.epilogue),
        (2, Epilogue::Nothing)
    );
}

#[test]
fn a_scale_whose_input_is_kept_stays_a_step() {
    let model = model(Variant::Dense12b);
    let works = works(&model, |p, x| {
        let sum = p.add("add", x, p.norm("norm", x, model.output_norm, 1e-6));
        (sum, p.scale("scale", sum, 0.5))
    });
    assert!(matches!(
        works[..],
        [
            Work::ResidualNorm(ResidualNorm { scale: 1.0, .. }),
            Work::Step(Step::Scale { .. })
        ]
    ));
}

#[test]
fn heads_of_another_size_than_their_rope_are_not_fused() {
    let model = model(Variant::Dense12b);
    let half = model.config.dim / 2;
    let works = works(&model, |p, x| {
        let rope = p.rope_table(Rope {
            head_dim: half,
            frequencies: vec![0.1; half / 2],
            shift: 0,
        });
        let rotated = p.rope("rope", p.norm("norm", x, model.output_norm, 1e-6), rope);
        (rotated, rotated)
    });
    assert!(matches!(works[0], Work::Step(Step::Norm { .. })));
}
