//! Mappings that outlive their file's content.
//!
//! A file that another program shortens while it is mapped raises SIGBUS wherever a byte past its new end is read: in the
//! middle of a multiplication, on any thread. Nobody there can handle an error. So a handler puts zeros in the place of what
//! is gone and marks the mapping as lost; whoever computes with the bytes asks for that mark before using the result. Faults
//! outside these mappings go to the handler that was there before.
#![expect(unsafe_code, reason = "signal handlers and mappings are the system's")]

use std::{
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// More parts than split models come in. Mappings past these are not guarded.
const SLOT_COUNT: usize = 512;

static SLOTS: [Slot; SLOT_COUNT] = [const { Slot::free() }; SLOT_COUNT];

struct Slot {
    is_taken: AtomicBool,
    /// Address range of the mapping, in whole pages; `end` is 0 while there is none.
    start: AtomicUsize,
    end: AtomicUsize,
    is_lost: AtomicBool,
}

impl Slot {
    const fn free() -> Slot {
        Slot {
            is_taken: AtomicBool::new(false),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            is_lost: AtomicBool::new(false),
        }
    }
}

/// Watches over one mapping until it is dropped, which must be before the mapping goes.
pub(super) struct Guard(Option<&'static Slot>);

impl Guard {
    /// `bytes` are all of a mapping.
    pub(super) fn over(bytes: &[u8]) -> Guard {
        let Some(page) = install() else {
            return Guard(None);
        };
        let free = SLOTS
            .iter()
            .find(|slot| !slot.is_taken.swap(true, Ordering::AcqRel));
        if let Some(slot) = free {
            let start = bytes.as_ptr().addr();
            slot.is_lost.store(false, Ordering::Relaxed);
            slot.start.store(start, Ordering::Relaxed);
            let end = start + bytes.len().next_multiple_of(page);
            slot.end.store(end, Ordering::Release);
        }
        Guard(free)
    }

    /// True once bytes were read that are not in the file any more.
    pub(super) fn is_lost(&self) -> bool {
        self.0
            .is_some_and(|slot| slot.is_lost.load(Ordering::Acquire))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.end.store(0, Ordering::Release);
            slot.is_taken.store(false, Ordering::Release);
        }
    }
}

struct Installed {
    page: usize,
    before: libc::sigaction,
}

static INSTALLED: OnceLock<Option<Installed>> = OnceLock::new();

/// Puts the handler in place, once; the size of a page, `None` where the system refuses.
fn install() -> Option<usize> {
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: Asks for a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
        // SAFETY: All fields of both structs are plain data for which zero is a value.
        let (mut action, mut before) = unsafe {
            (
                std::mem::zeroed::<libc::sigaction>(),
                std::mem::zeroed::<libc::sigaction>(),
            )
        };
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: Only reads the handler that is there now.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) } != 0 {
            return None;
        }
        Some(Installed { page, before }).filter(|_| {
            // SAFETY: The handler calls nothing but `mmap` and `sigaction`, and reads and writes atomics.
            unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) == 0 }
        })
    });
    installed.as_ref().map(|installed| installed.page)
}

extern "C" fn on_fault(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: The kernel passes a valid description, and SIGBUS has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    let installed = INSTALLED.get().and_then(Option::as_ref);
    let page_bytes = installed.map_or(4096, |installed| installed.page);
    for slot in &SLOTS {
        let end = slot.end.load(Ordering::Acquire);
        if address >= end || address < slot.start.load(Ordering::Relaxed) {
            continue;
        }
        let page = address & !(page_bytes - 1);
        // SAFETY: The range lies in a mapping that is ours, read-only and still there, as its guard is dropped before it.
        // What is replaced is the rest of a file that is no longer whole.
        let zeros = unsafe {
            libc::mmap(
                ptr::without_provenance_mut(page),
                end - page,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if zeros != libc::MAP_FAILED {
            slot.is_lost.store(true, Ordering::Release);
            return;
        }
    }
    // Not ours: the instruction faults once more, into the handler that was there before, or into the default.
    match installed {
        // SAFETY: This action came from the system.
        Some(installed) => unsafe {
            libc::sigaction(libc::SIGBUS, &raw const installed.before, ptr::null_mut());
        },
        // SAFETY: As above; the default ends the process.
        None => unsafe {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
        },
    }
}
