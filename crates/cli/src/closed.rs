//! Detection of a standard output that was closed when the program was started (`carat … >&-`).
//!
//! The runtime opens /dev/null in the place of closed streams before `main` runs, so that an answer would be written, and lost,
//! without a word. So this looks before the runtime does.
#![expect(unsafe_code, reason = "a function that runs before the runtime's own")]

use std::sync::atomic::{AtomicBool, Ordering};

static CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether stdout was closed when the program began.
pub(crate) fn stdout_was_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

// SAFETY: The loader calls what this section points at, one by one, before `main`. The function takes nothing that the runtime
// sets up: it makes one system call and stores a bool.
#[cfg(target_os = "linux")]
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

#[cfg(target_os = "linux")]
extern "C" fn look() {
    let stdout = rustix::stdio::stdout();
    CLOSED.store(rustix::io::fcntl_getfd(stdout).is_err(), Ordering::Relaxed);
}
