//! The list of flags at the end of docs/cli.md, held to what can be typed; and the order of headings in every help.
//!
//! `UPDATE_EXPECT=1 cargo test -p carat-cli --bin carat reference` writes the list anew.

use std::{fmt::Write as _, fs, path::Path};

use clap::{Arg, Command, CommandFactory};
use expect_test::expect_file;

use super::Arguments;

/// Heading of the list, which goes on to the end of the page.
const LIST: &str = "## All flags\n";

/// Headings in every help, in this order, behind a command's own flags.
const HEADINGS: [&str; 6] = [
    "Answers",
    "Format of answers",
    "Drafts",
    "Sampling (defaults are the model's own)",
    "Model and device",
    "Everywhere",
];

/// Every command that takes flags, with the words that name it.
fn commands() -> Vec<(String, Command)> {
    fn walk(name: &str, command: &Command, found: &mut Vec<(String, Command)>) {
        let mut below = command.get_subcommands().peekable();
        if below.peek().is_none() {
            found.push((name.to_owned(), command.clone()));
        }
        for command in below.filter(|command| command.get_name() != "help") {
            let name = format!("{name} {}", command.get_name());
            walk(name.trim_start(), command, found);
        }
    }
    let mut root = Arguments::command();
    root.build();
    let mut found = Vec::new();
    walk("", &root, &mut found);
    found
}

/// Flags that are shown, of one heading or of none.
fn flags<'a>(command: &'a Command, heading: Option<&'a str>) -> impl Iterator<Item = &'a Arg> {
    command.get_arguments().filter(move |arg| {
        let is_help = ["help", "version"].contains(&arg.get_id().as_str());
        !arg.is_hide_set() && !is_help && arg.get_help_heading() == heading
    })
}

/// A row such as ``| `-m`, `--model MODEL` | A GGUF file … |``.
fn row(arg: &Arg) -> String {
    let takes_value = arg.get_num_args().is_some_and(|range| range.takes_values());
    let value = match arg.get_value_names() {
        Some([value]) if takes_value => value.to_string(),
        _ => String::new(),
    };
    let mut names: Vec<String> = Vec::new();
    names.extend(arg.get_short().map(|short| format!("`-{short}`")));
    let aliases = arg.get_visible_aliases().unwrap_or_default();
    let longs = arg.get_long().into_iter().chain(aliases);
    names.extend(longs.map(|long| format!("`{}`", format!("--{long} {value}").trim_end())));
    if names.is_empty() {
        names.push(format!("`{value}`"));
    }
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let mut text = help.replace('\n', " ");
    let choices: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|_| takes_value)
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !choices.is_empty() {
        let _ = write!(text, ": {}", choices.join(", "));
    }
    if let [default] = arg.get_default_values()
        && takes_value
    {
        let _ = write!(text, " (default: `{}`)", default.to_string_lossy());
    }
    let text = text.trim_start_matches(": ").replace('|', "\\|");
    format!("| {} | {text} |\n", names.join(", ").replace('|', "\\|"))
}

fn table(rows: &[String]) -> String {
    format!("| flag | meaning |\n| --- | --- |\n{}\n", rows.concat())
}

/// The list, with flags that several commands share once.
fn list() -> String {
    let commands = commands();
    let mut text = format!("{LIST}\n");
    for (name, command) in &commands {
        let rows: Vec<String> = flags(command, None).map(row).collect();
        if !rows.is_empty() {
            let _ = write!(text, "### {name}\n\n{}", table(&rows));
        }
    }
    for heading in HEADINGS {
        let mut rows: Vec<String> = Vec::new();
        let mut names = Vec::new();
        for (name, command) in &commands {
            let of_command: Vec<String> = flags(command, Some(heading)).map(row).collect();
            if !of_command.is_empty() {
                names.push(format!("`{name}`"));
            }
            for row in of_command {
                if !rows.contains(&row) {
                    rows.push(row);
                }
            }
        }
        let whose = if heading == "Everywhere" {
            "Of every command.".to_owned()
        } else {
            format!("Of {}.", names.join(", "))
        };
        let _ = write!(text, "### {heading}\n\n{whose}\n\n{}", table(&rows));
    }
    text.trim_end().to_owned() + "\n"
}

#[test]
fn the_page_lists_every_flag() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    let page = fs::read_to_string(path).unwrap();
    let (before, _) = page.split_once(LIST).unwrap_or((&page, ""));
    let expected = format!("{}\n\n{}", before.trim_end(), list());
    expect_file!["../../../../docs/cli.md"].assert_eq(&expected);
}

#[test]
fn headings_come_in_one_order() {
    for (name, command) in commands() {
        let mut seen: Vec<&str> = Vec::new();
        for heading in command.get_arguments().filter_map(Arg::get_help_heading) {
            if !seen.contains(&heading) {
                seen.push(heading);
            }
        }
        let place = |heading: &str| HEADINGS.iter().position(|known| *known == heading);
        let places: Vec<_> = seen.iter().map(|heading| place(heading)).collect();
        assert!(places.iter().all(Option::is_some), "{name}: {seen:?}");
        assert!(places.is_sorted(), "{name}: {seen:?}");
        assert_eq!(seen.last(), Some(&"Everywhere"), "{name}");
    }
}

#[test]
fn every_flag_says_what_it_does() {
    for (name, command) in commands() {
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let help = arg.get_help().map(ToString::to_string);
            assert!(help.is_some(), "{name}: {}", arg.get_id());
        }
    }
}
