//! Twins of the kernels: each file here mirrors the params struct of a `.cu` file, chooses its grid and states what must hold.
//!
//! A [`Kernel`] value says what to do in terms of the plan (values, weights, slots). It becomes a launch only when addresses
//! are known, so lowering needs no device. Grids depend on row counts alone and params on nothing that changes from batch to
//! batch: any launch can be captured and replayed.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod catalog;
pub(crate) mod draft;
pub(crate) mod elementwise;
mod embed;
pub(crate) mod fragment;
mod grid;
pub(crate) mod host;
pub(crate) mod linear;
pub(crate) mod load;
pub(crate) mod moe;
pub(crate) mod norm;
mod operands;
pub(crate) mod params;
pub(crate) mod roofline;
mod sample;
mod specialization;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod weights;

pub(crate) use activation::{Activation, Int8Operands};
pub(crate) use attention::attend::Attend;
pub(crate) use attention::flash_decode::{Columns, DecodeOut, FlashDecode, HeadNorm, Heads, OwnKv};
pub(crate) use attention::flash_prefill::{
    AttentionOut, AttentionShape, FlashPrefill, KeysAndValues,
};
pub(crate) use attention::keys_from_values::KeysFromValues;
pub(crate) use attention::kv_norm_rope_store::{KvNormRopeStore, MAX_HEAD_DIM};
pub(crate) use attention::move_pages::{
    MAX_MOVES, MovePagesParams, PageSegment, grid as move_pages_grid,
    specialization as move_pages_specialization,
};
pub(crate) use attention::qkv_norm_rope::{HEAD_DIMS, KeysValues, QkvNormRope, Queries};
pub(crate) use attention::rope::Rope;
pub(crate) use attention::store_kv::StoreKv;
pub(crate) use attention::update_tables::{
    UPDATE_WORDS, UpdateTablesParams, grid as update_tables_grid,
    specialization as update_tables_specialization,
};
pub(crate) use draft::cluster_logits::ClusterLogits;
pub(crate) use draft::draft_next::{
    BEST_BYTES as DRAFT_BEST_BYTES, DraftNextParams, grid as draft_next_grid,
    specialization as draft_next_specialization,
};
pub(crate) use draft::nearest_clusters::{MAX_CLUSTERS, NearestClusters, chosen_words};
pub(crate) use elementwise::convert::Convert;
pub(crate) use elementwise::geglu::{Geglu, MAX_COLUMNS as GELU_MAX_COLUMNS};
pub(crate) use elementwise::pointwise::{ColumnSlice, Function, Pointwise};
pub(crate) use elementwise::select_sampled::{
    SelectSampled, SelectSampledParams, grid as select_sampled_grid,
    specialization as select_sampled_specialization,
};
pub(crate) use embed::embed_rows::{EmbedRows, TableFormat};
pub(crate) use embed::feed_samples::{
    FROM_SAMPLE, FeedSamplesParams, grid as feed_samples_grid,
    specialization as feed_samples_specialization,
};
pub(crate) use embed::ple_inputs::{MAX_GROUP, PleInputs};
pub(crate) use grid::HOPPER_MULTIPROCESSORS;
pub(crate) use host::{HostAt, HostStage, host_receive::HostReceive, host_send::HostSend};
pub use linear::gemm::GemmTile;
pub(crate) use linear::gemm::{
    ExpertGroups, ExpertTiles, Gemm, GemmEpilogue, GemmInput, GemmOutput, GemmShape, GemmWeights,
    PermutationOperands,
};
pub(crate) use linear::gemm_medium::{
    GemmMedium, GemmMediumEpilogue, GemmMediumKernel, GemmMediumOut, GemmMediumShape,
};
pub(crate) use linear::gemm_packed::{
    GROUPED_TOKENS, GemmPacked, GemmPackedEpilogue, GemmPackedOut, GemmPackedShape,
};
pub(crate) use linear::gemv::{
    Gemv, GemvDevice, GemvEpilogue, GemvPrologue, GemvPrologueNorm, GemvShape, GemvWeights,
    OutputRows, Overlap, RoutedExperts, USUAL_STAGES,
};
pub(crate) use linear::linear_plain::LinearPlain;
pub(crate) use linear::ple_branch::{PleBranch, PleProduct};
pub(crate) use linear::prepare_rows::{PrepareRows, PreparedRows};
pub(crate) use load::dequantize::{Dequantize, HalfKind};
pub(crate) use load::pack::Pack;
pub(crate) use moe::experts_linear::{ExpertInput, ExpertsLinear};
pub(crate) use moe::experts_sum::ExpertsSum;
pub(crate) use moe::permute::MoePermute;
pub(crate) use moe::route::{MAX_EXPERTS, Route, ScoreParts};
pub(crate) use moe::router_scores::{PARTS, RouterScores, RouterWeights};
pub(crate) use norm::fused_norm::{
    BranchExperts, BranchNorms, FusedNorm, FusedResidualNorm, MAX_COLUMNS as NORM_MAX_COLUMNS,
    NormOut,
};
pub(crate) use norm::rms_norm::RmsNorm;
pub(crate) use operands::{
    Addresses, BatchAt, InputsAt, MatrixAt, Operand, PagesAt, RowRefsAt, RowsAt, RunsAt, SlotAt,
    TablesAt, TiedAt,
};
pub(crate) use sample::{
    CHANGE, CHANGE_WORDS, Change, Draw, MASK_SETS, MAX_DRAWN_ROWS, MAX_LOGPROBS, MAX_TOP_K,
    MAX_VOCAB, NONE, REPORT_WORDS, SETTING_WORDS, SampleParams, SamplerInputs, ScratchAt, Setting,
    grids, mask_words, sampler_bytes, specializations as sample_specializations,
};
pub(crate) use specialization::{Kernel, Specialization};
pub(crate) use weights::{Join, WeightFormat, WeightOperand};
