//! Values of arguments, by their schemas.

use std::collections::HashMap;

use carat_text::TokenId;
use serde_json::{Map, Value, json};

use super::{count, is_assertion};
use crate::{
    GrammarError,
    formats::{literal, repeated},
    path::Path,
    schema,
};

/// Deepest nesting of a value whose schema leaves it open. The parser of calls reads 64 levels in all.
const OPEN_LEVELS: usize = 8;
/// Deepest nesting of schemas, with those that others refer to.
const DEEPEST: usize = 128;
/// Most schemas within those of one tool.
const MOST_SCHEMAS: usize = 20_000;
/// Largest whole number that every reader of JSON keeps exact, and bound of numbers that have none.
const LARGEST: i64 = (1 << 53) - 1;

/// Rules that all tools share: open values, level by level.
pub(super) fn shared_lines(quote: TokenId) -> Vec<String> {
    let mut lines = vec![
        "TEXT: /(.|\\n)*/".to_owned(),
        "KEY: /[A-Za-z_][A-Za-z0-9_]*/".to_owned(),
        format!("string: <[{quote}]> TEXT <[{quote}]>"),
        format!("key: KEY | <[{quote}]> /(.|\\n)+/ <[{quote}]>"),
        // No longer than what a number of any program can hold.
        "NUMBER: /-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/".to_owned(),
        "INTEGER: /-?(0|[1-9][0-9]{0,14})/".to_owned(),
        "open0: string | NUMBER | \"true\" | \"false\" | \"null\"".to_owned(),
    ];
    for level in 1..=OPEN_LEVELS {
        let inner = level - 1;
        lines.push(format!(
            "open{level}: open0 | \"[\" (open{inner} (\",\" open{inner})*)? \"]\" | \"{{\" (pair{inner} (\",\" pair{inner})*)? \"}}\""
        ));
        lines.push(format!("pair{inner}: key \":\" open{inner}"));
    }
    lines
}

/// Writes the rules of one tool.
pub(super) struct Writer<'a> {
    schema: &'a Value,
    tool: &'a str,
    /// Tells the rules of tools apart.
    index: usize,
    pub(super) quote: TokenId,
    pub(super) lines: Vec<String>,
    /// Rules of schemas that others refer to, by pointer.
    references: HashMap<String, String>,
    names: usize,
    entered: usize,
    pub(super) ignored: Vec<String>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(
        schema: &'a Value,
        tool: &'a str,
        index: usize,
        quote: TokenId,
    ) -> Writer<'a> {
        Writer {
            schema,
            tool,
            index,
            quote,
            lines: Vec::new(),
            references: HashMap::new(),
            names: 0,
            entered: 0,
            ignored: Vec::new(),
        }
    }

    /// The arguments of a call.
    pub(super) fn root(&mut self) -> Result<String, GrammarError> {
        self.value(self.schema, &Path::Root, 0)
    }

    /// A name for a rule, or in capitals for a terminal.
    pub(super) fn name(&mut self, letter: char) -> String {
        self.names += 1;
        format!("{letter}{}-{}", self.index, self.names)
    }

    /// Gives an expression a name.
    pub(super) fn rule(&mut self, body: &str) -> String {
        let name = self.name('v');
        self.lines.push(format!("{name}: {body}"));
        name
    }

    pub(super) fn ignore(&mut self, keyword: &str, path: &Path<'_>) {
        let tool = self.tool;
        self.ignored.push(format!("`{keyword}` at `{tool}{path}`"));
    }

    /// Counts a schema that is entered. References let a short text stand for a tree without end.
    fn descend(&mut self, depth: usize) -> Result<(), GrammarError> {
        self.entered += 1;
        if depth > DEEPEST {
            let (what, most) = ("schema", DEEPEST);
            return Err(GrammarError::TooDeep { what, most });
        }
        if self.entered > MOST_SCHEMAS {
            return Err(GrammarError::Tool {
                name: self.tool.to_owned(),
                reason: format!("its parameters consist of more than {MOST_SCHEMAS} schemas"),
            });
        }
        Ok(())
    }

    /// A value of any kind.
    pub(super) fn open() -> String {
        format!("open{OPEN_LEVELS}")
    }

    /// A value that fits the schema: one name or one expression in brackets.
    pub(super) fn value(
        &mut self,
        schema: &Value,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<String, GrammarError> {
        self.descend(depth)?;
        let map = match schema {
            Value::Object(map) => map,
            Value::Bool(true) => return Ok(Writer::open()),
            _ => {
                self.ignore(&schema.to_string(), path);
                return Ok(Writer::open());
            }
        };
        if let Some(Value::String(pointer)) = map.get("$ref") {
            return self.reference(pointer, map, path, depth);
        }
        if map.contains_key("allOf") {
            let merged = Value::Object(self.merged(map, path, depth)?);
            return self.value(&merged, path, depth + 1);
        }
        self.ignore_unsupported(map, path);
        if let Some(value) = map.get("const") {
            return Ok(self.constants(std::slice::from_ref(value)));
        }
        if let Some(Value::Array(values)) = map.get("enum")
            && !values.is_empty()
        {
            return Ok(self.constants(values));
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(Value::Array(branches)) = map.get(keyword)
                && let Some(value) = self.branches(keyword, branches, map, path, depth)?
            {
                return Ok(value);
            }
        }
        self.typed(map, path, depth)
    }

    fn ignore_unsupported(&mut self, map: &Map<String, Value>, path: &Path<'_>) {
        const UNSUPPORTED: [&str; 13] = [
            "not",
            "if",
            "then",
            "else",
            "contains",
            "propertyNames",
            "patternProperties",
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "unevaluatedItems",
            "unevaluatedProperties",
            "$dynamicRef",
        ];
        for keyword in map.keys().filter(|k| UNSUPPORTED.contains(&k.as_str())) {
            self.ignore(keyword, path);
        }
        if map.get("uniqueItems") == Some(&Value::Bool(true)) {
            self.ignore("uniqueItems", path);
        }
    }

    fn target(&self, pointer: &str) -> Option<&'a Value> {
        self.schema.pointer(pointer.strip_prefix('#')?)
    }

    fn reference(
        &mut self,
        pointer: &str,
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<String, GrammarError> {
        let siblings: Vec<_> = map
            .keys()
            .filter(|k| *k != "$ref" && is_assertion(k))
            .collect();
        for keyword in siblings {
            self.ignore(keyword, path);
        }
        let Some(target) = self.target(pointer) else {
            self.ignore(&format!("$ref: {pointer}"), path);
            return Ok(Writer::open());
        };
        if let Some(rule) = self.references.get(pointer) {
            return Ok(rule.clone());
        }
        let name = self.name('d');
        self.references.insert(pointer.to_owned(), name.clone());
        let body = self.value(target, path, depth + 1)?;
        self.lines.push(format!("{name}: {body}"));
        Ok(name)
    }

    /// One schema instead of several that all hold, as far as that can be told.
    fn merged(
        &mut self,
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<Map<String, Value>, GrammarError> {
        self.descend(depth)?;
        let mut merged = map.clone();
        let branches = merged.remove("allOf");
        let branches = branches.as_ref().and_then(Value::as_array);
        for (index, branch) in branches.into_iter().flatten().enumerate() {
            let all_of = path.key("allOf");
            let path = all_of.index(index);
            let mut branch = branch;
            for _ in 0..DEEPEST {
                let reference = branch.get("$ref").and_then(Value::as_str);
                let Some(target) = reference.and_then(|r| self.target(r)) else {
                    break;
                };
                branch = target;
            }
            let Value::Object(branch) = branch else {
                continue;
            };
            let branch = if branch.contains_key("allOf") {
                self.merged(branch, &path, depth + 1)?
            } else {
                branch.clone()
            };
            for (keyword, value) in branch {
                self.merge(&mut merged, &keyword, value, &path);
            }
        }
        Ok(merged)
    }

    fn merge(
        &mut self,
        merged: &mut Map<String, Value>,
        keyword: &str,
        value: Value,
        path: &Path<'_>,
    ) {
        match (keyword, merged.get_mut(keyword), value) {
            (_, None, value) => {
                merged.insert(keyword.to_owned(), value);
            }
            (_, Some(present), value) if *present == value => {}
            ("properties", Some(Value::Object(present)), Value::Object(more)) => {
                for (name, schema) in more {
                    match present.get(&name) {
                        Some(other) if *other != schema => self.ignore(&name, &path.key(keyword)),
                        Some(_) => {}
                        None => {
                            present.insert(name, schema);
                        }
                    }
                }
            }
            ("required", Some(Value::Array(present)), Value::Array(more)) => {
                let new: Vec<_> = more.into_iter().filter(|n| !present.contains(n)).collect();
                present.extend(new);
            }
            ("additionalProperties", Some(present), Value::Bool(false)) => {
                *present = Value::Bool(false);
            }
            (keyword, Some(_), _) if is_assertion(keyword) => self.ignore(keyword, path),
            _ => {}
        }
    }

    /// Alternatives; `None` where what stands beside them says more than they do.
    fn branches(
        &mut self,
        keyword: &str,
        branches: &[Value],
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<Option<String>, GrammarError> {
        let kind = map.get("type").and_then(Value::as_str);
        let says_more = map
            .keys()
            .any(|k| k != keyword && k != "type" && is_assertion(k));
        if branches.is_empty() || says_more {
            self.ignore(keyword, path);
            return Ok(None);
        }
        let list = path.key(keyword);
        let mut values = Vec::new();
        let mut kinds = Vec::new();
        for (index, branch) in branches.iter().enumerate() {
            let mut branch = branch.clone();
            if let (Value::Object(map), Some(kind)) = (&mut branch, kind) {
                let own = map.entry("type").or_insert_with(|| json!(kind));
                if own != kind {
                    continue;
                }
            }
            kinds.push(
                branch
                    .get("type")
                    .and_then(Value::as_str)
                    .map(str::to_owned),
            );
            values.push(self.value(&branch, &list.index(index), depth + 1)?);
        }
        if map.get("nullable") == Some(&Value::Bool(true)) {
            values.push(literal("null"));
        }
        if values.is_empty() {
            self.ignore(keyword, path);
            return Ok(None);
        }
        if keyword == "oneOf" && !are_disjoint(&kinds) {
            self.ignore("oneOf (more than one may fit)", path);
        }
        Ok(Some(self.rule(&values.join(" | "))))
    }

    /// A value of one of the types that the schema names or implies.
    fn typed(
        &mut self,
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<String, GrammarError> {
        let mut kinds: Vec<&str> = match map.get("type") {
            Some(Value::String(kind)) => vec![kind],
            Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
            _ => implied_type(map).into_iter().collect(),
        };
        if map.get("nullable") == Some(&Value::Bool(true)) && !kinds.is_empty() {
            kinds.push("null");
        }
        if kinds.contains(&"number") {
            kinds.retain(|kind| *kind != "integer");
        }
        let mut values = Vec::new();
        for kind in kinds {
            values.push(match kind {
                "string" => self.string(map, path)?,
                "integer" | "number" => self.number(map, kind, path),
                "boolean" => "\"true\" | \"false\"".to_owned(),
                "null" => literal("null"),
                "array" => self.list(map, path, depth)?,
                "object" => self.object(map, path, depth)?,
                _ => {
                    self.ignore(&format!("type: {kind}"), path);
                    Writer::open()
                }
            });
        }
        match values.as_slice() {
            [] => Ok(Writer::open()),
            [value] if !value.contains(' ') => Ok(value.clone()),
            values => Ok(self.rule(&values.join(" | "))),
        }
    }

    /// One of these values, as they are.
    fn constants(&mut self, values: &[Value]) -> String {
        let quote = self.quote;
        let strings: Vec<_> = values
            .iter()
            .filter_map(Value::as_str)
            .map(literal)
            .collect();
        let others = values.iter().filter(|value| !value.is_string());
        let mut choices: Vec<_> = others.map(|value| self.constant(value)).collect();
        if !strings.is_empty() {
            let strings = strings.join(" | ");
            choices.push(format!("<[{quote}]> ({strings}) <[{quote}]>"));
        }
        self.rule(&choices.join(" | "))
    }

    fn constant(&self, value: &Value) -> String {
        let quote = self.quote;
        match value {
            Value::String(text) => format!("<[{quote}]> {} <[{quote}]>", literal(text)),
            Value::Array(values) => {
                let values: Vec<_> = values.iter().map(|value| self.constant(value)).collect();
                format!("\"[\" {} \"]\"", values.join(" \",\" "))
            }
            Value::Object(map) => {
                let pairs = map
                    .iter()
                    .map(|(key, value)| format!("{} {}", self.key(key), self.constant(value)));
                let pairs: Vec<_> = pairs.collect();
                format!("\"{{\" {} \"}}\"", pairs.join(" \",\" "))
            }
            plain => literal(&plain.to_string()),
        }
    }

    fn number(&mut self, map: &Map<String, Value>, kind: &str, path: &Path<'_>) -> String {
        const BOUNDS: [&str; 5] = [
            "minimum",
            "exclusiveMinimum",
            "maximum",
            "exclusiveMaximum",
            "multipleOf",
        ];
        let mut number = Map::new();
        for keyword in BOUNDS {
            if let Some(bound) = map.get(keyword) {
                let sound = bound.is_number() || keyword.starts_with("exclusive");
                if sound {
                    number.insert(keyword.to_owned(), bound.clone());
                } else {
                    self.ignore(keyword, path);
                }
            }
        }
        if number.is_empty() {
            return if kind == "integer" {
                "INTEGER"
            } else {
                "NUMBER"
            }
            .to_owned();
        }
        // Digits without end are no number to whoever reads the call.
        let bound = |keyword: &str| map.get(keyword).and_then(Value::as_f64);
        let (low, high) = (
            bound("minimum").or(bound("exclusiveMinimum")),
            bound("maximum").or(bound("exclusiveMaximum")),
        );
        if low.is_none() {
            let least = high
                .filter(|high| *high < 0.0)
                .map_or(-LARGEST as f64, |high| high * 2.0 - LARGEST as f64);
            number.insert("minimum".to_owned(), json!(least));
        }
        if high.is_none() {
            let most = low
                .filter(|low| *low > 0.0)
                .map_or(LARGEST as f64, |low| low * 2.0 + LARGEST as f64);
            number.insert("maximum".to_owned(), json!(most));
        }
        number.insert("type".to_owned(), json!(kind));
        let number = schema::with_separators(&Value::Object(number), schema::Mode::Exact);
        self.rule(&format!("%json {number}"))
    }

    fn list(
        &mut self,
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<String, GrammarError> {
        let least = count(map, "minItems").unwrap_or(0);
        let most = count(map, "maxItems");
        if most.is_some_and(|most| most < least) {
            return Err(GrammarError::Schema {
                path: format!("{}{path}", self.tool),
                reason: "`maxItems` is less than `minItems`".to_owned(),
            });
        }
        // Before 2020, `items` was a list too.
        let (firsts, rest) = match (map.get("prefixItems"), map.get("items")) {
            (Some(Value::Array(firsts)), rest) => (firsts.as_slice(), rest),
            (_, Some(Value::Array(firsts))) => (firsts.as_slice(), map.get("additionalItems")),
            (_, rest) => (&[][..], rest),
        };
        let place = path.key(if map.contains_key("prefixItems") {
            "prefixItems"
        } else {
            "items"
        });
        let mut values = Vec::new();
        for (index, first) in firsts.iter().enumerate().take(most.unwrap_or(usize::MAX)) {
            values.push(self.value(first, &place.index(index), depth + 1)?);
        }
        let rest = match rest {
            Some(Value::Bool(false)) => None,
            Some(schema) => Some(self.value(schema, &path.key("items"), depth + 1)?),
            None => Some(Writer::open()),
        };
        let body = items(&values, rest.as_deref(), least, most);
        Ok(self.rule(&format!("\"[\" {body} \"]\"")))
    }
}

/// The items of a list, with commas: the first ones each of its own kind, then any number of one kind.
fn items(firsts: &[String], rest: Option<&str>, least: usize, most: Option<usize>) -> String {
    let room = most.map(|most| most.saturating_sub(firsts.len()));
    let needed = least.saturating_sub(firsts.len());
    let mut body = match rest.filter(|_| room != Some(0)) {
        // A comma stands before each but the very first of the list.
        Some(rest) if firsts.is_empty() => {
            let more = format!("(\",\" {rest})");
            let more = repeated(&more, needed.saturating_sub(1), room.map(|room| room - 1));
            let all = format!("{rest} {more}");
            return if needed == 0 {
                format!("({all})?")
            } else {
                all
            };
        }
        Some(rest) => repeated(&format!("(\",\" {rest})"), needed, room),
        None => String::new(),
    };
    for (index, first) in firsts.iter().enumerate().rev() {
        let comma = if index == 0 { "" } else { "\",\" " };
        body = format!("{comma}{first} {body}");
        if least <= index {
            body = format!("({body})?");
        }
    }
    body
}

/// The type that keywords speak of where a schema names none.
fn implied_type(map: &Map<String, Value>) -> Option<&'static str> {
    let has = |keywords: &[&str]| keywords.iter().any(|keyword| map.contains_key(*keyword));
    if has(&[
        "properties",
        "required",
        "additionalProperties",
        "minProperties",
        "maxProperties",
    ]) {
        Some("object")
    } else if has(&["items", "prefixItems", "minItems", "maxItems"]) {
        Some("array")
    } else if has(&["pattern", "minLength", "maxLength", "format"]) {
        Some("string")
    } else if has(&[
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ]) {
        Some("number")
    } else {
        None
    }
}

/// Whether no value can be of two of these types.
fn are_disjoint(kinds: &[Option<String>]) -> bool {
    let name = |kind: &Option<String>| match kind.as_deref() {
        Some("integer") => Some("number".to_owned()),
        other => other.map(str::to_owned),
    };
    let mut names: Vec<_> = kinds.iter().map(name).collect();
    let is_known = names.iter().all(Option::is_some);
    names.sort();
    names.dedup();
    is_known && names.len() == kinds.len()
}
