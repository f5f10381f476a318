//! Memory that begins at a cache line.
//!
//! A vector of sixteen lanes is a line long. Read across two lines it takes twice as long, and large allocations begin
//! sixteen bytes into one.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line.
pub const LINE_BYTES: usize = 64;

pub struct Aligned<T> {
    data: Vec<T>,
    start: usize,
    length: usize,
}

impl<T> Default for Aligned<T> {
    fn default() -> Aligned<T> {
        Aligned {
            data: Vec::new(),
            start: 0,
            length: 0,
        }
    }
}

impl<T: Copy + Default> Aligned<T> {
    pub fn new(length: usize) -> Aligned<T> {
        let data = vec![T::default(); length + LINE_BYTES / size_of::<T>()];
        Aligned {
            start: data.as_ptr().align_offset(LINE_BYTES),
            data,
            length,
        }
    }

    /// Grows or shrinks; what was in it may be lost.
    pub fn reserve_exactly(&mut self, length: usize) {
        if self.start + length > self.data.len() {
            *self = Aligned::new(length);
        }
        self.length = length;
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data[self.start..][..self.length]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..][..self.length]
    }
}
