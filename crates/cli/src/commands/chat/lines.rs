//! Lines as they are typed, with editing and history at a terminal.

use std::{io::IsTerminal, path::PathBuf};

use anyhow::{Context, Result};
use rustyline::{CompletionType, Config, Editor, error::ReadlineError, history::DefaultHistory};

use super::complete::Completion;

/// Lines as they are typed, with editing and history at a terminal.
pub(super) struct Lines {
    editor: Editor<Completion, DefaultHistory>,
    history: Option<PathBuf>,
}

impl Lines {
    pub(super) fn open(no_history: bool) -> Result<Lines> {
        // As shells do it: what is common to all, then the list.
        let config = Config::builder()
            .completion_type(CompletionType::List)
            .build();
        let mut editor = Editor::with_config(config).context("cannot read from this terminal")?;
        editor.set_helper(Some(Completion));
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

    /// Asks for a yes; it is a no where there is nobody to ask.
    pub(super) fn confirm(&mut self, question: &str) -> Result<bool> {
        if !std::io::stdin().is_terminal() {
            return Ok(false);
        }
        match self.editor.readline(&format!("{question} [y/N] ")) {
            Ok(answer) => Ok(matches!(
                answer.trim().to_ascii_lowercase().as_str(),
                "y" | "yes"
            )),
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => Ok(false),
            Err(error) => Err(error).context("cannot read the answer"),
        }
    }

    pub(super) fn close(mut self) {
        if let Some(path) = &self.history {
            // Losing history is no reason to fail a conversation that has ended.
            let _ = self.editor.save_history(path);
        }
    }
}
