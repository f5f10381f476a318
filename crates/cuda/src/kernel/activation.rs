//! Forms of activations that wide products read; mirrors `lib/activation.cuh`.

use super::{Addresses, Operand};
use crate::{device::Address, kernel::params::params};

/// What a product reads, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// Halves `[rows, columns]`.
    F16(Operand),
    Int8(Int8Operands),
    /// Of each row its Q8, and behind that the Q8 of what it leaves over.
    Int8HiLo {
        both: Int8Operands,
        columns: usize,
    },
}

/// Bytes `[rows, columns]`, with an f32 scale and an f32 sum for each 32 of them: `[rows, columns / 32]` each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Int8Operands {
    pub(crate) codes: Operand,
    pub(crate) scales: Operand,
    pub(crate) sums: Operand,
}

impl Int8Operands {
    pub(crate) fn all(self) -> [Operand; 3] {
        [self.codes, self.scales, self.sums]
    }
}

params! {
    /// `Activation` in `lib/activation.cuh`.
    pub(crate) struct ActivationAt {
        halves: Address,
        codes: Address,
        scales: Address,
        sums: Address,
        rest: u64,
    }
}

impl Activation {
    /// No form is one of null addresses.
    pub(crate) fn at(activation: Option<Activation>, at: &Addresses) -> ActivationAt {
        let mut found = ActivationAt {
            halves: Address::NULL,
            codes: Address::NULL,
            scales: Address::NULL,
            sums: Address::NULL,
            rest: 0,
        };
        let (operands, rest) = match activation {
            None => return found,
            Some(Activation::F16(halves)) => {
                found.halves = at.operand(halves);
                return found;
            }
            Some(Activation::Int8(operands)) => (operands, 0),
            Some(Activation::Int8HiLo { both, columns }) => (both, columns),
        };
        [found.codes, found.scales, found.sums] = operands.all().map(|operand| at.operand(operand));
        found.rest = rest as u64;
        found
    }

    pub(crate) fn operands(&self) -> Vec<Operand> {
        match *self {
            Activation::F16(halves) => vec![halves],
            Activation::Int8(operands) | Activation::Int8HiLo { both: operands, .. } => {
                operands.all().to_vec()
            }
        }
    }
}
