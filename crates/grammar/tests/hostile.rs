//! Input made to hurt: it is refused, or it is compiled and its masks are quick. Nothing hangs and nothing panics.

mod support;

use std::time::Duration;

use carat_grammar::{Answer, Compiled, Format, GrammarError, ToolChoice, Tools};
use carat_testkit::work::worked;
use carat_text::Tool;
use serde_json::{Map, Value, json};

use support::{DEMO, GEMMA, Model, Random, allowed, demo_gguf, tool, walk};

/// The scheduler waits for a mask at worst. Limits of llguidance keep it near 20 ms.
const MASK_LIMIT: Duration = Duration::from_millis(500);

fn compile(model: &Model, answer: &Answer<'_>) -> Result<Compiled, GrammarError> {
    let compiled = model.grammars.compile(answer);
    compiled.map(|compiled| compiled.expect("the answer is constrained"))
}

/// Walks a while, with an eye on the clock.
fn survive(model: &Model, answer: &Answer<'_>) -> Result<(), GrammarError> {
    let compiled = compile(model, answer)?;
    for seed in 0..3 {
        let random = &mut Random(seed);
        let mut constraint = compiled.source.start();
        let mut mask = model.mask();
        for length in 0..60 {
            let start = worked();
            allowed(constraint.as_mut(), &mut mask);
            let took = worked().saturating_sub(start);
            assert!(took < MASK_LIMIT, "{took:?}: {answer:.200?}");
            let Some(token) = walk::step(model, &mask, random, length) else {
                break;
            };
            constraint.accept(token);
        }
    }
    Ok(())
}

fn schema(schema: Value) -> Answer<'static> {
    Answer {
        format: Some(Format::JsonSchema {
            schema,
            strict: false,
        }),
        ..Answer::default()
    }
}

fn format(format: Format) -> Answer<'static> {
    Answer {
        format: Some(format),
        ..Answer::default()
    }
}

fn required(tools: &[Tool]) -> Answer<'_> {
    Answer {
        tools: Some(Tools {
            tools,
            choice: ToolChoice::Required,
            parallel: true,
        }),
        ..Answer::default()
    }
}

/// Refusals of a schema: for answers, and for tools.
type Refusals = [bool; 2];
const BOTH: Refusals = [true, true];
const NEITHER: Refusals = [false, false];
const ANSWERS: Refusals = [true, false];
const TOOLS: Refusals = [false, true];

fn property(schema: Value) -> Value {
    let mut object = json!({"type": "object", "properties": {}, "required": ["a"]});
    object["properties"]["a"] = schema;
    object
}

/// Schemas that are large, deep, or go round in circles.
fn large_schemas() -> Vec<(&'static str, Value, Refusals)> {
    let with_defs = |defs: Map<String, Value>, first: &str| json!({"type": "object", "$defs": defs, "properties": {"a": {"$ref": first}}, "required": ["a"]});
    let target = |n: usize| json!({"$ref": format!("#/$defs/d{}", n + 1)});
    let chain = {
        let defs = (0..3000).map(|n| (format!("d{n}"), target(n)));
        let mut defs: Map<String, Value> = defs.collect();
        defs.insert("d3000".to_owned(), json!({"type": "string"}));
        with_defs(defs, "#/$defs/d0")
    };
    let doubling = |keyword: &str| {
        let pair = |n| json!({keyword: [target(n), target(n)]});
        let mut defs: Map<String, Value> = (0..60).map(|n| (format!("d{n}"), pair(n))).collect();
        let last = json!({"type": "object", "properties": {"x": {}}});
        defs.insert("d60".to_owned(), last);
        with_defs(defs, "#/$defs/d0")
    };
    let defined = |schema: Value| {
        let defs = Map::from_iter([("a".to_owned(), schema)]);
        with_defs(defs, "#/$defs/a")
    };
    let own = json!({"$ref": "#/$defs/a"});
    let either = json!({"anyOf": [{"allOf": [own]}, {"allOf": [own]}]});
    let wide = |count: usize| -> Map<String, Value> {
        let keys = (0..count).map(|n| format!("p{n}"));
        keys.map(|key| (key, json!({"type": "string"}))).collect()
    };
    let names: Vec<_> = (0..400).map(|n| format!("p{n}")).collect();
    let mut nested = json!({"type": "string", "maxLength": 500});
    for _ in 0..28 {
        nested = json!({"type": "array", "minItems": 1, "maxItems": 500, "items": nested});
    }
    let words = (0..10_000).map(|n| format!("value {n} {}", n * 7919));
    let words: Vec<_> = words.collect();
    vec![
        ("a chain of references", chain, TOOLS),
        ("allOf that doubles", doubling("allOf"), TOOLS),
        ("anyOf that doubles", doubling("anyOf"), NEITHER),
        (
            "itself",
            property(json!({"$ref": "#/properties/a"})),
            NEITHER,
        ),
        ("all of it", property(json!({"$ref": "#"})), NEITHER),
        (
            "allOf of itself",
            defined(json!({"allOf": [own, own]})),
            BOTH,
        ),
        ("anyOf of itself", defined(either), TOOLS),
        (
            "many properties",
            json!({"type": "object", "properties": wide(400)}),
            NEITHER,
        ),
        (
            "many required",
            json!({"type": "object", "required": names}),
            NEITHER,
        ),
        ("lists in lists", property(nested), NEITHER),
        (
            "ten thousand words",
            property(json!({"enum": words})),
            NEITHER,
        ),
    ]
}

/// Schemas that say odd things.
fn odd_schemas() -> Vec<(&'static str, Value, Refusals)> {
    let string = |keyword: &str, value: Value| property(json!({"type": "string", keyword: value}));
    let number =
        |low: f64, high: f64| property(json!({"type": "number", "minimum": low, "maximum": high}));
    let repetitions = "^((a{1,500}){1,500}){1,500}$";
    let nulls = json!({"type": "array", "minItems": 1_000_000_000_u64, "items": {"type": "null"}});
    let wrong = json!({
        "type": 7, "enum": 3, "anyOf": "x", "properties": [], "required": {}, "minLength": "a",
        "pattern": 4, "format": null, "items": 3, "$ref": 5,
    });
    let unsupported = json!({
        "not": {}, "if": {}, "then": {}, "contains": {}, "uniqueItems": true, "propertyNames": {},
    });
    let keys = json!({
        "": {}, "}": {}, ":": {}, "\u{0}": {}, "\u{7f}\"\\": {}, "▁": {}, "<|\"|>": {}, "a b": {},
    });
    let patterns = json!({"^a": {"type": "string"}, "^ab": {"type": "null"}});
    vec![
        (
            "explodes",
            string("pattern", json!("(a|b)*a(a|b){20}")),
            NEITHER,
        ),
        (
            "repetitions",
            string("pattern", json!(repetitions)),
            NEITHER,
        ),
        (
            "more repetitions",
            string("pattern", json!("a{1000000000}")),
            NEITHER,
        ),
        (
            "looks ahead",
            string("pattern", json!("(?=.*a)(?!b)")),
            NEITHER,
        ),
        ("no pattern", string("pattern", json!("((([")), NEITHER),
        (
            "a long string",
            string("minLength", json!(1_000_000)),
            NEITHER,
        ),
        ("a huge number", number(1e308, 1.5e308), ANSWERS),
        ("no number", number(5.0, 3.0), BOTH),
        (
            "a step of zero",
            property(json!({"type": "integer", "multipleOf": 0})),
            ANSWERS,
        ),
        ("many items", property(nulls), NEITHER),
        ("wrong types", property(wrong), ANSWERS),
        (
            "unknown",
            property(json!({"frobnicate": [1], "x": {"not": 1}})),
            NEITHER,
        ),
        ("not supported", property(unsupported), NEITHER),
        (
            "elsewhere",
            property(json!({"$ref": "https://example.org/a.json#/b"})),
            ANSWERS,
        ),
        ("nowhere", property(json!({"$ref": "#/nowhere"})), ANSWERS),
        (
            "odd keys",
            json!({"type": "object", "properties": keys}),
            NEITHER,
        ),
        (
            "key patterns",
            json!({"type": "object", "patternProperties": patterns}),
            ANSWERS,
        ),
        ("nothing at all", property(json!(false)), ANSWERS),
    ]
}

#[test]
fn schemas_of_answers_are_survived() {
    for (name, hostile, [refused, _]) in [large_schemas(), odd_schemas()].concat() {
        let result = survive(&DEMO, &schema(hostile));
        assert_eq!(result.is_err(), refused, "{name}: {result:?}");
    }
}

#[test]
fn schemas_of_tools_are_survived() {
    for (name, hostile, [_, refused]) in [large_schemas(), odd_schemas()].concat() {
        let tools = [tool("f", hostile)];
        let result = survive(&DEMO, &required(&tools));
        assert_eq!(result.is_err(), refused, "{name}: {result:?}");
    }
}

#[test]
fn what_takes_too_long_is_given_up() {
    let wide = (0..6000).map(|n| (format!("property {n}"), json!({"type": "string"})));
    let wide: Map<String, Value> = wide.collect();
    let answer = schema(json!({"type": "object", "properties": wide}));
    let limit = Duration::from_millis(1);
    let hasty = Model::with_limit(limit, &demo_gguf());
    let error = hasty.grammars.compile(&answer).err();
    let what = "schema";
    assert_eq!(error, Some(GrammarError::TooSlow { what, limit }));
    // Refused or not by how fast the machine is.
    let patient = Model::with_limit(Duration::from_secs(2), &demo_gguf());
    let tiny = json!({"type": "number", "multipleOf": 1e-9, "minimum": 0, "maximum": 1});
    let _ = survive(&patient, &schema(tiny));
}

#[test]
fn limits_are_told() {
    let mut deep = json!({"type": "string"});
    for _ in 0..50 {
        deep = json!({"type": "object", "properties": {"a": deep}});
    }
    let long = json!({"type": "object", "description": "x".repeat(300_000)});
    for (hostile, word) in [(deep, "64 levels"), (long, "262144")] {
        let error = compile(&DEMO, &schema(hostile.clone()))
            .unwrap_err()
            .to_string();
        assert!(error.contains(word), "{error}");
        let tools = [tool("f", hostile)];
        let error = compile(&DEMO, &required(&tools)).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    let tools: Vec<_> = (0..257)
        .map(|n| tool(&format!("f{n}"), Value::Null))
        .collect();
    let error = compile(&DEMO, &required(&tools)).unwrap_err();
    let (count, most) = (257, 256);
    assert_eq!(error, GrammarError::ToolCount { count, most });
    assert!(compile(&DEMO, &required(&tools[..256])).is_ok());
}

#[test]
fn expressions_and_grammars_are_survived() {
    let alternatives: Vec<_> = (0..2000).map(|n| format!("w{}", n * 7919)).collect();
    let terminals = (0..40).map(|n| format!("T{n}: T{0} T{0}", n + 1));
    let doubling = terminals.collect::<Vec<_>>().join("\n");
    let rules = (0..20_000).map(|n| format!("a{n} ::= a{}", n + 1));
    let rules = rules.collect::<Vec<_>>().join("\n");
    for answer in [
        format(Format::Regex("(a|b)*a(a|b){20}".into())),
        format(Format::Regex("(((a{1,500}){1,500}){1,500})".into())),
        format(Format::Regex(".*x.{200}y".into())),
        format(Format::Regex("(a*)*(b*)*c".into())),
        format(Format::Regex(alternatives.join("|"))),
        format(Format::Regex("\\p{L}{1,1000}[^\\x00-\\x{10FFFF}]?".into())),
        format(Format::Regex("a{1000000000}".into())),
        format(Format::Choice(alternatives)),
        format(Format::Choice(vec![String::new(); 3])),
        format(Format::Lark(String::new())),
        format(Format::Lark("start: start".into())),
        format(Format::Lark("start: start start | \"a\"".into())),
        format(Format::Lark("start: \"a\"{1000000}".into())),
        format(Format::Lark(format!("start: T0\n{doubling}\nT40: \"a\""))),
        format(Format::Lark("start: <[5]> <unknown> @x %json {".into())),
        format(Format::Lark(
            "%llguidance {\"no_forcing\": true}\nstart: \"abc\"".into(),
        )),
        format(Format::Lark(
            "start: /a/ | %json {\"type\": \"object\"}\n%ignore /( )*/".into(),
        )),
        format(Format::Gbnf("root ::= root".into())),
        format(Format::Gbnf("root ::= root root | \"a\" | \"\"".into())),
        format(Format::Gbnf("root ::= (((\"a\"*)*)*)*".into())),
        format(Format::Gbnf(
            "root ::= \"a\"{0,0} \"b\"{0} \"c\"{100000}".into(),
        )),
        format(Format::Gbnf(format!(
            "root ::= a0\n{rules}\na20000 ::= \"x\""
        ))),
    ] {
        // Some are refused. All come back, and in time.
        let _ = survive(&DEMO, &answer);
    }
    for text in [
        "(".repeat(100_000),
        "[".repeat(100_000),
        "a".repeat(300_000),
    ] {
        for answer in [
            format(Format::Regex(text.clone())),
            format(Format::Lark(format!("start: {text}"))),
            format(Format::Gbnf(format!("root ::= {text}"))),
        ] {
            assert!(compile(&DEMO, &answer).is_err());
        }
    }
}

#[test]
fn masks_are_quick_on_the_published_vocabulary() {
    let property =
        |schema: Value| json!({"type": "object", "properties": {"a": schema}, "required": ["a"]});
    for answer in [
        format(Format::Regex("(a|b)*a(a|b){20}".into())),
        format(Format::Regex(".*x.{200}y".into())),
        schema(property(json!({"type": "string", "maxLength": 20}))),
        schema(property(json!({"type": "object"}))),
    ] {
        survive(&GEMMA, &answer).unwrap();
    }
}

/// Each character is a state of the lexer. Looking ahead of them must not multiply those.
#[test]
fn long_strings_with_a_bound_come_to_their_end() {
    let text = "caf\u{e9} \u{4e9c} ".repeat(900);
    let most = text.chars().count() + 5;
    let bounded = schema(property(json!({"type": "string", "maxLength": most})));
    let whole = json!({"a": text}).to_string().replace(':', ": ");
    assert!(DEMO.is_complete(&bounded, &whole));
    let tools = [tool(
        "f",
        property(json!({"type": "string", "maxLength": most})),
    )];
    let call = format!("<|tool_call>call:f{{a:<|\"|>{text}<|\"|>}}<tool_call|>");
    assert!(DEMO.is_complete(&required(&tools), &call));
}

#[test]
fn whatever_the_engine_says_nothing_panics() {
    let tools = [tool(
        "f",
        json!({"type": "object", "properties": {"a": {"type": "string"}}}),
    )];
    let answers = [
        required(&tools),
        schema(json!({"type": "object"})),
        Answer {
            thinking: carat_grammar::Thinking::Allowed { budget: Some(3) },
            ..required(&tools)
        },
    ];
    let vocab = DEMO.tokenizer.vocab().len();
    for (answer, seed) in answers.iter().zip(0..) {
        let random = &mut Random(seed);
        for _ in 0..200 {
            let mut constraint = DEMO.start(answer);
            for _ in 0..20 {
                let mut mask = DEMO.mask();
                constraint.mask(&mut mask);
                let id = random.below(vocab + 10) as u32;
                constraint.accept(
                    constraint
                        .forced()
                        .filter(|_| random.one_in(2))
                        .unwrap_or(id),
                );
                let _ = constraint.fork();
            }
        }
    }
    assert!(DEMO.grammars.meter().failed_answers() > 0);
}
