//! Twin of `kernels/linear/prepare_rows.cu`: the prologue of a GEMV of several rows, done once for all its blocks.

use super::gemv::{GemvPrologue, GemvPrologueParams, INPUTS, MAX_ROWS};
use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization, WeightOperand};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

/// Columns of a part of a plain row, and the threads that take it.
const PART: usize = 2048;
const PART_THREADS: usize = 256;

params! {
    pub(super) struct PrepareRowsParams {
        input: GemvPrologueParams,
        codes: Address,
        scales: Address,
        sums: Address,
        columns: u32,
        padded: u32,
        rows: RowsAt,
        early: u32,
        reserved: u32,
    }
}

/// Where the prepared rows of a product lie: codes of [`MAX_ROWS`] rows, then scales and sums of their blocks of 32. More rows are several of
/// these, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PreparedRows {
    pub(crate) at: Operand,
    /// Columns of a row, with those behind its end up to that of the product's last stage.
    pub(crate) padded: usize,
}

impl PreparedRows {
    /// Bytes of prepared rows with so many columns.
    pub(crate) fn bytes(padded: usize) -> usize {
        MAX_ROWS * (padded + 2 * padded / 32 * size_of::<f32>())
    }

    /// The same for any number of rows.
    pub(crate) fn bytes_of(rows: usize, padded: usize) -> usize {
        rows.div_ceil(MAX_ROWS) * PreparedRows::bytes(padded)
    }

    /// Addresses of codes, scales and sums.
    pub(super) fn addresses(self, at: &Addresses) -> [Address; 3] {
        addresses(at.operand(self.at), self.padded)
    }
}

/// The same for rows that start here.
pub(super) fn addresses(start: Address, padded: usize) -> [Address; 3] {
    let codes = MAX_ROWS * padded;
    let blocks = MAX_ROWS * padded / 32 * size_of::<f32>();
    [0, codes, codes + blocks].map(|offset| start.offset(offset))
}

#[derive(Debug)]
pub(crate) struct PrepareRows {
    pub(crate) prologue: GemvPrologue,
    pub(crate) columns: usize,
    pub(crate) out: PreparedRows,
    /// Threads of the product's blocks.
    pub(crate) threads: usize,
    /// Whether the product wants sums of codes.
    pub(crate) sums: bool,
    /// Launched with PDL.
    pub(crate) pdl: bool,
    /// Its input was there before the launch before it started, so it need not wait for that one to read it.
    pub(crate) early: bool,
}

pub(crate) fn specializations() -> impl Iterator<Item = Specialization> {
    let kinds = INPUTS
        .into_iter()
        .flat_map(|input| [false, true].map(|sums| (input, sums)));
    kinds.map(|(input, sums)| specialization(input, sums))
}

pub(super) fn specialization(input: &str, sums: bool) -> Specialization {
    Specialization {
        kernel: "prepare_rows",
        entries: &["prepare_rows"],
        constants: vec![
            ("INPUT", input.to_owned()),
            ("SUMS", u32::from(sums).to_string()),
            ("PART", PART.to_string()),
        ],
        params_bytes: PrepareRowsParams::BYTES,
    }
}

/// The grid of plain rows, or of rows that so many threads norm.
pub(super) fn grid(rows: usize, padded: usize, threads: Option<usize>) -> Grid {
    match threads {
        None => Grid::new((rows, padded.div_ceil(PART)), PART_THREADS),
        Some(threads) => Grid::new((rows, 1), threads),
    }
}

impl Kernel for PrepareRows {
    fn specialization(&self) -> Specialization {
        specialization(self.prologue.input(), self.sums)
    }

    fn grid(&self, rows: usize) -> Grid {
        let is_plain = matches!(self.prologue, GemvPrologue::None { .. });
        Grid {
            pdl: self.pdl,
            ..grid(rows, self.out.padded, (!is_plain).then_some(self.threads))
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let [codes, scales, sums] = self.out.addresses(at);
        PrepareRowsParams {
            input: self.prologue.params(at, self.columns),
            codes,
            scales,
            sums,
            columns: self.columns as u32,
            padded: self.out.padded as u32,
            rows,
            early: u32::from(self.early && self.pdl),
            reserved: 0,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        self.prologue.weights()
    }

    fn reads(&self) -> Vec<Operand> {
        self.prologue.reads()
    }

    fn writes(&self) -> Vec<Operand> {
        self.prologue
            .sum()
            .into_iter()
            .chain([self.out.at])
            .collect()
    }
}
