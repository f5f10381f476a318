//! Memory that was freed, back to the system.
//!
//! The C library keeps what a program frees, in the hope that it is wanted again. After a model has gone that is hundreds of megabytes
//! which the next one may not find whole, so that the process grows with every swap; after a crowd of clients it is what all of them
//! took together, once for each thread.
#![cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "the allocator is the C library's")
)]

use std::{sync::Arc, time::Duration};

use crate::app::App;

/// Time between two looks at whether there is anything to do.
const LOOK: Duration = Duration::from_secs(1);
/// Looks after the last request until threads that nobody needs have ended, and with them their own stores of memory.
const LOOKS_UNTIL_ENDED: u32 = 3;
/// Time after which a thread that requests were read on ends, if there are no more.
pub(crate) const THREAD_STAYS: Duration = Duration::from_secs(1);

/// Gives back what requests took, whenever the last of them has ended: at once, and again when their threads have ended, too.
pub(crate) async fn tidy(app: Arc<App>) {
    let (mut seen, mut quiet) = (0, LOOKS_UNTIL_ENDED);
    loop {
        tokio::time::sleep(LOOK).await;
        let ended = app.metrics.ended_total();
        if app.unfinished() > 0 {
            continue;
        }
        if ended != seen {
            (seen, quiet) = (ended, 0);
        } else if quiet < LOOKS_UNTIL_ENDED {
            quiet += 1;
        } else {
            continue;
        }
        if quiet == 0 || quiet == LOOKS_UNTIL_ENDED {
            // Milliseconds, in which no connection should wait.
            let _ = tokio::task::spawn_blocking(give_back).await;
        }
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn give_back() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> i32;
    }
    // SAFETY: The function has this signature in every glibc, may be called from any thread at any time, and touches free memory only.
    unsafe {
        malloc_trim(0);
    }
}

/// Other allocators have no such call, or need none.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn give_back() {}
