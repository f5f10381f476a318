//! Page-locked memory that the card and a thread of the host write in turns, by words that say whose turn it is.
#![expect(
    unsafe_code,
    reason = "a kernel writes what a thread reads, and the other way around"
)]

use std::{slice, sync::atomic::AtomicU32};

use super::{Address, HostBuffer};

/// Such a piece of memory.
pub(crate) struct SharedBuffer {
    buffer: HostBuffer,
    start: *mut u8,
}

// SAFETY: the memory is there until the value is dropped, wherever that happens; whoever reads or writes it says why that is right.
unsafe impl Send for SharedBuffer {}
// SAFETY: as above.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    pub(crate) fn new(mut buffer: HostBuffer) -> SharedBuffer {
        let start = buffer.bytes_mut().as_mut_ptr();
        SharedBuffer { buffer, start }
    }

    pub(crate) fn address(&self) -> Address {
        self.buffer.address()
    }

    fn check(&self, offset: usize, bytes: usize) {
        let end = offset.checked_add(bytes);
        let fits = end.is_some_and(|end| end <= self.buffer.bytes().len());
        assert!(fits && offset.is_multiple_of(4), "past the end");
    }

    /// A word that both sides may write at any time.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        self.check(offset, 4);
        // SAFETY: within the memory and aligned, checked above.
        unsafe { AtomicU32::from_ptr(self.start.add(offset).cast()) }
    }

    /// Some floats.
    ///
    /// # Safety
    /// Nobody writes them while the slice is there.
    pub(crate) unsafe fn floats(&self, offset: usize, count: usize) -> &[f32] {
        self.check(offset, 4 * count);
        // SAFETY: within the memory and aligned, checked above; any bits are a float.
        unsafe { slice::from_raw_parts(self.start.add(offset).cast(), count) }
    }

    /// The same, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice is there.
    #[expect(clippy::mut_from_ref, reason = "the memory is not this value's alone")]
    pub(crate) unsafe fn floats_mut(&self, offset: usize, count: usize) -> &mut [f32] {
        self.check(offset, 4 * count);
        // SAFETY: within the memory and aligned, checked above; any bits are a float.
        unsafe { slice::from_raw_parts_mut(self.start.add(offset).cast(), count) }
    }
}
