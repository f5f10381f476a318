//! Large pieces of host memory that the device can read: the system's own, in large pages, locked when all of it is there.
//!
//! The driver's own allocation takes a second for two GiB, most of it for page after page of 4 KiB on one thread.
#![expect(unsafe_code, reason = "memory is locked by the driver's interface")]

use std::thread::{self, available_parallelism};

use cudarc::driver::sys;
use memmap2::{Advice, MmapMut};

/// The most threads that touch pages.
const MAX_TOUCHERS: usize = 16;
/// The smallest pages there are.
const PAGE_BYTES: usize = 4096;

/// Zeroed memory, locked until it is dropped.
pub(super) struct Registered {
    memory: MmapMut,
}

impl Registered {
    /// `None` where the system or the driver does not want to, or where the device would see it elsewhere than the host does. The
    /// context must be current.
    pub(super) fn new(bytes: usize) -> Option<Registered> {
        let mut memory = MmapMut::map_anon(bytes).ok()?;
        // Only a wish.
        let _ = memory.advise(Advice::HugePage);
        touch(&mut memory);
        let start = memory.as_mut_ptr();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the memory is mapped, and stays so until it is unregistered.
        let registered = unsafe { sys::cuMemHostRegister_v2(start.cast(), bytes, flags) };
        if registered != sys::CUresult::CUDA_SUCCESS {
            return None;
        }
        // Unregistered from here on, whatever happens.
        let held = Registered { memory };
        let mut seen = 0;
        // SAFETY: registered above.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut seen, start.cast(), 0) };
        (found == sys::CUresult::CUDA_SUCCESS && seen == start as u64).then_some(held)
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.memory.as_ptr().cast_mut()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered when it was made; the buffer that has it has waited for the device and has its context current.
        let _ = unsafe { sys::cuMemHostUnregister(self.start().cast()) };
    }
}

/// Writes to every page, so that the system gives it now, to all threads at once.
fn touch(memory: &mut [u8]) {
    let threads = available_parallelism().map_or(1, usize::from);
    let share = memory.len().div_ceil(threads.min(MAX_TOUCHERS)).max(1);
    thread::scope(|scope| {
        for part in memory.chunks_mut(share) {
            scope.spawn(|| {
                for byte in part.iter_mut().step_by(PAGE_BYTES) {
                    *byte = 0;
                }
            });
        }
    });
}
