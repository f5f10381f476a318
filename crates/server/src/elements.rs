//! The number of an array's elements, without the array: a fraction of the work of reading it.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// Elements of the array of this name in an object; none if there is no such array, or no such object.
pub(crate) fn count(json: &[u8], name: &'static str) -> usize {
    let mut reader = serde_json::Deserializer::from_slice(json);
    CountOf(name).deserialize(&mut reader).unwrap_or(0)
}

/// Counts the elements of one array of an object.
struct CountOf(&'static str);

impl<'de> DeserializeSeed<'de> for CountOf {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<usize, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for CountOf {
    type Value = usize;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<usize, A::Error> {
        let mut count = 0;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if key == self.0 {
                count = map.next_value::<Elements>()?.0;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(count)
    }
}

/// Number of an array's elements.
struct Elements(usize);

impl<'de> Deserialize<'de> for Elements {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Elements, D::Error> {
        struct Counted;
        impl<'de> Visitor<'de> for Counted {
            type Value = usize;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<usize, A::Error> {
                let mut count = 0;
                while array.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(count)
            }
        }
        deserializer.deserialize_seq(Counted).map(Elements)
    }
}

#[cfg(test)]
mod tests {
    use super::count;

    #[test]
    fn elements_are_counted_whatever_they_are() {
        let json =
            br#"{"a": [[1, 2], {"messages": [1]}], "messages": [1, {"x": []}, "y", null], "b": 2}"#;
        assert_eq!(count(json, "messages"), 4);
        assert_eq!(count(json, "a"), 2);
        for none in [
            &b"{}"[..],
            b"[1, 2]",
            b"",
            br#"{"messages": 3}"#,
            br#"{"messages": [1, 2"#,
        ] {
            assert_eq!(count(none, "messages"), 0);
        }
        assert_eq!(count(br#"{"mess\u0061ges": [1, 2]}"#, "messages"), 2);
    }
}
