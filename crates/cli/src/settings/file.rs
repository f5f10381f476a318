//! The settings file: where it is, what its paths are relative to, and its sections for single models.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, bail};
use toml::{Table, Value};

use super::Settings;
use crate::{hub::ModelRef, words};

/// Name of the file in the folder for settings.
const PLACE: &str = "carat/config.toml";

/// A settings file that was read.
#[derive(Debug)]
pub(crate) struct SettingsFile {
    path: PathBuf,
    settings: Settings,
}

/// Settings from one source, and the words for it.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) origin: String,
    pub(crate) settings: Settings,
}

impl SettingsFile {
    /// The file that is named, or the one at the usual place, if there is one.
    pub(crate) fn read(named: Option<&Path>) -> Result<Option<SettingsFile>> {
        let Some(path) = named.map(Path::to_owned).or_else(usual_place) else {
            return Ok(None);
        };
        let text = match fs::read_to_string(&path) {
            Err(error) if named.is_none() && is_missing(&error) => return Ok(None),
            text => {
                text.with_context(|| format!("cannot read the settings file `{}`", path.display()))?
            }
        };
        let settings = parse(&text, &path)?;
        Ok(Some(SettingsFile { path, settings }))
    }

    /// Whether there is a section of this name.
    pub(crate) fn has_section(&self, name: &str) -> bool {
        self.settings.models.contains_key(name)
    }

    /// The file's settings for a model: everything at the top, then the section of the model's name.
    pub(crate) fn layers(&self, model: Option<&str>) -> Result<Vec<Layer>> {
        let path = self.path.display().to_string();
        let mut settings = self.settings.clone();
        let mut sections = std::mem::take(&mut settings.models);
        let model = model.or(settings.model.as_deref());
        let section = model.and_then(|name| sections.remove_entry(name));
        let folder = self.path.parent().unwrap_or(Path::new(""));
        settings.resolve_paths(folder);
        let mut layers = vec![Layer {
            origin: path.clone(),
            settings,
        }];
        if let Some((name, mut settings)) = section {
            if !settings.models.is_empty() {
                bail!(
                    "the section of the model `{name}` in `{path}` has a section `models` of its own; put it at the top"
                );
            }
            settings.resolve_paths(folder);
            layers.push(Layer {
                origin: format!("section `{name}` of {path}"),
                settings,
            });
        }
        Ok(layers)
    }
}

/// Place of the settings that are read unasked: `$XDG_CONFIG_HOME/carat/config.toml`, else below `.config` in the home folder.
fn usual_place() -> Option<PathBuf> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the desktop's convention for the place of settings"
    )]
    let configured = env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let folder = configured
        .filter(|folder| folder.is_absolute())
        .or_else(|| Some(env::home_dir()?.join(".config")))?;
    Some(folder.join(PLACE))
}

fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

fn parse(text: &str, path: &Path) -> Result<Settings> {
    toml::from_str(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text
            .get(..start)
            .map_or(0, |before| before.matches('\n').count())
            + 1;
        let problem = words::plain(&error.message().replace('\n', " "));
        anyhow!(
            "line {line} of `{}` is no setting: {problem} (`carat --print-config run` lists them all)",
            path.display()
        )
    })
}

impl Settings {
    /// Paths are relative to the folder of the file that they stand in, and `~` is the home folder.
    fn resolve_paths(&mut self, folder: &Path) {
        let resolve = |path: &Path| match path.strip_prefix("~") {
            Ok(rest) => env::home_dir().map_or_else(|| path.to_owned(), |home| home.join(rest)),
            Err(_) => folder.join(path),
        };
        for model in [&mut self.model, &mut self.draft].into_iter().flatten() {
            let is_word = ["auto", "ngram", "off"].contains(&model.as_str());
            if let (false, Ok(ModelRef::Path(path))) = (is_word, model.parse())
                && let Some(path) = resolve(&path).to_str()
            {
                path.clone_into(model);
            }
        }
        let file = |place: &&mut String| !matches!(place.as_str(), "auto" | "card");
        if let Some(place) = self.place.as_mut().filter(file) {
            *place = resolve(Path::new(place)).to_string_lossy().into_owned();
        }
        if let Some(kernels) = &mut self.kernels {
            *kernels = resolve(kernels);
        }
    }

    /// The settings made here, as a table.
    pub(super) fn table(&self) -> Result<Table> {
        // Through text: a number such as 0.7 keeps its digits.
        let text = toml::to_string(self).context("cannot write the settings down")?;
        toml::from_str(&text).context("cannot read the settings back")
    }
}

/// All layers as one; the later win.
pub(crate) fn merged(layers: &[Layer]) -> Result<Settings> {
    let mut all = Table::new();
    for layer in layers {
        lay_over(&mut all, layer.settings.table()?);
    }
    all.try_into().context("the settings do not fit together")
}

fn lay_over(below: &mut Table, above: Table) {
    for (key, value) in above {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(above)) => lay_over(below, above),
            (_, value) => {
                below.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> SettingsFile {
        let path = PathBuf::from("/etc/carat.toml");
        SettingsFile {
            settings: parse(text, &path).unwrap(),
            path,
        }
    }

    fn resolved(text: &str, model: Option<&str>) -> Settings {
        merged(&file(text).layers(model).unwrap()).unwrap()
    }

    #[test]
    fn paths_are_relative_to_the_file_and_names_are_not() {
        let settings = resolved("place = 'p'", None);
        assert_eq!(settings.place.as_deref(), Some("/etc/p"));
        let settings = resolved("place = 'card'", None);
        assert_eq!(settings.place.as_deref(), Some("card"));
        let settings = resolved("model = 'a.gguf'\nkernels = 'k'\ndraft = 'auto'", None);
        assert_eq!(settings.model.as_deref(), Some("/etc/a.gguf"));
        assert_eq!(settings.kernels, Some("/etc/k".into()));
        assert_eq!(settings.draft.as_deref(), Some("auto"));
        let elsewhere = resolved("model = '/m/a.gguf'\ndraft = 'hf:o/r'", None);
        assert_eq!(elsewhere.model.as_deref(), Some("/m/a.gguf"));
        assert_eq!(elsewhere.draft.as_deref(), Some("hf:o/r"));
        let home = env::home_dir().unwrap().join("m/a.gguf");
        let at_home = resolved("model = '~/m/a.gguf'", None);
        assert_eq!(at_home.model.as_deref(), home.to_str());
    }

    #[test]
    fn a_section_wins_for_its_model_alone() {
        let text = "threads = 2\ncontext = 512\n[sampling]\ntop_k = 3\ntop_p = 0.5\n\
                    [models.work]\nmodel = 'w.gguf'\ncontext = 1024\n[models.work.sampling]\ntop_k = 9";
        let work = resolved(text, Some("work"));
        assert_eq!((work.threads, work.context), (Some(2), Some(1024)));
        assert_eq!(work.model.as_deref(), Some("/etc/w.gguf"));
        let expected: Settings = toml::from_str("[sampling]\ntop_k = 9\ntop_p = 0.5").unwrap();
        assert_eq!(work.sampling, expected.sampling);
        let other = resolved(text, Some("other.gguf"));
        assert_eq!((other.context, other.model), (Some(512), None));
        let named = resolved(&format!("model = 'work'\n{text}"), None);
        assert_eq!(named.model.as_deref(), Some("/etc/w.gguf"));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_no_page() {
        let path = Path::new("carat.toml");
        let error = parse("threads = 2\nthread = 3", path)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("line 2") && error.contains("`thread`"),
            "{error}"
        );
        assert!(
            error.contains("`threads`") && !error.contains(".md"),
            "{error}"
        );
        let nested = file("[models.a.models.b]\nthreads = 2").layers(Some("a"));
        assert!(
            nested
                .unwrap_err()
                .to_string()
                .contains("put it at the top")
        );
    }
}
