use std::sync::Arc;

use expect_test::expect;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{
    ChatTemplate, RenderOptions, Specials,
    test_data::{DEMO, DEMO_TOKENIZER, GEMMA},
};

fn tools() -> Vec<Tool> {
    ["f", "g", "get_weather"]
        .map(|name| serde_json::from_value(json!({"name": name})).unwrap())
        .to_vec()
}

fn parser() -> PartsParser {
    PartsParser::new(Arc::clone(GEMMA.vocab()), &tools())
}

fn read(mut parser: PartsParser, ids: &[TokenId]) -> Reply {
    let streaming = parser.clone();
    let mut parts = Vec::new();
    for id in ids {
        parser.push(*id, &mut parts);
    }
    parser.finish(&mut parts);
    let mut reply = Reply::default();
    reply.extend(parts);
    assert_eq!(parser.has_called(), !reply.tool_calls.is_empty());
    check_pieces(streaming, ids, &reply);
    reply
}

/// Pieces of calls add up to the calls, and change nothing else of an answer.
fn check_pieces(mut parser: PartsParser, ids: &[TokenId], whole: &Reply) {
    let begun_by_the_prompt = matches!(parser.state, State::Call(_));
    parser.stream_calls();
    let mut parts = Vec::new();
    for id in ids {
        parser.push(*id, &mut parts);
    }
    parser.finish(&mut parts);
    let mut reply = Reply::default();
    let mut open: Option<(String, String)> = None;
    for part in parts {
        match &part {
            Part::CallStarted(name) => {
                assert_eq!(open.replace((name.clone(), String::new())), None);
            }
            Part::CallArguments(json) => {
                open.as_mut().expect("a call has begun").1.push_str(json);
            }
            Part::ToolCall(call) => match open.take() {
                Some((name, json)) => {
                    assert_eq!(name, call.name);
                    let read = crate::chat::exact::from_text(&json).expect(&json);
                    assert_eq!(read, call.arguments, "{json}");
                }
                None => assert!(begun_by_the_prompt, "{call:?} had no pieces"),
            },
            Part::InvalidCall(_) => open = None,
            Part::Content(_) | Part::Thinking(_) => assert_eq!(open, None),
        }
        reply.add(part);
    }
    assert_eq!(reply, *whole);
}

fn reply(text: &str) -> Reply {
    read(parser(), &GEMMA.encode(text, Specials::Parse))
}

fn content(text: &str) -> Reply {
    Reply {
        content: text.to_owned(),
        ..Reply::default()
    }
}

fn thought(thinking: &str, text: &str) -> Reply {
    Reply {
        thinking: thinking.to_owned(),
        ..content(text)
    }
}

/// The arguments of the one call in a sound answer.
fn arguments(text: &str) -> Value {
    let reply = reply(&format!("<|tool_call>call:f{text}<tool_call|>"));
    assert_eq!(reply.invalid_calls, []);
    assert_eq!(reply.tool_calls.len(), 1);
    reply.tool_calls[0].arguments.clone()
}

#[test]
fn plain_text_is_content() {
    assert_eq!(reply("Hello, world!"), content("Hello, world!"));
    assert_eq!(reply(" a\n\nb "), content(" a\n\nb "));
    assert_eq!(reply(""), content(""));
}

#[test]
fn thoughts_are_told_from_content() {
    assert_eq!(
        reply("<|channel>thought\nhm, \nso\n<channel|>Yes."),
        thought("hm, \nso", "Yes.")
    );
    assert_eq!(reply("<|channel>thought\n<channel|>Yes."), content("Yes."));
    assert_eq!(reply("<|channel>thought<channel|>Yes."), content("Yes."));
    assert_eq!(reply("<|channel><channel|>Yes."), content("Yes."));
    assert_eq!(reply("Yes.<|channel>thought\n<channel|>"), content("Yes."));
    assert_eq!(reply("Yes.<channel|>"), content("Yes."));
    assert_eq!(
        reply("Yes.<|channel>thought\n<channel|><channel|>"),
        content("Yes.")
    );
    assert_eq!(
        reply("<|channel><|channel>thought\nhm<channel|>Yes."),
        thought("hm", "Yes.")
    );
    assert_eq!(
        reply("<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d"),
        thought("a\nc", "bd")
    );
    assert_eq!(
        reply("<|channel>thought\na<|channel>thought\nb<channel|>c"),
        thought("a\nb", "c")
    );
}

#[test]
fn a_repeated_turn_header_is_skipped() {
    assert_eq!(reply("<|turn>model\nHi"), content("Hi"));
    assert_eq!(
        reply("<|turn>model\n<|channel>thought\nx<channel|>Hi"),
        thought("x", "Hi")
    );
    assert_eq!(reply("<|turn>user\nHi"), content("user\nHi"));
    assert_eq!(reply("<|turn>model"), content(""));
}

#[test]
fn a_header_that_is_cut_short_is_text() {
    assert_eq!(reply("a<|turn>mo"), content("amo"));
    assert_eq!(
        reply("<|turn>mo<|channel>thought\nhm<channel|>b"),
        thought("hm", "mob")
    );
    assert_eq!(reply("<|channel>tho<channel|>b"), content("thob"));
    assert_eq!(reply("<|channel>tho"), content("tho"));
}

#[test]
fn values_in_pythons_spelling_are_read() {
    assert_eq!(
        arguments("{a:None,b:True,c:[False,null],d:2.9393722140683574}"),
        json!({"a": null, "b": true, "c": [false, null], "d": 2.9393722140683574})
    );
}

#[test]
fn integers_beyond_64_bits_keep_every_digit() {
    let large =
        "{a:12345678901234567890123,b:[-99999999999999999999,1.5],<|\"|>c<|\"|>:<|\"|>\"x\"<|\"|>}";
    assert_eq!(
        arguments(large),
        Value::from(r#"{"a":12345678901234567890123,"b":[-99999999999999999999,1.5],"c":"\"x\""}"#)
    );
    let longest = "9".repeat(400);
    assert_eq!(
        arguments(&format!("{{a:{longest}}}")),
        Value::from(format!(r#"{{"a":{longest}}}"#))
    );
    // The largest that a value holds.
    assert_eq!(
        arguments("{a:18446744073709551615,b:-9223372036854775808}"),
        json!({"a": u64::MAX, "b": i64::MIN})
    );
}

#[test]
fn unknown_channels_are_shown() {
    assert_eq!(
        reply("<|channel>final\nHi<channel|> there"),
        content("final\nHi there")
    );
}

#[test]
fn nothing_is_read_past_a_stop_token() {
    for stop in ["<turn|>", "<eos>", "<|tool_response>"] {
        assert_eq!(reply(&format!("Hi{stop}more")), content("Hi"));
    }
}

#[test]
fn truncated_answers_end_cleanly() {
    assert_eq!(reply("<|channel>thought\nhm, "), thought("hm,", ""));
    assert_eq!(reply("<|channel>thou"), content("thou"));
    assert_eq!(reply("<|channel>"), content(""));
    let cut = read(
        parser(),
        &[
            GEMMA.vocab().byte_token(0xf0),
            GEMMA.vocab().byte_token(0x9f),
        ],
    );
    assert_eq!(cut, content("\u{fffd}"));
}

#[test]
fn calls_come_with_their_arguments_as_json() {
    assert_eq!(arguments("{}"), json!({}));
    assert_eq!(arguments("{ }"), json!({}));
    assert_eq!(
        arguments("{city:<|\"|>Paris<|\"|>,days:2}"),
        json!({"city": "Paris", "days": 2})
    );
    assert_eq!(
        arguments("{a:-1,b:2.5,c:-3e-2,d:1E+3,e:0}"),
        json!({"a": -1, "b": 2.5, "c": -0.03, "d": 1000.0, "e": 0})
    );
    assert_eq!(
        arguments("{a:true,b:false,c:null}"),
        json!({"a": true, "b": false, "c": null})
    );
    assert_eq!(
        arguments("{a:[],b:{},c:[[1],{x:{y:[]}}]}"),
        json!({"a": [], "b": {}, "c": [[1], {"x": {"y": []}}]})
    );
    assert_eq!(
        arguments("{ a : 1 ,\n b : [ 1 , 2 ] }\n"),
        json!({"a": 1, "b": [1, 2]})
    );
    assert_eq!(
        arguments("{<|\"|>a b:}<|\"|>:1,\"c\\n\":2,d-e.f:3}"),
        json!({"a b:}": 1, "c\n": 2, "d-e.f": 3})
    );
    assert_eq!(
        arguments("{a:\"plain \\\"json\\\"\",b:\"two\nlines\"}"),
        json!({"a": "plain \"json\"", "b": "two\nlines"})
    );
}

#[test]
fn pieces_of_a_call_come_as_soon_as_they_are_certain() {
    let mut parser = parser();
    parser.stream_calls();
    let text = "<|tool_call>call:f{text:<|\"|>one \"two\"<|\"|>,n: 12 ,deep:[{},True]}<tool_call|>";
    let mut seen = Vec::new();
    for id in GEMMA.encode(text, Specials::Parse) {
        let mut parts = Vec::new();
        parser.push(id, &mut parts);
        seen.extend(parts.into_iter().map(|part| match part {
            Part::CallStarted(name) => format!("start {name}"),
            Part::CallArguments(json) => json,
            Part::ToolCall(call) => format!("end {}", call.arguments),
            other => panic!("{other:?}"),
        }));
    }
    expect![[r#"
        [
            "start f",
            "{",
            "\"text\":",
            "\"",
            "one",
            " \\\"",
            "two",
            "\\\"",
            "\"",
            ",",
            "\"n\":",
            "12,",
            "\"deep\":[",
            "{},",
            "true]}",
            "end {\"text\":\"one \\\"two\\\"\",\"n\":12,\"deep\":[{},true]}",
        ]
    "#]]
    .assert_debug_eq(&seen);
}

#[test]
fn strings_hold_anything_but_their_own_mark() {
    let code = "fn main() {\n\tlet a = \"x\\n\"; // }, ] : `tick` 'q' call:f{}\n}\n\u{1f642}";
    assert_eq!(
        arguments(&format!("{{code:<|\"|>{code}<|\"|>}}")),
        json!({"code": code})
    );
    assert_eq!(
        arguments("{a:<|\"|><|\"|>,b:[<|\"|> <|\"|>]}"),
        json!({"a": "", "b": [" "]})
    );
}

#[test]
fn calls_stand_among_text_and_thoughts() {
    let answer = reply(
        "<|channel>thought\nlook\n<channel|>Let me see.<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>ok<|tool_response>",
    );
    assert_eq!(
        (&*answer.thinking, &*answer.content),
        ("look", "Let me see.ok")
    );
    let names: Vec<_> = answer.tool_calls.iter().map(|call| &*call.name).collect();
    assert_eq!(names, ["f", "g"]);
}

#[test]
fn a_whole_call_counts_without_its_end_mark() {
    for end in [
        "",
        "<|tool_response>",
        "<turn|>",
        "<|tool_call>call:f{}<tool_call|>",
    ] {
        let answer = reply(&format!("<|tool_call>call:g{{a:1}}{end}"));
        assert_eq!(answer.tool_calls[0].name, "g", "{end}");
        assert_eq!(answer.invalid_calls, [], "{end}");
    }
}

#[test]
fn calls_that_are_none_come_out_raw_with_the_reason() {
    for (raw, expected) in [
        (
            "",
            expect![
                "a tool call begins with `call:`, the name of the tool and `{`; this one with ``"
            ],
        ),
        (
            "BEGIN_ARG x",
            expect![
                "a tool call begins with `call:`, the name of the tool and `{`; this one with `BEGIN_ARG x`"
            ],
        ),
        (
            "call:{}",
            expect![
                "a tool call begins with `call:`, the name of the tool and `{`; this one with `call:{}`"
            ],
        ),
        ("call:h{}", expect!["there is no tool named `h`"]),
        (
            "call:f{a:1",
            expect!["expected `,` or `}` in the arguments of `f`, found the end of the call"],
        ),
        (
            "call:f{a:}",
            expect!["expected a value in the arguments of `f`, found `}`"],
        ),
        (
            "call:f{a:Paris}",
            expect![
                "`Paris` in the arguments of `f` is no number, and neither true, false nor null"
            ],
        ),
        (
            "call:f{a:1e999}",
            expect![
                "`1e999` in the arguments of `f` is no number, and neither true, false nor null"
            ],
        ),
        (
            "call:f{a:01}",
            expect!["`01` in the arguments of `f` is no number, and neither true, false nor null"],
        ),
        (
            "call:f{a:<|\"|>cut",
            expect![
                "expected the end of a string in the arguments of `f`, found the end of the call"
            ],
        ),
        (
            "call:f{a:\"cut}",
            expect!["expected a string with an end in the arguments of `f`, found `\"cut}`"],
        ),
        (
            "call:f{:1}",
            expect!["expected a key in the arguments of `f`, found `:1}`"],
        ),
        (
            "call:f{,}",
            expect!["expected `:` in the arguments of `f`, found `}`"],
        ),
        (
            "call:f{a<|\"|>b<|\"|>}",
            expect!["expected `:` in the arguments of `f`, found the beginning of a string"],
        ),
        (
            "call:f{}{}",
            expect!["expected the end in the arguments of `f`, found `{}`"],
        ),
        (
            "call:f{a:1}<|channel>x",
            expect!["expected the end in the arguments of `f`, found `<|channel>x`"],
        ),
    ] {
        let raw = format!("<|tool_call>{raw}<tool_call|>");
        let answer = reply(&format!("a{raw}b"));
        assert_eq!(answer.tool_calls, []);
        assert_eq!(answer.content, "ab");
        assert_eq!(answer.invalid_calls[0].raw, raw);
        expected.assert_eq(&answer.invalid_calls[0].error.to_string());
    }
    let deep = "[".repeat(100_000);
    let error = &reply(&format!("<|tool_call>call:f{{a:{deep}")).invalid_calls[0].error;
    assert_eq!(
        *error,
        CallError::TooDeep {
            tool: "f".to_owned()
        }
    );
}

#[test]
fn call_marks_are_text_where_no_tools_were_offered() {
    let text = "Like <|tool_call>call:f{a:<|\"|>x<|\"|>}<tool_call|> this";
    let parser = PartsParser::new(Arc::clone(GEMMA.vocab()), &[]);
    assert_eq!(
        read(parser, &GEMMA.encode(text, Specials::Parse)),
        content(text)
    );
}

#[test]
fn look_alikes_of_ordinary_tokens_are_content() {
    let text = "<|channel>thought\nno<channel|><|tool_call>call:f{}<tool_call|><turn|> <|\"|>";
    assert_eq!(
        read(parser(), &GEMMA.encode(text, Specials::Ignore)),
        content(text)
    );
}

#[test]
fn answers_start_in_the_state_the_prompt_leaves() {
    let after = |prompt: &str, answer: &str| {
        let mut parser = parser();
        parser.start_after(&GEMMA.encode(prompt, Specials::Parse));
        read(parser, &GEMMA.encode(answer, Specials::Parse))
    };
    let turn = "<bos><|turn>user\n<|channel>x<turn|>\n<|turn>model\n";
    assert_eq!(after(turn, "Hi"), content("Hi"));
    assert_eq!(
        after(&format!("{turn}<|channel>thought\n<channel|>"), "Hi"),
        content("Hi")
    );
    assert_eq!(
        after(&format!("{turn}<|channel>thought\n"), "hm<channel|>Hi"),
        thought("hm", "Hi")
    );
    assert_eq!(
        after(&format!("{turn}<|channel>"), "thought\nhm<channel|>Hi"),
        thought("hm", "Hi")
    );
    let called = "<|tool_call>call:f{}<tool_call|><|tool_response>response:f{value:<|\"|>1<|\"|>}<tool_response|>";
    assert_eq!(after(&format!("{turn}{called}"), "Hi"), content("Hi"));
    assert_eq!(after("no turns", "Hi"), content("Hi"));
    assert_eq!(after("", "Hi"), content("Hi"));
}

#[test]
fn the_demo_models_reference_answers_are_read() {
    let golden: Value =
        serde_json::from_str(include_str!("../../../../assets/golden.json")).unwrap();
    let template = ChatTemplate::from_metadata(DEMO.metadata(), DEMO_TOKENIZER.vocab()).unwrap();
    let answer = |name: &str| {
        let case = golden["cases"]
            .as_array()
            .unwrap()
            .iter()
            .find(|case| case["name"] == name)
            .unwrap();
        let ids: Vec<TokenId> = serde_json::from_value(case["greedy_ids"].clone()).unwrap();
        let mut parser = PartsParser::new(Arc::clone(DEMO_TOKENIZER.vocab()), &tools());
        let messages = [Message::user("x")];
        let prompt = template
            .render(&messages, &tools(), &RenderOptions::default())
            .unwrap();
        parser.start_after(&DEMO_TOKENIZER.encode_rendered(&prompt));
        read(parser, &ids)
    };
    assert_eq!(
        answer("chat-0"),
        content("Hello! How can I help you today?")
    );
    let thinking = answer("thinking");
    assert_eq!(thinking.content, "347 + 285 = 632.");
    assert!(
        thinking.thinking.starts_with("I add 347")
            && thinking.thinking.ends_with("The result is 632.")
    );
    let called = answer("tool-call");
    assert_eq!(called.tool_calls[0].name, "get_weather");
    assert_eq!(called.tool_calls[0].arguments, json!({"city": "Paris"}));
    let message = Message::from(called);
    assert_eq!(
        (message.role, message.tool_calls.len()),
        (Role::Assistant, 1)
    );
}

/// The same answer with all its ordinary text in byte tokens: the finest way a model can cut it.
fn in_bytes(ids: &[TokenId]) -> Vec<TokenId> {
    let vocab = GEMMA.vocab();
    ids.iter()
        .flat_map(|&id| {
            if vocab.is_special(id) {
                vec![id]
            } else {
                GEMMA
                    .decode(&[id])
                    .bytes()
                    .map(|byte| vocab.byte_token(byte))
                    .collect()
            }
        })
        .collect()
}

fn any_answer() -> impl Strategy<Value = String> {
    let pieces = proptest::sample::select(vec![
        "<|channel>",
        "thought\n",
        "thou",
        "ght",
        "<channel|>",
        "<|tool_call>",
        "call:",
        "f{",
        "a:",
        "1",
        "}",
        "<tool_call|>",
        "<|\"|>",
        "text",
        " ",
        "\n",
        "é🙂",
        "<|turn>",
        "model\n",
        "<pad>",
        "<turn|>",
        "[",
        "]",
        ",",
        "call:g{b:<|\"|>x\ny<|\"|>}",
    ]);
    proptest::collection::vec(pieces, 0..16).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn answers_do_not_depend_on_how_text_is_cut(text in any_answer()) {
        let ids = GEMMA.encode(&text, Specials::Parse);
        prop_assert_eq!(read(parser(), &ids), read(parser(), &in_bytes(&ids)));
    }

    #[test]
    fn ordinary_text_is_never_lost(text in any_answer()) {
        let ids = GEMMA.encode(&text, Specials::Ignore);
        prop_assert_eq!(read(parser(), &ids).content, text);
    }

    #[test]
    fn any_ids_are_read(ids in proptest::collection::vec(prop_oneof![0..110u32, 238..494u32, any::<u32>()], 0..40)) {
        read(parser(), &ids);
    }

    #[test]
    fn arguments_come_back_from_the_notation(text in "[^▁]{0,12}", number in -1e6..1e6f64, flag: bool) {
        // As the built-in template writes them.
        let written = format!("{{a:[<|\"|>{text}<|\"|>,{number}],b:{{c:{flag}}}}}");
        let mut ids = GEMMA.encode("<|tool_call>call:f", Specials::Parse);
        for (place, piece) in written.split("<|\"|>").enumerate() {
            ids.extend(GEMMA.vocab().marks().quote.filter(|_| place > 0));
            ids.extend(GEMMA.encode(piece, Specials::Ignore));
        }
        ids.extend(GEMMA.vocab().marks().call_end);
        let reply = read(parser(), &ids);
        let expected = json!({"a": [text, serde_json::from_str::<Value>(&number.to_string()).unwrap()], "b": {"c": flag}});
        prop_assert_eq!(&reply.tool_calls[0].arguments, &expected);
    }
}
