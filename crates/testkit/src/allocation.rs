//! A counting allocator: the most memory that was alive at once while something ran.
//!
//! A test program that measures declares it as its own: `#[global_allocator] static ALLOCATOR: Counting = Counting;`. Counts
//! are per thread, so that tests beside each other do not disturb one another.
#![expect(unsafe_code, reason = "a global allocator is unsafe by nature")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

/// The system's allocator, with counters.
pub struct Counting;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn count(live: usize) {
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: Every call goes to the system's allocator unchanged; the counters are plain cells without destructors.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(LIVE.get().saturating_add(layout.size()));
        // SAFETY: The caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // What another thread allocated may be freed here.
        count(LIVE.get().saturating_sub(layout.size()));
        // SAFETY: The caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Result of `work`, and the most bytes alive at once while it ran on this thread, over what was alive before.
///
/// # Panics
///
/// If the program does not use [`Counting`]: nothing would be counted, and every bound would hold.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    drop(std::hint::black_box(Box::new(before)));
    assert!(
        PEAK.get() > before,
        "this program's allocator is not the counting one"
    );
    PEAK.set(before);
    let result = work();
    (result, PEAK.get() - before)
}
