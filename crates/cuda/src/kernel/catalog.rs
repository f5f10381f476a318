//! The kernels that are compiled ahead: every specialization that lowering or loading can choose.
//!
//! A test of lowering holds the list to what the published models ask for. Shapes of other models may need more; those are
//! compiled when the model is loaded.

use carat_gguf::QuantType;
use carat_model::kv::KvType;

use super::{
    Dequantize, FlashDecode, HalfKind, Pack, RouterWeights, Specialization, attention, draft,
    elementwise, embed, fragment::FragmentFormat, host, linear, moe, norm, roofline, sample,
};

const KV_TYPES: [KvType; 2] = [KvType::F16, KvType::Q8_0];

/// Specializations for every architecture.
pub(crate) fn all() -> Vec<Specialization> {
    let mut all = vec![
        norm::rms_norm::specialization(),
        attention::move_pages::specialization(),
        attention::rope::specialization(),
        attention::update_tables::specialization(),
        draft::draft_next::specialization(),
        draft::nearest_clusters::specialization(draft::nearest_clusters::PUBLISHED),
        elementwise::pointwise::specialization(),
        elementwise::select_sampled::specialization(),
        elementwise::convert::specialization(),
        elementwise::geglu::specialization(false),
        embed::feed_samples::specialization(),
        host::host_receive::specialization(),
        host::host_send::specialization(),
        moe::permute::specialization(),
        moe::route::specialization(),
        moe::router_scores::specialization(RouterWeights::F32),
        moe::router_scores::specialization(RouterWeights::BF16),
        moe::experts_sum::specialization(),
    ];
    all.extend(sample::specializations());
    all.extend(norm::fused_norm::HOLDS.map(norm::fused_norm::specialization));
    all.extend(linear::gemv::specializations(false));
    all.extend(linear::gemv::ready_specializations());
    all.extend(linear::gemv::grouped_specializations());
    all.extend(linear::prepare_rows::specializations());
    all.extend(linear::gemm::specializations());
    all.extend(linear::gemm_medium::specializations(false));
    for kv in KV_TYPES {
        all.push(attention::store_kv::specialization(kv));
        all.push(attention::kv_norm_rope_store::specialization(kv));
        all.push(attention::keys_from_values::specialization(kv));
        let qkv = |head_dim| attention::qkv_norm_rope::specialization(head_dim, kv);
        all.extend(attention::qkv_norm_rope::HEAD_DIMS.map(qkv));
        let attend = |values| attention::attend::specialization(values, kv, false);
        all.extend(attention::attend::LANE_VALUES.map(attend));
        all.extend(attention::flash_prefill::specializations(kv));
        let shapes = attention::flash_decode::SHAPES.map(|heads| heads.with_kv(kv));
        let taken = shapes
            .into_iter()
            .filter(|heads| FlashDecode::takes(*heads));
        all.extend(taken.map(attention::flash_decode::specialization));
    }
    for quant in QuantType::all() {
        all.push(draft::cluster_logits::specialization(quant));
        all.push(embed::embed_rows::specialization(quant));
        all.push(embed::ple_inputs::specialization(quant));
        all.push(linear::linear_plain::specialization(quant));
        all.push(moe::experts_linear::specialization(quant));
        all.push(Dequantize::specialization(quant, HalfKind::F16));
        if FragmentFormat::of(quant).is_some() {
            all.push(Pack::specialization(quant));
        }
    }
    for quant in [QuantType::F32, QuantType::BF16] {
        all.push(Dequantize::specialization(quant, HalfKind::Bf16));
    }
    all.extend(FragmentFormat::ALL.map(embed::embed_rows::fragments_specialization));
    all.extend(roofline::specializations());
    all
}

/// Specializations that `sm_90a` has besides.
pub(crate) fn hopper() -> Vec<Specialization> {
    let mut all: Vec<_> = KV_TYPES
        .into_iter()
        .flat_map(attention::flash_prefill::hopper_specializations)
        .collect();
    let long = attention::flash_decode::SHAPES.into_iter();
    let long = long.filter(|heads| heads.is_tied() && heads.head_dim > 256 && heads.group() > 8);
    let wide = long.flat_map(|heads| KV_TYPES.map(|kv| heads.with_kv(kv).wide()));
    all.extend(wide.map(attention::flash_decode::specialization));
    all.push(elementwise::geglu::specialization(true));
    all.extend(linear::gemv::specializations(true));
    all.extend(linear::gemv::alone_specializations());
    all.extend(linear::gemm_medium::specializations(true));
    all.extend(linear::gemm_packed::specializations());
    all.extend(linear::ple_branch::specializations());
    all
}
