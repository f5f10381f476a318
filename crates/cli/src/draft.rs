//! From `--draft` to a drafter: the one that is named, the one beside the model, or the demo model's own.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use carat::{Drafts, Loaded};
use carat_gguf::Gguf;
use carat_model::{Drafter, Model, backend::Backend};

use crate::{
    fetch, load,
    settings::Settings,
    terminal::{Terminal, bytes},
};

/// Tokens of a draft at the most, where nobody says otherwise: with the token before them, as many rows as the fastest products of
/// every device take.
const DEFAULT_MAX_TOKENS: usize = 7;
/// Rows that drafts may bring a step to on devices where more would make no difference to results.
const MAX_ROWS: usize = 32;
/// Parts of the names that people publish drafters under.
const USUAL_NAMES: [&str; 4] = ["assistant", "drafter", "draft", "mtp"];

/// Opens the model with whoever drafts for it.
pub(crate) fn open_model(settings: &Settings, terminal: Terminal) -> Result<Loaded> {
    let mut loaded = load::open_model(settings, terminal)?;
    loaded.drafts = drafts(settings, &loaded.model, loaded.backend.as_ref(), terminal)?;
    Ok(loaded)
}

/// The drafts that the settings ask for, said in a line.
fn drafts(
    settings: &Settings,
    model: &Model,
    backend: &dyn Backend,
    terminal: Terminal,
) -> Result<Drafts> {
    let most = settings.draft_max.unwrap_or(DEFAULT_MAX_TOKENS);
    let asked = settings.draft.as_deref().unwrap_or("auto");
    if asked == "off" || most == 0 {
        return Ok(Drafts::default());
    }
    if asked == "auto" && !backend.drafts() {
        // Where n-grams have not been measured to gain, they are for those who ask for them.
        return Ok(Drafts::default());
    }
    let mut drafts = Drafts {
        drafter: None,
        // N-grams are for those who ask for them, or name a drafter: no gain has been measured where nobody does.
        lookup: asked != "auto",
        max_tokens: most,
        rows: backend.exact_rows().min(MAX_ROWS),
        costs_folder: load::kernel_cache(),
    };
    drafts.drafter = match asked {
        "ngram" => None,
        "auto" => find(settings, model, terminal)?,
        name => {
            if !backend.drafts() {
                bail!(
                    "draft models do not run on `{}` yet; leave --draft out, or give --draft ngram or --backend cpu",
                    backend.name()
                );
            }
            let path = fetch::resolve(name, settings, terminal)
                .with_context(|| format!("cannot load the drafter `{name}`"))?;
            Some(open(&path, model)?)
        }
    };
    if drafts.drafter.is_none() && !drafts.lookup {
        return Ok(Drafts::default());
    }
    tell(&drafts, terminal);
    Ok(drafts)
}

fn tell(drafts: &Drafts, terminal: Terminal) {
    match &drafts.drafter {
            Some(drafter) => {
                let file = drafter.weights.file();
                terminal.note(format_args!(
                    "drafting with {} ({}), up to {} tokens a pass; --draft off does without",
                    drafter.config.name,
                    bytes(file.file_bytes() as u64),
                    drafts.max_tokens
                ));
            }
            None => terminal.note(
                "drafting what the text repeats (n-grams); --draft FILE drafts with a model, --draft off not at all",
            ),
        }
}

/// The demo model's own drafter, or one beside the model's file.
fn find(settings: &Settings, model: &Model, terminal: Terminal) -> Result<Option<Drafter>> {
    if settings.model.is_none() {
        let demo = load::demo_drafter()?;
        let drafter = Drafter::load(demo, model).context("the demo model's drafter is damaged")?;
        return Ok(Some(drafter));
    }
    for path in beside(model.weights.file().path()) {
        let Ok(file) = Gguf::open(&path) else {
            continue;
        };
        if !Drafter::is_one(&file) {
            continue;
        }
        match Drafter::load(Arc::new(file), model) {
            Ok(drafter) => return Ok(Some(drafter)),
            Err(error) => {
                terminal.note(format_args!("`{}` is passed over: {error}", path.display()));
            }
        }
    }
    Ok(None)
}

/// Files in the model's folder that are called like drafters, by name.
fn beside(model: &Path) -> Vec<PathBuf> {
    let is_named_so = |path: &PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let name = name.to_lowercase();
        let extension = path.extension().unwrap_or_default();
        extension.eq_ignore_ascii_case("gguf")
            && USUAL_NAMES.iter().any(|usual| name.contains(usual))
    };
    let folder = model.parent().map(std::fs::read_dir);
    let entries = folder.and_then(Result::ok).into_iter().flatten();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<PathBuf> = paths
        .filter(|path| is_named_so(path) && path != model)
        .collect();
    found.sort();
    found
}

fn open(path: &Path, model: &Model) -> Result<Drafter> {
    let cannot = || format!("cannot load the drafter `{}`", path.display());
    let file = Gguf::open(path).with_context(cannot)?;
    Drafter::load(Arc::new(file), model).with_context(cannot)
}
