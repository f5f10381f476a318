//! Typeahead: input while nobody reads, kept by the terminal for the next prompt, and not shown in the middle of an answer.
//!
//! The terminal hands over bytes instead of lines, without echo, as long as this is held: the line editor finds this state
//! and leaves this state, so that there is no moment in which a long paste could meet the kernel's limit on lines.

use std::io;

use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr,
};

/// Dropping it gives the terminal back.
pub(crate) struct TypeAhead(Option<Termios>);

impl TypeAhead {
    /// Does nothing where stdin is no terminal.
    pub(crate) fn hold() -> TypeAhead {
        let stdin = io::stdin();
        let Ok(found) = tcgetattr(&stdin) else {
            return TypeAhead(None);
        };
        let mut held = found.clone();
        // Ctrl-C stays a signal, which stops an answer.
        held.local_modes
            .remove(LocalModes::ICANON | LocalModes::ECHO);
        held.special_codes[SpecialCodeIndex::VMIN] = 1;
        held.special_codes[SpecialCodeIndex::VTIME] = 0;
        let changed = tcsetattr(&stdin, OptionalActions::Now, &held).is_ok();
        TypeAhead(changed.then_some(found))
    }
}

impl Drop for TypeAhead {
    fn drop(&mut self) {
        if let Some(found) = &self.0 {
            // A terminal that is gone needs nothing.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, found);
        }
    }
}
