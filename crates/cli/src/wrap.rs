//! Word wrap of running text on a terminal, at the width that the terminal has when a word is written.
//!
//! Lines break where a space stands, and are otherwise left alone: no escape sequences and no second screen, so that the terminal
//! pages back as usual. Code between fences and rows of tables stay as they are, whole for whoever copies them. Only near the
//! edge does a word wait for its end: elsewhere it is written as it comes.

use rustyline::GraphemeClusterMode;

/// Columns that a word of ordinary text needs at the most; one that begins this far from the edge is written piece by piece.
const LONG_WORD: usize = 20;

/// Narrower terminals than this break lines themselves.
const LEAST_WIDTH: usize = 20;

/// Columns from one tab stop to the next.
const TAB: usize = 8;

/// Running text, piece by piece.
#[derive(Debug, Default)]
pub(crate) struct Wrap {
    /// Columns of the terminal when the last piece came.
    width: usize,
    /// The column of the cursor.
    column: usize,
    /// Spaces that are dropped if the line ends here.
    spaces: usize,
    /// The part of a word that is not written.
    word: String,
    /// Whether the word's beginning is on the screen, where it has to stay.
    word_begun: bool,
    /// The first characters of the line, without spaces before them.
    line_start: String,
    /// Whether a fence of code is open.
    fenced: bool,
}

impl Wrap {
    /// The next piece as it is shown on a terminal of `width` columns; some of it may be held until more comes.
    pub(crate) fn add(&mut self, text: &str, width: usize) -> String {
        if width != self.width {
            // A terminal that is made narrower breaks the open line itself.
            self.column = self.column.checked_rem(width).unwrap_or(0);
            self.width = width;
        }
        let mut shown = String::with_capacity(text.len() + 8);
        for character in text.chars() {
            match character {
                '\n' => self.end_line(&mut shown),
                ' ' => {
                    self.write_word(&mut shown);
                    self.word_begun = false;
                    self.spaces += 1;
                }
                '\t' => {
                    self.write_word(&mut shown);
                    self.write_spaces(&mut shown);
                    self.word_begun = false;
                    shown.push('\t');
                    self.column = (self.column / TAB + 1) * TAB;
                }
                other => self.add_to_word(other, &mut shown),
            }
        }
        let held = columns(&self.word);
        let room = self.width.saturating_sub(self.column + self.spaces);
        let decided = self.is_verbatim() || self.word_begun || held > self.width;
        if decided || held + LONG_WORD <= room {
            self.write_word(&mut shown);
        }
        shown
    }

    /// The text that is still held.
    pub(crate) fn finish(&mut self) -> String {
        let mut shown = String::new();
        self.write_word(&mut shown);
        *self = Wrap::default();
        shown
    }

    fn add_to_word(&mut self, character: char, shown: &mut String) {
        if self.line_start.chars().count() < 3 {
            self.line_start.push(character);
        }
        let wide = columns_of(character) > 1;
        if wide {
            // Scripts that are written without spaces break anywhere.
            self.write_word(shown);
            self.word_begun = false;
        }
        self.word.push(character);
        if wide {
            self.write_word(shown);
            self.word_begun = false;
        }
    }

    /// Writes what is held of a word, on a line of its own if this one has no room for it.
    fn write_word(&mut self, shown: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let word = std::mem::take(&mut self.word);
        let needs = columns(&word);
        let fits = self.column + self.spaces + needs <= self.width;
        let may_break = self.width >= LEAST_WIDTH && !self.word_begun && !self.is_verbatim();
        if !fits && may_break && self.column > 0 {
            shown.push('\n');
            self.column = 0;
            self.spaces = 0;
        }
        self.write_spaces(shown);
        shown.push_str(&word);
        self.advance(needs);
        self.word_begun = true;
    }

    fn write_spaces(&mut self, shown: &mut String) {
        let spaces = std::mem::take(&mut self.spaces);
        shown.extend(std::iter::repeat_n(' ', spaces));
        self.advance(spaces);
    }

    /// Moves the cursor as the terminal does, which goes on in the next line at the edge.
    fn advance(&mut self, columns: usize) {
        self.column += columns;
        if self.width > 0 && self.column > self.width {
            self.column = (self.column - 1) % self.width + 1;
        }
    }

    fn end_line(&mut self, shown: &mut String) {
        self.write_word(shown);
        self.spaces = 0;
        shown.push('\n');
        self.fenced ^= is_fence(&self.line_start);
        self.line_start.clear();
        self.column = 0;
        self.word_begun = false;
    }

    /// Whether this line keeps its form: code, the fence around it, or a row of a table.
    fn is_verbatim(&self) -> bool {
        self.fenced || is_fence(&self.line_start) || self.line_start.starts_with('|')
    }
}

fn is_fence(line_start: &str) -> bool {
    matches!(line_start, "```" | "~~~")
}

/// Columns that a text takes on a terminal.
fn columns(text: &str) -> usize {
    text.chars().map(columns_of).sum()
}

fn columns_of(character: char) -> usize {
    let mut bytes = [0; 4];
    let text = character.encode_utf8(&mut bytes);
    usize::from(GraphemeClusterMode::WcWidth.width(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(pieces: &[&str], width: usize) -> String {
        let mut wrap = Wrap::default();
        let mut shown = String::new();
        for piece in pieces {
            shown += &wrap.add(piece, width);
        }
        shown + &wrap.finish()
    }

    #[test]
    fn lines_break_at_spaces_however_the_text_comes() {
        let text = "Once there was a fox who lived in a den by the river.\n\nEvery day he ran.";
        let expected =
            "Once there was a fox who\nlived in a den by the\nriver.\n\nEvery day he ran.";
        assert_eq!(wrapped(&[text], 24), expected);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(wrapped(&letters, 24), expected);
        assert_eq!(wrapped(&[text], 80), text);
    }

    #[test]
    fn a_word_far_from_the_edge_is_shown_as_it_comes() {
        let mut wrap = Wrap::default();
        assert_eq!(wrap.add("wa", 80), "wa");
        assert_eq!(wrap.add("s he", 80), "s he");
        // Near the edge the same waits until it is known to fit.
        let mut wrap = Wrap::default();
        assert_eq!(wrap.add("Once there was a he", 24), "Once there was a");
        assert_eq!(wrap.add("dgehog.", 24), "");
        assert_eq!(wrap.finish(), "\nhedgehog.");
    }

    #[test]
    fn the_width_is_that_of_the_moment() {
        let mut wrap = Wrap::default();
        let mut shown = wrap.add("one two three four five six ", 24);
        assert_eq!(shown, "one two three four five\nsix");
        shown = wrap.add("seven eight nine ten eleven twelve\n", 60);
        assert_eq!(shown, " seven eight nine ten eleven twelve\n");
        // Text that stood at column 40 of 60 is at column 16 of 24.
        shown = wrap.add("a line of text that is forty characters. ", 60);
        shown += &wrap.add("Then more.", 24);
        shown += &wrap.finish();
        assert_eq!(
            shown,
            "a line of text that is forty characters. Then\nmore."
        );
    }

    #[test]
    fn code_and_tables_stay_as_they_are() {
        for text in [
            "```\nlet answer = question.to_string().len() + 1;\n```\n",
            "| a row of a table | with more columns than fit |\n",
        ] {
            assert_eq!(wrapped(&[text], 24), text);
        }
        let after = "```\nx\n```\nAnd then the text goes on as before.";
        assert_eq!(
            wrapped(&[after], 24),
            "```\nx\n```\nAnd then the text goes\non as before."
        );
    }

    #[test]
    fn wide_characters_take_two_columns_and_break_anywhere() {
        let text = "日本語は単語の間に空白を置かない";
        assert_eq!(wrapped(&[text], 20), "日本語は単語の間に空\n白を置かない");
    }

    #[test]
    fn a_word_longer_than_the_line_is_left_to_the_terminal() {
        let long = "x".repeat(50);
        assert_eq!(
            wrapped(&["see ", &long, " there"], 24),
            format!("see\n{long} there")
        );
        // No place for words at all.
        assert_eq!(wrapped(&["one two three four"], 5), "one two three four");
    }
}
