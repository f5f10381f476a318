//! Mistakes on the command line that only the commands see, such as flags that exclude each other. They exit with 2, like those that
//! the parser of flags finds.

use std::fmt;

/// A command line that cannot be meant, in words for whoever typed it.
#[derive(Debug)]
pub(crate) struct Misuse(String);

impl Misuse {
    pub(crate) fn error(message: impl fmt::Display) -> anyhow::Error {
        Misuse(message.to_string()).into()
    }

    /// Whether such a mistake is at the bottom of a failure.
    pub(crate) fn is_cause_of(error: &anyhow::Error) -> bool {
        error.root_cause().is::<Misuse>()
    }
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Misuse {}

/// Returns from a function with a [`Misuse`].
macro_rules! misuse {
    ($($words:tt)*) => {
        return Err(crate::misuse::Misuse::error(format_args!($($words)*)))
    };
}
pub(crate) use misuse;
