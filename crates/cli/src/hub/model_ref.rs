//! The values of `-m`: a path, a short name such as `gemma4:e4b`, or `hf:owner/repo` with an optional file or quant name behind a
//! colon.

use std::{fmt, path::PathBuf, str::FromStr};

use anyhow::{Context, Error, Result, bail, ensure};

use super::{
    names::{RepoFile, RepoId, has_gguf_suffix},
    short_names,
};

/// A model as the user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelRef {
    Path(PathBuf),
    Hub(HubRef),
}

/// A model on the hub. Parsed from `owner/repo[:choice]`, without the `hf:` of [`ModelRef`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubRef {
    pub(crate) repo: RepoId,
    pub(crate) choice: Choice,
}

/// Choice among a repository's models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The usual one: Q4_K_M, then Q4_0, then Q8_0, then the only one there is.
    Usual,
    /// By quant name, in any case.
    Quant(String),
    /// By file name; of a split file, any part.
    File(RepoFile),
}

impl FromStr for ModelRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<ModelRef> {
        ensure!(
            !text.is_empty(),
            "the model is empty: give a path, or hf:owner/repo"
        );
        if let Some(reference) = text.strip_prefix("hf:") {
            return Ok(ModelRef::Hub(reference.parse()?));
        }
        Ok(match short_names::model(text)? {
            Some(model) => ModelRef::Hub(model),
            None => ModelRef::Path(text.into()),
        })
    }
}

impl FromStr for HubRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<HubRef> {
        let (repo, choice) = match text.split_once(':') {
            None => (text, Choice::Usual),
            Some((repo, name)) if has_gguf_suffix(name) => (repo, Choice::File(name.parse()?)),
            Some((repo, name)) => (repo, Choice::Quant(quant_name(name)?)),
        };
        let repo = repo.parse().with_context(|| {
            format!("hf:{text} does not name a model; write hf:owner/repo, hf:owner/repo:FILE.gguf or hf:owner/repo:Q4_K_M")
        })?;
        Ok(HubRef { repo, choice })
    }
}

fn quant_name(name: &str) -> Result<String> {
    let valid = !name.is_empty()
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
    if !valid {
        bail!("`{name}` is neither a file that ends in .gguf nor a quant name like Q4_K_M");
    }
    Ok(name.to_owned())
}

impl fmt::Display for HubRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf:{}", self.repo)?;
        match &self.choice {
            Choice::Usual => Ok(()),
            Choice::Quant(name) => write!(f, ":{name}"),
            Choice::File(file) => write!(f, ":{file}"),
        }
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelRef::Path(path) => path.display().fmt(f),
            ModelRef::Hub(reference) => reference.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_parse_and_print_alike() {
        for text in [
            "hf:o/r",
            "hf:o/r:Q4_K_M",
            "hf:o/r:ud-q4_k_xl",
            "hf:o/r:a.gguf",
            "hf:o/r:BF16/a-00001-of-00002.gguf",
            "models/a.gguf",
            "C:\\a.gguf",
        ] {
            assert_eq!(text.parse::<ModelRef>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_choice_is_a_file_only_when_it_ends_in_gguf() {
        let choice = |text: &str| text.parse::<HubRef>().unwrap().choice;
        assert_eq!(choice("o/r"), Choice::Usual);
        assert_eq!(choice("o/r:q8_0"), Choice::Quant("q8_0".into()));
        assert_eq!(
            choice("o/r:x.GGUF"),
            Choice::File("x.GGUF".parse().unwrap())
        );
    }

    #[test]
    fn bad_references_say_how_to_write_good_ones() {
        for bad in [
            "hf:",
            "hf:gemma",
            "hf:o/r:",
            "hf:o/r:Q4 K",
            "hf:o/r:../x.gguf",
            "hf:../r",
            "",
        ] {
            assert!(bad.parse::<ModelRef>().is_err(), "{bad}");
        }
        let error = "hf:gemma".parse::<ModelRef>().unwrap_err().to_string();
        assert!(error.contains("hf:owner/repo:Q4_K_M"), "{error}");
    }
}
