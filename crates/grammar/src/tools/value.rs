//! Values of arguments, by their schemas.

use std::collections::HashMap;

use carat_text::TokenId;
use serde_json::{Map, Value};

use crate::{GrammarError, formats::literal, path::Path};

/// Deepest nesting of a value whose schema leaves it open. The parser of calls reads 64 levels in all.
const OPEN_LEVELS: usize = 8;
/// Deepest nesting of schemas, with those that others refer to.
const DEEPEST: usize = 128;
/// Most schemas within those of one tool.
const MAX_SCHEMAS: usize = 20_000;

/// A key that no schema names, without quotes. Its end is certain, whatever the model would say.
pub(super) const FREE_KEY: &str = "/[A-Za-z_][A-Za-z0-9_]{0,63}/";

/// Rules that all tools share: open values, level by level.
pub(super) fn shared_lines(quote: TokenId) -> Vec<String> {
    let mut lines = vec![
        "TEXT: /(.|\\n)*/".to_owned(),
        format!("KEY: {FREE_KEY}"),
        format!("string: <[{quote}]> TEXT <[{quote}]>"),
        format!("key: KEY | <[{quote}]> /(.|\\n)+/ <[{quote}]>"),
        // No longer than what a number of any program can hold.
        "NUMBER: /-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/".to_owned(),
        "INTEGER: /-?(0|[1-9][0-9]{0,18})/".to_owned(),
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
    pub(super) schema: &'a Value,
    pub(super) tool: &'a str,
    /// Tells the rules of tools apart.
    index: usize,
    pub(super) quote: TokenId,
    /// Begins the strings of the schema that are integers beyond 64 bits.
    pub(super) mark: Option<char>,
    pub(super) lines: Vec<String>,
    /// Rules of schemas that others refer to, by pointer.
    pub(super) references: HashMap<String, String>,
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
            mark: None,
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
    pub(super) fn descend(&mut self, depth: usize) -> Result<(), GrammarError> {
        self.entered += 1;
        if depth > DEEPEST {
            let (what, most) = ("schema", DEEPEST);
            return Err(GrammarError::TooDeep { what, most });
        }
        if self.entered > MAX_SCHEMAS {
            return Err(GrammarError::Tool {
                name: self.tool.to_owned(),
                reason: format!("its parameters consist of more than {MAX_SCHEMAS} schemas"),
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
                "integer" | "number" => self.number(map, kind, path)?,
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
        let (strings, others): (Vec<_>, Vec<_>) = values
            .iter()
            .partition(|value| value.is_string() && self.large_integer(value).is_none());
        let strings: Vec<_> = strings.into_iter().filter_map(Value::as_str).collect();
        let others = others.into_iter();
        let mut choices: Vec<_> = others.map(|value| self.constant(value)).collect();
        match strings.as_slice() {
            [] => {}
            [string] => choices.push(self.constant(&Value::from(*string))),
            strings => {
                // One terminal for all of them: a thousand lexemes would take a second to compile.
                let terminal = self.name('E');
                let strings: Vec<_> = strings.iter().map(|string| literal(string)).collect();
                self.lines
                    .push(format!("{terminal}: {}", strings.join(" | ")));
                choices.push(format!("<[{quote}]> {terminal} <[{quote}]>"));
            }
        }
        self.rule(&choices.join(" | "))
    }

    /// Digits of an integer beyond 64 bits.
    fn large_integer<'v>(&self, value: &'v Value) -> Option<&'v str> {
        value.as_str()?.strip_prefix(self.mark?)
    }

    fn constant(&self, value: &Value) -> String {
        let quote = self.quote;
        if let Some(digits) = self.large_integer(value) {
            return literal(digits);
        }
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
