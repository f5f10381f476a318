//! `carat`: load a Gemma 4 model and use it.
//!
//! - `args`: what can be typed; `foreign`: what others call it; `settings`: what it means
//! - `load`: from `-m` to a model ready to run; `hub`, `fetch`: models from Hugging Face
//! - `session`: a model ready to talk; `answer`: an answer on the screen as it comes
//! - `commands/<name>`: one file a command
//! - `synth`: random models of real shape
//! - `parity`, `roofline`: where two backends part; how fast a device could be
//! - `terminal`, `output`, `input`: notes and progress, files that appear whole, files and stdin
//! - `version`: what `--version` says
//! - `words`, `misuse`: what is wrong with a JSON or TOML text, and with the command line
//! - `visible`, `wrap`, `closed`: text of a model on a terminal; its lines; a stdout that is not there
//! - `interrupt`, `typeahead`: signals; what is typed while nobody reads

mod answer;
mod args;
mod closed;
mod commands;
mod draft;
mod fetch;
mod foreign;
mod hub;
mod input;
mod interrupt;
mod load;
mod misuse;
mod output;
mod parity;
mod roofline;
mod session;
mod settings;
mod shipped_kernels;
mod structured;
mod synth;
mod terminal;
mod typeahead;
mod version;
mod visible;
mod words;
mod wrap;

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
};

use anyhow::Result;
use clap::Parser;

use args::{Arguments, Command, EvalCommand, KernelsCommand};
use misuse::Misuse;
use settings::Sources;
use terminal::{Terminal, say, warn};

fn main() -> ExitCode {
    let typed = foreign::understood(std::env::args_os());
    let arguments = match Arguments::try_parse_from(typed) {
        Ok(arguments) => arguments,
        Err(error) => {
            if let Some(answer) = foreign::answer(&error) {
                warn(answer);
            } else {
                // Nowhere to say it is no reason to panic.
                let _ = error.print();
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    if closed::stdout_was_closed() && !matches!(arguments.command, Command::Serve(_)) {
        warn("stdout is closed, so there is nowhere to write to");
        return ExitCode::FAILURE;
    }
    // `RUST_LOG` decides; without it, errors.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) if reader_went_away(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // The chain reads as one sentence: what was tried, then why it failed.
            warn(format_args!("{error:#}"));
            if Misuse::is_cause_of(&error) {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// `carat … | head` is no failure.
fn reader_went_away(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    let terminal = Terminal::new(arguments.quiet);
    let sources = Sources::read(arguments)?;
    let resolved = sources.resolve()?;
    if arguments.print_config {
        say(resolved.with_origins()?.trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    let settings = resolved.settings;
    match &arguments.command {
        Command::Run(a) => return commands::run::run(a, &settings, terminal),
        Command::Chat(a) => return commands::chat::run(a, &settings, terminal),
        Command::Serve(a) => return commands::serve::run(a, &settings, &sources, terminal),
        Command::Inspect(a) => return commands::inspect::run(a, &settings, terminal),
        Command::Tokenize(a) => commands::tokenize::run(a, &settings, terminal)?,
        Command::Doctor(a) => commands::doctor::run(a, &settings, terminal)?,
        Command::Check(_) => return commands::check::run(&settings, terminal),
        Command::Bench(a) => commands::bench::run(a, &settings, terminal)?,
        Command::Tune(a) => commands::tune::run(a, &settings, terminal)?,
        Command::Eval(EvalCommand::Logits(a)) => {
            return commands::eval::logits(a, &settings, terminal);
        }
        Command::Eval(EvalCommand::Perplexity(a)) => {
            commands::eval::perplexity(a, &settings, terminal)?;
        }
        Command::Synth(a) => return commands::synth::run(a, terminal),
        Command::Pull(a) => commands::pull::run(a, &settings, terminal)?,
        Command::List => commands::list::run(&settings, terminal)?,
        Command::Rm(a) => commands::rm::run(a, &settings, terminal)?,
        Command::Kernels(KernelsCommand::Build(a)) => commands::kernels::build(a, terminal)?,
        Command::Completions(a) => commands::completions::run(a)?,
        Command::Man(a) => commands::man::run(a)?,
    }
    Ok(ExitCode::SUCCESS)
}
