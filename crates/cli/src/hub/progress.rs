//! Progress of a download for its caller, and the caller's way to stop it.

use std::{ops::ControlFlow, sync::mpsc, time::Duration};

use anyhow::{Result, bail};

/// One report of a download in progress. Sizes are bytes of the file named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress<'a> {
    /// Another process is downloading the same file.
    Waiting { file: &'a str },
    /// Reading what an earlier, interrupted transfer left.
    Checking {
        file: &'a str,
        done: u64,
        total: u64,
    },
    Receiving {
        file: &'a str,
        done: u64,
        total: u64,
    },
    /// The server is busy or the connection broke; the next attempt starts after `wait`.
    Retrying { reason: &'a str, wait: Duration },
}

/// Called at least a few times per second, also while waiting. `Break` ends the download, which stays resumable.
pub(crate) type Watch<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// Longest time between two calls of a [`Watch`] while nothing happens.
const TICK: Duration = Duration::from_millis(100);

pub(super) fn report(watch: &mut Watch<'_>, progress: Progress<'_>) -> Result<()> {
    if watch(progress).is_break() {
        bail!("the download was stopped; the same command resumes it");
    }
    Ok(())
}

/// Waits for `wait` while reporting `progress`.
pub(super) fn pause(wait: Duration, progress: Progress<'_>, watch: &mut Watch<'_>) -> Result<()> {
    // A busy server or another process gives no event to wait for, so time has to do: a channel that nobody sends on.
    let (_sender, silence) = mpsc::channel::<()>();
    let mut left = wait;
    loop {
        report(watch, progress)?;
        if left.is_zero() {
            return Ok(());
        }
        let step = left.min(TICK);
        let _ = silence.recv_timeout(step);
        left -= step;
    }
}

/// Waits one tick.
pub(super) fn pause_briefly(progress: Progress<'_>, watch: &mut Watch<'_>) -> Result<()> {
    pause(TICK, progress, watch)
}
