//! Networks in host memory, as they are shared.

use std::{collections::BTreeSet, fmt::Write};

use carat_gguf::QuantType;
use carat_model::{gemma4, weights::Weight};
use carat_testkit::tiny::{Tiny, Variant};
use expect_test::expect;

use super::{SMALL, list_with, model};
use crate::{
    compile::{host_networks::HostNetworks, target::Target, weights::HostWeights},
    config::{Fusion, TableMemory},
};

/// The calls of networks that the host has a part in, of the first layer.
fn shared_networks(share: u8, down_too: bool) -> String {
    let model = model(Variant::Moe26b);
    let plan = gemma4::plan(&model).with_products_gathered();
    let layer = &model.layers[0];
    let moe = layer.moe.as_ref().expect("has experts");
    let mut matrices: BTreeSet<Weight> = [moe.gate, moe.up, layer.ffn.gate, layer.ffn.up].into();
    if down_too {
        matrices.extend([moe.down, layer.ffn.down]);
    }
    let host = HostWeights {
        tables: TableMemory::Device,
        matrices,
        cpu_share: share,
    };
    let mut networks = HostNetworks::new(&host);
    let target = Target::hopper(Fusion::On, SMALL);
    let all = list_with(&plan, &model.weights, target, &mut networks).unwrap();
    let of_layer = all.lines().filter(|line| line.starts_with("L0.ffn"));
    let mut text = of_layer.collect::<Vec<_>>().join("\n") + "\n";
    for n in &networks.list {
        let (gated, down) = (n.gated_from, n.down_from);
        writeln!(text, "host: gate and up from {gated}, down from {down}").unwrap();
    }
    text
}

#[test]
fn networks_in_host_memory_are_shared_with_the_host() {
    expect![[r#"
        L0.ffn.norm                all     rms_norm                   %13 -> %14
        L0.ffn.gate+up input to the host all     host_send                  %14 s3 -> s3
        L0.ffn.gate+up own inner part all     gemv_4.q4.plain            %14 -> s4
        L0.ffn.gate+up inner part to the host all     host_send                  s4 s3 -> s3
        L0.ffn.gate+up inner part from the host all     host_receive               s4 s3 -> %17
        L0.ffn.down own part       all     gemv_4.q4.plain            %17 -> s5
        L0.ffn.down from the host  all     host_receive               s5 s3 -> %18
        L0.ffn.route scores        all     gemv_4.f32.normed          %13 -> s6
        L0.ffn.route               all     route                      s6 -> s7
        L0.ffn.experts_norm        all     rms_norm                   %13 -> %22
        L0.ffn.experts input to the host all     host_send                  %22 s3 s7 -> s3
        L0.ffn.experts own inner part all     gemv_routed_4.q4.plain     %22 s7 -> s4
        L0.ffn.experts inner part to the host all     host_send                  s4 s3 s7 -> s3
        L0.ffn.experts inner part from the host all     host_receive               s4 s3 -> s8
        L0.ffn.experts own part    all     gemv_routed_4.q4.plain     s8 s7 -> s9
        L0.ffn.experts sum         all     experts_sum                s9 s7 -> s5
        L0.ffn.experts from the host all     host_receive               s5 s3 -> %23
        L0.ffn.dense_post_norm     all     fused_branches_norm        %18 %13 %23 -> %29
        host: gate and up from 32, down from 32
        host: gate and up from 32, down from 32
    "#]]
    .assert_eq(&shared_networks(60, true));
}

#[test]
fn networks_of_the_host_alone_are_sent_once_and_come_back_once() {
    expect![[r#"
        L0.ffn.norm                all     rms_norm                   %13 -> %14
        L0.ffn.gate+up input to the host all     host_send                  %14 s3 -> s3
        L0.ffn.down from the host  all     host_receive               s3 -> %18
        L0.ffn.route scores        all     gemv_4.f32.normed          %13 -> s5
        L0.ffn.route               all     route                      s5 -> s6
        L0.ffn.experts_norm        all     rms_norm                   %13 -> %22
        L0.ffn.experts input to the host all     host_send                  %22 s3 s6 -> s3
        L0.ffn.experts from the host all     host_receive               s3 -> %23
        L0.ffn.dense_post_norm     all     fused_branches_norm        %18 %13 %23 -> %29
        host: gate and up from 0, down from 0
        host: gate and up from 0, down from 0
    "#]]
    .assert_eq(&shared_networks(100, true));
}

#[test]
fn a_matrix_on_the_card_is_multiplied_there() {
    expect![[r#"
        L0.ffn.norm                all     rms_norm                   %13 -> %14
        L0.ffn.gate+up input to the host all     host_send                  %14 s3 -> s3
        L0.ffn.gate+up own inner part all     gemv_4.q4.plain            %14 -> s4
        L0.ffn.gate+up inner part from the host all     host_receive               s4 s3 -> %17
        L0.ffn.down input          all     prepare_rows.plain         %17 -> s0
        L0.ffn.down                all     gemv_4.q4.ready            s0 -> %18
        L0.ffn.route scores        all     gemv_4.f32.normed          %13 -> s5
        L0.ffn.route               all     route                      s5 -> s6
        L0.ffn.experts_norm        all     rms_norm                   %13 -> %22
        L0.ffn.experts input to the host all     host_send                  %22 s3 s6 -> s3
        L0.ffn.experts own inner part all     gemv_routed_4.q4.plain     %22 s6 -> s4
        L0.ffn.experts inner part from the host all     host_receive               s4 s3 -> s7
        L0.ffn.experts own part    all     gemv_routed_4.q4.plain     s7 s6 -> s8
        L0.ffn.experts sum         all     experts_sum                s8 s6 -> %23
        L0.ffn.dense_post_norm     all     fused_branches_norm        %18 %13 %23 -> %29
        host: gate and up from 32, down from 64
        host: gate and up from 32, down from 64
    "#]]
    .assert_eq(&shared_networks(60, false));
}

/// Gate and up that are wide enough write what down reads, quantized; the host reads floats.
#[test]
fn inner_values_are_codes_for_the_card_and_floats_for_the_host() {
    let mut tiny = Tiny::new(Variant::Dense12b, QuantType::Q4_0);
    tiny.dimensions.ffn.fill(15360);
    let model = tiny.model();
    let plan = gemma4::plan(&model).with_products_gathered();
    let down = model.layers[0].ffn.down;
    let network = |matrices: BTreeSet<Weight>| {
        let host = HostWeights {
            tables: TableMemory::Device,
            matrices,
            cpu_share: 60,
        };
        let mut networks = HostNetworks::new(&host);
        let target = Target::hopper(Fusion::On, SMALL);
        let all = list_with(&plan, &model.weights, target, &mut networks).unwrap();
        let of_layer = all.lines().filter(|line| line.starts_with("L0.ffn"));
        of_layer.collect::<Vec<_>>().join("\n")
    };
    expect![[r#"
        L0.ffn.gate+up input       all     prepare_rows.normed        %11 %0 -> %13 s0
        L0.ffn.gate+up             all     gemv_4.q4.ready            s0 -> s3
        L0.ffn.down                all     gemv_4.q4.ready            s3 -> %18"#]]
    .assert_eq(&network(BTreeSet::new()));
    expect![[r#"
        L0.ffn.gate+up input       all     prepare_rows.normed        %11 %0 -> %13 s0
        L0.ffn.gate+up             all     gemv_4.q4.ready            s0 -> %17
        L0.ffn.down inner part to the host all     host_send                  %17 s3 -> s3
        L0.ffn.down own part       all     gemv_4.q4.plain            %17 -> s4
        L0.ffn.down from the host  all     host_receive               s4 s3 -> %18"#]]
    .assert_eq(&network([down].into()));
}
