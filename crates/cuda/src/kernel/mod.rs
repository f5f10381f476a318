//! Twins of the kernels: each file here mirrors the params struct of a `.cu` file, chooses its grid and states what must hold.
//!
//! A kernel value says what to do in terms of the plan (values, weights, slots). It becomes a launch only when addresses are
//! known, so lowering needs no device. Grids depend on row counts alone and params on nothing that changes from batch to
//! batch: any launch can be captured and replayed.

mod attention;
mod elementwise;
mod embed;
mod form;
mod linear;
mod load;
mod moe;
mod norm;
mod operands;
pub(crate) mod panels;
pub(crate) mod params;
pub(crate) mod roofline;
mod sample;
#[cfg(test)]
mod testing;
pub(crate) mod weights;

use std::fmt;

use carat_gguf::QuantType;

use panels::PanelFormat;

use crate::device::Grid;

pub(crate) use attention::attend::Attend;
pub(crate) use attention::attend_narrow::{AttendNarrow, Columns, HeadNorm, Heads, OwnKv};
pub(crate) use attention::attend_wide::{AttendOut, AttendWide, Attention};
pub(crate) use attention::norm_rope_store::{MOST_HEAD_DIM, NormRopeStore};
pub(crate) use attention::qkv_wide::{HEAD_DIMS, KeysValues, QkvWide, Queries};
pub(crate) use attention::rope::Rope;
pub(crate) use attention::store_kv::StoreKv;
pub(crate) use elementwise::convert::Convert;
pub(crate) use elementwise::elementwise::{Elementwise, Function, Second};
pub(crate) use elementwise::gelu_mul_wide::{GeluMulWide, MOST_COLUMNS as GELU_MOST_COLUMNS};
pub(crate) use elementwise::narrow::Narrow;
pub(crate) use embed::embed::{Embed, TableForm};
pub(crate) use embed::layer_inputs::{LayerInputs, MOST_GROUP};
pub(crate) use form::{Form, Q8Places};
pub(crate) use linear::gemm::{
    Epilogue as GemmEpilogue, Gemm, GemmInput, GemmOutput, GemmShape, GemmWeights, GroupPlaces,
    Groups,
};
pub(crate) use linear::gemv::{
    Choices, ChoicesKind, Epilogue, Gemv, GemvCard, GemvForm, GemvShape, Part as GemvPart,
    Prologue, PrologueNorm,
};
pub(crate) use linear::linear::Linear;
pub(crate) use load::expand::{Expand, Narrowed};
pub(crate) use load::pack::Pack;
pub(crate) use moe::expert_tiles::ExpertTiles;
pub(crate) use moe::experts::{ExpertsLinear, ExpertsSum, MOST_EXPERTS, Route, XRows};
pub(crate) use norm::norm::Norm;
pub(crate) use norm::norm_wide::{
    MOST_COLUMNS as NORM_MOST_COLUMNS, NormAddWide, NormOut, NormWide,
};
pub(crate) use operands::{
    Addresses, BatchAt, MatrixAt, Place, PlacesAt, RowsAt, RunsAt, SlotAt, TablesAt,
};
pub(crate) use sample::{
    CHANGE, CHANGE_WORDS, Change, Draw, MOST_DRAWN_ROWS, MOST_TOP_K, MOST_VOCAB, SETTING_WORDS,
    SampleParams, SamplerInputs, Setting, grids, sampler_bytes, scratch_bytes,
    specialization as sample_specialization,
};
pub(crate) use weights::{Form as WeightForm, Join, Packed};

/// One kernel with everything it needs but addresses.
pub(crate) trait Kernel: fmt::Debug {
    /// Which compiled kernel it is.
    fn specialization(&self) -> Specialization;

    /// How it is launched for this many rows, at least one.
    fn grid(&self, rows: usize) -> Grid;

    /// The bytes of its params struct.
    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8>;

    /// The weights it reads, in the forms it reads them in.
    fn weights(&self) -> Vec<Packed> {
        vec![]
    }

    /// What it reads, except weights and KV.
    fn reads(&self) -> Vec<Place>;

    /// What it writes, except KV.
    fn writes(&self) -> Vec<Place>;
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
        norm::norm::specialization(),
        attention::norm_rope_store::specialization(),
        attention::rope::specialization(),
        attention::store_kv::specialization(),
        elementwise::elementwise::specialization(),
        elementwise::narrow::specialization(),
        elementwise::convert::specialization(),
        elementwise::gelu_mul_wide::specialization(),
        sample::specialization(),
        moe::expert_tiles::specialization(),
        moe::experts::route_specialization(),
        moe::experts::sum_specialization(),
    ];
    all.extend(norm::norm_wide::HOLDS.map(norm::norm_wide::specialization));
    all.extend(attention::qkv_wide::HEAD_DIMS.map(attention::qkv_wide::specialization));
    all.extend(linear::gemv::specializations());
    all.extend(linear::gemm::specializations());
    all.extend(attention::attend::LANE_VALUES.map(attention::attend::specialization));
    all.extend(attention::attend_wide::specializations());
    all.extend(attention::attend_narrow::SHAPES.map(attention::attend_narrow::specialization));
    for quant in QuantType::all() {
        all.push(embed::embed::specialization(quant));
        all.push(embed::layer_inputs::specialization(quant));
        all.push(linear::linear::specialization(quant));
        all.push(moe::experts::linear_specialization(quant));
        all.push(Expand::specialization(quant, Narrowed::Half));
        if PanelFormat::of(quant).is_some() {
            all.push(Pack::specialization(quant));
        }
    }
    for quant in [QuantType::F32, QuantType::BF16] {
        all.push(Expand::specialization(quant, Narrowed::Bf16));
    }
    all.extend(PanelFormat::ALL.map(embed::embed::panels_specialization));
    all.extend(roofline::specializations());
    all
}

/// What lowering can choose beside those where code is made for `sm_90a`.
pub(crate) fn hopper() -> Vec<Specialization> {
    attention::attend_wide::hopper_specializations()
}

/// The constant that chooses a format's functions in `lib/format.cuh`.
fn format(quant: QuantType) -> (&'static str, String) {
    ("FORMAT", quant.name().to_lowercase())
}

/// The constant that chooses a layout in `lib/panel.cuh`.
fn panel(format: PanelFormat) -> (&'static str, String) {
    ("PANEL", format.name().to_owned())
}

/// Threads that take values one by one, and the strips of columns they make.
const STRIP: usize = 256;

/// A thread a value: rows by strips of columns.
fn strips(rows: usize, columns: usize) -> Grid {
    Grid::new((rows, columns.div_ceil(STRIP)), STRIP)
}

/// Threads that norm a group of this width. A function of the width alone: sums are taken in an order that depends on it.
fn norm_threads(group: usize) -> usize {
    group.next_multiple_of(32).min(512)
}
