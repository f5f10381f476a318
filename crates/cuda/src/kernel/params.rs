//! A kernel's one argument: a struct mirrored in its `.cu` file.
//!
//! The [`params!`] macro writes the struct and how it becomes bytes. Its size goes to the compiler as `PARAMS_BYTES`, where a
//! `static_assert` compares it with the mirror. Fields must lie without gaps, so both sides agree on every offset.

use crate::device::{Address, TensorMap};

/// A type that a params struct may hold.
pub(crate) trait Field {
    const ALIGN: usize;
    fn put(&self, bytes: &mut Vec<u8>);
}

macro_rules! number_field {
    ($($type:ty),*) => {$(
        impl Field for $type {
            const ALIGN: usize = size_of::<$type>();
            fn put(&self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}
number_field!(u32, u64, f32);

impl Field for Address {
    const ALIGN: usize = 8;
    fn put(&self, bytes: &mut Vec<u8>) {
        self.0.put(bytes);
    }
}

impl Field for TensorMap {
    const ALIGN: usize = align_of::<TensorMap>();
    fn put(&self, bytes: &mut Vec<u8>) {
        for word in self.words() {
            word.put(bytes);
        }
    }
}

/// Appends a field where the C compiler would put it.
pub(crate) fn put<F: Field>(field: &F, bytes: &mut Vec<u8>) {
    assert!(
        bytes.len().is_multiple_of(F::ALIGN),
        "a gap before a field of params"
    );
    field.put(bytes);
}

/// A struct that is passed to a kernel whole.
pub(crate) trait Params: Field {
    const BYTES: usize;

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        self.put(&mut bytes);
        bytes
    }
}

macro_rules! params {
    ($(#[$meta:meta])* $visibility:vis struct $name:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        $visibility struct $name {
            $(pub(crate) $field: $type,)*
        }

        impl $crate::kernel::params::Field for $name {
            const ALIGN: usize = std::mem::align_of::<$name>();
            fn put(&self, bytes: &mut Vec<u8>) {
                let start = bytes.len();
                $($crate::kernel::params::put(&self.$field, bytes);)*
                bytes.resize(start + std::mem::size_of::<$name>(), 0);
            }
        }

        impl $crate::kernel::params::Params for $name {
            const BYTES: usize = std::mem::size_of::<$name>();
        }
    };
}
pub(crate) use params;

#[cfg(test)]
mod tests {
    use super::*;

    params! {
        struct Inner {
            a: Address,
            b: Address,
        }
    }
    params! {
        struct Outer {
            inner: Inner,
            x: u32,
            y: f32,
            z: u32,
        }
    }

    #[test]
    fn bytes_follow_the_layout_of_c() {
        let outer = Outer {
            inner: Inner {
                a: Address(1),
                b: Address(2),
            },
            x: 3,
            y: 4.0,
            z: 5,
        };
        let bytes = outer.bytes();
        assert_eq!(bytes.len(), Outer::BYTES);
        assert_eq!(Outer::BYTES, 32);
        let word = |i: usize| u32::from_ne_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap());
        let words: Vec<u32> = (0..8).map(word).collect();
        assert_eq!(words, [1, 0, 2, 0, 3, 4f32.to_bits(), 5, 0]);
    }
}
