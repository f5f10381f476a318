//! Tools to the grammar of one call in Gemma's notation, `<|tool_call>call:NAME{key:value,…}<tool_call|>`.
//!
//! The counterpart of `carat_text::parts`: whatever the grammar allows, that parser reads, and what it reads fits the schema of the
//! tool. Keys may come in any order, each once. Keywords that cannot be enforced are passed over and reported.

mod combined;
mod list;
mod number;
mod object;
mod text;
mod value;

use carat_text::{TokenId, Tool, Vocab};
use serde_json::{Map, Value, json};

use self::value::Writer;
use crate::{GrammarError, formats::literal, schema};

/// Most tools of one request.
const MAX_TOOLS: usize = 256;
/// Longest grammar that is made of tools.
const LONGEST_BYTES: usize = 4 << 20;

/// Marks that a call is written with.
#[derive(Clone, Copy)]
pub(crate) struct CallMarks {
    pub(crate) start: TokenId,
    end: TokenId,
    quote: TokenId,
}

impl CallMarks {
    pub(crate) fn of(vocab: &Vocab) -> Result<CallMarks, GrammarError> {
        let marks = vocab.marks();
        let require = |mark: Option<TokenId>, text| mark.ok_or(GrammarError::MissingToken { text });
        Ok(CallMarks {
            start: require(marks.call_start, "<|tool_call>")?,
            end: require(marks.call_end, "<tool_call|>")?,
            quote: require(marks.quote, "<|\"|>")?,
        })
    }
}

/// The grammar of a call of one of some tools.
pub(crate) struct CallGrammar {
    pub(crate) lark: String,
    /// Keywords that are not enforced, each with its place.
    pub(crate) ignored: Vec<String>,
}

/// The grammar of a call, both marks included.
pub(crate) fn grammar(tools: &[&Tool], marks: &CallMarks) -> Result<CallGrammar, GrammarError> {
    if tools.len() > MAX_TOOLS {
        let (count, most) = (tools.len(), MAX_TOOLS);
        return Err(GrammarError::ToolCount { count, most });
    }
    let mut ignored = Vec::new();
    let mut lines = Vec::new();
    let mut calls = Vec::new();
    let mut bytes = 0;
    for (index, tool) in tools.iter().enumerate() {
        check_name(&tool.name)?;
        let mark = tool.parameters.mark();
        let parameters = parameters(tool, mark)?;
        let mut writer = Writer::new(&parameters, &tool.name, index, marks.quote);
        writer.mark = mark;
        let arguments = writer.root()?;
        let call = literal(&format!("call:{}", tool.name));
        calls.push(format!("{call} {arguments}"));
        ignored.append(&mut writer.ignored);
        bytes += writer.lines.iter().map(String::len).sum::<usize>();
        lines.append(&mut writer.lines);
        if bytes > LONGEST_BYTES {
            let (what, most) = ("grammar of the tools", LONGEST_BYTES);
            return Err(GrammarError::TooLong { what, bytes, most });
        }
    }
    let (start, end) = (marks.start, marks.end);
    let calls = calls.join(" | ");
    let mut lark = format!("start: <[{start}]> ({calls}) <[{end}]>\n");
    for line in value::shared_lines(marks.quote).iter().chain(&lines) {
        lark.push_str(line);
        lark.push('\n');
    }
    Ok(CallGrammar { lark, ignored })
}

/// Names that the parser of calls reads back as they are.
fn check_name(name: &str) -> Result<(), GrammarError> {
    let reason = if name.trim().is_empty() {
        "it has no name"
    } else if name.trim() != name {
        "its name has white space around it"
    } else if name.contains('{') {
        "its name has a `{`"
    } else {
        return Ok(());
    };
    Err(GrammarError::Tool {
        name: name.to_owned(),
        reason: reason.to_owned(),
    })
}

/// The schema of a tool's parameters, which are an object whether it says so or not; integers beyond 64 bits are strings that begin
/// with the mark.
fn parameters(tool: &Tool, mark: Option<char>) -> Result<Value, GrammarError> {
    let refuse = |reason: &str| GrammarError::Tool {
        name: tool.name.clone(),
        reason: reason.to_owned(),
    };
    let schema = tool.parameters.marked(mark);
    schema::check_size(&schema)?;
    let mut map = match schema {
        Value::Null => return Ok(json!({"type": "object", "properties": {}})),
        Value::Object(map) => map,
        _ => return Err(refuse("its parameters are no schema")),
    };
    let is_object = match map.get("type") {
        None => true,
        Some(Value::String(name)) => name == "object",
        Some(Value::Array(names)) => names.iter().any(|name| name == "object"),
        Some(_) => false,
    };
    if !is_object {
        return Err(refuse("its parameters are not of type object"));
    }
    if !map.contains_key("$ref") {
        map.insert("type".to_owned(), json!("object"));
    }
    map.remove("nullable");
    Ok(Value::Object(map))
}

/// Keywords that say something about values, as opposed to describing them.
fn is_assertion(keyword: &str) -> bool {
    const ASSERTIONS: [&str; 33] = [
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "not",
        "if",
        "then",
        "else",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "unevaluatedItems",
        "pattern",
        "minLength",
        "maxLength",
        "multipleOf",
    ];
    ASSERTIONS.contains(&keyword)
        || ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"].contains(&keyword)
}

/// A count that a keyword gives.
fn count(map: &Map<String, Value>, keyword: &str) -> Option<usize> {
    // Counts past any answer are as good as none.
    const MOST: u64 = 1 << 20;
    let count = map.get(keyword)?;
    let whole = count.as_u64().or_else(|| {
        let float = count.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0)?;
        Some(float as u64)
    })?;
    Some(whole.min(MOST) as usize)
}
