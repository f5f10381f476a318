//! Ctrl-C: the first stops what is being generated, a second one while that lasts ends the program.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result};

#[derive(Clone)]
pub(crate) struct Interrupt(Arc<AtomicU32>);

/// What a shell expects of a program that ended by Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;

impl Interrupt {
    /// Takes Ctrl-C over for the whole process; once.
    pub(crate) fn install() -> Result<Interrupt> {
        let count = Arc::new(AtomicU32::new(0));
        let seen = Arc::clone(&count);
        ctrlc::set_handler(move || {
            if seen.fetch_add(1, Ordering::Relaxed) > 0 {
                #[expect(
                    clippy::disallowed_methods,
                    reason = "the person insists; a long step may still be running on other threads"
                )]
                std::process::exit(INTERRUPTED.into());
            }
        })
        .context("cannot listen for Ctrl-C")?;
        Ok(Interrupt(count))
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// Makes the next Ctrl-C a first one again.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
