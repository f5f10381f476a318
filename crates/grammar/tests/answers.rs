//! Answers token by token, on the published vocabulary: what may come where, and what may not.

mod support;

use carat_grammar::{Answer, Format, GrammarError, Start, Thinking, ToolChoice, Tools};
use carat_text::Tool;
use serde_json::{Value, json};

use support::{Followed, GEMMA, allowed, tool};

fn weather() -> Vec<Tool> {
    vec![
        tool(
            "get_weather",
            json!({
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city"],
            }),
        ),
        tool("get_time", json!({"type": "object", "properties": {}})),
    ]
}

fn with_tools(tools: &[Tool], choice: ToolChoice) -> Answer<'_> {
    Answer {
        tools: Some(Tools {
            tools,
            choice,
            parallel: true,
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

fn schema(schema: Value) -> Answer<'static> {
    format(Format::JsonSchema {
        schema,
        strict: true,
    })
}

const THINKING: Thinking = Thinking::Allowed { budget: None };
const CALL: &str = "<|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>,days:2}<tool_call|>";

#[test]
fn calls_follow_the_schema_of_their_tool() {
    let tools = weather();
    let answer = with_tools(&tools, ToolChoice::Required);
    for arguments in [
        "{city:<|\"|>Paris<|\"|>}",
        "{days:2,city:<|\"|>Paris<|\"|>}",
        "{unit:<|\"|>celsius<|\"|>,city:<|\"|>a \"b\" {c} `d`\n<b><|\"|>,days:14}",
        "{city:<|\"|><|\"|>}",
    ] {
        let call = format!("<|tool_call>call:get_weather{arguments}<tool_call|>");
        assert_eq!(GEMMA.follow(&answer, &call), Followed::Complete, "{call}");
        let reply = GEMMA.parse(&GEMMA.encode(&call), &tools);
        assert_eq!(reply.tool_calls.len(), 1, "{reply:?}");
    }
    assert!(GEMMA.is_complete(&answer, "<|tool_call>call:get_time{}<tool_call|>"));
    for (arguments, why) in [
        ("{}", "a required key is missing"),
        ("{days:2}", "a required key is missing"),
        (
            "{city:<|\"|>a<|\"|>,city:<|\"|>b<|\"|>}",
            "a key comes twice",
        ),
        ("{city:<|\"|>a<|\"|>,days:15}", "a number is too large"),
        ("{city:<|\"|>a<|\"|>,days:0}", "a number is too small"),
        ("{city:<|\"|>a<|\"|>,days:1.5}", "a number is not whole"),
        ("{city:3}", "a number for a string"),
        ("{city:\"a\"}", "a string in plain quotes"),
        (
            "{city:<|\"|>a<|\"|>,unit:<|\"|>kelvin<|\"|>}",
            "not of the enum",
        ),
        ("{town:<|\"|>a<|\"|>}", "a key that is not there"),
        ("{city:<|\"|>a<|\"|>,}", "a comma too many"),
        ("{city: <|\"|>a<|\"|>}", "a space"),
    ] {
        let call = format!("<|tool_call>call:get_weather{arguments}<tool_call|>");
        assert!(GEMMA.is_refused(&answer, &call), "{why}: {call}");
    }
    assert!(GEMMA.is_refused(&answer, "<|tool_call>call:get_news{}<tool_call|>"));
    assert!(GEMMA.is_refused(&answer, "<|tool_call>get_time{}<tool_call|>"));
}

#[test]
fn integers_may_be_as_long_as_ids_are() {
    let tools = [tool(
        "f",
        json!({"properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer", "minimum": 1},
            "c": {"type": "integer", "maximum": 5},
            "d": {"type": ["integer", "null"], "exclusiveMinimum": 0},
        }}),
    )];
    let answer = with_tools(&tools, ToolChoice::Required);
    let call = |key: &str, value: &str| format!("<|tool_call>call:f{{{key}:{value}}}<tool_call|>");
    for (key, value) in [
        ("a", "1234567890123456789"),
        ("a", "-1234567890123456789"),
        ("b", "1234567890123456789"),
        ("c", "-1234567890123456789"),
        ("d", "9007199254740993"),
    ] {
        let call = call(key, value);
        assert_eq!(GEMMA.follow(&answer, &call), Followed::Complete, "{call}");
        let reply = GEMMA.parse(&GEMMA.encode(&call), &tools);
        assert_eq!(reply.tool_calls[0].arguments[key].to_string(), value);
    }
    for (key, value) in [("a", "12345678901234567890"), ("b", "0"), ("c", "6")] {
        assert!(
            GEMMA.is_refused(&answer, &call(key, value)),
            "{key}:{value}"
        );
    }
}

/// A value would have made `1.2345678901234568e+22` of it, which the model had to write.
#[test]
fn integers_of_a_schema_are_written_with_every_digit() {
    let large = "12345678901234567890123";
    let tools: Vec<Tool> = serde_json::from_str(&format!(
        r#"[{{"name": "f", "parameters": {{"properties": {{
            "n": {{"const": {large}}},
            "m": {{"enum": ["\ue000", "{large}", {large}, [-{large}], 7]}}}}}}}}]"#
    ))
    .unwrap();
    let answer = with_tools(&tools, ToolChoice::Required);
    let call = |arguments: &str| format!("<|tool_call>call:f{{{arguments}}}<tool_call|>");
    let string = format!("m:<|\"|>{large}<|\"|>");
    for arguments in [
        &format!("n:{large}"),
        &format!("m:{large}"),
        &string,
        &format!("m:[-{large}],n:{large}"),
        "m:7",
        "m:<|\"|>\u{e000}<|\"|>",
    ] {
        let call = call(arguments);
        assert_eq!(GEMMA.follow(&answer, &call), Followed::Complete, "{call}");
        let reply = GEMMA.parse(&GEMMA.encode(&call), &tools);
        assert_eq!(reply.tool_calls.len(), 1, "{reply:?}");
    }
    for arguments in [
        "n:1.2345678901234568e+22",
        "n:12345678901234567890124",
        "n:7",
    ] {
        assert!(GEMMA.is_refused(&answer, &call(arguments)), "{arguments}");
    }
}

#[test]
fn the_choice_of_tools_decides_what_an_answer_consists_of() {
    let tools = weather();
    let two = format!("{CALL}{CALL}");
    let text = "It is sunny.";
    for (choice, cases) in [
        (ToolChoice::Auto, [true, true, true, true]),
        (ToolChoice::None, [true, false, false, false]),
        (ToolChoice::Required, [false, true, true, false]),
        (
            ToolChoice::Named("get_weather".to_owned()),
            [false, true, false, false],
        ),
    ] {
        let answer = with_tools(&tools, choice.clone());
        let answers = [text, CALL, &two, &format!("{text}{CALL}")];
        for (answer_text, wanted) in answers.into_iter().zip(cases) {
            let complete = GEMMA.is_complete(&answer, answer_text);
            assert_eq!(complete, wanted, "{choice:?}: {answer_text}");
        }
        let after = GEMMA.is_complete(&answer, &format!("{CALL}{text}"));
        assert!(!after, "{choice:?}: text after a call");
    }
    let mut one = with_tools(&tools, ToolChoice::Auto);
    one.tools.as_mut().unwrap().parallel = false;
    assert!(GEMMA.is_complete(&one, CALL));
    assert!(GEMMA.is_refused(&one, &two));
    let named = with_tools(&tools, ToolChoice::Named("get_time".to_owned()));
    assert!(GEMMA.is_refused(&named, CALL));
}

#[test]
fn free_text_has_a_constant_mask_without_control_tokens() {
    let tools = weather();
    let answer = Answer {
        thinking: THINKING,
        ..with_tools(&tools, ToolChoice::Auto)
    };
    let vocab = GEMMA.tokenizer.vocab();
    let mut constraint = GEMMA.start(&answer);
    let (mut start, mut later) = (GEMMA.mask(), GEMMA.mask());
    allowed(constraint.as_mut(), &mut start);
    constraint.accept(818);
    allowed(constraint.as_mut(), &mut later);
    for id in vocab.special_tokens() {
        let wanted = [1, 48, 106].contains(&id);
        assert_eq!(later.allows(id), wanted, "{id} in text");
        assert_eq!(start.allows(id), wanted || id == 100, "{id} at the start");
    }
    let reserved = vocab.find("<unused49>").unwrap();
    assert!(!later.allows(reserved) && later.allows(vocab.find("<table>").unwrap()));
    // All but reserved and special tokens and the one byte that is in no text.
    assert_eq!(later.count(), 262_144 - 6_228 - 24 - 1 + 3);
    for id in [107, 818, 5279, 238] {
        constraint.accept(id);
        let mut mask = GEMMA.mask();
        allowed(constraint.as_mut(), &mut mask);
        assert_eq!(mask, later);
    }
}

#[test]
fn thoughts_come_first_and_once() {
    let tools = weather();
    let thought = "<|channel>thought\nHm. {\"a\"\n<channel|>";
    for (answer, body) in [
        (with_tools(&tools, ToolChoice::Required), CALL),
        (with_tools(&tools, ToolChoice::Auto), "Yes."),
        (schema(json!({"type": "integer"})), "17"),
    ] {
        let thinking = Answer {
            thinking: THINKING,
            ..answer.clone()
        };
        let whole = format!("{thought}{body}");
        assert!(GEMMA.is_complete(&thinking, &whole), "{whole}");
        assert!(
            GEMMA.is_complete(&thinking, body),
            "without a thought: {body}"
        );
        assert!(GEMMA.is_refused(&thinking, &format!("{thought}{whole}")));
        assert!(GEMMA.is_refused(&answer, &whole), "thinking is off");
        assert!(GEMMA.is_refused(&thinking, "<|channel>thought\nHm.<turn|>"));
        assert!(GEMMA.is_refused(&thinking, "<|channel>thought\nHm.<|tool_call>"));
        assert!(GEMMA.is_refused(&thinking, "<|channel>plan\n"));

        let inside = Answer {
            start: Start::InThought,
            ..thinking.clone()
        };
        assert!(GEMMA.is_complete(&inside, &format!("Hm.\n<channel|>{body}")));
        assert!(GEMMA.is_refused(&inside, &format!("<channel|>{thought}{body}")));
        let after = Answer {
            start: Start::AfterThought,
            ..thinking
        };
        assert!(GEMMA.is_complete(&after, body));
        assert!(GEMMA.is_refused(&after, &whole));
    }
}

#[test]
fn a_budget_of_thought_closes_it() {
    let budget = |budget| Answer {
        thinking: Thinking::Allowed {
            budget: Some(budget),
        },
        ..Answer::default()
    };
    let run = |answer: &Answer<'_>| {
        let mut constraint = GEMMA.start(answer);
        let mut taken = Vec::new();
        if answer.start == Start::Fresh {
            constraint.accept(100);
            taken.push(100);
        }
        for _ in 0..12 {
            let token = constraint.forced().unwrap_or(818);
            let mut mask = GEMMA.mask();
            allowed(constraint.as_mut(), &mut mask);
            assert!(mask.allows(token));
            constraint.accept(token);
            taken.push(token);
        }
        GEMMA.show(&taken)
    };
    let rest = |n| "The".repeat(n);
    let thought = format!("<|channel>thought\n{}\n<channel|>", rest(3));
    assert_eq!(run(&budget(3)), format!("{thought}{}", rest(5)));
    let empty = "<|channel>thought\n\n<channel|>";
    assert_eq!(run(&budget(0)), format!("{empty}{}", rest(8)));
    let inside = Answer {
        start: Start::InThought,
        ..budget(2)
    };
    assert_eq!(run(&inside), format!("{}\n<channel|>{}", rest(2), rest(8)));
    let json = Answer {
        format: Some(Format::JsonObject),
        ..budget(1)
    };
    let mut constraint = GEMMA.start(&json);
    constraint.accept(100);
    let mut mask = GEMMA.mask();
    while let Some(token) = constraint.forced() {
        constraint.accept(token);
    }
    constraint.accept(818);
    assert_eq!(constraint.forced(), Some(107));
    constraint.accept(107);
    constraint.accept(101);
    allowed(constraint.as_mut(), &mut mask);
    let next: Vec<_> = (0..262_144).filter(|id| mask.allows(*id)).collect();
    assert!(!next.is_empty());
    for id in next {
        assert!(GEMMA.show(&[id]).starts_with('{'), "the format begins");
    }
}

#[test]
fn dates_and_times_are_those_of_the_calendar() {
    let of = |format: &str| json!({"type": "string", "format": format});
    for (format, text, wanted) in [
        ("time", "23:59:59Z", true),
        ("time", "10:20:60Z", false),
        ("date", "2024-02-29", true),
        ("date", "2000-02-29", true),
        ("date", "2023-02-29", false),
        ("date", "1900-02-29", false),
        ("date", "2023-12-31", true),
        ("date-time", "2024-02-29T10:20:00.5+01:00", true),
        ("date-time", "2024-02-29T10:20:60+01:00", false),
        ("date-time", "2025-02-29T10:20:00+01:00", false),
    ] {
        // Also within others.
        let list =
            json!({"type": "array", "prefixItems": [{"anyOf": [of(format)]}], "items": false});
        for (answer, text) in [
            (schema(of(format)), format!("\"{text}\"")),
            (schema(list), format!("[\"{text}\"]")),
        ] {
            assert_eq!(GEMMA.is_complete(&answer, &text), wanted, "{text}");
        }
    }
    let parameters =
        json!({"type": "object", "properties": {"time": of("time")}, "required": ["time"]});
    let tools = [tool("at", parameters)];
    let answer = with_tools(&tools, ToolChoice::Required);
    for (second, wanted) in [("59", true), ("60", false)] {
        let call = format!("<|tool_call>call:at{{time:<|\"|>10:20:{second}Z<|\"|>}}<tool_call|>");
        assert_eq!(GEMMA.is_complete(&answer, &call), wanted, "{call}");
    }
}

#[test]
fn schemas_hold_with_one_space_after_separators() {
    let answer = schema(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name"],
        "additionalProperties": false,
    }));
    for (text, wanted) in [
        (r#"{"name": "x", "tags": ["a", "b"]}"#, true),
        (r#"{"name": "\"\n"}"#, true),
        (r#"{"name":"x"}"#, false),
        (r#"{"name": "x","tags": []}"#, false),
        (r#"{"tags": []}"#, false),
        (r#"{"name": "x", "tags": ["c"]}"#, false),
        (r#"{"name": "x", "tags": ["a", "a", "a"]}"#, false),
        (r#"{"name": "x", "more": 1}"#, false),
        ("```json\n{\"name\": \"x\"}", false),
        (r#"{"name": "x"} "#, false),
    ] {
        assert_eq!(GEMMA.is_complete(&answer, text), wanted, "{text}");
    }
    let flexible = schema(json!({"x-guidance": {"whitespace_flexible": true}, "type": "array"}));
    assert!(GEMMA.is_complete(&flexible, "[ 1 ,\n2]"));
    let object = format(Format::JsonObject);
    assert!(GEMMA.is_complete(&object, r#"{"a": [1, {"b": null}]}"#));
    assert!(GEMMA.is_refused(&object, "[1]"));
}

#[test]
fn a_schema_and_tools_leave_the_choice_to_the_model() {
    let tools = weather();
    let answer = Answer {
        format: Some(Format::JsonObject),
        ..with_tools(&tools, ToolChoice::Auto)
    };
    assert!(GEMMA.is_complete(&answer, r#"{"a": 1}"#));
    assert!(GEMMA.is_complete(&answer, &format!("{CALL}{CALL}")));
    assert!(GEMMA.is_refused(&answer, &format!("{{\"a\": 1}}{CALL}")));
    assert!(GEMMA.is_refused(&answer, "Text"));
}

#[test]
fn choices_expressions_and_grammars_hold() {
    let choice = format(Format::Choice(vec![
        "yes".into(),
        "yes, sir".into(),
        "\"no\"\n".into(),
    ]));
    for (text, wanted) in [
        ("yes", Followed::Complete),
        ("yes, sir", Followed::Complete),
        ("yes,", Followed::Incomplete),
        ("\"no\"\n", Followed::Complete),
    ] {
        assert_eq!(GEMMA.follow(&choice, text), wanted, "{text}");
    }
    assert!(GEMMA.is_refused(&choice, "no"));

    let regex = format(Format::Regex(r"^\d{3}-(a|b)/[^x]+$".into()));
    assert!(GEMMA.is_complete(&regex, "123-a/yy"));
    assert!(GEMMA.is_refused(&regex, "12-a/yy"));
    assert!(GEMMA.is_refused(&regex, "123-a/yx"));

    let lark = format(Format::Lark("start: \"[\" start* \"]\"".into()));
    assert!(GEMMA.is_complete(&lark, "[[][[]]]"));
    assert_eq!(GEMMA.follow(&lark, "[[]"), Followed::Incomplete);
    assert!(GEMMA.is_refused(&lark, "[]]"));
}

#[test]
fn gbnf_means_what_it_means_to_llama_cpp() {
    let json = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"#;
    let answer = format(Format::Gbnf(json.into()));
    for (text, wanted) in [
        ("{}", true),
        (
            "{\"a\": [1, -2.5e3, \"x\\n\", null], \"b\": {\"c\": true}}",
            true,
        ),
        ("{\"a\":1}", true),
        ("[]", false),
        ("{\"a\" 1}", false),
        ("{\"a\": 01}", false),
        ("{\"a\": tru}", false),
    ] {
        assert_eq!(GEMMA.is_complete(&answer, text), wanted, "{text}");
    }
    // Lexemes are as long as they can be, so a sequence must not be cut up into them.
    let backs_off = format(Format::Gbnf("root ::= [a-z]* \"a\"".into()));
    assert!(GEMMA.is_complete(&backs_off, "banana"));
    assert_eq!(GEMMA.follow(&backs_off, "banan"), Followed::Incomplete);
    let chess = format(Format::Gbnf(
        "root ::= \"1. \" move \" \" move \"\\n\" ([1-9] [0-9]? \". \" move \" \" move \"\\n\")+\nmove ::= (pawn | nonpawn | castle) [+#]?\nnonpawn ::= [NBKQR] [a-h]? [1-8]? \"x\"? [a-h] [1-8]\npawn ::= ([a-h] \"x\")? [a-h] [1-8] (\"=\" [NBKQR])?\ncastle ::= \"O-O\" \"-O\"?".into(),
    ));
    assert!(GEMMA.is_complete(&chess, "1. e4 e5\n2. Nf3 Nc6\n3. O-O-O Qxa7+\n"));
    assert!(GEMMA.is_refused(&chess, "1. e4 e9"));
    let odd = format(Format::Gbnf(
        "root ::= ((\"a\"*)? \"b\"{0,0})* \"c\"{2} | \"(\" root \")\"".into(),
    ));
    assert!(GEMMA.is_complete(&odd, "((aaacc))"));
    assert_eq!(GEMMA.follow(&odd, "((aaac"), Followed::Incomplete);
    assert!(GEMMA.is_refused(&odd, "bcc"));
}

#[test]
fn a_complete_answer_forces_its_end() {
    let stop = |answer: &Answer<'_>, text: &str| {
        let mut constraint = GEMMA.start(answer);
        for id in GEMMA.encode(text) {
            constraint.accept(id);
        }
        constraint.forced()
    };
    let tools = weather();
    assert_eq!(stop(&format(Format::JsonObject), "{}"), Some(106));
    let named = with_tools(&tools, ToolChoice::Named("get_weather".into()));
    assert_eq!(stop(&named, CALL), Some(50));
    let mut several = GEMMA.start(&with_tools(&tools, ToolChoice::Required));
    GEMMA
        .encode(CALL)
        .into_iter()
        .for_each(|id| several.accept(id));
    let mut mask = GEMMA.mask();
    allowed(several.as_mut(), &mut mask);
    let ids: Vec<_> = (0..262_144).filter(|id| mask.allows(*id)).collect();
    assert_eq!(ids, [1, 48, 50, 106]);
    let mut number = GEMMA.start(&schema(json!({"type": "integer"})));
    number.accept(GEMMA.encode("1")[0]);
    allowed(number.as_mut(), &mut mask);
    let stops = [1, 50, 106].map(|stop| mask.allows(stop));
    assert_eq!(stops, [true, false, true], "no results are waited for");
}

#[test]
fn what_is_certain_is_forced() {
    let tools = [tool(
        "get_weather",
        json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
    )];
    let mut constraint = GEMMA.start(&with_tools(&tools, ToolChoice::Required));
    let mut forced = Vec::new();
    while let Some(id) = constraint.forced() {
        forced.push(id);
        constraint.accept(id);
    }
    let start = "<|tool_call>call:get_weather{city:<|\"|>";
    assert_eq!(forced, GEMMA.encode(start), "as the tokenizer writes it");
    constraint.accept(50429);
    constraint.accept(52);
    let mut end = Vec::new();
    while let Some(id) = constraint.forced() {
        end.push(id);
        if id == 50 {
            break;
        }
        constraint.accept(id);
    }
    assert_eq!(GEMMA.show(&end), "}<tool_call|>");
}

#[test]
fn a_fork_goes_its_own_way() {
    let answer = schema(json!({"enum": ["apple", "apricot", "banana"]}));
    let mut constraint = GEMMA.start(&answer);
    for id in GEMMA.encode("\"ap") {
        constraint.accept(id);
    }
    let mut fork = constraint.fork();
    for id in GEMMA.encode("ri") {
        fork.accept(id);
    }
    let (mut own, mut other) = (GEMMA.mask(), GEMMA.mask());
    allowed(constraint.as_mut(), &mut own);
    allowed(fork.as_mut(), &mut other);
    let p = GEMMA.encode("p")[0];
    assert!(own.allows(p) && !other.allows(p));
}

#[test]
fn nothing_is_constrained_for_nothing() {
    let compile = |answer: &Answer<'_>| GEMMA.grammars.compile(answer).unwrap();
    assert!(compile(&Answer::default()).is_none());
    let thinking = Answer {
        thinking: THINKING,
        start: Start::InThought,
        ..Answer::default()
    };
    assert!(compile(&thinking).is_none());
    assert!(
        compile(&with_tools(&[], ToolChoice::Auto)).is_some(),
        "marks of calls are masked"
    );
}

#[test]
fn what_cannot_be_had_is_refused_with_its_place() {
    let refused = |answer: &Answer<'_>| GEMMA.grammars.compile(answer).unwrap_err().to_string();
    let not = json!({"properties": {"a": {"items": {"type": "string", "not": {"const": "x"}}}}});
    let error = refused(&schema(not.clone()));
    assert!(error.contains("`not` at `#/properties/a/items`"), "{error}");
    let look = json!({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}});
    let error = refused(&schema(look));
    assert!(
        error.contains("(?=a)b") && error.contains("#/properties/a"),
        "{error}"
    );
    let one = json!({"properties": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}});
    let error = refused(&schema(one.clone()));
    assert!(error.contains("`oneOf` at `#/properties/a`"), "{error}");
    let error = refused(&schema(
        json!({"type": "integer", "minimum": 3, "maximum": 2}),
    ));
    assert!(error.contains("schema cannot be used"), "{error}");
    for (answer, word) in [
        (format(Format::Regex("a(".into())), "regular expression"),
        (format(Format::Regex("(?=a)".into())), "regular expression"),
        (format(Format::Choice(vec![])), "choice"),
        (format(Format::Lark("start: missing".into())), "missing"),
        (format(Format::Gbnf("root ::= [".into())), "line 1"),
    ] {
        let error = refused(&answer);
        assert!(error.contains(word), "{error}");
    }

    let lenient = |schema| {
        let strict = false;
        let answer = format(Format::JsonSchema { schema, strict });
        GEMMA.grammars.compile(&answer).unwrap().unwrap().ignored
    };
    assert_eq!(lenient(not), ["`not` at `#/properties/a/items`"]);
    assert!(lenient(one)[0].contains("oneOf"));
    let look = json!({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}});
    assert_eq!(lenient(look), ["`pattern: (?=a)b` at `#/properties/a`"]);
    assert!(lenient(json!({"type": "string"})).is_empty());

    let tools = weather();
    let unknown = with_tools(&tools, ToolChoice::Named("x".into()));
    let error = GEMMA.grammars.compile(&unknown).unwrap_err();
    assert_eq!(error, GrammarError::UnknownTool { name: "x".into() });
    let none = GEMMA
        .grammars
        .compile(&with_tools(&[], ToolChoice::Required));
    assert_eq!(none.unwrap_err(), GrammarError::NoTools);
    for (name, parameters) in [
        ("", json!({})),
        ("a{b", json!({})),
        (" a", json!({})),
        ("a", json!({"type": "string"})),
        ("a", json!(3)),
    ] {
        let tools = [tool(name, parameters)];
        let error = refused(&with_tools(&tools, ToolChoice::Auto));
        assert!(error.contains("cannot be called"), "{error}");
    }
}

#[test]
fn prompts_tell_where_they_leave_off() {
    let start = |text: &str| Start::after(&GEMMA.tokenizer, &GEMMA.encode(text));
    for (text, wanted) in [
        ("<bos><|turn>user\nHi<turn|>\n<|turn>model\n", Start::Fresh),
        (
            "<|turn>model\n<|channel>thought\n<channel|>",
            Start::AfterThought,
        ),
        ("<|turn>model\n<|channel>thought\n", Start::InThought),
        ("<|turn>model\nIt is", Start::AfterThought),
        (
            "<|turn>model\n<|channel>thought\nx<channel|><|tool_call>call:f{}<tool_call|><|tool_response>response:f{value:1}<tool_response|>",
            Start::Fresh,
        ),
        ("plain", Start::Fresh),
    ] {
        assert_eq!(start(text), wanted, "{text}");
    }
}
