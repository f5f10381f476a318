//! Weights as kernels name them: which matrices, joined how, in which form. Where those lie is the compiler's business.

use carat_model::weights::Weight;
#[cfg(doc)]
use carat_model::weights::Weights;

/// How values lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Form {
    /// One row, as f32.
    Vector,
    /// As [`File`](Form::File), but only looked up, a row a token; may lie in host memory.
    Table,
    /// Rows packed, in the file's format.
    File,
    /// Strips for tensor cores; of formats that have them. See [`panels`](super::panels).
    Panels,
    /// F16, row-major. Of F16 exact, of all else rounded.
    Half,
    /// BF16, row-major: weights that [`narrow`](Weights::narrows).
    Bf16,
}

/// How the parts of a joined matrix follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Join {
    /// One after another; in panels each is padded to whole strips.
    Stacked,
    /// Strip by strip in turn. Panels only, of parts with equally many strips.
    Interleaved,
}

/// One or more weights as a kernel reads them. Parts have the same inputs and, unless they become floats, the same
/// layout. Stacks of matrices (experts) are joined matrix by matrix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Packed {
    pub(crate) parts: Vec<Weight>,
    pub(crate) join: Join,
    pub(crate) form: Form,
}

impl Packed {
    pub(crate) fn one(weight: Weight, form: Form) -> Packed {
        Packed::stacked(&[weight], form)
    }

    pub(crate) fn stacked(parts: &[Weight], form: Form) -> Packed {
        Packed {
            parts: parts.to_vec(),
            join: Join::Stacked,
            form,
        }
    }

    /// Panels whose strips take turns.
    pub(crate) fn interleaved(parts: &[Weight]) -> Packed {
        Packed {
            parts: parts.to_vec(),
            join: Join::Interleaved,
            form: Form::Panels,
        }
    }

    /// The vectors that are there.
    pub(crate) fn vectors<const N: usize>(weights: [Option<Weight>; N]) -> Vec<Packed> {
        let vector = |w: Weight| Packed::one(w, Form::Vector);
        weights.into_iter().flatten().map(vector).collect()
    }
}
