//! Forms of activations that wide products read; mirrors `lib/form.cuh`.

use super::{Addresses, Place};
use crate::{device::Address, params::params};

/// What a product reads, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Halves `[rows, columns]`.
    F16(Place),
    /// Bytes `[rows, columns]`, with an f32 scale and an f32 sum for each 32 of them: `[rows, columns / 32]` each.
    Q8 {
        codes: Place,
        scales: Place,
        sums: Place,
    },
}

params! {
    /// `Form` in `lib/form.cuh`.
    pub(crate) struct FormAt {
        halves: Address,
        codes: Address,
        scales: Address,
        sums: Address,
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
        };
        match form {
            Some(Form::F16(halves)) => found.halves = at.place(halves),
            Some(Form::Q8 {
                codes,
                scales,
                sums,
            }) => {
                found.codes = at.place(codes);
                found.scales = at.place(scales);
                found.sums = at.place(sums);
            }
            None => (),
        }
        found
    }

    pub(crate) fn places(&self) -> Vec<Place> {
        match *self {
            Form::F16(halves) => vec![halves],
            Form::Q8 {
                codes,
                scales,
                sums,
            } => vec![codes, scales, sums],
        }
    }
}
