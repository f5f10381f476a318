//! Lines as they are typed, with editing and history at a terminal.

use std::{io::IsTerminal, path::PathBuf};

use anyhow::{Context, Result};
use rustyline::{DefaultEditor, error::ReadlineError};

/// Lines as they are typed, with editing and history at a terminal.
pub(super) struct Lines {
    editor: DefaultEditor,
    history: Option<PathBuf>,
}

impl Lines {
    pub(super) fn open(no_history: bool) -> Result<Lines> {
        let mut editor = DefaultEditor::new().context("cannot read from this terminal")?;
        let keep = !no_history && std::io::stdin().is_terminal();
        let history = if keep {
            std::env::home_dir().map(|home| home.join(".carat_history"))
        } else {
            None
        };
        if let Some(path) = &history {
            // A first session has none.
            let _ = editor.load_history(path);
        }
        Ok(Lines { editor, history })
    }

    /// The next line, joined with those it goes on in; `None` at the end of input.
    pub(super) fn next(&mut self, prompt: &str) -> Result<Option<String>> {
        let mut text = String::new();
        loop {
            match self
                .editor
                .readline(if text.is_empty() { prompt } else { ". " })
            {
                Ok(line) => {
                    let _ = self.editor.add_history_entry(&line);
                    match line.strip_suffix('\\') {
                        Some(start) => {
                            text += start;
                            text.push('\n');
                        }
                        None => return Ok(Some(text + &line)),
                    }
                }
                // Ctrl-C drops what was typed so far.
                Err(ReadlineError::Interrupted) => text.clear(),
                Err(ReadlineError::Eof) => return Ok((!text.is_empty()).then_some(text)),
                Err(error) => return Err(error).context("cannot read the next line"),
            }
        }
    }

    pub(super) fn close(mut self) {
        if let Some(path) = &self.history {
            // Losing history is no reason to fail a conversation that has ended.
            let _ = self.editor.save_history(path);
        }
    }
}
