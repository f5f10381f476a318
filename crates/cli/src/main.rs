//! `carat`: load a Gemma 4 model and use it.
//!
//! - `args`: what can be typed; `foreign`: what others call it; `settings`: what it means
//! - `load`: from `-m` to a model ready to run; `hub`, `fetch`: models from Hugging Face
//! - `session`: a model ready to talk; `answer`: an answer on the screen as it comes
//! - `commands/<name>`: one file a command
//! - `synth`: random models of real shape
//! - `terminal`, `output`, `input`: notes and progress, files that appear whole, files and stdin
//! - `words`: what is wrong with a JSON or TOML text
//! - `visible`, `closed`: text of a model on a terminal; a stdout that is not there
//! - `interrupt`, `typeahead`: signals; what is typed while nobody reads

mod allocator;
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
mod output;
mod session;
mod settings;
mod shape;
mod synth;
mod terminal;
mod typeahead;
mod visible;
mod words;

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
};

use anyhow::Result;
use clap::Parser;

use args::{Arguments, Command, EvalCommand, KernelsCommand};
use settings::Settings;
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
            ExitCode::FAILURE
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
    let mut settings = Settings::read(arguments.config.as_deref())?;
    if arguments.offline {
        settings.offline = Some(true);
    }
    let settings = match &arguments.command {
        Command::Run(a) => settings.with_generation(&a.generate)?,
        Command::Chat(a) => settings.with_generation(&a.generate)?,
        Command::Serve(a) => settings.with_serve(a)?,
        Command::Inspect(a) => {
            let mut settings = settings.with_model(&a.model)?;
            settings.model = a.file.clone().or(settings.model);
            settings
        }
        Command::Bench(a) => settings.with_model(&a.model)?,
        Command::Eval(EvalCommand::Logits(a)) => settings.with_model(&a.model)?,
        Command::Eval(EvalCommand::Perplexity(a)) => settings.with_model(&a.model)?,
        Command::Tokenize(a) => Settings {
            model: a.model.clone().or(settings.model),
            ..settings
        },
        Command::Synth(_) | Command::Pull(_) | Command::List | Command::Kernels(_) => settings,
    };
    if arguments.print_config {
        say(settings.to_toml()?.trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    match &arguments.command {
        Command::Run(a) => return commands::run::run(a, &settings, terminal),
        Command::Chat(a) => return commands::chat::run(a, &settings, terminal),
        Command::Serve(a) => return commands::serve::run(a, &settings, terminal),
        Command::Inspect(a) => return commands::inspect::run(a, &settings, terminal),
        Command::Tokenize(a) => commands::tokenize::run(a, &settings, terminal)?,
        Command::Bench(a) => commands::bench::run(a, &settings, terminal)?,
        Command::Eval(EvalCommand::Logits(a)) => {
            return commands::eval::logits(a, &settings, terminal);
        }
        Command::Eval(EvalCommand::Perplexity(a)) => {
            commands::eval::perplexity(a, &settings, terminal)?;
        }
        Command::Synth(a) => return commands::synth::run(a, terminal),
        Command::Pull(a) => commands::pull::run(a, &settings, terminal)?,
        Command::List => commands::list::run(&settings, terminal)?,
        Command::Kernels(KernelsCommand::Build(a)) => commands::kernels::build(a, terminal)?,
    }
    Ok(ExitCode::SUCCESS)
}
