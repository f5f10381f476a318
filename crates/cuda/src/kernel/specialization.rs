//! A kernel call before addresses are known, and the compiled code it asks for.
//!
//! Lowering makes [`Kernel`] values; calls that agree on kernel and constants share one [`Specialization`], which is compiled
//! once. Nothing here compiles or launches.

use std::fmt;

use carat_gguf::QuantType;
use carat_model::kv::KvType;

use super::{Addresses, Operand, RowsAt, WeightOperand};
use crate::device::Grid;

/// One kernel with everything it needs but addresses.
pub(crate) trait Kernel: fmt::Debug {
    /// The compiled kernel it calls.
    fn specialization(&self) -> Specialization;

    /// The grid for this many rows, at least one.
    fn grid(&self, rows: usize) -> Grid;

    /// Bytes of its params struct.
    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8>;

    /// Lets the launch behind it start only when the launch before it is over, so that what that wrote is there from the start;
    /// false if it cannot.
    fn delay_trigger(&mut self) -> bool {
        false
    }

    /// Weights it reads, in the formats it reads them in.
    fn weights(&self) -> Vec<WeightOperand> {
        vec![]
    }

    /// Operands it reads, except weights and KV.
    fn reads(&self) -> Vec<Operand>;

    /// Operands it writes, except KV.
    fn writes(&self) -> Vec<Operand>;

    /// Whether it asks the host for a step.
    fn asks_host(&self) -> bool {
        false
    }

    /// Whether what it writes must still be multiplied by one factor per row: it is no value of the plan yet.
    fn is_scaled(&self) -> bool {
        false
    }
}

/// A kernel's text with its constants: compiled once and shared by all calls that agree on both.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Specialization {
    /// `kernels/<family>/<this>.cu`.
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

/// The constant that chooses how `lib/kv.cuh` keeps keys and values, if not in f16.
pub(super) fn kv_constant(kv: KvType) -> Option<(&'static str, String)> {
    match kv {
        KvType::F16 => None,
        KvType::Q8_0 => Some(("KV_TYPE", "KV_Q8_0".to_owned())),
    }
}

/// The same with that of keys, which are f16 where they are made from values.
pub(super) fn kv_constants(kv: KvType, tied: bool) -> impl Iterator<Item = (&'static str, String)> {
    let keys = (tied && kv != KvType::F16).then(|| ("KEY_TYPE", "KV_F16".to_owned()));
    kv_constant(kv).into_iter().chain(keys)
}

/// The constant that chooses a format's functions in `lib/format.cuh`.
pub(super) fn format_constant(quant: QuantType) -> (&'static str, String) {
    ("FORMAT", quant.name().to_lowercase())
}
