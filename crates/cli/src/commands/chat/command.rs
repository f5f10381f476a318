//! Commands of the chat: one table for the help, the completion and the reading of what is typed.

use std::path::PathBuf;

use super::set::Setting;

/// A command as it is listed.
pub(super) struct Entry {
    pub(super) name: &'static str,
    pub(super) argument: &'static str,
    pub(super) takes: Takes,
    pub(super) help: &'static str,
}

/// Completion that Tab offers after a command's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    Nothing,
    Text,
    OnOff,
    Setting,
    File,
}

const fn entry(
    name: &'static str,
    argument: &'static str,
    takes: Takes,
    help: &'static str,
) -> Entry {
    Entry {
        name,
        argument,
        takes,
        help,
    }
}

pub(super) const COMMANDS: [Entry; 12] = [
    entry("help", "", Takes::Nothing, "this list"),
    entry(
        "regenerate",
        "",
        Takes::Nothing,
        "answer the last question once more, differently",
    ),
    entry(
        "undo",
        "",
        Takes::Nothing,
        "forget the last question and its answer",
    ),
    entry(
        "reset",
        "",
        Takes::Nothing,
        "forget the conversation, keep the system prompt",
    ),
    entry(
        "system",
        "[TEXT]",
        Takes::Text,
        "set the system prompt and start over; without TEXT, show it",
    ),
    entry(
        "think",
        "on|off",
        Takes::OnOff,
        "let the model think before it answers",
    ),
    entry(
        "set",
        "[NAME VALUE]",
        Takes::Setting,
        "change a setting, such as temperature 0.7; alone, show them",
    ),
    entry(
        "save",
        "FILE",
        Takes::File,
        "write the conversation as JSON; asks before it overwrites",
    ),
    entry("save!", "FILE", Takes::File, "the same without asking"),
    entry(
        "load",
        "FILE",
        Takes::File,
        "go on with a conversation that was saved",
    ),
    entry(
        "image",
        "FILE",
        Takes::File,
        "kept for images, which this version cannot see",
    ),
    entry("exit", "", Takes::Nothing, "leave; Ctrl-D does too"),
];

/// A command as it was typed.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Command<'a> {
    Help,
    Regenerate,
    Undo,
    Reset,
    ShowSystem,
    System(&'a str),
    Think(bool),
    ShowSettings,
    Set(Setting, &'a str),
    Save { path: PathBuf, overwrite: Overwrite },
    Load(PathBuf),
    Image,
    Exit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overwrite {
    Ask,
    Yes,
}

impl Command<'_> {
    /// Reads what follows the `/`; an error is a sentence for the person.
    pub(super) fn read(typed: &str) -> Result<Command<'_>, String> {
        let (name, rest) = typed.split_once(char::is_whitespace).unwrap_or((typed, ""));
        let rest = rest.trim();
        let file = || match rest {
            "" => Err(format!("/{name} needs a file name")),
            path => Ok(from_home(path)),
        };
        Ok(match name {
            "help" | "?" => Command::Help,
            "regenerate" | "retry" => Command::Regenerate,
            "undo" => Command::Undo,
            "reset" | "clear" => Command::Reset,
            "system" if rest.is_empty() => Command::ShowSystem,
            "system" => Command::System(rest),
            "think" => match rest {
                "on" => Command::Think(true),
                "off" => Command::Think(false),
                _ => return Err("/think takes on or off".to_owned()),
            },
            "set" if rest.is_empty() => Command::ShowSettings,
            "set" => {
                let (name, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                Command::Set(Setting::named(name)?, value.trim())
            }
            "save" => Command::Save {
                path: file()?,
                overwrite: Overwrite::Ask,
            },
            "save!" => Command::Save {
                path: file()?,
                overwrite: Overwrite::Yes,
            },
            "load" if rest == "-" => {
                return Err("/load reads a file; stdin is where these lines come from".to_owned());
            }
            "load" => Command::Load(file()?),
            "image" => Command::Image,
            "exit" | "quit" | "bye" => Command::Exit,
            _ => return Err(format!("`/{typed}` is no command; /help lists them")),
        })
    }
}

/// The list that `/help` prints.
pub(super) fn help() -> String {
    let mut text = String::new();
    for entry in COMMANDS {
        let usage = format!("/{} {}", entry.name, entry.argument);
        text += &format!("{usage:<18} {}\n", entry.help);
    }
    text + "Tab completes commands, settings and file names. Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."
}

/// The path that is meant, with the home folder for `~`.
pub(super) fn from_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_is_listed_can_be_typed() {
        for entry in COMMANDS {
            let argument = match entry.takes {
                Takes::Nothing => "",
                Takes::Text | Takes::File => "x",
                Takes::OnOff => "on",
                Takes::Setting => "temperature 0.5",
            };
            let typed = format!("{} {argument}", entry.name);
            assert!(Command::read(&typed).is_ok(), "{typed}");
            assert!(help().contains(&format!("/{}", entry.name)));
        }
    }

    #[test]
    fn what_is_no_command_is_told() {
        let told = |typed| Command::read(typed).unwrap_err();
        assert!(told("nonsense 1").contains("`/nonsense 1`"));
        assert_eq!(told("load"), "/load needs a file name");
        assert!(told("think loudly").contains("on or off"));
        assert!(told("set soup 1").contains("`soup`"));
    }

    #[test]
    fn a_path_may_begin_at_home() {
        let home = std::env::home_dir().unwrap();
        assert_eq!(from_home("~/a b.json"), home.join("a b.json"));
        assert_eq!(from_home("a~/b"), PathBuf::from("a~/b"));
    }
}
