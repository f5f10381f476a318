//! Peak rates of a device, where there is memory to measure them.

use anyhow::Result;
use carat_model::{
    backend::{Backend, BackendError},
    cost::Roofline,
};

use crate::terminal::{Terminal, bytes};

/// The rates, or a note why there are none: what asks for them can do without.
pub(crate) fn measured(backend: &dyn Backend, terminal: Terminal) -> Result<Option<Roofline>> {
    match backend.roofline() {
        Err(BackendError::OutOfMemory {
            needed_bytes,
            free_bytes,
        }) => {
            terminal.note(format_args!(
                "how fast memory is read is not measured, so no bound is given: that takes {} and {} are free",
                bytes(needed_bytes),
                bytes(free_bytes)
            ));
            Ok(None)
        }
        measured => Ok(measured?),
    }
}
