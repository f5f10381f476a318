//! Settings from all their sources, for one model at a time: the file's top, its section for the model, the environment, the flags.

use anyhow::Result;

use super::{
    Settings,
    file::{Layer, SettingsFile, merged},
};
use crate::{
    args::{Arguments, Command, EvalCommand},
    hub::Environment,
};

/// All that was set, whatever the model.
pub(crate) struct Sources<'a> {
    arguments: &'a Arguments,
    file: Option<SettingsFile>,
    offline: bool,
}

/// Settings of one model.
pub(crate) struct Resolved {
    pub(crate) settings: Settings,
    /// Each source, the strongest last.
    layers: Vec<Layer>,
    /// The section names its file itself.
    section_names_file: bool,
}

impl<'a> Sources<'a> {
    pub(crate) fn read(arguments: &'a Arguments) -> Result<Sources<'a>> {
        let file = match &arguments.command {
            // About the program itself, whatever the settings are.
            Command::Completions(_) | Command::Man(_) => None,
            _ => SettingsFile::read(arguments.config.as_deref())?,
        };
        Ok(Sources {
            arguments,
            file,
            offline: Environment::capture().offline,
        })
    }

    /// Settings of the model that the flags name, or else the file.
    pub(crate) fn resolve(&self) -> Result<Resolved> {
        let typed = with_flags(Settings::default(), self.arguments)?;
        let model = typed.model.clone();
        self.resolved(typed, model.as_deref())
    }

    /// Settings of one of several models, and its name: by the section of the name it is given, or else by that of the model.
    pub(crate) fn served(
        &self,
        name: Option<&str>,
        model: &str,
    ) -> Result<(Option<String>, Settings)> {
        let has_section = |key: &str| {
            let file = self.file.as_ref();
            file.is_some_and(|file| file.has_section(key))
        };
        let given = name.filter(|name| has_section(name));
        let typed = with_flags(Settings::default(), self.arguments)?;
        let mut resolved = self.resolved(typed, Some(given.unwrap_or(model)))?;
        let mut name = name.map(str::to_owned);
        if given.is_some() || !resolved.section_names_file {
            resolved.settings.model = Some(model.to_owned());
        } else if name.is_none() {
            name = Some(model.to_owned());
        }
        Ok((name, resolved.settings))
    }

    fn resolved(&self, mut typed: Settings, model: Option<&str>) -> Result<Resolved> {
        let mut layers = match &self.file {
            Some(file) => file.layers(model)?,
            None => Vec::new(),
        };
        let section = layers.get(1);
        let section_model = section.and_then(|section| section.settings.model.clone());
        if self.offline {
            layers.push(Layer {
                origin: "HF_HUB_OFFLINE".to_owned(),
                settings: Settings {
                    offline: Some(true),
                    ..Settings::default()
                },
            });
        }
        let mut settings = with_flags(merged(&layers)?, self.arguments)?;
        let section_names_file = section_model.is_some();
        if let Some(model) = section_model {
            settings.model = Some(model);
            typed.model = None;
        }
        layers.push(Layer {
            origin: "flag".to_owned(),
            settings: typed,
        });
        Ok(Resolved {
            settings,
            layers,
            section_names_file,
        })
    }
}

impl Resolved {
    /// Every setting with its origin.
    pub(crate) fn with_origins(&self) -> Result<String> {
        self.settings.with_origins(&self.layers)
    }
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
        Command::Tune(a) => {
            let mut settings = settings.with_model(&a.model)?;
            settings.model = a.file.clone().or(settings.model);
            settings
        }
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
