//! Integers beyond 64 bits, digit for digit.
//!
//! JSON has no largest integer and neither has Python, which templates are written for; a [`Value`] makes a float of what 64 bits
//! cannot hold. So arguments with such an integer are kept as their text ([`ToolCall::arguments`](super::ToolCall::arguments)). Where a
//! value is needed, a *mark* takes the integer through: a string of a character that nothing else in the conversation has, and the
//! digits.

use std::{borrow::Cow, iter, ops::Range};

use serde::{Deserialize, Deserializer};
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
    from_text(raw.get()).map_err(serde::de::Error::custom)
}

/// The same from JSON.
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
}
