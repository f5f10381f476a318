//! Forms of activations that wide products read; mirrors `lib/form.cuh`.

use super::{Addresses, Place};
use crate::{device::Address, kernel::params::params};

/// What a product reads, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Halves `[rows, columns]`.
    F16(Place),
    Q8(Q8Places),
    /// Of each row its Q8, and behind that the Q8 of what it leaves over.
    Q16 {
        both: Q8Places,
        columns: usize,
    },
}

/// Bytes `[rows, columns]`, with an f32 scale and an f32 sum for each 32 of them: `[rows, columns / 32]` each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Q8Places {
    pub(crate) codes: Place,
    pub(crate) scales: Place,
    pub(crate) sums: Place,
}

impl Q8Places {
    pub(crate) fn all(self) -> [Place; 3] {
        [self.codes, self.scales, self.sums]
    }
}

params! {
    /// `Form` in `lib/form.cuh`.
    pub(crate) struct FormAt {
        halves: Address,
        codes: Address,
        scales: Address,
        sums: Address,
        rest: u64,
    }
}

impl Form {
    /// No form is one of null addresses.
    pub(crate) fn at(form: Option<Form>, at: &Addresses) -> FormAt {
        let mut found = FormAt {
            halves: Address::NULL,
            codes: Address::NULL,
            scales: Address::NULL,
            sums: Address::NULL,
            rest: 0,
        };
        let (places, rest) = match form {
            None => return found,
            Some(Form::F16(halves)) => {
                found.halves = at.place(halves);
                return found;
            }
            Some(Form::Q8(places)) => (places, 0),
            Some(Form::Q16 { both, columns }) => (both, columns),
        };
        [found.codes, found.scales, found.sums] = places.all().map(|place| at.place(place));
        found.rest = rest as u64;
        found
    }

    pub(crate) fn places(&self) -> Vec<Place> {
        match *self {
            Form::F16(halves) => vec![halves],
            Form::Q8(places) | Form::Q16 { both: places, .. } => places.all().to_vec(),
        }
    }
}
