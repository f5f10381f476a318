//! JSON schemas before they are compiled: limits, and keywords that cannot be enforced, found with their places.
//!
//! The compiler itself says what it does not like, but not where. So schemas are walked here first, and an error of the compiler's
//! is traced back to the keyword it speaks of.

use std::fmt;

use llguidance::{derivre::RegexBuilder, regex_to_lark};
use serde_json::{Map, Value, json};

use crate::{GrammarError, formats, path::Path};

/// Longest schema, as text.
pub(crate) const LONGEST_BYTES: usize = 256 << 10;
/// Deepest nesting of a schema's own JSON.
pub(crate) const DEEPEST: usize = 64;

/// Keywords that are standard but not enforced. Unknown ones are annotations, as the standard has it.
const UNSUPPORTED: [&str; 17] = [
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "$recursiveAnchor",
];

/// Formats of strings that are enforced.
const FORMATS: [&str; 11] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "unknown",
];

/// Keywords whose value is a schema.
const SCHEMA_KEYWORDS: [&str; 3] = ["items", "additionalProperties", "additionalItems"];
/// Keywords whose value is a list of schemas.
const LIST_KEYWORDS: [&str; 5] = ["anyOf", "oneOf", "allOf", "prefixItems", "items"];
/// Keywords whose value holds schemas by name.
const MAP_KEYWORDS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Keywords that the compiler names when it has trouble with them.
const COMPLAINED_OF: [&str; 16] = [
    "oneOf",
    "allOf",
    "$ref",
    "const",
    "required",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "multipleOf",
    "prefixItems",
];

/// A keyword that cannot be enforced, and the schema it stands in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unsupported {
    pub(crate) keyword: String,
    pub(crate) path: String,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` at `{}`", self.keyword, self.path)
    }
}

impl From<Unsupported> for GrammarError {
    fn from(unsupported: Unsupported) -> GrammarError {
        let Unsupported { keyword, path } = unsupported;
        GrammarError::Unsupported { keyword, path }
    }
}

/// A schema within the limits.
pub(crate) struct Checked {
    pub(crate) unsupported: Vec<Unsupported>,
}

/// Checks the limits of a schema and looks for what cannot be enforced.
pub(crate) fn check(schema: &Value) -> Result<Checked, GrammarError> {
    check_size(schema)?;
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        return Err(GrammarError::Schema {
            path: "#".to_owned(),
            reason: "a schema is an object, or true or false".to_owned(),
        });
    }
    let mut unsupported = Vec::new();
    walk(schema, &Path::Root, &mut |map, path| {
        for (keyword, value) in map {
            let keyword = match (keyword.as_str(), value) {
                // Asks for nothing.
                ("uniqueItems", Value::Bool(false)) => continue,
                ("format", Value::String(format)) if !FORMATS.contains(&format.as_str()) => {
                    format!("format: {format}")
                }
                ("$ref", Value::String(target)) if !target.starts_with('#') => {
                    format!("$ref: {target}")
                }
                ("pattern", Value::String(pattern)) if !is_regex(pattern) => {
                    format!("pattern: {pattern}")
                }
                (keyword, _) if UNSUPPORTED.contains(&keyword) => keyword.to_owned(),
                _ => continue,
            };
            let path = path.to_string();
            unsupported.push(Unsupported { keyword, path });
        }
    });
    let remote = unsupported.iter().find(|u| u.keyword.starts_with("$ref"));
    if let Some(Unsupported { keyword, path }) = remote {
        return Err(GrammarError::Schema {
            path: path.clone(),
            reason: format!("`{keyword}` points out of the schema, and nothing is fetched"),
        });
    }
    Ok(Checked { unsupported })
}

/// Checks a schema's size and depth.
pub(crate) fn check_size(schema: &Value) -> Result<(), GrammarError> {
    // Depth first: writing out what is nested without end would end the program.
    let mut open = vec![(schema, 1)];
    while let Some((value, depth)) = open.pop() {
        if depth > DEEPEST {
            return Err(GrammarError::TooDeep {
                what: "schema",
                most: DEEPEST,
            });
        }
        match value {
            Value::Array(list) => open.extend(list.iter().map(|v| (v, depth + 1))),
            Value::Object(map) => open.extend(map.values().map(|v| (v, depth + 1))),
            _ => {}
        }
    }
    let bytes = schema.to_string().len();
    if bytes > LONGEST_BYTES {
        return Err(GrammarError::TooLong {
            what: "schema",
            bytes,
            most: LONGEST_BYTES,
        });
    }
    Ok(())
}

/// Visits a schema and all schemas within it.
fn walk(schema: &Value, path: &Path<'_>, visit: &mut impl FnMut(&Map<String, Value>, &Path<'_>)) {
    let Value::Object(map) = schema else { return };
    visit(map, path);
    for (keyword, value) in map {
        let keyword = keyword.as_str();
        let path = path.key(keyword);
        match value {
            Value::Object(_) if SCHEMA_KEYWORDS.contains(&keyword) => walk(value, &path, visit),
            Value::Array(list) if LIST_KEYWORDS.contains(&keyword) => {
                for (index, schema) in list.iter().enumerate() {
                    walk(schema, &path.index(index), visit);
                }
            }
            Value::Object(schemas) if MAP_KEYWORDS.contains(&keyword) => {
                for (name, schema) in schemas {
                    walk(schema, &path.key(name), visit);
                }
            }
            _ => {}
        }
    }
}

/// Strictness towards a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Exact,
    /// Passes over what cannot be enforced.
    Lenient,
}

/// Keywords beside which an object's own list of properties is not the whole list.
const MORE_PROPERTIES: [&str; 7] = [
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
];

/// Objects that list their properties have no others, unless the schema speaks of others: a model that may always add one more
/// often does, and what it adds is never asked for. Whatever fits the closed schema fits the open one. Schemas that are joined by
/// `allOf` stay as they are: closed, they would exclude each other.
fn close(schema: &mut Value) {
    let mut joins = false;
    walk(schema, &Path::Root, &mut |map, _| {
        joins |= map.contains_key("allOf");
    });
    if joins {
        return;
    }
    walk_mut(schema, &mut |map| {
        let lists = matches!(map.get("properties"), Some(Value::Object(p)) if !p.is_empty());
        if lists && !MORE_PROPERTIES.iter().any(|k| map.contains_key(*k)) {
            map.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
    });
}

/// 29 February in leap years alone.
const DATE: &str = "^(?:[0-9]{4}-(?:0[13-9]|1[0-2])-[0-9]{2}|[0-9]{4}-02-(?:[01][0-9]|2[0-8])\
    |(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)";
/// Up to the seconds, of which there are sixty.
const TIME: &str = "[^:]+:[^:]+:[0-5]";

/// Dates and times that exist: the compiler allows 29 February in every year and a sixtieth second in every minute, and validators
/// do not.
fn keep_to_the_calendar(schema: &mut Value) {
    walk_mut(schema, &mut |map| {
        let pattern = match map.get("format").and_then(Value::as_str) {
            Some("date") => DATE.to_owned(),
            Some("time") => format!("^{TIME}"),
            Some("date-time") => format!("{DATE}{TIME}"),
            _ => return,
        };
        map.entry("pattern").or_insert(pattern.into());
    });
}

/// Visits a schema and all schemas within it, which may be changed.
fn walk_mut(schema: &mut Value, visit: &mut impl FnMut(&mut Map<String, Value>)) {
    let Value::Object(map) = schema else { return };
    visit(map);
    for (keyword, value) in map {
        let keyword = keyword.as_str();
        match value {
            Value::Object(_) if SCHEMA_KEYWORDS.contains(&keyword) => walk_mut(value, visit),
            Value::Array(list) if LIST_KEYWORDS.contains(&keyword) => {
                for schema in list {
                    walk_mut(schema, visit);
                }
            }
            Value::Object(schemas) if MAP_KEYWORDS.contains(&keyword) => {
                for schema in schemas.values_mut() {
                    walk_mut(schema, visit);
                }
            }
            _ => {}
        }
    }
}

/// The schema with settings for the compiler: one space after `,` and `:` and none elsewhere, so that most separators are forced,
/// unless the schema has settings of its own.
pub(crate) fn with_separators(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other.clone(),
    };
    close(&mut schema);
    keep_to_the_calendar(&mut schema);
    if let Value::Object(map) = &mut schema {
        map.entry("x-guidance").or_insert_with(
            || json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}),
        );
    }
    schema
}

/// The schema with settings for the compiler that let it pass over what it cannot enforce.
pub(crate) fn lenient(schema: &Value, unsupported: &[Unsupported]) -> Value {
    let mut schema = with_separators(schema);
    // Patterns are the one thing that it insists on.
    for Unsupported { keyword, path } in unsupported {
        if keyword.starts_with("pattern: ")
            && let Some(Value::Object(map)) = schema.pointer_mut(path.trim_start_matches('#'))
        {
            map.remove("pattern");
        }
    }
    if let Some(Value::Object(settings)) = schema.get_mut("x-guidance") {
        settings.insert("lenient".to_owned(), Value::Bool(true));
    }
    schema
}

/// The compiler's complaint about a schema, with the place it is about.
pub(crate) fn locate(schema: &Value, reason: &str) -> GrammarError {
    let mut named = None;
    walk(schema, &Path::Root, &mut |map, path| {
        let keyword = map
            .keys()
            .find(|k| COMPLAINED_OF.contains(&k.as_str()) && reason.contains(k.as_str()));
        if let (Some(keyword), None) = (keyword, &named) {
            named = Some((keyword.clone(), path.to_string()));
        }
    });
    match named {
        Some((keyword, path)) if keyword == "oneOf" => GrammarError::Unsupported { keyword, path },
        named => GrammarError::Schema {
            path: named.map_or_else(|| "#".to_owned(), |(_, path)| path),
            reason: reason.to_owned(),
        },
    }
}

/// True for a pattern that can be enforced: no look-around, no references back, no repetition without measure.
pub(crate) fn is_regex(pattern: &str) -> bool {
    if formats::repeats_too_often(pattern) {
        return false;
    }
    let pattern = regex_to_lark(pattern, "dw");
    RegexBuilder::new().mk_regex_for_serach(&pattern).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unsupported(schema: &Value) -> Vec<String> {
        let checked = check(schema).unwrap();
        checked
            .unsupported
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn keywords_are_found_where_they_stand_and_nowhere_else() {
        let schema = json!({
            "properties": {
                "not": {"type": "string", "format": "color"},
                "a/b": {"items": {"not": {}}, "uniqueItems": false},
                "c": {"const": {"not": 1}, "default": {"if": 2}, "x-note": {"not": 3}},
            },
            "$defs": {"d": {"anyOf": [{}, {"if": {}, "then": {}}]}},
        });
        assert_eq!(
            unsupported(&schema),
            [
                "`format: color` at `#/properties/not`",
                "`not` at `#/properties/a~1b/items`",
                "`if` at `#/$defs/d/anyOf/1`",
                "`then` at `#/$defs/d/anyOf/1`",
            ]
        );
    }

    #[test]
    fn limits_hold() {
        let mut deep = json!({"type": "string"});
        for _ in 0..40 {
            deep = json!({"properties": {"a": deep}});
        }
        assert!(matches!(check(&deep), Err(GrammarError::TooDeep { .. })));
        let long = json!({"description": "x".repeat(LONGEST_BYTES)});
        assert!(matches!(check(&long), Err(GrammarError::TooLong { .. })));
        assert!(matches!(
            check(&json!([])),
            Err(GrammarError::Schema { .. })
        ));
        let remote = json!({"items": {"$ref": "https://example.org/schema"}});
        let Err(GrammarError::Schema { path, reason }) = check(&remote) else {
            panic!("a remote reference is refused")
        };
        assert_eq!(path, "#/items");
        assert!(reason.contains("https://example.org/schema"));
    }

    #[test]
    fn objects_are_closed_unless_the_schema_speaks_of_more() {
        let closed = |mut schema: Value| {
            close(&mut schema);
            schema
        };
        let inner = json!({"type": "object", "properties": {"x": {}}});
        let schema = closed(json!({
            "properties": {"a": inner, "b": {"items": inner}, "c": {"type": "object"}},
            "$defs": {"d": {"anyOf": [inner, {"properties": {"y": {}}, "additionalProperties": true}]}},
        }));
        assert_eq!(schema["additionalProperties"], false);
        for path in ["/properties/a", "/properties/b/items", "/$defs/d/anyOf/0"] {
            assert_eq!(
                schema.pointer(path).unwrap()["additionalProperties"],
                false,
                "{path}"
            );
        }
        assert!(
            schema["properties"]["c"]
                .get("additionalProperties")
                .is_none()
        );
        assert_eq!(
            schema["$defs"]["d"]["anyOf"][1]["additionalProperties"],
            true
        );
        for open in [
            json!({"properties": {"x": {}}, "patternProperties": {"^y": {}}}),
            json!({"allOf": [inner, {"properties": {"z": {}}}]}),
            json!({"properties": {"x": {}}, "anyOf": [{"required": ["x"]}]}),
        ] {
            assert_eq!(closed(open.clone()), open);
        }
    }

    #[test]
    fn settings_of_the_schema_win() {
        let own = json!({"x-guidance": {"whitespace_flexible": true}});
        assert_eq!(with_separators(&own), own);
        let lenient = lenient(&own, &[]);
        assert_eq!(lenient["x-guidance"]["lenient"], true);
        assert_eq!(lenient["x-guidance"]["whitespace_flexible"], true);
        let plain = with_separators(&json!(true));
        assert_eq!(plain["x-guidance"]["item_separator"], ", ");
    }
}
