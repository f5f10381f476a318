//! Tab in the chat: names of commands, of settings and of files.
//!
//! Elsewhere a tab is text, so that what is pasted arrives with its tabs.

use std::{fs, path::Path};

use rustyline::{
    Context, Helper,
    completion::{Completer, Pair},
    highlight::Highlighter,
    hint::Hinter,
    validate::Validator,
};

use super::{
    command::{COMMANDS, Takes, from_home},
    set::Setting,
};

pub(super) struct Completion;

impl Helper for Completion {}
impl Highlighter for Completion {}
impl Validator for Completion {}
impl Hinter for Completion {
    type Hint = String;
}

impl Completer for Completion {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        Ok(candidates(&line[..position]))
    }
}

/// Start of the completed part, and all it could become.
fn candidates(typed: &str) -> (usize, Vec<Pair>) {
    let Some(command) = typed.strip_prefix('/') else {
        return (typed.len(), vec![pair("\t", "\t")]);
    };
    let Some((name, rest)) = command.split_once(' ') else {
        let names = COMMANDS.iter().map(|entry| (entry.name, entry.takes));
        let names = names.map(|(name, takes)| match takes {
            Takes::Nothing => (name, name.to_owned()),
            _ => (name, format!("{name} ")),
        });
        return (1, matching(command, names));
    };
    let takes = COMMANDS.iter().find(|entry| entry.name == name);
    let start = typed.len() - rest.len();
    match takes.map_or(Takes::Nothing, |entry| entry.takes) {
        Takes::Nothing | Takes::Text => (typed.len(), Vec::new()),
        Takes::OnOff => (start, matching(rest, on_off())),
        Takes::File => files(rest, start),
        Takes::Setting => match rest.split_once(' ') {
            None => {
                let names = Setting::ALL.map(|s| (s.name(), format!("{} ", s.name())));
                (start, matching(rest, names.into_iter()))
            }
            Some(("wrap", value)) => (typed.len() - value.len(), matching(value, on_off())),
            Some(_) => (typed.len(), Vec::new()),
        },
    }
}

fn on_off() -> impl Iterator<Item = (&'static str, String)> {
    ["on", "off"].into_iter().map(|s| (s, s.to_owned()))
}

fn matching<'a>(typed: &str, names: impl Iterator<Item = (&'a str, String)>) -> Vec<Pair> {
    names
        .filter(|(name, _)| name.starts_with(typed))
        .map(|(name, replacement)| pair(name, &replacement))
        .collect()
}

/// Files and folders whose paths begin as typed; hidden ones if their dot is typed. A folder that cannot be read has none.
fn files(typed: &str, start: usize) -> (usize, Vec<Pair>) {
    let (folder, beginning) = match typed.rfind('/') {
        Some(slash) => typed.split_at(slash + 1),
        None => ("", typed),
    };
    let start = start + folder.len();
    let read = match folder {
        "" => fs::read_dir(Path::new(".")),
        folder => fs::read_dir(from_home(folder)),
    };
    let entries = read.into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let hidden = name.starts_with('.') && !beginning.starts_with('.');
            if hidden || !name.starts_with(beginning) {
                return None;
            }
            // What a link leads to is what counts.
            Some(if entry.path().is_dir() {
                name + "/"
            } else {
                name
            })
        })
        .collect();
    names.sort();
    (start, names.iter().map(|name| pair(name, name)).collect())
}

fn pair(display: &str, replacement: &str) -> Pair {
    Pair {
        display: display.to_owned(),
        replacement: replacement.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line with each candidate in its place.
    fn lines(typed: &str) -> Vec<String> {
        let (start, candidates) = candidates(typed);
        let line = |pair: &Pair| format!("{}{}", &typed[..start], pair.replacement);
        candidates.iter().map(line).collect()
    }

    #[test]
    fn commands_and_their_words() {
        assert_eq!(lines("/he"), ["/help"]);
        assert_eq!(lines("/s"), ["/system ", "/set ", "/save ", "/save! "]);
        assert_eq!(lines("/think o"), ["/think on", "/think off"]);
        assert_eq!(lines("/set temp"), ["/set temperature "]);
        assert_eq!(lines("/set wrap of"), ["/set wrap off"]);
        assert_eq!(lines("/nonsense x"), [""; 0]);
    }

    #[test]
    fn a_tab_in_a_text_stays() {
        assert_eq!(lines("a"), ["a\t"]);
        assert_eq!(lines(""), ["\t"]);
    }

    #[test]
    fn files_and_folders() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["talk one.json", "talk two.json", ".hidden", "other"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        fs::create_dir(folder.path().join("tale")).unwrap();
        let typed = format!("/load {}/", folder.path().display());
        let with = |end: &str| format!("{typed}{end}");
        assert_eq!(
            lines(&with("ta")),
            [with("tale/"), with("talk one.json"), with("talk two.json")]
        );
        // A name with a space in it is gone on with.
        assert_eq!(lines(&with("talk o")), [with("talk one.json")]);
        assert_eq!(lines(&with(".h")), [with(".hidden")]);
        assert_eq!(lines(&with("nothing/")), [""; 0]);
        assert_eq!(lines(&with("")).len(), 4);
    }
}
