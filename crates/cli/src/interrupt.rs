//! Signals that end something. The first Ctrl-C stops what is being generated, a second one while that lasts ends the program;
//! SIGTERM and SIGHUP end it at once. However it ends, the terminal is left as it was found.
//!
//! A thread of its own waits for them, so that a long step or a prompt that waits for a key delays nothing. Signals that
//! the program was started to ignore (`nohup`) stay ignored.

use std::{
    fs, io,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use anyhow::{Context, Result};
use rustix::{
    process::getpgrp,
    termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr},
};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::output;

#[derive(Clone)]
pub(crate) struct Interrupt(Arc<AtomicU32>);

/// Exit code that a shell expects of a program that ended by Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;

impl Interrupt {
    /// Takes these signals over for the whole process; once.
    pub(crate) fn install() -> Result<Interrupt> {
        let count = Arc::new(AtomicU32::new(0));
        listen(Arc::clone(&count)).context("cannot listen for signals")?;
        Ok(Interrupt(count))
    }

    /// Makes the next Ctrl-C end the program: there is nothing to stop yet.
    pub(crate) fn end_at_once(&self) {
        self.0.store(1, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// Makes the next Ctrl-C a first one again.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

fn listen(interrupts: Arc<AtomicU32>) -> io::Result<()> {
    let found = tcgetattr(io::stdin()).ok();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let entered = runtime.enter();
    let ignored = ignored_signals();
    let take_over = |kind: SignalKind| {
        let bit = 1u64 << (kind.as_raw_value() - 1);
        (ignored & bit == 0).then(|| signal(kind)).transpose()
    };
    let mut int = take_over(SignalKind::interrupt())?;
    let mut term = take_over(SignalKind::terminate())?;
    let mut hup = take_over(SignalKind::hangup())?;
    drop(entered);
    thread::Builder::new()
        .name("carat-signals".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                loop {
                    let kind = tokio::select! {
                        () = next(&mut int) => SignalKind::interrupt(),
                        () = next(&mut term) => SignalKind::terminate(),
                        () = next(&mut hup) => SignalKind::hangup(),
                    };
                    let first_interrupt = kind == SignalKind::interrupt()
                        && interrupts.fetch_add(1, Ordering::Relaxed) == 0;
                    if !first_interrupt {
                        leave(kind, found.as_ref());
                    }
                }
            });
        })?;
    Ok(())
}

/// Waits for the signal; for ever where it is ignored.
async fn next(signal: &mut Option<Signal>) {
    if let Some(signal) = signal
        && signal.recv().await.is_some()
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// One bit per signal, the lowest for signal 1; none where the system does not tell.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0)
}

/// Ends the program with the code that a shell gives a signal.
#[expect(
    clippy::disallowed_methods,
    clippy::exit,
    reason = "whoever sent the signal does not want to wait for other threads, which may be in a long step"
)]
fn leave(kind: SignalKind, found: Option<&Termios>) -> ! {
    if let Some(found) = found {
        restore(found);
    }
    output::discard_unfinished();
    std::process::exit(128 + kind.as_raw_value())
}

/// Gives the terminal back as it was, if it is in the hands of the line editor.
fn restore(found: &Termios) {
    let stdin = io::stdin();
    let raw = tcgetattr(&stdin).is_ok_and(|now| now.local_modes != found.local_modes);
    // In the background the terminal is another program's, and touching it would stop this one.
    let elsewhere = tcgetpgrp(&stdin).is_ok_and(|group| group != getpgrp());
    if !raw || elsewhere {
        return;
    }
    let _ = tcsetattr(&stdin, OptionalActions::Now, found);
    if found.local_modes.contains(LocalModes::ICANON) {
        // Past the line that was being edited, with bracketed paste off again. The lock on stdout may be held by a thread
        // that writes to a full pipe; a terminal is written to directly.
        let _ = rustix::io::write(rustix::stdio::stdout(), b"\x1b[?2004l\r\n");
    }
}
