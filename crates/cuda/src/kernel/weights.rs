//! Weights as kernels name them: which matrices, joined how, in which format. Their addresses are the business of
//! `compile/weights.rs`.

use carat_model::weights::Weight;
#[cfg(doc)]
use carat_model::weights::Weights;

/// Format and order of a weight's values on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WeightFormat {
    /// One row, as f32.
    Vector,
    /// As [`File`](WeightFormat::File), but only looked up, one row per token; may lie in host memory.
    Table,
    /// Rows packed, in the file's format.
    File,
    /// MMA-fragment-major, of formats that have it. See [`fragment`](super::fragment).
    Fragments,
    /// F16, row-major. Of F16 exact, of all else rounded.
    F16,
    /// BF16, row-major: F32 whose lower 16 bits are zero ([`Weights::is_exact_bf16`]).
    Bf16,
}

/// Order of the parts of a joined matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Join {
    /// One after another; in fragments each is padded to whole M-tiles.
    Stacked,
    /// M-tiles of the parts alternate. Fragments only, of parts with equally many M-tiles.
    Interleaved,
}

/// One or more weights as a kernel reads them. Parts have the same inputs and, unless they become floats, the same
/// layout. Stacks of matrices (experts) are joined matrix by matrix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WeightOperand {
    pub(crate) parts: Vec<Weight>,
    pub(crate) join: Join,
    pub(crate) format: WeightFormat,
}

impl WeightOperand {
    pub(crate) fn one(weight: Weight, format: WeightFormat) -> WeightOperand {
        WeightOperand::stacked(&[weight], format)
    }

    pub(crate) fn stacked(parts: &[Weight], format: WeightFormat) -> WeightOperand {
        WeightOperand {
            parts: parts.to_vec(),
            join: Join::Stacked,
            format,
        }
    }

    /// Fragments whose M-tiles alternate.
    pub(crate) fn interleaved(parts: &[Weight]) -> WeightOperand {
        WeightOperand {
            parts: parts.to_vec(),
            join: Join::Interleaved,
            format: WeightFormat::Fragments,
        }
    }

    /// Operands of those vectors that there are.
    pub(crate) fn vectors<const N: usize>(weights: [Option<Weight>; N]) -> Vec<WeightOperand> {
        let vector = |w: Weight| WeightOperand::one(w, WeightFormat::Vector);
        weights.into_iter().flatten().map(vector).collect()
    }
}
