//! `completions`: what a shell reads to complete commands, flags and their values.

use std::io::{self, Write};

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::args::{Arguments, CompletionsArgs};

pub(crate) fn run(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Arguments::command(), "carat", &mut script);
    let mut out = io::stdout().lock();
    out.write_all(&script).context("cannot write to stdout")?;
    out.flush().context("cannot write to stdout")
}
