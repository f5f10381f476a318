//! Short names of models: what people type, and the repository and file that it stands for.
//!
//! A file is named where it is known to be there; elsewhere the repository's usual one is taken. Callers say what a name stands
//! for before anything is fetched.

use anyhow::{Result, bail};

use super::model_ref::HubRef;

/// The beginning of every short name.
const FAMILY: &str = "gemma4:";

/// Names behind the family's, and `owner/repo[:choice]`.
const NAMES: [(&str, &str); 10] = [
    ("e2b", "ggml-org/gemma-4-E2B-it-GGUF"),
    ("e2b-q4_0", "google/gemma-4-E2B-it-qat-q4_0-gguf"),
    (
        "e4b",
        "ggml-org/gemma-4-E4B-it-GGUF:gemma-4-E4B-it-Q4_K_M.gguf",
    ),
    ("e4b-q4_0", "google/gemma-4-E4B-it-qat-q4_0-gguf"),
    (
        "12b",
        "ggml-org/gemma-4-12B-it-GGUF:gemma-4-12B-it-Q4_K_M.gguf",
    ),
    (
        "12b-q4_0",
        "google/gemma-4-12B-it-qat-q4_0-gguf:gemma-4-12b-it-qat-q4_0.gguf",
    ),
    (
        "26b",
        "ggml-org/gemma-4-26B-A4B-it-GGUF:gemma-4-26B-A4B-it-Q4_K_M.gguf",
    ),
    ("26b-q4_0", "google/gemma-4-26B-A4B-it-qat-q4_0-gguf"),
    (
        "31b",
        "unsloth/gemma-4-31B-it-GGUF:gemma-4-31B-it-Q4_K_M.gguf",
    ),
    ("31b-q4_0", "google/gemma-4-31B-it-qat-q4_0-gguf"),
];

/// The model that a short name stands for, in any case; `None` for what is no short name.
pub(super) fn model(text: &str) -> Result<Option<HubRef>> {
    let (Some(family), Some(name)) = (text.get(..FAMILY.len()), text.get(FAMILY.len()..)) else {
        return Ok(None);
    };
    if !family.eq_ignore_ascii_case(FAMILY) {
        return Ok(None);
    }
    match NAMES
        .iter()
        .find(|(short, _)| short.eq_ignore_ascii_case(name))
    {
        Some((_, model)) => Ok(Some(model.parse()?)),
        None => bail!(
            "`{text}` is no short name of a model; there are {}. A file of that name is ./{text}",
            all()
        ),
    }
}

fn all() -> String {
    let names = NAMES.iter().map(|(name, _)| format!("{FAMILY}{name}"));
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_stands_for_a_model_of_the_hub() {
        for (name, expected) in NAMES {
            let found = model(&format!("Gemma4:{}", name.to_uppercase()));
            assert_eq!(
                found.unwrap().unwrap().to_string(),
                format!("hf:{expected}")
            );
        }
    }

    #[test]
    fn the_page_on_the_command_line_has_every_name() {
        let page = include_str!("../../../../docs/cli.md");
        for (name, model) in NAMES {
            let (repo, file) = model.split_once(':').unwrap_or((model, ""));
            let file = match file {
                "" => String::new(),
                file => format!("`{file}` "),
            };
            let row = format!("| `{FAMILY}{name}` | `{repo}` | {file}|");
            assert!(page.contains(&row), "{row}");
        }
    }

    #[test]
    fn unknown_names_are_answered_with_those_there_are() {
        let error = model("gemma4:7b").unwrap_err().to_string();
        assert!(error.contains("`gemma4:7b`"), "{error}");
        assert!(error.contains("gemma4:12b-q4_0"), "{error}");
        for other in ["gemma4", "gemma4.gguf", "hf:o/r", "é", ""] {
            assert!(model(other).unwrap().is_none(), "{other}");
        }
    }
}
