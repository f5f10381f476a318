//! Integers beyond 64 bits, from a conversation to the prompt.

use super::*;

#[test]
fn large_integers_are_integers_to_a_template() {
    let source = "{% set a = messages[0].tool_calls[0].function.arguments %}\
                  {{ a.n }} {{ a.n is number }} {{ a.n is string }} {{ a | tojson }} {{ a.n - 1 }}|\
                  {{ a.m }} {{ a.m is integer }} {{ a.m is string }}|{{ a.s }}";
    // The character that marks would have been taken first stands in the text.
    let text = format!(
        r#"{{"n": -12345678901234567890123, "s": "\ue00012345678901234567890", "m": {}}}"#,
        "7".repeat(60)
    );
    let large = with_calls("", vec![call("f", text.into())]);
    let rendered = template(source).render(&[large], &[], &RenderOptions::default());
    let n = "-12345678901234567890123";
    let m = "7".repeat(60);
    let s = "\u{e000}12345678901234567890";
    assert_eq!(
        rendered.unwrap().text(),
        format!(
            r#"{n} True False {{"n": {n}, "s": "{s}", "m": {m}}} -12345678901234567890124|{m} True False|{s}"#
        )
    );
}

#[test]
fn json_of_templates_has_every_digit() {
    let digits = "8".repeat(50);
    let list = format!(r#"[18446744073709551616, {{"a": {digits}}}, "\ue000", 1.5]"#);
    let rendered = template(
        "{% set l = fromjson(messages[0].content) %}{{ l | tojson }}|{{ l[1].a }}|{{ (l[1],)[0:] | tojson(indent=1) }}",
    )
    .render(&[Message::user(&*list)], &[], &RenderOptions::default());
    let written = list.replace(r"\ue000", "\u{e000}");
    let indented = format!("[\n {{\n  \"a\": {digits}\n }}\n]");
    assert_eq!(
        rendered.unwrap().text(),
        format!("{written}|{digits}|{indented}")
    );
}

#[test]
fn schemas_and_results_are_rendered_with_every_digit() {
    let schema = r#"{"type": "object", "properties": {"ids": {"type": "array", "items": {"type": "integer",
        "enum": [12345678901234567890123, 7], "minimum": -9223372036854775809}}}}"#;
    let tool = format!(r#"{{"name": "f", "description": "d", "parameters": {schema}}}"#);
    let tool: Tool = serde_json::from_str(&tool).unwrap();
    let digits = "3".repeat(45);
    let asked = format!(
        r#"{{"role": "assistant", "content": "", "tool_calls": [{{"name": "f", "arguments": {{}}}}],
            "tool_responses": [{{"name": "f", "response": {{"n": [{digits}], "s": "18446744073709551616"}}}}]}}"#
    );
    let messages = [
        Message::user("x"),
        serde_json::from_str(&asked).unwrap(),
        Message::user("y"),
    ];
    for source in [GEMMA_31B, GEMMA_31B_INTERLEAVED, FALLBACK] {
        let rendered = template(source).render(
            &messages,
            std::slice::from_ref(&tool),
            &RenderOptions::default(),
        );
        let rendered = rendered.unwrap();
        let text = rendered.text();
        for expected in [
            if source == FALLBACK {
                "enum:[12345678901234567890123,7],type"
            } else {
                "enum:[12345678901234567890123,7],minimum:-9223372036854775809"
            },
            &format!("response:f{{n:[{digits}],s:<|\"|>18446744073709551616<|\"|>}}"),
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }
}
