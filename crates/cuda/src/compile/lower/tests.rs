mod host_networks;

use std::{collections::HashSet, fmt::Write};

use carat_gguf::QuantType;
use carat_model::{
    Model, gemma4,
    gemma4_assistant::{self, Head},
    kv::KvGroup,
    phase::{Origin, Phase},
    plan::{Builder, SlotSpec},
    synthetic::ByKind,
};
use carat_testkit::{
    fixtures,
    pairs::Pair,
    tiny::{Tiny, Variant},
};
use expect_test::expect;

use super::*;
use crate::{
    choices::{Alternative, Alternatives, Choice},
    compile::{
        fuse::fuse,
        listing::{kernel_name, operands, program},
        target::GemmImpl,
    },
    config::Tier,
    kernel::{self, TableFormat, WeightFormat, WeightOperand},
};

/// Rows of a small, of a medium and of a large batch.
const SMALL: usize = 4;
const MEDIUM: usize = 15;
const LARGE: usize = 100;

fn model(variant: Variant) -> Model {
    Tiny::new(variant, QuantType::Q4_0).model()
}

fn cublaslt(rows: usize) -> Target {
    Target {
        gemm: GemmImpl::CublasLt,
        ..Target::hopper(Fusion::On, rows)
    }
}

fn portable(rows: usize) -> Target {
    Target {
        hopper: false,
        clusters: None,
        ..Target::hopper(Fusion::On, rows)
    }
}

/// Every way to lower a plan.
fn targets() -> [Target; 7] {
    [
        Target::hopper(Fusion::Off, LARGE),
        Target::hopper(Fusion::On, SMALL),
        Target::hopper(Fusion::On, LARGE),
        portable(LARGE),
        cublaslt(LARGE),
        portable(MEDIUM),
        cublaslt(MEDIUM),
    ]
}

/// What the most rows a target may have are launched for.
fn lowered(model: &Model, target: Target) -> Vec<Call> {
    let plan = gemma4::plan(model).with_products_gathered();
    let ops = fuse(&plan, target.fusion);
    let class = RowClass::of(target.max_rows);
    let mut scratch = Scratch::default();
    let mut calls = lower(
        &plan,
        &model.weights,
        &ops,
        class,
        target,
        (&mut scratch, &mut HostNetworks::default()),
    )
    .expect("tiny models are supported");
    calls.retain(|call| call.buckets.hold(target.max_rows));
    calls
}

/// Launches of the most rows a target may have, all rows sampled, one line each: what snapshots hold.
fn list(plan: &Plan, weights: &Weights, target: Target) -> Result<String, BackendError> {
    list_with(plan, weights, target, &mut HostNetworks::default())
}

/// The same where the host may have a part.
fn list_with(
    plan: &Plan,
    weights: &Weights,
    target: Target,
    host: &mut HostNetworks,
) -> Result<String, BackendError> {
    let rows = target.max_rows;
    let ops = fuse(plan, target.fusion);
    let mut scratch = Scratch::default();
    let class = RowClass::of(rows);
    let calls = lower(plan, weights, &ops, class, target, (&mut scratch, host))?;
    let mut out = String::new();
    for call in calls.iter().filter(|call| call.buckets.hold(rows)) {
        let which = match call.rows {
            Rows::All => "all",
            Rows::Sampled => "sampled",
        };
        let (label, name) = (&call.label, kernel_name(call, rows));
        let line = format!("{label:<26} {which:<7} {name:<26} {}", operands(call));
        writeln!(out, "{}", line.trim_end()).expect("strings take all writes");
    }
    Ok(out)
}

/// The lines of one section.
fn section(model: &Model, target: Target, label: &str) -> String {
    let text = list(
        &gemma4::plan(model).with_products_gathered(),
        &model.weights,
        target,
    )
    .unwrap();
    let lines: Vec<&str> = text.lines().filter(|l| l.starts_with(label)).collect();
    lines.join("\n")
}

#[test]
fn a_layer_in_plain_steps() {
    let target = Target::hopper(Fusion::Off, SMALL);
    let text = section(&model(Variant::Dense12b), target, "L0");
    expect![[r#"
        L0.attn.norm               all     rms_norm                   %0 -> %1
        L0.attn.q                  all     linear_plain_8.q4_0        %1 -> %7
        L0.attn.k                  all     linear_plain_8.q4_0        %1 -> %2
        L0.attn.v                  all     linear_plain_8.q4_0        %1 -> %3
        L0.attn.k_norm             all     rms_norm                   %2 -> %4
        L0.attn.k_rope             all     rope                       %4 -> %5
        L0.attn.v_norm             all     rms_norm                   %3 -> %6
        L0.attn.store_kv           all     store_kv                   %5 %6 ->
        L0.attn.q_norm             all     rms_norm                   %7 -> %8
        L0.attn.q_rope             all     rope                       %8 -> %9
        L0.attn.attend             all     attend                     %9 -> %10
        L0.attn.o                  all     linear_plain_8.q4_0        %10 -> %11
        L0.attn.post_norm          all     rms_norm                   %11 -> %12
        L0.attn.add                all     add_values                 %0 %12 -> %13
        L0.ffn.norm                all     rms_norm                   %13 -> %14
        L0.ffn.gate                all     linear_plain_8.q4_0        %14 -> %15
        L0.ffn.up                  all     linear_plain_8.q4_0        %14 -> %16
        L0.ffn.gelu_mul            all     gelu_mul                   %15 %16 -> %17
        L0.ffn.down                all     linear_plain_8.q4_0        %17 -> %18
        L0.ffn.post_norm           all     rms_norm                   %18 -> %19
        L0.ffn.add                 all     add_values                 %13 %19 -> %20
        L0.ffn.out_scale           all     scale                      %20 -> %21"#]]
    .assert_eq(&text);
}

#[test]
fn a_layer_of_one_row() {
    let target = Target::hopper(Fusion::On, 1);
    let text = section(&model(Variant::Dense12b), target, "L0");
    expect![[r#"
        L0.attn.q+k+v              all     gemv_1.q4.normed           %0 -> %7 %2 %3
        L0.attn.attend             all     flash_decode               %7 %2 %3 -> s1 s2 %10
        L0.attn.o                  all     gemv_1.q4.plain            %10 -> %11
        L0.ffn.gate+up             all     gemv_1.q4.normed           %11 %0 -> %13 %17
        L0.ffn.down                all     gemv_1.q4.plain            %17 -> %18"#]]
    .assert_eq(&text);
}

#[test]
fn attention_of_long_heads_prepares_what_o_reads() {
    let fixture = fixtures::ALL.iter().find(|f| f.name == "real-heads-q8_0");
    let model = fixture.expect("a fixture").model();
    let text = |rows| section(&model, Target::hopper(Fusion::On, rows), "L0.attn");
    expect![[r#"
        L0.attn.q+k+v              all     gemv_1.q8.normed           %0 -> %13 %8 %9
        L0.attn.attend             all     flash_decode               %13 %8 %9 -> s2 s3 s1
        L0.attn.o                  all     gemv_1.q8.ready            s1 -> %17"#]]
    .assert_eq(&text(1));
    expect![[r#"
        L0.attn.q+k+v input        all     prepare_rows.normed        %0 -> s0
        L0.attn.q+k+v              all     gemv_4.q8.ready            s0 -> %13 %8 %9
        L0.attn.attend             all     flash_decode               %13 %8 %9 -> s2 s3 s1
        L0.attn.o                  all     gemv_4.q8.ready            s1 -> %17"#]]
    .assert_eq(&text(SMALL));
}

#[test]
fn a_layer_of_few_rows() {
    let target = Target::hopper(Fusion::On, SMALL);
    let text = section(&model(Variant::Dense12b), target, "L0");
    expect![[r#"
        L0.attn.q+k+v input        all     prepare_rows.normed        %0 -> s0
        L0.attn.q+k+v              all     gemv_4.q4.ready            s0 -> %7 %2 %3
        L0.attn.attend             all     flash_decode               %7 %2 %3 -> s1 s2 %10
        L0.attn.o input            all     prepare_rows.plain         %10 -> s0
        L0.attn.o                  all     gemv_4.q4.ready            s0 -> %11
        L0.ffn.gate+up input       all     prepare_rows.normed        %11 %0 -> %13 s0
        L0.ffn.gate+up             all     gemv_4.q4.ready            s0 -> %17
        L0.ffn.down input          all     prepare_rows.plain         %17 -> s0
        L0.ffn.down                all     gemv_4.q4.ready            s0 -> %18"#]]
    .assert_eq(&text);
}

#[test]
fn a_layer_of_few_rows_with_per_layer_inputs_and_shared_kv() {
    let target = Target::hopper(Fusion::On, SMALL);
    let text = section(&model(Variant::E2b), target, "L5");
    expect![[r#"
        L5.attn.q input            sampled prepare_rows.normed        %137 %134 -> %140 s0
        L5.attn.q                  sampled gemv_4.q4.ready            s0 -> %142
        L5.attn.attend             sampled flash_decode               %142 -> s1 s2 %145
        L5.attn.o input            sampled prepare_rows.plain         %145 -> s0
        L5.attn.o                  sampled gemv_4.q4.ready            s0 -> %146
        L5.ffn.gate+up input       sampled prepare_rows.normed        %146 %140 -> %148 s0
        L5.ffn.gate+up             sampled gemv_4.q4.ready            s0 -> %152
        L5.ffn.down input          sampled prepare_rows.plain         %152 -> s0
        L5.ffn.down                sampled gemv_4.q4.ready            s0 -> %153
        L5.ple.gate                sampled gemv_4.f32.normed          %153 %148 %99 -> %155 %157
        L5.ple.proj                sampled gemv_4.f32.plain           %157 -> %158
        L5.ple.post_norm           sampled fused_residual_norm        %158 %155 -> %161 %162"#]]
    .assert_eq(&text);
}

#[test]
fn a_layer_of_many_rows_by_the_native_gemm() {
    let text = section(&model(Variant::Dense12b), portable(LARGE), "L0");
    expect![[r#"
        L0.attn.norm               all     fused_norm                 %0 -> s0 s1 s2
        L0.attn.q+k+v              all     gemm_64.q4.f32.dense       s0 s1 s2 -> s3
        L0.attn.store_kv+q_rope    all     qkv_norm_rope              s3 -> s9
        L0.attn.attend             all     flash_prefill.OUT_INT8     s9 -> s6 s7 s8
        L0.attn.o                  all     gemm_64.q4.f32.dense       s6 s7 s8 -> %11
        L0.attn.post_norm          all     fused_residual_norm        %11 %0 -> %13 s0 s1 s2
        L0.ffn.gate+up             all     gemm_64.q4.geglu_pair.dense s0 s1 s2 -> s10 s11 s12
        L0.ffn.down                all     gemm_64.q4.f32.dense       s10 s11 s12 -> %18
        L0.ffn.post_norm           all     fused_residual_norm        %18 %13 -> %21 s0 s1 s2"#]]
    .assert_eq(&text);
}

#[test]
fn a_layer_of_many_rows_by_cublaslt() {
    let text = section(&model(Variant::E2b), cublaslt(LARGE), "L1");
    expect![[r#"
        L1.attn.q+k+v              all     cublaslt                   s1 -> s2
        L1.attn.store_kv+q_rope    all     qkv_norm_rope              s2 -> s4
        L1.attn.attend             all     flash_prefill.OUT_F16      s4 -> s3
        L1.attn.o                  all     cublaslt                   s3 -> %43
        L1.attn.post_norm          all     fused_residual_norm        %43 %32 -> %45 s1
        L1.ffn.gate+up             all     cublaslt                   s1 -> s5
        L1.ffn.gelu_mul            all     geglu                      s5 -> s6 s7
        L1.ffn.down                all     cublaslt                   s6 -> %50
        L1.ffn.post_norm           all     fused_residual_norm        %50 %45 s7 -> %52 s1
        L1.ple.gate                all     cublaslt                   s1 -> s9
        L1.ple.gelu_mul            all     convert_gelu_mul           s9 %6 -> s8
        L1.ple.proj                all     cublaslt                   s8 -> %55
        L1.ple.post_norm           all     fused_residual_norm        %55 %52 -> %58 s1"#]]
    .assert_eq(&text);
}

#[test]
fn a_layer_of_a_medium_batch() {
    let text = section(&model(Variant::E2b), cublaslt(MEDIUM), "L1");
    expect![[r#"
        L1.attn.q+k+v              all     gemm_medium_sm90_16.q4.f32 s1 -> s2
        L1.attn.store_kv           all     qkv_norm_rope              s2 ->
        L1.attn.attend             all     flash_decode               s2 -> s6 s7 s5
        L1.attn.o                  all     gemm_medium_sm90_16.q4.f32 s5 -> %43
        L1.attn.post_norm          all     fused_residual_norm        %43 %32 -> %45 s1
        L1.ffn.gate+up             all     gemm_medium_sm90_16.q4.f16_pair s1 -> s8
        L1.ffn.gelu_mul            all     geglu_spread               s8 -> s9 s10
        L1.ffn.down                all     gemm_medium_sm90_16.q4.f32 s9 -> %50
        L1.ffn.post_norm           all     fused_residual_norm        %50 %45 s10 -> %52 s1
        L1.ple.gate                all     cublaslt                   s1 -> s12
        L1.ple.gelu_mul            all     convert_gelu_mul           s12 %6 -> s11
        L1.ple.proj                all     cublaslt                   s11 -> %55
        L1.ple.post_norm           all     fused_residual_norm        %55 %52 -> %58 s1"#]]
    .assert_eq(&text);
}

/// Both tiers multiply packed weights, and read them as small batches do.
#[test]
fn a_medium_batch_reads_the_weights_of_small_ones() {
    for variant in Variant::ALL {
        let model = model(variant);
        let matrices = |target| -> HashSet<WeightOperand> {
            let calls = lowered(&model, target);
            let weights = calls.iter().flat_map(Call::weights);
            weights
                .filter(|w| {
                    w.parts
                        .iter()
                        .all(|w| model.weights.matrix(*w).quant == QuantType::Q4_0)
                })
                .collect()
        };
        let small = matrices(Target::hopper(Fusion::On, SMALL));
        let medium = matrices(cublaslt(MEDIUM));
        let others: Vec<_> = medium.difference(&small).collect();
        assert!(others.is_empty(), "{variant:?}: {others:?}");
    }
}

#[test]
fn experts_of_few_rows_and_of_many() {
    let model = model(Variant::Moe26b);
    let small = section(&model, Target::hopper(Fusion::On, SMALL), "L0.ffn.experts");
    expect![[r#"
        L0.ffn.experts input       all     prepare_rows.normed        %13 -> s7
        L0.ffn.experts gate+up     all     gemv_grouped.q4.ready      s7 s4 -> s5
        L0.ffn.experts down        all     gemv_grouped.q4.plain      s5 s4 -> s6"#]]
    .assert_eq(&small);
    let large = section(&model, cublaslt(LARGE), "L0.ffn.experts");
    expect![[r#"
        L0.ffn.experts permute     all     permute_144                s9 -> s10 s11 s12
        L0.ffn.experts_norm        all     fused_norm                 %13 -> s13
        L0.ffn.experts gate+up     all     gemm_packed_sm90.q4.geglu_pair.grouped s10 s11 s12 s13 -> s14
        L0.ffn.experts down        all     gemm_packed_sm90.q4.f16.grouped s10 s11 s12 s14 -> s15"#]]
    .assert_eq(&large);
}

#[test]
fn products_without_copies_multiply_packed_weights_on_hopper() {
    let model = model(Variant::Dense12b);
    let found = section(&model, Target::hopper(Fusion::On, LARGE), "L0.ffn");
    expect![[r#"
        L0.ffn.gate+up             all     gemm_packed_sm90.q4.geglu_pair.dense s0 -> s4
        L0.ffn.down                all     gemm_packed_sm90.q4.f32.dense s4 -> %18
        L0.ffn.post_norm           all     fused_residual_norm        %18 %13 -> %21 s0"#]]
    .assert_eq(&found);
    let portable = section(&model, portable(LARGE), "L0.ffn");
    assert!(!portable.contains("sm90"), "{portable}");
}

#[test]
fn every_bucket_has_one_kernel_for_router_scores() {
    let model = model(Variant::Moe26b);
    for (rows, kernel) in [
        (1, "gemv"),
        (64, "gemv"),
        (100, "router_scores"),
        (2048, "router_scores"),
    ] {
        let calls = lowered(&model, cublaslt(rows));
        let scores = |call: &&Call| call.label == "L0.ffn.route scores" && call.buckets.hold(rows);
        let found: Vec<&Call> = calls.iter().filter(scores).collect();
        assert_eq!(found.len(), 1, "{rows} rows");
        let chosen = found[0].kernel().expect("a kernel").specialization();
        assert_eq!(chosen.kernel, kernel, "{rows} rows");
    }
}

/// The listing for people runs what a batch of so many rows runs: the front for all rows, the tail for sampled ones.
#[test]
fn a_listed_program_is_what_a_batch_runs() {
    let model = model(Variant::E4b);
    let plan = gemma4::plan(&model);
    let packed = Alternatives::default().with(Alternative::PackedFrom(0));
    let listed =
        |tier, rows| program(&plan, &model.weights, ((tier, Fusion::On), packed), rows).unwrap();
    let decode = listed(Tier::Best, (1, 1));
    assert_eq!(decode.len(), lowered(&model, cublaslt(1)).len());
    let qkv = decode.iter().find(|l| l.label == "L0.attn.q+k+v").unwrap();
    assert_eq!((qkv.rows, qkv.kernel.as_str()), (1, "gemv_1.q4.normed"));
    assert!(qkv.weight_bytes > 0 && qkv.grid.contains(" x "), "{qkv:?}");
    // A chunk in the middle of a prompt: nothing behind the cut runs.
    let chunk = listed(Tier::Best, (100, 0));
    let last = chunk.last().unwrap();
    assert!(last.label.ends_with("store_kv"), "{last:?}");
    assert!(
        chunk
            .iter()
            .any(|l| l.kernel == "cublaslt" && l.rows == 128)
    );
    let portable = listed(Tier::Portable, (100, 1));
    assert!(portable.iter().all(|l| l.kernel != "cublaslt"));
    assert!(portable.iter().any(|l| l.kernel.starts_with("gemm_64")));
}

#[test]
fn launches_a_layer() {
    let mut counts = String::new();
    for variant in Variant::ALL {
        let model = model(variant);
        let layers = model.config.layers.len();
        let launches = |target| {
            let calls = lowered(&model, target);
            let of_layers = calls.iter().filter(|c| c.origin.layer.is_some());
            of_layers.count() as f64 / layers as f64
        };
        let [plain, small, _, native, cublaslt, medium, _] = targets().map(launches);
        let name = format!("{variant:?}");
        writeln!(
            counts,
            "{name:<8} plain {plain:.1}, small {small:.1}, medium {medium:.1}, large: native {native:.1}, cublaslt {cublaslt:.1}"
        )
        .unwrap();
    }
    expect![[r#"
        E2b      plain 25.3, small 12.2, medium 13.7, large: native 13.2, cublaslt 14.2
        E4b      plain 24.3, small 12.2, medium 13.5, large: native 13.2, cublaslt 14.2
        Dense12b plain 22.7, small 11.3, medium 11.0, large: native 10.7, cublaslt 11.7
        Moe26b   plain 35.7, small 16.7, medium 16.0, large: native 16.7, cublaslt 17.7
        Dense31b plain 22.7, small 11.3, medium 11.0, large: native 10.7, cublaslt 11.7
    "#]]
    .assert_eq(&counts);
}

#[test]
fn everything_is_written_before_it_is_read() {
    for variant in Variant::ALL {
        for quant in [QuantType::Q4_0, QuantType::F32, QuantType::Q5_1] {
            let model = Tiny::new(variant, quant).model();
            let plan = gemma4::plan(&model);
            for target in targets() {
                let mut written = HashSet::new();
                for call in lowered(&model, target) {
                    for operand in call.reads() {
                        assert!(written.contains(&operand), "{}: {operand}", call.label);
                    }
                    written.extend(call.writes());
                }
                assert!(written.contains(&Operand::Value(plan.logits)));
                assert!(written.contains(&Operand::Value(plan.hidden)));
            }
        }
    }
}

#[test]
fn whatever_is_chosen_is_among_the_kernels_compiled_ahead() {
    let all: HashSet<_> = kernel::catalog::all().into_iter().collect();
    let hopper: HashSet<_> = kernel::catalog::hopper().into_iter().collect();
    for variant in Variant::ALL {
        for quant in QuantType::all() {
            let model = Tiny::new(variant, quant).model();
            for target in targets() {
                let calls = lowered(&model, target);
                for kernel in calls.iter().filter_map(Call::kernel) {
                    let chosen = kernel.specialization();
                    // Compiled per number of heads; those of published models are below.
                    let ahead = chosen.kernel == "flash_decode"
                        || all.contains(&chosen)
                        || target.hopper && hopper.contains(&chosen);
                    assert!(ahead, "{chosen}");
                    let grid = kernel.grid(target.max_rows);
                    assert!(grid.entry < chosen.entries.len());
                    assert!(grid.threads <= 1024 && grid.threads % 32 == 0);
                    assert!(grid.blocks.1 <= 65535, "{chosen}: {grid:?}");
                }
            }
        }
    }
}

/// Where nothing can be compiled, what was chosen is left aside where it takes other kernels.
#[test]
fn choices_that_take_other_kernels_are_known() {
    let mut all: HashSet<_> = kernel::catalog::all().into_iter().collect();
    all.extend(kernel::catalog::hopper());
    let targets = [SMALL, MEDIUM, LARGE].map(|rows| [portable(rows), cublaslt(rows)]);
    let models = [QuantType::Q8_0, QuantType::Q4_0, QuantType::Q4_K]
        .map(|quant| Tiny::new(Variant::E4b, quant).model());
    for value in Choice::ALL.into_iter().flat_map(Choice::alternatives) {
        let alternatives = Alternatives::default().with(*value);
        let are_ahead = |(model, target): (&Model, Target)| {
            let calls = lowered(
                model,
                Target {
                    alternatives,
                    ..target
                },
            );
            let mut kernels = calls.iter().filter_map(Call::kernel);
            kernels.all(|kernel| {
                let chosen = kernel.specialization();
                chosen.kernel == "flash_decode" || all.contains(&chosen)
            })
        };
        let mut ways =
            (models.iter()).flat_map(|m| targets.as_flattened().iter().map(move |t| (m, *t)));
        let ahead = ways.all(are_ahead);
        assert_eq!(ahead, !value.needs_compiler(), "{} {value}", value.choice());
    }
}

/// The target's table is there already, in fragments.
fn draft_step(name: &'static str, head: Head, target: Target) -> String {
    let pair = Pair::load(name);
    let plan = gemma4_assistant::plan(&pair.drafter, head).with_products_gathered();
    let target = Target {
        borrowed_table: Some(TableFormat::Fragments),
        ..target
    };
    list(&plan, &pair.drafter.weights, target).unwrap()
}

#[test]
fn a_draft_step_is_five_launches_per_layer_between_its_ends() {
    let target = Target::hopper(Fusion::On, 1);
    let text = draft_step("12b-like", Head::Dense, target);
    let of_a_layer = text.lines().filter(|line| line.starts_with("L1.")).count();
    assert_eq!(of_a_layer, 5, "{text}");
    expect![[r#"
        embed.token                all     embed_fragments.q8          -> %0
        embed.pre_token            all     gemv_1.q8.plain            %0 -> %2
        embed.pre_state            all     gemv_1.q8.plain            %1 -> %3
        embed.pre_add              all     add_values                 %2 %3 -> %4
        head.output+post           all     gemv_1.q8.normed           %65 %60 -> %68 %71 %70"#]]
    .assert_eq(&ends(&text));
}

#[test]
fn the_head_by_clusters_is_three_launches() {
    let target = Target::hopper(Fusion::On, SMALL);
    let text = draft_step("e-series-centroids", Head::Clusters, target);
    expect![[r#"
        embed.token                all     embed_fragments.q8          -> %0
        embed.pre_token            all     gemv_4.f16.plain           %0 -> %2
        embed.pre_state            all     gemv_4.f16.plain           %1 -> %3
        embed.pre_add              all     add_values                 %2 %3 -> %4
        head.post                  all     gemv_4.f16.plain           %69 -> %70
        head.cluster_logits scores all     gemv_4.f16.plain           %69 -> s2
        head.cluster_logits nearest all     nearest_clusters.1u        s2 -> s3
        head.cluster_logits        all     cluster_logits.f16         %69 s3 -> %71"#]]
    .assert_eq(&ends(&text));
}

/// The lines that belong to no layer.
fn ends(text: &str) -> String {
    let outside = text.lines().filter(|line| !line.starts_with('L'));
    outside.collect::<Vec<_>>().join("\n")
}

#[test]
fn attention_of_drafters_is_compiled_ahead_and_sees_up_to_the_end_that_is_written() {
    let all: HashSet<_> = kernel::catalog::all().into_iter().collect();
    for (heads, kv_heads) in [
        (4, [1, 1]),
        (4, [2, 2]),
        (16, [8, 1]),
        (16, [8, 2]),
        (32, [16, 4]),
    ] {
        for (kv_heads, head_dim) in kv_heads.into_iter().zip([256, 512]) {
            // The larger models hold values alone in full-attention layers.
            let tied = heads > 4 && head_dim == 512;
            let heads = kernel::Heads::new(heads, kv_heads, head_dim);
            let heads = if tied { heads.tied(64) } else { heads };
            let chosen = kernel::attention::flash_decode::specialization(heads);
            assert!(all.contains(&chosen), "{chosen}");
        }
    }
    let pair = Pair::load("12b-like");
    let plan = gemma4_assistant::plan(&pair.drafter, Head::Dense);
    for target in [
        Target::hopper(Fusion::On, SMALL),
        Target::hopper(Fusion::Off, SMALL),
    ] {
        let ops = fuse(&plan, target.fusion);
        let (mut scratch, weights) = (Scratch::default(), &pair.drafter.weights);
        let calls = lower(
            &plan,
            weights,
            &ops,
            RowClass::Small,
            target,
            (&mut scratch, &mut HostNetworks::default()),
        )
        .unwrap();
        let kernels = calls.iter().filter_map(Call::kernel);
        let windows: HashSet<String> = kernels
            .map(|kernel| format!("{kernel:?}"))
            .filter_map(|text| {
                Some(
                    text.split_once("window: Some(")?
                        .1
                        .split_once(')')?
                        .0
                        .to_owned(),
                )
            })
            .collect();
        // The window, as seen from the position behind, and everything.
        let window = pair.target.config.window.to_string();
        assert_eq!(windows, HashSet::from([window, UNBOUNDED.to_string()]));
    }
}

#[test]
fn attention_of_published_models_is_compiled_ahead() {
    let all: HashSet<_> = kernel::catalog::all().into_iter().collect();
    let with_hopper = all
        .iter()
        .cloned()
        .chain(kernel::catalog::hopper())
        .collect();
    let hopper = Target::hopper(Fusion::On, SMALL);
    let portable = Target {
        hopper: false,
        ..hopper
    };
    // Query heads, then KV heads of sliding and of full layers, and their head sizes.
    let demo = (Variant::E4b, 4, [2, 2], [64, 128]);
    for (variant, heads, [sliding, full], sizes) in [
        (Variant::E2b, 8, [1, 1], [256, 512]),
        (Variant::E4b, 8, [2, 2], [256, 512]),
        (Variant::Dense12b, 16, [8, 1], [256, 512]),
        (Variant::Moe26b, 16, [8, 2], [256, 512]),
        (Variant::Dense31b, 32, [16, 4], [256, 512]),
        demo,
    ] {
        let mut tiny = Tiny::new(variant, QuantType::Q8_0);
        tiny.dimensions.heads = heads;
        tiny.dimensions.kv_heads = ByKind { sliding, full };
        tiny.dimensions.head_dim = ByKind {
            sliding: sizes[0],
            full: sizes[1],
        };
        for (target, ahead) in [(hopper, &with_hopper), (portable, &all)] {
            let calls = lowered(&tiny.model(), target);
            let specializations = calls.iter().filter_map(Call::kernel);
            let chosen: HashSet<_> = specializations
                .map(Kernel::specialization)
                .filter(|s| s.kernel == "flash_decode")
                .collect();
            assert_eq!(chosen.len(), 2, "{variant:?}");
            assert!(chosen.is_subset(ahead), "{variant:?}: {chosen:?}");
        }
    }
}

/// Phases that launches and steps of a model are counted with: only dropping rows is in none.
#[test]
fn launches_and_steps_of_every_variant_are_counted_with_the_same_phases() {
    for variant in Variant::ALL {
        // Heads and columns that the fast kernels take, as those of real files.
        let mut tiny = Tiny::new(variant, QuantType::Q8_0);
        let heads = &mut tiny.dimensions.head_dim;
        (heads.sliding, heads.full) = (256, 512);
        let model = tiny.model();
        let plan = gemma4::plan(&model);
        let mut expected = vec![
            Phase::Embed,
            Phase::Qkv,
            Phase::AttentionSliding,
            Phase::AttentionFull,
            Phase::O,
            Phase::Ffn,
            Phase::Head,
        ];
        expected.extend(model.config.ple.map(|_| Phase::Ple));
        expected.extend(model.config.experts.as_ref().map(|_| Phase::Experts));
        let check = |origin: Origin, label: &str| {
            let known = expected.contains(&origin.phase) || origin.phase == Phase::Norm;
            assert!(known || label.contains(".select_"), "{label}: {origin:?}");
            let of_layer = label.starts_with('L');
            assert_eq!(origin.layer.is_some(), of_layer, "{label}: {origin:?}");
        };
        for step in &plan.steps {
            check(plan.origin(step), &step.label);
        }
        for target in targets() {
            let calls = lowered(&model, target);
            for call in &calls {
                check(call.origin, &call.label);
            }
            for phase in &expected {
                assert!(
                    calls.iter().any(|call| call.origin.phase == *phase),
                    "{variant:?}, {target:?}: {phase:?}"
                );
            }
        }
    }
}

/// Labels tell launches apart, so that a profile or an error names one launch.
#[test]
fn no_two_launches_have_one_label() {
    for variant in Variant::ALL {
        let model = model(variant);
        for target in targets() {
            let mut seen = HashSet::new();
            for call in lowered(&model, target) {
                assert!(
                    seen.insert(call.label.clone()),
                    "{variant:?}: {}",
                    call.label
                );
            }
        }
    }
}

/// No format and no variant leaves a product of a fused plan to the plain kernel.
#[test]
fn no_product_falls_back() {
    for variant in Variant::ALL {
        for quant in QuantType::all() {
            let model = Tiny::new(variant, quant).model();
            for target in &targets()[1..] {
                let calls = lowered(&model, *target);
                let plain = calls.iter().filter(|call| {
                    let kernel = call.kernel().map(|k| k.specialization().kernel);
                    // Scores of experts decide, so they stay f32.
                    kernel == Some("linear") && !call.label.contains("route")
                });
                let labels: Vec<&str> = plain.map(|call| call.label.as_str()).collect();
                assert!(labels.is_empty(), "{variant:?} {quant}: {labels:?}");
            }
        }
    }
}

/// Weights are not loaded twice for the two classes where one format serves both.
#[test]
fn native_gemm_shares_weights_between_classes() {
    let model = model(Variant::E4b);
    let operands = |target| -> HashSet<WeightOperand> {
        let calls = lowered(&model, target);
        calls.iter().flat_map(Call::weights).collect()
    };
    let small = operands(Target::hopper(Fusion::On, SMALL));
    let large = operands(portable(LARGE));
    let packed = |p: &&WeightOperand| p.format == WeightFormat::Fragments;
    let only_large: Vec<&WeightOperand> = large.difference(&small).filter(packed).collect();
    assert!(only_large.is_empty(), "{only_large:?}");
}

#[test]
fn head_sizes_no_kernel_takes_are_refused_by_name() {
    let model = model(Variant::Dense12b);
    let p = Builder::new(&model.weights);
    let head_dim = model.config.dim + 2;
    let slot = p.slot(SlotSpec {
        group: KvGroup::Full,
        kv_heads: 1,
        head_dim: model.config.dim,
        window: None,
        borrowed: None,
    });
    let q = p.embed("token", model.embedding, 1.0, Rows::All);
    let out = p.attend(q, slot);
    let mut plan = p.finish(out, out);
    plan.slots[0].head_dim = head_dim;
    for target in targets() {
        let refused = list(&plan, &model.weights, target);
        let text = refused.unwrap_err().to_string();
        let expected =
            format!("attend: heads of {head_dim} are not among those the attention kernel takes");
        assert_eq!(text, expected);
    }
}

/// Ops of all rows and of sampled rows are lowered apart: what crosses over is there as a value.
#[test]
fn what_is_read_behind_the_cut_is_stored() {
    let model = model(Variant::Dense12b);
    let p = Builder::new(&model.weights);
    let x = p.embed("token", model.embedding, 1.0, Rows::All);
    let product = p.linear("q", x, model.layers[0].q);
    let out = p.select_sampled("select", product);
    let plan = p.finish(out, out);
    for target in targets() {
        let ops = fuse(&plan, target.fusion);
        let (front, _) = ops.split_at(2);
        let class = RowClass::of(target.max_rows);
        let mut scratch = Scratch::default();
        let calls = lower(
            &plan,
            &model.weights,
            front,
            class,
            target,
            (&mut scratch, &mut HostNetworks::default()),
        )
        .unwrap();
        let mut written = calls.iter().flat_map(Call::writes);
        assert!(
            written.any(|operand| operand == Operand::Value(product)),
            "{target:?}"
        );
    }
}

#[test]
fn scratch_of_one_name_is_as_large_as_its_largest_use() {
    let mut scratch = Scratch::default();
    let bytes = |per_row, fixed| ScratchBytes { per_row, fixed };
    let a = scratch.operand("a", bytes(4, 100));
    let b = scratch.operand("b", bytes(1, 0));
    assert_ne!(a, b);
    assert_eq!(scratch.operand("a", bytes(8, 10)), a);
    let sizes: Vec<ScratchBytes> = scratch.sizes().collect();
    assert_eq!(sizes, [bytes(8, 100), bytes(1, 0)]);
}
