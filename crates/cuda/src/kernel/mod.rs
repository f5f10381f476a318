//! Twins of the kernels: each file here mirrors the params struct of a `.cu` file, chooses its grid and states what must hold.
//!
//! A kernel value says what to do in terms of the plan (values, weights, slots). It becomes a launch only when addresses are
//! known, so lowering needs no device. Grids depend on row counts alone and params on nothing that changes from batch to
//! batch: any launch can be captured and replayed.

mod attend;
mod attend_narrow;
mod attend_wide;
mod convert;
mod elementwise;
mod embed;
mod expand;
mod expert_tiles;
mod experts;
mod form;
mod gelu_mul_wide;
mod gemm;
mod gemv;
mod layer_inputs;
mod linear;
mod narrow;
mod norm;
mod norm_rope_store;
mod norm_wide;
mod operands;
mod pack;
mod qkv_wide;
mod rope;
mod sample;
mod store_kv;
#[cfg(test)]
mod testing;

use std::fmt;

use carat_gguf::QuantType;

use crate::{launch::Grid, measure, panels::PanelFormat, weights::Packed};

pub(crate) use attend::Attend;
pub(crate) use attend_narrow::{AttendNarrow, Columns, HeadNorm, Heads, OwnKv};
pub(crate) use attend_wide::{AttendOut, AttendWide, Attention};
pub(crate) use convert::Convert;
pub(crate) use elementwise::{Elementwise, Function, Second};
pub(crate) use embed::{Embed, TableForm};
pub(crate) use expand::{Expand, Narrowed};
pub(crate) use expert_tiles::ExpertTiles;
pub(crate) use experts::{ExpertsLinear, ExpertsSum, MOST_EXPERTS, Route, XRows};
pub(crate) use form::{Form, Q8Places};
pub(crate) use gelu_mul_wide::{GeluMulWide, MOST_COLUMNS as GELU_MOST_COLUMNS};
pub(crate) use gemm::{
    Epilogue as GemmEpilogue, Gemm, GemmInput, GemmOutput, GemmShape, GemmWeights, GroupPlaces,
    Groups,
};
pub(crate) use gemv::{
    Choices, ChoicesKind, Epilogue, Gemv, GemvCard, GemvForm, GemvShape, Part as GemvPart,
    Prologue, PrologueNorm,
};
pub(crate) use layer_inputs::{LayerInputs, MOST_GROUP};
pub(crate) use linear::Linear;
pub(crate) use narrow::Narrow;
pub(crate) use norm::Norm;
pub(crate) use norm_rope_store::{MOST_HEAD_DIM, NormRopeStore};
pub(crate) use norm_wide::{MOST_COLUMNS as NORM_MOST_COLUMNS, NormAddWide, NormOut, NormWide};
pub(crate) use operands::{
    Addresses, BatchAt, MatrixAt, Place, PlacesAt, RowsAt, RunsAt, SlotAt, TablesAt,
};
pub(crate) use pack::Pack;
pub(crate) use qkv_wide::{HEAD_DIMS, KeysValues, QkvWide, Queries};
pub(crate) use rope::Rope;
pub(crate) use sample::{
    Change, Draw, MOST_TOP_K, MOST_VOCAB, SampleParams, Setting, grids, scratch_bytes,
    specialization as sample_specialization,
};
pub(crate) use store_kv::StoreKv;

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
        norm::specialization(),
        norm_rope_store::specialization(),
        rope::specialization(),
        store_kv::specialization(),
        elementwise::specialization(),
        narrow::specialization(),
        convert::specialization(),
        gelu_mul_wide::specialization(),
        sample::specialization(),
        expert_tiles::specialization(),
        experts::route_specialization(),
        experts::sum_specialization(),
    ];
    all.extend(norm_wide::HOLDS.map(norm_wide::specialization));
    all.extend(qkv_wide::HEAD_DIMS.map(qkv_wide::specialization));
    all.extend(gemv::specializations());
    all.extend(gemm::specializations());
    all.extend(attend::LANE_VALUES.map(attend::specialization));
    all.extend(attend_wide::specializations());
    all.extend(attend_narrow::SHAPES.map(attend_narrow::specialization));
    for quant in QuantType::all() {
        all.push(embed::specialization(quant));
        all.push(layer_inputs::specialization(quant));
        all.push(linear::specialization(quant));
        all.push(experts::linear_specialization(quant));
        all.push(Expand::specialization(quant, Narrowed::Half));
        if PanelFormat::of(quant).is_some() {
            all.push(Pack::specialization(quant));
        }
    }
    for quant in [QuantType::F32, QuantType::BF16] {
        all.push(Expand::specialization(quant, Narrowed::Bf16));
    }
    all.extend(PanelFormat::ALL.map(embed::panels_specialization));
    all.extend(measure::specializations());
    all
}

/// What lowering can choose beside those where code is made for `sm_90a`.
pub(crate) fn hopper() -> Vec<Specialization> {
    attend_wide::hopper_specializations()
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
