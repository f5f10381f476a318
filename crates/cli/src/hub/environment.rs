//! The environment variables the hub client honours, captured once.
//!
//! They are the ones every Hugging Face tool reads, so a model pulled by any of them is found by all. Everything
//! below takes an [`Environment`] by value: tests build their own and never touch the process.

use std::{fs, io, path::PathBuf};

use anyhow::{Context, Result};

/// Variables of the user's environment that concern the hub. Empty ones count as unset.
#[derive(Clone, Default)]
pub(crate) struct Environment {
    /// `HF_HUB_CACHE`
    pub(crate) hub_cache: Option<PathBuf>,
    /// `HUGGINGFACE_HUB_CACHE`, the older name of the same.
    pub(crate) old_hub_cache: Option<PathBuf>,
    /// `HF_HOME`
    pub(crate) hf_home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`
    pub(crate) xdg_cache_home: Option<PathBuf>,
    /// `HOME`
    pub(crate) home: Option<PathBuf>,
    /// `HF_TOKEN`
    pub(crate) token: Option<String>,
    /// `HF_ENDPOINT`: another hub than the public one.
    pub(crate) endpoint: Option<String>,
    /// `HF_HUB_OFFLINE`: the hub may not be asked.
    pub(crate) offline: bool,
}

/// Whether the official tools take a value for "yes".
fn is_yes(value: &str) -> bool {
    let words = ["1", "on", "yes", "true"];
    words
        .iter()
        .any(|word| value.trim().eq_ignore_ascii_case(word))
}

impl Environment {
    #[expect(
        clippy::disallowed_methods,
        reason = "the hub's cache and token follow the conventions of every Hugging Face tool"
    )]
    pub(crate) fn capture() -> Environment {
        let path = |name| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        Environment {
            hub_cache: path("HF_HUB_CACHE"),
            old_hub_cache: path("HUGGINGFACE_HUB_CACHE"),
            hf_home: path("HF_HOME"),
            xdg_cache_home: path("XDG_CACHE_HOME"),
            home: path("HOME"),
            token: std::env::var("HF_TOKEN").ok(),
            endpoint: std::env::var("HF_ENDPOINT")
                .ok()
                .filter(|address| !address.is_empty()),
            offline: std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| is_yes(&value)),
        }
    }

    /// The folder that holds one `models--owner--name` folder per repository.
    pub(crate) fn cache_folder(&self) -> Result<PathBuf> {
        self.hub_cache
            .clone()
            .or_else(|| self.old_hub_cache.clone())
            .or_else(|| self.hugging_face_home().map(|home| home.join("hub")))
            .context("no place for the model cache: set HF_HUB_CACHE to a folder, or HOME")
    }

    /// `HF_TOKEN`, else what a login of the official tools left in the home folder.
    pub(crate) fn hub_token(&self) -> Result<Option<String>> {
        let usable = |text: &str| Some(text.trim().to_owned()).filter(|token| !token.is_empty());
        if let Some(token) = self.token.as_deref().and_then(usable) {
            return Ok(Some(token));
        }
        let Some(path) = self.hugging_face_home().map(|home| home.join("token")) else {
            return Ok(None);
        };
        match fs::read_to_string(&path) {
            Ok(text) => Ok(usable(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| {
                format!(
                    "cannot read the hub token in {}; set HF_TOKEN to override it",
                    path.display()
                )
            }),
        }
    }

    fn hugging_face_home(&self) -> Option<PathBuf> {
        self.hf_home
            .clone()
            .or_else(|| Some(self.xdg_cache_home.as_ref()?.join("huggingface")))
            .or_else(|| Some(self.home.as_ref()?.join(".cache/huggingface")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn everything() -> Environment {
        Environment {
            hub_cache: Some("/a".into()),
            old_hub_cache: Some("/b".into()),
            hf_home: Some("/c".into()),
            xdg_cache_home: Some("/d".into()),
            home: Some("/e".into()),
            ..Environment::default()
        }
    }

    #[test]
    fn offline_is_said_as_the_official_tools_say_it() {
        assert!(["1", "TRUE", " yes", "On"].into_iter().all(is_yes));
        assert!(!["", "0", "false", "no"].into_iter().any(is_yes));
    }

    #[test]
    fn the_cache_folder_follows_the_documented_order() {
        let mut environment = everything();
        let mut next = |expected: &str, forget: fn(&mut Environment)| {
            assert_eq!(environment.cache_folder().unwrap(), PathBuf::from(expected));
            forget(&mut environment);
        };
        next("/a", |e| e.hub_cache = None);
        next("/b", |e| e.old_hub_cache = None);
        next("/c/hub", |e| e.hf_home = None);
        next("/d/huggingface/hub", |e| e.xdg_cache_home = None);
        next("/e/.cache/huggingface/hub", |e| e.home = None);
        let error = environment.cache_folder().unwrap_err().to_string();
        assert!(error.contains("HF_HUB_CACHE"), "{error}");
    }

    #[test]
    fn the_token_variable_wins_over_the_token_file() {
        let home = tempfile::tempdir().unwrap();
        let mut environment = Environment {
            hf_home: Some(home.path().to_owned()),
            ..Environment::default()
        };
        assert_eq!(environment.hub_token().unwrap(), None);
        fs::write(home.path().join("token"), "hf_file\n").unwrap();
        assert_eq!(environment.hub_token().unwrap().unwrap(), "hf_file");
        environment.token = Some(" \n".into());
        assert_eq!(environment.hub_token().unwrap().unwrap(), "hf_file");
        environment.token = Some("hf_variable".into());
        assert_eq!(environment.hub_token().unwrap().unwrap(), "hf_variable");
    }
}
