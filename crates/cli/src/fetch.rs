//! The hub client as commands use it: with the person's environment, a progress bar and Ctrl-C left to its default.

use std::{ops::ControlFlow, path::PathBuf};

use anyhow::{Context, Result};
use indicatif::ProgressBar;

use crate::{
    hub::{Endpoint, Environment, Hub, HubConfig, HubRef, ModelRef, Network, Progress, Watch},
    settings::Settings,
    terminal::Terminal,
};

pub(crate) fn hub(settings: &Settings) -> Result<Hub> {
    let network = if settings.offline == Some(true) {
        Network::Forbidden
    } else {
        Network::Allowed
    };
    let mut config = HubConfig {
        network,
        ..HubConfig::default()
    };
    let environment = Environment::capture();
    if let Some(address) = &environment.endpoint {
        config.endpoint = Endpoint::new(address)
            .with_context(|| format!("HF_ENDPOINT is `{address}`, which cannot be used"))?;
    }
    Hub::new(&environment, config)
}

/// A model of the hub: by its short name, or its repository with or without `hf:`.
pub(crate) fn on_hub(name: &str) -> Result<HubRef> {
    match name.parse()? {
        ModelRef::Hub(model) => Ok(model),
        ModelRef::Path(_) => name.parse(),
    }
}

/// The file that `-m` names, fetched first if it must be.
pub(crate) fn resolve(model: &str, settings: &Settings, terminal: Terminal) -> Result<PathBuf> {
    let name = model;
    let model: ModelRef = name.parse()?;
    match &model {
        ModelRef::Path(path) if path.exists() => return Ok(path.clone()),
        ModelRef::Hub(model) if !name.starts_with("hf:") => {
            terminal.note(format_args!("{name} is {model}"));
        }
        ModelRef::Path(_) | ModelRef::Hub(_) => {}
    }
    let hub = hub(settings)?;
    with_bar(terminal, |watch| hub.resolve(&model, watch))
}

/// Runs a download with a bar that appears with the first byte.
pub(crate) fn with_bar<T>(
    terminal: Terminal,
    work: impl FnOnce(&mut Watch<'_>) -> Result<T>,
) -> Result<T> {
    let mut bar: Option<(String, ProgressBar)> = None;
    let result = work(&mut |progress| {
        match progress {
            Progress::Receiving { file, done, total }
            | Progress::Checking { file, done, total } => {
                if bar.as_ref().is_none_or(|(name, _)| name != file) {
                    bar = Some((file.to_owned(), terminal.byte_bar(total, file)));
                }
                if let Some((_, bar)) = &bar {
                    bar.set_position(done);
                }
            }
            Progress::Retrying { reason, wait } => {
                if let Some((_, bar)) = &bar {
                    bar.set_message(format!("{reason}; again in {} s", wait.as_secs()));
                }
            }
            Progress::Waiting { file } => {
                if bar.is_none() {
                    let shown =
                        terminal.byte_bar(0, &format!("{file}: another process is fetching it"));
                    bar = Some((String::new(), shown));
                }
            }
        }
        ControlFlow::Continue(())
    });
    if let Some((_, bar)) = bar {
        bar.finish_and_clear();
    }
    result
}
