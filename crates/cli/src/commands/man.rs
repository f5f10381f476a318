//! `man`: manual pages, made of the same words as `--help`.

use std::{
    fs,
    io::{self, Write},
};

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::{
    args::{Arguments, ManArgs},
    misuse::misuse,
    output::WholeFile,
    version,
};

pub(crate) fn run(args: &ManArgs) -> Result<()> {
    // A page says the same on every machine.
    let mut program = Arguments::command().version(version::NUMBER);
    program.build();
    if let Some(folder) = &args.out {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot make the folder `{}`", folder.display()))?;
        for command in with_subcommands(&program) {
            let man = Man::new(command.clone());
            let mut file = WholeFile::create(&folder.join(man.get_filename()))?;
            file.fill(|out| man.render(out))?;
            file.commit()?;
        }
        return Ok(());
    }
    let mut page = Vec::new();
    Man::new(named(&program, &args.command)?.clone()).render(&mut page)?;
    let mut out = io::stdout().lock();
    out.write_all(&page).context("cannot write to stdout")?;
    out.flush().context("cannot write to stdout")
}

/// The command that the words lead to: none to the program, `eval logits` to a command of a command.
fn named<'a>(program: &'a Command, words: &[String]) -> Result<&'a Command> {
    let mut command = program;
    for word in words {
        let Some(found) = command.find_subcommand(word) else {
            let path = command.get_bin_name().unwrap_or("carat");
            misuse!("`{path}` has no command `{word}`; `{path} --help` lists those it has");
        };
        command = found;
    }
    Ok(command)
}

/// The program, its commands and theirs, but for those that are not shown and clap's own `help`.
fn with_subcommands(command: &Command) -> Vec<&Command> {
    let subcommands = command
        .get_subcommands()
        .filter(|c| !c.is_hide_set() && c.get_name() != "help");
    std::iter::once(command)
        .chain(subcommands.flat_map(with_subcommands))
        .collect()
}
