//! Integers beyond 64 bits, digit for digit.
//!
//! JSON has no largest integer and neither has Python, which templates are written for; a [`Value`] makes a float of what 64 bits
//! cannot hold. So arguments with such an integer are kept as their text ([`ToolCall::arguments`](super::ToolCall::arguments)), and
//! schemas and results, which may be text themselves, as a value beside its text ([`Json`]). Where a value is needed, a *mark* takes
//! the integer through: a string of a character that nothing else in the conversation has, and the digits.

use std::{borrow::Cow, collections::HashSet, iter, ops::Range};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, DeserializeOwned},
    ser,
};
use serde_json::{Value, value::RawValue};

/// Digits of the longest integer that is kept. Python reads no longer ones, either.
const LONGEST: usize = 4300;

/// Whether this is an integer as JSON writes it that 64 bits cannot hold.
pub(crate) fn is_large(number: &str) -> bool {
    let digits = number.strip_prefix('-').unwrap_or(number);
    // The least that could be too large has 19 digits. A leading zero is not JSON.
    (19..=LONGEST).contains(&digits.len())
        && digits.bytes().all(|byte| byte.is_ascii_digit())
        && !digits.starts_with('0')
        && number.parse::<u64>().is_err()
        && number.parse::<i64>().is_err()
}

/// Places of such integers in some JSON.
fn large_integers(json: &str) -> impl Iterator<Item = Range<usize>> {
    let bytes = json.as_bytes();
    let mut at = 0;
    iter::from_fn(move || {
        while let Some(byte) = bytes.get(at) {
            let start = at;
            at += 1;
            match byte {
                b'"' => at = after_string(bytes, at),
                b'-' | b'0'..=b'9' => {
                    let is_of_number =
                        |byte: &&u8| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-');
                    at += bytes[at..].iter().take_while(is_of_number).count();
                    if is_large(&json[start..at]) {
                        return Some(start..at);
                    }
                }
                _ => {}
            }
        }
        None
    })
}

/// Place behind the string that begins before `at`.
fn after_string(bytes: &[u8], mut at: usize) -> usize {
    while let Some(byte) = bytes.get(at) {
        at += match byte {
            b'"' => return at + 1,
            b'\\' => 2,
            _ => 1,
        };
    }
    bytes.len()
}

pub(crate) fn holds_large(json: &str) -> bool {
    large_integers(json).next().is_some()
}

/// The same JSON with a string in place of each large integer: the mark, then the digits.
pub(crate) fn marked<'a>(json: &'a str, mark: &str) -> Cow<'a, str> {
    let mut written = String::new();
    let mut copied = 0;
    for place in large_integers(json) {
        written.push_str(&json[copied..place.start]);
        written.extend(["\"", mark, &json[place.clone()], "\""]);
        copied = place.end;
    }
    if copied == 0 {
        return Cow::Borrowed(json);
    }
    written.push_str(&json[copied..]);
    Cow::Owned(written)
}

/// Reads the arguments of a call: the value, or its text if that holds an integer beyond 64 bits. For fields of wire types
/// (`deserialize_with`).
pub fn deserialize_arguments<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Value, D::Error> {
    let raw = Box::<RawValue>::deserialize(deserializer)?;
    from_text(raw.get()).map_err(de::Error::custom)
}

/// A JSON value that keeps every digit of its integers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Json {
    /// Integers beyond 64 bits are floats in it, or strings where one is beyond floats.
    value: Value,
    /// Its text, where the value has lost digits.
    text: Option<Box<str>>,
}

impl Json {
    /// The value. Integers beyond 64 bits are floats in it, or strings where one is beyond floats.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// Whether digits are missing in the value.
    pub fn holds_large_integers(&self) -> bool {
        self.text.is_some()
    }

    /// Reads something of it.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        match &self.text {
            Some(text) => serde_json::from_str(text),
            None => T::deserialize(&self.value),
        }
    }

    /// The text, where digits are missing in the value.
    pub(crate) fn text(&self) -> Option<&str> {
        self.text.as_deref()
    }

    /// The value with strings for integers beyond 64 bits: the mark, then the digits. Without a mark, the value itself.
    pub fn marked(&self, mark: Option<char>) -> Value {
        let marked = mark.zip(self.text.as_ref()).and_then(|(mark, text)| {
            serde_json::from_str(&marked(text, mark.encode_utf8(&mut [0; 4]))).ok()
        });
        marked.unwrap_or_else(|| self.value.clone())
    }

    /// A mark that no string of the value holds, if there is something to mark.
    pub fn mark(&self) -> Option<char> {
        self.text.as_ref()?;
        let [mark] = unused_characters([&self.value])?;
        Some(mark)
    }
}

impl From<Value> for Json {
    fn from(value: Value) -> Json {
        Json { value, text: None }
    }
}

impl TryFrom<&RawValue> for Json {
    type Error = serde_json::Error;

    fn try_from(raw: &RawValue) -> Result<Json, serde_json::Error> {
        let json = raw.get();
        if !holds_large(json) {
            return serde_json::from_str::<Value>(json).map(Json::from);
        }
        // A number that is beyond floats is an error, and it may be the only one.
        let value: Value =
            serde_json::from_str(json).or_else(|_| serde_json::from_str(&marked(json, "")))?;
        Ok(Json {
            value,
            text: Some(json.into()),
        })
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        Json::try_from(&*raw).map_err(de::Error::custom)
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(text) = &self.text else {
            return self.value.serialize(serializer);
        };
        let raw = RawValue::from_string(text.clone().into()).map_err(ser::Error::custom)?;
        raw.serialize(serializer)
    }
}

/// Private-use characters that occur in no string and no key of the values; `None` where there are not so many.
pub(crate) fn unused_characters<'a, const COUNT: usize>(
    values: impl IntoIterator<Item = &'a Value>,
) -> Option<[char; COUNT]> {
    let mut taken = HashSet::new();
    for value in values {
        visit_strings(value, &mut |text| {
            taken.extend(text.chars().filter(|c| is_private_use(*c)));
        });
    }
    let free = ('\u{E000}'..='\u{F8FF}')
        .chain('\u{F0000}'..='\u{FFFFD}')
        .chain('\u{100000}'..='\u{10FFFD}')
        .filter(|c| !taken.contains(c));
    let unused: Vec<char> = free.take(COUNT).collect();
    unused.try_into().ok()
}

fn is_private_use(character: char) -> bool {
    matches!(character, '\u{E000}'..='\u{F8FF}' | '\u{F0000}'..)
}

/// Looks at every string and every key of a value.
pub(crate) fn visit_strings(value: &Value, look: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => look(text),
        Value::Array(values) => values.iter().for_each(|value| visit_strings(value, look)),
        Value::Object(map) => {
            for (key, value) in map {
                look(key);
                visit_strings(value, look);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Arguments from JSON: the value, or its text if that holds an integer beyond 64 bits.
pub(crate) fn from_text(json: &str) -> Result<Value, serde_json::Error> {
    if holds_large(json) {
        // Numbers aside it has to be sound.
        serde_json::from_str::<Value>(&marked(json, ""))?;
        return Ok(Value::String(json.to_owned()));
    }
    serde_json::from_str(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_large_beyond_64_bits_and_as_json_writes_them() {
        for large in [
            "18446744073709551616",
            "-9223372036854775809",
            "12345678901234567890123",
            &"9".repeat(LONGEST),
        ] {
            assert!(is_large(large), "{large}");
        }
        for other in [
            "18446744073709551615",
            "-9223372036854775808",
            "0018446744073709551616",
            "18446744073709551616.0",
            "1e400",
            "-",
            "",
            &"9".repeat(LONGEST + 1),
        ] {
            assert!(!is_large(other), "{other}");
        }
    }

    #[test]
    fn integers_in_strings_are_none() {
        let json = r#"{"12345678901234567890123": ["\"12345678901234567890123", -12345678901234567890123], "b\\":99999999999999999999}"#;
        assert_eq!(
            marked(json, "#"),
            r##"{"12345678901234567890123": ["\"12345678901234567890123", "#-12345678901234567890123"], "b\\":"#99999999999999999999"}"##
        );
        assert_eq!(large_integers(r#""12345678901234567890123"#).count(), 0);
    }

    #[test]
    fn text_stays_where_a_value_would_lose_digits() {
        let read = |json: &str| from_text(json).unwrap();
        assert_eq!(
            read(r#"{"n": 18446744073709551615}"#),
            serde_json::json!({"n": u64::MAX})
        );
        let large = r#"{"n": 18446744073709551616}"#;
        assert_eq!(read(large), Value::String(large.to_owned()));
        assert!(from_text(r#"{"n": 18446744073709551616"#).is_err());
    }

    #[test]
    fn a_value_beside_its_text_loses_nothing() {
        let read = |json: &str| serde_json::from_str::<Json>(json).unwrap();
        // The character that marks would be taken from first stands in the text, written as an escape.
        let large = r#"{"n": 18446744073709551616, "s": "\ue000", "t": "18446744073709551616"}"#;
        let json = read(large);
        assert_eq!(json.value()["n"], 18_446_744_073_709_551_616_f64);
        assert_eq!(json.mark(), Some('\u{e001}'));
        let marked = json.marked(json.mark());
        assert_eq!(marked["n"], "\u{e001}18446744073709551616");
        assert_eq!(marked["t"], "18446744073709551616");
        assert_eq!(serde_json::to_string(&json).unwrap(), large);
        assert_eq!(read(&serde_json::to_string(&json).unwrap()), json);
        let small = read(r#"{"n": 1}"#);
        assert_eq!((small.mark(), small.holds_large_integers()), (None, false));
        // Beyond floats.
        let digits = "9".repeat(400);
        assert_eq!(*read(&digits).value(), Value::from(digits));
        assert!(serde_json::from_str::<Json>("[18446744073709551616,]").is_err());
    }
}
