//! Objects in arguments: keys in any order, each at most once, those that are required always.
//!
//! The keys that have come are one number in the state of the parser, a bit per key. Past 64 keys they come in the order that templates
//! write them.

use serde_json::{Map, Value};

use super::{
    count,
    value::{FREE_KEY, Writer},
};
use crate::{
    GrammarError,
    formats::{literal, repeated},
    path::Path,
};

/// Bits of the state.
const MAX_UNORDERED: usize = 64;
/// Most keys of an object; beyond them any keys are allowed.
const MAX_KEYS: usize = 500;

/// Key and value of an object.
struct Property<'a> {
    name: &'a str,
    /// Key, colon and value, as an expression.
    pair: String,
    required: bool,
}

/// Keys that a schema does not name.
struct Extra {
    /// Key, colon and value, as an expression.
    pair: String,
}

/// Bounds of the count of keys.
#[derive(Clone, Copy)]
struct Counts {
    least: usize,
    most: Option<usize>,
}

impl Writer<'_> {
    pub(super) fn object(
        &mut self,
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<String, GrammarError> {
        let counts = Counts {
            least: count(map, "minProperties").unwrap_or(0),
            most: count(map, "maxProperties"),
        };
        let mut properties = self.properties(map, path, depth)?;
        if properties.len() > MAX_KEYS {
            self.ignore("properties", path);
            properties.clear();
        }
        let extra = self.extra(map, &properties, path, depth)?;
        if (properties.len() > MAX_UNORDERED || extra.is_some() && !properties.is_empty())
            && (counts.least > 0 || counts.most.is_some())
        {
            self.ignore("minProperties or maxProperties", path);
        }
        let body = match extra {
            None if properties.is_empty() => literal(""),
            Some(extra) if properties.is_empty() => free(&extra, counts),
            extra if properties.len() <= MAX_UNORDERED => {
                self.unordered(&properties, extra.as_ref(), counts)
            }
            _ => self.ordered(properties),
        };
        Ok(self.rule(&format!("\"{{\" {body} \"}}\"")))
    }

    /// A key with its colon.
    pub(super) fn key(&self, name: &str) -> String {
        if is_bare(name) {
            return literal(&format!("{name}:"));
        }
        let quote = self.quote;
        format!("<[{quote}]> {} <[{quote}]> \":\"", literal(name))
    }

    /// The keys that a schema names, those required first.
    fn properties<'m>(
        &mut self,
        map: &'m Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<Vec<Property<'m>>, GrammarError> {
        let named = map.get("properties").and_then(Value::as_object);
        let required = map.get("required").and_then(Value::as_array);
        let required: Vec<_> = required
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let list = path.key("properties");
        let mut properties = Vec::new();
        for (name, schema) in named.into_iter().flatten() {
            let is_required = required.contains(&name.as_str());
            if *schema == Value::Bool(false) && !is_required {
                continue;
            }
            let value = self.value(schema, &list.key(name), depth + 1)?;
            properties.push(Property {
                name,
                pair: format!("{} {value}", self.key(name)),
                required: is_required,
            });
        }
        for name in required {
            if properties.iter().any(|property| property.name == name) {
                continue;
            }
            let value = match map.get("additionalProperties") {
                Some(schema @ Value::Object(_)) => {
                    self.value(schema, &path.key("additionalProperties"), depth + 1)?
                }
                _ => Writer::open(),
            };
            properties.push(Property {
                name,
                pair: format!("{} {value}", self.key(name)),
                required: true,
            });
        }
        properties.sort_by_key(|property| !property.required);
        Ok(properties)
    }

    /// Keys beside those named: only if the schema says so, or names none at all.
    fn extra(
        &mut self,
        map: &Map<String, Value>,
        properties: &[Property<'_>],
        path: &Path<'_>,
        depth: usize,
    ) -> Result<Option<Extra>, GrammarError> {
        let is_open = !map.contains_key("properties") && properties.is_empty();
        let value = match map.get("additionalProperties") {
            Some(schema @ Value::Object(_)) => {
                self.value(schema, &path.key("additionalProperties"), depth + 1)?
            }
            Some(Value::Bool(true)) => Writer::open(),
            None if is_open => Writer::open(),
            _ => return Ok(None),
        };
        let key = if properties.is_empty() {
            "key".to_owned()
        } else {
            let names = properties.iter().map(|property| property.name);
            let names: Vec<_> = names.filter(|name| is_identifier(name)).collect();
            let key = self.name('K');
            let but = if names.is_empty() {
                String::new()
            } else {
                format!(" & ~/({})/", names.join("|"))
            };
            self.lines.push(format!("{key}: {FREE_KEY}{but}"));
            key
        };
        Ok(Some(Extra {
            pair: format!("{key} \":\" {value}"),
        }))
    }

    /// Keys in any order. Required ones have the low bits.
    fn unordered(
        &mut self,
        properties: &[Property<'_>],
        extra: Option<&Extra>,
        counts: Counts,
    ) -> String {
        let required = properties.iter().filter(|p| p.required).count();
        let all = properties.len();
        let more = self.name('m');
        let counts = Counts {
            least: if extra.is_some() { 0 } else { counts.least },
            most: counts.most.filter(|_| extra.is_none()),
        };
        let mut ends = Vec::new();
        if required > 0 {
            ends.push(format!("is_ones([0:{required}])"));
        }
        if counts.least > 0 {
            ends.push(format!("bit_count_ge([0:{all}], {})", counts.least));
        }
        let mut nexts = vec![format!("\"\"{}", condition(&ends))];
        let mut firsts = Vec::new();
        if ends.is_empty() {
            firsts.push(literal(""));
        }
        for (bit, property) in properties.iter().enumerate() {
            let pair = &property.pair;
            let mut takes = vec![format!("bit_clear({bit})")];
            if let Some(most) = counts.most {
                takes.push(format!("bit_count_lt([0:{all}], {most})"));
            }
            let takes = condition(&takes);
            nexts.push(format!("\",\" {pair} {more}::set_bit({bit}){takes}"));
            if counts.most != Some(0) {
                firsts.push(format!("{pair} {more}::0x{:x}", 1_u64 << bit));
            }
        }
        if let Some(Extra { pair }) = extra {
            nexts.push(format!("\",\" {pair} {more}::_"));
            firsts.push(format!("{pair} {more}::0x0"));
        }
        self.lines
            .push(format!("{more}::_: {}", nexts.join("\n  | ")));
        self.rule(&firsts.join(" | "))
    }

    /// Keys in the order of templates, which ignores case.
    fn ordered(&mut self, mut properties: Vec<Property<'_>>) -> String {
        properties.sort_by_cached_key(|property| property.name.to_lowercase());
        let (mut first, mut rest) = (literal(""), literal(""));
        for property in properties.iter().rev() {
            let pair = &property.pair;
            let skip = |to: &str| {
                if property.required {
                    String::new()
                } else {
                    format!(" | {to}")
                }
            };
            first = {
                let body = format!("{pair} {rest}{}", skip(&first));
                self.rule(&body)
            };
            rest = {
                let body = format!("\",\" {pair} {rest}{}", skip(&rest));
                self.rule(&body)
            };
        }
        first
    }
}

/// Any keys, as many as may be.
fn free(extra: &Extra, counts: Counts) -> String {
    let pair = &extra.pair;
    if counts.most == Some(0) {
        return literal("");
    }
    let commas = counts.least.saturating_sub(1);
    let most = counts.most.map(|most| most.max(commas + 1) - 1);
    let more = repeated(&format!("(\",\" {pair})"), commas, most);
    let all = format!("{pair} {more}");
    if counts.least == 0 {
        format!("({all})?")
    } else {
        all
    }
}

fn condition(conditions: &[String]) -> String {
    let joined = conditions.iter().rev().fold(String::new(), |joined, one| {
        if joined.is_empty() {
            one.clone()
        } else {
            format!("and({one}, {joined})")
        }
    });
    if joined.is_empty() {
        joined
    } else {
        format!(" %if {joined}")
    }
}

fn is_identifier(name: &str) -> bool {
    let mut bytes = name.bytes();
    let first = bytes.next();
    first.is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// True for a key that stands in a call without quotes.
fn is_bare(name: &str) -> bool {
    is_identifier(&name.replace('-', "_"))
}
