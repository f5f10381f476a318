//! The value of `--kv-type`: one type of keys and values for all layers, or one for each kind of them.

use std::{fmt, str::FromStr};

use carat_model::kv::{KvType, PerGroup};

/// How keys and values are kept. Written as it is typed: `q8_0`, or `full=q8_0,sliding=f16`; a kind of layer that is left out
/// has f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct KvTypes(pub(crate) PerGroup<KvType>);

impl FromStr for KvTypes {
    type Err = String;

    fn from_str(text: &str) -> Result<KvTypes, String> {
        if !text.contains('=') {
            return Ok(KvTypes(kv_type(text)?.into()));
        }
        let mut given = PerGroup::<Option<KvType>>::default();
        for part in text.split(',') {
            let place = match part.split_once('=') {
                Some(("full", name)) => (&mut given.full, name),
                Some(("sliding", name)) => (&mut given.sliding, name),
                _ => {
                    return Err(format!(
                        "`{part}` is neither full=TYPE nor sliding=TYPE, the two kinds of layers"
                    ));
                }
            };
            let (of, name) = place;
            if of.replace(kv_type(name)?).is_some() {
                return Err(format!("`{text}` has two types for one kind of layer"));
            }
        }
        Ok(KvTypes(given.map(Option::unwrap_or_default)))
    }
}

fn kv_type(name: &str) -> Result<KvType, String> {
    match name {
        "f16" => Ok(KvType::F16),
        "q8_0" => Ok(KvType::Q8_0),
        _ => Err(format!(
            "`{name}` is no type of keys and values; f16 and q8_0 are, or one for each kind of layer, as in full=q8_0,sliding=f16"
        )),
    }
}

impl fmt::Display for KvTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_string().to_lowercase())
    }
}

impl TryFrom<String> for KvTypes {
    type Error = String;

    fn try_from(text: String) -> Result<KvTypes, String> {
        text.parse()
    }
}

impl From<KvTypes> for String {
    fn from(types: KvTypes) -> String {
        types.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_as_they_are_written() {
        let read = |text: &str| text.parse::<KvTypes>().map(|types| types.to_string());
        for text in [
            "f16",
            "q8_0",
            "full=q8_0,sliding=f16",
            "full=f16,sliding=q8_0",
        ] {
            assert_eq!(read(text).as_deref(), Ok(text));
        }
        assert_eq!(read("full=q8_0").as_deref(), Ok("full=q8_0,sliding=f16"));
        assert_eq!(read("sliding=q8_0,full=q8_0").as_deref(), Ok("q8_0"));
    }

    #[test]
    fn what_is_no_type_is_named() {
        for (text, named) in [
            ("q4_0", "q4_0"),
            ("full=q4_0", "q4_0"),
            ("global=q8_0", "global=q8_0"),
            ("full=q8_0,f16", "f16"),
            ("full=q8_0,full=f16", "two types"),
            ("", "f16"),
        ] {
            let problem = text.parse::<KvTypes>().expect_err(text);
            assert!(problem.contains(named), "{problem}");
        }
    }
}
