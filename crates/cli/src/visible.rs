//! Text of a model on a terminal: control characters as signs that can be seen, so that none of them moves the cursor, renames
//! the window or types into the shell. In a pipe or a file text stays as it is.

use std::borrow::Cow;

/// Keeps what it takes to see across pieces of text.
#[derive(Debug, Default)]
pub(crate) struct Visible {
    /// A carriage return that ended the last piece: with a line feed after it, it is the end of a line.
    held_return: bool,
}

impl Visible {
    /// The next piece as it is shown.
    pub(crate) fn show<'a>(&mut self, text: &'a str) -> Cow<'a, str> {
        if !self.held_return && !text.contains(is_control) {
            return Cow::Borrowed(text);
        }
        let mut shown = String::with_capacity(text.len() + 8);
        for character in text.chars() {
            if std::mem::take(&mut self.held_return) && character != '\n' {
                shown.push_str("^M");
            }
            match character {
                '\r' => self.held_return = true,
                // As terminals themselves echo them: Ctrl-[ for escape.
                c @ ..'\x20' if is_control(c) => {
                    shown.push('^');
                    shown.push(char::from(c as u8 + b'@'));
                }
                '\x7f' => shown.push_str("^?"),
                c if is_control(c) => shown.push_str(&format!("<{:02X}>", c as u32)),
                c => shown.push(c),
            }
        }
        Cow::Owned(shown)
    }
}

/// Everything that is no text but line feed and tab.
fn is_control(character: char) -> bool {
    character.is_control() && !matches!(character, '\n' | '\t')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_are_shown_and_text_is_left_alone() {
        let mut visible = Visible::default();
        assert_eq!(visible.show("é\ttext\n"), "é\ttext\n");
        assert_eq!(
            visible.show("\x1b]0;title\x07 \u{9b}31m \x7f\0"),
            "^[]0;title^G <9B>31m ^?^@"
        );
    }

    #[test]
    fn a_return_before_a_line_feed_is_part_of_it() {
        let mut visible = Visible::default();
        assert_eq!(visible.show("a\r"), "a");
        assert_eq!(visible.show("\nb\rc"), "\nb^Mc");
    }
}
