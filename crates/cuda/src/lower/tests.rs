use std::collections::HashSet;

use carat_gguf::QuantType;
use carat_model::{
    Model,
    backend::KvGroup,
    gemma4,
    plan::{Builder, Rope, Rows, SlotSpec, Step},
};
use carat_testkit::tiny::{Tiny, Variant};
use expect_test::expect;

use super::*;
use crate::kernel;

fn model(variant: Variant) -> Model {
    Tiny::new(variant, QuantType::Q4_0).model()
}

fn lowered(model: &Model, fusion: Fusion) -> Lowered {
    let plan = gemma4::plan(model);
    lower(&plan, &model.weights, &fuse(&plan, fusion)).expect("tiny models are supported")
}

/// The lines of one section.
fn section(model: &Model, fusion: Fusion, label: &str) -> String {
    let plan = gemma4::plan(model);
    let text = listing(&plan, &model.weights, fusion).unwrap();
    let lines: Vec<&str> = text.lines().filter(|l| l.starts_with(label)).collect();
    lines.join("\n")
}

#[test]
fn a_layer_in_single_steps() {
    let text = section(&model(Variant::Dense12b), Fusion::Off, "L0");
    expect![[r#"
        L0.attn.norm         all     norm_rows              %0 -> %1
        L0.attn.linear       all     linear_8.q4_0          %1 -> %2
        L0.attn.linear       all     linear_8.q4_0          %1 -> %3
        L0.attn.norm         all     norm_rows              %2 -> %4
        L0.attn.rope         all     rope                   %4 -> %5
        L0.attn.norm         all     norm_rows              %3 -> %6
        L0.attn.store_kv     all     store_kv               %5 %6 ->
        L0.attn.linear       all     linear_8.q4_0          %1 -> %7
        L0.attn.norm         all     norm_rows              %7 -> %8
        L0.attn.rope         all     rope                   %8 -> %9
        L0.attn.attend       all     attend.1               %9 -> %10
        L0.attn.linear       all     linear_8.q4_0          %10 -> %11
        L0.attn.norm         all     norm_rows              %11 -> %12
        L0.attn.add          all     add_values             %0 %12 -> %13
        L0.ffn.norm          all     norm_rows              %13 -> %14
        L0.ffn.linear        all     linear_8.q4_0          %14 -> %15
        L0.ffn.linear        all     linear_8.q4_0          %14 -> %16
        L0.ffn.gelu_mul      all     gelu_mul               %15 %16 -> %17
        L0.ffn.linear        all     linear_8.q4_0          %17 -> %18
        L0.ffn.norm          all     norm_rows              %18 -> %19
        L0.ffn.add           all     add_values             %13 %19 -> %20
        L0.ffn.scale         all     scale                  %20 -> %21"#]]
    .assert_eq(&text);
}

#[test]
fn a_layer_fused() {
    let text = section(&model(Variant::Dense12b), Fusion::On, "L0");
    expect![[r#"
        L0.attn.norm         all     norm_rows              %0 -> %1
        L0.attn.linear       all     linear_8.q4_0          %1 -> %2
        L0.attn.linear       all     linear_8.q4_0          %1 -> %3
        L0.attn.store_kv     all     norm_rope_store        %2 %3 ->
        L0.attn.linear       all     linear_8.q4_0          %1 -> %7
        L0.attn.rope         all     norm_rope              %7 -> %9
        L0.attn.attend       all     attend.1               %9 -> %10
        L0.attn.linear       all     linear_8.q4_0          %10 -> %11
        L0.ffn.norm          all     norm_add_norm          %11 %0 -> %13 %14
        L0.ffn.linear        all     linear_8.q4_0          %14 -> %15
        L0.ffn.linear        all     linear_8.q4_0          %14 -> %16
        L0.ffn.gelu_mul      all     gelu_mul               %15 %16 -> %17
        L0.ffn.linear        all     linear_8.q4_0          %17 -> %18"#]]
    .assert_eq(&text);
}

#[test]
fn a_layer_with_per_layer_inputs_and_shared_kv_fused() {
    let model = model(Variant::E2b);
    let last = model.config.layers.len() - 1;
    let text = section(&model, Fusion::On, &format!("L{last}"));
    expect![[r#"
        L5.attn.norm         sampled norm_add_norm          %137 %134 -> %140 %141
        L5.attn.linear       sampled linear_8.q4_0          %141 -> %142
        L5.attn.rope         sampled norm_rope              %142 -> %144
        L5.attn.attend       sampled attend.1               %144 -> %145
        L5.attn.linear       sampled linear_8.q4_0          %145 -> %146
        L5.ffn.norm          sampled norm_add_norm          %146 %140 -> %148 %149
        L5.ffn.linear        sampled linear_8.q4_0          %149 -> %150
        L5.ffn.linear        sampled linear_8.q4_0          %149 -> %151
        L5.ffn.gelu_mul      sampled gelu_mul               %150 %151 -> %152
        L5.ffn.linear        sampled linear_8.q4_0          %152 -> %153
        L5.ffn.add           sampled norm_add               %153 %148 -> %155
        L5.ple.linear        sampled linear_8.f32           %155 -> %156
        L5.ple.gelu_mul      sampled gelu_mul               %156 %99 -> %157
        L5.ple.linear        sampled linear_8.f32           %157 -> %158"#]]
    .assert_eq(&text);
}

#[test]
fn a_layer_with_experts_fused() {
    let text = section(&model(Variant::Moe26b), Fusion::On, "L0.ffn");
    expect![[r#"
        L0.ffn.norm          all     norm_add_norm          %11 %0 -> %13 %14
        L0.ffn.linear        all     linear_8.q4_0          %14 -> %15
        L0.ffn.linear        all     linear_8.q4_0          %14 -> %16
        L0.ffn.gelu_mul      all     gelu_mul               %15 %16 -> %17
        L0.ffn.linear        all     linear_8.q4_0          %17 -> %18
        L0.ffn.norm          all     norm_rows              %18 -> %19
        L0.ffn.norm          all     norm_rows              %13 -> %20
        L0.ffn.scale         all     scale                  %20 -> %21
        L0.ffn.route         all     linear_8.f32           %21 -> s0
        L0.ffn.route         all     route                  s0 -> %22
        L0.ffn.norm          all     norm_rows              %13 -> %23
        L0.ffn.experts       all     experts_linear.q4_0    %23 %22 -> s0
        L0.ffn.experts       all     experts_linear.q4_0    %23 %22 -> s1
        L0.ffn.experts       all     gelu_mul               s0 s1 -> s0
        L0.ffn.experts       all     experts_linear.q4_0    s0 %22 -> s2
        L0.ffn.experts       all     experts_sum            s2 %22 -> %24
        L0.ffn.norm          all     norm_add_norm          %24 %19 -> %26 %27
        L0.ffn.add           all     add_values             %13 %27 -> %28
        L0.ffn.scale         all     scale                  %28 -> %29"#]]
    .assert_eq(&text);
}

#[test]
fn launches_a_model() {
    let mut counts = Vec::new();
    for variant in Variant::ALL {
        let model = model(variant);
        let launches = |fusion| lowered(&model, fusion).calls.len();
        counts.push((variant, launches(Fusion::Off), launches(Fusion::On)));
    }
    expect![[r#"
        [
            (
                E2b,
                169,
                115,
            ),
            (
                E4b,
                163,
                112,
            ),
            (
                Dense12b,
                71,
                44,
            ),
            (
                Moe26b,
                110,
                86,
            ),
            (
                Dense31b,
                71,
                44,
            ),
        ]
    "#]]
    .assert_debug_eq(&counts);
}

#[test]
fn ops_cover_all_steps_in_order() {
    for variant in Variant::ALL {
        let plan = gemma4::plan(&model(variant));
        for fusion in [Fusion::On, Fusion::Off] {
            let mut next = 0;
            for op in fuse(&plan, fusion) {
                assert_eq!(op.steps.start, next);
                next = op.steps.end;
            }
            assert_eq!(next, plan.steps.len());
        }
    }
}

#[test]
fn everything_is_written_before_it_is_read() {
    for variant in Variant::ALL {
        let model = model(variant);
        let plan = gemma4::plan(&model);
        for fusion in [Fusion::On, Fusion::Off] {
            let mut written = HashSet::new();
            for call in lowered(&model, fusion).calls {
                for place in call.kernel.reads() {
                    assert!(written.contains(&place), "{}: {place}", call.label);
                }
                written.extend(call.kernel.writes());
            }
            assert!(written.contains(&Place::Value(plan.logits)));
            assert!(written.contains(&Place::Value(plan.hidden)));
        }
    }
}

#[test]
fn whatever_is_chosen_is_among_the_kernels_compiled_ahead() {
    let all: HashSet<_> = kernel::all().into_iter().collect();
    for variant in Variant::ALL {
        for quant in QuantType::all() {
            let model = Tiny::new(variant, quant).model();
            for fusion in [Fusion::On, Fusion::Off] {
                for call in lowered(&model, fusion).calls {
                    let chosen = call.kernel.specialization();
                    assert!(all.contains(&chosen), "{chosen}");
                    let grid = call.kernel.grid(5000);
                    assert!(grid.entry < chosen.entries.len());
                    assert!(grid.threads <= 1024 && grid.threads % 32 == 0);
                    assert!(grid.blocks.1 <= 65535, "{chosen}: {grid:?}");
                }
            }
        }
    }
}

#[test]
fn a_value_with_another_reader_is_not_fused_away() {
    let model = model(Variant::Dense12b);
    let weight = model.output_norm;
    let p = Builder::new(&model.weights);
    let x = p.embed(model.embedding, 1.0, Rows::All);
    let normed = p.norm(x, weight, 1e-6);
    let sum = p.add(x, normed);
    let plan = p.finish(normed, sum);
    let ops = fuse(&plan, Fusion::On);
    assert!(ops.iter().all(|op| matches!(op.work, Work::Step(_))));
}

#[test]
fn a_scale_whose_input_is_kept_stays_a_step() {
    let model = model(Variant::Dense12b);
    let p = Builder::new(&model.weights);
    let x = p.embed(model.embedding, 1.0, Rows::All);
    let sum = p.add(x, p.norm(x, model.output_norm, 1e-6));
    let scaled = p.scale(sum, 0.5);
    let plan = p.finish(sum, scaled);
    let works: Vec<bool> = fuse(&plan, Fusion::On)
        .iter()
        .map(|op| matches!(op.work, Work::NormAdd { by: 1.0, .. }))
        .collect();
    assert_eq!(works, [false, true, false]);
}

#[test]
fn head_sizes_no_kernel_takes_are_refused_by_name() {
    let model = model(Variant::Dense12b);
    let p = Builder::new(&model.weights);
    p.section("odd");
    let head_dim = model.config.dim + 2;
    let slot = p.slot(SlotSpec {
        group: KvGroup::Full,
        kv_heads: 1,
        head_dim: model.config.dim,
        window: None,
    });
    let q = p.embed(model.embedding, 1.0, Rows::All);
    let out = p.attend(q, slot);
    let mut plan = p.finish(out, out);
    plan.slots[0].head_dim = head_dim;
    let refused = lower(&plan, &model.weights, &fuse(&plan, Fusion::On));
    let text = refused.unwrap_err().to_string();
    assert_eq!(
        text,
        format!("odd.attend: heads of {head_dim} are not among those the attention kernel takes")
    );
}

#[test]
fn heads_of_another_size_than_their_rope_are_not_fused() {
    let model = model(Variant::Dense12b);
    let p = Builder::new(&model.weights);
    let x = p.embed(model.embedding, 1.0, Rows::All);
    let half = model.config.dim / 2;
    let rope = p.rope_table(Rope {
        head_dim: half,
        frequencies: vec![0.1; half / 2],
    });
    let turned = p.rope(p.norm(x, model.output_norm, 1e-6), rope);
    let plan = p.finish(turned, turned);
    let ops = fuse(&plan, Fusion::On);
    assert!(matches!(ops[1].work, Work::Step(Step::Norm { .. })));
}
