//! Faults of a JSON or TOML text, in words that do not name this program's types.

use anyhow::{Result, anyhow};
use serde::de::DeserializeOwned;

/// Reads JSON.
pub(crate) fn from_json<T: DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| anyhow!(plain(&error.to_string())))
}

/// A message of a reader, with what it expected in words.
pub(crate) fn plain(message: &str) -> String {
    const WORDS: [(&str, &str); 16] = [
        ("usize", "a whole number"),
        ("u64", "a whole number"),
        ("u32", "a whole number"),
        ("u16", "a whole number"),
        ("u8", "a whole number"),
        ("i64", "a whole number"),
        ("i32", "a whole number"),
        ("f64", "a number"),
        ("f32", "a number"),
        ("a boolean", "true or false"),
        ("a borrowed string", "a text"),
        ("a string", "a text"),
        ("a sequence", "a list"),
        ("a map", "an object"),
        ("string or table", "a text"),
        ("a tuple of size 2", "a list of two"),
    ];
    let Some((found, expected)) = message.rsplit_once("expected ") else {
        return message.to_owned();
    };
    for (name, words) in WORDS {
        if let Some(rest) = expected.strip_prefix(name)
            && !rest.starts_with(|c: char| c.is_alphanumeric())
        {
            return format!("{found}expected {words}{rest}");
        }
    }
    for kind in ["struct ", "enum ", "tuple struct ", "unit variant "] {
        if let Some(rest) = expected.strip_prefix(kind) {
            let name_bytes = rest
                .find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':')
                .unwrap_or(rest.len());
            return format!("{found}expected an object{}", &rest[name_bytes..]);
        }
    }
    message.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_become_words_and_the_rest_stays() {
        assert_eq!(
            plain("invalid type: string \"x\", expected usize at line 1"),
            "invalid type: string \"x\", expected a whole number at line 1"
        );
        assert_eq!(
            plain("invalid type: integer `3`, expected struct SamplingSettings"),
            "invalid type: integer `3`, expected an object"
        );
        assert_eq!(
            plain("unknown variant `q4`, expected `f16` or `q8_0`"),
            "unknown variant `q4`, expected `f16` or `q8_0`"
        );
    }
}
