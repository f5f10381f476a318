//! Output beside the answer: notes on stderr, dim text, progress bars.

use std::io::{self, IsTerminal, Write};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

use crate::visible::Visible;

/// Destination of notes, and their style. Made once, in `main`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terminal {
    quiet: bool,
    style: bool,
    /// Shows plain text and nothing else.
    dumb: bool,
}

impl Terminal {
    pub(crate) fn new(quiet: bool) -> Terminal {
        #[expect(
            clippy::disallowed_methods,
            reason = "NO_COLOR is the one convention for terminals that we follow"
        )]
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        #[expect(
            clippy::disallowed_methods,
            reason = "the terminal says by TERM what it can do"
        )]
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Terminal {
            quiet,
            style: !plain && !dumb,
            dumb,
        }
    }

    /// Whether lines can be edited at a prompt, key by key.
    pub(crate) fn edits_lines(self) -> bool {
        !self.dumb && io::stdin().is_terminal()
    }

    /// Whether it shows plain text and nothing else.
    pub(crate) fn is_dumb(self) -> bool {
        self.dumb
    }

    /// One line for the person, unless they asked for quiet.
    pub(crate) fn note(self, text: impl std::fmt::Display) {
        if !self.quiet {
            let (on, off) = self.dim(io::stderr().is_terminal());
            // A terminal that is gone must not take the answer with it.
            let _ = writeln!(io::stderr().lock(), "{on}{text}{off}");
        }
    }

    /// Running text beside the answer, dim at a terminal.
    pub(crate) fn dim_text(self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let terminal = io::stderr().is_terminal();
        let (on, off) = self.dim(terminal);
        let text = if terminal {
            Visible::default().show(text)
        } else {
            text.into()
        };
        let mut err = io::stderr().lock();
        write!(err, "{on}{text}{off}")?;
        err.flush()
    }

    fn dim(self, terminal: bool) -> (&'static str, &'static str) {
        if self.style && terminal {
            ("\x1b[2m", "\x1b[0m")
        } else {
            ("", "")
        }
    }

    /// A bar over bytes; invisible when quiet or when stderr is no terminal.
    pub(crate) fn byte_bar(self, total: u64, label: &str) -> ProgressBar {
        if self.quiet || self.dumb {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template(
            "{msg} {wide_bar:.dim} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        )
        .expect("the template is valid");
        ProgressBar::new(total)
            .with_style(style)
            .with_message(label.to_owned())
    }
}

/// Something went wrong but the program goes on; said even when quiet.
pub(crate) fn warn(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "carat: {text}");
}

/// One line on stdout. A reader that went away (`carat … | head`) is an error that `main` takes for a quiet end.
pub(crate) fn say(text: impl std::fmt::Display) -> Result<()> {
    writeln!(io::stdout().lock(), "{text}").context("cannot write to stdout")
}

/// Bytes as people read them.
pub(crate) fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{n} B")
    } else {
        format!("{value:.2} {}", units[unit])
    }
}

/// A whole number with thousands separated.
pub(crate) fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(thousands(12), "12");
        assert_eq!(bytes(11_555_936), "11.02 MiB");
        assert_eq!(bytes(17), "17 B");
    }
}
