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
//! - `words`: what is wrong with a JSON or TOML text
//! - `visible`, `wrap`, `closed`: text of a model on a terminal; its lines; a stdout that is not there
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
mod parity;
mod roofline;
mod session;
mod settings;
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
use hub::Environment;
use settings::{Layer, Settings, SettingsFile, merged};
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

/// The settings with what was typed laid over them.
fn with_flags(mut settings: Settings, arguments: &Arguments) -> Result<Settings> {
    if arguments.offline {
        settings.offline = Some(true);
    }
    Ok(match &arguments.command {
        Command::Run(a) => settings.with_generation(&a.generate)?,
        Command::Chat(a) => settings.with_generation(&a.generate)?,
        Command::Serve(a) => settings.with_serve(a)?,
        Command::Inspect(a) => {
            let mut settings = settings.with_model(&a.model)?;
            settings.model = a.file.clone().or(settings.model);
            settings
        }
        Command::Bench(a) => settings.with_model(&a.model)?,
        Command::Doctor(a) => settings.with_model(&a.model)?,
        Command::Check(a) => a.applied(settings)?,
        Command::Eval(EvalCommand::Logits(a)) => settings.with_model(&a.model)?,
        Command::Eval(EvalCommand::Perplexity(a)) => settings.with_model(&a.model)?,
        Command::Tokenize(a) => Settings {
            model: a.model.clone().or(settings.model),
            ..settings
        },
        Command::Synth(_)
        | Command::Pull(_)
        | Command::List
        | Command::Rm(_)
        | Command::Kernels(_)
        | Command::Completions(_)
        | Command::Man(_) => settings,
    })
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    let terminal = Terminal::new(arguments.quiet);
    let mut typed = with_flags(Settings::default(), arguments)?;
    let file = match &arguments.command {
        // About the program itself, whatever the settings are.
        Command::Completions(_) | Command::Man(_) => None,
        _ => SettingsFile::read(arguments.config.as_deref())?,
    };
    let mut layers = match file {
        Some(file) => file.layers(typed.model.as_deref())?,
        None => Vec::new(),
    };
    let section = layers.get(1);
    let section_model = section.and_then(|section| section.settings.model.clone());
    if Environment::capture().offline {
        layers.push(Layer {
            origin: "HF_HUB_OFFLINE".to_owned(),
            settings: Settings {
                offline: Some(true),
                ..Settings::default()
            },
        });
    }
    let mut settings = with_flags(merged(&layers)?, arguments)?;
    // A section may say which file its name stands for.
    if let Some(model) = section_model {
        settings.model = Some(model);
        typed.model = None;
    }
    if arguments.print_config {
        layers.push(Layer {
            origin: "flag".to_owned(),
            settings: typed,
        });
        say(settings.with_origins(&layers)?.trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    match &arguments.command {
        Command::Run(a) => return commands::run::run(a, &settings, terminal),
        Command::Chat(a) => return commands::chat::run(a, &settings, terminal),
        Command::Serve(a) => return commands::serve::run(a, &settings, terminal),
        Command::Inspect(a) => return commands::inspect::run(a, &settings, terminal),
        Command::Tokenize(a) => commands::tokenize::run(a, &settings, terminal)?,
        Command::Doctor(a) => commands::doctor::run(a, &settings, terminal)?,
        Command::Check(_) => return commands::check::run(&settings, terminal),
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
        Command::Rm(a) => commands::rm::run(a, &settings, terminal)?,
        Command::Kernels(KernelsCommand::Build(a)) => commands::kernels::build(a, terminal)?,
        Command::Completions(a) => commands::completions::run(a)?,
        Command::Man(a) => commands::man::run(a)?,
    }
    Ok(ExitCode::SUCCESS)
}
