//! Several models, loaded when they are asked for, in a budget of memory.
//!
//! Every file is opened at the start, so that what is wrong with it is said then, and so that its memory is known before it takes
//! any. Contexts are chosen so that all models stay in memory where the budget allows that.

use std::{collections::HashSet, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use carat::{
    Loaded, footprint,
    footprint::{largest_context, smallest_context},
};
use carat_server::{App, Load, Offer, Residency};

use super::{describe, engine_config, leave_a_core, open, start};
use crate::{
    args::ServeArgs,
    misuse::misuse,
    settings::{Settings, Sources, memory_size},
    terminal::{Terminal, bytes, thousands, warn},
};

/// Time before a load that failed is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// A model to be served.
pub(super) struct Served {
    /// The file's own where none is given.
    name: Option<String>,
    settings: Settings,
}

/// The models, where there are several, or one that comes and goes; `None` for one that is loaded with the server.
pub(super) fn models(
    args: &ServeArgs,
    settings: &Settings,
    sources: &Sources<'_>,
) -> Result<Option<Vec<Served>>> {
    let named: Vec<_> = args.model.model.iter().map(|text| parse(text)).collect();
    let come_and_go = named.len() > 1
        || named.iter().any(|(name, _)| name.is_some())
        || args.models_memory.is_some()
        || args.idle_unload.is_some();
    if !come_and_go {
        return Ok(None);
    }
    let mut models: Vec<Served> = Vec::new();
    for (name, model) in named {
        let (name, mut own) = sources.served(name, model)?;
        leave_a_core(&mut own);
        if let Some(first) = models.first().map(|first| &first.settings)
            && (own.backend, own.device) != (first.backend, first.device)
        {
            bail!(
                "the settings of the model `{}` name another device than those of the first, and all models of a server share one; give \
                 --backend and --device",
                name.as_deref().unwrap_or(model)
            );
        }
        models.push(Served {
            name,
            settings: own,
        });
    }
    if models.is_empty() {
        models.push(Served {
            name: None,
            settings: settings.clone(),
        });
    }
    if let Some(name) = &args.name {
        match &mut models[..] {
            [one] => one.name = Some(name.clone()),
            _ => misuse!(
                "--name {name} is for one model, and there are {}; name each with -m NAME=FILE",
                models.len()
            ),
        }
    }
    let mut drafters = HashSet::new();
    for model in &models {
        let drafter = model.settings.draft.as_deref();
        if let Some(file) = drafter.filter(|draft| !["auto", "ngram", "off"].contains(draft))
            && !drafters.insert(file)
        {
            bail!(
                "the drafter `{file}` is made for one model, and several would have it: put each drafter beside its model, where --draft \
                 auto finds it"
            );
        }
    }
    Ok(Some(models))
}

/// `NAME=MODEL`, or a model alone. A file whose name has a `=` is a file.
fn parse(text: &str) -> (Option<&str>, &str) {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
    match text.split_once('=') {
        Some((name, model))
            if !name.is_empty()
                && !model.is_empty()
                && name.chars().all(is_plain)
                && !Path::new(text).exists() =>
        {
            (Some(name), model)
        }
        _ => (None, text),
    }
}

/// A model that is open, and the settings to open it again with.
struct Opened {
    settings: Settings,
    name: Option<String>,
    loaded: Loaded,
}

/// Hands the models to the server. Returns what is ready, in words.
pub(super) fn offer(
    app: &App,
    models: Vec<Served>,
    args: &ServeArgs,
    terminal: Terminal,
) -> Result<String> {
    let mut opened = Vec::new();
    for (n, Served { name, settings }) in models.into_iter().enumerate() {
        // What is said of the device is the same for all.
        let words = if n == 0 {
            terminal
        } else {
            Terminal::new(true)
        };
        let loaded = open(args, &settings, words)?;
        opened.push(Opened {
            settings,
            name,
            loaded,
        });
    }
    let memory_bytes = match &args.models_memory {
        Some(size) => memory_size(size).context("--models-memory")?,
        None => opened[0].loaded.backend.memory()?.free_bytes,
    };
    let contexts = contexts(&opened, args.parallel, memory_bytes)?;
    let mut offers = Vec::new();
    for (opened, context) in opened.into_iter().zip(contexts) {
        let offer = offer_one(args, opened, context)?;
        let (name, bytes_of) = (&offer.info.name, bytes(offer.memory_bytes));
        terminal.note(format_args!(
            "`{name}`: {bytes_of} with {} tokens of context",
            thousands(context as u64)
        ));
        if offer.memory_bytes > memory_bytes {
            warn(format_args!(
                "`{name}` takes {bytes_of} and the budget is {}: requests for it will be refused; give a larger --models-memory, or a \
                 smaller -c or --parallel",
                bytes(memory_bytes)
            ));
        }
        offers.push(offer);
    }
    let mut names = HashSet::new();
    for offer in &offers {
        let name = &offer.info.name;
        if !names.insert(name.clone()) {
            misuse!("two models are called `{name}`; give them names with -m NAME=FILE");
        }
    }
    let ready = format!(
        "{} models in {}, loaded when asked for,",
        offers.len(),
        bytes(memory_bytes)
    );
    let residency = Residency {
        memory_bytes,
        idle: args.idle_unload.map(Duration::from_secs),
        retry: RETRY,
    };
    app.offer(offers, residency)
        .context("cannot start the thread that loads models")?;
    Ok(ready)
}

/// Contexts that are asked for, and for the other models as large as they can be while all stay in memory side by side. Where not even
/// the smallest ones leave room for all, each of these gets half of what the budget leaves beside it.
fn contexts(opened: &[Opened], parallel: usize, budget: u64) -> Result<Vec<usize>> {
    let least: Vec<u64> = opened
        .iter()
        .map(
            |Opened {
                 settings, loaded, ..
             }| {
                let context = settings.context.unwrap_or_else(|| smallest_context(loaded));
                footprint::footprint(loaded, &loaded.engine_config(parallel, context))
            },
        )
        .collect::<Result<_, _>>()?;
    let free = opened
        .iter()
        .filter(|one| one.settings.context.is_none())
        .count() as u64;
    let spare = budget.checked_sub(least.iter().sum());
    let contexts = opened.iter().zip(least).map(|(one, least)| {
        if let Some(asked) = one.settings.context {
            return Ok(asked);
        }
        let more = match spare {
            Some(spare) => spare / free,
            None => budget.saturating_sub(least) / 2,
        };
        Ok(largest_context(&one.loaded, parallel, least + more)?)
    });
    contexts.collect()
}

fn offer_one(args: &ServeArgs, opened: Opened, context: usize) -> Result<Offer> {
    let Opened {
        settings,
        name,
        loaded,
    } = opened;
    let path = loaded.file.path().display().to_string();
    let sampling = settings
        .sampling
        .resolve(loaded.file.metadata(), carat::fresh_seed())
        .with_context(|| format!("cannot load `{path}`"))?;
    let config = engine_config(args, &loaded, context);
    let info = describe(name, &loaded, context);
    let memory_bytes = taken(&settings, &loaded, args, context)?;
    let (args, settings) = (
        args.clone(),
        Settings {
            context: Some(context),
            ..settings
        },
    );
    let name = info.name.clone();
    let load: Load = Arc::new(move || {
        // All there is to say was said at the start.
        let quiet = Terminal::new(true);
        let load = || {
            let loaded = open(&args, &settings, quiet)?;
            let needed = taken(&settings, &loaded, &args, context)?;
            if needed > memory_bytes {
                bail!(
                    "it takes {} now and took {} when the server started; start the server again",
                    bytes(needed),
                    bytes(memory_bytes)
                );
            }
            start(&args, &settings, loaded, Some(name.clone()), quiet)
        };
        load().map_err(|error| format!("{error:#}"))
    });
    Ok(Offer {
        info,
        sampling,
        parallel: config.max_sequences,
        max_unfinished: config.max_unfinished,
        memory_bytes,
        load,
    })
}

/// Memory of a model, with what is kept for weights that stay unpacked.
fn taken(settings: &Settings, loaded: &Loaded, args: &ServeArgs, context: usize) -> Result<u64> {
    let config = engine_config(args, loaded, context);
    let repacked = settings.repack_bytes()?.unwrap_or(0);
    Ok(footprint::footprint(loaded, &config)? + repacked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_before_the_model() {
        for (text, expected) in [
            ("small=a.gguf", (Some("small"), "a.gguf")),
            (
                "gemma:12b=hf:o/r:Q4_K_M",
                (Some("gemma:12b"), "hf:o/r:Q4_K_M"),
            ),
            ("a.gguf", (None, "a.gguf")),
            ("dir/x=y.gguf", (None, "dir/x=y.gguf")),
            ("=a.gguf", (None, "=a.gguf")),
        ] {
            assert_eq!(parse(text), expected);
        }
    }
}
