//! Twins of the kernels: each file here mirrors the params struct of a `.cu` file, chooses its grid and states what must hold.
//!
//! A kernel value says what to do in terms of the plan (values, weights, slots). It becomes a launch only when addresses are
//! known, so lowering needs no device. Grids depend on row counts alone and params on nothing that changes from batch to
//! batch: any launch can be captured and replayed.

mod activation;
mod attention;
mod elementwise;
mod embed;
pub(crate) mod fragment;
mod linear;
mod load;
mod moe;
mod norm;
mod operands;
pub(crate) mod params;
pub(crate) mod roofline;
mod sample;
#[cfg(test)]
mod testing;
pub(crate) mod weights;

use std::fmt;

use carat_gguf::QuantType;

use fragment::FragmentFormat;

use crate::device::Grid;

pub(crate) use activation::{Activation, Int8Operands};
pub(crate) use attention::attend::Attend;
pub(crate) use attention::flash_decode::{Columns, FlashDecode, HeadNorm, Heads, OwnKv};
pub(crate) use attention::flash_prefill::{AttentionOut, AttentionShape, FlashPrefill};
pub(crate) use attention::kv_norm_rope_store::{KvNormRopeStore, MAX_HEAD_DIM};
pub(crate) use attention::qkv_norm_rope::{HEAD_DIMS, KeysValues, QkvNormRope, Queries};
pub(crate) use attention::rope::Rope;
pub(crate) use attention::store_kv::StoreKv;
pub(crate) use elementwise::convert::Convert;
pub(crate) use elementwise::geglu::{Geglu, MAX_COLUMNS as GELU_MAX_COLUMNS};
pub(crate) use elementwise::pointwise::{ColumnSlice, Function, Pointwise};
pub(crate) use elementwise::select_sampled::SelectSampled;
pub(crate) use embed::embed_rows::{EmbedRows, TableFormat};
pub(crate) use embed::ple_inputs::{MAX_GROUP, PleInputs};
pub(crate) use linear::gemm::{
    ExpertGroups, Gemm, GemmEpilogue, GemmInput, GemmOutput, GemmShape, GemmWeights,
    PermutationOperands,
};
pub(crate) use linear::gemv::{
    Gemv, GemvDevice, GemvEpilogue, GemvPrologue, GemvPrologueNorm, GemvShape, GemvWeights,
    OutputRows, RoutedExperts, RoutedOutput,
};
pub(crate) use linear::linear_plain::LinearPlain;
pub(crate) use load::dequantize::{Dequantize, HalfKind};
pub(crate) use load::pack::Pack;
pub(crate) use moe::experts::{ExpertInput, ExpertsLinear, ExpertsSum, MAX_EXPERTS, Route};
pub(crate) use moe::permute::MoePermute;
pub(crate) use norm::fused_norm::{
    FusedNorm, FusedResidualNorm, MAX_COLUMNS as NORM_MAX_COLUMNS, NormOut,
};
pub(crate) use norm::rms_norm::RmsNorm;
pub(crate) use operands::{
    Addresses, BatchAt, MatrixAt, Operand, RowRefsAt, RowsAt, RunsAt, SlotAt, TablesAt,
};
pub(crate) use sample::{
    CHANGE, CHANGE_WORDS, Change, Draw, MAX_DRAWN_ROWS, MAX_TOP_K, MAX_VOCAB, SETTING_WORDS,
    SampleParams, SamplerInputs, Setting, grids, sampler_bytes, scratch_bytes,
    specialization as sample_specialization,
};
pub(crate) use weights::{Join, WeightFormat, WeightOperand};

/// One kernel with everything it needs but addresses.
pub(crate) trait Kernel: fmt::Debug {
    /// Which compiled kernel it is.
    fn specialization(&self) -> Specialization;

    /// How it is launched for this many rows, at least one.
    fn grid(&self, rows: usize) -> Grid;

    /// The bytes of its params struct.
    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8>;

    /// The weights it reads, in the forms it reads them in.
    fn weights(&self) -> Vec<WeightOperand> {
        vec![]
    }

    /// What it reads, except weights and KV.
    fn reads(&self) -> Vec<Operand>;

    /// What it writes, except KV.
    fn writes(&self) -> Vec<Operand>;
}

/// A kernel's text with its constants: what is compiled once and shared by all calls that agree on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Specialization {
    /// `kernels/<this>.cu`.
    pub(crate) kernel: &'static str,
    /// Entry points, which [`Grid::entry`] counts.
    pub(crate) entries: &'static [&'static str],
    pub(crate) constants: Vec<(&'static str, String)>,
    pub(crate) params_bytes: usize,
}

impl fmt::Display for Specialization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kernel)?;
        for (_, value) in &self.constants {
            write!(f, ".{value}")?;
        }
        Ok(())
    }
}

/// Every specialization that lowering or loading can choose: what is compiled ahead, and what must compile for every architecture.
pub(crate) fn all() -> Vec<Specialization> {
    let mut all = vec![
        norm::rms_norm::specialization(),
        attention::kv_norm_rope_store::specialization(),
        attention::rope::specialization(),
        attention::store_kv::specialization(),
        elementwise::pointwise::specialization(),
        elementwise::select_sampled::specialization(),
        elementwise::convert::specialization(),
        elementwise::geglu::specialization(),
        sample::specialization(),
        moe::permute::specialization(),
        moe::experts::route_specialization(),
        moe::experts::sum_specialization(),
    ];
    all.extend(norm::fused_norm::HOLDS.map(norm::fused_norm::specialization));
    all.extend(attention::qkv_norm_rope::HEAD_DIMS.map(attention::qkv_norm_rope::specialization));
    all.extend(linear::gemv::specializations());
    all.extend(linear::gemm::specializations());
    all.extend(attention::attend::LANE_VALUES.map(attention::attend::specialization));
    all.extend(attention::flash_prefill::specializations());
    all.extend(attention::flash_decode::SHAPES.map(attention::flash_decode::specialization));
    for quant in QuantType::all() {
        all.push(embed::embed_rows::specialization(quant));
        all.push(embed::ple_inputs::specialization(quant));
        all.push(linear::linear_plain::specialization(quant));
        all.push(moe::experts::linear_specialization(quant));
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

/// What lowering can choose beside those where code is made for `sm_90a`.
pub(crate) fn hopper() -> Vec<Specialization> {
    attention::flash_prefill::hopper_specializations()
}

/// The constant that chooses a format's functions in `lib/format.cuh`.
fn format(quant: QuantType) -> (&'static str, String) {
    ("FORMAT", quant.name().to_lowercase())
}

/// The constant that chooses a layout in `lib/fragment.cuh`.
fn fragment_constant(format: FragmentFormat) -> (&'static str, String) {
    ("FRAGMENT", format.name().to_owned())
}

/// Threads that take values one by one, and the blocks of columns they make.
const BLOCK_THREADS: usize = 256;

/// One thread per value: rows by blocks of columns.
fn elementwise_grid(rows: usize, columns: usize) -> Grid {
    Grid::new((rows, columns.div_ceil(BLOCK_THREADS)), BLOCK_THREADS)
}

/// Threads that norm a group of this width. A function of the width alone: sums are taken in an order that depends on it.
fn norm_threads(group: usize) -> usize {
    group.next_multiple_of(32).min(512)
}
